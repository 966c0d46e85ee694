"""One job of one worker: which bytes it moves, whether it still may, and its state.

This module only decides; the runner moves bytes and the reporter sends messages. It has two parts:

1. Checks of a job's slots against their heads in the directory. All heads of a job are read at one
   moment. A plain loop checks up to `SMALL_BATCH` chunks, numpy more.
2. `LaneJob`, the job itself. A load that reports progress moves layer after layer, and a device
   ends the pieces of one direction in the order of their submission. So the bytes that have arrived
   are the first ones of the job.
"""

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np
import numpy.typing as npt

from kvd.lane.device import NO_RUNS, Device, Direction, PreparedRuns
from kvd.lane.queue import QueuedJob
from kvd.lane.workers import Binding, LaneWorker
from kvd_proto.directory import HEAD_DTYPE, READ_HEADS, SlotState, loan_number
from kvd_proto.jobs import Chunks
from kvd_proto.messages import Job, JobStatus, Load, Store

SMALL_BATCH = 8
_READY, _WRITING = int(SlotState.READY), int(SlotState.WRITING)


def any_on_loan(heads: bytes, generations: "array[int]") -> bool:
    """Return whether a slot is still on loan for its generation.

    Then the broker may not have read the step that gives the slot to a store. The broker ends the
    loan last: a slot whose loan has ended is WRITING with this generation now, or never will be.

    `heads` are of these slots; see DirectoryView.heads.
    """
    if len(generations) > SMALL_BATCH:
        loans = np.frombuffer(generations, np.uint64).astype(np.uint32)
        return 1 in (np.frombuffer(heads, HEAD_DTYPE)["loan"] == loans).tobytes()
    return any(
        loan == loan_number(generation)
        for (*_, loan), generation in zip(READ_HEADS(heads), generations, strict=True)
    )


def not_writable(heads: bytes, owner: int, chunks: Chunks, indices: Sequence[int]) -> list[int]:
    """Return those of a job's `indices` of chunks whose slots are not this engine's to write.

    `heads` are of these slots; `owner` is the engine's number in the directory.
    """
    if len(indices) > SMALL_BATCH:
        table = np.frombuffer(heads, HEAD_DTYPE)
        generations = np.frombuffer(chunks.generations, np.uint64)
        if len(indices) < len(generations):
            generations = generations[np.fromiter(indices, np.intp, len(indices))]
        state = table["state"]
        writable = state == _WRITING
        writable &= (table["generation"] == generations) & (table["owner"] == owner)
        return [indices[i] for i in _true_indices(~writable)]
    lost = []
    for i, (generation, owned_by, state, *_) in zip(indices, READ_HEADS(heads), strict=True):
        if generation != chunks.generations[i] or owned_by != owner or state != _WRITING:
            lost.append(i)
    return lost


def not_ready(heads: bytes, chunks: Chunks) -> list[int]:
    """Return the indices of chunks whose slots are not READY or hold something else by now.

    `heads` are of the slots of all chunks.
    """
    generations = chunks.generations
    if len(generations) > SMALL_BATCH:
        table = np.frombuffer(heads, HEAD_DTYPE)
        stale = table["generation"] != np.frombuffer(generations, np.uint64)
        stale |= table["state"] != _READY
        return _true_indices(stale)
    return [
        i
        for i, (generation, _, state, *_) in enumerate(READ_HEADS(heads))
        if generation != generations[i] or state != _READY
    ]


