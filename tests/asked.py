"""An object in a process of its own, whose methods a test calls."""

import multiprocessing
import os
from collections.abc import Callable
from multiprocessing.connection import Connection
from operator import attrgetter
from typing import Any

from tests.waiting import PATIENCE


class Asked:
    """The process, as the test sees it; `make(*arguments)` makes the object there.

    forked: it begins with what this process has loaded, which takes no second; this one may have
        neither a driver nor a thread yet.
    """

    def __init__(self, make: Callable[..., Any], *arguments: object, forked: bool = False) -> None:
        context: Any = multiprocessing.get_context("fork" if forked else "spawn")
        self._pipe, theirs = context.Pipe()
        serving = (make, self._pipe if forked else None, theirs, *arguments)
        self.process = context.Process(target=_serve, args=serving, daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, name: str, *arguments: object) -> Any:
        """Call a method there, by its dotted name; what it returns, or the exception it raised."""
        self._pipe.send((name, arguments))
        if not self._pipe.poll(PATIENCE):
            raise TimeoutError(f"the process does not do {name}")
        answer = self._pipe.recv()
        if isinstance(answer, Exception):
            raise answer
        return answer

    def kill(self) -> None:
        """End the process as SIGKILL does."""
        self.process.kill()
        self.process.join(PATIENCE)

    def close(self) -> None:
        """End the process, in order where it still can."""
        self._pipe.close()
        self.process.join(5)
        self.kill()


def _serve(
    make: Callable[..., Any], inherited: Connection | None, pipe: Connection, *arguments: object
) -> None:
    """The process: does what it is asked until the other end closes, then closes the object."""
    if inherited is not None:
        inherited.close()  # the other end, which would stay open with this process
    try:
        made = make(*arguments)
    except BaseException as error:
        pipe.send(error)
        raise
    while True:
        try:
            name, given = pipe.recv()
        except EOFError:
            break
        try:
            answer = attrgetter(name)(made)(*given)
        except Exception as error:  # noqa: BLE001  # the test is to see it
            answer = RuntimeError(f"{type(error).__name__}: {error}")
        pipe.send(answer)
    made.close()
    os._exit(0)  # threads of a driver need no farewell
