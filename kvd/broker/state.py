"""What the broker's decision modules share: its state, and the tasks that run in pieces.

A task is a generator for work that takes longer than a turn of the daemon's loop may. It yields
its effects after each piece of a few milliseconds; engines are served before the next piece. Tasks
take turns.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from kvd.broker.children import FatalImports, Lane
from kvd.broker.effects import Effect, Notify, ToLane
from kvd.broker.sessions import Engine, Registry, Session
from kvd.broker.tiers.tier import Tiers
from kvd.cache.directory import ChunkRefs
from kvd.cache.namespaces import Namespace, Namespaces
from kvd.client_names import Peer
from kvd.config.settings import Settings
from kvd.errors import IntegrityError, Refusal
from kvd.machine.process import ProcessUsage
from kvd.metrics.counts import BrokerCounts, EventCounts, LaneCounts, LookupCounts
from kvd.metrics.declare import Progress, RecentMax
from kvd.metrics.schema import EventStatus
from kvd.wire.link import Revoke, UnbindWorker
from kvd_proto.jobs import IntArray
from kvd_proto.messages import Detached, ErrorCode, ResetDone

MAX_EVENTS = 200
MAX_TASKS = {"sweeps": 16, "checks": 4}
"""The most tasks of a kind at a time; `sweeps` are evictions."""

Task: TypeAlias = Iterator[list[Effect]]
REVOKE_AT_ONCE = 4096  # slots in one message, 12 bytes each


@dataclass(frozen=True, slots=True)
class OperatorDrain:
    """An operator's drain: no new stores are taken since `since`."""

    by: Peer
    since: float


@dataclass(slots=True)
class BrokerState:
    """Sessions, engines, lanes, namespaces and tiers.

    usage: reads the time and the process's figures.
    failed_lanes: when a device's lane failed to start last, and why.
    gone_lanes: counts of lanes that were dropped.
    allocated_bytes: length of the allocated prefix of the pool, in `FillOrder`.
    stopping: a signal has come and lanes end, which nothing undoes; Resume undoes `drain`.
    lookups, kv_events: totals of all engines.
    tiers: below the pool, in order.
    """

    settings: Settings
    boot_id: bytes
    registry: Registry
    usage: Callable[[], ProcessUsage] = ProcessUsage
    lanes: dict[str, Lane] = field(default_factory=dict)
    failed_lanes: dict[str, tuple[float, str]] = field(default_factory=dict)
    fatal_imports: FatalImports = field(default_factory=FatalImports)
    gone_lanes: LaneCounts = field(default_factory=LaneCounts)
    namespaces: Namespaces | None = None
    allocated_bytes: int = 0
    stopping: bool = False
    drain: OperatorDrain | None = None
    started: float = 0.0
    counts: BrokerCounts = field(default_factory=BrokerCounts)
    lookups: LookupCounts = field(default_factory=LookupCounts)
    kv_events: EventCounts = field(default_factory=EventCounts)
    tiers: Tiers = ()
    recent_lag: RecentMax = field(default_factory=RecentMax)
    events: deque[EventStatus] = field(default_factory=lambda: deque(maxlen=MAX_EVENTS))
    progress: Progress = field(default_factory=Progress)

    def reached(self, limit: str) -> None:
        """Count that a limit was reached; an empty name counts nothing."""
        if limit:
            self.counts.limits[limit] += 1

    @property
    def draining(self) -> bool:
        """Whether no new stores are taken: the daemon stops, or an operator drains it."""
        return self.stopping or self.drain is not None

    @property
    def ready(self) -> bool:
        """Whether engines can store and load now, as `status_report.readiness_checks` says."""
        missing = any(map(self.is_missing, self.lanes.values()))
        return self.pool_usable and not missing and not self.draining

    @property
    def pool_bytes(self) -> int | None:
        """The pool's size; None while no engine has decided it (``auto``)."""
        return None if self.namespaces is None else self.namespaces.cpu_bytes

    @property
    def pool_ready(self) -> bool:
        """Whether all of the pool's memory is allocated."""
        return (
            self.namespaces is not None and self.allocated_bytes >= self.namespaces.pool.fill.nbytes
        )

    @property
    def pool_usable(self) -> bool:
        """Whether the pool is allocated and pinned by the lanes that pin, or has no size yet."""
        total = self.pool_bytes
        return total is None or (self.pool_ready and self.pinned_bytes >= total)

    @property
    def pinned_bytes(self) -> int:
        """Bytes of the pool that are allocated and pinned by every lane that pins."""
        return min([self.allocated_bytes, *(lane.usable_bytes for lane in self.pinning)])

    def usable_bytes(self, engine: Engine) -> int | None:
        """Return the length of the prefix of the pool, in `FillOrder`, that the engine can use now.

        Its memory is allocated, and each of the engine's lanes can copy it. None: all of the pool.
        """
        if self.namespaces is None:
            return 0
        usable = self.allocated_bytes
        for worker in engine.workers.values():
            if worker.registration is not None:
                usable = min(usable, self.lanes[worker.registration.device].usable_bytes)
        return None if usable >= self.namespaces.pool.fill.nbytes else usable

    @property
    def pinning(self) -> list[Lane]:
        """Lanes that have workers and can use the pool only where they have pinned it."""
        return [
            lane
            for lane in self.lanes.values()
            if lane.up and lane.pins and self.workers_of(lane.device)
        ]

    def is_missing(self, lane: Lane) -> bool:
        """Return whether a lane should serve and is not up.

        No lane is missing before the pool has a size, nor one that starts for its first worker.
        """
        is_needed = not lane.on_demand or bool(self.workers_of(lane.device))
        return not lane.up and is_needed and self.pool_bytes is not None

    @property
    def open_namespaces(self) -> list[Namespace]:
        """Every open namespace; none while the pool has no size."""
        return list(self.namespaces) if self.namespaces is not None else []

    def namespace(self, ns_id: bytes) -> Namespace | None:
        """Return the open namespace of this id."""
        return self.namespaces.get(ns_id) if self.namespaces is not None else None

    def is_open(self, namespace: Namespace) -> bool:
        """Return whether a namespace is still open."""
        return self.namespace(namespace.id) is namespace

    def workers_of(self, device: str) -> list[Session]:
        """Return the sessions whose registered memory is on `device`."""
        return [
            session
            for session in self.registry.sessions.values()
            if session.registration is not None and session.registration.device == device
        ]

    def revoke(self, namespace: Namespace, slots: ChunkRefs) -> list[Effect]:
        """Order lanes to stop writing into DRAINING slots; they become FREE when all have."""
        devices = [lane.device for lane in self.lanes.values() if lane.up]
        namespace.table.slots.wait_for(devices, slots)
        effects: list[Effect] = []
        for begin in range(0, len(slots), REVOKE_AT_ONCE):
            piece = slots[begin : begin + REVOKE_AT_ONCE]
            message = Revoke(
                namespace=namespace.id,
                slots=IntArray.of([slot for slot, _ in piece], "u4"),
                generations=IntArray.of([generation for _, generation in piece], "u8"),
            )
            effects += [ToLane(device, message) for device in devices]
        return effects

    def reset(
        self, namespace: Namespace, *, by_operator: bool = False
    ) -> tuple[ResetDone, ChunkRefs, str]:
        """Drop every chunk of an open namespace; see `Namespaces.reset`."""
        if self.namespaces is None:
            raise IntegrityError(f"namespace {namespace.id.hex()[:8]} is in no pool")
        return self.namespaces.reset(namespace, by_operator=by_operator)

    def detach(self, engine: Engine, reason: str) -> tuple[list[Effect], int]:
        """Detach an engine that is no longer complete.

        1. End its leases and loans and give up its writes.
        2. Have lanes unbind its workers.
        3. Notify its sessions.

        Returns:
            The effects, and the number of chunks in writing that were given up.
        """
        namespace = engine.namespace
        if namespace is None or self.namespaces is None:
            return [], 0
        effects, freed = self.drop_owner(engine, namespace)
        engine.namespace = None
        self.namespaces.detach_engine(namespace)
        effects += [
            ToLane(worker.registration.device, UnbindWorker(session=worker.number))
            for worker in engine.workers.values()
            if worker.registration is not None
            and worker.imported
            and self.lanes[worker.registration.device].up
        ]
        effects += [Notify(number, Detached(reason=reason)) for number in engine.sessions]
        return effects, freed

    def drop_owner(self, engine: Engine, namespace: Namespace) -> tuple[list[Effect], int]:
        """End an engine's leases and loans, and give up its writes.

        Returns:
            The effects, and the number of chunks in writing that were given up.
        """
        writing = namespace.table.drop_owner(engine.number)
        return self.revoke(namespace, writing), len(writing)

    def check_integrity(self) -> None:
        """Raise IntegrityError if an invariant does not hold."""
        self.registry.check_integrity()
        if self.namespaces is not None:
            self.namespaces.check_integrity()
        for engine in self.registry.engines.values():
            if engine.namespace is not None and not self.is_open(engine.namespace):
                raise IntegrityError(f"engine {engine.name!r} is attached to a closed namespace")


