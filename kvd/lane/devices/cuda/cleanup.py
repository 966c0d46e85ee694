"""What is to be undone in the reverse order in which it was done, however much of it fails."""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from kvd.errors import CudaError

_log = logging.getLogger(__name__)


class Cleanup:
    """A list of things to undo."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def add(self, undo: Callable[[], None]) -> None:
        """Something was done; this undoes it."""
        self._undo.append(undo)

    def run(self) -> None:
        """Undo everything.

        Raises:
            CudaError: the first of the failures; the rest was tried all the same.
        """
        failures = list(self._failures())
        if failures:
            raise failures[0]

    @contextmanager
    def on_failure(self) -> Iterator[None]:
        """Undo everything where the block raises; failures to undo are logged, not raised."""
        try:
            yield
        except BaseException:
            for failure in self._failures():
                _log.error("not undone: %s", failure)
            raise

    def _failures(self) -> Iterator[CudaError]:
        while self._undo:
            try:
                self._undo.pop()()
            except CudaError as error:
                yield error

    def __repr__(self) -> str:
        return f"<Cleanup of {len(self._undo)}>"
