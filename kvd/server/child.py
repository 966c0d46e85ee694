"""A process that the broker starts, watches and starts again."""

import os
import select
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from kvd.machine.files import is_out_of_files, open_files_remedy
from kvd_proto.channel import Channel, ReceivedFrame
from kvd_proto.errors import ChannelFull

if TYPE_CHECKING:  # what the first lanes' start does not need is imported beside them
    from kvd.client_names import Fields

_FIRST_DELAY = 0.05
_LONGEST_DELAY = 5.0
_FOR_THE_BROKER = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
# None of them computes, and numpy would start a thread for each core while it is imported.
_FOR_CHILDREN = {"OPENBLAS_NUM_THREADS": "1"}


class ChildProcess:
    """One child at a time, at the other end of a channel.

    One that had served is followed soon by the next; one that dies before, or cannot be
    started, is given growing pauses.

    Args:
        module: what ``python -m`` runs.
        name: what the log calls it.
        poller: where the channel and the child's end are registered.
        pause: seconds between the end of a child that had served and the next.

    Attributes:
        fields: of its lines in the log.
        link: this end of the channel; None once it is closed.
        pidfd: readable when the child has ended; -1 where none runs.
        served: the child that runs was of use; its owner says so.
        start_at: when the next one may be started, monotonic seconds.
    """

    def __init__(self, module: str, name: str, poller: select.epoll, pause: float = 0.0) -> None:
        self.name = name
        self.fields: Fields = {}
        self._module = module
        self._poller = poller
        self._pause = pause
        self._delay = _FIRST_DELAY
        self._process: subprocess.Popen[bytes] | None = None
        self._killed_because = ""
        self.link: Channel | None = None
        self._polls_for_room = False
        self.pidfd = -1
        self.served = False
        self.start_at = 0.0

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

    def spawn(
        self,
        arguments: Sequence[str],
        now: float,
        fds: Sequence[int] = (),
    ) -> bool:
        """Start the module, or put that off; return whether it runs.

        Args:
            arguments: those of the module; the number of its end of the channel comes last.
            now: monotonic seconds.
            fds: further descriptors that it gets, under the same numbers.
        """
        self.served = False
        try:
            ours, theirs = socket.socketpair(socket.AF_UNIX)
            with theirs:
                try:
                    number = theirs.fileno()
                    self._begin([*arguments, str(number)], (number, *fds))
                except OSError:
                    ours.close()
                    raise
                self.link = Channel(ours, b"ROUTER")
        except OSError as error:
            remedy = f"; {open_files_remedy()}" if is_out_of_files(error) else ""
            self._log_error(f"cannot be started: {error}{remedy}")
            self._put_off(now)
            return False
        for fd in (ours.fileno(), self.pidfd):
            self._poller.register(fd, select.EPOLLIN)
        self._polls_for_room = False
        return True

    def _begin(self, arguments: Sequence[str], fds: Sequence[int]) -> None:
        process = subprocess.Popen(
            # -P: nothing is imported from the directory that the daemon was started in.
            [sys.executable, "-P", "-m", self._module, *arguments],
            pass_fds=fds,
            stdin=subprocess.DEVNULL,
            env=_FOR_CHILDREN
            | {name: text for name, text in os.environ.items() if name not in _FOR_THE_BROKER},
        )
        try:
            self.pidfd = os.pidfd_open(process.pid)
        except OSError:
            process.kill()
            process.wait()
            raise
        self._process = process

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send an order with descriptors, if a child runs; kill one that does not read."""
        if self.link is None:
            return
        try:
            self.link.send(frame, fds)
        except EOFError:
            return  # it exits; its owner sees that
        except (ChannelFull, OSError) as error:
            why = f"its orders cannot be sent: {error}"
            self._log_error(f"is killed: {why}")
            self.kill(why)
            return
        self._poll_for_room()

    def flush(self) -> None:
        """Send what waits, as far as the child has read."""
        if self.link is None or not self.link.wants_write:
            return
        try:
            self.link.flush()
        except EOFError:
            return  # what it sent before is read, and its end
        self._poll_for_room()

    def receive(self) -> Iterator[ReceivedFrame]:
        """Yield the messages that have come; where the caller stops early, some are `unread`.

        Raises:
            EOFError: the child has closed its end, or died.
            BadFrame, DescriptorsLost: see `Channel.receive`.
        """
        while self.link is not None:
            received = self.link.receive()
            if received is not None:
                yield received
            if not self.unread:
                return

    def kill(self, why: str = "the daemon stops") -> None:
        """End it without asking, for a reason; what it has sent can still be received."""
        if self._process is not None:
            self._killed_because = self._killed_because or why
            self._process.kill()

    def close_link(self) -> None:
        """Receive nothing more. A child that has closed its own end exits by itself."""
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
            self.start_at = now + self._pause
        else:
            self._put_off(now)
        if code == -signal.SIGKILL and why:
            return f"killed by kvd: {why}"
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    def _poll_for_room(self) -> None:
        """Have the poller report that the child has read, while something waits for that."""
        if self.link is not None and self.link.wants_write != self._polls_for_room:
            self._polls_for_room = self.link.wants_write
            room = select.EPOLLOUT if self._polls_for_room else 0
            self._poller.modify(self.link.fileno(), select.EPOLLIN | room)

    def _log_error(self, text: str) -> None:
        import logging  # noqa: PLC0415  # what the first lanes need not wait for

        logging.getLogger("kvd.daemon").error("%s %s", self.name, text, extra=self.fields)

    def _put_off(self, now: float) -> None:
        self._delay = min(2 * self._delay, _LONGEST_DELAY)
        self.start_at = now + self._delay

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}, pid {self.pid}>"
