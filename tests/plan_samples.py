"""Plans made by hand for the tests of the command line."""

from __future__ import annotations

from dataclasses import replace

from remat_passes.plan import (
    SCHEDULE_CLASS,
    BatchInput,
    BatchValue,
    Decision,
    FrontierPoint,
    Microbatches,
    Moment,
    PeakValue,
    RematPlan,
    ValuePlan,
)

MIB = 2**20

CHEAP = "cheap: fused into its readers, it is never written to memory"
DEAR = "its recompute costs more than its bytes are worth"
NARROW = "narrow point: every path to the loss passes here"
OVER = "over budget: the cheapest bytes that were still saved"

Stem = tuple[str, str, str, tuple[int, ...], int, Decision, str, float, int, tuple[str, ...]]

# One block of a GPT of width 256, batch 2, 1024 tokens: stem of the name, op, module below the block, shape, MiB,
# decision, reason, cost_us, source line, stems of what it reads.
BLOCK: tuple[Stem, ...] = (
    ("add", "aten.add.Tensor", "", (2, 1024, 256), 2, "save", NARROW, 1.5, 31, ("proj", "fc2")),
    ("norm", "aten.native_layer_norm.default", "ln", (2, 1024, 256), 2, "recompute", CHEAP, 2.0, 40, ("add",)),
    ("qkv", "aten.addmm.default", "attn.qkv", (2048, 768), 6, "recompute", OVER, 41.5, 52, ("norm",)),
    ("view", "aten.view.default", "attn.qkv", (2, 1024, 768), 6, "free", "view of qkv", 0.0, 53, ("qkv",)),
    ("proj", "aten.addmm.default", "attn.proj", (2048, 256), 2, "save", DEAR, 14.25, 58, ("view",)),
    ("fc1", "aten.addmm.default", "mlp", (2048, 1024), 8, "recompute", OVER, 55.0, 71, ("norm",)),
    ("gelu", "aten.gelu.default", "mlp", (2048, 1024), 8, "recompute", CHEAP, 4.0, 72, ("fc1",)),
    ("fc2", "aten.addmm.default", "mlp", (2048, 256), 2, "save", DEAR, 55.0, 73, ("gelu",)),
)


def value(name: str, **fields: object) -> ValuePlan:
    """A small saved value; ``fields`` say what is different about it."""
    sample = ValuePlan(
        name=name,
        op="aten.mm.default",
        shape=(4, 8),
        dtype="float32",
        bytes=128,
        module="",
        source="model.py:1",
        decision="save",
        reason="worth its bytes",
        cost_us=1.0,
        inputs=(),
    )
    return replace(sample, **fields)  # type: ignore[arg-type]


def block_values(layer: int) -> list[ValuePlan]:
    """The values of one block, named as FX names them: ``qkv``, ``qkv_1``, ``qkv_2``."""
    suffix = f"_{layer}" if layer else ""
    return [
        ValuePlan(
            name=stem + suffix,
            op=op,
            shape=shape,
            dtype="float32",
            bytes=num_mib * MIB,
            module=f"blocks.{layer}.{below}".rstrip("."),
            source=f"/home/user/projects/tiny-gpt/src/model/transformer.py:{line}",
            decision=decision,
            reason=reason,
            cost_us=cost_us,
            inputs=tuple(read + suffix for read in reads),
        )
        for stem, op, below, shape, num_mib, decision, reason, cost_us, line, reads in BLOCK
    ]


def plan(values: list[ValuePlan] | tuple[ValuePlan, ...] = (), **fields: object) -> RematPlan:
    """A plan of these values with plausible figures; ``fields`` say what is different about it."""
    saved = sum(entry.bytes for entry in values if entry.decision == "save")
    again = sum(entry.cost_us for entry in values if entry.decision == "recompute")
    sample = RematPlan(
        graph_id="g00-1a2b3c4d",
        torch_version="2.13.0",
        device="h200",
        cost_model="analytic",
        lowering="inductor",
        budget_bytes=256 * MIB,
        num_microbatches=1,
        projected_peak_bytes=240 * MIB,
        predicted_peak_bytes=240 * MIB,
        inductor_peak_bytes=600 * MIB,
        baseline_bytes=50 * MIB,
        gradient_bytes=48 * MIB,
        saved_bytes=saved,
        recompute_us=again,
        step_us=12_500.0,
        inductor_step_us=10_000.0,
        lower_bound_us=12_000.0,
        schedule_class=SCHEDULE_CLASS,
        values=tuple(values),
        frontier=(),
        timeline=(),
        peak_values=(),
        symbols=(),
        notes=(),
    )
    return replace(sample, **fields)  # type: ignore[arg-type]


