"""The broker's loop: everything that touches the outside, around kvd.broker.

startup → loop → drain → shutdown. One thread; it polls the connections of sessions, the lanes, the
pool's allocator and signals, turns each into a call of the core, and carries the effects out.
"""

import contextlib
import logging
import math
import os
import select
import signal
import threading
import time
from pathlib import Path
from types import FrameType

from kvd.broker.admission import auto_size
from kvd.broker.broker import Broker
from kvd.broker.effects import (
    ChunksReady,
    DirectoryFd,
    DropEngine,
    DropFds,
    DropLane,
    Effect,
    FdName,
    KillLane,
    KillTier,
    LifelineFd,
    LogEvent,
    NamespaceFds,
    Notify,
    OpenPool,
    Reply,
    SessionFds,
    StartLane,
    ToLane,
    ToTier,
)
from kvd.broker.operations import ConfigReload
from kvd.cache.namespaces import LedgerSetup, Namespaces
from kvd.config.settings import Settings
from kvd.config.sources import LoadedSettings, Sources
from kvd.errors import ConfigError, PoolError, Refusal
from kvd.logs import set_level
from kvd.machine.memory import PoolLimits
from kvd.machine.process import StallDetector, UsageReader
from kvd.pool.geometry import FillOrder
from kvd.server.child import StartedProcess
from kvd.server.children import Children, HttpProcess, configured_tiers
from kvd.server.client_files import DescriptionFiles, DirectoryMemory, ReadyPipes
from kvd.server.notify import Notifier
from kvd.server.persistent_pool import PersistentPool
from kvd.server.pool_memory import PoolMemory
from kvd.server.runtime_dir import AllowList, RuntimeDir
from kvd.server.sessions import SessionServer
from kvd.server.state_files import ResetFile, forget_pool_dir, remember_pool_dir
from kvd_proto.capacity import pinning_lanes
from kvd_proto.messages import HOST, ErrorCode
from kvd_proto.text import format_size

log = logging.getLogger("kvd.daemon")
TICK_SECONDS = 0.25
HELD_UP_SECONDS = 0.01


class ConfigReader:
    """Passes SIGHUP and what was read on to the broker's decisions.

    It reads beside the loop: a disk may take its time, the loop may not.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._hung_up = False
        self._outcome: LoadedSettings | ConfigError | None = None

    def on_signal(self, number: int, frame: FrameType | None) -> None:
        """SIGHUP's handler."""
        del number, frame
        self._hung_up = True

    def turn(self, core: ConfigReload) -> list[Effect]:
        """One turn of the loop: pass on what was read, begin to read where that is wanted."""
        effects: list[Effect] = []
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            effects += core.finish(outcome)
            set_level(core.loaded.settings.log_level)
        if self._hung_up:
            self._hung_up = False
            core.sighup()
        if core.begin():
            threading.Thread(target=self._read, name="kvd-config", daemon=True).start()
        return effects

    def _read(self) -> None:
        try:
            self._outcome = self._sources.load()
        except ConfigError as error:
            self._outcome = error
        except Exception as error:  # noqa: BLE001  # whoever waits gets an answer
            self._outcome = ConfigError(f"the configuration cannot be read: {error!r}")


