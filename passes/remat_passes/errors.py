"""Errors that speak to the user.

Every text says what was asked, what is possible and what to do. Dynamo wraps what a backend raises and keeps the text,
so each message must be readable without its traceback.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import TypeVar


class RematError(Exception):
    """Base class of everything that remat raises on purpose."""


_Kind = TypeVar("_Kind", bound=BaseException)


def found_in(error: BaseException | None, kind: type[_Kind] | tuple[type[_Kind], ...]) -> _Kind | None:
    """The error of one of these kinds that another one wraps, as Dynamo wraps what a backend raises."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, kind):
            return error
        seen.add(id(error))
        error = getattr(error, "inner_exception", None) or error.__cause__ or error.__context__
    return None


class RematWarning(UserWarning):
    """What was promised was not kept: another peak was measured, or a step runs without remat."""


class ConfigError(RematError):
    """An option is unknown or its value is malformed."""


class BudgetInfeasibleError(RematError):
    """No plan of the step fits into the memory budget.

    ``smallest_bytes`` is the smallest peak that can be reached, as far as it is known.
    """

    def __init__(self, text: str, budget_bytes: int = 0, smallest_bytes: int = 0) -> None:
        super().__init__(text)
        self.budget_bytes, self.smallest_bytes = budget_bytes, smallest_bytes


class CannotSplitError(RematError):
    """The step cannot be split into micro-batches without changing what it computes."""


class CannotCaptureError(RematError):
    """A script does not reach a training step that can be planned on paper."""


class CannotPartitionError(RematError):
    """A value that backward needs can be neither saved nor recomputed."""


class VerificationError(RematError):
    """The split step and the unsplit one gave different numbers."""


class PlanFileError(RematError):
    """A plan file is damaged, or was written by another schema."""


def nearest(word: str, choices: Iterable[str]) -> str:
    """A sentence that offers the nearest spelling of ``word``, or an empty string when nothing is near."""
    matches = difflib.get_close_matches(word, list(choices), n=1, cutoff=0.6)
    return f" Did you mean {matches[0]!r}?" if matches else ""
