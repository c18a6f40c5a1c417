"""How long planning takes, stage by stage, and how it grows with the number of layers; beside torch's own partitioner.

A llama-style network of N blocks is traced (nothing runs), its joint graph is planned for half of plain Inductor's
peak, and each stage is timed by the CPU time of this process, so other work on the machine does not count. The rival
cuts a copy of the same joint graph, into two modules: that part is not in the figures of remat.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click
import torch
from torch import fx
from torch._dynamo.exc import BackendCompilerFailed
from torch._functorch import config as functorch_config
from torch._functorch import partitioners

from benchmarks.networks import LanguageModel, LlamaBlock
from remat_compiler import torch_private
from remat_compiler.partitioner import without_collections
from remat_passes.cost import price
from remat_passes.device import BUILT_IN
from remat_passes.joint import capture
from remat_passes.legality import classify
from remat_passes.memory import MemoryModel
from remat_passes.schedule import schedule
from remat_passes.search import Search, cut_problem, inductor_candidate

BLOCKS = (16, 32, 64, 96)
RATIOS = (1.0, 0.5)  # torch's ``activation_memory_budget``
WIDTH, HEADS, GROUPS, VOCABULARY, BATCH, TOKENS = 256, 4, 2, 1024, 2, 1024  # those of the llama of benchmarks/peak
BUDGET = 0.5  # of plain Inductor's projected peak

T = TypeVar("T")


class TimedError(Exception):
    """Ends the compilation: everything is timed."""


class Timing(torch_private.CustomPartitionerFn):
    """Plans one joint graph and notes the seconds of each stage.

    It does so where a partitioner runs, within the compile: torch's own takes half as long behind it.
    """

    def __init__(self, ratios: Sequence[float]) -> None:
        self.ratios, self.seconds, self.num_values = ratios, dict[str, float](), 0

    def __call__(  # type: ignore[override]  # what AOTAutograd passes on, by name
        self,
        gm: fx.GraphModule,
        joint_inputs: Sequence[object],
        *,
        num_fwd_outputs: int,
        static_lifetime_input_indices: Sequence[int] | None = None,
        **keywords: Any,
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        static = list(static_lifetime_input_indices or [])
        with without_collections():  # the rivals too
            self._all(gm, num_fwd_outputs, static)
        raise TimedError

    def _all(self, gm: fx.GraphModule, num_fwd_outputs: int, static: list[int]) -> None:
        for ratio in self.ratios:
            copy = _copied(gm)
            with functorch_config.patch(activation_memory_budget=ratio):
                self._timed(f"torch, budget {ratio}", lambda copy=copy: _partitioned(copy, num_fwd_outputs, static))
        self._plan(gm, num_fwd_outputs, static)

    def _plan(self, gm: fx.GraphModule, num_fwd_outputs: int, static: list[int]) -> None:
        self._timed("prepare", lambda: torch_private.prepare_joint_module(gm))
        pinned = torch_private.pinned_to_backward(gm.graph)
        joint = self._timed("capture", lambda: capture(gm.graph, num_fwd_outputs, static, pinned))
        permissions = self._timed("classify", lambda: classify(joint))
        costs = self._timed("price", lambda: price(joint, BUILT_IN["h200"]))
        problem = self._timed("problem", lambda: cut_problem(joint, permissions, costs))
        model = MemoryModel(joint, fuses=True)
        names = self._timed("yardstick", lambda: torch_private.inductor_saved_names(gm, num_fwd_outputs, static))
        inductor = self._timed("candidate", lambda: inductor_candidate(joint, problem, model, names))
        budget = round(BUDGET * inductor.projection.peak_bytes)
        choice = self._timed("search", lambda: Search(joint, problem, model, inductor, costs.fixed_ps).choose(budget))
        unrolled = choice.chosen.unrolled
        graph = joint if unrolled is None else unrolled.joint
        self._timed("schedule", lambda: schedule(graph, choice.chosen.cut, early=not model.fuses))
        self.num_values = len(joint.values)

    def _timed(self, stage: str, run: Callable[[], T]) -> T:
        start = time.process_time()
        result = run()
        self.seconds[stage] = time.process_time() - start
        return result

    def uuid(self) -> str:
        return "never cached"


def _copied(gm: fx.GraphModule) -> fx.GraphModule:
    copy = torch_private.copy_of(gm)
    for node in copy.graph.nodes:
        node.meta = dict(node.meta)
    return copy


def _partitioned(gm: fx.GraphModule, num_fwd_outputs: int, static: list[int]) -> object:
    return partitioners.min_cut_rematerialization_partition(
        gm, (), num_fwd_outputs=num_fwd_outputs, static_lifetime_input_indices=static
    )


def timed(num_blocks: int, ratios: Sequence[float]) -> Timing:
    """Trace a network of that many blocks and time all stages."""
    torch.manual_seed(0)
    torch.compiler.reset()
    timing = Timing(ratios)

    def backend(module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        return torch_private.compile_with_aot_autograd(module, inputs, timing, lambda _graph: None)

    blocks: list[torch.nn.Module] = [LlamaBlock(WIDTH, HEADS, GROUPS) for _ in range(num_blocks)]
    model = LanguageModel(blocks, WIDTH, VOCABULARY, WIDTH // HEADS)
    tokens, target = torch.randint(VOCABULARY, (2, BATCH, TOKENS))
    try:
        torch.compile(model, backend=backend)(tokens, target)
    except BackendCompilerFailed as error:
        if not isinstance(error.inner_exception, TimedError):
            raise
    return timing


@click.command()
@click.option("--blocks", "sizes", multiple=True, type=int, default=BLOCKS, show_default=True, help="Network sizes.")
@click.option("--rivals/--no-rivals", default=True, show_default=True, help="Time torch's own partitioner too.")
def main(sizes: Sequence[int], rivals: bool) -> None:
    """Print the CPU seconds of each stage of planning for llama-style networks of several sizes."""
    timings = [timed(size, RATIOS if rivals else ()) for size in sizes]
    print(f"{'blocks':20s}" + "".join(f"{size:9d}" for size in sizes))
    print(f"{'values':20s}" + "".join(f"{timing.num_values:9d}" for timing in timings))
    for stage in timings[0].seconds:
        print(f"{stage:20s}" + "".join(f"{timing.seconds[stage]:9.3f}" for timing in timings))
    totals = [sum(s for stage, s in t.seconds.items() if not stage.startswith("torch")) for t in timings]
    print(f"{'all of remat':20s}" + "".join(f"{total:9.3f}" for total in totals))
    growth = (total / totals[0] / (size / sizes[0]) for total, size in zip(totals, sizes, strict=True))
    print(f"{'growth / linear':20s}" + "".join(f"{ratio:9.2f}" for ratio in growth))


if __name__ == "__main__":
    main()