class BackgroundTasks:
    """Tasks under way, the sweep of slots that resets have left, and namespaces' learning."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._tasks: deque[tuple[str, Task]] = deque()
        self._learners: list[Namespace] = []  # namespaces that still learn in this tick

    def learn(self) -> None:
        """Have every namespace's policy and miss-ratio curve learn, piece by piece."""
        self._learners = self._state.open_namespaces

    def start(self, kind: str, task: Task) -> None:
        """Begin a task with the next `work`; refuse it at the limit of its kind."""
        limit = MAX_TASKS.get(kind)
        if limit is not None and sum(kind == other for other, _ in self._tasks) >= limit:
            raise Refusal(
                ErrorCode.LIMIT,
                f"{limit} {kind} are under way, no more are allowed; try again when they have"
                " ended",
                limit=kind,
            )
        self._tasks.append((kind, task))

    @property
    def busy(self) -> bool:
        """Whether there is `work` to do."""
        return bool(self._tasks) or self._unswept is not None or bool(self._learners)

    def work(self) -> list[Effect]:
        """Do a piece of freeing what resets left, of policies' learning, and of the next task.

        Tasks take turns.

        Returns:
            The task's effects.
        """
        if (unswept := self._unswept) is not None:
            unswept.table.sweep()
        if self._learners and not self._learners[-1].table.learn():
            self._learners.pop()
        while self._tasks:
            kind, task = self._tasks.popleft()
            effects = next(task, None)
            if effects is not None:
                self._tasks.append((kind, task))
                return effects
        return []

    @property
    def _unswept(self) -> Namespace | None:
        """A namespace in which a reset has left slots to free."""
        if (namespaces := self._state.namespaces) is not None:
            for namespace in namespaces:
                if not namespace.table.is_swept:
                    return namespace
        return None
