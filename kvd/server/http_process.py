"""The addresses that HTTP is served on, and the process that serves them.

The broker binds the addresses and keeps them; it accepts nothing itself. The
process that does inherits them, so that its end loses no address: clients that
connect meanwhile wait in the kernel's queue for the next one. A thread would share
the interpreter's lock with the broker's loop.

The process starts two seconds after the broker, or with the first connection. It
sends a message every five seconds; one that stops doing so is killed and replaced.
"""

import logging
import select
from pathlib import Path

from kvd.config.values import Listen, parse_listen
from kvd.server.child import ChildProcess
from kvd.wire.listener import Listener, bind_tcp
from kvd_proto.errors import BadFrame, DescriptorsLost

log = logging.getLogger("kvd.daemon")
_START_AFTER_SECONDS = 2.0
_SILENT_SECONDS = 30.0
_HELD_UP_SECONDS = 5.0  # between two turns: the broker itself stood still, and has read no report
_PAUSE_SECONDS = 0.25


class HttpProcess:
    """HTTP's listeners and its process.

    Args:
        runtime_dir: the directory of the daemon.
        unix_path: the Unix socket, which is always there.
        listen: the setting `http_listen`. With ``off`` the process starts only
            with the first connection to the Unix socket.

    Raises:
        ConfigError: an address cannot be had; names it and the remedy.
    """

    def __init__(
        self, runtime_dir: Path, unix_path: Path, listen: str, poller: select.epoll
    ) -> None:
        self._runtime_dir = runtime_dir
        address = parse_listen(listen)
        self._host = address.host if address is not None else ""
        self._tcp = bind_tcp(address) if address is not None else None
        self._unix = Listener(unix_path)
        self._poller = poller
        self._child = ChildProcess("kvd.report", "the HTTP process", poller, _PAUSE_SECONDS)
        self._heard = self._turned = 0.0
        self._eager_at: float | None = None
        self._watched: list[int] = []
        if self._tcp is not None:
            host, port = self._tcp.getsockname()[:2]
            bound = Listen(host, port)
            log.info("HTTP on http://%s", bound)
            if bound.everywhere:
                log.warning(
                    "http_listen = %s: everybody who reaches this machine reads the daemon's"
                    " state, without a password; 127.0.0.1 is for this machine alone",
                    listen,
                )

    @property
    def pid(self) -> int:
        """The pid of the process that serves now; -1 where none does."""
        return self._child.pid

    def turn(self, ready: dict[int, int], now: float) -> None:
        """Start the process, watch it, start it again."""
        if (paused := now - self._turned) > _HELD_UP_SECONDS:
            self._heard += paused
        self._turned = now
        if self._eager_at is None:
            self._eager_at = now + _START_AFTER_SECONDS
        if self._child.running:
            self._watch(ready, now)
        elif now >= self._child.start_at:
            asked = any(fd in ready for fd in self._watched)
            if asked or (self._tcp is not None and now >= self._eager_at):
                self._start(now)
            elif not self._watched:
                self._watched = [s.fileno() for s in (self._tcp, self._unix) if s is not None]
                for fd in self._watched:
                    self._poller.register(fd, select.EPOLLIN)

    def _start(self, now: float) -> None:
        for fd in self._watched:
            self._poller.unregister(fd)
        self._watched = []
        self._heard = now
        fds = [self._unix.fileno()]
        arguments = ["--runtime-dir", str(self._runtime_dir), "--unix-fd", str(fds[0])]
        if self._tcp is not None:
            fds.append(self._tcp.fileno())
            arguments += ["--tcp-fd", str(self._tcp.fileno()), "--host", self._host]
        self._child.spawn([*arguments, "--link-fd"], now, fds)

    def _watch(self, ready: dict[int, int], now: float) -> None:
        child = self._child
        if child.pidfd in ready:
            log.warning("the HTTP process has ended: %s", child.reap(now))
        elif child.link is not None and child.link.fileno() in ready:
            try:
                if child.link.receive_all():
                    self._heard, child.served = now, True
            except EOFError:
                child.close_link()
            except (BadFrame, DescriptorsLost) as error:
                child.kill(f"sent what is no message: {error}")
        elif now - self._heard > _SILENT_SECONDS:
            child.kill(f"did not report for {now - self._heard:.0f} s")
            self._heard = now

    def close(self) -> None:
        """End the process and give the addresses back."""
        self._child.kill()
        self._child.reap(0.0)
        self._unix.close()
        if self._tcp is not None:
            self._tcp.close()

    def __repr__(self) -> str:
        return f"<HttpProcess {self._tcp}, {self._child!r}>"
