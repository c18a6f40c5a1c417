"""``remat plan``: a script is captured on paper, and planned for devices that are not there."""

from __future__ import annotations

import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

from remat_compiler import plans
from remat_compiler.cli import main
from remat_passes.candidates import RESOLUTION
from remat_passes.device import BUILT_IN

GIB = 2**30

MODEL = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self, width=512, blocks=3):
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(blocks)
        )
        self.head = nn.Linear(width, 16)

    def forward(self, x, targets):
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.head(x), targets)
"""

TRAIN = """
model = Net().cuda()
step = torch.compile(model, backend="remat")
optimizer = torch.optim.AdamW(model.parameters())
x, targets = torch.randn(65536, 512, device="cuda"), torch.randint(16, (65536,)).to("cuda:0")
for _ in range(3):
    loss = step(x, targets)
    loss.backward()
    optimizer.step()
    print("never reached", loss.item())
"""


@pytest.fixture(autouse=True)
def _as_found(fresh_compiler: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What running a script as ``__main__`` changes of this process is put back."""
    monkeypatch.delenv("REMAT_DEVICE_SPEC")
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def plan(folder: Path, text: str, *arguments: str, target: str = "train.py") -> Result:
    (folder / "train.py").write_text(textwrap.dedent(text), encoding="utf-8")
    return CliRunner().invoke(main, ["plan", *arguments, str(folder / target)], catch_exceptions=False)


def answers(result: Result) -> Any:
    assert result.exit_code in (0, 1), result.output
    return json.loads(result.stdout)["answers"]


def test_it_says_that_a_step_fits_and_what_limits_it(tmp_path: Path) -> None:
    result = plan(tmp_path, MODEL + TRAIN, "--device", "rtx4090")
    assert result.exit_code == 0
    assert "It fits: " in result.stdout
    assert " of 24.0 GiB, " in result.stdout
    assert "limited by" in result.stdout
    assert "AdamW" in result.stdout
    assert "never reached" not in result.output


def test_the_parts_of_an_answer_add_up(tmp_path: Path) -> None:
    (answer,) = answers(plan(tmp_path, MODEL + TRAIN, "--device", "rtx4090", "--format", "json"))
    (made,) = answer["plans"]
    assert answer["budget_bytes"] == answer["device_memory_bytes"] == 24 * GIB
    assert answer["peak_bytes"] == made["projected_peak_bytes"] + answer["reserve_bytes"]
    assert made["budget_bytes"] == answer["budget_bytes"] - answer["reserve_bytes"]
    assert answer["reserve_bytes"] >= 2 * made["gradient_bytes"] * 0.99
    longest = max(answer["arithmetic_us"], answer["traffic_us"], answer["launch_us"])
    assert (
        longest
        <= answer["step_us"]
        <= answer["arithmetic_us"]
        + answer["traffic_us"]
        + answer["launch_us"]
        + 1.1 * (made["recompute_us"] + answer["traffic_us"])
    )


def test_memory_is_counted_as_the_device_counts_it(tmp_path: Path) -> None:
    """CUDA's allocator hands out blocks of 512 bytes, and its kernels have none of the CPU's workspaces."""
    (answer,) = answers(plan(tmp_path, MODEL + TRAIN, "--device", "h200", "--format", "json"))
    assert answer["plans"][0]["baseline_bytes"] % 512 == 0
    assert answer["plans"][0]["projected_peak_bytes"] % 512 == 0


