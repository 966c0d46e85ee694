"""The tier `disk`: chunks in preallocated slab files, which outlive the process.

Durability: a put is acknowledged once its bytes, and after them its record, are written. If the
process is killed at any moment, the next one finds every acknowledged chunk, whole. Puts are not
synced: after a power loss chunks of the last half minute may be missing (the kernel writes records
back within vm.dirty_expire_centisecs), which is a miss. Wrong bytes are never returned, since the
common layer verifies every chunk's seal. Only a namespace's new salt is synced at once, so that
chunks dropped by a reset are not found again.

If the I/O of a run fails, its chunks are retried one by one, since one slot may be at fault. A slab
whose files were removed or shortened is dropped with all of its chunks.
"""

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

from kvd.errors import TierError
from kvd.machine.memory import Filesystem
from kvd.tier.contract import BackendOptions, Capacity, Chunk, Outcome, Space, TierBackend
from kvd.tier.disk.allocator import SlotAllocator, load_slabs
from kvd.tier.disk.directory import DiskDirectory, DiskOptions, Salts, error_text
from kvd.tier.disk.slabs import Record, Slab, SlabLost
from kvd.tier.disk.slot_io import Alignment, SlotChunk, SlotRunIO, layout_of, runs
from kvd.tier.disk.slots import chunks_of
from kvd_proto.text import format_size

_log = logging.getLogger(__name__)
_MAX_KEYS = 4096  # chunks that are freed or listed at a time


@dataclass(slots=True)
class BatchOutcomes:
    """The outcomes of a batch's chunks, and I/O errors.

    Attributes:
        deadline: monotonic seconds, after which no more I/O is started.
    """

    outcomes: list[Outcome]
    deadline: float
    errors: list[str] = field(default_factory=list)

    def set_outcome(self, run: Sequence[SlotChunk], outcome: Outcome) -> None:
        """Set the same outcome for all chunks of a run."""
        for item in run:
            self.outcomes[item.index] = outcome

    def checked_outcomes(self) -> list[Outcome]:
        """Return the outcomes; log an error of some of them.

        Raises:
            TierError: all chunks failed, by an I/O error.
        """
        if self.errors and Outcome.FAILED in self.outcomes:
            if all(outcome is Outcome.FAILED for outcome in self.outcomes):
                raise TierError(self.errors[0])
            _log.warning("%s (%d chunks of a batch)", self.errors[0], len(self.errors))
        return self.outcomes


