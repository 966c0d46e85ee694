"""Workers of this lane: their mapped memory, control page and binding.

A worker is imported (its memory and control page are mapped), then bound (its chunks get an arena
of the pool and a directory), perhaps unbound and bound again, and released.

READY means that nothing writes. Three rules make it so, in whatever order jobs run and end:

1. The directory gives each generation of a slot to one engine, which alone may write it
   (`LaneJob.check_slots`).
2. `AcceptedStores`: a lane accepts one store of each generation of a slot, ever.
3. A lane reports a share when that store has ended, so it has no other writer, now or later.
"""

import mmap
import os
import pwd
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakValueDictionary

import numpy as np

from kvd.client_names import ClientIdentity
from kvd.errors import HandleRefused, ImportFailed, LaneError
from kvd.lane.device import Device, MemoryId
from kvd.machine.process import sealed_size
from kvd.wire.link import BindWorker, ImportWorker
from kvd.wire.server import Client
from kvd_proto.directory import DirectoryView
from kvd_proto.errors import DirectoryError, JobShapeError
from kvd_proto.expand import Expander
from kvd_proto.jobs import CONTROL_BYTES, ControlWords
from kvd_proto.layout import RankLayout


def map_control_page(fd: int) -> ControlWords:
    """Return a worker's control page, mapped for reading and for writing loads' progress.

    Args:
        fd: a sealed memory file of at least `CONTROL_BYTES`; stays the caller's.

    Raises:
        ImportFailed: the file is smaller, not sealed, or cannot be mapped.
    """
    size = sealed_size(fd, "the control page (descriptor 0)")
    if size < CONTROL_BYTES:
        raise ImportFailed(f"the control page has {size} bytes, {CONTROL_BYTES} are needed")
    try:
        return ControlWords(mmap.mmap(fd, CONTROL_BYTES))
    except OSError as error:
        raise ImportFailed(f"the control page cannot be mapped: {error}") from error


class AcceptedStores:
    """The stores of one engine that a lane has accepted, in one arena.

    A lane accepts one store of each generation of a slot. Another one is refused while the first is
    queued, while it copies, and after its end, of whatever worker and connection. So a slot never
    has two writers, and none after its share is reported.
    """

    def __init__(self, num_slots: int) -> None:
        self._newest = np.zeros(num_slots, np.uint64)  # generation, by slot

    def accept(self, slots: "array[int]", generations: "array[int]") -> None:
        """Accept a store of these slots' generations, u32[n] and u64[n]; no slot twice.

        Raises:
            JobShapeError: a store of one of them, or of a newer generation of its slot, was
                accepted before. Then none is accepted.
        """
        are_accepted = self.are_accepted(slots, generations)
        if 1 in are_accepted:
            first = are_accepted.index(1)
            raise JobShapeError(
                f"slot {slots[first]} generation {generations[first]} has had its store"
                f" ({sum(are_accepted)} of {len(slots)} chunks): each chunk is stored by one job;"
                " offer its key again to get a new generation"
            )
        self._newest[np.frombuffer(slots, np.uint32)] = np.frombuffer(generations, np.uint64)

    def are_accepted(self, slots: "array[int]", generations: "array[int]") -> bytes:
        """Return 1 for each slot of which a store of this or a newer generation was accepted."""
        newest = self._newest[np.frombuffer(slots, np.uint32)]
        return (newest >= np.frombuffer(generations, np.uint64)).tobytes()


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a worker's chunks lie: an arena of slots in the pool, and a directory.

    Bindings of one engine to the same arena share `accepted_stores`.
    """

    order: BindWorker
    slot_bytes: int
    directory: DirectoryView
    accepted_stores: AcceptedStores


class Bindings:
    """Makes bindings, and remembers the accepted stores of those in use.

    Once an engine's last binding to an arena is gone, its stores may be forgotten: the broker has
    given up its writes, so their generations are not WRITING any more.
    """

    def __init__(self) -> None:
        self._accepted: WeakValueDictionary[tuple[int, int, int, int], AcceptedStores] = (
            WeakValueDictionary()
        )

    def bind(
        self,
        order: BindWorker,
        descriptors: Sequence[int],
        layout: RankLayout,
        pool_bytes: int,
    ) -> Binding:
        """Map the directory, and check that the arena lies inside the pool.

        Raises:
            LaneError: the arena does not, or the descriptor is no directory of that many slots.
        """
        end = order.arena_base + layout.slot_bytes * order.num_slots
        if end > pool_bytes:
            raise LaneError(
                f"an arena of {order.num_slots} slots of {layout.slot_bytes} bytes from"
                f" {order.arena_base} does not lie inside the pool of {pool_bytes} bytes"
            )
        if len(descriptors) != 1:
            raise LaneError(f"one directory is needed, {len(descriptors)} descriptors came")
        try:
            stat = os.fstat(descriptors[0])
            view = DirectoryView(mmap.mmap(descriptors[0], stat.st_size, prot=mmap.PROT_READ))
        except (OSError, ValueError, DirectoryError) as error:
            raise LaneError(f"the directory cannot be used: {error}") from error
        if view.num_slots < order.num_slots:
            raise LaneError(
                f"a directory of {view.num_slots} slots for an arena of {order.num_slots}"
            )
        # While the directory is mapped, no other file has its device and inode.
        key = stat.st_dev, stat.st_ino, order.owner, order.arena_base
        accepted_stores = self._accepted.get(key) or AcceptedStores(order.num_slots)
        self._accepted[key] = accepted_stores
        return Binding(order, layout.slot_bytes, view, accepted_stores)


@dataclass(eq=False, slots=True)
class LaneWorker:
    """One worker whose memory is mapped here.

    Attributes:
        has_control_page: if not, `control` is private memory, all zero.
        is_leaving: its memory is released once its jobs have ended.
        client: the connection on which it sends jobs; None until it has joined.
    """

    order: ImportWorker
    identity: ClientIdentity
    memory: MemoryId
    control: ControlWords
    has_control_page: bool
    expander: Expander
    binding: Binding | None = None
    is_leaving: bool = False
    client: Client | None = None

    @property
    def layout(self) -> RankLayout:
        """The layout of its memory."""
        return self.order.layout


def identity_of(message: ImportWorker) -> ClientIdentity:
    """Return the identity of the worker that a message describes, for logs."""
    return ClientIdentity(message.session, message.pid, message.engine, "worker", message.rank)


def _other_user_hint(uid: int) -> str:
    """Return what to append to an error about a worker of another user than this process's."""
    lane_uid = os.geteuid()
    if uid == lane_uid:
        return ""
    return (
        f"; the worker's user is {_user(uid)}, the lane's is {_user(lane_uid)}, and the"
        " driver may keep memory from other users: run both as one user, or have the engine"
        " share its memory by"
        " descriptors, see docs/security.md#gpu-memory-and-users"
    )


