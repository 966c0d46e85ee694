"""Slots for puts: free ones, those of a new slab, or those of evicted chunks.

Slabs are made within the budget and above the floor. Eviction runs ahead of need, so that one call
erases several records: by 1/256 of a size's slots, and 32 at most.
"""

import contextlib
import errno
import logging
import threading
import time
from collections.abc import Iterator, Sequence

from kvd.errors import TierError
from kvd.tier.disk import slabs
from kvd.tier.disk.directory import DiskDirectory
from kvd.tier.disk.slabs import MAX_SLOTS, Slab
from kvd.tier.disk.slots import SlotIndex, TakenSlot, rebuild, split
from kvd_proto.text import format_size

_log = logging.getLogger(__name__)
_MOST_AHEAD = 32
_AHEAD_PART = 256
_SHARE = 64  # a slab is 1/64 of the size,
_MOST_BYTES = 2**30  # at most so many bytes,
_MOST_SLABS = 1024  # or more, so that there are no more slabs than this
_LEAST_PART = 4  # a slab of less than 1/4 of that is not made, unless it is the first of its size
_PUTS_BETWEEN = 64  # puts and gets before room is looked for again: slow with many slabs
_PAUSE = 1.0  # seconds after an I/O error, and between checks of the floor


def load(directory: DiskDirectory, flags: int) -> tuple[SlotIndex, int]:
    """Open all slabs and index their chunks; damaged and outdated records are erased.

    Args:
        directory: of the slabs.
        flags: flags for opening the slots' files: O_DIRECT or 0.

    Returns:
        The slots; and how many records were damaged.

    Raises:
        OSError: I/O error.
    """
    started = time.monotonic()
    loaded = [_load_slab(directory, number, flags) for number in directory.slabs()]
    found = [slab for slab in loaded if slab is not None]
    held, wrong, damaged = rebuild(found)
    slots = SlotIndex(found, held)
    for place in wrong:
        number, slot = split(place)
        slots.slabs[number].erase_records(slot)
    chunks, nbytes = slots.used()
    _log.info(
        "disk:%s: %d chunks in %s found in %.2f s, %d records dropped",
        directory.path,
        chunks,
        format_size(nbytes),
        time.monotonic() - started,
        len(wrong),
    )
    if damaged:
        _log.warning(
            "disk:%s: damaged records in its index: %d; their chunks are dropped. A power loss may"
            " leave a few; else look at the disk (smartctl -a) and at what writes to the files",
            directory.path,
            damaged,
        )
    return slots, damaged


def _load_slab(directory: DiskDirectory, number: int, flags: int) -> Slab | None:
    name = f"{directory.path}/{number:06}"
    try:
        return slabs.load(directory.fd, number, flags)
    except FileNotFoundError:  # half-made or half-removed, or a file was deleted by hand
        slabs.remove(directory.fd, number)
        _log.info("disk: %s.slab or its index is missing: what is left was removed", name)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno not in (errno.EIO, errno.ELOOP):
            raise
        slabs.set_aside(directory.fd, number)
        _log.error(
            "disk: %s.slab is damaged (%s): it and its index were renamed to .damaged, count"
            " against the tier's size, and may be removed",
            name,
            error,
        )
    return None


