"""The one writer of a directory's ring of changes (format: `kvd_proto.changes`).

`DirectoryWriter` and `TierTable` call it after they have written, and nobody else does. Nothing
waits for readers: the ring is overwritten when it is full.
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
    """Writes the ring of a directory whose memory is all zero but for its header.

    Args:
        whole: the directory.
        header: the directory's.
    """

    def __init__(self, whole: memoryview, header: DirectoryHeader) -> None:
        super().__init__(whole, header.changes_offset, header.change_capacity)
        self._mask = header.change_capacity - 1
        self._last = 0

    def write(  # noqa: PLR0917 a change has these parts
        self,
        kind: int,
        generation: int = 0,
        slot: int = 0,
        first: int = 0,
        count: int = 0,
        group: int = 0,
        key: bytes = b"",
    ) -> None:
        """Tell readers of a change that the directory shows already."""
        before = self._last
        self._last = number = before + 1
        at = (before & self._mask) * CHANGE_BYTES
        now = monotonic_ns()
        _PACK(self._ring, at, number, now, generation, slot, first, count, group, kind, key)
        self._head[0] = number

    def newest(self) -> npt.NDArray[np.void]:
        """What the ring holds, the oldest change first: a copy, of `CHANGE_DTYPE`."""
        held = min(self._last, self.capacity)
        numbers = np.arange(self._last - held, self._last) & self._mask
        found: npt.NDArray[np.void] = np.frombuffer(self._ring, CHANGE_DTYPE)[numbers]
        return found

    def check_integrity(self) -> None:
        """Raise IntegrityError where the ring is not what was written."""
        held = self.newest()
        if self.head != self._last:
            raise IntegrityError(f"{self._last} changes were written: {self!r}")
        numbers = np.arange(self._last - len(held) + 1, self._last + 1)
        kinds = (held["kind"] >= ChangeKind.READY) & (held["kind"] <= ChangeKind.TIERS)
        named = (held["key_len"] > 0) == ~np.isin(held["kind"], _WITHOUT_KEY)
        if not ((held["number"] == numbers) & kinds & named).all():
            raise IntegrityError(f"a change is not where it belongs, or has no key: {self!r}")
        if (held["time"][1:] < held["time"][:-1]).any():
            raise IntegrityError(f"a change is older than the one before it: {self!r}")
