"""What files of figures have in common: a JSON object, and numbers that can be computed with."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping

from .errors import ConfigError


def json_object(text: str, damaged: Callable[[str], ConfigError]) -> Mapping[str, object]:
    """The JSON object that a file holds.

    Raises:
        ConfigError: what ``damaged`` makes of the sentence that says why it is none.
    """
    try:
        record = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise damaged(f"it is not JSON ({error})") from None
    if not isinstance(record, dict):
        raise damaged("it is not a JSON object")
    return record


def positive_number(entry: object) -> float | None:
    """The entry as a number above 0, ``None`` where it is none.

    The upper end refuses the Infinity that Python's JSON reads, and integers too large for a float; NaN fails both.
    """
    if not isinstance(entry, (int, float)) or isinstance(entry, bool) or not 0 < entry <= sys.float_info.max:
        return None
    return float(entry)
