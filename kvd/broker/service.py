"""The broker's loop: everything that touches the outside, around kvd.core.

startup → loop → drain → shutdown. One thread; it polls the request socket, the
door and its connections, the lanes' links, pidfds, the pool's allocator and
signals, turns each into a call of the core, and carries the effects out.
"""

import contextlib
import itertools
import logging
import os
import signal
import time
from pathlib import Path
from types import FrameType

import zmq

from kvd.broker.allowed import allow_list
from kvd.broker.available import available_bytes
from kvd.broker.door import Door, Visitor
from kvd.broker.figures import OwnFigures
from kvd.broker.http import HttpProcess
from kvd.broker.keep import Keep
from kvd.broker.memory import DirectoryMemory, PoolMemory
from kvd.broker.notify import Notifier
from kvd.broker.reloading import ConfigReader
from kvd.broker.reopen import open_pool
from kvd.broker.requests import Requests
from kvd.broker.runtime_dir import RuntimeDir
from kvd.broker.supervisor import LaneProcess
from kvd.config.loaded import Loaded
from kvd.config.sources import Sources
from kvd.core.broker import Broker
from kvd.core.effects import (
    DirectoryFd,
    DropDirectory,
    DropFds,
    DropLane,
    Effect,
    Event,
    FdName,
    KillLane,
    LifelineFd,
    Notify,
    OpenPool,
    Reply,
    SessionFds,
    StartLane,
    ToLane,
)
from kvd.errors import BadDatagram, ChannelFull, PoolError, Refused
from kvd.filling import FillOrder
from kvd.link import LINK, Imported, ImportWorker, LaneReady, StopLane
from kvd.seqpacket import close_all
from kvd.state.namespaces import Keeping, Namespaces
from kvd_proto.codec import WIRE
from kvd_proto.devices import HOST
from kvd_proto.errors import DecodeError
from kvd_proto.messages import ErrorCode, Handles
from kvd_proto.sizes import format_size

log = logging.getLogger("kvd.broker")
TICK_SECONDS = 0.25
START_AGAIN_SECONDS = 1.0
HELD_UP_SECONDS = 0.01
DEVICES = (HOST,)


