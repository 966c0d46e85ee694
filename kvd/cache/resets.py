"""Which namespaces were reset, and their epochs: for the next daemon, whatever pool it has.

A ledger keeps a namespace's epoch beside its chunks, and goes with them. This table is independent
of pools and ledgers. Of each namespace that was reset it has the last epoch: what a tier keeps of
an older one is of before the reset. It has a fixed number of places. When all are taken, the
namespace whose reset is longest ago loses its place, and its epoch becomes the `floor`: of
namespaces that have no place, what tiers keep of an epoch below the floor is not used. That may
cost misses, and never finds what was dropped.

It fits one page, little-endian, which is written at once::

    offset  type     what
         0  8 bytes  magic "kvd-rst" and a zero byte
         8  u32      version (1)
        12  u32      number of entries
        16  u64      floor
        24  u32      zlib.crc32 of all other bytes of the page
        32           entries: namespace id (16 bytes), epoch (u64); zeros follow the last one
"""

import struct
from collections.abc import Mapping
from zlib import crc32

from kvd.errors import IntegrityError, LedgerDamaged

PAGE_BYTES = 4096
MAGIC = b"kvd-rst\0"
VERSION = 1
_HEAD = struct.Struct("<8sIIQ")
_CHECK = struct.Struct("<I")
_CHECK_AT, _ENTRIES_AT = 24, 32
_ENTRY = struct.Struct("<16sQ")
MOST = (PAGE_BYTES - _ENTRIES_AT) // _ENTRY.size


class Resets:
    """The table. Namespaces are named by their ids in hex.

    Args:
        floor: what tiers keep of namespaces without an entry counts from this epoch on.
        epochs: the entries.
    """

    def __init__(self, floor: int = 0, epochs: Mapping[str, int] | None = None) -> None:
        self.floor = floor
        self._epochs = dict(epochs or {})

    def epoch(self, namespace: str) -> int:
        """The epoch of a namespace's last reset; 0 where none is known."""
        return self._epochs.get(namespace, 0)

    def oldest(self, namespace: str) -> int:
        """The first epoch of which what tiers keep may be used."""
        return self._epochs.get(namespace, self.floor)

    def note(self, namespace: str, epoch: int) -> str:
        """A namespace was reset and has this epoch, greater than before.

        Returns:
            Why the next daemon will not know of it, and the remedy; empty where it will.
        """
        self._epochs[namespace] = max(epoch, self.oldest(namespace))
        if len(self._epochs) > MOST:
            first = min(self._epochs, key=self._epochs.__getitem__)
            self.floor = max(self.floor, self._epochs.pop(first))
        return ""

    def pack(self) -> bytes:
        """The page."""
        page = bytearray(PAGE_BYTES)
        _HEAD.pack_into(page, 0, MAGIC, VERSION, len(self._epochs), self.floor)
        for i, (namespace, epoch) in enumerate(self._epochs.items()):
            _ENTRY.pack_into(page, _ENTRIES_AT + i * _ENTRY.size, bytes.fromhex(namespace), epoch)
        _CHECK.pack_into(page, _CHECK_AT, crc32(page))
        return bytes(page)

    def load(self, page: bytes) -> None:
        """Take over the table of a page.

        Raises:
            LedgerDamaged: it is none, or is damaged; nothing has changed.
        """
        if len(page) != PAGE_BYTES:
            raise LedgerDamaged(f"it has {len(page)} bytes, not {PAGE_BYTES}")
        magic, version, count, floor = _HEAD.unpack_from(page)
        (check,) = _CHECK.unpack_from(page, _CHECK_AT)
        if magic != MAGIC:
            raise LedgerDamaged(f"it starts with {magic!r}")
        bare = bytearray(page)
        _CHECK.pack_into(bare, _CHECK_AT, 0)
        if crc32(bare) != check:
            raise LedgerDamaged("its check word does not fit")
        if version != VERSION:
            raise LedgerDamaged(f"version {version}, {VERSION} is needed")
        if count > MOST:
            raise LedgerDamaged(f"{count} entries, {MOST} fit")
        entries = bare[_ENTRIES_AT : _ENTRIES_AT + count * _ENTRY.size]
        epochs = {name.hex(): epoch for name, epoch in _ENTRY.iter_unpack(entries)}
        if len(epochs) != count:
            raise LedgerDamaged(f"{count} entries of {len(epochs)} namespaces")
        loaded = Resets(floor, epochs)
        try:
            loaded.check_integrity()
        except IntegrityError as error:
            raise LedgerDamaged(str(error)) from error
        self.floor, self._epochs = loaded.floor, epochs

    def check_integrity(self) -> None:
        """Raise IntegrityError where there are too many entries, or one is below the floor."""
        if len(self._epochs) > MOST:
            raise IntegrityError(f"{len(self._epochs)} entries, {MOST} fit")
        for namespace, epoch in self._epochs.items():
            if not max(1, self.floor) <= epoch < 2**63:
                raise IntegrityError(f"{namespace}: epoch {epoch}, the floor is {self.floor}")

    def __len__(self) -> int:
        return len(self._epochs)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._epochs)} namespaces, floor {self.floor}>"
