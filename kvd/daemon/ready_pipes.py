"""Pipes that tell schedulers of their READY chunks, so that event loops need not poll.

An engine's scheduler gets the read end; the broker writes a byte each time that chunks of
the engine became READY. The two ends have flags of their own: whatever a client does to
its end, a write here never waits; those of an eventfd would share them. Where the pipe is
full the byte is not needed.
"""

import contextlib
import os


class ReadyPipes:
    """One pipe for each engine that has a scheduler, by the engine's number."""

    def __init__(self) -> None:
        self._pipes: dict[int, tuple[int, int]] = {}

    def read_end(self, engine: int) -> list[int]:
        """Return the descriptor for the engine's scheduler, in a list; empty where none is left."""
        if engine not in self._pipes:
            try:
                self._pipes[engine] = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            except OSError:  # its scheduler polls, as without an event loop
                return []
        return [self._pipes[engine][0]]

    def tell(self, engine: int) -> None:
        """Write a byte: chunks of the engine became READY."""
        pipe = self._pipes.get(engine)
        if pipe is not None:
            with contextlib.suppress(BlockingIOError):
                os.write(pipe[1], b"\1")

    def drop(self, engine: int) -> None:
        """Close the pipe of an engine that is gone."""
        for fd in self._pipes.pop(engine, ()):
            os.close(fd)

    def close(self) -> None:
        """Close all of them."""
        for engine in list(self._pipes):
            self.drop(engine)

    def __repr__(self) -> str:
        return f"<ReadyPipes of {len(self._pipes)} engines>"
