"""Bytes and microseconds: how a user writes them, and how remat shows them.

Bytes are ``int`` everywhere. ``GiB`` is 2**30 and ``GB`` is 10**9 (IEC 80000-13); both are accepted, because users
write both and mean what they write.
"""

from __future__ import annotations

import math
import re

from .errors import ConfigError

BYTE_UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: str) -> int:
    """Bytes from ``"8GiB"``, ``"512MiB"``, ``"8GB"`` or a plain number of bytes.

    Raises:
        ConfigError: ``text`` is not a number followed by one of ``BYTE_UNITS``.
    """
    match = _SIZE.fullmatch(text)
    unit = match.group(2).upper() or "B" if match else ""
    if match is None or unit not in BYTE_UNITS:
        raise ConfigError(
            f"{text!r} is not a size. Write a number and a unit, such as '8GiB', '512MiB' or '8GB' (10^9)."
        )
    return (
        int(float(match.group(1)) * BYTE_UNITS[unit])
        if "." in match.group(1)
        else int(match.group(1)) * BYTE_UNITS[unit]
    )


def format_bytes(num_bytes: int, *, round_up: bool = False) -> str:
    """``num_bytes`` with one decimal in the largest binary unit that keeps it at 1 or more: ``"186.4 MiB"``.

    ``round_up`` is for sizes that are asked for: what is shown is then enough.
    """
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size) < 1024 or unit == "TiB":
            break
        size /= 1024
    if unit == "B":
        return f"{int(size)} B"
    return f"{math.ceil(size * 10) / 10 if round_up else size:.1f} {unit}"


def format_us(us: float) -> str:
    """``us`` microseconds in the unit that reads best: ``"12.3 us"``, ``"4.56 ms"``, ``"1.20 s"``."""
    if us < 1_000:
        return f"{us:.1f} us"
    if us < 1_000_000:
        return f"{us / 1_000:.2f} ms"
    return f"{us / 1_000_000:.2f} s"
