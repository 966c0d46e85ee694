"""Where slots come from when none is free: a new slab, within the budget and above the floor."""

import contextlib
import errno
import logging
import threading
import time

from kvd.errors import TierError
from kvd.tier.disk import slabs
from kvd.tier.disk.aligned import Alignment
from kvd.tier.disk.home import Home
from kvd.tier.disk.slabs import MAX_SLOTS, Slab
from kvd.tier.disk.space import Space
from kvd_proto.sizes import format_size

_log = logging.getLogger(__name__)
_SHARE = 64  # of the budget: a slab
_MOST_BYTES = 2**30
_MOST_SLABS = 1024  # where slabs of so many bytes would be more
_LEAST_PART = 4  # of a slab: what is left of the budget is worth one
_PUTS_BETWEEN = 64  # looks for room, where there was none: a look takes a while with many slabs
_PAUSE = 1.0  # seconds after an error of the medium


def slab_target(size: int) -> int:
    """Return the bytes that the slots of one slab have in a budget of `size` bytes."""
    return max(min(size // _SHARE, _MOST_BYTES), size // _MOST_SLABS)


class Growth:
    """Makes and removes slabs.

    Args:
        home: their directory.
        space: all slabs.
        lock: that is taken around each call of `space`.
        size: the budget.
        floor: free bytes of the file system that are left alone.
        alignment: how files are opened.
    """

    def __init__(
        self,
        home: Home,
        space: Space,
        lock: threading.Lock,
        *,
        size: int,
        floor: int,
        alignment: Alignment,
    ) -> None:
        self._home, self._floor, self._alignment = home, floor, alignment
        self._space, self._lock = space, lock
        self._budget = size - home.bytes_beside_slabs()
        self._target = slab_target(size)
        self._growing = threading.Lock()
        self._retired: list[Slab] = []
        self._said = ""
        self._pause_until = 0.0
        self._look_at = 0.0
        self._full_until: dict[int, int] = {}  # sequence, by bytes of a slot
        self._next = max([0, *home.slabs()]) + 1

    def shrink(self) -> int:
        """Remove slabs, the one longest of no use first, until the budget holds; how many."""
        removed = 0
        while True:
            with self._lock:
                over = self._space.nbytes > self._budget
                slab = self._space.oldest() if over else None
                if slab is None:
                    return removed
                self._space.drop(slab)
            self.discard(slab)
            removed += 1

    def keep_floor(self) -> None:
        """Remove the slab longest of no use where others have filled the file system; now and then.

        So the tier gives room back, a slab a second at most, before the file system is full.

        Raises:
            TierError: the file system does not say how full it is.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + _PAUSE
        try:
            free = self._home.filesystem_bytes()[1]
        except TierError:
            self._look_at = now
            raise
        if free >= self._floor:
            return
        with self._lock:
            slab = self._space.oldest()
            if slab is not None:
                self._space.drop(slab)
        if slab is not None:
            self.discard(slab)
            self._say(
                f"others have filled the file system: {format_size(self._floor)} are to stay free"
                " (floor), so chunks are dropped, a slab a second; make room, or give a smaller"
                " size or floor"
            )

    def grow(self, slot_bytes: int, *, urgent: bool = False) -> bool:
        """Make a slab of such slots, perhaps in the place of another one that is older.

        `urgent`: no chunk in such slots can go, so it is looked for room in any case.

        Returns:
            Whether there are free slots now.

        Raises:
            TierError: the file system does not say how full it is.
        """
        with self._growing:
            while True:
                with self._lock:
                    if self._space.free(slot_bytes):  # another thread was here
                        return True
                    known = self._space.has(slot_bytes)
                if time.monotonic() < self._pause_until:
                    return False
                if (
                    known
                    and not urgent
                    and self._space.sequence < self._full_until.get(slot_bytes, 0)
                ):
                    return False
                slots, lack = self._affordable(slot_bytes)
                if slots:
                    return self._create(slots, slot_bytes)
                with self._lock:
                    slab = self._space.oldest(besides=slot_bytes)
                    if slab is not None:
                        self._space.drop(slab)
                if slab is None:
                    self._full_until[slot_bytes] = self._space.sequence + _PUTS_BETWEEN
                    self._say(lack)
                    return False
                self.discard(slab)

    def _affordable(self, slot_bytes: int) -> tuple[int, str]:
        """How many slots a new slab can have; where none: why."""
        with self._lock:
            left = self._budget - self._space.nbytes
            first = not self._space.has(slot_bytes)
        free = self._home.filesystem_bytes()[1] - self._floor
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
                f" {format_size(self._space.nbytes)} that it has"
            )
        return 0, ""

    def _create(self, slots: int, slot_bytes: int) -> bool:
        number, self._next = self._next, self._next + 1
        try:
            slab = slabs.create(self._home.fd, number, slots, slot_bytes, self._alignment.flags)
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
            self._space.add(slab)
        return True

    def discard(self, slab: Slab) -> None:
        """Remove the files of a slab that was dropped, and close them when nobody uses them."""
        self._full_until.clear()
        with contextlib.suppress(OSError):  # it is empty, or gone already
            slabs.remove(self._home.fd, slab.number)
        self._retired.append(slab)
        self.close_retired()

    def close_retired(self) -> None:
        """Close the files of slabs that were dropped."""
        with self._lock:
            idle = [slab for slab in self._retired if not slab.pins]
            self._retired = [slab for slab in self._retired if slab.pins]
        for slab in idle:
            slab.close()

    def _say(self, text: str) -> None:
        if text and text != self._said:
            _log.warning("disk:%s: %s", self._home.path, text)
            self._said = text
