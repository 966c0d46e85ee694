"""Writes a directory's ring of changes (format: `kvd_proto.changes`).

Only `DirectoryWriter` and `TierTable` call it, after their own writes. When the ring is full, the
oldest changes are overwritten, whether or not they were read.
"""

from time import monotonic_ns

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError
from kvd_proto.changes import CHANGE, CHANGE_BYTES, ChangeKind, ChangesView
from kvd_proto.directory import DirectoryHeader

_PACK = CHANGE.pack_into
_WITHOUT_KEY = (ChangeKind.CLEARED, ChangeKind.TIERS)
CHANGE_DTYPE = np.dtype(
    [
        *(("number", "<u8"), ("time", "<u8"), ("generation", "<u8"), ("slot", "<u4")),
        *(("first", "<u2"), ("count", "<u2"), ("group", "<u2"), ("kind", "u1"), ("key_len", "u1")),
        *(("key", "V48"), ("", "V4")),
    ]
)


class ChangeLog(ChangesView):
    """Writes the ring of a new directory: all zero but its header.

    Args:
        whole: the directory.
        header: the directory's.
    """

    def __init__(self, whole: memoryview, header: DirectoryHeader) -> None:
        super().__init__(whole, header.changes_offset, header.change_capacity)
        self._mask = header.change_capacity - 1
        self._last = 0

    def write(  # noqa: PLR0917  # the parts of a change
        self,
        kind: int,
        generation: int = 0,
        slot: int = 0,
        first: int = 0,
        count: int = 0,
        group: int = 0,
        key: bytes = b"",
    ) -> None:
        """Append a change that the directory shows already."""
        previous = self._last
        self._last = number = previous + 1
        at = (previous & self._mask) * CHANGE_BYTES
        now = monotonic_ns()
        _PACK(self._ring, at, number, now, generation, slot, first, count, group, kind, key)
        self._head[0] = number

    def newest(self) -> npt.NDArray[np.void]:
        """Return a copy of the ring's changes, the oldest first, of `CHANGE_DTYPE`."""
        count = min(self._last, self.capacity)
        places = np.arange(self._last - count, self._last) & self._mask
        changes: npt.NDArray[np.void] = np.frombuffer(self._ring, CHANGE_DTYPE)[places]
        return changes

    def check_integrity(self) -> None:
        """Raise IntegrityError if the ring is not what was written."""
        changes = self.newest()
        if self.head != self._last:
            raise IntegrityError(f"{self._last} changes were written, head is {self.head}")
        numbers = np.arange(self._last - len(changes) + 1, self._last + 1)
        kinds = (changes["kind"] >= ChangeKind.READY) & (changes["kind"] <= ChangeKind.TIERS)
        keyed = (changes["key_len"] > 0) == ~np.isin(changes["kind"], _WITHOUT_KEY)
        if not ((changes["number"] == numbers) & kinds & keyed).all():
            raise IntegrityError(f"of changes up to {self._last} one is misplaced or has no key")
        if (changes["time"][1:] < changes["time"][:-1]).any():
            raise IntegrityError(f"changes up to {self._last} are not in order of time")
