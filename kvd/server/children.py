"""The broker's child processes: lanes, tiers and the HTTP server, each a `kvd.server.child.Child`.

Messages and exits of lanes and tiers go to the broker's decisions, whose effects say what to send
and which process to kill.
"""

import itertools
import logging
import os
import select
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path

from kvd.broker.broker import Broker
from kvd.broker.children import ChildState
from kvd.broker.effects import Effect, KillTier
from kvd.broker.tiers.tier import TierProcess, tiers_of
from kvd.config.values import ListenAddress, parse_listen, parse_tiers
from kvd.machine.process import stopped_text
from kvd.server.child import Child, end_all
from kvd.server.pool_memory import PoolMemory
from kvd.wire.link import LINK, BeginLane, LaneReady, StopLane, lane_socket
from kvd.wire.listener import Listener, bind_tcp
from kvd.wire.tiering import TIERING, BeginTier, TierReady
from kvd_proto.channel import close_all
from kvd_proto.messages import Message

log = logging.getLogger("kvd.daemon")
_PAUSE_SECONDS = 0.25
_TIER_END_SECONDS = 2.0
_TIER_TURN_SECONDS = 0.002  # a scan's messages have a thousand keys each
_HTTP_AFTER_SECONDS = 2.0
_HTTP_SILENT_SECONDS = 30.0
_QUIET_SECONDS = 1.0  # an answer takes milliseconds


def configured_tiers(texts: list[str]) -> list[TierProcess]:
    """Return the configured tiers; `kvd.doctor.start` has checked their options."""
    if not texts:
        return []
    from kvd.tier.contract import backend_class  # noqa: PLC0415  # most daemons have no tier

    backends = [(setting, backend_class(setting)) for setting in parse_tiers(texts)]
    return tiers_of((setting, backend.medium, backend.shared) for setting, backend in backends)


class LaneProcess(Child):
    """The process of one device's lane.

    Attributes:
        lifeline: a descriptor that reads end of file once the lane copies nothing any more.
        socket: path on which the lane serves workers; None before `BeginLane` was sent.
    """

    lifeline = -1
    socket: Path | None = None

    def reap(self, now: float) -> str:
        """Reap the process, close its lifeline and remove its socket; see `Child.reap`."""
        if self.socket is not None:
            self.socket.unlink(missing_ok=True)
            self.socket = None
        if self.lifeline >= 0:
            os.close(self.lifeline)
            self.lifeline = -1
        return super().reap(now)


