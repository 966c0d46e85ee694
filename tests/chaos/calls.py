"""How long public calls of the client take, and which broke their word."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.chaos.shared import Count, Words

SLACK_SECONDS = 15.0  # a busy machine may keep a process from running for so long


class Calls:
    """Times calls of one process, and keeps what is wrong in a file of the run.

    Args:
        name: of the process.
        counters: the process's; the harness says there for how long it was frozen.
        complaints: a file that all processes append to.
    """

    def __init__(self, name: str, counters: Words, complaints: Path) -> None:
        self.name = name
        self.counters = counters
        self._complaints = complaints

    @contextmanager
    def within(self, seconds: float, what: str) -> Iterator[None]:
        """Complain where the block takes longer, save for time that the process was frozen."""
        self.add(Count.CALLS)
        frozen = self.counters[Count.STOPPED_NS]
        began = time.monotonic()
        try:
            yield
        finally:
            away = (self.counters[Count.STOPPED_NS] - frozen) / 1e9
            took = time.monotonic() - began - away
            if took > seconds + SLACK_SECONDS:
                self.complain(f"{what} took {took:.2f} s, {seconds:g} s are allowed")

    def add(self, count: Count, more: int = 1) -> None:
        """Count."""
        self.counters[count] += more

    def complain(self, text: str) -> None:
        """Say that something is wrong; one line, whole or not at all."""
        line = f"{time.monotonic():.3f} {self.name}: {text}\n"
        with self._complaints.open("a", encoding="utf-8") as file:
            file.write(line)