def test_parameters_are_never_materialised(tmp_path: Path) -> None:
    text = """
    import torch
    model = torch.nn.Linear(2**21, 2**20, device="cuda")  # 8 TiB
    step = torch.compile(lambda x: model(x).square().mean(), backend="remat")
    step(torch.randn(4, 2**21, device="cuda")).backward()
    """
    result = plan(tmp_path, text, "--device", "h200", "--format", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["num_parameters"] == 2**41 + 2**20
    assert not answers(result)[0]["fits"]


def test_a_step_that_does_not_fit_says_why_and_where_it_would(tmp_path: Path) -> None:
    result = plan(tmp_path, MODEL + TRAIN, "--device", "rtx4090", "--budget", "300MiB", "--microbatches", "1")
    assert result.exit_code == 1
    assert "It does not fit into 300.0 MiB: the smallest peak is " in result.stdout
    assert "of optimizer state are in any plan" in " ".join(result.stdout.split())
    assert "It would fit into: rtx4090 (24.0 GiB)" in result.stdout


def test_what_no_plan_can_change_is_told_at_once(tmp_path: Path) -> None:
    result = plan(tmp_path, MODEL + TRAIN, "--device", "rtx4090", "--budget", "64MiB")
    assert result.exit_code == 1
    said = " ".join(result.stdout.split())
    assert "It does not fit into 64.0 MiB, and no plan can change that" in said
    assert "of gradients and 48.1 MiB of optimizer state alone are" in said
    assert "More than that have: rtx4090 (24.0 GiB)" in said


def test_a_budget_above_the_device(tmp_path: Path) -> None:
    result = plan(tmp_path, MODEL + TRAIN, "--device", "rtx4090", "--budget", "48GiB")
    assert result.exit_code == 2
    assert "more than rtx4090 has, which is 24.0 GiB" in result.output


@pytest.mark.parametrize(
    "model",
    [
        'Net().to("cuda", torch.bfloat16)',
        "Net().to(device=torch.device('cuda'))",
        "Net().half().cuda(0)",
        "Net().to(0)",
    ],
)
def test_however_a_script_asks_for_the_gpu(tmp_path: Path, model: str) -> None:
    text = f"""
model = {model}
x = torch.randn(512, 512, dtype=model.head.weight.dtype).cuda()
torch.cuda.set_device(0)
torch.cuda.synchronize()
targets = torch.randint(16, (512,), device="cuda").pin_memory().cuda(non_blocking=True)

@torch.compile
def step(x, targets):
    noise = torch.zeros(512, device="cuda", dtype=x.dtype)
    return model(x.to("cuda") + noise, targets)

step(x, targets).backward()
"""
    assert plan(tmp_path, MODEL + text, "--device", "h200").exit_code == 0


def test_the_default_device_may_be_the_gpu(tmp_path: Path) -> None:
    text = """
with torch.device("cuda"):
    model = Net()
torch.set_default_device("cuda")
model.compile()
loss = model(torch.randn(512, 512), torch.randint(16, (512,)))
torch.set_default_device(None)
loss.backward()
"""
    assert plan(tmp_path, MODEL + text, "--device", "h200").exit_code == 0


def test_autocast_of_the_gpu_is_in_the_plan(tmp_path: Path) -> None:
    text = """
model = Net().cuda()
step = torch.compile(model)
with torch.autocast("cuda", dtype=torch.bfloat16):
    loss = step(torch.randn(4096, 512, device="cuda"), torch.randint(16, (4096,), device="cuda"))
torch.amp.GradScaler("cuda").scale(loss).backward()
"""
    (answer,) = answers(plan(tmp_path, MODEL + text, "--device", "h200", "--format", "json"))
    assert "bfloat16" in {value["dtype"] for value in answer["plans"][0]["values"]}


@pytest.mark.parametrize(("device", "is_fused"), [("h200", True), ("cpu", False)])
def test_attention_with_dropout_is_one_kernel_on_a_gpu(tmp_path: Path, device: str, is_fused: bool) -> None:
    text = """
import torch
project = torch.nn.Linear(64, 64)

@torch.compile
def step(x):
    q = project(x).view(2, 256, 4, 16).transpose(1, 2)
    return torch.nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1, is_causal=True).square().mean()

step(torch.randn(2, 256, 64)).backward()
"""
    (answer,) = answers(plan(tmp_path, text, "--device", device, "--format", "json"))
    has_scores = any(value["shape"][-2:] == [256, 256] for value in answer["plans"][0]["values"])
    assert has_scores != is_fused


def test_batches_may_come_from_a_loader_or_from_random_positions(tmp_path: Path) -> None:
    text = """
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(4096, 512), torch.randint(16, (4096,)))
loader = DataLoader(data, batch_size=256, shuffle=True, num_workers=2)
text = torch.randint(16, (1000,))
positions = torch.randint(900, (4,))
windows = torch.stack([text[i : i + 64] for i in positions]).view(-1)
assert int(windows.max()) < 16
model = Net()
step = torch.compile(model)
for x, targets in loader:
    step(x.to("cuda"), windows.cuda()).backward()
"""
    (answer,) = answers(plan(tmp_path, MODEL + text, "--device", "h200", "--format", "json"))
    assert answer["fits"]


STEP = """
def compiled():
    model = Net()
    torch.compile(model)(torch.randn(256, 512), torch.randint(16, (256,))).backward()

def given():
    return Net(), torch.randn(256, 512), torch.randint(16, (256,))

def plain():
    model = Net()
    loss = model(torch.randn(256, 512), torch.randint(16, (256,)))
    loss.backward()

def nothing():
    return 1

if __name__ == "__main__":
    raise SystemExit("run as a script")
"""


@pytest.mark.parametrize("name", ["compiled", "given", "plain"])
def test_a_function_may_make_the_step(tmp_path: Path, name: str) -> None:
    result = plan(tmp_path, MODEL + STEP, "--device", "h200", "--format", "json", target=f"train.py:{name}")
    (answer,) = answers(result)
    assert len(answer["plans"]) == 1
    assert json.loads(result.stdout)["num_parameters"] == 3 * (2 * 512 + 8 * 512**2 + 5 * 512) + 512 * 16 + 16


def test_a_function_that_is_not_there(tmp_path: Path) -> None:
    result = plan(tmp_path, MODEL + STEP, "--device", "h200", target="train.py:plian")
    assert result.exit_code == 2
    assert "has no function 'plian'. Did you mean 'plain'?" in result.output


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("print('nothing')", "ended without a training step"),
        ("raise SystemExit(3)", "ended with exit code 3"),
        (
            "for _ in range(10**9):\n    Net()(torch.randn(9, 512), torch.randint(16, (9,))).backward()",
            "compiles nothing of what it trains (train.py:",
        ),
        (
            "x = torch.randn(2000, 2000)\nscale = x.sum().item()",
            "train.py:19: scale = x.sum().item() needs what is in a tensor",
        ),
        (
            "step = torch.compile(lambda x: x[x > 0].sum())\nstep(torch.randn(999, 99, requires_grad=True)).backward()",
            "needs what is in a tensor",
        ),
        (
            "torch.compile(Net(), options={'memory_budgte': 1})(torch.randn(9, 512), torch.ones(9).long())",
            "memory_budget",
        ),
        (
            "torch.compile(Net(), options={'cost_model': 'measured'})(torch.randn(9, 512), torch.ones(9).long())",
            "on paper",
        ),
    ],
)
def test_scripts_that_cannot_be_planned(tmp_path: Path, text: str, said: str) -> None:
    result = plan(tmp_path, MODEL + text, "--device", "h200")
    assert result.exit_code == 1
    assert said in " ".join(result.output.split())


