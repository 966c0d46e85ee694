"""Which namespaces were reset, and their salts: for the next daemon, whatever pool it has.

A salt is 8 random bytes, drawn anew by each reset of a namespace. What a tier keeps and what a
ledger says under another salt is of before the reset, and is not used. The table is independent of
pools, and has a fixed number of places. When all are taken, the namespace whose reset is longest
ago loses its place, and a new `base` is drawn: the salt of all namespaces that have no place. That
may cost misses, and never finds what was dropped.

It fits one page, little-endian, which is written at once::

    offset  type     what
         0  8 bytes  magic "kvd-rst" and a zero byte
         8  u32      version (2)
        12  u32      number of entries
        16  8 bytes  base; zeros: none
        24  u32      zlib.crc32 of all other bytes of the page
        32           entries, the one reset longest ago first: namespace id (16 bytes), salt
                     (8 bytes); zeros follow the last one
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
    """The table. Namespaces are named by their ids in hex.

    Attributes:
        base: the salt of namespaces without an entry; empty where they have none.
    """

    def __init__(self) -> None:
        self.base = b""
        self._salts: dict[str, bytes] = {}  # reset longest ago first

    def salt_of(self, namespace: str) -> bytes:
        """The salt of a namespace; empty where no reset is known."""
        return self._salts.get(namespace, self.base)

    def draw(self, namespace: str) -> str:
        """Give a namespace another salt.

        Returns:
            Why the next daemon will not know of it, and the remedy; empty where it will.
        """
        self._salts.pop(namespace, None)
        self._salts[namespace] = secrets.token_bytes(SALT_BYTES)
        if len(self._salts) > MOST:
            del self._salts[next(iter(self._salts))]
            self.draw_base()
        return ""

    def draw_base(self) -> None:
        """Give all namespaces without an entry another salt."""
        self.base = secrets.token_bytes(SALT_BYTES)

    def pack(self) -> bytes:
        """The page."""
        page = bytearray(PAGE_BYTES)
        _HEAD.pack_into(page, 0, MAGIC, VERSION, len(self._salts), self.base)
        for i, (namespace, salt) in enumerate(self._salts.items()):
            _ENTRY.pack_into(page, _ENTRIES_AT + i * _ENTRY.size, bytes.fromhex(namespace), salt)
        _CHECK.pack_into(page, _CHECK_AT, crc32(page))
        return bytes(page)

    def load(self, page: bytes) -> None:
        """Take over the table of a page.

        Raises:
            LedgerDamaged: it is none, or is damaged; nothing has changed.
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
