"""Models are measured side by side, and steps are timed alone: who times a step makes the others stand still.

Nearly all of a measurement is compiling, on one core. The few seconds of timing in between are what must not be
disturbed, by another core's traffic to memory either.
"""

from __future__ import annotations

import fcntl
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


class Turns:
    """A file with the process groups that measure at the same time, which is also the lock that they share."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def join(self) -> None:
        """Take part, with this process and the programs that it starts."""
        with self.held() as file:
            file.write(f"{os.getpgrp()}\n")

    @contextmanager
    def held(self) -> Iterator[TextIO]:
        """While nobody else writes or times."""
        with self.path.open("a+", encoding="utf-8") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield file

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While the others stand still. They can hold no lock then: it is held here."""
        with self.held():
            self.tell(signal.SIGSTOP)
            try:
                yield
            finally:
                self.tell(signal.SIGCONT)

    def tell(self, number: signal.Signals) -> None:
        """Send a signal to every other group that is still there."""
        for group in {int(line) for line in self.path.read_text(encoding="utf-8").split()} - {os.getpgrp()}:
            try:
                os.killpg(group, number)
            except ProcessLookupError:
                continue
