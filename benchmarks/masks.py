"""What a mask between forward and backward costs a CPU: as bool, and as the uint8 that remat hands over."""

from __future__ import annotations

from collections.abc import Callable

import torch

from benchmarks.harness import clear_gradients, interleaved_s, median_ratio, processor_s
from benchmarks.peak.models import MODELS
from benchmarks.report import Report, console_for_output, machine_notes, show

NUM_ROUNDS = 20
ELEMENTS = 2**19


def kernels() -> dict[str, tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]]:
    """Each kernel with its operands."""
    x = torch.randn(ELEMENTS)
    mask = x > 0
    packed = mask.to(torch.uint8)
    return {
        "x + 1": (lambda x: x + 1, (x,)),
        "write a bool": (lambda x: x > 0, (x,)),
        "write a uint8, through float": (lambda x: (x > 0).to(torch.float32).to(torch.uint8), (x,)),
        "read a bool": (lambda x, m: torch.where(m, x, 0.0), (x, mask)),
        "read a uint8, through float": (lambda x, m: torch.where(m.to(torch.float32) != 0, x, 0.0), (x, packed)),
        "draw and write a bool": (lambda x: torch.rand_like(x) > 0.1, (x,)),
        "draw and write a uint8, through float": (
            lambda x: (torch.rand_like(x) > 0.1).to(torch.float32).to(torch.uint8),
            (x,),
        ),
    }


def nanoseconds() -> list[tuple[str, float]]:
    """The least processor time of each kernel, per element."""
    found = []
    for name, (kernel, operands) in kernels().items():
        torch._dynamo.reset()
        call = torch.compile(kernel)

        def step(call: Callable[..., object] = call, operands: tuple[torch.Tensor, ...] = operands) -> object:
            return call(*operands)

        step()
        found.append((name, min(processor_s(step) for _ in range(NUM_ROUNDS)) * 1e9 / ELEMENTS))
    return found


def step_ratio() -> float:
    """The step of a small GPT with dropout compiled by remat, without a budget, to torch.compile's."""

    def compiled(backend: str) -> Callable[[], None]:
        torch._dynamo.reset()
        module, batch = MODELS["gpt-dropout"].make()
        call = torch.compile(module, backend=backend)

        def step() -> None:
            call(*batch).backward()
            clear_gradients(module)

        step()
        return step

    ours, theirs = interleaved_s([compiled("remat"), compiled("inductor")], NUM_ROUNDS, processor_s)
    return median_ratio(ours, theirs)


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    rows = tuple((name, f"{ns:.1f}") for name, ns in nanoseconds())
    notes = (f"GPT with dropout, step of remat to torch.compile's: {step_ratio():.3f}.", *machine_notes())
    show(Report("Masks on a CPU", ("kernel", "ns an element"), rows, notes), console_for_output())


if __name__ == "__main__":
    main()
