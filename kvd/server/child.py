"""`Child`: a process that the broker starts, exchanges messages with, and restarts."""

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

from kvd.machine.process import is_out_of_files, open_files_remedy
from kvd_proto.channel import Channel
from kvd_proto.errors import BadFrame, ChannelFull, DecodeError, DescriptorsLost

log = logging.getLogger("kvd.daemon")
_FIRST_DELAY_SECONDS = 0.1
_LONGEST_DELAY_SECONDS = 5.0
_LONGEST_POLL_SECONDS = 1000.0
_FOR_THE_BROKER = {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}
# Importing numpy would start one BLAS thread a core, and no child computes with it.
_FOR_CHILDREN = {"OPENBLAS_NUM_THREADS": "1"}


class StartedProcess(NamedTuple):
    """A process, its pidfd (readable once it has exited), and the broker's end of its link."""

    process: subprocess.Popen[bytes]
    pidfd: int
    link: socket.socket


def start_process(
    module: str, arguments: Sequence[str] = (), fds: Sequence[int] = ()
) -> StartedProcess:
    """Start ``python -m module``; its last argument is the descriptor of its end of the link.

    The process inherits `fds` under the same numbers. It exits when this process exits.

    Raises:
        OSError: the process could not be started; nothing is left behind.
    """
    broker_end, child_end = socket.socketpair(socket.AF_UNIX)
    with child_end:
        try:
            child_fd = child_end.fileno()
            process = subprocess.Popen(
                # -P: import nothing from the daemon's working directory.
                [sys.executable, "-P", "-m", module, *arguments, str(child_fd)],
                pass_fds=(child_fd, *fds),
                stdin=subprocess.DEVNULL,
                env=_FOR_CHILDREN
                | {name: text for name, text in os.environ.items() if name not in _FOR_THE_BROKER},
            )
            try:
                return StartedProcess(process, os.pidfd_open(process.pid), broker_end)
            except OSError:
                process.kill()
                process.wait()
                raise
        except OSError:
            broker_end.close()
            raise


