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
import logging
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Self

from kvd.errors import TierError
from kvd.machine.room import Filesystem
from kvd.tier.contract import Capacity, Chunk, Options, Space, Tier
from kvd.tier.disk.aligned import Alignment, layout_of
from kvd.tier.disk.growth import Growth
from kvd.tier.disk.home import Home
from kvd.tier.disk.load import load
from kvd.tier.disk.moves import Answer, Moves, is_same
from kvd.tier.disk.namespaces import Namespaces
from kvd.tier.disk.options import DiskOptions
from kvd.tier.disk.rebuild import chunks_of
from kvd.tier.disk.records import Record
from kvd.tier.disk.room import Room
from kvd.tier.disk.runs import Item, runs
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
            self._slots, self.damaged_records = load(home, self._namespaces, self._alignment.flags)
            self._growth = Growth(
                home,
                self._slots,
                self._lock,
                size=options.size,
                floor=options.floor_of(home.filesystem_bytes()[0]),
                alignment=self._alignment,
            )
            removed = self._growth.shrink()
            shortage = options.shortage(*home.filesystem_bytes(), self._slots.nbytes)
        except OSError as error:
            raise TierError(f"disk:{options.directory}: {error.strerror}") from error
        self._room = Room(self._slots, self._lock, self._growth)
        self._moves = Moves(
            options.directory,
            self._slots,
            self._lock,
            self._growth,
            self._room,
            self._alignment,
        )
        direct = "O_DIRECT" if self._alignment.flags else "buffered, since it has no O_DIRECT"
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
    def check(cls, options: Options) -> None:
        """Look at the options; see `Tier.check`."""
        DiskOptions.parse(options)

    @classmethod
    def open(cls, options: Options, pool: memoryview) -> Self:
        """Lock the directory and find what is in it; see `Tier.open`."""
        del pool  # it needs no registration here
        parsed = DiskOptions.parse(options)
        home = Home(parsed.directory)
        try:
            return cls(parsed, home)
        except BaseException:
            home.close()
            raise

    # ------------------------------------------------------------ batches

    def put(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """Write chunks that are not there yet; see `Tier.put`."""
        self._growth.keep_floor()
        answer = Answer([Outcome.FULL] * len(chunks), deadline)
        wanted: dict[int, list[tuple[int, int]]] = {}
        with self._lock:
            for index, chunk in enumerate(chunks):
                number = self._number_of(chunk.space)
                if number is None:
                    answer.outcomes[index] = Outcome.GONE
                    continue
                found = self._slots.find(number, chunk.key)
                if found and is_same(found[2], chunk):
                    found[0].visited[found[1]] = 1
                    answer.outcomes[index] = Outcome.OK
                else:
                    nbytes = layout_of(chunk.space).slot_bytes
                    wanted.setdefault(nbytes, []).append((index, number))
        for nbytes, places in wanted.items():
            taken = self._room.take(nbytes, len(places))
            with self._lock:
                first = self._slots.next_sequences(len(taken))
            items = [
                Item(index, chunks[index], *slot, _record(chunks[index], number, first + i))
                for i, ((index, number), slot) in enumerate(zip(places, taken, strict=False))
            ]
            for run in runs(items):
                self._moves.write(run, answer)
        return answer.take()

    def get(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """Fill chunks from the slots that they lie in; see `Tier.get`."""
        answer = Answer([Outcome.ABSENT] * len(chunks), deadline)
        items: list[Item] = []
        with self._lock:
            for index, chunk in enumerate(chunks):
                number = self._number_of(chunk.space)
                found = None if number is None else self._slots.find(number, chunk.key)
                if found is not None:
                    self._slots.pin(found[0], found[1])
                    items.append(Item(index, chunk, *found))
        try:
            for run in runs(items):
                self._moves.read(run, answer)
        finally:
            with self._lock:
                dropped = [self._slots.unpin(item.slab, item.slot) for item in items]
            self._room.free(dropped)
        return answer.take()

    def _number_of(self, space: Space) -> int | None:
        """The namespace's number in records; None where this epoch of it is not the one in use."""
        known = self._namespaces.find(space.id)
        return known.number if known is not None and known.epoch == space.epoch else None

    # ------------------------------------------------------------ what is there

    def contains(self, space: Space, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Whether these are there; see `Tier.contains`."""
        del deadline  # it takes microseconds
        number = self._number_of(space)
        if number is None:
            return [False] * len(keys)
        with self._lock:
            return [self._slots.find(number, key) is not None for key in keys]

    def remove(self, space: Space, keys: Sequence[bytes]) -> None:
        """Drop these; see `Tier.remove`."""
        number = self._number_of(space)
        if number is None:
            return
        with self._lock:
            dropped = [self._slots.remove(number, key) for key in keys]
        self._room.free(dropped)

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
        number = self._number_of(space)
        if number is None:
            return
        with self._lock:
            found = list(self._slots.slabs.values())
        for slab in found:
            keys, coverages, places = chunks_of(slab, number, space.epoch)
            with self._lock:
                there = self._slots.held[number].places
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

    def __repr__(self) -> str:
        return f"<DiskTier {self._options.directory}: {self._slots!r}>"


def _record(chunk: Chunk, number: int, sequence: int) -> Record:
    return Record(
        sequence,
        chunk.space.epoch,
        chunk.check,
        chunk.space.chunk_bytes,
        len(chunk.head),
        chunk.coverage,
        number,
        chunk.key,
    )
