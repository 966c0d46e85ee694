"""Which ledgers the next daemon trusts: the trailer of the pool's file, and the table of resets.

**The trailer** detects older copies. A ledger and the bytes of its chunks lie in two files, and
either may be replaced by an older copy while no daemon runs. So every change of a ledger has a
number, and the ledger and the trailer both record the last one. The next daemon discards a ledger
whose number differs. One sequence numbers the changes of all ledgers of the pool. The upper half of
a number is the epoch of the daemon that made the change, and every daemon gives each ledger that it
takes over a new number, so no number occurs twice.

The trailer lies behind the chunks' bytes, in pages that lanes and tiers do not map. Little-endian::

    offset  type      header
         0  8 bytes   magic "kvd-trl" and a zero byte
         8  32 bytes  name of the pool, padded with zeros; the manifest has the same

    offset  type      entry, from offset 64 on, one for each ledger
         0  16 bytes  namespace id
        16  u64       number of the last change that was begun; 0: the entry is free
        24  u64       number of the last change that was ended

An entry with numbers that no daemon can have written is damaged and counts as free: only its ledger
is discarded.

A change has four steps:

1. the entry gets the number as begun;
2. the ledger is changed;
3. the ledger gets the number;
4. the entry gets the number as ended.

So after a kill the ledger has one of the entry's two numbers, is trusted, and is in the state
before the change or after it. A copy from before an ended change has an older number, and an older
pool's entry has no newer one.

**The table of resets** has the salts of namespaces that were reset; it outlives the daemon and its
pool. A salt is 8 random bytes; each reset of a namespace draws a new one. Chunks that a tier or a
ledger has under another salt are from before the reset and are not used. The table has `MAX_RESETS`
entries. When it overflows, the namespace reset longest ago loses its entry, and a new `base` is
drawn, the salt of all namespaces without an entry: that costs misses, but no dropped chunk is found
again. The table is one page, little-endian, written at once::

    offset  type     what
         0  8 bytes  magic "kvd-rst" and a zero byte
         8  u32      version (2)
        12  u32      number of entries
        16  8 bytes  base; zeros: none
        24  u32      zlib.crc32 of the page with this field zero
        32           entries, the namespace reset longest ago first: its id (16 bytes), salt
                     (8 bytes); then zeros
"""

import secrets
import struct
from collections.abc import Iterable
from typing import TYPE_CHECKING, Self
from zlib import crc32

import numpy as np

from kvd.errors import LedgerDamaged
from kvd.machine.memory import TRAILER_BYTES

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

