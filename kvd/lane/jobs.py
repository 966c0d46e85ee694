"""One job of one worker: what it moves, whether it still may, and where it stands.

Everything here looks and decides; nothing is moved or sent.

Which of a job's chunks are its own the directory's records say. All records of a job are read at
one moment; what they say is then found without another look. Few are looked at one by one, many at
once.

A load that reports its layers is moved layer after layer, and a device ends the pieces of one
direction in the order in which it was given them; so the bytes that have arrived are the first.
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

FEW = 8
_READY, _WRITING = int(SlotState.READY), int(SlotState.WRITING)


def await_broker(heads: bytes, generations: "array[int]") -> bool:
    """Return whether a store's step may still be unread: a slot is on loan for its generation.

    The broker ends the loan last. A slot whose loan has ended is WRITING with the generation, or
    never will be.

    Args:
        heads: of the slots; see DirectoryView.heads.
        generations: u8, of these slots.
    """
    if len(generations) > FEW:
        loans = np.frombuffer(generations, np.uint64).astype(np.uint32)
        return 1 in (np.frombuffer(heads, HEAD_DTYPE)["loan"] == loans).tobytes()
    return any(
        loan == loan_number(generation)
        for (*_, loan), generation in zip(READ_HEADS(heads), generations, strict=True)
    )


def not_to_write(heads: bytes, owner: int, chunks: Chunks, which: Sequence[int]) -> list[int]:
    """Return those of `which`, numbers of chunks, that are not this engine's to write.

    Args:
        heads: of the slots of these chunks; see DirectoryView.heads.
        owner: the engine, as the directory names it.
        chunks: the job's.
        which: numbers of chunks.
    """
    if len(which) > FEW:
        table = np.frombuffer(heads, HEAD_DTYPE)
        generations = np.frombuffer(chunks.generations, np.uint64)
        if len(which) < len(generations):
            generations = generations[np.fromiter(which, np.intp, len(which))]
        state = table["state"]
        good = state == _WRITING
        good &= (table["generation"] == generations) & (table["owner"] == owner)
        return [which[i] for i in _numbers(~good)]
    lost = []
    for i, (generation, owned_by, state, *_) in zip(which, READ_HEADS(heads), strict=True):
        if generation != chunks.generations[i] or owned_by != owner or state != _WRITING:
            lost.append(i)
    return lost


def not_ready(heads: bytes, chunks: Chunks) -> list[int]:
    """Return the numbers of those that are not READY, or hold something else by now.

    Args:
        heads: of the slots of all chunks.
        chunks: the job's.
    """
    generations = chunks.generations
    if len(generations) > FEW:
        table = np.frombuffer(heads, HEAD_DTYPE)
        gone = table["generation"] != np.frombuffer(generations, np.uint64)
        gone |= table["state"] != _READY
        return _numbers(gone)
    return [
        i
        for i, (found, _, state, *_) in enumerate(READ_HEADS(heads))
        if found != generations[i] or state != _READY
    ]


def not_covered(heads: bytes, chunks: Chunks) -> list[int]:
    """Return the numbers of those that lack blocks that are asked for, or are of another group.

    Another group's pages lie elsewhere in the slot, where old bytes may be. Arguments as
    `not_ready` has them.
    """
    if len(chunks) > FEW:
        table = np.frombuffer(heads, HEAD_DTYPE)
        if (
            table["first"].tobytes() == chunks.first.tobytes()
            and table["count"].tobytes() == chunks.count.tobytes()
            and table["group"].tobytes() == chunks.group.tobytes()
        ):  # whole chunks, as nearly all are: a comparison of bytes costs least
            return []
        firsts, counts, groups = (
            np.frombuffer(one, np.uint16) for one in (chunks.first, chunks.count, chunks.group)
        )
        begins = table["first"]
        # first + count is at most blocks_per_chunk, which fits 16 bits.
        lacking = (firsts < begins) | (firsts + counts > begins + table["count"])
        lacking |= groups != table["group"]
        return _numbers(lacking)
    short = []
    for i, (_, _, _, begin, held, of, _) in enumerate(READ_HEADS(heads)):
        first = chunks.first[i]
        if first < begin or first + chunks.count[i] > begin + held or chunks.group[i] != of:
            short.append(i)
    return short


def _numbers(bad: npt.NDArray[np.bool_]) -> list[int]:
    """Of those that are true; mostly there are none, which is found fastest in bytes."""
    return np.flatnonzero(bad).tolist() if 1 in bad.tobytes() else []


VOID_TEXT = "the worker has taken the store's blocks back"
NO_WORD = 0
"""The `word` of a store that has none."""


class JobState(StrEnum):
    """Where a job stands; docs/protocol.md draws what follows what."""

    QUEUED = "queued"  # accepted, waits for the timeline and its turn
    COPYING = "copying"  # bytes may be moving
    DRAINING = "draining"  # stopped; waits until nothing moves any more
    ENDED = "ended"  # its Done was sent


JobOutcome = tuple[JobStatus, str]


@dataclass(eq=False, slots=True, kw_only=True)
class LaneJob(QueuedJob):
    """A job that has not ended, or just has.

    Of a job that ended ok: accepted_ns <= started_ns <= ended_ns (its last byte moved).

    Attributes:
        request_id: of the request, for its Done.
        moves: its runs as the device has prepared them, once it has started.
        given: how many of them the device was given.
        progress_word, layer_ends: of a load that reports its layers, once it has started: the
            word's number, and the bytes of all layers up to and with each.
        layers_told: how many the worker has been told of.
        late_ns: when its turn came and the worker's timeline had not reached its number; else 0.
        stream_wait_ns: from then until the number was reached.
    """

    worker: LaneWorker
    binding: Binding
    request: Job
    request_id: int
    accepted_ns: int
    state: JobState = JobState.QUEUED
    moves: PreparedRuns = NO_RUNS
    given: int = 0
    progress_word: int = 0
    layer_ends: Sequence[int] = ()
    layers_told: int = 0
    in_flight: int = 0
    in_flight_bytes: int = 0
    moved_bytes: int = 0
    copy_ns: int = 0
    late_ns: int = 0
    stream_wait_ns: int = 0
    started_ns: int = 0
    ended_ns: int = 0
    outcome: JobOutcome = (JobStatus.OK, "")
    direction: Direction = field(init=False)
    _chunks: Chunks | None = None
    _own: Sequence[int] = ()
    _slots: "array[int]" = field(init=False)  # of its own chunks, with `_chunks`
    _generations: "array[int]" = field(init=False)
    _good: bytes = b""

    def __post_init__(self) -> None:
        self.direction = Direction.LOAD if self.load else Direction.STORE

    @property
    def chunks(self) -> Chunks:
        """Worked out when the job starts: many may be queued."""
        if self._chunks is None:
            blocks, factor = self.request.blocks, self.worker.layout.blocks_per_chunk
            self._chunks = blocks.chunks(factor)
            slots = self._chunks.slots
            self._own = range(len(slots)) if self.load else own_chunks(self.worker, slots)
            self._slots = _items_of(slots, self._own)
            self._generations = _items_of(self._chunks.generations, self._own)
        return self._chunks

    @property
    def own(self) -> Sequence[int]:
        """Numbers of the chunks that it moves.

        All of a load's. Of a store those that this rank writes, once it has started without those
        that the broker has not given to it.
        """
        _ = self.chunks
        return self._own

    @property
    def own_slots(self) -> Sequence[int]:
        """Slots of the chunks that it moves, in the order of `own`."""
        _ = self.chunks
        return self._slots

    @property
    def deadline_ns(self) -> int:
        """When it is given up, on the clock of `accepted_ns`."""
        return self.accepted_ns + self.request.deadline_ms * 1_000_000

    @property
    def unfinished(self) -> bool:
        """Whether its Done is still to come."""
        return self.state is not JobState.ENDED

    @property
    def void(self) -> bool:
        """Whether the worker has taken a store's blocks back."""
        request = self.request
        return (
            isinstance(request, Store)
            and request.word != NO_WORD
            and self.worker.control.epoch(request.word) != request.epoch
        )

    def awaits_broker(self) -> bool:
        """Whether the broker may not have read the step that gives a store its slots.

        Until then the slots may hold other chunks, which loads read: nothing may be written.
        """
        if self.load or self.void:
            return False
        _ = self.chunks
        return await_broker(self.binding.directory.heads(self._slots), self._generations)

    def leave_out_lost(self) -> None:
        """Leave out a store's chunks that were not given to it: others were first, or no room was.

        Not where that is all of them.
        """
        if self.load:
            return
        own = self.own
        lost = set(_not_own(self.binding, self.chunks, own))
        if lost and len(lost) < len(own):
            self._own = [i for i in own if i not in lost]
            self._slots = _items_of(self.chunks.slots, self._own)
            self._generations = _items_of(self.chunks.generations, self._own)

    def objection(self) -> JobOutcome | None:
        """Return why the job's chunks or blocks are not its own now, or None where they are.

        Asked before the first byte and after the last one: whatever happened in
        between to a slot has changed its generation or its state.
        """
        if self.void:
            return JobStatus.VOID, VOID_TEXT
        binding, chunks = self.binding, self.chunks
        heads = binding.directory.heads(self._slots)
        if heads == self._good:  # as it was when it was found to be good
            return None
        if self.load:
            what, bad = "ready", not_ready(heads, chunks)
            if not bad:
                what = "stored with all blocks that are to be loaded"
                bad = not_covered(heads, chunks)
        else:
            what = "this engine's to write"
            bad = not_to_write(heads, binding.order.owner, chunks, self.own)
        if not bad:
            self._good = heads
            return None
        return JobStatus.STALE, (
            f"slot {chunks.slots[bad[0]]} generation {chunks.generations[bad[0]]} is not {what}"
            f" ({len(bad)} of {len(chunks)} chunks)"
        )

    def plan(self, device: Device) -> None:
        """Work out the runs of bytes and let the device prepare them.

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
            everything = len(self.own) == len(self.chunks)
            only = None if everything else frozenset(self._slots)
            copies = expander.expand(request.blocks, only)
        if not expander.inside:
            arena_bytes = binding.slot_bytes * binding.order.num_slots
            copies.check_bounds(worker.layout.storages, arena_bytes)
        base = binding.order.arena_base
        self.moves = device.prepare(worker.memory, self.direction, base, copies)

    @property
    def all_given(self) -> bool:
        """Whether the device was given every run."""
        return self.given == len(self.moves)

    def to_report(self, *, ok: bool) -> Sequence[int]:
        """Return the numbers of a store's chunks that the broker is to be told of.

        Of a store that failed, those that are still this engine's to write: a job may have
        named what never was.
        """
        if ok:
            return self.own
        return _still_own(self.binding, self.chunks, self.own)

    def __repr__(self) -> str:
        return (
            f"<LaneJob {self.direction} {self.request.job} of {self.worker.identity}: {self.state},"
            f" {self.given} of {len(self.moves)} runs given, {self.in_flight} pieces in flight>"
        )


def needs_control_page(request: Job) -> bool:
    """Return whether a job names a word of the control page or a number of the timeline."""
    if isinstance(request, Store):
        return bool(request.after or request.word or request.epoch)
    return bool(request.after or (isinstance(request, Load) and request.progress))


def outside(job: LaneJob, device: Device) -> JobOutcome | None:
    """Return why a job may not begin for lack of memory that is pinned, or None where it may.

    What is pinned stays so: asked once is enough. Where all is pinned, the first look says so.
    """
    if not device.pins:
        return None
    slots = job.own_slots
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


def refused_chunks(
    worker: LaneWorker, binding: Binding, request: Job
) -> tuple[Chunks, Sequence[int]]:
    """Return the chunks of a refused store, and the numbers of those that are given up.

    Those are this engine's to write, as far as slots and generations can be paired.
    """
    slots, generations = request.blocks.slots.array(), request.blocks.generations.array()
    nothing = array("H", bytes(2 * len(slots)))
    chunks = Chunks(slots, generations, nothing, nothing, nothing)
    if len(slots) != len(generations):
        return chunks, ()
    inside = [i for i in own_chunks(worker, slots) if slots[i] < binding.order.num_slots]
    return chunks, _still_own(binding, chunks, inside)


def own_chunks(worker: LaneWorker, slots: Sequence[int]) -> Sequence[int]:
    """Return the numbers of the chunks that this rank writes: replicated ones are, in turns."""
    if not worker.layout.replicated:
        return range(len(slots))
    size, rank = worker.order.world_size, worker.order.rank
    return [i for i, slot in enumerate(slots) if slot % size == rank]


def _items_of(items: "array[int]", which: Sequence[int]) -> "array[int]":
    """The items of these numbers."""
    if len(which) == len(items):
        return items
    return array(items.typecode, [items[i] for i in which])


def _not_own(binding: Binding, chunks: Chunks, which: Sequence[int]) -> list[int]:
    heads = binding.directory.heads(_items_of(chunks.slots, which))
    return not_to_write(heads, binding.order.owner, chunks, which)


def _still_own(binding: Binding, chunks: Chunks, which: Sequence[int]) -> list[int]:
    lost = set(_not_own(binding, chunks, which))
    return [i for i in which if i not in lost]
