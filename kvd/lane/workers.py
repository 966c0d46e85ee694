"""Workers whose memory this lane holds: mapping, control page, binding.

A worker is imported (memory and control page mapped), then bound (its chunks
have a place and a directory), perhaps unbound and bound again, and released.
"""

import mmap
import os
import pwd
from collections.abc import Sequence
from dataclasses import dataclass

from kvd.client_names import ClientIdentity
from kvd.errors import HandleRefused, ImportFailed, LaneError
from kvd.lane.device import Device, MemoryId
from kvd.machine.process import sealed_size
from kvd.wire.link import BindWorker, ImportWorker
from kvd.wire.server import Client
from kvd_proto.directory import DirectoryView
from kvd_proto.errors import DirectoryError
from kvd_proto.expand import Expander
from kvd_proto.jobs import CONTROL_BYTES, ControlWords
from kvd_proto.layout import RankLayout


def open_control_page(fd: int) -> ControlWords:
    """Map a worker's control page, to read it, and to write loads' progress.

    Args:
        fd: a sealed memory file of at least `CONTROL_BYTES`; stays the caller's.

    Raises:
        ImportFailed: it is smaller, not sealed, or cannot be mapped.
    """
    size = sealed_size(fd, "the control page (descriptor 0)")
    if size < CONTROL_BYTES:
        raise ImportFailed(f"the control page has {size} bytes, {CONTROL_BYTES} are needed")
    try:
        return ControlWords(mmap.mmap(fd, CONTROL_BYTES))
    except OSError as error:
        raise ImportFailed(f"the control page cannot be mapped: {error}") from error


@dataclass(frozen=True, slots=True)
class Binding:
    """Where a worker's chunks live: as the broker's order says, in slots of so many bytes."""

    order: BindWorker
    slot_bytes: int
    directory: DirectoryView

    @classmethod
    def of(
        cls,
        message: BindWorker,
        descriptors: Sequence[int],
        layout: RankLayout,
        pool_bytes: int,
    ) -> "Binding":
        """Map the directory and check that the arena lies inside the pool.

        Raises:
            LaneError: it does not, or the descriptor is no directory for so many slots.
        """
        end = message.arena_base + layout.slot_bytes * message.num_slots
        if end > pool_bytes:
            raise LaneError(
                f"an arena of {message.num_slots} slots of {layout.slot_bytes} bytes from"
                f" {message.arena_base} does not lie inside the pool of {pool_bytes} bytes"
            )
        if len(descriptors) != 1:
            raise LaneError(f"one directory is needed, {len(descriptors)} descriptors came")
        try:
            size = os.fstat(descriptors[0]).st_size
            view = DirectoryView(mmap.mmap(descriptors[0], size, prot=mmap.PROT_READ))
        except (OSError, ValueError, DirectoryError) as error:
            raise LaneError(f"the directory cannot be used: {error}") from error
        if view.num_slots < message.num_slots:
            raise LaneError(
                f"a directory of {view.num_slots} slots for an arena of {message.num_slots}"
            )
        return cls(message, layout.slot_bytes, view)


@dataclass(eq=False, slots=True)
class LaneWorker:
    """One worker's memory, as this lane holds it.

    Attributes:
        has_control_page: else `control` is private memory, all zero.
        client: the connection on which it sends jobs; None until it has joined.
    """

    order: ImportWorker
    identity: ClientIdentity
    memory: MemoryId
    control: ControlWords
    has_control_page: bool
    expander: Expander
    binding: Binding | None = None
    leaving: bool = False
    client: Client | None = None

    @property
    def layout(self) -> RankLayout:
        """Of its memory."""
        return self.order.layout


def identity_of(message: ImportWorker) -> ClientIdentity:
    """The worker that a message names."""
    return ClientIdentity(message.session, message.pid, message.engine, "worker", message.rank)


def _users_differ(uid: int) -> str:
    """For the end of an error about a worker of this user; empty where it is this process's."""
    own = os.geteuid()
    if uid == own:
        return ""
    return (
        f"; the worker's user is {_user(uid)}, the lane's is {_user(own)}, and the driver may keep"
        " memory from other users: run both as one user, or have the engine share its memory by"
        " descriptors, see docs/security.md#gpu-memory-and-users"
    )


def _user(uid: int) -> str:
    """Number and name, as far as it has one here."""
    try:
        return f"{uid} ({pwd.getpwuid(uid).pw_name})"
    except KeyError:
        return f"{uid}"


class WorkerTable:
    """The imported workers, by session number and by token."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._by_session: dict[int, LaneWorker] = {}
        self._by_token: dict[bytes, LaneWorker] = {}

    def add(self, message: ImportWorker, descriptors: Sequence[int]) -> LaneWorker:
        """Map the memory of a worker whose registration the broker has checked.

        The descriptors stay the caller's; number 0 is the control page. None at all: the worker
        has no control page.

        Raises:
            ImportFailed: the memory is not as described; nothing stays mapped.
        """
        if message.session in self._by_session or message.token in self._by_token:
            raise ImportFailed(f"session {message.session} has its memory here already")
        if descriptors:
            control = open_control_page(descriptors[0])
        else:
            control = ControlWords(mmap.mmap(-1, CONTROL_BYTES))
        try:
            memory = self._device.import_memory(
                message.handles, message.layout.storages, descriptors
            )
        except HandleRefused as error:
            raise ImportFailed(f"{error}{_users_differ(message.uid)}") from error
        expander = Expander(message.layout)
        identity, has_page = identity_of(message), bool(descriptors)
        worker = LaneWorker(message, identity, memory, control, has_page, expander)
        self._by_session[message.session] = self._by_token[message.token] = worker
        return worker

    def remove(self, worker: LaneWorker) -> None:
        """Unmap a worker's memory; nothing may be in flight on it."""
        self._device.release_memory(worker.memory)
        worker.control.unmap()
        del self._by_session[worker.order.session], self._by_token[worker.order.token]

    def by_session(self, session: int) -> LaneWorker | None:
        """The worker of a session, by the broker's number."""
        return self._by_session.get(session)

    def by_token(self, token: bytes) -> LaneWorker | None:
        """The worker whose LaneUp has this token."""
        return self._by_token.get(token)

    @property
    def all_bound(self) -> bool:
        """Whether every worker has a binding."""
        return all(worker.binding is not None for worker in self._by_session.values())

    def __len__(self) -> int:
        return len(self._by_session)