class Service:
    """One running daemon.

    Raises:
        KvdError: it cannot start, with the remedy.
    """

    def __init__(
        self, loaded: Loaded, sources: Sources, version: str, *, cold: bool = False
    ) -> None:
        self.settings = settings = loaded.settings
        self._config = ConfigReader(sources)
        self._allowed = allow_list(settings.allow_users, settings.allow_groups)
        self._runtime = RuntimeDir(Path(settings.runtime_dir))
        self._runtime.lock()
        self._keep = Keep.of(settings, self._runtime.path, cold=cold)
        self._http = HttpProcess(
            self._runtime.path, self._runtime.http_socket, settings.http_listen
        )
        self._directories = DirectoryMemory()
        self._pool: PoolMemory | None = None
        self._incarnations = itertools.count(1)
        self._lanes: dict[str, LaneProcess] = {}
        for device in DEVICES:
            self._add_lane(device)
        self._visitors: dict[int, Visitor] = {}
        self._by_fd: dict[int, Visitor] = {}
        self._stop_at: float | None = None
        self._signals = 0
        self._next_tick = 0.0
        self._figures = OwnFigures()
        self._polled = 0.0
        self._poller = zmq.Poller()
        self._notifier = Notifier.from_environment(os.environ)
        self._boot_id = os.urandom(16)
        self.core = Broker(
            settings,
            boot_id=self._boot_id,
            version=version,
            pid=os.getpid(),
            devices=DEVICES,
            open_namespaces=self._open_namespaces,
            available_bytes=lambda: (
                available_bytes(Path(settings.pool_dir)) + self._keep.held_bytes()
            ),
            kept_bytes=self._keep.kept_bytes,
            surroundings=lambda: self._figures.read(self._requests.dropped),
        )
        self.core.reloading.loaded = loaded
        self.core.state.measures.started = time.time()
        self._requests = Requests(self._runtime.broker_socket, self.core, self._visitors)
        self._door = Door(self._runtime.door_socket)
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poller.register(self._requests.socket, zmq.POLLIN)
        for fd in (self._door.fileno(), self._wake_read):
            self._poller.register(fd, zmq.POLLIN)

    # ----------------------------------------------------------------- loop

    def run(self) -> int:
        """Serve until a signal ends it; the exit status."""
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._config.on_signal)
        wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            log.info("serving %s, pid %d", self._runtime.path, os.getpid())
            while not self._finished():
                self._turn()
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._shutdown()
        return 0

    def _turn(self) -> None:
        now = time.monotonic()
        self._start_lanes(now)
        if self._polled:
            self.core.state.measures.turn(time.monotonic() - self._polled, now)
        ready = dict(self._poller.poll(0 if self.core.busy else int(self._patience * 1000)))
        now = self._polled = time.monotonic()
        for process in list(self._lanes.values()):  # first: what lanes report decides what is READY
            self._lane_turn(process, ready, now)
        if self._requests.socket in ready:
            for effects in self._requests.receive(now):
                self._carry_out(effects)
        for fd in ready:
            if fd in self._by_fd:
                self._visitor_turn(self._by_fd[fd], now)
        if self._door.fileno() in ready:
            self._accept(now)
        if self._wake_read in ready:
            os.read(self._wake_read, 512)
        if self._pool is not None and not self.core.state.pool_ready:
            self._pool_turn(self._pool)
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS / 2
            self._carry_out(self.core.tick(now))
            self._carry_out(self._config.turn(self.core.reloading))
            self.settings = self.core.state.settings
        self._carry_out(self.core.work())
        for visitor in list(self._visitors.values()):
            if visitor.channel.wants_write:
                visitor.channel.flush()
        self._http.turn(self._poller, ready, now)
        self._notifier.turn(now, self.core.state, reloading=self.core.reloading.under_way)

    @property
    def _patience(self) -> float:
        held_up = self._pool is not None and not self._pool.may_be_written
        return HELD_UP_SECONDS if held_up else TICK_SECONDS

    # ----------------------------------------------------------------- pool

    def _open_namespaces(self, cpu_bytes: int) -> Namespaces:
        def make(keeping: Keeping | None, fill: FillOrder) -> Namespaces:
            return Namespaces(
                cpu_bytes,
                policy=self.settings.policy,
                reuse_threshold=self.settings.reuse_threshold,
                lease_seconds=self.settings.lease_seconds,
                ticket_seconds=self.settings.ticket_seconds,
                quotas=self.settings.quotas(cpu_bytes),
                limit=self.settings.max_namespaces,
                make_buffer=self._directories.make,
                keeping=keeping,
                fill=fill,
            )

        try:
            self._pool, namespaces = open_pool(self._keep, cpu_bytes, self._boot_id, make)
        except PoolError:
            if self.settings.pool_bytes is not None:  # this daemon does not start
                self._keep.close()
            raise
        self._pool.start()
        self._poller.register(self._pool.done_fd, zmq.POLLIN)
        log.info("pool of %s at %s", format_size(cpu_bytes), self._pool.path)
        return namespaces

    def _pool_turn(self, pool: PoolMemory) -> None:
        if pool.error:
            self._keep.keeps = False  # it will not fit next time either
            raise PoolError(pool.error)
        with contextlib.suppress(BlockingIOError):
            os.read(pool.done_fd, 512)
        self.core.state.allocated = pool.allocated
        if self.core.state.pool_ready:
            self._poller.unregister(pool.done_fd)
            self._note(Event(f"all {format_size(pool.nbytes)} of the pool are allocated"))

    # ---------------------------------------------------------------- lanes

    def _add_lane(self, device: str) -> None:
        self._lanes[device] = LaneProcess(
            device, self._runtime.path, self._incarnations, self.settings
        )

    def _start_lanes(self, now: float) -> None:
        pool = self._pool
        if pool is None or self.core.state.stopping or not pool.may_be_written:
            return
        for process in self._lanes.values():
            if not process.running and now >= process.start_at:
                try:
                    process.start(pool.fd, pool.nbytes)
                except OSError as error:
                    text, lane = "lane %s cannot be started: %s", {"lane": process.device}
                    log.error(text, process.device, error, extra=lane)  # noqa: TRY400
                    process.start_at = now + START_AGAIN_SECONDS
                    continue
                if process.channel is not None:
                    self._poller.register(process.channel.fileno(), zmq.POLLIN)
                self._poller.register(process.pidfd, zmq.POLLIN)

    def _lane_turn(self, process: LaneProcess, ready: dict[object, int], now: float) -> None:
        channel = process.channel
        if channel is None:
            return
        if channel.wants_write:
            channel.flush()
        if channel.fileno() in ready:
            try:
                while (received := channel.recv()) is not None:
                    self._lane_message(process, *received, now)
            except EOFError:
                self._poller.unregister(channel.fileno())
                process.kill()
        if process.pidfd in ready:
            for fd in (process.pidfd, channel.fileno()):
                with contextlib.suppress(KeyError):
                    self._poller.unregister(fd)
            reason = process.reap(now)
            if not self.core.state.stopping:
                self._carry_out(self.core.lane_lost(process.device, reason))

    def _lane_message(
        self, process: LaneProcess, frame: bytes, fds: tuple[int, ...], now: float
    ) -> None:
        try:
            _, message = LINK.decode(frame)
        except DecodeError:
            lane = {"lane": process.device}
            log.exception("lane %s sent what is no message", process.device, extra=lane)
            process.kill()
            return
        if isinstance(message, LaneReady) and fds:
            process.lifeline, fds = fds[0], fds[1:]
            process.served = True
        close_all(fds)
        self._carry_out(self.core.lane_message(process.device, message, now))

    # ------------------------------------------------------------- visitors

    def _accept(self, now: float) -> None:
        del now
        while (visitor := self._door.accept()) is not None:
            if objection := self._allowed.objection(visitor.peer):
                self._requests.forbid(visitor, objection)
                continue
            own = visitor.peer.pid == self._http.pid  # a full house must not look like a dead one
            session, effects = self.core.connected(os.urandom(16), visitor.peer, own=own)
            if session is None:
                text = self.core.state.registry.full
                self._requests.forbid(visitor, text, ErrorCode.LIMIT)
            else:
                visitor.session = session
                self._visitors[session.number] = visitor
                for fd in (visitor.channel.fileno(), visitor.pidfd):
                    if fd >= 0:
                        self._by_fd[fd] = visitor
                        self._poller.register(fd, zmq.POLLIN)
            self._carry_out(effects)

    def _visitor_turn(self, visitor: Visitor, now: float) -> None:
        session = visitor.session
        if session is None or session.number not in self._visitors:
            return
        try:
            while (received := visitor.channel.recv()) is not None:
                frame, fds = received
                visitor.fds += fds
                _, message = WIRE.decode(frame)
                if not isinstance(message, Handles) or message.count != len(fds):
                    name = type(message).__name__
                    text = f"{name} with {len(fds)} descriptors at the door"
                    raise Refused(ErrorCode.BAD_MESSAGE, text)
                effects = self.core.descriptors(session, message.first, message.count, now)
                self._carry_out(effects)
            alive = visitor.pidfd < 0 or not _readable(visitor.pidfd)
        except EOFError:
            alive = False
        except (BadDatagram, DecodeError, Refused) as error:
            who = session.who
            log.warning("%s is shown the door: %s", who, error, extra=who.fields)
            alive = False
        if not alive:
            self._leave(visitor)

    def _leave(self, visitor: Visitor) -> None:
        session = visitor.session
        if session is None or self._visitors.pop(session.number, None) is None:
            return
        for fd in (visitor.channel.fileno(), visitor.pidfd):
            if fd >= 0:
                del self._by_fd[fd]
                self._poller.unregister(fd)
        self._carry_out(self.core.lost(session))
        visitor.close()

    # -------------------------------------------------------------- effects

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply():
                    self._requests.reply(effect)
                case Notify():
                    self._notify(effect)
                case ToLane():
                    self._to_lane(effect)
                case StartLane():
                    self._add_lane(effect.device)
                case DropLane():
                    del self._lanes[effect.device]
                case KillLane():
                    text = f"lane {effect.device} is killed: {effect.reason}"
                    self._note(Event(text, "error", {"lane": effect.device}))
                    self._lanes[effect.device].kill()
                case OpenPool():
                    self._note(Event(f"cpu_bytes auto: {effect.explanation}"))
                case DropFds():
                    visitor = self._visitors.get(effect.session)
                    if visitor is not None:
                        visitor.drop_fds()
                case DropDirectory():
                    self._directories.drop(effect.namespace.hex())
                    self._keep.drop_ledger(effect.namespace.hex())
                case Event():
                    self._note(effect)

    def _note(self, event: Event) -> None:
        self.core.state.events.add(event, time.time())
        level = logging.getLevelNamesMapping()[event.level.upper()]
        log.log(level, event.text, extra=event.fields)

    def _notify(self, effect: Notify) -> None:
        visitor = self._visitors.get(effect.session)
        if visitor is None or visitor.session is None:
            return
        session = visitor.session
        frame = WIRE.encode(effect.message, 0, self.core.state.boot_id, session.token)
        try:
            visitor.channel.send(frame, self._resolve(effect.fd))
        except (ChannelFull, EOFError, OSError) as error:
            log.warning("%s does not listen (%s)", session.who, error, extra=session.who.fields)
            self._leave(visitor)

    def _to_lane(self, effect: ToLane) -> None:
        process = self._lanes[effect.device]
        if process.channel is None:
            return
        try:
            process.channel.send(LINK.encode(effect.message), self._resolve(effect.fd))
        except BadDatagram as error:
            if not isinstance(effect.message, ImportWorker):
                raise
            text = f"the layout is too large to hand to the lane: {error}"
            refusal = Imported(session=effect.message.session, error=text)
            self._carry_out(self.core.lane_message(effect.device, refusal, time.monotonic()))
        except (ChannelFull, EOFError, OSError) as error:
            lane = {"lane": effect.device}
            log.error("lane %s does not listen (%s)", effect.device, error, extra=lane)  # noqa: TRY400
            process.kill()

    def _resolve(self, name: FdName | None) -> list[int]:
        match name:
            case DirectoryFd():
                return [self._directories.fd(name.namespace.hex())]
            case LifelineFd():
                return [self._lanes[name.device].lifeline]
            case SessionFds():
                return list(self._visitors[name.session].fds)
            case None:
                return []

    # ------------------------------------------------------------------ end

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._signals += 1

    def _finished(self) -> bool:
        if not self._signals:
            return False
        now = time.monotonic()
        if self._stop_at is None:
            self._note(Event("stopping: a signal came"))
            self._notifier.stopping(self.settings.drain_seconds)
            self.core.state.stopping = True
            self._stop_at = now + self.settings.drain_seconds
            for process in self._lanes.values():
                self._to_lane(ToLane(process.device, StopLane()))
        lanes_gone = not any(process.running for process in self._lanes.values())
        if lanes_gone or self._signals > 1:
            return True
        if now >= self._stop_at:
            log.warning("not drained after %.0f s, stopping", self.settings.drain_seconds)
            return True
        return False

    def _shutdown(self) -> None:
        self._http.close()
        self._notifier.stopping(0.0)
        for process in self._lanes.values():
            process.kill()
            process.reap(time.monotonic())
        for visitor in list(self._visitors.values()):
            visitor.close()
        self._door.close()
        self._requests.close()
        self._directories.close()
        if self._pool is not None:
            self._pool.close()
        self._keep.close()
        self._runtime.release()
        os.close(self._wake_read)
        os.close(self._wake_write)
        self._notifier.close()
        log.info("stopped")

    def __repr__(self) -> str:
        return f"<Service {self._runtime!r}: {self.core!r}>"


def _readable(fd: int) -> bool:
    poller = zmq.Poller()
    poller.register(fd, zmq.POLLIN)
    return bool(poller.poll(0))
