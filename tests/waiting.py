"""Waiting for what nobody announces, for as long as a busy machine may take."""

import time
from collections.abc import Callable
from typing import TypeVar

PATIENCE = 60.0
DEADLINE = 30.0  # of clients, in tests that are not about deadlines
PAUSE = 0.005

T = TypeVar("T")


def eventually(question: Callable[[], T], is_so: Callable[[T], object] = bool) -> T:
    """The first answer that is so; asks again and again."""
    end = time.monotonic() + PATIENCE
    while not is_so(answer := question()):
        assert time.monotonic() < end, f"not so after {PATIENCE:g} s: {answer}"
        time.sleep(PAUSE)
    return answer