def test_a_script_that_fails_shows_its_traceback(tmp_path: Path) -> None:
    result = plan(tmp_path, MODEL + "\n1 / 0", "--device", "h200")
    assert result.exit_code == 1
    assert "ZeroDivisionError" in result.output
    assert "ended with an exception before its first training step" in result.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "rtx4091"], "Did you mean 'rtx4090'?"),
        (["--budget", "many"], "it is not a size"),
        (["--microbatches", "0"], "write a whole number above zero"),
        (["--device", "h100", "--device", "h200"], "--sweep compares them"),
        (["--sweep", "--budget", "8GiB", "--device", "h200"], "takes no --budget"),
    ],
)
def test_wrong_usage(tmp_path: Path, arguments: list[str], said: str) -> None:
    result = plan(tmp_path, "raise AssertionError", *arguments)
    assert result.exit_code == 2
    assert said in result.output


def test_a_sweep_over_budgets_goes_from_plain_inductor_to_the_smallest(tmp_path: Path) -> None:
    found = answers(plan(tmp_path, MODEL + TRAIN, "--device", "h200", "--sweep", "--format", "json"))
    assert len(found) > 4
    assert all(answer["fits"] and answer["peak_bytes"] <= answer["budget_bytes"] for answer in found)
    assert found[0]["budget_bytes"] == found[0]["inductor_peak_bytes"]
    peaks, steps = [answer["peak_bytes"] for answer in found], [answer["step_us"] for answer in found]
    assert peaks == sorted(peaks, reverse=True)
    # What promises less than RESOLUTION of the step is not searched; under a lower budget it may be.
    assert all(later >= (1 - RESOLUTION) * max(steps[:i]) for i, later in enumerate(steps) if i), steps
    assert found[-1]["peak_bytes"] == found[-1]["budget_bytes"]


