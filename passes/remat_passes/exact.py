"""Exact: the best decision of a small graph, by trying all of them.

The chain and the hull are families of decisions, and on a graph of a dozen values the best decision can lie between
them. There all decisions are listed, the fastest first, and replayed until one fits.
"""

from __future__ import annotations

from collections.abc import Iterator

from .cut import Cut, CutProblem, cut_of, reachable
from .memory import MemoryModel

# Up to so many values that may be both saved and recomputed are tried: 2^14 decisions at the very worst.
MAX_DECIDABLE = 14


def decidable(problem: CutProblem) -> tuple[int, ...]:
    """The values that may be saved and may be recomputed, and that anything depends on."""
    needed = reachable(problem)
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
    room_bytes = limit_bytes - model.baseline_bytes  # all that is saved is alive when backward starts
    cuts = (cut_of(problem, need, redo) for need, redo in _decisions(problem))
    faster = [cut for cut in cuts if cut.saved_bytes <= room_bytes and (known is None or cut.time_ps < known.time_ps)]
    faster.sort(key=lambda cut: (cut.time_ps, cut.saved_bytes))
    return next((cut for cut in faster if model.project(cut).peak_bytes <= limit_bytes), None)


def _decisions(problem: CutProblem) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
    """What is needed and what is redone, once for each decision that breaks no rule: from the last value to the first,
    because who reads a value stands behind it."""
    required = frozenset(i for i, value in enumerate(problem) if value.is_required)
    stack = [(len(problem) - 1, required, frozenset[int]())]
    while stack:
        index, need, redo = stack.pop()
        while index >= 0 and index not in need:
            index -= 1
        if index < 0:
            yield need, redo
            continue
        value = problem[index]
        if value.save_ps is not None:
            stack.append((index - 1, need, redo))
        if value.recompute_ps is not None:
            stack.append((index - 1, need | frozenset(value.inputs), redo | {index}))
