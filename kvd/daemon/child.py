"""A process that the broker starts, watches and starts again."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

from kvd.wire.seqpacket import Channel

_FIRST_DELAY = 0.05
_LONGEST_DELAY = 5.0


class ChildProcess:
    """One child at a time.

    One that had served is followed soon by the next; one that dies before, or cannot be
    started, is given growing pauses.

    Args:
        module: what ``python -m`` runs.
        pause: seconds between the end of a child that had served and the next.
    """

    def __init__(self, module: str, pause: float = 0.0) -> None:
        self._module = module
        self._pause = pause
        self._delay = _FIRST_DELAY
        self._process: subprocess.Popen[bytes] | None = None
        self.pidfd = -1
        self.served = False
        self.start_at = 0.0

    @property
    def running(self) -> bool:
        """Whether a process has not been reaped."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Its process id; -1 where none runs."""
        return self._process.pid if self._process is not None else -1

    def spawn(
        self, arguments: Sequence[str], fds: Sequence[int], environment: Mapping[str, str]
    ) -> None:
        """Start the module with `arguments`, with the descriptors `fds` under the same numbers.

        Raises:
            OSError: no process or descriptor is to be had now.
        """
        self.served = False
        self._process = subprocess.Popen(
            [sys.executable, "-m", self._module, *arguments],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            env=os.environ | environment,
        )
        try:
            self.pidfd = os.pidfd_open(self._process.pid)
        except OSError:
            self._process.kill()
            self._process.wait()
            self._process = None
            raise

    def spawn_linked(
        self, arguments: Callable[[int], Sequence[str]], fds: Sequence[int] = ()
    ) -> Channel:
        """Start the module at the other end of a channel; return this end.

        Args:
            arguments: those of the module, from the number of its end's descriptor.
            fds: further descriptors that it gets.

        Raises:
            OSError: no process or descriptor is to be had now.
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            try:
                self.spawn(arguments(theirs.fileno()), (theirs.fileno(), *fds), {})
            except OSError:
                ours.close()
                raise
        return Channel(ours)

    def kill(self) -> None:
        """End it without asking."""
        if self._process is not None:
            self._process.kill()

    def put_off(self, now: float) -> None:
        """None could be started, or it ended before it served: pause for longer each time."""
        self._delay = min(2 * self._delay, _LONGEST_DELAY)
        self.start_at = now + self._delay

    def reap(self, now: float) -> str:
        """Reap the ended process and set when the next may start; return why it ended."""
        if self._process is None:
            return ""
        code = self._process.wait()
        self._process = None
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
        if self.served:
            self._delay = _FIRST_DELAY
            self.start_at = now + self._pause
        else:
            self.put_off(now)
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    def __repr__(self) -> str:
        state = f"pid {self._process.pid}" if self._process else "not running"
        return f"<{type(self).__name__} {self._module} {state}>"
