"""The device's turns: many processes compile at a time, and one runs.

A lock of ``multiprocessing`` that a killed process holds is held for ever; one on a file ends with its holder.
"""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any


class Turn:
    """The right to run on the device. ``take`` waits for it; taking it twice is taking it once."""

    def __init__(self, path: Path | None) -> None:
        self.file = None if path is None else path.open("w", encoding="utf-8")
        self.asked_s: float | None = None  # when it was first asked for since it was last given back

    def take(self) -> None:
        if self.asked_s is None:
            self.asked_s = time.perf_counter()
        if self.file is not None:
            fcntl.flock(self.file, fcntl.LOCK_EX)

    def give(self) -> None:
        self.asked_s = None
        if self.file is not None:
            with suppress(OSError):
                fcntl.flock(self.file, fcntl.LOCK_UN)


def waiting(backend: Callable[..., Callable[..., Any]], turn: Turn) -> Callable[..., Callable[..., Any]]:
    """The backend of ``torch.compile`` whose code, once it is compiled, waits for the device before it runs."""

    def compiled(module: Any, inputs: Any, **keywords: Any) -> Callable[..., Any]:
        code = backend(module, inputs, **keywords)

        def run(*arguments: Any) -> Any:
            turn.take()
            return code(*arguments)

        return run

    return compiled
