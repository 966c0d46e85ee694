"""The broker process's loop: all I/O around the decisions of `kvd.broker`.

startup → loop → drain → shutdown. One thread. It polls the connections of sessions, the links to
lanes and tiers, the pool's allocator and signals, passes each event to the broker's decisions, and
executes the effects that they return.
"""

import contextlib
import logging
import math
import os
import select
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import assert_never

from kvd.broker.admission import auto_size
from kvd.broker.broker import Broker
from kvd.broker.effects import (
    ChunksReady,
    DirectoryFd,
    DropEngine,
    DropFds,
    DropLane,
    Effect,
    EndSession,
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
from kvd.machine.pools import remove_unused_pools, unused_pools
from kvd.machine.process import StallDetector, UsageReader
from kvd.pool.geometry import FillOrder
from kvd.server.adoption import access_digest
from kvd.server.child import StartedProcess
from kvd.server.children import Children, HttpProcess, configured_tiers
from kvd.server.client_files import DescriptionFiles, DirectoryMemory, ReadyPipes
from kvd.server.notify import Notifier
from kvd.server.persistent_pool import PersistentPool
from kvd.server.pool_memory import PoolMemory
from kvd.server.reset_file import ResetFile
from kvd.server.runtime_dir import AllowList, RuntimeDir
from kvd.server.sessions import SessionServer
from kvd.server.state_files import forget_pool_dir, remember_pool_dir
from kvd_proto.capacity import pinning_lanes
from kvd_proto.messages import HOST, ErrorCode
from kvd_proto.text import format_size

log = logging.getLogger("kvd.daemon")
TICK_SECONDS = 0.25
POOL_IN_USE_POLL_SECONDS = 0.01
STARTUP_SECONDS = 60.0
FREE_SECONDS_PER_GIB = 2.0  # of unused pools; a busy machine with 2 cores takes a quarter of that


class ConfigReader:
    """Reads the configuration again, on SIGHUP or on request, in a thread of its own.

    A slow disk must not delay the loop.
    """

    def __init__(self, sources: Sources) -> None:
        self._sources = sources
        self._sighup_received = False
        self._outcome: LoadedSettings | ConfigError | None = None

    def on_sighup(self, number: int, frame: FrameType | None) -> None:
        """Request a reload; the handler of SIGHUP."""
        del number, frame
        self._sighup_received = True

    def turn(self, core: ConfigReload) -> list[Effect]:
        """Apply what was read, and start reading if requested; return the effects."""
        effects: list[Effect] = []
        outcome, self._outcome = self._outcome, None
        if outcome is not None:
            effects += core.finish(outcome)
            set_level(core.loaded.settings.log_level)
        if self._sighup_received:
            self._sighup_received = False
            core.sighup()
        if core.begin():
            threading.Thread(target=self._read, name="kvd-config", daemon=True).start()
        return effects

    def _read(self) -> None:
        try:
            self._outcome = self._sources.load()
        except ConfigError as error:
            self._outcome = error
        except Exception as error:  # noqa: BLE001  # a client may be waiting for the reply
            self._outcome = ConfigError(f"the configuration cannot be read: {error!r}")


class BrokerService:
    """One running daemon.

    Args:
        loaded: the settings.
        sources: where the settings came from, to reload them.
        version: name and version of the daemon.
        runtime: the runtime directory, locked.
        first_lane: the host lane's process; None if it could not be started yet.
        cold: start without the chunks of the previous daemon.

    Raises:
        KvdError: the daemon cannot start; names the remedy.
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
        self._pool_dir = Path(settings.pool_dir).absolute()
        remember_pool_dir(runtime.path, self._pool_dir)
        self._resets = ResetFile(self._runtime.resets)
        self._persistent_pool = PersistentPool(
            self._pool_dir,
            self._runtime.path,
            persistent=settings.keep_pool == "yes",
            cold=cold,
            resets=self._resets,
            access=access_digest(settings, self._runtime.path),
        )
        self._poller = select.epoll()
        self._http = HttpProcess(
            self._runtime.path, self._runtime.http_socket, settings.http_listen, self._poller
        )
        self._directories = DirectoryMemory()
        self._descriptions = DescriptionFiles(self._persistent_pool.open_descriptions)
        self._ready_pipes = ReadyPipes()
        self._wake_read, self._wake_write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._pool: PoolMemory | None = None
        self._drain_deadline: float | None = None  # None until a signal stops the daemon
        self._stop_deadline = math.inf  # then the lanes are killed
        self._signals = 0
        self._next_tick = 0.0
        self._pool_in_use = False  # a process of a dead daemon may still write to it
        self._usage = UsageReader()
        self._last_poll = 0.0
        self._stall_detector = StallDetector("broker")
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
        self._handle_unused_pools()
        if settings.pool_bytes is not None:
            self.core.registration.pool_opened(self._open_pool(settings.pool_bytes))
        self._children = Children(self._runtime.path, self.core, self._poller, self._execute)
        host = self._children.add_lane(HOST)
        if first_lane is not None:
            host.adopt(first_lane)
        self._sessions = SessionServer(
            self._runtime.broker_socket,
            self.core,
            self._poller,
            self._execute,
            allowed=allowed,
            is_own_process=lambda peer: peer.pid == self._http.pid,
        )
        self._poller.register(self._wake_read, select.EPOLLIN)

    def warn(self, texts: Sequence[str]) -> None:
        """Log warnings of the start's checks, and keep them for reports."""
        for text in texts:
            self._log_event(LogEvent(text, "warning"))

    # ----------------------------------------------------------------- loop

    def run(self) -> int:
        """Serve until SIGTERM or SIGINT, drain, and shut down; return the exit status.

        A second signal ends the drain.
        """
        previous = {s: signal.signal(s, self._on_signal) for s in (signal.SIGTERM, signal.SIGINT)}
        previous[signal.SIGHUP] = signal.signal(signal.SIGHUP, self._config.on_sighup)
        wakeup = signal.set_wakeup_fd(self._wake_write, warn_on_full_buffer=False)
        try:
            log.info("serving %s, pid %d", self._runtime.path, os.getpid())
            while not self._has_stopped():
                self._turn()
        finally:
            signal.set_wakeup_fd(wakeup)
            for number, handler in previous.items():
                signal.signal(number, handler)
            self._shutdown()
        return 0

    def _turn(self) -> None:
        """Wait for events and handle them.

        1. Note which sessions are readable.
        2. If anything is ready or due: handle the lanes' messages, which report the chunks that are
           READY, before requests look for them.
        3. Serve requests.
        4. If anything is ready or due: handle timers, tasks, HTTP, tiers, children.
        """
        sessions, busy = self._sessions, self.core.background.busy
        now = time.monotonic()
        if self._last_poll:
            self.core.loop_turned(now - self._last_poll)
        timeout = POOL_IN_USE_POLL_SECONDS if self._pool_in_use else max(0.0, self._next_tick - now)
        if tiers := self._children.tier_children:
            timeout = min(timeout, self.core.tiering.due(now))
        timeout = min(timeout, max(0.0, sessions.due() - now))
        if busy or any(tier.unread for tier in tiers):
            timeout = 0.0
        tier_deadline = now + timeout if tiers else math.inf
        self._stall_detector.waits(now, timeout)
        ready = dict(self._poller.poll(timeout))
        now = self._last_poll = time.monotonic()
        if stall := self._stall_detector.woke(now):
            self._log_event(LogEvent(stall, "warning"))
        sessions.handle_events(ready)
        is_due = ready or now >= min(self._next_tick, tier_deadline) or busy or self._pool_in_use
        if is_due:
            for lane in list(self._children.lane_children.values()):
                lane.turn(ready, now)
        if now >= sessions.due():
            sessions.serve(now)
        if is_due:
            self._handle_other_events(ready, now)

    def _handle_other_events(self, ready: dict[int, int], now: float) -> None:
        """Handle everything that is no request: ready descriptors, timers, children."""
        self._sessions.report_drops()
        if self._wake_read in ready:
            os.read(self._wake_read, 512)
            self._next_tick = 0.0  # a signal, or progress of the pool's allocation
        if self._pool is not None and not self.core.state.pool_ready:
            self._check_allocation(self._pool)
        if self._pool is not None and self._pool.placement is not None:
            placement, self._pool.placement = self._pool.placement, None
            self._log_event(placement)
        if now >= self._next_tick:
            self._next_tick = now + TICK_SECONDS
            self._children.note_stopped(now)
            self._execute(self.core.tick(now))
            self._execute(self._config.turn(self.core.reloading))
        self._execute(self.core.background.work())
        self._http.turn(ready, now)
        for tier in self._children.tier_children:
            tier.turn(ready, now)
        self._execute(self.core.tiering.turn(now))
        self._start_children(now)
        self._notifier.turn(now, self.core.state, reloading=self.core.reloading.under_way)

    def _start_children(self, now: float) -> None:
        """Start children that are due, once no process of a dead daemon can write to the pool."""
        pool = self._pool
        self._pool_in_use = pool is not None and not pool.may_be_used
        if pool is not None and not self._pool_in_use and not self.core.state.stopping:
            self._persistent_pool.commit()
            self._children.start_due(pool, now)

    def _wake(self) -> None:
        with contextlib.suppress(BlockingIOError):  # full: the loop wakes anyway
            os.write(self._wake_write, b"x")

    @property
    def _settings(self) -> Settings:
        return self.core.state.settings

    # ----------------------------------------------------------------- pool

    def _handle_unused_pools(self) -> None:
        """Adopt or remove unused pools as `unused_pools` says, and warn of those that stay.

        With `keep` the start's checks have done that.
        """
        pool_dir, action = self._pool_dir, self._settings.unused_pools
        if action == "adopt":
            self._persistent_pool.adopt(self._settings.pool_bytes)
        elif action == "remove":
            nbytes = sum(pool.nbytes for pool in unused_pools(pool_dir, self._runtime.path))
            self._notifier.extend_start(STARTUP_SECONDS + nbytes / 2**30 * FREE_SECONDS_PER_GIB)
            for nbytes, text in remove_unused_pools(pool_dir, self._runtime.path):
                if nbytes:
                    self._log_event(LogEvent(text))
        if action != "keep" and (text := self._persistent_pool.unused_text()):
            self._log_event(LogEvent(text, "warning"))

    def _pool_limits(self, pinning_lanes: int | None = None) -> PoolLimits:
        return PoolLimits.of(self._pool_dir, self._persistent_pool.allocated_bytes(), pinning_lanes)

    def _open_pool(self, cpu_bytes: int, engine: OpenPool | None = None) -> Namespaces:
        """Open the pool, new or reused; start its allocation; return its namespaces."""

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
            self._pool, namespaces = self._persistent_pool.open(cpu_bytes, make, engine)
        except PoolError:
            if self._settings.pool_bytes is not None:  # this daemon does not start
                self._persistent_pool.close()
            raise
        self._pool.start(self._wake)
        log.info("pool of %s at %s", format_size(cpu_bytes), self._pool.path)
        return namespaces

    def _drop_buffers(self, namespace: str) -> None:
        self._directories.drop(namespace)
        self._descriptions.drop(namespace)
        self._persistent_pool.drop(namespace)

    def _open_auto_sized_pool(self, effect: OpenPool) -> None:
        """Open the pool with the size that an engine's layouts give (`cpu_bytes = auto`)."""
        lanes = pinning_lanes(effect.layouts, effect.devices)
        largest = self._pool_limits(lanes).largest
        registration = self.core.registration
        try:
            cpu_bytes, explanation = auto_size(
                self._settings,
                effect.layouts,
                largest,
                self._persistent_pool.reusable_cpu_bytes(),
                lanes,
            )
            namespaces = self._open_pool(cpu_bytes, effect)
        except Refusal as refusal:
            if text := self._persistent_pool.unused_text():
                refusal = Refusal(refusal.code, f"{refusal}; {text}", refusal.limit)
            self._execute(registration.pool_refused(refusal))
        except PoolError as error:
            self._execute(registration.pool_refused(Refusal(ErrorCode.NOT_READY, str(error))))
        else:
            self._execute(registration.pool_opened(namespaces, explanation))

    def _check_allocation(self, pool: PoolMemory) -> None:
        if pool.error:
            self._persistent_pool.allocation_failed()
            raise PoolError(self._persistent_pool.shortage_text(pool.error))
        self._execute(self.core.pool_allocated(pool.allocated))

    # -------------------------------------------------------------- effects

    def _execute(self, effects: list[Effect]) -> None:
        """Execute the effects of a decision, in order."""
        for effect in effects:
            match effect:
                case Reply():
                    self._sessions.reply(effect)
                case Notify():
                    self._sessions.notify(
                        effect.session, effect.message, self._descriptors(effect.fd)
                    )
                case ToLane():
                    self._children.send_to_lane(
                        effect.device, effect.message, self._descriptors(effect.fd)
                    )
                case ToTier():
                    self._children.send_to_tier(
                        effect.tier, effect.message, self._descriptors(effect.fd)
                    )
                case StartLane():
                    self._children.add_lane(effect.device)
                case DropLane():
                    del self._children.lane_children[effect.device]  # its process has ended
                case KillLane():
                    self._children.lane_children[effect.device].kill(effect.reason)
                case KillTier():
                    self._children.kill_tier(effect)
                case _:
                    self._execute_locally(effect)

    def _execute_locally(
        self, effect: OpenPool | EndSession | DropFds | ChunksReady | DropEngine | LogEvent
    ) -> None:
        """Execute the remaining effects: pool, sessions, READY pipes, log."""
        match effect:
            case OpenPool():
                self._open_auto_sized_pool(effect)
            case EndSession():
                self._sessions.end(effect.session, effect.reason)
            case DropFds():
                self._sessions.drop_fds(effect.session)
            case ChunksReady():
                self._ready_pipes.signal(effect.engine)
            case DropEngine():
                self._ready_pipes.drop(effect.engine)
            case LogEvent():
                self._log_event(effect)
            case _:
                assert_never(effect)

    def _log_event(self, event: LogEvent) -> None:
        self.core.record_event(event, time.time())
        level = logging.getLevelNamesMapping()[event.level.upper()]
        text = f"{event.text}\n{event.trace}" if event.trace else event.text
        log.log(level, text, extra=event.fields)

    def _descriptors(self, name: FdName | None) -> list[int]:
        """Return the descriptors that an effect names, for sending."""
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
                return [self._children.lane_children[name.device].lifeline]
            case SessionFds():
                return self._sessions.fds(name.session)
            case None:
                return []

    # ------------------------------------------------------------------ end

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        self._signals += 1

    def _has_stopped(self) -> bool:
        """After a signal: start the drain, then stop the lanes; return whether the loop ends.

        The loop ends when no lane runs, at a second signal, or at the deadline.
        """
        if not self._signals:
            return False
        now = time.monotonic()
        lanes = self.core.supervision
        if self._drain_deadline is None:
            self._execute(self.core.stop())
            self._drain_deadline = now + self._settings.drain_seconds
            self._stop_deadline = self._drain_deadline + lanes.unpin_seconds
            self._notifier.notify_stopping(self._stop_deadline - now)
        running = any(lane.running for lane in self._children.lane_children.values())
        if not running or self._signals > 1:
            return True
        if now >= self._stop_deadline:
            log.warning(
                "lanes still run %.0f s after the drain; stopping", now - self._drain_deadline
            )
            return True
        if now >= self._drain_deadline:
            self._execute(lanes.end_drain())
        return False

    def _shutdown(self) -> None:
        """Close all in order: clients and children first, then pool and runtime directory."""
        self._http.close()
        # Killed lanes still unpin the pool.
        self._notifier.notify_stopping(self.core.supervision.unpin_seconds)
        self._sessions.close()
        self._children.close()
        ledgers = [namespace.directory.ledger for namespace in self.core.state.open_namespaces]
        num_chunks = sum(len(ledger) for ledger in ledgers if ledger is not None)
        if self._pool is not None:
            self._pool.close()
        self._persistent_pool.close()
        remains = self._persistent_pool.remaining_text(num_chunks)
        if not remains:
            forget_pool_dir(self._runtime.path, self._pool_dir)
        self._runtime.release()  # last: from here on the next daemon may start
        self._notifier.close()
        log.info("stopped%s", remains)