class Child:
    """One supervised process at a time, and the channel to it.

    Restart delay: `pause` seconds after a process that `became_ready`; otherwise, or if the start
    failed, exponential backoff up to 5 s.

    Args:
        module: what ``python -m`` runs.
        name, fields: name and structured fields of its log lines.
        poller: where the channel and the pidfd are registered.
        decode: returns the header and the message of a frame.
        on_message: called with a message, its descriptors (the callee closes them) and the time.
        on_end: called with the reason why the process ended, and the time.
        pause: see above.
        turn_seconds: time limit of one `turn` for messages; the next call handles the rest.

    Attributes:
        link: the broker's end of the channel; None once closed.
        pidfd: readable when the process has exited; -1 if none runs.
        became_ready: the owner sets it when the running process shows that it serves. It may take
            that back: then the end of the process causes backoff.
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
        self._delay = _FIRST_DELAY_SECONDS
        self._start_at = 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._kill_reason = ""
        self._polls_for_write = False
        self.link: Channel | None = None
        self.pidfd = -1
        self.became_ready = False

    @property
    def running(self) -> bool:
        """Whether there is a process that has not been reaped."""
        return self._process is not None

    @property
    def unread(self) -> bool:
        """Whether the channel has buffered messages, which the poller does not report."""
        return self.link is not None and self.link.more

    @property
    def pid(self) -> int:
        """The process id; -1 if none runs."""
        return self._process.pid if self._process is not None else -1

    def due(self, now: float) -> bool:
        """Whether no process runs and the restart delay is over."""
        return self._process is None and now >= self._start_at

    def start(self, now: float, arguments: Sequence[str] = (), fds: Sequence[int] = ()) -> bool:
        """Start a process with `start_process`; return whether it runs, else back off."""
        try:
            started = start_process(self._module, arguments, fds)
        except OSError as error:
            remedy = f"; {open_files_remedy()}" if is_out_of_files(error) else ""
            log.error("%s cannot be started: %s%s", self.name, error, remedy, extra=self.fields)  # noqa: TRY400  # no bug
            self._back_off(now)
            return False
        self.adopt(started)
        return True

    def adopt(self, started: StartedProcess) -> None:
        """Supervise a process that `start_process` has already started."""
        self._process, self.pidfd = started.process, started.pidfd
        self.link = Channel(started.link, b"ROUTER")
        self.became_ready = self._polls_for_write = False
        for fd in (self.link.fileno(), self.pidfd):
            self._poller.register(fd, select.EPOLLIN)

    def send(self, frame: bytes, fds: Sequence[int] = ()) -> None:
        """Send an order with descriptors to the process, if any; if that fails, kill it."""
        if self.link is None:
            return
        try:
            self.link.send(frame, fds)
        except EOFError:
            return  # the process is exiting; `turn` reaps it
        except (ChannelFull, OSError) as error:
            reason = f"its orders cannot be sent: {error}"
            log.error("%s is killed: %s", self.name, reason, extra=self.fields)  # noqa: TRY400  # no bug
            self.kill(reason)
            return
        self._poll_for_write()

    def turn(self, ready: dict[int, int], now: float) -> None:
        """Flush the channel, dispatch received messages, and reap the process if it has exited.

        Args:
            ready: the poller's events, by descriptor.
            now: monotonic seconds.
        """
        if self.link is not None and self.link.wants_write:
            try:
                self.link.flush()
                self._poll_for_write()
            except EOFError:
                pass  # it is exiting: messages it sent before are still read below
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
        except EOFError:  # the process is exiting by itself
            self.close_link()
        except (DecodeError, BadFrame) as error:
            self.kill(f"sent what is no message: {error}")
        except DescriptorsLost as error:
            self.kill(f"the broker could not receive descriptors: {error}; {open_files_remedy()}")

    def kill(self, reason: str = "the daemon stops") -> None:
        """Send SIGKILL; messages that the process has sent can still be received."""
        if self._process is not None:
            self._kill_reason = self._kill_reason or reason
            self._process.kill()

    def close_link(self) -> None:
        """Close the channel; nothing more is received."""
        if self.link is not None:
            self._poller.unregister(self.link.fileno())
            self.link.close()
            self.link = None

    def reap(self, now: float) -> str:
        """Collect the process, which exits or was killed, and set when the next may start.

        Blocks until the process has exited.

        Returns:
            Why it ended; empty if none ran.
        """
        if self._process is None:
            return ""
        self.close_link()
        code = self._process.wait()
        reason, self._kill_reason = self._kill_reason, ""
        self._process = None
        self._poller.unregister(self.pidfd)
        os.close(self.pidfd)
        self.pidfd = -1
        if self.became_ready:
            self._delay = _FIRST_DELAY_SECONDS
            self._start_at = now + self._pause
        else:
            self._back_off(now)
        if code == -signal.SIGKILL and reason:
            return f"killed by kvd: {reason}"
        return f"killed by signal {-code}" if code < 0 else f"exit status {code}"

    def _poll_for_write(self) -> None:
        """Poll for writability exactly while the channel has unsent bytes."""
        if self.link is not None and self.link.wants_write != self._polls_for_write:
            self._polls_for_write = self.link.wants_write
            write_event = select.EPOLLOUT if self._polls_for_write else 0
            self._poller.modify(self.link.fileno(), select.EPOLLIN | write_event)

    def _back_off(self, now: float) -> None:
        self._start_at = now + self._delay
        self._delay = min(2 * self._delay, _LONGEST_DELAY_SECONDS)


def end_all(children: Iterable[Child], grace: float = 0.0, patience: float = math.inf) -> None:
    """Stop processes and reap them.

    1. Wait `grace` seconds for processes that were told to stop.
    2. Kill the rest, and wait `patience` seconds.
    3. Log and abandon those that still run: they hang in an uninterruptible system call.
    """
    children = list(children)
    _wait(children, grace)
    for child in children:
        child.close_link()
        child.kill()
    for child in _wait(children, patience):
        log.error(
            "%s, pid %d, does not exit: its medium hangs; the next daemon starts after its exit",
            child.name, child.pid, extra=child.fields,
        )  # fmt: skip


def _wait(children: Iterable[Child], seconds: float) -> list[Child]:
    """Reap the processes that exit within `seconds`; return the others."""
    end = time.monotonic() + seconds
    running = [child for child in children if child.running]
    while running and (remaining := end - time.monotonic()) > 0:
        poll = select.poll()
        for child in running:
            poll.register(child.pidfd, select.POLLIN)
        ready = dict(poll.poll(min(remaining, _LONGEST_POLL_SECONDS) * 1000))
        for child in running:
            if child.pidfd in ready:
                child.reap(0.0)
        running = [child for child in running if child.running]
    return running