class SlotAllocator:
    """Allocates and frees slots, and makes and removes slabs.

    Args:
        directory: of the slabs.
        slots: of all slabs.
        lock: guards `slots`.
        size: the budget, in bytes.
        floor: free bytes to leave on the file system.
        flags: flags for opening the slots' files: O_DIRECT or 0.
    """

    def __init__(
        self,
        directory: DiskDirectory,
        slots: SlotIndex,
        lock: threading.Lock,
        *,
        size: int,
        floor: int,
        flags: int,
    ) -> None:
        self._directory, self._floor, self._flags = directory, floor, flags
        self._slots, self._lock = slots, lock
        self._budget = size - self._directory.bytes_beside_slabs()
        self._target = max(min(size // _SHARE, _MOST_BYTES), size // _MOST_SLABS)  # of a slab
        self._growing, self._evicting = threading.Lock(), threading.Lock()
        self._retired: list[Slab] = []
        self._said = ""
        self._pause_until = 0.0
        self._look_at = 0.0
        self._full_until: dict[int, int] = {}  # by slot size: the sequence at which to look again
        self._next = max([0, *self._directory.slabs()]) + 1

    def shrink(self) -> int:
        """Remove the least recently used slabs until the budget holds; return how many."""
        removed = 0
        while True:
            with self._lock:
                over = self._slots.nbytes > self._budget
                slab = self._slots.oldest() if over else None
                if slab is None:
                    return removed
                self._slots.drop(slab)
            self.discard(slab)
            removed += 1

    def keep_floor(self) -> None:
        """Remove the least recently used slab if less than the floor is free, once a second.

        So the tier gives room back before other users have filled the file system.

        Raises:
            TierError: statvfs failed.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _PAUSE
        try:
            free = self._directory.filesystem_bytes()[1]
        except TierError:
            self._look_at = now
            raise
        if free >= self._floor:
            return
        with self._lock:
            slab = self._slots.oldest()
            if slab is not None:
                self._slots.drop(slab)
        if slab is not None:
            self.discard(slab)
            self._say(
                f"others have filled the file system: {format_size(self._floor)} are to stay free"
                " (floor), so chunks are dropped, a slab a second; make room, or give a smaller"
                " size or floor"
            )

    def take(self, slot_bytes: int, count: int) -> list[TakenSlot]:
        """Take up to `count` slots to write to: free ones, of new slabs, of evicted chunks.

        Raises:
            TierError: statvfs failed; no slot is taken.
        """
        taken = self._take_free(slot_bytes, count)
        try:
            while len(taken) < count and self._grow(slot_bytes):
                taken += self._take_free(slot_bytes, count - len(taken))
            if len(taken) < count:
                taken += self._evict(slot_bytes, count - len(taken))
            while len(taken) < count and self._grow(slot_bytes, urgent=True):
                taken += self._take_free(slot_bytes, count - len(taken))
        except TierError:
            self.free(taken)
            raise
        return taken

    def _take_free(self, slot_bytes: int, count: int) -> list[TakenSlot]:
        with self._lock:
            return self._slots.take_free(slot_bytes, count)

    def _evict(self, slot_bytes: int, count: int) -> list[TakenSlot]:
        with self._evicting:
            taken = self._take_free(slot_bytes, count)  # another thread may have evicted meanwhile
            lack = count - len(taken)
            if not lack:
                return taken
            with self._lock:
                ahead = min(_MOST_AHEAD, self._slots.ring(slot_bytes).slots // _AHEAD_PART)
                victims = self._slots.evict(slot_bytes, lack + ahead)
            self._erase(victims)  # else a crash could leave another chunk's bytes under a record
            with self._lock:
                for slab, slot in victims[lack:]:
                    self._slots.not_written(slab, slot)
        return taken + victims[:lack]

    def free(self, taken: Sequence[TakenSlot | None]) -> None:
        """Erase the records of slots that were taken but hold no chunk, and free the slots."""
        slots = [each for each in taken if each is not None]
        if not slots:
            return
        self._erase(slots)
        with self._lock:
            for slab, slot in slots:
                self._slots.not_written(slab, slot)

    @staticmethod
    def _erase(taken: Sequence[TakenSlot]) -> None:
        """Erase the slots' records. Errors are ignored: the next write there would fail too."""
        for slab, slot, count in _neighbours(taken):
            with contextlib.suppress(OSError):
                slab.erase_records(slot, count)

    def _grow(self, slot_bytes: int, *, urgent: bool = False) -> bool:
        """Make a slab of slots of this size, if need be in place of an older slab of another size.

        `urgent`: eviction did not give enough slots, so look for room even if there was none.

        Returns:
            Whether there are free slots now.

        Raises:
            TierError: statvfs failed.
        """
        with self._growing:
            while True:
                with self._lock:
                    ring = self._slots.ring(slot_bytes)
                    if ring.free:  # another thread has made a slab
                        return True
                if time.monotonic() < self._pause_until:
                    return False
                if (
                    ring.slabs
                    and not urgent
                    and self._slots.sequence < self._full_until.get(slot_bytes, 0)
                ):
                    return False
                slots, lack = self._affordable(slot_bytes)
                if slots:
                    return self._create(slots, slot_bytes)
                with self._lock:
                    slab = self._slots.oldest(besides=slot_bytes)
                    if slab is not None:
                        self._slots.drop(slab)
                if slab is None:
                    self._full_until[slot_bytes] = self._slots.sequence + _PUTS_BETWEEN
                    self._say(lack)
                    return False
                self.discard(slab)

    def _affordable(self, slot_bytes: int) -> tuple[int, str]:
        """Return the number of slots that a new slab can have; if 0, also why, or no text."""
        with self._lock:
            left = self._budget - self._slots.nbytes
            first = not self._slots.ring(slot_bytes).slabs
        free = self._directory.filesystem_bytes()[1] - self._floor
        wanted = max(1, min(self._target // slot_bytes, MAX_SLOTS - 1))
        slots = wanted
        while slots and slabs.slab_bytes(slots, slot_bytes) > min(left, free):
            over = slabs.slab_bytes(slots, slot_bytes) - min(left, free)
            slots = max(0, slots - max(1, over // (slot_bytes + slabs.ALIGNMENT)))
        if slots and (first or slots * _LEAST_PART >= wanted):
            return slots, ""
        if slabs.slab_bytes(1, slot_bytes) > self._budget:
            return 0, (
                f"a chunk needs {format_size(slot_bytes)}, and the tier's size leaves"
                f" {format_size(max(self._budget, 0))}: such chunks are not kept; give it a larger"
                " size"
            )
        if free < left:
            return 0, (
                f"the file system has {format_size(max(free + self._floor, 0))} free, of which"
                f" {format_size(self._floor)} stay free (floor): the tier keeps to the"
                f" {format_size(self._slots.nbytes)} that it has"
            )
        return 0, ""

    def _create(self, slots: int, slot_bytes: int) -> bool:
        number, self._next = self._next, self._next + 1
        try:
            slab = slabs.create(self._directory.fd, number, slots, slot_bytes, self._flags)
        except OSError as error:
            self._pause_until = time.monotonic() + _PAUSE
            more = (
                "; raise the limit of open files (LimitNOFILE=, ulimit -n)"
                if error.errno == errno.EMFILE
                else ""
            )
            self._say(f"no room could be allocated: {error.strerror}{more}")
            return False
        with self._lock:
            self._slots.add(slab)
        return True

    def discard(self, slab: Slab) -> None:
        """Unlink the files of a dropped slab, and close them once nothing reads or writes there."""
        self._full_until.clear()
        with contextlib.suppress(OSError):  # the slab is dropped in any case
            slabs.remove(self._directory.fd, slab.number)
        self._retired.append(slab)
        self.close_retired()

    def close_retired(self) -> None:
        """Close the files of dropped slabs that nothing reads or writes any more."""
        with self._lock:
            idle = [slab for slab in self._retired if not slab.pins]
            self._retired = [slab for slab in self._retired if slab.pins]
        for slab in idle:
            slab.close()

    def _say(self, text: str) -> None:
        if text and text != self._said:
            _log.warning("disk:%s: %s", self._directory.path, text)
            self._said = text


def _neighbours(taken: Sequence[TakenSlot]) -> Iterator[tuple[Slab, int, int]]:
    """Yield runs of adjacent slots: slab, first slot, count."""
    ordered = sorted(taken, key=lambda each: (each[0].number, each[1]))
    at = 0
    while at < len(ordered):
        slab, slot = ordered[at]
        end = at + 1
        while end < len(ordered) and ordered[end] == (slab, slot + end - at):
            end += 1
        yield slab, slot, end - at
        at = end