class Children:
    """The processes of lanes, by device, and of tiers, in order.

    A lane's process may start before the pool exists; it is sent `BeginLane` once there is a pool.
    Each `BeginLane` carries a new incarnation, a number that no lane of this daemon had before.

    The broker never waits for a tier. If a killed tier does not exit because its medium hangs, the
    next process starts once it has exited.
    """

    def __init__(
        self,
        runtime_dir: Path,
        core: Broker,
        poller: select.epoll,
        execute: Callable[[list[Effect]], None],
    ) -> None:
        self._runtime_dir = runtime_dir
        self._core = core
        self._poller = poller
        self._execute = execute
        self._incarnations = itertools.count(1)
        # Each lane gets this file and locks it to pin: one lane at a time (see `BeginLane`).
        self._pin_lock = os.memfd_create("kvd-pin-lock", os.MFD_CLOEXEC)
        self.lane_children: dict[str, LaneProcess] = {}
        # No process runs yet: `start_due` starts them.
        self.tier_children = [
            Child(
                "kvd.tier",
                f"tier {tier.name}",
                {"tier": tier.name},
                poller,
                decode=TIERING.decode,
                on_message=partial(self._on_tier_message, tier.index),
                on_end=partial(self._on_tier_end, tier.index),
                pause=_PAUSE_SECONDS,
                turn_seconds=_TIER_TURN_SECONDS,
            )
            for tier in core.state.tiers
        ]

    def add_lane(self, device: str) -> LaneProcess:
        """Add the lane of a device; `start_due` starts its process."""
        lane = self.lane_children[device] = LaneProcess(
            "kvd.lane",
            f"lane {device}",
            {"lane": device},
            self._poller,
            decode=LINK.decode,
            on_message=partial(self._on_lane_message, device),
            on_end=lambda reason, _: self._execute(self._core.supervision.lost(device, reason)),
        )
        return lane

    def start_due(self, pool: PoolMemory, now: float) -> None:
        """Start processes whose restart delay is over, and send each what it is to serve."""
        for device, lane in self.lane_children.items():
            if lane.due(now):
                lane.start(now)
            if lane.running and lane.socket is None:
                self._begin_lane(device, lane, pool)
        if not pool.ready:  # tiers write into the pool, and its pages may not be allocated yet
            return
        for index, tier in enumerate(self.tier_children):
            if tier.due(now) and tier.start(now):
                self._begin_tier(index, tier, pool, now)

    def _begin_lane(self, device: str, lane: LaneProcess, pool: PoolMemory) -> None:
        number, state = next(self._incarnations), self._core.state
        lane.socket = self._runtime_dir / lane_socket(device, number, state.boot_id)
        begin = BeginLane(
            device=device,
            incarnation=number,
            endpoint=f"ipc://{lane.socket}",
            pool_bytes=pool.nbytes,
            max_queued_jobs=state.settings.max_queued_jobs,
            max_queued_bytes=state.settings.queued_bytes,
            log_level=state.settings.log_level,
            log_style=state.settings.log_format,
        )
        lane.send(LINK.encode(begin), [pool.fd, self._pin_lock])

    def _begin_tier(self, index: int, tier: Child, pool: PoolMemory, now: float) -> None:
        state = self._core.state
        self._core.tiering.process_started(index, tier.pid, now)
        begin = BeginTier(
            index=index,
            setting=state.tiers[index].setting.text,
            pool_bytes=pool.nbytes,
            log_level=state.settings.log_level,
            log_style=state.settings.log_format,
        )
        tier.send(TIERING.encode(begin), [pool.fd])

    def _on_lane_message(
        self, device: str, message: Message, fds: tuple[int, ...], now: float
    ) -> None:
        if isinstance(message, LaneReady) and fds:
            lane = self.lane_children[device]
            lane.lifeline, lane.became_ready = fds[0], True
            fds = fds[1:]
        close_all(fds)
        self._execute(self._core.supervision.received(device, message, now))

    def _on_tier_message(
        self, index: int, message: Message, fds: tuple[int, ...], now: float
    ) -> None:
        close_all(fds)
        self.tier_children[index].became_ready |= isinstance(message, TierReady)
        self._execute(self._core.tiering.received(index, message, now))

    def _on_tier_end(self, index: int, reason: str, now: float) -> None:
        if not self._core.state.stopping:
            self._execute(self._core.tiering.lost(index, reason, now))

    def note_stopped(self, now: float) -> None:
        """Note which lanes and tiers a signal has stopped, of those that do not answer."""
        lanes, tiers = self._core.state.lanes, self._core.state.tiers
        children: list[tuple[Child, ChildState]] = [
            *((child, lanes[device].child) for device, child in self.lane_children.items()),
            *zip(self.tier_children, (tier.child for tier in tiers), strict=True),
        ]
        for child, state in children:
            if not state.up or state.silent(now) > _QUIET_SECONDS:
                state.stopped = stopped_text(child.pid)

    def send_to_lane(self, device: str, message: Message, fds: Sequence[int]) -> None:
        """Send an order to a lane; kill it instead if it is to stop before it has begun."""
        lane = self.lane_children[device]
        if lane.socket is not None:
            lane.send(LINK.encode(message), fds)
        elif isinstance(message, StopLane):
            lane.kill()

    def send_to_tier(self, index: int, message: Message, fds: Sequence[int]) -> None:
        """Send an order to a tier."""
        self.tier_children[index].send(TIERING.encode(message), fds)

    def kill_tier(self, effect: KillTier) -> None:
        """Kill a tier's process; with `back_off` its restart is delayed as after a failed start."""
        tier = self.tier_children[effect.tier]
        tier.became_ready &= not effect.back_off
        tier.kill(effect.reason)

    def close(self) -> None:
        """Stop all processes: lanes at once, tiers after a grace period; abandon hung tiers."""
        end_all(self.lane_children.values())
        end_all(self.tier_children, _TIER_END_SECONDS, _TIER_END_SECONDS)
        os.close(self._pin_lock)


