"""The tier `disk`: chunks in preallocated slab files, which the next process finds again.

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
from kvd.tier.disk.allocator import SlotAllocator, load
from kvd.tier.disk.directory import DiskDirectory, DiskOptions, Salts
from kvd.tier.disk.slabs import Record, Slab, SlabLost
from kvd.tier.disk.slot_io import Alignment, SlotChunk, SlotRunIO, layout_of, runs
from kvd.tier.disk.slots import chunks_of
from kvd_proto.text import format_size

_log = logging.getLogger(__name__)
_PIECE = 4096  # chunks that are freed or listed at a time


@dataclass(slots=True)
class BatchResult:
    """The outcomes of a batch's chunks, and I/O errors.

    Attributes:
        deadline: monotonic seconds, after which no more I/O is begun.
    """

    outcomes: list[Outcome]
    deadline: float
    errors: list[str] = field(default_factory=list)

    def set(self, run: Sequence[SlotChunk], outcome: Outcome) -> None:
        """Set the same outcome for all chunks of a run."""
        for item in run:
            self.outcomes[item.index] = outcome

    def take(self) -> list[Outcome]:
        """Return the outcomes.

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
            self._slots, self.damaged_records = load(directory, alignment.flags)
            self._room = SlotAllocator(
                directory,
                self._slots,
                self._lock,
                size=options.size,
                floor=options.floor_of(directory.filesystem_bytes()[0]),
                flags=alignment.flags,
            )
            removed = self._room.shrink()
            shortage = options.shortage(*directory.filesystem_bytes(), self._slots.nbytes)
        except OSError as error:
            raise TierError(f"disk:{options.directory}: {error.strerror}") from error
        self._alignment = alignment
        direct = "O_DIRECT" if alignment.flags else "buffered, since it has no O_DIRECT"
        self.described = f"preadv/pwritev, {self.threads} threads, {kind}, {direct}"
        if removed:
            _log.info(
                "disk:%s: %d slabs went, so that it keeps to size=%s",
                options.directory,
                removed,
                format_size(options.size),
            )
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
        """Write chunks that are not there yet; see `TierBackend.put`."""
        self._room.keep_floor()
        answer = BatchResult([Outcome.FULL] * len(chunks), deadline)
        wanted: dict[int, list[int]] = {}
        with self._lock:
            for index, chunk in enumerate(chunks):
                if chunk.space.id not in self._slots.held:
                    answer.outcomes[index] = Outcome.GONE
                elif self._is_kept(chunk):
                    answer.outcomes[index] = Outcome.OK
                else:
                    wanted.setdefault(layout_of(chunk.space).slot_bytes, []).append(index)
        for nbytes, indices in wanted.items():
            taken = self._room.take(nbytes, len(indices))
            with self._lock:
                first = self._slots.next_sequences(len(taken))
            items = [
                SlotChunk(index, chunks[index], *slot, _record(chunks[index], first + i))
                for i, (index, slot) in enumerate(zip(indices, taken, strict=False))
            ]
            for run in runs(items):
                self._write(run, answer)
        return answer.take()

    def _is_kept(self, chunk: Chunk) -> bool:
        """Return whether the chunk is held with this check word and coverage; mark it accessed."""
        found = self._slots.find(chunk.space.id, chunk.key)
        if found is None:
            return False
        slab, slot, record = found
        if record.checksum != chunk.checksum or record.coverage != chunk.coverage:
            return False
        slab.visited[slot] = 1
        return True

    def get(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """Read chunks from their slots; see `TierBackend.get`."""
        answer = BatchResult([Outcome.ABSENT] * len(chunks), deadline)
        items: list[SlotChunk] = []
        with self._lock:
            for index, chunk in enumerate(chunks):
                found = self._slots.find(chunk.space.id, chunk.key)
                if found is not None:
                    self._slots.pin(found[0], found[1])
                    items.append(SlotChunk(index, chunk, *found))
        try:
            for run in runs(items):
                self._read(run, answer)
        finally:
            with self._lock:
                dropped = [self._slots.unpin(item.slab, item.slot) for item in items]
            self._room.free(dropped)
        return answer.take()

    def _write(self, run: list[SlotChunk], answer: BatchResult) -> None:
        """Write chunks, and after them their records, into the slots taken for them."""
        if time.monotonic() > answer.deadline:
            self._not_written(run, Outcome.LATE, answer)
            return
        slab = run[0].slab
        try:
            slab.look()
            SlotRunIO(run, self._alignment).write()
            slab.write_records(run[0].slot, [item.record for item in run])
        except SlabLost as error:
            self._not_written(run, Outcome.FAILED, answer)
            self._lose(slab, error)
        except OSError as error:
            if len(run) > 1:  # one slot may be at fault
                for item in run:
                    self._write([item], answer)
                return
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._not_written(run, Outcome.FULL if full else Outcome.FAILED, answer)
            answer.errors.append(self._failed("write", run[0], error))
        else:
            self._written(run, answer)

    def _written(self, run: list[SlotChunk], answer: BatchResult) -> None:
        with self._lock:
            before = [self._slots.written(item.slab, item.slot, item.record) for item in run]
            for item in run:
                is_kept = self._slots.holds(item.slab, item.slot, item.record)
                answer.outcomes[item.index] = Outcome.OK if is_kept else Outcome.GONE
        self._room.free(before)

    def _not_written(self, run: list[SlotChunk], outcome: Outcome, answer: BatchResult) -> None:
        answer.set(run, outcome)
        self._room.free([(item.slab, item.slot) for item in run])

    def _read(self, run: list[SlotChunk], answer: BatchResult) -> None:
        """Read a run of chunks from pinned slots."""
        if time.monotonic() > answer.deadline:
            answer.set(run, Outcome.LATE)
            return
        slab = run[0].slab
        try:
            slab.look()
            SlotRunIO(run, self._alignment).read()
        except SlabLost as error:
            self._lose(slab, error)
        except OSError as error:
            if len(run) > 1:
                for item in run:
                    self._read([item], answer)
                return
            # Drop the chunk: a read would fail again, and a new put uses another slot.
            answer.set(run, Outcome.FAILED)
            with self._lock:
                self._slots.lost(run[0].slab, run[0].slot)
            answer.errors.append(self._failed("read", run[0], error))
        else:
            answer.set(run, Outcome.OK)

    def _lose(self, slab: Slab, error: SlabLost) -> None:
        with self._lock:
            if slab.number not in self._slots.slabs:
                return
            self._slots.drop(slab)
        self._room.discard(slab)
        _log.error(
            "disk:%s: %s: its chunks are lost, and its room is used anew; leave the files to kvd",
            self._options.directory,
            error,
        )

    def _failed(self, what: str, item: SlotChunk, error: OSError) -> str:
        return (
            f"disk:{self._options.directory}/{item.slab.number:06}.slab: slot {item.slot}:"
            f" {what}: {error.strerror or error}"
        )

    # ------------------------------------------------------------ what is there

    def contains(self, space: Space, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return which chunks are held; see `TierBackend.contains`."""
        del deadline  # this takes microseconds
        with self._lock:
            return [self._slots.find(space.id, key) is not None for key in keys]

    def remove(self, space: Space, keys: Sequence[bytes]) -> None:
        """Drop chunks; see `TierBackend.remove`."""
        with self._lock:
            dropped = [self._slots.remove(space.id, key) for key in keys]
        self._room.free(dropped)

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
                f" {error.strerror}"
            ) from error

    def drop_space(self, space: Space) -> None:
        """Drop all chunks of a space; see `TierBackend.drop_space`."""
        with self._lock:
            places = self._slots.drop_space(space.id)
        for at in range(0, len(places), _PIECE):
            with self._lock:
                taken = self._slots.release(places[at : at + _PIECE])
            self._room.free(taken)

    def open_space(self, space: Space) -> None:
        """See `TierBackend.open_space`."""
        with self._lock:
            self._slots.held.setdefault(space.id, {})

    def scan(self, space: Space) -> Iterator[list[tuple[bytes, tuple[int, int, int]]]]:
        """Yield all chunks of a space, slab by slab; see `TierBackend.scan`."""
        with self._lock:
            slabs = list(self._slots.slabs.values())
        for slab in slabs:
            keys, coverages, places = chunks_of(slab, space.id)
            with self._lock:
                found = self._slots.held.get(space.id, {})
                held = [
                    (key, coverage)
                    for key, coverage, place in zip(keys, coverages, places, strict=True)
                    if found.get(key) == place
                ]
            for at in range(0, len(held), _PIECE):
                yield held[at : at + _PIECE]

    def take_dropped(self) -> list[tuple[bytes, list[bytes]]]:
        """Return the keys evicted or lost; see `TierBackend.take_dropped`."""
        with self._lock:
            return self._slots.take_dropped()

    def capacity(self) -> Capacity:
        """Return the budget, bytes in use and chunks."""
        with self._lock:
            chunks, nbytes = self._slots.used()
        return Capacity(self._options.size, nbytes, chunks)

    def close(self) -> None:
        """Sync and close all slabs, and release the directory."""
        if self._closed:
            return
        self._closed = True
        for slab in self._slots.slabs.values():
            with contextlib.suppress(OSError):  # at worst its last chunks are misses
                slab.sync()
            slab.close()
        self._room.close_retired()
        self._directory.close()


def _record(chunk: Chunk, sequence: int) -> Record:
    return Record(sequence, chunk.checksum, chunk.space.id, chunk.coverage, chunk.key)