def _user(uid: int) -> str:
    """Return the user's number, and name if it has one here."""
    try:
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"{uid}"


class WorkerTable:
    """The imported workers, by session and by token; `bindings` makes those of all."""

    def __init__(self, device: Device) -> None:
        self.bindings = Bindings()
        self._device = device
        self._workers_by_session: dict[int, LaneWorker] = {}
        self._workers_by_token: dict[bytes, LaneWorker] = {}

    def import_worker(self, message: ImportWorker, descriptors: Sequence[int]) -> LaneWorker:
        """Map the memory of a worker, and add it.

        Args:
            message: the broker has checked it.
            descriptors: first the control page, then what the handles index; empty if the worker
                has no control page. They stay the caller's.

        Raises:
            ImportFailed: the memory is not as described; nothing stays mapped.
        """
        if message.session in self._workers_by_session or message.token in self._workers_by_token:
            raise ImportFailed(f"session {message.session} has its memory here already")
        if descriptors:
            control = map_control_page(descriptors[0])
        else:
            control = ControlWords(mmap.mmap(-1, CONTROL_BYTES))
        try:
            memory = self._device.import_memory(
                message.handles, message.layout.storages, descriptors
            )
        except HandleRefused as error:
            raise ImportFailed(f"{error}{_other_user_hint(message.uid)}") from error
        expander = Expander(message.layout)
        identity, has_page = identity_of(message), bool(descriptors)
        worker = LaneWorker(message, identity, memory, control, has_page, expander)
        self._workers_by_session[message.session] = self._workers_by_token[message.token] = worker
        return worker

    def release(self, worker: LaneWorker) -> None:
        """Unmap a worker's memory, and remove it; nothing may be in flight on the memory."""
        self._device.release_memory(worker.memory)
        worker.control.unmap()
        del (
            self._workers_by_session[worker.order.session],
            self._workers_by_token[worker.order.token],
        )

    def by_session(self, session: int) -> LaneWorker | None:
        """Return the worker of a session; None if there is none."""
        return self._workers_by_session.get(session)

    def by_token(self, token: bytes) -> LaneWorker | None:
        """Return the worker whose LaneUp has this token; None if there is none."""
        return self._workers_by_token.get(token)

    @property
    def all_bound(self) -> bool:
        """Whether every worker has a binding."""
        return all(worker.binding is not None for worker in self._workers_by_session.values())

    def __len__(self) -> int:
        return len(self._workers_by_session)
