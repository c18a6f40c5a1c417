"""The cut as a drawing in graphviz's language: saved values are boxes, recomputed ones dashed, free ones grey."""

from __future__ import annotations

from collections.abc import Iterable

from remat_passes.plan import RematPlan, ValuePlan
from remat_passes.units import format_bytes

from .groups import shape_text
from .tables import clean

STYLES = {
    "save": 'shape=box, style="filled,bold", fillcolor="palegreen"',
    "recompute": "shape=ellipse, style=dashed",
    "free": 'shape=ellipse, color="grey60", fontcolor="grey40"',
}


def dot_graph(plan: RematPlan) -> str:
    """One digraph: a node a value, an edge to each value from the ones that recomputing it reads."""
    title = f"{plan.graph_id}: {format_bytes(plan.saved_bytes)} saved, peak {format_bytes(plan.projected_peak_bytes)}"
    lines = [
        f"digraph {quoted(plan.graph_id)} {{",
        f"  label={quoted(title)};",
        "  labelloc=t;",
        '  node [fontname="monospace", fontsize=10];',
        *_modules(plan.values),
        *_edges(plan.values),
        "}",
    ]
    return "\n".join(lines) + "\n"


def quoted(text: str) -> str:
    """``text`` as a DOT string: backslashes doubled, because labels read ``\\N`` and ``\\l`` as commands."""
    return '"' + clean(text).replace("\\", "\\\\").replace('"', '\\"') + '"'


def _modules(values: Iterable[ValuePlan]) -> list[str]:
    """Every value inside its module's cluster, modules inside the modules that hold them."""
    by_module: dict[tuple[str, ...], list[ValuePlan]] = {}
    for value in values:
        by_module.setdefault(tuple(value.module.split(".")) if value.module else (), []).append(value)
    lines: list[str] = []
    opened: tuple[str, ...] = ()
    for module in sorted(by_module):
        kept = _num_shared(opened, module)
        lines += ["  " * (depth + 1) + "}" for depth in range(len(opened) - 1, kept - 1, -1)]
        lines += [_open(module[: depth + 1]) for depth in range(kept, len(module))]
        lines += ["  " * (len(module) + 1) + _node(value) for value in by_module[module]]
        opened = module
    return lines + ["  " * (depth + 1) + "}" for depth in range(len(opened) - 1, -1, -1)]


def _num_shared(one: tuple[str, ...], other: tuple[str, ...]) -> int:
    """How many leading components two paths share."""
    num = 0
    while num < min(len(one), len(other)) and one[num] == other[num]:
        num += 1
    return num


def _open(path: tuple[str, ...]) -> str:
    name = ".".join(path)
    return "  " * len(path) + f"subgraph {quoted(f'cluster_{name}')} {{ label={quoted(name)}; color=grey80;"


def _node(value: ValuePlan) -> str:
    lines = (value.name, value.op, f"{shape_text(value)} {format_bytes(value.bytes)}")
    label = "\\n".join(quoted(line)[1:-1] for line in lines)
    return f'{quoted(value.name)} [label="{label}", {STYLES[value.decision]}];'


def _edges(values: Iterable[ValuePlan]) -> list[str]:
    """Edges between the plan's values; an input that backward does not need has no node."""
    known = {value.name: value for value in values}
    return [
        f"  {quoted(source)} -> {quoted(value.name)};"
        for value in known.values()
        for source in dict.fromkeys(value.inputs)
        if source in known
    ]