def not_covered(heads: bytes, chunks: Chunks) -> list[int]:
    """Return the indices of chunks that lack requested blocks, or belong to another group.

    Another group's pages lie elsewhere in the slot, where old bytes may be.
    """
    if len(chunks) > SMALL_BATCH:
        table = np.frombuffer(heads, HEAD_DTYPE)
        # Nearly all loads are of whole chunks: comparing bytes costs least.
        if (
            table["first"].tobytes() == chunks.first.tobytes()
            and table["count"].tobytes() == chunks.count.tobytes()
            and table["group"].tobytes() == chunks.group.tobytes()
        ):
            return []
        firsts, counts, groups = (
            np.frombuffer(column, np.uint16)
            for column in (chunks.first, chunks.count, chunks.group)
        )
        stored_firsts = table["first"]
        # first + count is at most blocks_per_chunk, which fits 16 bits.
        lacking = (firsts < stored_firsts) | (firsts + counts > stored_firsts + table["count"])
        lacking |= groups != table["group"]
        return _true_indices(lacking)
    uncovered = []
    for i, (_, _, _, stored_first, stored_count, group, _) in enumerate(READ_HEADS(heads)):
        first = chunks.first[i]
        if (
            first < stored_first
            or first + chunks.count[i] > stored_first + stored_count
            or chunks.group[i] != group
        ):
            uncovered.append(i)
    return uncovered


def _true_indices(flags: npt.NDArray[np.bool_]) -> list[int]:
    """Return the indices of true flags."""
    # Mostly there are none, which a search in bytes finds out fastest.
    return np.flatnonzero(flags).tolist() if 1 in flags.tobytes() else []


VOID_TEXT = "the worker has taken the store's blocks back"
NO_WORD = 0
"""The `word` of a store without a word of the control page."""


class JobState(StrEnum):
    """The state of a job; docs/protocol.md draws the transitions."""

    QUEUED = "queued"  # accepted; waits for the timeline and its turn
    COPYING = "copying"  # bytes may be moving
    DRAINING = "draining"  # stopped; waits until nothing moves any more
    ENDED = "ended"  # nothing moves any more; its Done is sent next


JobOutcome = tuple[JobStatus, str]


