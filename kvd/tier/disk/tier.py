"""The tier `disk`: chunks in preallocated slab files, which the next daemon finds again.

What "kept" means. A put is acknowledged when its bytes are written and its record after them, so
a process that is killed at any moment leaves whole chunks, and each that was acknowledged is found
by the next one; so it is after an orderly shutdown. Nothing waits for the medium's own cache: after
a power loss some of the last half minute's chunks may be missing (the kernel writes records back
within that time, vm.dirty_expire_centisecs), which is a miss. Wrong bytes it cannot be: records and
tails have check words, and the common layer compares that of the shares. Only a namespace's new
epoch is made durable at once: what a reset has dropped is not found again.
"""

import contextlib
import errno
import logging
import resource
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

from kvd.errors import TierError
from kvd.machine.room import Filesystem
from kvd.tier.contract import Capacity, Chunk, Options, Space, Tier
from kvd.tier.disk import aligned, records, slabs
from kvd.tier.disk.aligned import Alignment
from kvd.tier.disk.growth import Growth
from kvd.tier.disk.home import Home
from kvd.tier.disk.namespaces import Namespaces
from kvd.tier.disk.options import DiskOptions
from kvd.tier.disk.rebuild import chunks_of, rebuild
from kvd.tier.disk.records import TAIL_BYTES, Record
from kvd.tier.disk.runs import Item, runs
from kvd.tier.disk.slabs import Slab, SlabLost
from kvd.tier.disk.space import Space as Slots
from kvd.tier.disk.space import Taken, split
from kvd.wire.tiering import Outcome
from kvd_proto.sizes import format_size

_log = logging.getLogger(__name__)
_PIECE = 4096  # chunks that are freed or listed at a time


