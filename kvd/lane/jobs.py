"""One job of one worker: what it moves, whether it still may, and where it stands.

Everything here looks and decides; nothing is moved or sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvd.lane.devices.device import Device, Direction
from kvd.lane.queue import Queued
from kvd.lane.workers import Binding, Worker
from kvd.wire.link import ShareDone
from kvd_proto.arrays import IntArray
from kvd_proto.blocks import Chunks
from kvd_proto.directory import SlotState
from kvd_proto.expand import Copies
from kvd_proto.messages import Job, JobStatus, Message, Store

SHARES_PER_MESSAGE = 4096  # 20 bytes each: well inside one datagram of the link
VOID_TEXT = "the worker has taken the store's blocks back"


class JobState(StrEnum):
    """Where a job stands; docs/protocol.md draws what follows what."""

    QUEUED = "queued"  # accepted, waits for the timeline and its turn
    COPYING = "copying"  # bytes may be moving
    DRAINING = "draining"  # stopped; waits until nothing moves any more
    ENDED = "ended"  # its Done was sent


Mask = npt.NDArray[np.bool_]
Refusal = tuple[JobStatus, str]
Reply = Callable[[Message], None]
"""Sends the answer to one request; never waits."""


@dataclass(eq=False, slots=True, kw_only=True)
class LaneJob(Queued):
    """A job that has not ended, or just has.

    Of a job that ended ok: accepted_ns <= started_ns <= ended_ns (its last byte moved).

    Attributes:
        own: bool[chunks], whether this rank writes the chunk; all true but for stores of a
            replicated layout.
        late_ns: when its turn came and the worker's timeline had not reached its number; else 0.
        stream_wait_ns: from then until the number was reached.
    """

    worker: Worker
    binding: Binding
    request: Job
    chunks: Chunks
    own: Mask
    reply: Reply
    accepted_ns: int
    state: JobState = JobState.QUEUED
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

    @property
    def deadline_ns(self) -> int:
        """When it is given up, on the clock of `accepted_ns`."""
        return self.accepted_ns + self.request.deadline_ms * 1_000_000

    @property
    def direction(self) -> Direction:
        """Which way its bytes go."""
        return Direction.LOAD if self.load else Direction.STORE

    @property
    def unfinished(self) -> bool:
        """Whether its Done is still to come."""
        return self.state is not JobState.ENDED

    @property
    def void(self) -> bool:
        """Whether the worker has taken a store's blocks back."""
        request = self.request
        return (
            isinstance(request, Store) and self.worker.control.epoch(request.word) != request.epoch
        )

    def objection(self) -> Refusal | None:
        """Return why the job's chunks or blocks are not its own now, or None where they are.

        Asked before the first byte and after the last one: whatever happened in
        between to a slot has changed its generation or its state.
        """
        if self.void:
            return JobStatus.VOID, VOID_TEXT
        chunks, directory = self.chunks, self.binding.directory
        if self.direction is Direction.STORE:
            bad = self.own & ~_to_write(self.binding, chunks.slots, chunks.generations)
            what = "this engine's to write"
        else:
            bad = ~directory.check(chunks.slots, chunks.generations, SlotState.READY)
            what = "ready"
            if not bad.any():
                first, count, group = directory.coverage(chunks.slots)
                # first + count is at most blocks_per_chunk, which fits 16 bits.
                bad = (chunks.first < first) | (chunks.first + chunks.count > first + count)
                # Another group's pages lie elsewhere in the slot, where old bytes may be.
                bad |= group != chunks.group
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
        slot_bytes, num_slots = self.binding.slot_bytes, self.binding.order.num_slots
        if not self.own.all():
            # Replicated: keep what lies in this rank's slots; runs may span several.
            copies = copies.split(slot_bytes)
            copies = copies.select(own_slots(self.worker, copies.arena_offset // slot_bytes))
        copies.check_bounds(self.worker.layout.storages, slot_bytes * num_slots)
        self.pieces = copies.pieces(piece_bytes)

    def shares(self, *, ok: bool) -> list[ShareDone]:
        """Return the messages to the broker about a store's chunks.

        Of a store that failed, those that are still this engine's to write: a job may have
        named what never was.
        """
        chunks = self.chunks
        mask = self.own
        if not ok:
            mask = mask & _to_write(self.binding, chunks.slots, chunks.generations)
        return _share_messages(self.worker, self.binding, chunks, mask, ok=ok)

    def __repr__(self) -> str:
        return (
            f"<LaneJob {self.direction} {self.request.job} of {self.worker.who}: {self.state},"
            f" piece {self.next_piece}/{len(self.pieces)}, {self.in_flight} in flight>"
        )


def outside(job: LaneJob, device: Device) -> Refusal | None:
    """Return why a job may not begin for lack of memory that is pinned, or None where it may.

    What is pinned stays so: asked once is enough. Where all is pinned, the first look says so.
    """
    if not device.pins:
        return None
    slots = job.chunks.slots[job.own].tolist()
    base, size = job.binding.order.arena_base, job.binding.slot_bytes
    if not slots or device.holds(base + min(slots) * size, base + (max(slots) + 1) * size):
        return None
    out = [s for s in slots if not device.holds(base + s * size, base + (s + 1) * size)]
    if not out:
        return None
    text = (
        f"slot {out[0]} lies where the pool is not pinned yet ({len(out)} of {len(slots)} chunks)"
    )
    return JobStatus.STALE, text


def refused_shares(worker: Worker, binding: Binding, request: Job) -> list[ShareDone]:
    """Return the messages to the broker about a refused store: its chunks are given up.

    Names those that are this engine's to write, as far as slots and generations can be paired.
    """
    slots, generations = request.blocks.slots.numpy(), request.blocks.generations.numpy()
    if len(slots) != len(generations):
        return []
    inside = slots < binding.order.num_slots
    slots, generations = slots[inside], generations[inside]
    nothing = np.zeros(len(slots), dtype=np.uint16)
    chunks = Chunks(slots, generations, nothing, nothing, nothing)
    mask = own_slots(worker, slots) & _to_write(binding, slots, generations)
    return _share_messages(worker, binding, chunks, mask, ok=False)


def own_slots(worker: Worker, slots: npt.NDArray[np.integer]) -> Mask:
    """Which slots this rank writes: replicated shares are written once, in turns."""
    if not worker.layout.replicated:
        return np.ones(len(slots), dtype=np.bool_)
    mine: Mask = slots % worker.order.world_size == worker.order.rank
    return mine


def _to_write(
    binding: Binding, slots: npt.NDArray[np.uint32], generations: npt.NDArray[np.uint64]
) -> Mask:
    # A store may come before the broker knows of its key: then the slot is only lent.
    return binding.directory.check(
        slots, generations, SlotState.WRITING, binding.order.owner, or_state=SlotState.LENT
    )


def _share_messages(
    worker: Worker, binding: Binding, chunks: Chunks, mask: Mask, *, ok: bool
) -> list[ShareDone]:
    which = np.flatnonzero(mask)
    return [
        ShareDone(
            session=worker.order.session,
            rank=worker.order.rank,
            namespace=binding.order.namespace,
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