@dataclass(eq=False, slots=True, kw_only=True)
class LaneJob(QueuedJob):
    """A job, until its Done is sent.

    If it ends OK, accepted_ns <= started_ns <= ended_ns (when its last byte had moved).

    Attributes:
        request_id: of the request; its Done repeats it.
        runs: its runs in the device's form, once it has started.
        num_submitted: how many of `runs` the device has been given.
        progress_word, layer_ends: of a load that reports progress, once it has started: the
            word's number, and the cumulative bytes of its layers.
        num_layers_reported: layers that the control page says have arrived.
        late_since_ns: when its turn came before the worker's timeline had reached its number; 0 if
            that has not happened.
        stream_wait_ns: from then until the timeline reached the number.
    """

    worker: LaneWorker
    binding: Binding
    request: Job
    request_id: int
    accepted_ns: int
    state: JobState = JobState.QUEUED
    runs: PreparedRuns = NO_RUNS
    num_submitted: int = 0
    progress_word: int = 0
    layer_ends: Sequence[int] = ()
    num_layers_reported: int = 0
    transfers_in_flight: int = 0
    bytes_in_flight: int = 0
    moved_bytes: int = 0
    copy_ns: int = 0
    late_since_ns: int = 0
    stream_wait_ns: int = 0
    started_ns: int = 0
    ended_ns: int = 0
    outcome: JobOutcome = (JobStatus.OK, "")
    direction: Direction = field(init=False)
    _chunks: Chunks | None = None
    _own_indices: Sequence[int] = ()
    _own_slots: "array[int]" = field(init=False)  # set by `_compute_chunks`
    _own_generations: "array[int]" = field(init=False)
    _verified_heads: bytes = b""

    def __post_init__(self) -> None:
        self.direction = Direction.LOAD if self.load else Direction.STORE

    @property
    def chunks(self) -> Chunks:
        """All chunks of the request. Computed on first use, since many jobs may be queued."""
        return self._compute_chunks() if self._chunks is None else self._chunks

    def _compute_chunks(self) -> Chunks:
        """Set and return the request's chunks; set which of them the job moves."""
        blocks, factor = self.request.blocks, self.worker.layout.blocks_per_chunk
        self._chunks = chunks = blocks.chunks(factor)
        slots = chunks.slots
        self._own_indices = range(len(slots)) if self.load else chunks_of_rank(self.worker, slots)
        self._own_slots = select(slots, self._own_indices)
        self._own_generations = select(chunks.generations, self._own_indices)
        return chunks

    @property
    def own_indices(self) -> Sequence[int]:
        """Indices of the chunks that the job moves.

        A load moves all. A store moves those that this rank writes, once it has started without
        those that the broker did not give to it.
        """
        if self._chunks is None:
            self._compute_chunks()
        return self._own_indices

    @property
    def own_slots(self) -> Sequence[int]:
        """Slots of the chunks that the job moves, in the order of `own_indices`."""
        if self._chunks is None:
            self._compute_chunks()
        return self._own_slots

    @property
    def deadline_ns(self) -> int:
        """When the job times out, on the clock of `accepted_ns`."""
        return self.accepted_ns + self.request.deadline_ms * 1_000_000

    @property
    def unfinished(self) -> bool:
        """Whether it has not ended."""
        return self.state is not JobState.ENDED

    @property
    def is_void(self) -> bool:
        """Whether the worker has taken a store's blocks back."""
        request = self.request
        return (
            isinstance(request, Store)
            and request.word != NO_WORD
            and self.worker.control.epoch(request.word) != request.epoch
        )

    def awaits_broker(self) -> bool:
        """Return whether the broker may not have read the step that gives a store its slots.

        Until then the slots may hold other chunks that loads read, so nothing may be written.
        """
        if self.load or self.is_void:
            return False
        if self._chunks is None:
            self._compute_chunks()
        heads = self.binding.directory.heads(self._own_slots)
        return any_on_loan(heads, self._own_generations)

    def drop_lost_chunks(self) -> None:
        """Leave out a store's chunks that the broker did not give to it, unless that is all.

        Another engine stored the key first, or no slot was free.
        """
        if self.load:
            return
        indices = self.own_indices
        lost = set(_not_writable_now(self.binding, self.chunks, indices))
        if lost and len(lost) < len(indices):
            self._own_indices = [i for i in indices if i not in lost]
            self._own_slots = select(self.chunks.slots, self._own_indices)
            self._own_generations = select(self.chunks.generations, self._own_indices)

    def check_slots(self) -> JobOutcome | None:
        """Return why the job may not move its chunks now; None if it may.

        Called before the first byte, before layers are reported, and after the last byte: a slot
        that has changed since the previous call has another generation or state.

        Returns:
            VOID: the worker has taken the store's blocks back.
            STALE: a slot holds something else, or does not have all blocks to load.
        """
        if self.is_void:
            return JobStatus.VOID, VOID_TEXT
        binding, chunks = self.binding, self.chunks
        heads = binding.directory.heads(self._own_slots)
        if heads == self._verified_heads:  # unchanged since the last check
            return None
        num_checked = len(self.own_indices)
        if self.load:
            expected, refused = "ready", not_ready(heads, chunks)
            if not refused:
                expected = "stored with all blocks that are to be loaded"
                refused = not_covered(heads, chunks)
        else:
            expected = "this engine's to write"
            refused = not_writable(heads, binding.order.owner, chunks, self.own_indices)
        if not refused:
            self._verified_heads = heads
            return None
        slot, generation = chunks.slots[refused[0]], chunks.generations[refused[0]]
        return JobStatus.STALE, (
            f"slot {slot} generation {generation} is not {expected}"
            f" ({len(refused)} of {num_checked} chunks)"
        )

    def prepare(self, device: Device) -> None:
        """Compute the runs of bytes and have the device prepare them.

        Raises:
            JobShapeError: runs outside the worker's memory or arena.
            LaneError: the device does not know the memory.
        """
        worker, binding = self.worker, self.binding
        request, expander = self.request, worker.expander
        if isinstance(request, Load) and request.progress:
            copies, self.layer_ends = expander.expand_layers(request.blocks)
            self.progress_word = request.progress
        else:
            moves_all = len(self.own_indices) == len(self.chunks)
            only_slots = None if moves_all else frozenset(self._own_slots)
            copies = expander.expand(request.blocks, only_slots)
        if not expander.inside:
            arena_bytes = binding.slot_bytes * binding.order.num_slots
            copies.check_bounds(worker.layout.storages, arena_bytes)
        base = binding.order.arena_base
        self.runs = device.prepare(worker.memory, self.direction, base, copies)

    @property
    def all_submitted(self) -> bool:
        """Whether the device has been given every run."""
        return self.num_submitted == len(self.runs)

    def reportable_indices(self, *, ok: bool) -> Sequence[int]:
        """Return the indices of a store's chunks to report to the broker.

        Of a store that failed, those that are still this engine's to write: a job may name chunks
        that never were.
        """
        if ok:
            return self.own_indices
        return _writable_now(self.binding, self.chunks, self.own_indices)

    def __repr__(self) -> str:
        return (
            f"<LaneJob {self.direction} {self.request.job} of {self.worker.identity}: {self.state},"
            f" {self.num_submitted} of {len(self.runs)} runs submitted,"
            f" {self.transfers_in_flight} transfers in flight>"
        )