class DiskTier(Tier):
    """Chunks in slab files; see the module.

    Files are preallocated and read and written in runs of neighbouring slots, straight from and to
    the pool where the file system has O_DIRECT. The budget (`size=`) counts all files, and is never
    exceeded; slots whose chunks nobody asked for go first (`kvd.tier.disk.space`).
    """

    shared = False
    medium = "disk"

    def __init__(self, options: DiskOptions, home: Home) -> None:
        self._options, self._home = options, home
        self.threads = options.threads
        self._closed = False
        self._lock = threading.Lock()
        self._beginning = threading.Lock()
        try:
            kind = Filesystem.of(options.directory).kind
            self._alignment = Alignment(1, 1) if kind == "tmpfs" else Alignment.of(home.fd)
            self._namespaces = Namespaces(home.fd)
            self._slots = self._load()
            self._growth = Growth(
                home,
                self._slots,
                self._lock,
                size=options.size,
                floor=options.floor_of(home.filesystem_bytes()[0]),
                alignment=self._alignment,
            )
            removed = self._growth.shrink()
        except OSError as error:
            raise TierError(f"disk:{options.directory}: {error.strerror}") from error
        direct = "O_DIRECT" if self._alignment.flags else "buffered, since it has no O_DIRECT"
        self.described = f"preadv/pwritev, {self.threads} threads, {kind}, {direct}"
        if removed:
            _log.info(
                "disk:%s: %d slabs went, so that it keeps to size=%s",
                options.directory,
                removed,
                format_size(options.size),
            )

    @classmethod
    def check(cls, options: Options) -> None:
        """Look at the options; see `Tier.check`."""
        DiskOptions.parse(options)

    @classmethod
    def open(cls, options: Options, pool: memoryview) -> Self:
        """Lock the directory and find what is in it; see `Tier.open`."""
        del pool  # it needs no registration here
        parsed = DiskOptions.parse(options)
        _allow_files()
        home = Home(parsed.directory)
        try:
            return cls(parsed, home)
        except BaseException:
            home.close()
            raise

    def _load(self) -> Slots:
        started = time.monotonic()
        found: list[Slab] = []
        for number in self._home.slabs():
            slab = self._load_slab(number)
            if slab is not None:
                found.append(slab)
        held, wrong = rebuild(found, self._namespaces.by_number())
        slots = Slots(found, held)
        for place in wrong:
            number, slot = split(place)
            slots.slabs[number].erase_records(slot)
        chunks, nbytes = slots.used()
        _log.info(
            "disk:%s: %d chunks in %s found in %.2f s, %d records dropped",
            self._options.directory,
            chunks,
            format_size(nbytes),
            time.monotonic() - started,
            len(wrong),
        )
        return slots

    def _load_slab(self, number: int) -> Slab | None:
        folder, name = self._home.fd, f"{self._options.directory}/{number:06}"
        try:
            return slabs.load(folder, number, self._alignment.flags)
        except FileNotFoundError:  # one file is there: of a start, an end or somebody else's hand
            slabs.remove(folder, number)
            _log.info("disk: %s.slab or its index is missing: what is left was removed", name)
        except (OSError, ValueError) as error:
            if isinstance(error, OSError) and error.errno not in (errno.EIO, errno.ELOOP):
                raise
            slabs.set_aside(folder, number)
            _log.error(
                "disk: %s.slab is damaged (%s): it and its index were renamed to .damaged, count"
                " against the tier's size, and may be removed",
                name,
                error,
            )
        return None

    # ------------------------------------------------------------ batches

    def put(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """Write chunks that are not there yet; see `Tier.put`."""
        self._growth.keep_floor()
        outcomes = [Outcome.FULL] * len(chunks)
        wanted: dict[int, list[int]] = {}
        with self._lock:
            for index, chunk in enumerate(chunks):
                known = self._namespaces.find(chunk.space.id)
                if known is None or known.epoch != chunk.space.epoch:
                    outcomes[index] = Outcome.GONE
                    continue
                found = self._slots.find(known.number, chunk.key)
                if found and _same(found[2], chunk):
                    found[0].visited[found[1]] = 1
                    outcomes[index] = Outcome.OK
                else:
                    wanted.setdefault(aligned.slot_bytes(chunk.space), []).append(index)
        errors: list[str] = []
        for nbytes, indices in wanted.items():
            taken = self._reserve(nbytes, len(indices))
            with self._lock:
                items = [
                    self._item(index, chunks[index], slab, slot)
                    for index, (slab, slot) in zip(indices, taken, strict=False)
                ]
            for run in runs(items):
                self._write(run, outcomes, errors, deadline)
        return _answer(outcomes, errors)

    def _item(self, index: int, chunk: Chunk, slab: Slab, slot: int) -> Item:
        known = self._namespaces.find(chunk.space.id)
        record = Record(
            self._slots.next_sequence(),
            chunk.space.epoch,
            chunk.check,
            chunk.space.chunk_bytes,
            len(chunk.head),
            chunk.coverage,
            known.number if known else 0,
            chunk.key,
        )
        return Item(index, chunk, slab, slot, record)

    def _reserve(self, nbytes: int, count: int) -> list[Taken]:
        """Take slots, to be written; fewer where there are no more."""
        with self._lock:
            taken = self._slots.take_free(nbytes, count)
        while len(taken) < count and self._growth.grow(nbytes):
            with self._lock:
                taken += self._slots.take_free(nbytes, count - len(taken))
        if len(taken) < count:
            with self._lock:
                victims = self._slots.evict(nbytes, count - len(taken))
            self._erase(victims)  # or half of a chunk would lie under another one's record
            taken += victims
        while len(taken) < count and self._growth.grow(nbytes, urgent=True):
            with self._lock:
                taken += self._slots.take_free(nbytes, count - len(taken))
        return taken

    def _write(
        self, run: list[Item], outcomes: list[Outcome], errors: list[str], deadline: float
    ) -> None:
        slab, slot, records_ = run[0].slab, run[0].slot, [item.record for item in run]
        if time.monotonic() > deadline:
            self._not_written(run, Outcome.LATE, outcomes)
            return
        try:
            slab.look()
            aligned.write(
                slab,
                slot,
                [item.chunk for item in run],
                [record.sequence for record in records_],
                self._alignment,
            )
            slab.write_records(slot, records_)
        except SlabLost as error:
            self._not_written(run, Outcome.FAILED, outcomes)
            self._lose(slab, error)
        except OSError as error:
            if len(run) > 1:  # it may be one slot's
                for item in run:
                    self._write([item], outcomes, errors, deadline)
                return
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._not_written(run, Outcome.FULL if full else Outcome.FAILED, outcomes)
            errors.append(self._failed("write", run[0], error))
        else:
            self._written(run, outcomes)

    def _written(self, run: list[Item], outcomes: list[Outcome]) -> None:
        before = []
        with self._lock:
            for item in run:
                before.append(self._slots.written(item.slab, item.slot, item.record))
                kept = self._slots.find(item.record.number, item.record.key)
                is_kept = kept is not None and _same(kept[2], item.chunk)
                outcomes[item.index] = Outcome.OK if is_kept else Outcome.GONE
        self._erase_and_free([each for each in before if each is not None])

    def _not_written(self, run: list[Item], outcome: Outcome, outcomes: list[Outcome]) -> None:
        for item in run:
            outcomes[item.index] = outcome
        self._erase_and_free([(item.slab, item.slot) for item in run])

    def get(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """Fill chunks from the slots that they lie in; see `Tier.get`."""
        outcomes = [Outcome.ABSENT] * len(chunks)
        items: list[Item] = []
        with self._lock:
            for index, chunk in enumerate(chunks):
                known = self._namespaces.find(chunk.space.id)
                if known is None or known.epoch != chunk.space.epoch:
                    continue
                found = self._slots.find(known.number, chunk.key)
                if found is not None:
                    self._slots.pin(found[0], found[1])
                    items.append(Item(index, chunk, *found))
        errors: list[str] = []
        try:
            for run in runs(items):
                self._read(run, outcomes, errors, deadline)
        finally:
            with self._lock:
                dropped = [self._slots.unpin(item.slab, item.slot) for item in items]
            self._erase_and_free([each for each in dropped if each is not None])
        return _answer(outcomes, errors)

    def _read(
        self, run: list[Item], outcomes: list[Outcome], errors: list[str], deadline: float
    ) -> None:
        slab = run[0].slab
        if time.monotonic() > deadline:
            for item in run:
                outcomes[item.index] = Outcome.LATE
            return
        try:
            slab.look()
            tails = aligned.read(slab, run[0].slot, [item.chunk for item in run], self._alignment)
        except SlabLost as error:
            self._lose(slab, error)
        except OSError as error:
            if len(run) > 1:
                for item in run:
                    self._read([item], outcomes, errors, deadline)
                return
            # It would fail again: the chunk is computed and put anew, into another slot.
            outcomes[run[0].index] = Outcome.FAILED
            self._drop(run[0])
            errors.append(self._failed("read", run[0], error))
        else:
            for item, tail in zip(run, tails, strict=True):
                outcomes[item.index] = self._take_head(item, tail)

    def _take_head(self, item: Item, tail: memoryview) -> Outcome:
        record = item.record
        end = TAIL_BYTES + record.head_bytes
        sequence = records.tail_sequence(tail, item.slab.identity)
        if sequence == record.sequence and end <= len(tail):
            item.chunk.head = bytes(tail[TAIL_BYTES:end])
            return Outcome.OK
        self._drop(item)
        # Another chunk's: the record is one that a power loss has kept from being erased.
        return Outcome.CORRUPT if sequence is None else Outcome.ABSENT

    def _drop(self, item: Item) -> None:
        with self._lock:
            self._slots.lost(item.slab, item.slot)

    # ------------------------------------------------------------ what is there

    def contains(self, space: Space, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Whether these are there; see `Tier.contains`."""
        del deadline  # it takes microseconds
        known = self._namespaces.find(space.id)
        if known is None or known.epoch != space.epoch:
            return [False] * len(keys)
        with self._lock:
            return [self._slots.find(known.number, key) is not None for key in keys]

    def remove(self, space: Space, keys: Sequence[bytes]) -> None:
        """Drop these; see `Tier.remove`."""
        known = self._namespaces.find(space.id)
        if known is None or known.epoch != space.epoch:
            return
        with self._lock:
            dropped = [self._slots.remove(known.number, key) for key in keys]
        self._erase_and_free([each for each in dropped if each is not None])

    def begin(self, space: Space) -> Space:
        """Note the namespace's epoch durably, and drop what it has of others; see `Tier.begin`."""
        with self._beginning:
            with self._lock:
                in_use = {number for number, held in self._slots.held.items() if held.places}
            try:
                known = self._namespaces.begin(space.id, space.epoch, in_use)
            except OSError as error:
                raise TierError(
                    f"disk:{self._options.directory}: the namespace's epoch cannot be noted:"
                    f" {error.strerror}"
                ) from error
            with self._lock:
                old = self._slots.begin(known.number, space.id, known.epoch)
            for at in range(0, len(old), _PIECE):
                with self._lock:
                    self._slots.release(old[at : at + _PIECE])
        return replace(space, epoch=known.epoch)

    def scan(self, space: Space) -> Iterator[list[tuple[bytes, tuple[int, int, int]]]]:
        """Every chunk of a namespace, slab by slab; see `Tier.scan`."""
        known = self._namespaces.find(space.id)
        if known is None or known.epoch != space.epoch:
            return
        with self._lock:
            found = list(self._slots.slabs.values())
        for slab in found:
            keys, coverages, places = chunks_of(slab, known.number, known.epoch)
            with self._lock:
                there = self._slots.held[known.number].places
                held = [
                    (key, coverage)
                    for key, coverage, place in zip(keys, coverages, places, strict=True)
                    if there.get(key) == place
                ]
            for at in range(0, len(held), _PIECE):
                yield held[at : at + _PIECE]

    def take_gone(self) -> list[tuple[bytes, list[bytes]]]:
        """What was evicted or lost; see `Tier.take_gone`."""
        with self._lock:
            return self._slots.take_gone()

    def capacity(self) -> Capacity:
        """Budget, bytes in use and chunks."""
        with self._lock:
            chunks, nbytes = self._slots.used()
        return Capacity(self._options.size, nbytes, chunks)

    def close(self) -> None:
        """Have the medium keep what was written, and let another process use the directory."""
        if self._closed:
            return
        self._closed = True
        for slab in self._slots.slabs.values():
            with contextlib.suppress(OSError):  # it is said where it is met
                slab.sync()
            slab.close()
        self._growth.close_retired()
        self._home.close()

    def check_integrity(self) -> None:
        """Raise IntegrityError where what is kept in memory does not agree."""
        with self._lock:
            self._slots.check_integrity()

    # ------------------------------------------------------------ trouble

    def _erase(self, taken: Sequence[Taken]) -> None:
        """Write that slots are empty. Where that fails, the write of the next chunk will, too."""
        for slab, slot, count in _neighbours(taken):
            with contextlib.suppress(OSError):
                slab.erase_records(slot, count)

    def _erase_and_free(self, taken: Sequence[Taken]) -> None:
        if not taken:
            return
        self._erase(taken)
        with self._lock:
            for slab, slot in taken:
                self._slots.not_written(slab, slot)

    def _lose(self, slab: Slab, error: SlabLost) -> None:
        with self._lock:
            if slab.number not in self._slots.slabs:
                return
            self._slots.drop(slab)
        self._growth.discard(slab)
        _log.error(
            "disk:%s: %s: its chunks are lost, and its room is used anew; leave the files to kvd",
            self._options.directory,
            error,
        )

    def _failed(self, what: str, item: Item, error: OSError) -> str:
        return (
            f"disk:{self._options.directory}/{item.slab.number:06}.slab: slot {item.slot}:"
            f" {what}: {error.strerror or error}"
        )

    def __repr__(self) -> str:
        return f"<DiskTier {self._options.directory}: {self._slots!r}>"


def _same(record: Record, chunk: Chunk) -> bool:
    return record.shares_check == chunk.check and record.coverage == chunk.coverage


def _neighbours(taken: Sequence[Taken]) -> Iterator[tuple[Slab, int, int]]:
    """Slab, first slot and count of slots that follow each other."""
    ordered = sorted(taken, key=lambda each: (each[0].number, each[1]))
    at = 0
    while at < len(ordered):
        slab, slot = ordered[at]
        count = 1
        while ordered[at + count : at + count + 1] == [(slab, slot + count)]:
            count += 1
        yield slab, slot, count
        at += count


def _answer(outcomes: list[Outcome], errors: list[str]) -> list[Outcome]:
    """Return the outcomes of a batch.

    Raises:
        TierError: nothing of it went well, for an error of the medium.
    """
    if errors and Outcome.FAILED in outcomes:
        if all(outcome is Outcome.FAILED for outcome in outcomes):
            raise TierError(errors[0])
        _log.warning("%s (%d chunks of a batch)", errors[0], len(errors))
    return outcomes


def _allow_files() -> None:
    """Let this process open as many files as it may: a slab has two."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with contextlib.suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