_TRAILER_MAGIC = b"kvd-trl\0"
POOL_NAME_BYTES = 32
TRAILER_HEAD_BYTES = len(_TRAILER_MAGIC) + POOL_NAME_BYTES
_ID_BYTES = 16
_TRAILER_ENTRIES_AT = 64
_ENTRY_BYTES = 32
_PLACES = range((_TRAILER_ENTRIES_AT + _ID_BYTES) // 8, TRAILER_BYTES // 8, _ENTRY_BYTES // 8)
"""The possible entries, each given by the place of its first number in words of 8 bytes."""
MAX_LEDGERS = len(_PLACES)  # max_namespaces allows fewer
EPOCH_SHIFT = 32
LAST_EPOCH = 2**32 - 2**23  # the largest accepted; leaves numbers for epochs of later daemons


def pack_head(pool: str) -> bytes:
    """Return the header of the trailer of a pool, given its name."""
    return _TRAILER_MAGIC + pool.encode("ascii").ljust(POOL_NAME_BYTES, b"\0")


class PoolTrailer:
    """Reads and writes a trailer; only the daemon that owns the pool does.

    Namespaces are given by their ids in hex.

    Args:
        buffer: the trailer's memory, with a header.

    Attributes:
        number: of the last change.
    """

    def __init__(self, buffer: "WriteableBuffer") -> None:
        self._map(buffer)
        words = np.frombuffer(self._bytes, "<u8")
        begun = words[_PLACES.start :: _PLACES.step]
        ended = words[_PLACES.start + 1 :: _PLACES.step]
        used = (begun > 0) & (begun >> EPOCH_SHIFT <= LAST_EPOCH) & (ended <= begun)
        entries = (_PLACES[place] for place in np.flatnonzero(used).tolist())
        self._entries = {self._id(entry): entry for entry in entries}
        self.number = int(begun[used].max(initial=0))

    @classmethod
    def create(cls, pool: str) -> Self:
        """Make the trailer of a new pool, in ordinary memory until `move`."""
        buffer = bytearray(TRAILER_BYTES)
        buffer[:TRAILER_HEAD_BYTES] = pack_head(pool)
        return cls(buffer)

    def move(self, buffer: "WriteableBuffer") -> None:
        """Move to this memory, and overwrite it."""
        memoryview(buffer).cast("B")[:TRAILER_BYTES] = self._bytes
        self.release()
        self._map(buffer)

    def numbers(self, entry: int) -> tuple[int, int]:
        """Return the numbers of the entry's last begun and last ended change."""
        return self._words[entry], self._words[entry + 1]

    def entry(self, namespace: str) -> int:
        """Return the entry of a namespace's ledger.

        Raises:
            LedgerDamaged: there is no entry.
        """
        try:
            return self._entries[namespace]
        except KeyError:
            raise LedgerDamaged(
                "the pool has no chunks of it: it is an older ledger, or its entry in the pool's"
                " trailer is damaged"
            ) from None

    def add(self, namespace: str) -> int:
        """Return an entry for a new ledger, and begin its first change."""
        in_use = set(self._entries.values())
        entry = self._entries.get(namespace) or next(e for e in _PLACES if e not in in_use)
        self.number += 1
        self._write(entry, namespace, self.number)
        self._entries[namespace] = entry
        return entry

    def retain(self, namespaces: Iterable[str]) -> None:
        """Free the entries of all ledgers but these."""
        for namespace in self._entries.keys() - set(namespaces):
            self.drop(namespace)

    def drop(self, namespace: str) -> None:
        """Free the entry of a deleted ledger, if there is one."""
        entry = self._entries.pop(namespace, None)
        if entry is not None:
            self._write(entry, namespace, 0)

    def begin(self, entry: int) -> int:
        """Begin a change of the entry's ledger, and return the change's number."""
        self.number = number = self.number + 1
        self._words[entry] = number
        return number

    def end(self, entry: int, number: int) -> None:
        """End a change of the entry's ledger."""
        self._words[entry + 1] = number

    def release(self) -> None:
        """Release the buffer."""
        self._words.release()
        self._bytes.release()

    def _id(self, entry: int) -> str:
        return self._bytes[entry * 8 - _ID_BYTES : entry * 8].hex()

    def _write(self, entry: int, namespace: str, begun: int) -> None:
        offset = entry * 8 - _ID_BYTES
        packed = bytes.fromhex(namespace) + begun.to_bytes(8, "little") + bytes(8)
        self._bytes[offset : offset + _ENTRY_BYTES] = packed

    def _map(self, buffer: "WriteableBuffer") -> None:
        self._bytes = memoryview(buffer).cast("B")[:TRAILER_BYTES]
        self._words = self._bytes.cast("Q")


RESET_BYTES = 4096
SALT_BYTES = 8
_RESETS_MAGIC = b"kvd-rst\0"
_RESETS_VERSION = 2
_HEAD = struct.Struct("<8sII8s")
_CHECK = struct.Struct("<I")
_CHECK_AT, _ENTRIES_AT = 24, 32
_ENTRY = struct.Struct("<16s8s")
MAX_RESETS = (RESET_BYTES - _ENTRIES_AT) // _ENTRY.size


class ResetTable:
    """The table of resets, by namespace id in hex.

    Attributes:
        base: the salt of namespaces without an entry; empty: none.
        salts: by namespace, the one reset longest ago first.
    """

    def __init__(self) -> None:
        self.base = b""
        self.salts: dict[str, bytes] = {}

    def salt_of(self, namespace: str) -> bytes:
        """Return the salt of a namespace; empty: no reset is known."""
        return self.salts.get(namespace, self.base)

    def draw(self, namespace: str) -> str:
        """Give a namespace a new salt.

        Returns:
            Why the next daemon will not know the salt, with the remedy; empty: it will.
        """
        self.salts.pop(namespace, None)
        self.salts[namespace] = secrets.token_bytes(SALT_BYTES)
        if len(self.salts) > MAX_RESETS:
            del self.salts[next(iter(self.salts))]
            self.draw_base()
        return ""

    def draw_base(self) -> None:
        """Give all namespaces without an entry a new salt."""
        self.base = secrets.token_bytes(SALT_BYTES)

    def learn(self, other: "ResetTable") -> str:
        """Take over another table's salts of namespaces of which this one knows no reset.

        Returns:
            As `draw`.
        """
        self.salts |= {
            namespace: salt
            for namespace, salt in other.salts.items()
            if not self.salt_of(namespace)
        }
        self.base = self.base or other.base
        while len(self.salts) > MAX_RESETS:
            del self.salts[next(iter(self.salts))]
            self.draw_base()
        return ""

    def pack(self) -> bytes:
        """Return the table as a page."""
        page = bytearray(RESET_BYTES)
        _HEAD.pack_into(page, 0, _RESETS_MAGIC, _RESETS_VERSION, len(self.salts), self.base)
        for i, (namespace, salt) in enumerate(self.salts.items()):
            _ENTRY.pack_into(page, _ENTRIES_AT + i * _ENTRY.size, bytes.fromhex(namespace), salt)
        _CHECK.pack_into(page, _CHECK_AT, crc32(page))
        return bytes(page)

    def load(self, page: bytes) -> None:
        """Replace the table by that of a page.

        Raises:
            LedgerDamaged: the page is no table of resets, or damaged; this table is unchanged.
        """
        if len(page) != RESET_BYTES:
            raise LedgerDamaged(f"it has {len(page)} bytes, not {RESET_BYTES}")
        magic, version, count, base = _HEAD.unpack_from(page)
        (check,) = _CHECK.unpack_from(page, _CHECK_AT)
        if magic != _RESETS_MAGIC:
            raise LedgerDamaged(f"it starts with {magic!r}")
        bare = bytearray(page)
        _CHECK.pack_into(bare, _CHECK_AT, 0)
        if crc32(bare) != check:
            raise LedgerDamaged("its check word does not fit")
        if version != _RESETS_VERSION or count > MAX_RESETS:
            raise LedgerDamaged(
                f"version {version} with {count} entries, {_RESETS_VERSION} is needed"
            )
        entries = bare[_ENTRIES_AT : _ENTRIES_AT + count * _ENTRY.size]
        self.salts = {name.hex(): salt for name, salt in _ENTRY.iter_unpack(entries)}
        self.base = base if any(base) else b""

    def __len__(self) -> int:
        return len(self.salts)
