"""The table of namespaces that were reset, and their salts; it outlives the daemon and its pool.

A salt is 8 random bytes; each reset of a namespace draws a new one. Chunks that a tier or a ledger
has under another salt are from before the reset and are not used. The table has `MOST` entries. If
it overflows, the namespace reset longest ago loses its entry, and a new `base` is drawn, the salt
of all namespaces without an entry: that may cost misses, but no dropped chunk is found again.

The table is one page, little-endian, written at once::

    offset  type     what
         0  8 bytes  magic "kvd-rst" and a zero byte
         8  u32      version (2)
        12  u32      number of entries
        16  8 bytes  base; zeros: none
        24  u32      zlib.crc32 of the page with this field zero
        32           entries, the one reset longest ago first: namespace id (16 bytes), salt
                     (8 bytes); then zeros
"""

import secrets
import struct
from zlib import crc32

from kvd.errors import LedgerDamaged

PAGE_BYTES = 4096
SALT_BYTES = 8
MAGIC = b"kvd-rst\0"
VERSION = 2
_HEAD = struct.Struct("<8sII8s")
_CHECK = struct.Struct("<I")
_CHECK_AT, _ENTRIES_AT = 24, 32
_ENTRY = struct.Struct("<16s8s")
MOST = (PAGE_BYTES - _ENTRIES_AT) // _ENTRY.size


class Resets:
    """The table of resets, by namespace id in hex.

    Attributes:
        base: the salt of namespaces without an entry; empty if they have none.
    """

    def __init__(self) -> None:
        self.base = b""
        self._salts: dict[str, bytes] = {}  # reset longest ago first

    def salt_of(self, namespace: str) -> bytes:
        """Return the salt of a namespace; empty if no reset is known."""
        return self._salts.get(namespace, self.base)

    def draw(self, namespace: str) -> str:
        """Give a namespace a new salt.

        Returns:
            Empty if the salt is stored; else why the next daemon will not know it, and the remedy.
        """
        self._salts.pop(namespace, None)
        self._salts[namespace] = secrets.token_bytes(SALT_BYTES)
        if len(self._salts) > MOST:
            del self._salts[next(iter(self._salts))]
            self.draw_base()
        return ""

    def draw_base(self) -> None:
        """Give all namespaces without an entry a new salt."""
        self.base = secrets.token_bytes(SALT_BYTES)

    def pack(self) -> bytes:
        """Return the table as a page."""
        page = bytearray(PAGE_BYTES)
        _HEAD.pack_into(page, 0, MAGIC, VERSION, len(self._salts), self.base)
        for i, (namespace, salt) in enumerate(self._salts.items()):
            _ENTRY.pack_into(page, _ENTRIES_AT + i * _ENTRY.size, bytes.fromhex(namespace), salt)
        _CHECK.pack_into(page, _CHECK_AT, crc32(page))
        return bytes(page)

    def load(self, page: bytes) -> None:
        """Replace the table by that of a page.

        Raises:
            LedgerDamaged: the page is no such table, or is damaged; nothing has changed.
        """
        if len(page) != PAGE_BYTES:
            raise LedgerDamaged(f"it has {len(page)} bytes, not {PAGE_BYTES}")
        magic, version, count, base = _HEAD.unpack_from(page)
        (check,) = _CHECK.unpack_from(page, _CHECK_AT)
        if magic != MAGIC:
            raise LedgerDamaged(f"it starts with {magic!r}")
        bare = bytearray(page)
        _CHECK.pack_into(bare, _CHECK_AT, 0)
        if crc32(bare) != check:
            raise LedgerDamaged("its check word does not fit")
        if version != VERSION or count > MOST:
            raise LedgerDamaged(f"version {version} with {count} entries, {VERSION} is needed")
        entries = bare[_ENTRIES_AT : _ENTRIES_AT + count * _ENTRY.size]
        self._salts = {name.hex(): salt for name, salt in _ENTRY.iter_unpack(entries)}
        self.base = base if any(base) else b""

    def __len__(self) -> int:
        return len(self._salts)

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self._salts)} namespaces>"
