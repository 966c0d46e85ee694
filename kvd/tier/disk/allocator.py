"""Opens and creates slabs, and allocates their slots for puts.

A put gets free slots, slots of a new slab, or those of evicted chunks. Slabs are created within the
budget and above the floor. Eviction runs ahead of need, by 1/256 of a size's slots and 32 at most,
so that one call erases several records.
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
from kvd.tier.disk.slots import SlotIndex, TakenSlot, place_of, rebuild, split
from kvd_proto.text import format_size

_log = logging.getLogger(__name__)
_MAX_AHEAD = 32
_AHEAD_PART = 256
# The target size of a slab: 1/64 of the budget, at most 1 GiB, but so that 1024 slabs are enough. A
# slab of less than 1/4 of the target is not created, unless it is the first of its slot size.
_BUDGET_PART = 64
_MAX_SLAB_BYTES = 2**30
_MAX_SLABS = 1024
_LEAST_PART = 4
_RETRY_CALLS = 64  # puts and gets before the next search for room, which is slow with many slabs
_PAUSE_SECONDS = 1.0  # after an I/O error, and between checks of the floor


def load_slabs(directory: DiskDirectory, slots_flags: int) -> tuple[SlotIndex, int]:
    """Open the slabs of an earlier process and index their chunks.

    Damaged slabs are set aside; damaged and outdated records are erased. `slots_flags`: for
    opening the slots' files: O_DIRECT or 0.

    Returns:
        The index, and the number of damaged records.

    Raises:
        OSError: I/O error.
    """
    started = time.monotonic()
    loaded = [_load_slab(directory, number, slots_flags) for number in directory.slab_numbers()]
    undamaged = [slab for slab in loaded if slab is not None]
    spaces, to_erase, num_damaged = rebuild(undamaged)
    index = SlotIndex(undamaged, spaces)
    for place in to_erase:
        number, slot = split(place)
        index.slabs[number].erase_records(slot)
    num_chunks, nbytes = index.usage()
    _log.info(
        "disk:%s: %d chunks in %s found in %.2f s, %d records dropped",
        directory.path,
        num_chunks,
        format_size(nbytes),
        time.monotonic() - started,
        len(to_erase),
    )
    if num_damaged:
        _log.warning(
            "disk:%s: damaged records in its index: %d; their chunks are dropped. A power loss may"
            " leave a few; otherwise check the disk (smartctl -a) and what writes to the files",
            directory.path,
            num_damaged,
        )
    return index, num_damaged


def _load_slab(directory: DiskDirectory, number: int, slots_flags: int) -> Slab | None:
    """Load a slab; None if it is incomplete (removed) or damaged (set aside)."""
    name = f"{directory.path}/{number:06}"
    try:
        return slabs.load(directory.fd, number, slots_flags)
    except FileNotFoundError:  # partly created or removed, or a file was deleted by hand
        slabs.remove(directory.fd, number)
        _log.info("disk: %s.slab or its index is missing: the rest was removed", name)
    except (OSError, ValueError) as error:
        if isinstance(error, OSError) and error.errno != errno.EIO:
            raise
        slabs.set_aside(directory.fd, number)
        _log.error(
            "disk: %s.slab is damaged (%s): what has its name or its index's was renamed to"
            " .damaged, counts against the tier's size, and may be removed",
            name,
            error,
        )
    return None


class SlotAllocator:
    """Allocates and frees slots; creates and removes slabs.

    Args:
        lock: guards `index`.
        size: the budget, in bytes.
        floor: free bytes to leave on the file system.
        slots_flags: flags for opening the slots' files: O_DIRECT or 0.
    """

    def __init__(
        self,
        directory: DiskDirectory,
        index: SlotIndex,
        lock: threading.Lock,
        *,
        size: int,
        floor: int,
        slots_flags: int,
    ) -> None:
        self._directory, self._floor, self._slots_flags = directory, floor, slots_flags
        self._index, self._lock = index, lock
        self._budget = size - self._directory.bytes_beside_slabs()
        self._target_bytes = max(min(size // _BUDGET_PART, _MAX_SLAB_BYTES), size // _MAX_SLABS)
        self._growing, self._evicting = threading.Lock(), threading.Lock()
        self._retired: list[Slab] = []
        self._last_warning = ""
        self._pause_until = 0.0
        self._next_floor_check = 0.0
        # By slot size: the sequence of the next search for room.
        self._next_search: dict[int, int] = {}
        self._next_number = max([0, *self._directory.slab_numbers()]) + 1

    def shrink(self) -> int:
        """Remove the least recently used slabs until the budget holds; return how many."""
        num_removed = 0
        while True:
            with self._lock:
                exceeds = self._index.nbytes > self._budget
                slab = self._index.oldest_idle() if exceeds else None
                if slab is None:
                    return num_removed
                self._index.drop(slab)
            self.discard(slab)
            num_removed += 1

    def keep_floor(self) -> None:
        """Remove the least recently used slab if less than the floor is free; at most one a second.

        So the tier frees room before other users have filled the file system.

        Raises:
            TierError: statvfs failed.
        """
        now = time.monotonic()
        if now < self._next_floor_check:
            return
        self._next_floor_check = now + _PAUSE_SECONDS
        try:
            free = self._directory.filesystem_bytes()[1]
        except TierError:
            self._next_floor_check = now
            raise
        if free >= self._floor:
            return
        with self._lock:
            slab = self._index.oldest_idle()
            if slab is not None:
                self._index.drop(slab)
        if slab is not None:
            self.discard(slab)
            self._warn(
                "other users have filled the file system:"
                f" {format_size(self._floor)} must stay free (floor), so chunks are dropped, a slab"
                " a second; make room, or set a smaller size or floor"
            )

    def take(self, slot_bytes: int, count: int) -> list[TakenSlot]:
        """Take up to `count` slots to write to: free ones, of new slabs, or of evicted chunks.

        Raises:
            TierError: statvfs failed; no slot is taken.
        """
        taken = self._take_free(slot_bytes, count)
        try:
            while len(taken) < count and self._make_room(slot_bytes):
                taken += self._take_free(slot_bytes, count - len(taken))
            if len(taken) < count:
                taken += self._evict(slot_bytes, count - len(taken))
            while len(taken) < count and self._make_room(slot_bytes, urgent=True):
                taken += self._take_free(slot_bytes, count - len(taken))
        except TierError:
            self.free(taken)
            raise
        return taken

    def _take_free(self, slot_bytes: int, count: int) -> list[TakenSlot]:
        with self._lock:
            return self._index.take_free(slot_bytes, count)

    def _evict(self, slot_bytes: int, count: int) -> list[TakenSlot]:
        with self._evicting:
            taken = self._take_free(slot_bytes, count)  # another thread may have evicted meanwhile
            missing = count - len(taken)
            if not missing:
                return taken
            with self._lock:
                ahead = min(_MAX_AHEAD, self._index.size_class(slot_bytes).num_slots // _AHEAD_PART)
                victims = self._index.evict(slot_bytes, missing + ahead)
            # Otherwise a crash could leave another chunk's bytes under a record.
            self._erase(victims)
            with self._lock:
                for slab, slot in victims[missing:]:
                    self._index.free(slab, slot)
        return taken + victims[:missing]

    def free(self, taken: Sequence[TakenSlot | None]) -> None:
        """Erase the records of slots that were taken but hold no chunk, and free the slots."""
        slots = [slot for slot in taken if slot is not None]
        if not slots:
            return
        self._erase(slots)
        with self._lock:
            for slab, slot in slots:
                self._index.free(slab, slot)

    @staticmethod
    def _erase(taken: Sequence[TakenSlot]) -> None:
        """Erase the slots' records. Errors are ignored: the next write there would fail too."""
        for slab, slot, count in _adjacent(taken):
            with contextlib.suppress(OSError):
                slab.erase_records(slot, count)

    def _make_room(self, slot_bytes: int, *, urgent: bool = False) -> bool:
        """Create a slab of slots of this size, if need be in place of idle slabs of other sizes.

        Does nothing for a while after an I/O error, and after a search that found no room unless
        `urgent`: eviction freed too few slots.

        Returns:
            Whether there are free slots now.

        Raises:
            TierError: statvfs failed.
        """
        with self._growing:
            while True:
                with self._lock:
                    size_class = self._index.size_class(slot_bytes)
                    if size_class.free:  # another thread has created a slab, or freed slots
                        return True
                if time.monotonic() < self._pause_until:
                    return False
                if (
                    size_class.slabs
                    and not urgent
                    and self._index.sequence < self._next_search.get(slot_bytes, 0)
                ):
                    return False
                num_slots, reason = self._affordable_slots(slot_bytes)
                if num_slots:
                    return self._create(num_slots, slot_bytes)
                with self._lock:
                    slab = self._index.oldest_idle(for_slot_bytes=slot_bytes)
                    if slab is not None:
                        self._index.drop(slab)
                if slab is None:
                    self._next_search[slot_bytes] = self._index.sequence + _RETRY_CALLS
                    self._warn(reason)
                    return False
                self.discard(slab)

    def _affordable_slots(self, slot_bytes: int) -> tuple[int, str]:
        """Return how many slots a new slab can have; if 0, also a warning, empty if none is due."""
        with self._lock:
            budget_left = self._budget - self._index.nbytes
            is_first = not self._index.size_class(slot_bytes).slabs
        free = self._directory.filesystem_bytes()[1] - self._floor
        limit = min(budget_left, free)
        target = max(1, min(self._target_bytes // slot_bytes, MAX_SLOTS - 1))
        num_slots = target
        while num_slots and slabs.slab_bytes(num_slots, slot_bytes) > limit:
            excess = slabs.slab_bytes(num_slots, slot_bytes) - limit
            num_slots = max(0, num_slots - max(1, excess // (slot_bytes + slabs.ALIGNMENT)))
        if num_slots and (is_first or num_slots * _LEAST_PART >= target):
            return num_slots, ""
        if slabs.slab_bytes(1, slot_bytes) > self._budget:
            return 0, (
                f"a chunk needs {format_size(slot_bytes)}, and the tier's size leaves"
                f" {format_size(max(self._budget, 0))}: such chunks are not stored; set a larger"
                " size"
            )
        if free < budget_left:
            return 0, (
                f"the file system has {format_size(max(free + self._floor, 0))} free, of which"
                f" {format_size(self._floor)} stay free (floor): the tier keeps to the"
                f" {format_size(self._index.nbytes)} that it has"
            )
        return 0, ""

    def _create(self, num_slots: int, slot_bytes: int) -> bool:
        """Create a slab and index its free slots; pause and return False if that fails."""
        number, self._next_number = self._next_number, self._next_number + 1
        try:
            slab = slabs.create(
                self._directory.fd, number, num_slots, slot_bytes, self._slots_flags
            )
        except OSError as error:
            self._pause_until = time.monotonic() + _PAUSE_SECONDS
            remedy = (
                "; raise the limit of open files (LimitNOFILE=, ulimit -n)"
                if error.errno == errno.EMFILE
                else ""
            )
            self._warn(f"no slab can be created: {error.strerror}{remedy}")
            return False
        with self._lock:
            self._index.add(slab)
        return True

    def discard(self, slab: Slab) -> None:
        """Unlink the files of a dropped slab; close them once nothing reads or writes there."""
        self._next_search.clear()
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

    def _warn(self, text: str) -> None:
        if text and text != self._last_warning:
            _log.warning("disk:%s: %s", self._directory.path, text)
            self._last_warning = text


def _adjacent(slots: Sequence[TakenSlot]) -> Iterator[tuple[Slab, int, int]]:
    """Yield runs of adjacent slots: slab, first slot, count."""
    ordered = sorted(slots, key=lambda pair: place_of(pair[0].number, pair[1]))
    begin = 0
    while begin < len(ordered):
        slab, slot = ordered[begin]
        end = begin + 1
        while end < len(ordered) and ordered[end] == (slab, slot + end - begin):
            end += 1
        yield slab, slot, end - begin
        begin = end