def gpt_plan(num_layers: int = 16, **fields: object) -> RematPlan:
    """A GPT of equal blocks between an embedding and a head that were planned on their own."""
    source = "/home/user/projects/tiny-gpt/src/model/transformer.py"
    tokens = value("primals_1", op="input", shape=(2, 1024), dtype="int64", bytes=16384, decision="free",
                   source=f"{source}:100", reason="an input: it is alive anyway", cost_us=0.0)  # fmt: skip
    embedding = value("embedding", op="aten.embedding.default", shape=(2, 1024, 256), bytes=2 * MIB, module="wte",
                      source=f"{source}:101", cost_us=3.0, reason=NARROW, inputs=("primals_1",))  # fmt: skip
    logits = value("logits", op="aten.mm.default", shape=("2*s0", 50304), bytes=393 * MIB, module="head",
                   source=f"{source}:110", cost_us=880.0, decision="recompute", reason=OVER,
                   inputs=(f"add_{num_layers - 1}",))  # fmt: skip
    values = [tokens, embedding, *(entry for layer in range(num_layers) for entry in block_values(layer)), logits]
    sample = plan(
        values,
        timeline=step_timeline(num_layers),
        peak_values=(
            PeakValue("logits", 96 * MIB, "head"),
            PeakValue("parameters, buffers and inputs", 50 * MIB, ""),
            PeakValue("tangents_1", 48 * MIB, ""),
            *(PeakValue(f"qkv_{at}", 3 * MIB, f"blocks.{at}.attn.qkv") for at in range(6)),
            *(PeakValue(f"add_{at}", 2 * MIB, f"blocks.{at}") for at in range(14)),
        ),
        symbols=(("s0", 1024),),
        notes=("The projected peak holds for s0 = 1024; a longer sequence needs more.",),
    )
    sample = replace(sample, frontier=frontier_through(sample, before=24, after=5))
    return replace(sample, **fields)  # type: ignore[arg-type]


def frontier_through(chosen: RematPlan, before: int, after: int) -> tuple[FrontierPoint, ...]:
    """A straight frontier with the chosen plan on it: each step costs 100 us and frees 15 MiB."""
    return tuple(
        FrontierPoint(
            peak_bytes=chosen.projected_peak_bytes - 15 * MIB * at,
            saved_bytes=chosen.saved_bytes - 15 * MIB * at,
            step_us=chosen.step_us + 100.0 * at,
            chosen=at == 0,
        )
        for at in range(-before, after + 1)
    )


def step_timeline(num_layers: int) -> tuple[Moment, ...]:
    """A step whose forward rises by 2 MiB a layer, whose head is the peak of 240 MiB, and whose backward falls."""
    forward = [Moment(f"add_{at}", f"blocks.{at}", "forward", (52 + 2 * at) * MIB) for at in range(num_layers)]
    peak = Moment("logits", "head", "backward", 240 * MIB)
    backward = [
        Moment(f"mm_{at}", f"blocks.{at}", "backward", (60 + 2 * at) * MIB) for at in reversed(range(num_layers))
    ]
    return (*forward, peak, *backward)


def batch_value(name: str, dependence: str, where: str, **fields: object) -> BatchValue:
    """A value of a step that is split; ``fields`` say what is different about it."""
    axis = 0 if dependence == "split" else None
    sample = BatchValue(name, "aten.mul.Tensor", 0, "model.py:7", dependence, axis, where, why="")
    return replace(sample, **fields)  # type: ignore[arg-type]


# A contrastive step: two loops in forward, around a tail that needs the whole batch.
CONTRASTIVE = Microbatches(
    batch=14,
    lengths=(4, 4, 3, 3),
    num_loops=2,
    part="step",
    runs_in="forward",
    inputs=(BatchInput("images", 0), BatchInput("texts", 1)),
    values=(
        batch_value("permute", "same in every slice", "outside", op="aten.permute.default"),
        batch_value("iota", "same in every slice", "loop 1", op="prims.iota.default"),
        batch_value("ne", "split", "loop 0 and outside", op="aten.ne.Scalar"),
        batch_value("count", "partial sum", "outside", op="aten.sum.default", bytes=4),
        batch_value("a", "split", "loop 0 and loop 1"),
        batch_value("b", "split", "loop 0 and loop 1", axis=1),
        batch_value("mm", "whole batch", "outside", op="aten.mm.default", why="aten.mm.default needs the whole batch"),
        batch_value("exp", "whole batch", "outside", op="aten.exp.default", bytes=2 * MIB),
        batch_value(
            "mm_1", "whole batch", "outside", op="aten.mm.default", why="aten.mm.default needs the whole batch"
        ),
        batch_value("scaled", "split", "loop 1", why="aten.mul.Tensor needs mean, which is a sum over the whole batch"),
        batch_value("grad", "partial sum", "loop 1", op="aten.mm.default"),
        batch_value("unused", "split", "not computed"),
    ),
)


def contrastive_plan(**fields: object) -> RematPlan:
    """The plan of ``CONTRASTIVE``: of its values ``a`` is saved and ``b`` recomputed in each slice."""
    values = [
        value("primals_1", op="input", decision="free", reason="an input", cost_us=0.0),
        value("a", inputs=("primals_1", "primals_2")),
        value("b", decision="recompute", inputs=("a",)),
    ]
    sample = plan(values, num_microbatches=4, microbatches=CONTRASTIVE, peak_values=(PeakValue("grad_0", MIB, "head"),))
    return replace(sample, **fields)  # type: ignore[arg-type]
