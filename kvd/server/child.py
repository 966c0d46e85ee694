"""A process that the broker starts, talks to, and starts again when it has ended."""

import logging
import math
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from kvd.machine.files import is_out_of_files, open_files_remedy
from kvd_proto.channel import Channel
from kvd_proto.errors import BadFrame, ChannelFull, DecodeError, DescriptorsLost

log = logging.getLogger("kvd.daemon")
_FIRST_DELAY = 0.05
_LONGEST_DELAY = 5.0
_LONGEST_POLL = 1000.0
_FOR_THE_BROKER = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
# None of them computes, and numpy would start a thread for each core while it is imported.
_FOR_CHILDREN = {"OPENBLAS_NUM_THREADS": "1"}


class StartedProcess(NamedTuple):
    """A process, a descriptor that is readable when it has ended, and this end of its link."""

    process: subprocess.Popen[bytes]
    pidfd: int
    link: socket.socket


def start_process(
    module: str, arguments: Sequence[str] = (), fds: Sequence[int] = ()
) -> StartedProcess:
    """Start ``python -m module``; its last argument is the number of its end of the link.

    It gets the descriptors `fds` under the same numbers, and ends with this process.

    Raises:
        OSError: it cannot be started now; nothing is left of it.
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX)
    with theirs:
        try:
            number = theirs.fileno()
            process = subprocess.Popen(
                # -P: nothing is imported from the directory that the daemon was started in.
                [sys.executable, "-P", "-m", module, *arguments, str(number)],
                pass_fds=(number, *fds),
                stdin=subprocess.DEVNULL,
                env=_FOR_CHILDREN
                | {name: text for name, text in os.environ.items() if name not in _FOR_THE_BROKER},
            )
            try:
                return StartedProcess(process, os.pidfd_open(process.pid), ours)
            except OSError:
                process.kill()
                process.wait()
                raise
        except OSError:
            ours.close()
            raise


class Child:
    """One process at a time, at the other end of a channel.

    The next one follows `pause` seconds after one that had served. After one that had not, or that
    could not be started, the pause grows to 5 s.

    Args:
        module: what ``python -m`` runs.
        name, fields: how the log calls it.
        poller: where the channel and the process's end are registered.
        decode: returns the header and the message of a frame.
        on_message: is given a message, its descriptors, which are the callee's, and the time.
        on_end: is given why the process has ended, and the time.
        pause: see above.
        turn_seconds: how long `turn` hands messages on; the others come with the next call.

    Attributes:
        link: this end of the channel; None once it is closed.
        pidfd: readable when the process has ended; -1 where none runs.
        served: the process that runs was of use; its owner says so.
    """

    def __init__(
        self,
        module: str,
        name: str,
        fields: dict[str, str],
        poller: select.epoll,
        *,
        decode: Callable[[bytes], tuple[object, Any]],
        on_message: Callable[[Any, tuple[int, ...], float], None],
        on_end: Callable[[str, float], None],
        pause: float = 0.0,
        turn_seconds: float = math.inf,
    ) -> None:
        self.name = name
        self.fields = fields
        self._module = module
        self._poller = poller
        self._decode = decode
        self._on_message = on_message
        self._on_end = on_end
        self._pause = pause
        self._turn_seconds = turn_seconds
        self._delay = _FIRST_DELAY
        self._start_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._killed_because = ""
        self._polls_for_room = False
        self.link: Channel | None = None
        self.pidfd = -1
        self.served = False

    @property
    def running(self) -> bool:
        """Whether a process has not been reaped."""
        return self._process is not None

    @property
    def unread(self) -> bool:
        """Whether messages may have come that the poller does not report."""
        return self.link is not None and self.link.more

    @property
    def pid(self) -> int:
        """Its process id; -1 where none runs."""
        return self._process.pid if self._process is not None else -1

    def due(self, now: float) -> bool:
        """Whether no process runs and the pause is over."""
        return self._process is None and now >= self._start_at

    def start(self, now: float, arguments: Sequence[str] = (), fds: Sequence[int] = ()) -> bool:
        """Start a process as `start_process` does, or put that off; return whether it runs."""
        try:
            started = start_process(self._module, arguments, fds)
        except OSError as error:
            remedy = f"; {open_files_remedy()}" if is_out_of_files(error) else ""
            log.error("%s cannot be started: %s%s", self.name, error, remedy, extra=self.fields)  # noqa: TRY400  # no bug
            self._put_off(now)
            return False
        self.adopt(started)
        return True

    def adopt(self, started: StartedProcess) -> None:
        """Go on with a process that was started before."""
        self._process, self.pidfd = started.process, started.pidfd
        self.link = Channel(started.link, b"ROUTER")
        self.served = self._polls_for_room = False
        for fd in (self.link.fileno(), self.pidfd):
            self._poller.register(fd, select.EPOLLIN)

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send an order with descriptors, if a process runs; kill one that does not read."""
        if self.link is None:
            return
        try:
            self.link.send(frame, fds)
        except EOFError:
            return  # it exits; `turn` sees that
        except (ChannelFull, OSError) as error:
            why = f"its orders cannot be sent: {error}"
            log.error("%s is killed: %s", self.name, why, extra=self.fields)  # noqa: TRY400  # no bug
            self.kill(why)
            return
        self._poll_for_room()

    def turn(self, ready: dict[int, int], now: float) -> None:
        """Send what waits, hand on the messages that have come, and see whether it has ended.

        Args:
            ready: what the poller has reported.
            now: monotonic seconds.
        """
        if self.link is not None and self.link.wants_write:
            try:
                self.link.flush()
                self._poll_for_room()
            except EOFError:
                pass  # what it sent before is read, and its end
        if self.link is not None and (self.link.more or self.link.fileno() in ready):
            self._receive(now)
        if self.pidfd in ready:
            self._on_end(self.reap(now), now)

    def _receive(self, now: float) -> None:
        end = time.monotonic() + self._turn_seconds
        try:
            while self.link is not None:
                received = self.link.receive()
                if received is not None:
                    frame, fds = received
                    self._on_message(self._decode(frame)[1], fds, now)
                if not self.unread or time.monotonic() >= end:
                    return
        except EOFError:  # it exits by itself
            self.close_link()
        except (DecodeError, BadFrame) as error:
            self.kill(f"sent what is no message: {error}")
        except DescriptorsLost as error:
            self.kill(f"the broker could not receive descriptors: {error}; {open_files_remedy()}")

    def kill(self, why: str = "the daemon stops") -> None:
        """End it without asking, for a reason; what it has sent can still be received."""
        if self._process is not None:
            self._killed_because = self._killed_because or why
            self._process.kill()

    def close_link(self) -> None:
        """Receive nothing more."""
        if self.link is not None:
            self._poller.unregister(self.link.fileno())
            self.link.close()
            self.link = None

    def reap(self, now: float) -> str:
        """Wait for the end of one that was killed, or has ended; return why it ended."""
        if self._process is None:
            return ""
        self.close_link()
        code = self._process.wait()
        why, self._killed_because = self._killed_because, ""
        self._process = None
        self._poller.unregister(self.pidfd)
        os.close(self.pidfd)
        self.pidfd = -1
        if self.served:
            self._delay = _FIRST_DELAY
            self._start_at = now + self._pause
        else:
            self._put_off(now)
        if code == -signal.SIGKILL and why:
            return f"killed by kvd: {why}"
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    def _poll_for_room(self) -> None:
        """Have the poller report that the process has read, while something waits for that."""
        if self.link is not None and self.link.wants_write != self._polls_for_room:
            self._polls_for_room = self.link.wants_write
            room = select.EPOLLOUT if self._polls_for_room else 0
            self._poller.modify(self.link.fileno(), select.EPOLLIN | room)

    def _put_off(self, now: float) -> None:
        self._delay = min(2 * self._delay, _LONGEST_DELAY)
        self._start_at = now + self._delay

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, pid {self.pid}>"


def end_all(children: Iterable[Child], grace: float = 0.0, patience: float = math.inf) -> None:
    """End processes, and wait for that.

    1. Wait `grace` seconds for those that were told to stop.
    2. Kill the others, and wait `patience` seconds.
    3. Leave alone those that still run, with a line in the log: the kernel does not let them go.
    """
    children = list(children)
    _wait(children, grace)
    for child in children:
        child.close_link()
        child.kill()
    for child in _wait(children, patience):
        log.error(
            "%s, pid %d, does not end: its medium hangs; the next daemon starts when it has ended",
            child.name, child.pid, extra=child.fields,
        )  # fmt: skip


def _wait(children: Iterable[Child], seconds: float) -> list[Child]:
    """Reap those that end within so many seconds; return the others."""
    end = time.monotonic() + seconds
    left = [child for child in children if child.running]
    while left and (rest := end - time.monotonic()) > 0:
        poll = select.poll()
        for child in left:
            poll.register(child.pidfd, select.POLLIN)
        ended = dict(poll.poll(min(rest, _LONGEST_POLL) * 1000))
        for child in left:
            if child.pidfd in ended:
                child.reap(0.0)
        left = [child for child in left if child.running]
    return left