def test_a_sweep_over_devices_holds_each_against_its_own_memory(tmp_path: Path) -> None:
    text = MODEL + TRAIN.replace("65536", "655360")
    devices = ("rtx3090", "h200")
    arguments = [word for name in devices for word in ("--device", name)]
    result = plan(tmp_path, text, *arguments, "--sweep", "--format", "json")
    assert result.exit_code == 0
    found = answers(result)
    assert [answer["budget_bytes"] for answer in found] == [BUILT_IN[name].memory_bytes for name in devices]
    assert found[1]["step_us"] < found[0]["step_us"]
    table = plan(tmp_path, text, *arguments, "--sweep").stdout
    assert all(name in table for name in devices)


def test_each_graph_of_a_broken_step_is_planned(tmp_path: Path) -> None:
    text = """
model = Net()

@torch.compile
def step(x, targets):
    x = x + model.blocks[0](x)
    torch._dynamo.graph_break()
    return model(x, targets)

step(torch.randn(256, 512), torch.randint(16, (256,))).backward()
"""
    (answer,) = answers(plan(tmp_path, MODEL + text, "--device", "h200", "--format", "json"))
    assert len(answer["plans"]) == 2


def test_micro_batches_of_a_number(tmp_path: Path) -> None:
    whole, sliced = (
        answers(plan(tmp_path, MODEL + TRAIN, "--device", "h200", "--microbatches", num, "--format", "json"))[0]
        for num in ("1", "8")
    )
    assert sliced["num_microbatches"] == 8
    assert sliced["peak_bytes"] < whole["peak_bytes"] / 2


def test_torch_is_as_it_was(tmp_path: Path) -> None:
    before = (
        torch.compile,
        torch.Tensor.to,
        torch.Tensor.backward,
        torch.autograd.grad,
        torch.optim.Optimizer.__init__,
    )
    plan(tmp_path, MODEL + TRAIN, "--device", "h200")
    after = (torch.compile, torch.Tensor.to, torch.Tensor.backward, torch.autograd.grad, torch.optim.Optimizer.__init__)
    assert before == after
    assert type(torch.zeros(2)) is torch.Tensor


@pytest.mark.inductor
def test_the_plan_is_the_one_that_is_carried_out(tmp_path: Path) -> None:
    """On the device of the trace nothing differs from a compile."""
    text = MODEL + "\nmodel = Net(64)\nstep = torch.compile(model, backend='remat', options={})\n"
    text += "x, targets = torch.randn(512, 64), torch.randint(16, (512,))\nstep(x, targets).backward()\n"
    (answer,) = answers(plan(tmp_path, text, "--format", "json"))
    before = len(plans())
    torch._dynamo.reset()
    exec(compile(textwrap.dedent(text), "train.py", "exec"), {"__name__": "train"})
    (real,) = plans()[before:]
    (paper,) = answer["plans"]
    assert paper["predicted_peak_bytes"] == real.predicted_peak_bytes
    assert paper["inductor_peak_bytes"] == real.inductor_peak_bytes
    assert [value["decision"] for value in paper["values"]] == [value.decision for value in real.values]