class DiskTier(TierBackend):
    """Chunks in slab files; see the module.

    One call reads or writes a run of adjacent slots, directly from and to the pool if the file
    system has O_DIRECT. The budget (`size=`) counts all files, and is never exceeded; eviction is
    CLOCK (`kvd.tier.disk.slots`).
    """

    shared = False
    medium = "disk"

    def __init__(self, options: DiskOptions, directory: DiskDirectory) -> None:
        self._options, self._directory = options, directory
        self.threads = options.threads
        self._closed = False
        self._lock = threading.Lock()
        try:
            kind = Filesystem.of(options.directory).kind
            alignment = Alignment(1, 1) if kind == "tmpfs" else Alignment.of(directory.fd)
            self._salts = Salts(directory.fd)
            self._index, self.damaged_records = load_slabs(directory, alignment.flags)
            self._allocator = SlotAllocator(
                directory,
                self._index,
                self._lock,
                size=options.size,
                floor=options.floor_of(directory.filesystem_bytes()[0]),
                slots_flags=alignment.flags,
            )
            num_removed = self._allocator.shrink()
            shortage = options.shortage(*directory.filesystem_bytes(), self._index.nbytes)
        except OSError as error:
            raise TierError(f"disk:{options.directory}: {error_text(error)}") from error
        self._alignment = alignment
        direct = "O_DIRECT" if alignment.flags else "buffered, since it has no O_DIRECT"
        self.described = f"preadv/pwritev, {self.threads} threads, {kind}, {direct}"
        if num_removed:
            text = "disk:%s: %d slabs were removed to keep to size=%s"
            _log.info(text, options.directory, num_removed, format_size(options.size))
        if shortage:
            _log.warning("disk:%s: %s", options.directory, shortage)

    @classmethod
    def check(cls, options: BackendOptions) -> None:
        """Check the options; see `TierBackend.check`."""
        DiskOptions.parse(options)

    @classmethod
    def open(cls, options: BackendOptions, pool: memoryview) -> Self:
        """Lock the directory and load its slabs; see `TierBackend.open`."""
        del pool  # files need no registration of memory
        parsed = DiskOptions.parse(options)
        directory = DiskDirectory(parsed.directory)
        try:
            return cls(parsed, directory)
        except BaseException:
            directory.close()
            raise

    # ------------------------------------------------------------ batches

    def put(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """Write chunks that are not stored yet; see `TierBackend.put`."""
        self._allocator.keep_floor()
        result = BatchOutcomes([Outcome.FULL] * len(chunks), deadline)
        indices_by_size: dict[int, list[int]] = {}
        with self._lock:
            for index, chunk in enumerate(chunks):
                if chunk.space.id not in self._index.spaces:
                    result.outcomes[index] = Outcome.GONE
                elif self._mark_if_stored(chunk):
                    result.outcomes[index] = Outcome.OK
                else:
                    slot_bytes = layout_of(chunk.space).slot_bytes
                    indices_by_size.setdefault(slot_bytes, []).append(index)
        for slot_bytes, indices in indices_by_size.items():
            taken = self._allocator.take(slot_bytes, len(indices))
            with self._lock:
                first_sequence = self._index.next_sequences(len(taken))
            items = [
                SlotChunk(index, chunks[index], *slot, _record(chunks[index], first_sequence + i))
                for i, (index, slot) in enumerate(zip(indices, taken, strict=False))
            ]
            for run in runs(items):
                self._write(run, result)
        return result.checked_outcomes()

    def _mark_if_stored(self, chunk: Chunk) -> bool:
        """Return whether the chunk is stored with this checksum and coverage; mark it accessed."""
        location = self._index.find(chunk.space.id, chunk.key)
        if location is None:
            return False
        slab, slot, record = location
        if record.checksum != chunk.checksum or record.coverage != chunk.coverage:
            return False
        slab.visited[slot] = 1
        return True

    def get(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """Read chunks from their slots; see `TierBackend.get`."""
        result = BatchOutcomes([Outcome.ABSENT] * len(chunks), deadline)
        items: list[SlotChunk] = []
        with self._lock:
            for index, chunk in enumerate(chunks):
                location = self._index.find(chunk.space.id, chunk.key)
                if location is not None:
                    slab, slot, record = location
                    self._index.pin(slab, slot)
                    items.append(SlotChunk(index, chunk, slab, slot, record))
        try:
            for run in runs(items):
                self._read(run, result)
        finally:
            with self._lock:
                dropped = [self._index.unpin(item.slab, item.slot) for item in items]
            self._allocator.free(dropped)
        return result.checked_outcomes()

    def _write(self, run: list[SlotChunk], result: BatchOutcomes) -> None:
        """Write a run of chunks into the slots taken for them, and after them their records."""
        if time.monotonic() > result.deadline:
            self._release_slots(run, Outcome.LATE, result)
            return
        slab = run[0].slab
        try:
            slab.check_files()
            SlotRunIO(run, self._alignment).write()
            slab.write_records(run[0].slot, [item.record for item in run])
        except SlabLost as error:
            self._release_slots(run, Outcome.FAILED, result)
            self._drop_slab(slab, error)
        except OSError as error:
            if len(run) > 1:  # one slot may be at fault
                for item in run:
                    self._write([item], result)
                return
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._release_slots(run, Outcome.FULL if full else Outcome.FAILED, result)
            result.errors.append(self._error_text("write", run[0], error))
        else:
            self._enter(run, result)

    def _enter(self, run: list[SlotChunk], result: BatchOutcomes) -> None:
        with self._lock:
            replaced = [self._index.enter(item.slab, item.slot, item.record) for item in run]
            for item in run:
                is_held = self._index.holds(item.slab, item.slot, item.record)
                result.outcomes[item.index] = Outcome.OK if is_held else Outcome.GONE
        self._allocator.free(replaced)

    def _release_slots(self, run: list[SlotChunk], outcome: Outcome, result: BatchOutcomes) -> None:
        result.set_outcome(run, outcome)
        self._allocator.free([(item.slab, item.slot) for item in run])

    def _read(self, run: list[SlotChunk], result: BatchOutcomes) -> None:
        """Read a run of chunks from pinned slots."""
        if time.monotonic() > result.deadline:
            result.set_outcome(run, Outcome.LATE)
            return
        slab = run[0].slab
        try:
            slab.check_files()
            SlotRunIO(run, self._alignment).read()
        except SlabLost as error:
            self._drop_slab(slab, error)
        except OSError as error:
            if len(run) > 1:
                for item in run:
                    self._read([item], result)
                return
            # Drop the chunk: a read would fail again, and a new put uses another slot.
            result.set_outcome(run, Outcome.FAILED)
            with self._lock:
                self._index.drop_unreadable(run[0].slab, run[0].slot)
            result.errors.append(self._error_text("read", run[0], error))
        else:
            result.set_outcome(run, Outcome.OK)

    def _drop_slab(self, slab: Slab, error: SlabLost) -> None:
        with self._lock:
            if slab.number not in self._index.slabs:
                return
            self._index.drop(slab)
        self._allocator.discard(slab)
        text = "disk:%s: %s: its chunks are lost; leave the files to kvd"
        _log.error(text, self._options.directory, error)

    def _error_text(self, operation: str, item: SlotChunk, error: OSError) -> str:
        return (
            f"disk:{self._options.directory}/{item.slab.number:06}.slab: slot {item.slot}:"
            f" {operation}: {error.strerror or error}"
        )

    # ------------------------------------------------------------ index

    def contains(self, space: Space, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return which chunks are stored; see `TierBackend.contains`."""
        del deadline  # this takes microseconds
        with self._lock:
            return [self._index.find(space.id, key) is not None for key in keys]

    def remove(self, space: Space, keys: Sequence[bytes]) -> None:
        """Drop chunks; see `TierBackend.remove`."""
        with self._lock:
            dropped = [self._index.remove(space.id, key) for key in keys]
        self._allocator.free(dropped)

    def salt(self, namespace: bytes) -> bytes:
        """Return the stored salt; see `TierBackend.salt`."""
        return self._salts.get(namespace)

    def note_salt(self, namespace: bytes, salt: bytes, *, reset: bool = False) -> bytes:
        """Store a salt in the table; see `TierBackend.note_salt`."""
        del reset  # the directory is not shared, so there is no other salt to respect
        try:
            return self._salts.note(namespace, salt)
        except OSError as error:
            raise TierError(
                f"disk:{self._options.directory}: the namespace's reset cannot be noted:"
                f" {error_text(error)}"
            ) from error

    def drop_space(self, space: Space) -> None:
        """Drop all chunks of a space; see `TierBackend.drop_space`."""
        with self._lock:
            places = self._index.drop_space(space.id)
        for begin in range(0, len(places), _MAX_KEYS):
            with self._lock:
                taken = self._index.take_space(places[begin : begin + _MAX_KEYS])
            self._allocator.free(taken)

    def open_space(self, space: Space) -> None:
        """See `TierBackend.open_space`."""
        with self._lock:
            self._index.spaces.setdefault(space.id, {})

    def scan(self, space: Space) -> Iterator[list[tuple[bytes, tuple[int, int, int]]]]:
        """Yield all chunks of a space, slab by slab; see `TierBackend.scan`."""
        with self._lock:
            slabs = list(self._index.slabs.values())
        for slab in slabs:
            keys, coverages, places = chunks_of(slab, space.id)
            with self._lock:
                current = self._index.spaces.get(space.id, {})
                rows = [
                    (key, coverage)
                    for key, coverage, place in zip(keys, coverages, places, strict=True)
                    if current.get(key) == place
                ]
            for begin in range(0, len(rows), _MAX_KEYS):
                yield rows[begin : begin + _MAX_KEYS]

    def take_dropped(self) -> list[tuple[bytes, list[bytes]]]:
        """Return the keys evicted or lost; see `TierBackend.take_dropped`."""
        with self._lock:
            return self._index.take_dropped()

    def capacity(self) -> Capacity:
        """Return the budget, bytes in use and chunks."""
        with self._lock:
            num_chunks, nbytes = self._index.usage()
        return Capacity(self._options.size, nbytes, num_chunks)

    def check_integrity(self) -> None:
        """Raise IntegrityError if the index of slots disagrees with itself."""
        with self._lock:
            self._index.check_integrity()

    def close(self) -> None:
        """Sync and close all slabs, and release the directory."""
        if self._closed:
            return
        self._closed = True
        for slab in self._index.slabs.values():
            with contextlib.suppress(OSError):  # at worst its last chunks are misses
                slab.sync()
            slab.close()
        self._allocator.close_retired()
        self._directory.close()


def _record(chunk: Chunk, sequence: int) -> Record:
    return Record(sequence, chunk.checksum, chunk.space.id, chunk.coverage, chunk.key)
