"""One job of one worker: what it moves, whether it still may, and where it stands.

Everything here looks and decides; nothing is moved or sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvd.client_names import Fields
from kvd.lane.devices.device import Direction
from kvd.lane.workers import Binding, Worker
from kvd.wire.link import ShareDone
from kvd_proto.arrays import IntArray
from kvd_proto.blocks import Chunks
from kvd_proto.directory import SlotState
from kvd_proto.errors import JobShapeError
from kvd_proto.expand import Copies
from kvd_proto.messages import Job, JobStatus, Store
from kvd_proto.states import JOB, JobEvent, JobState, Machine

SHARES_PER_MESSAGE = 4096  # 20 bytes each: well inside one datagram of the link
VOID_TEXT = "the worker has taken the store's blocks back"

Mask = npt.NDArray[np.bool_]
Refusal = tuple[JobStatus, str]


@dataclass(frozen=True, slots=True)
class ReplyTo:
    """Where a job's Done goes."""

    identity: bytes
    request_id: int
    boot_id: bytes


@dataclass(eq=False, slots=True)
class LaneJob:
    """A job that has not ended, or just has. `serial` is unique in this lane.

    Of a job that ended ok: accepted_ns <= started_ns <= ended_ns (its last byte moved).

    Attributes:
        own: bool[chunks], whether this rank writes the chunk; all true but for stores of a
            replicated layout.
        late_ns: when its turn came and the worker's timeline had not reached its number; else 0.
        stream_wait_ns: from then until the number was reached.
    """

    serial: int
    worker: Worker
    binding: Binding
    direction: Direction
    request: Job
    chunks: Chunks
    own: Mask
    reply: ReplyTo
    accepted_ns: int
    machine: Machine[JobState, JobEvent] = field(
        default_factory=lambda: Machine(JOB, JobState.QUEUED)
    )
    pieces: list[tuple[Copies, int]] = field(default_factory=list)
    next_piece: int = 0
    in_flight: int = 0
    in_flight_bytes: int = 0
    moved_bytes: int = 0
    copy_ns: int = 0
    late_ns: int = 0
    stream_wait_ns: int = 0
    started_ns: int = 0
    ended_ns: int = 0
    outcome: Refusal = (JobStatus.OK, "")
    on_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def deadline_ns(self) -> int:
        """When it is given up, on the clock of `accepted_ns`."""
        return self.accepted_ns + self.request.deadline_ms * 1_000_000

    @property
    def expected_bytes(self) -> int:
        """Bytes that the job names, before anything is left out for being another rank's turn."""
        groups = self.worker.layout.groups
        return sum(
            size * sum(ref.page_bytes for ref in group.refs)
            for size, group in zip(self.request.blocks.sizes, groups, strict=True)
        )

    @property
    def unfinished(self) -> bool:
        """Whether its Done is still to come."""
        return self.machine.state is not JobState.ENDED

    @property
    def label(self) -> str:
        """How logs name this job."""
        return f"{self.direction} {self.request.job} of {self.worker.who}"

    @property
    def fields(self) -> Fields:
        """The same for programs."""
        return {**self.worker.who.fields, "job": self.request.job}

    @property
    def void(self) -> bool:
        """Whether the worker has taken a store's blocks back."""
        request = self.request
        return (
            isinstance(request, Store) and self.worker.control.epoch(request.word) != request.epoch
        )

    def objection(self) -> Refusal | None:
        """Why the job's chunks or blocks are not its own now; None where they are.

        Asked before the first byte and after the last one: whatever happened in
        between to a slot has changed its generation or its state.
        """
        if self.void:
            return JobStatus.VOID, VOID_TEXT
        chunks, directory = self.chunks, self.binding.directory
        if self.direction is Direction.STORE:
            bad = self.own & ~_writing(self.binding, chunks.slots, chunks.generations)
            what = "being written by this engine"
        else:
            bad = ~directory.check(chunks.slots, chunks.generations, SlotState.READY)
            what = "ready"
            if not bad.any():
                first, count = directory.coverage(chunks.slots)
                # first + count is at most blocks_per_chunk, which fits 16 bits.
                bad = (chunks.first < first) | (chunks.first + chunks.count > first + count)
                # Another group's pages lie elsewhere in the slot, where old bytes may be.
                bad |= directory.groups(chunks.slots) != chunks.group
                what = "stored with all blocks that are to be loaded"
        if not bad.any():
            return None
        worst = int(np.argmax(bad))
        return JobStatus.STALE, (
            f"slot {chunks.slots[worst]} generation {chunks.generations[worst]} is not {what}"
            f" ({int(bad.sum())} of {len(bad)} chunks)"
        )

    def plan(self, piece_bytes: int) -> None:
        """Work out the runs of bytes and cut them into pieces of about `piece_bytes`.

        Raises:
            JobShapeError: runs outside the worker's memory or arena.
        """
        copies = self.worker.expander.expand(self.request.blocks)
        if not self.own.all():
            # Replicated: keep what lies in this rank's slots; runs may span several.
            copies = split_runs(copies, self.binding.slot_bytes)
            copies = select(
                copies, own_slots(self.worker, copies.arena_offset // self.binding.slot_bytes)
            )
        check_bounds(copies, self.worker, self.binding)
        self.pieces = cut(copies, piece_bytes)

    def shares(self, *, ok: bool) -> list[ShareDone]:
        """What the broker is told about a store's chunks.

        Of a store that failed, those that are still this engine's to write: a job may have
        named what never was.
        """
        chunks = self.chunks
        mask = self.own
        if not ok:
            mask = mask & _writing(self.binding, chunks.slots, chunks.generations)
        return _share_messages(self.worker, self.binding, chunks, mask, ok=ok)

    def __repr__(self) -> str:
        return (
            f"<LaneJob {self.label}: {self.machine.state},"
            f" piece {self.next_piece}/{len(self.pieces)}, {self.in_flight} in flight>"
        )


def refused_shares(worker: Worker, binding: Binding, request: Job) -> list[ShareDone]:
    """What the broker is told of a store that could not even be read: its chunks are given up.

    Names those that are this engine's to write, as far as slots and generations can be paired.
    """
    slots, generations = request.blocks.slots.numpy(), request.blocks.generations.numpy()
    if len(slots) != len(generations):
        return []
    inside = slots < binding.num_slots
    slots, generations = slots[inside], generations[inside]
    nothing = np.zeros(len(slots), dtype=np.uint16)
    chunks = Chunks(slots, generations, nothing, nothing, nothing)
    mask = own_slots(worker, slots) & _writing(binding, slots, generations)
    return _share_messages(worker, binding, chunks, mask, ok=False)


def split_runs(copies: Copies, unit: int) -> Copies:
    """The same copies, cut so that no run crosses a multiple of `unit` bytes of the arena."""
    begins = copies.arena_offset
    ends = begins + copies.nbytes
    first = begins // unit
    parts = (ends - 1) // unit - first + 1
    if bool((parts == 1).all()):
        return copies
    run = np.repeat(np.arange(len(parts)), parts)
    part = np.arange(len(run)) - np.repeat(np.cumsum(parts) - parts, parts)
    begin = np.maximum((first[run] + part) * unit, begins[run])
    end = np.minimum((first[run] + part + 1) * unit, ends[run])
    return Copies(
        storage=copies.storage[run],
        tensor_offset=copies.tensor_offset[run] + (begin - begins[run]),
        arena_offset=begin,
        nbytes=end - begin,
    )


def select(copies: Copies, which: Mask | slice) -> Copies:
    """Some of the runs."""
    return Copies(
        storage=copies.storage[which],
        tensor_offset=copies.tensor_offset[which],
        arena_offset=copies.arena_offset[which],
        nbytes=copies.nbytes[which],
    )


def cut(copies: Copies, piece_bytes: int) -> list[tuple[Copies, int]]:
    """Pieces of about `piece_bytes` (below twice that) with their bytes, in order.

    A run belongs to the piece that its last byte falls into, were all pieces alike.
    """
    total = copies.total_bytes
    if 0 < total <= piece_bytes:
        return [(copies, total)]
    copies = split_runs(copies, piece_bytes)
    end = np.cumsum(copies.nbytes)
    cuts = (np.flatnonzero(np.diff((end - 1) // piece_bytes)) + 1).tolist()
    bounds = [0, *cuts, len(copies)]
    moved = [0, *(int(end[index - 1]) for index in bounds[1:] if index)]
    return [
        (select(copies, slice(bounds[i], bounds[i + 1])), moved[i + 1] - moved[i])
        for i in range(len(moved) - 1)
    ]


def check_bounds(copies: Copies, worker: Worker, binding: Binding) -> None:
    """Every run lies inside its storage and inside the arena.

    Raises:
        JobShapeError: one does not.
    """
    if not len(copies.nbytes):
        return
    sizes = np.array(worker.layout.storages, dtype=np.int64)
    arena = binding.slot_bytes * binding.num_slots
    inside = (
        (copies.storage >= 0)
        & (copies.storage < len(sizes))
        & (copies.nbytes > 0)
        & (copies.tensor_offset >= 0)
        & (copies.arena_offset >= 0)
        & (copies.arena_offset + copies.nbytes <= arena)
    )
    if bool(inside.all()):
        inside = copies.tensor_offset + copies.nbytes <= sizes[copies.storage]
    if not bool(inside.all()):
        worst = int(np.argmin(inside))
        raise JobShapeError(
            f"{copies.nbytes[worst]} bytes between offset {copies.tensor_offset[worst]} of storage"
            f" {copies.storage[worst]} and offset {copies.arena_offset[worst]} of the arena of"
            f" {arena} bytes lie outside"
        )


def own_slots(worker: Worker, slots: npt.NDArray[np.integer]) -> Mask:
    """Which slots this rank writes: replicated shares are written once, in turns."""
    if not worker.layout.replicated:
        return np.ones(len(slots), dtype=np.bool_)
    mine: Mask = slots % worker.world_size == worker.rank
    return mine


def _writing(
    binding: Binding, slots: npt.NDArray[np.uint32], generations: npt.NDArray[np.uint64]
) -> Mask:
    return binding.directory.check(slots, generations, SlotState.WRITING, binding.owner)


def _share_messages(
    worker: Worker, binding: Binding, chunks: Chunks, mask: Mask, *, ok: bool
) -> list[ShareDone]:
    which = np.flatnonzero(mask)
    return [
        ShareDone(
            session=worker.session,
            rank=worker.rank,
            namespace=binding.namespace,
            slots=IntArray.of(chunks.slots[part], "u4"),
            generations=IntArray.of(chunks.generations[part], "u8"),
            first=IntArray.of(chunks.first[part], "u2"),
            count=IntArray.of(chunks.count[part], "u2"),
            groups=IntArray.of(chunks.group[part], "u2"),
            ok=ok,
        )
        for part in (
            which[begin : begin + SHARES_PER_MESSAGE]
            for begin in range(0, len(which), SHARES_PER_MESSAGE)
        )
    ]
