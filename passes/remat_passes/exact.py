"""Exact: the best decision of a small graph, by branch and bound over what is saved.

The chain and the hull are families of decisions, and on a graph of a dozen values the best decision can lie between
them. There it is found by trying: the fastest cut of a branch bounds the time of all decisions in it, and where its
peak fits it is the best of its branch; else the branch is split at a value that is alive at the peak.

Land, Doig: An automatic method of solving discrete programming problems (Econometrica 28(3), 1960).
"""

from __future__ import annotations

from dataclasses import replace

from .cut import Cut, CutProblem, Network, fastest_price, keeping, smallest_price
from .errors import CannotPartitionError
from .memory import MemoryModel

# Up to so many values that may be both saved and recomputed are tried: 2^14 decisions at the very worst.
MAX_DECIDABLE = 14


def decidable(problem: CutProblem) -> tuple[int, ...]:
    """The values that may be saved and may be recomputed, and that anything depends on."""
    needed = Network(problem).need
    return tuple(
        i for i, v in enumerate(problem) if i in needed and v.save_ps is not None and v.recompute_ps is not None
    )


def best_cut(problem: CutProblem, model: MemoryModel, limit_bytes: int, known: Cut | None) -> Cut | None:
    """The fastest decision whose projected peak is within the limit, if one is faster than ``known``.

    Args:
        problem: of a small graph (see ``MAX_DECIDABLE``).
        model: replays decisions.
        limit_bytes: the highest peak.
        known: a decision that fits, if there is one.
    """
    best, found = known, None
    stack: list[tuple[frozenset[int], frozenset[int]]] = [(frozenset(), frozenset())]
    while stack:
        saved, redone = stack.pop()
        branch = keeping(problem, saved)
        branch = tuple(replace(v, save_ps=None, no_save="") if i in redone else v for i, v in enumerate(branch))
        cut = _fastest(branch, limit_bytes - model.baseline_bytes)
        if cut is None or (best is not None and cut.time_ps >= best.time_ps):
            continue
        if model.project(cut).peak_bytes <= limit_bytes:
            best = found = cut
            continue
        open_values = [i for i in decidable(branch) if i not in saved and i not in redone]
        if open_values:
            split = max(open_values, key=lambda i: (i in cut.saved, problem[i].bytes, -i))
            stack += [(saved | {split}, redone), (saved, redone | {split})]
    return found


def _fastest(branch: CutProblem, room_bytes: int) -> Cut | None:
    """The fastest cut of a branch; ``None`` where nothing is legal, or where even the least that can be saved is more
    than there is room for."""
    try:
        network = Network(branch)
        if network.solve(smallest_price(branch)).saved_bytes > room_bytes:
            return None
        return network.solve(fastest_price(branch))
    except CannotPartitionError:
        return None