class HttpProcess:
    """The HTTP server's process, and its listening sockets, which the broker binds and keeps.

    The process inherits the sockets, so no client is refused during a restart: connections wait in
    the kernel's queue. It is a process because a thread would share the interpreter lock with the
    broker's loop. It starts two seconds after the broker or with the first connection, and sends a
    message every five seconds.

    Args:
        runtime_dir: the directory of the daemon.
        unix_path: of the Unix socket, which is always bound.
        listen: the setting `http_listen`; with ``off`` the process starts only
            with the first connection to the Unix socket.

    Raises:
        ConfigError: an address cannot be bound; names it and the remedy.
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
        self._state = ChildState()
        self._child = Child(
            "kvd.report",
            "the HTTP process",
            {},
            poller,
            decode=lambda frame: (None, frame),
            on_message=self._on_message,
            on_end=lambda reason, _: log.warning("the HTTP process has ended: %s", reason),
            pause=_PAUSE_SECONDS,
        )
        self._start_at: float | None = None
        self._watched_fds: list[int] = []
        if self._tcp is not None:
            host, port = self._tcp.getsockname()[:2]
            bound = ListenAddress(host, port)
            log.info("HTTP on http://%s", bound)
            if bound.everywhere:
                log.warning(
                    "http_listen = %s: every machine that reaches this one can read the daemon's"
                    " state without a password; 127.0.0.1 restricts it to this machine",
                    listen,
                )

    @property
    def pid(self) -> int:
        """The process id; -1 if none runs."""
        return self._child.pid

    def turn(self, ready: dict[int, int], now: float) -> None:
        """Start the process when it is due, and kill it if it falls silent."""
        if self._start_at is None:
            self._start_at = now + _HTTP_AFTER_SECONDS
        if self._child.running:
            self._child.turn(ready, now)
            if reason := self._state.check(now, _HTTP_SILENT_SECONDS):
                stopped = stopped_text(self.pid)
                self._child.kill(f"{reason}: {stopped}" if stopped else reason)
        elif self._child.due(now):
            client_waiting = any(fd in ready for fd in self._watched_fds)
            if client_waiting or (self._tcp is not None and now >= self._start_at):
                self._start(now)
            elif not self._watched_fds:
                self._watched_fds = [s.fileno() for s in (self._tcp, self._unix) if s is not None]
                for fd in self._watched_fds:
                    self._poller.register(fd, select.EPOLLIN)

    def _start(self, now: float) -> None:
        for fd in self._watched_fds:
            self._poller.unregister(fd)
        self._watched_fds = []
        fds = [self._unix.fileno()]
        arguments = ["--runtime-dir", str(self._runtime_dir), "--unix-fd", str(fds[0])]
        if self._tcp is not None:
            fds.append(self._tcp.fileno())
            arguments += ["--tcp-fd", str(self._tcp.fileno()), "--host", self._host]
        self._state.started(now)
        self._child.start(now, [*arguments, "--link-fd"], fds)

    def _on_message(self, _message: bytes, fds: Iterable[int], now: float) -> None:
        close_all(tuple(fds))
        self._child.became_ready = True
        self._state.heard(now)
        self._state.expect(now)  # the next message

    def close(self) -> None:
        """Kill the process and close the listening sockets."""
        end_all([self._child])
        self._unix.close()
        if self._tcp is not None:
            self._tcp.close()