def needs_control_page(request: Job) -> bool:
    """Return whether a job names a word of the control page or a number of the timeline."""
    if isinstance(request, Store):
        return bool(request.after or request.word or request.epoch)
    return bool(request.after or (isinstance(request, Load) and request.progress))


def check_pinned(job: LaneJob, device: Device) -> JobOutcome | None:
    """Return why a job may not start if a slot of it is not pinned yet; None if all are.

    Pinned slots stay pinned, so one check is enough.
    """
    if not device.needs_pinning:
        return None
    slots = job.own_slots
    base, size = job.binding.order.arena_base, job.binding.slot_bytes
    # First one call for the span of all slots, which mostly is all pinned.
    if not slots or device.is_usable(base + min(slots) * size, base + (max(slots) + 1) * size):
        return None
    unpinned = [s for s in slots if not device.is_usable(base + s * size, base + (s + 1) * size)]
    if not unpinned:
        return None
    text = (
        f"slot {unpinned[0]} lies where the pool is not pinned yet"
        f" ({len(unpinned)} of {len(slots)} chunks)"
    )
    return JobStatus.STALE, text


def abandoned_chunks(
    worker: LaneWorker, binding: Binding, request: Job
) -> tuple[Chunks, Sequence[int]]:
    """Return the chunks of a refused store, and the indices of those to report as not stored.

    Those are this engine's to write, and no store of them was accepted; there are none if slots and
    generations cannot be paired.
    """
    slots, generations = request.blocks.slots.array(), request.blocks.generations.array()
    zeros = array("H", bytes(2 * len(slots)))
    chunks = Chunks(slots, generations, zeros, zeros, zeros)
    if len(slots) != len(generations):
        return chunks, ()
    inside = [i for i in chunks_of_rank(worker, slots) if slots[i] < binding.order.num_slots]
    are_accepted = binding.accepted_stores.are_accepted(
        select(slots, inside), select(generations, inside)
    )
    indices = [i for i, is_accepted in zip(inside, are_accepted, strict=True) if not is_accepted]
    return chunks, _writable_now(binding, chunks, indices)


def chunks_of_rank(worker: LaneWorker, slots: Sequence[int]) -> Sequence[int]:
    """Return the indices of the chunks that this rank writes.

    Each rank writes its share of every chunk, but of replicated chunks the ranks take turns.
    """
    if not worker.layout.replicated:
        return range(len(slots))
    size, rank = worker.order.world_size, worker.order.rank
    return [i for i, slot in enumerate(slots) if slot % size == rank]


def select(column: "array[int]", indices: Sequence[int]) -> "array[int]":
    """Return these items of a column, in this order; the column itself if they are all."""
    if len(indices) == len(column):
        return column
    return array(column.typecode, [column[i] for i in indices])


def _not_writable_now(binding: Binding, chunks: Chunks, indices: Sequence[int]) -> list[int]:
    heads = binding.directory.heads(select(chunks.slots, indices))
    return not_writable(heads, binding.order.owner, chunks, indices)


def _writable_now(binding: Binding, chunks: Chunks, indices: Sequence[int]) -> list[int]:
    lost = set(_not_writable_now(binding, chunks, indices))
    return [i for i in indices if i not in lost]