class BrokerService:
    """One running daemon.

    Args:
        loaded: the settings.
        sources: where they came from, to read them again.
        version: name and version of the daemon.
        runtime: its directory, locked.
        first_lane: the host's lane, where it was started already.
        cold: begin without the kept pool.

    Raises:
        KvdError: it cannot start, with the remedy.
    """

    def __init__(
        self,
        loaded: LoadedSettings,
        sources: Sources,
        version: str,
        runtime: RuntimeDir,
        first_lane: StartedProcess | None,
        *,
        cold: bool = False,
    ) -> None:
        settings = loaded.settings
        allowed = AllowList(settings.allow_users, settings.allow_groups)
        self._notifier = Notifier.from_environment(os.environ)
        self._config = ConfigReader(sources)
        self._runtime = runtime
        remember_pool_dir(runtime.path, Path(settings.pool_dir))
        self._kept_pool = PersistentPool(
            Path(settings.pool_dir),
            self._runtime.path,
            keeps=settings.keep_pool == "yes",
            cold=cold,
        )
        self._resets = ResetFile(self._runtime.resets)
        self._poller = select.epoll()
        self._http = HttpProcess(
            self._runtime.path, self._runtime.http_socket, settings.http_listen, self._poller
        )
        self._directories = DirectoryMemory()
        self._descriptions = DescriptionFiles(self._kept_pool.open_descriptions)
        self._ready_pipes = ReadyPipes()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pool: PoolMemory | None = None
        self._drained_by: float | None = None  # end of `drain_seconds`
        self._stop_at = math.inf  # when the lanes are killed, whatever they do
        self._signals = 0
        self._next_tick = 0.0
        self._held_up = False  # by a process that may still write to the pool's memory
        self._usage = UsageReader()
        self._polled = 0.0
        self._standstill = StallDetector("broker")
        self._boot_id = os.urandom(16)
        self.core = Broker(
            loaded,
            boot_id=self._boot_id,
            version=version,
            pid=os.getpid(),
            devices=[HOST],
            started=time.time(),
            usage=self._usage.read,
            tiers=configured_tiers(settings.tier),
        )
        reserve = settings.reserve_bytes if settings.pool_bytes is None else None
        for warning in self._pool_limits().warnings(reserve):
            self._note(LogEvent(warning, "warning"))
        if settings.pool_bytes is not None:
            self.core.registration.pool_opened(self._open_pool(settings.pool_bytes))
        self._children = Children(self._runtime.path, self.core, self._poller, self._carry_out)
        host = self._children.add_lane(HOST)
        if first_lane is not None:
            host.adopt(first_lane)
        self._sessions = SessionServer(
            self._runtime.broker_socket,
            self.core,
            self._poller,
            self._carry_out,
            allowed=allowed,
            own=lambda peer: peer.pid == self._http.pid,
        )
        self._poller.register(self._wake_read, select.EPOLLIN)

    # ----------------------------------------------------------------- loop

    def run(self) -> int:
        """Serve until a signal ends it; return the exit status."""
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
        """Wait, and serve requests; look at everything else where something of it is due."""
        sessions, busy = self._sessions, self.core.background.busy
        now = time.monotonic()
        if self._polled:
            self.core.loop_turned(now - self._polled)
        patience = HELD_UP_SECONDS if self._held_up else max(0.0, self._next_tick - now)
        if tiers := self._children.tiers:
            patience = min(patience, self.core.tiering.due(now))
        if busy or sessions.pending or any(tier.unread for tier in tiers):
            patience = 0.0
        look_at = now + patience if tiers else math.inf
        self._standstill.waits(now, patience)
        ready = dict(self._poller.poll(patience))
        now = self._polled = time.monotonic()
        if stood_still := self._standstill.woke(now):
            self._note(LogEvent(stood_still, "warning"))
        sessions.handle_events(ready)
        due = ready or now >= min(self._next_tick, look_at) or busy or self._held_up
        if due:
            for lane in list(self._children.lanes.values()):  # first: they say what is READY
                lane.turn(ready, now)
        if sessions.pending:
            sessions.serve(now)
        if due:
            self._look_around(ready, now)

    def _look_around(self, ready: dict[int, int], now: float) -> None:
        """Look at all that is no request: what is ready of it, and what is due by the time."""
        self._sessions.count()
        if self._wake_read in ready:
            os.read(self._wake_read, 512)
            self._next_tick = 0.0  # a signal has come, or more of the pool is there
        if self._pool is not None and not self.core.state.pool_ready:
            self._pool_turn(self._pool)
        if self._pool is not None and self._pool.place is not None:
            place, self._pool.place = self._pool.place, None
            self._note(place)
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._carry_out(self.core.tick(now))
            self._carry_out(self._config.turn(self.core.reloading))
        self._carry_out(self.core.background.work())
        self._http.turn(ready, now)
        for tier in self._children.tiers:
            tier.turn(ready, now)
        self._carry_out(self.core.tiering.turn(now))
        self._start_children(now)
        self._notifier.turn(now, self.core.state, reloading=self.core.reloading.under_way)

    def _start_children(self, now: float) -> None:
        """Start the children that do not run, once nothing else can write to the pool's memory."""
        pool = self._pool
        self._held_up = pool is not None and not pool.may_be_written
        if pool is not None and not self._held_up and not self.core.state.stopping:
            self._kept_pool.settle()
            self._children.start_due(pool, now)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: it is awake already
            os.write(self._wake_write, b"x")

    @property
    def _settings(self) -> Settings:
        return self.core.state.settings

    # ----------------------------------------------------------------- pool

    def _pool_limits(self, pinning_lanes: int | None = None) -> PoolLimits:
        pool_dir = Path(self._settings.pool_dir)
        return PoolLimits.of(pool_dir, self._kept_pool.allocated_bytes(), pinning_lanes)

    def _open_pool(self, cpu_bytes: int, engine: OpenPool | None = None) -> Namespaces:
        def make(ledger_setup: LedgerSetup | None, fill: FillOrder) -> Namespaces:
            return Namespaces(
                cpu_bytes,
                self._settings,
                boot_id=self._boot_id,
                make_buffer=self._directories.make,
                make_descriptions=self._descriptions.make,
                drop_buffers=self._drop_buffers,
                ledger_setup=ledger_setup,
                fill=fill,
                resets=self._resets,
            )

        try:
            self._pool, namespaces = self._kept_pool.open(cpu_bytes, make, engine)
        except PoolError:
            if self._settings.pool_bytes is not None:  # this daemon does not start
                self._kept_pool.close()
            raise
        self._pool.start(self._wake)
        log.info("pool of %s at %s", format_size(cpu_bytes), self._pool.path)
        return namespaces

    def _drop_buffers(self, namespace: str) -> None:
        self._directories.drop(namespace)
        self._descriptions.drop(namespace)
        self._kept_pool.drop(namespace)

    def _open_sized(self, effect: OpenPool) -> None:
        """Open a pool whose size the ranks of an engine decide."""
        lanes = pinning_lanes(effect.layouts, effect.devices)
        largest = self._pool_limits(lanes).largest
        registration = self.core.registration
        try:
            cpu_bytes, explanation = auto_size(
                self._settings, effect.layouts, largest, self._kept_pool.reusable_cpu_bytes(), lanes
            )
            namespaces = self._open_pool(cpu_bytes, effect)
        except Refusal as refusal:
            self._carry_out(registration.pool_refused(refusal))
        except PoolError as error:
            lack = Refusal(ErrorCode.NOT_READY, str(error))
            self._carry_out(registration.pool_refused(lack))
        else:
            self._carry_out(registration.pool_opened(namespaces, explanation))

    def _pool_turn(self, pool: PoolMemory) -> None:
        if pool.error:
            self._kept_pool.failed()
            raise PoolError(f"{pool.error}{self._kept_pool.what_stays}")
        self._carry_out(self.core.pool_allocated(pool.allocated))

    # -------------------------------------------------------------- effects

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Reply():
                    self._sessions.reply(effect)
                case Notify():
                    self._sessions.notify(effect.session, effect.message, self._resolve(effect.fd))
                case ToLane():
                    self._children.to_lane(effect.device, effect.message, self._resolve(effect.fd))
                case ToTier():
                    self._children.to_tier(effect.tier, effect.message, self._resolve(effect.fd))
                case StartLane():
                    self._children.add_lane(effect.device)
                case DropLane():
                    del self._children.lanes[effect.device]  # which has ended
                case KillLane():
                    self._children.lanes[effect.device].kill(effect.reason)
                case _:
                    self._account(effect)

    def _account(self, effect: Effect) -> None:
        """Carry out what concerns this process alone: the log, and descriptors that it holds."""
        match effect:
            case OpenPool():
                self._open_sized(effect)
            case KillTier():
                self._children.kill_tier(effect)
            case DropFds():
                self._sessions.drop_fds(effect.session)
            case ChunksReady():
                self._ready_pipes.tell(effect.engine)
            case DropEngine():
                self._ready_pipes.drop(effect.engine)
            case LogEvent():
                self._note(effect)

    def _note(self, event: LogEvent) -> None:
        self.core.record_event(event, time.time())
        level = logging.getLevelNamesMapping()[event.level.upper()]
        text = f"{event.text}\n{event.trace}" if event.trace else event.text
        log.log(level, text, extra=event.fields)

    def _resolve(self, name: FdName | None) -> list[int]:
        match name:
            case DirectoryFd():
                directory = [self._directories.fd(name.namespace.hex())]
                if name.engine is None:
                    return directory
                descriptions = self._descriptions.read_fds(name.namespace.hex())
                return directory + descriptions + self._ready_pipes.read_end(name.engine)
            case NamespaceFds():
                directory = [self._directories.fd(name.namespace.hex())]
                return directory + self._descriptions.read_fds(name.namespace.hex())
            case LifelineFd():
                return [self._children.lanes[name.device].lifeline]
            case SessionFds():
                return self._sessions.fds(name.session)
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
        lanes = self.core.supervision
        if self._drained_by is None:
            self._carry_out(self.core.stop())
            self._drained_by = now + self._settings.drain_seconds
            self._stop_at = self._drained_by + lanes.unpin_seconds
            self._notifier.stopping(self._stop_at - now)
        running = any(lane.running for lane in self._children.lanes.values())
        if not running or self._signals > 1:
            return True
        if now >= self._stop_at:
            log.warning("lanes run %.0f s after the drain, stopping", now - self._drained_by)
            return True
        if now >= self._drained_by:
            self._carry_out(lanes.end_drain())
        return False

    def _shutdown(self) -> None:
        self._http.close()
        self._notifier.stopping(self.core.supervision.unpin_seconds)  # lanes that are killed unpin
        self._sessions.close()
        self._children.close()
        ledgers = [each.directory.ledger for each in self.core.state.open_namespaces]
        chunks = sum(len(ledger) for ledger in ledgers if ledger is not None)
        if self._pool is not None:
            self._pool.close()
        self._kept_pool.close()
        left = self._kept_pool.left(chunks)
        if not left:
            forget_pool_dir(self._runtime.path, Path(self._settings.pool_dir))
        self._runtime.release()  # last: the next daemon may start from here on
        self._notifier.close()
        log.info("stopped%s", left)

    def __repr__(self) -> str:
        return f"<BrokerService {self._runtime!r}: {self.core!r}>"
