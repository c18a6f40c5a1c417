"""Workers: processes that measure one system each, so that many compile while one runs."""

from __future__ import annotations

import multiprocessing
import threading
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.gpu.settings import Place
from benchmarks.gpu.systems import Desk, Row
from benchmarks.gpu.turn import Turn


class Clock:
    """The seconds that are left of all that may be taken."""

    def __init__(self, limit_s: float) -> None:
        self.start_s, self.limit_s = time.monotonic(), limit_s

    @property
    def taken_s(self) -> float:
        return time.monotonic() - self.start_s

    @property
    def left_s(self) -> float:
        return self.limit_s - self.taken_s


class WorkerError(Exception):
    """A worker that died or did not answer in time."""


def _serve(connection: Connection, place: Place, turn_path: Path) -> None:
    """What a worker's process runs: orders in, rows out, until it is told to end."""
    desk = Desk(place, Turn(turn_path))
    while (order := connection.recv()) is not None:
        try:
            for row in desk.handle(*order):
                connection.send(("row", row))
            connection.send(("done", None))
        except Exception as error:
            connection.send(("failed", f"{type(error).__name__}: {error}"))


class Worker:
    """A process with a desk of its own."""

    def __init__(self, place: Place, turn_path: Path) -> None:
        context = multiprocessing.get_context("spawn")  # CUDA does not survive a fork
        self.connection, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs, place, turn_path), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, limit_s: float, *order: Any) -> Iterator[Row]:
        """The rows of one order.

        Raises:
            WorkerError: the process died, the order failed, or it took longer than ``limit_s``.
        """
        deadline_s = time.monotonic() + limit_s
        try:
            self.connection.send(order)
            while True:
                if not self.connection.poll(max(0.0, deadline_s - time.monotonic())):
                    self.end()
                    raise WorkerError("stopped at the deadline")
                kind, content = self.connection.recv()
                if kind == "done":
                    return
                if kind == "failed":
                    raise WorkerError(content)
                yield content
        except (EOFError, OSError):
            self.process.join(5)
            raise WorkerError(f"the process ended with exit code {self.process.exitcode}") from None

    def end(self) -> None:
        """Stop the process, whatever it does."""
        self.process.kill()
        self.process.join()
        self.connection.close()


class Local:
    """A worker that is no process: for trying the script out on a CPU."""

    def __init__(self, place: Place) -> None:
        self.desk, self.lock = Desk(place), threading.Lock()

    def ask(self, limit_s: float, *order: Any) -> Iterator[Row]:
        """The rows of one order; it is not stopped."""
        yield from self.desk.handle(*order)

    def end(self) -> None:
        """Forget the model."""
        self.desk.bench = None
