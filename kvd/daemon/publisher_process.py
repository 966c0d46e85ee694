"""The process that publishes KV events, and the addresses that it does so on.

The broker binds the addresses and keeps them, as those of HTTP: subscribers that connect while a
process is replaced wait in the kernel's queue for the next one. It never waits for the process: one
that does not read its orders, or falls silent, is replaced and told everything anew.
"""

import contextlib
import logging
import select
import socket
import time
from collections.abc import Callable
from pathlib import Path

from kvd.broker.effects import Effect, ToPublisher
from kvd.broker.publishing import Publishing
from kvd.config.endpoints import Endpoint, parse_events, parse_replay
from kvd.config.settings import Settings
from kvd.config.tiers import parse_tiers
from kvd.config.values import Listen
from kvd.daemon.addresses import bind_tcp, bind_unix
from kvd.daemon.child import ChildProcess
from kvd.errors import ChannelFull, ConfigError
from kvd.tier.backends import backend
from kvd.wire.listener import Listener
from kvd.wire.publishing import PUBLISHING, BeginPublisher, PublisherReport
from kvd.wire.seqpacket import close_all
from kvd_proto.announcements import locality
from kvd_proto.errors import DecodeError
from kvd_proto.messages import Message

log = logging.getLogger("kvd.daemon")
_PAUSE_SECONDS = 0.25
_SILENT_SECONDS = 15.0
_BIND_SECONDS = 4.0
"""For so long the publisher of a daemon that was killed may still listen: it takes all back."""
_END_SECONDS = 4.0
NOTE = "published"


class PublisherProcess:
    """The publisher's addresses and its process; nothing of it where `events` is off.

    Args:
        runtime_dir: where the note of what was published lies.
        settings: of the daemon.
        core: is told of reports, and of the process's beginning and end.
        carry_out: carries effects out.

    Attributes:
        address: where subscribers find it, as `events` has it; empty where it is off.

    Raises:
        ConfigError: an address cannot be had; names it and the remedy.
    """

    def __init__(
        self,
        runtime_dir: Path,
        settings: Settings,
        core: Publishing,
        poller: select.epoll,
        carry_out: Callable[[list[Effect]], None],
    ) -> None:
        self._note = runtime_dir / NOTE
        self._core = core
        self._carry_out = carry_out
        self._child = ChildProcess(
            "kvd.publisher", "the publisher of KV events", poller, _PAUSE_SECONDS
        )
        self._heard = 0.0
        self._bound: list[socket.socket | Listener] = []
        self._paths: list[Path] = []
        events, replay = parse_events(settings.events), parse_replay(settings.events_replay)
        self._begin: BeginPublisher | None = None
        self.address = ""
        if events is None:
            if replay is not None:
                log.warning("events_replay = %s does nothing while events is off", replay)
            return
        try:
            at = events.address if events.connects else self._bind(events, "events")
            replay_at = "" if replay is None else self._bind(replay, "events_replay")
        except ConfigError:
            self._unbind()
            raise
        self.address = f"connect:{at}" if events.connects else at
        self._begin = BeginPublisher(
            events=at,
            connects=events.connects,
            replay=replay_at,
            note=str(self._note),
            locality=locality(backend(tier).medium for tier in parse_tiers(settings.tier)),
        )
        log.info("KV events on %s%s", self.address, f", replay on {replay_at}" if replay_at else "")

    def _bind(self, endpoint: Endpoint, setting: str) -> str:
        """Listen at an endpoint; return it with the address that it has become."""
        if isinstance(endpoint.at, Path):
            self._bound.append(bind_unix(endpoint.at, setting))
            self._paths.append(endpoint.at)
            return endpoint.address
        end = time.monotonic() + _BIND_SECONDS
        while True:
            try:
                bound = bind_tcp(endpoint.at, setting)
            except ConfigError:
                if time.monotonic() > end or not self._note.exists():
                    raise
                time.sleep(0.05)
            else:
                break
        self._bound.append(bound)
        listen = Listen(*bound.getsockname()[:2])
        if listen.everywhere:
            log.warning(
                "%s = %s: everybody who reaches this machine reads which prompts are cached, with"
                " their token ids, without a password; 127.0.0.1 is for this machine alone",
                setting,
                endpoint,
            )
        return f"tcp://{listen}"

    def _unbind(self) -> None:
        for bound in self._bound:
            bound.close()
        self._bound = []
        for path in self._paths:
            path.unlink(missing_ok=True)
        self._paths = []

    # ----------------------------------------------------------------- loop

    def turn(self, ready: dict[int, int], now: float) -> None:
        """Start the process, read what it reports, start it again."""
        if self._begin is None:
            return
        child = self._child
        if not child.running:
            if now >= child.start_at:
                self._start(self._begin, now)
            return
        if child.link is not None:
            with contextlib.suppress(EOFError):  # what it sent before is read, and its end
                if child.link.wants_write:
                    child.link.flush()
            if child.link.fileno() in ready:
                self._receive(now)
        if child.pidfd in ready:
            self._carry_out(self._core.lost(child.reap(now)))
        elif now - self._heard > _SILENT_SECONDS:
            log.error("%s is killed: silent for %.0f s", child.name, now - self._heard)
            self._heard = now
            child.kill()

    def _start(self, begin: BeginPublisher, now: float) -> None:
        if self._child.spawn([], now):
            self._heard = now
            self._send(begin, [each.fileno() for each in self._bound])
            self._carry_out(self._core.begun())

    def _receive(self, now: float) -> None:
        link = self._child.link
        try:
            while link is not None and (received := link.recv()) is not None:
                close_all(received[1])
                _, report = PUBLISHING.decode(received[0])
                if isinstance(report, PublisherReport):
                    self._heard, self._child.served = now, True
                    self._carry_out(self._core.received(report, self._child.pid, now))
        except EOFError:
            self._child.hang_up()
        except DecodeError:
            log.exception("%s sent what is no message", self._child.name)
            self._child.kill()

    def tell(self, effect: ToPublisher, fds: list[int]) -> None:
        """Send it a message; one that does not read is killed, and the next is told everything."""
        self._send(effect.message, fds)

    def _send(self, message: Message, fds: list[int]) -> None:
        if self._child.link is None:
            return
        try:
            self._child.link.send(PUBLISHING.encode(message), fds)
        except (ChannelFull, EOFError, OSError) as error:
            log.error("%s does not read (%s)", self._child.name, error)  # noqa: TRY400  # the text has the reason
            self._child.kill()

    # ------------------------------------------------------------------ end

    def stop(self) -> None:
        """Have it take everything back; `close` waits for that."""
        if self._child.link is not None:
            self._child.link.hang_up()

    def close(self) -> None:
        """End the process, which may finish what `stop` began, and give the addresses back."""
        if self._child.pidfd >= 0:
            select.select([self._child.pidfd], [], [], _END_SECONDS)
        self._child.kill()
        self._child.reap(0.0)
        self._unbind()

    def __repr__(self) -> str:
        return f"<PublisherProcess {self.address or 'off'}, {self._child!r}>"
