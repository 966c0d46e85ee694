"""The one writer of a directory's tier table (format: `kvd_proto.tier_table`).

It knows what tiers have said that they hold, and for a while what shared tiers have said that they
do not. Nothing here moves a byte, and a wrong entry costs a miss.

What goes all at once, by a reset (`forget`) or with a tier (`release_tier`), is old at first, and
leaves its places by `sweep`, or where another chunk takes one. Readers of the ring are then told to
look through the table (`ChangeKind.TIERS`); of one chunk they are told by itself.
"""

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import numpy.typing as npt

from kvd.cache.change_log import ChangeLog
from kvd.errors import IntegrityError
from kvd_proto.changes import ChangeKind
from kvd_proto.directory import DirectoryHeader
from kvd_proto.tier_table import (
    ABSENT,
    BODY,
    BUSY,
    ENTRY_BYTES,
    EPOCH_AT,
    HELD,
    KEY_BYTES,
    SAME,
    STATUS_STRIDE,
    WORDS,
    TierHealth,
    TierTableView,
)

MOST_ABSENT = 4096
SWEPT_AT_ONCE = 1024  # entries: two or three milliseconds
STEPS = 16  # that `hold_all` goes from the keys' homes; few keys have to go further
LOOKED_AT = 32 * SWEPT_AT_ONCE  # places: less than one

_PACK = BODY.pack_into
_EPOCH = 0xFFFF_FFFF
_KEPT, _RELEASED = int(ChangeKind.KEPT), int(ChangeKind.RELEASED)


class TierTable(TierTableView):
    """Writes the tier table of a directory whose memory is all zero but for its header.

    Keys have 1 to 48 bytes, tiers are numbered as in the settings.

    Args:
        whole: the directory.
        header: the directory's; it has tiers.
        changes: the directory's.
    """

    def __init__(self, whole: memoryview, header: DirectoryHeader, changes: ChangeLog) -> None:
        at, homes, limit = header.tiers_offset, header.tier_capacity, header.probe_limit
        whole[EPOCH_AT : EPOCH_AT + 8] = (1).to_bytes(8, "little")
        super().__init__(whole, at, homes, limit, header.num_tiers)
        self._changes = changes
        self._most = homes * 3 // 4
        self._held = self._old = 0
        self._absent: dict[bytes, None] = {}  # asked longest ago first
        self._leaving = 0  # tiers whose bits mean nothing any more
        self._left: dict[int, int] = {}  # such a tier -> places that may still have its bit
        self._swept = 0  # where `sweep` goes on

    def __len__(self) -> int:
        """The chunks that some tier holds."""
        return self._held

    # ---------------------------------------------------------------- one chunk

    def hold(self, key: bytes, tier: int, first: int, count: int, group: int) -> bool:
        """A tier holds these blocks of a chunk from now on.

        An entry speaks of the same blocks in all of its tiers. Where another tier holds these
        blocks and more, this tier's are of no use and not noted; otherwise the latest count.

        Returns:
            False where the table is full, or the tier is still being released.
        """
        bit = 1 << tier
        if self._leaving & bit:
            return False
        words = self._words
        hash32 = crc32(key)
        at, spare = self._walk(key, hash32)
        if at >= 0 and words[at] & 0xFF == HELD and words[at + 1] & _EPOCH == self._epoch[0]:
            word, blocks = words[at], words[at + 2]
            tiers = word >> 8 & 0xFF & ~self._leaving
            if blocks == first | count << 16 | group << 32:
                words[at] = word & ~0xFF00 | (tiers | bit) << 8
                if not tiers:
                    self._changes.write(_KEPT, 0, 0, first, count, group, key)
                return True
            if (others := tiers & ~bit) and _is_part(blocks, first, count, group):
                words[at] = word & ~0xFF00 | others << 8
                return True
        elif not self._make_room(at, spare):
            return False
        else:
            self._absent.pop(key, None)
            self._held += 1
        self._write(at if at >= 0 else spare, hash32, key, HELD, bit, 0, first, count, group)
        self._changes.write(_KEPT, 0, 0, first, count, group, key)
        return True

    def release(self, key: bytes, tier: int) -> bool:
        """A tier holds a chunk no more; False where nobody thought that it did."""
        words = self._words
        at, _ = self._walk(key, crc32(key))
        if at < 0 or words[at] & 0xFF != HELD or words[at + 1] & _EPOCH != self._epoch[0]:
            return False
        tiers = words[at] >> 8 & 0xFF & ~self._leaving
        if not tiers & 1 << tier:
            return False
        tiers &= ~(1 << tier)
        if tiers:
            words[at] = words[at] & ~0xFF00 | tiers << 8
        else:
            self._held -= 1
            self._remove(at)
            self._changes.write(_RELEASED, 0, key=key)
        return True

    def mark_absent(self, key: bytes, now: float) -> None:
        """No tier that could be asked has the chunk, at `now` in seconds of CLOCK_MONOTONIC.

        Only so many are known, those that were asked last; none where the table is full, or where
        a tier holds the chunk.
        """
        words, hash32 = self._words, crc32(key)
        at, spare = self._walk(key, hash32)
        counts = at >= 0 and words[at + 1] & _EPOCH == self._epoch[0]
        if counts and words[at] & 0xFF == HELD:
            return
        if not counts and not self._make_room(at, spare):
            return
        time = int(now * 1000) & 0xFFFF_FFFF
        self._absent.pop(key, None)
        self._absent[key] = None
        self._write(at if at >= 0 else spare, hash32, key, ABSENT, 0, time, 0, 0, 0)
        if len(self._absent) > MOST_ABSENT:
            oldest = next(iter(self._absent))
            del self._absent[oldest]
            self._remove(self._walk(oldest, crc32(oldest))[0])

    def _walk(self, key: bytes, hash32: int) -> tuple[int, int]:
        """The words where the key's entry begins, which may be old, and where one may be written.

        The latter is the first place with an old entry or none. -1: there is no such place.
        """
        words, epoch, same = self._words, self._epoch[0], hash32 << 32 | len(key) << 16
        at, spare = (hash32 & self._mask) * WORDS, -1
        end, old = at + self._limit * WORDS, self._old
        while at < end:
            word = words[at]
            if not word:
                return -1, at if spare < 0 else spare
            if word & SAME == same and self._key(at) == key:
                return at, -1
            if old and spare < 0 and words[at + 1] & _EPOCH != epoch:
                spare = at
            at += WORDS
        return -1, spare

    def _make_room(self, at: int, spare: int) -> bool:
        """Whether an entry may be written, at `spare` or in place of an old one of its key."""
        place = at if at >= 0 else spare
        if place < 0:
            return False
        word = self._words[place]
        if not word:
            return self._held + self._old + len(self._absent) < self._most
        if self._words[place + 1] & _EPOCH != self._epoch[0]:
            self._old -= 1
        return True

    def _write(  # noqa: PLR0917 an entry has these parts
        self,
        at: int,
        hash32: int,
        key: bytes,
        state: int,
        tiers: int,
        time: int,
        first: int,
        count: int,
        group: int,
    ) -> None:
        self._words[at] = BUSY
        _PACK(self._bytes, at * 8 + 8, self._epoch[0], time, first, count, group, key)
        self._words[at] = hash32 << 32 | len(key) << 16 | tiers << 8 | state

    def _remove(self, at: int) -> None:
        """Take an entry out, and shift back those that its place would cut off from their homes.

        An entry is written at its new place before its old one is overwritten, so readers see it
        twice or miss it.
        """
        words, whole, mask, leaving = self._words, self._bytes, self._mask, self._leaving
        last = self.places * WORDS
        hole = at
        while (at := at + WORDS) < last and (word := words[at]):
            if (word >> 32 & mask) * WORDS > hole:
                continue
            words[hole] = BUSY
            whole[hole * 8 + 8 : hole * 8 + ENTRY_BYTES] = whole[at * 8 + 8 : at * 8 + ENTRY_BYTES]
            words[hole] = word
            if leaving:
                self._strip(hole)
            hole = at
        words[hole] = 0

    def _key(self, at: int) -> bytes:
        length = self._words[at] >> 16 & 0xFF
        return bytes(self._bytes[at * 8 + 24 : at * 8 + 24 + length])

    # ------------------------------------------------------------------- many

    def hold_all(
        self,
        keys: Sequence[bytes],
        tier: int,
        first: npt.NDArray[np.integer],
        count: npt.NDArray[np.integer],
        groups: npt.NDArray[np.integer],
    ) -> int:
        """`hold` these, [n] each: what a tier has found at its start, hundreds at a time.

        Readers of the ring are not told of all; `request_rescan` them when it was the last.

        Returns:
            How many are noted.
        """
        n, bit = len(keys), 1 << tier
        rest: Sequence[int] = range(n)
        if not self._leaving & bit and self._held + self._old + len(self._absent) + n < self._most:
            written, rest = self._fill(keys, bit, _blocks(first, count, groups))
            self._held += written
        noted = n - len(rest)
        for i in rest:
            noted += self.hold(keys[i], tier, int(first[i]), int(count[i]), int(groups[i]))
        return noted

    def _fill(
        self, keys: Sequence[bytes], bit: int, blocks: npt.NDArray[np.uint64]
    ) -> tuple[int, list[int]]:
        """Write entries for keys that have none, as far as empty places are near their homes.

        All keys go from their homes on at the same time, place by place. Of those that meet at an
        empty one the first takes it; so no place between an entry and its home is empty.

        Returns:
            How many were written; and which keys were not, some of which have entries.
        """
        table, _ = self._columns(0, self.places)
        words = np.frombuffer(self._bytes, np.uint64).reshape(-1, WORDS)
        hashes = np.fromiter(map(crc32, keys), np.uint64, len(keys))
        lengths = np.fromiter(map(len, keys), np.uint64, len(keys))
        same = hashes << np.uint64(32) | lengths << np.uint64(16)
        padded = np.frombuffer(b"".join(key.ljust(KEY_BYTES, b"\0") for key in keys), np.uint8)
        padded = padded.reshape(-1, KEY_BYTES)
        places = (hashes & np.uint64(self._mask)).astype(np.int64)
        left, met = np.arange(len(keys)), []
        for _ in range(min(STEPS, self._limit)):
            there = words[places[left], 0]
            known = there & np.uint64(SAME) == same[left]
            met += left[known].tolist()
            empty = np.flatnonzero(there == 0)
            at, firsts = np.unique(places[left[empty]], return_index=True)
            taken = empty[firsts]
            mine = left[taken]
            words[at, 1] = self._epoch[0]
            words[at, 2] = blocks[mine]
            table[at, -KEY_BYTES:] = padded[mine]
            words[at, 0] = same[mine] | np.uint64(bit << 8 | HELD)  # readers see it from here on
            places[left[there != 0]] += 1
            known[taken] = True
            left = left[~known]
            if not len(left):
                break
        rest = [*met, *left.tolist()]
        return len(keys) - len(rest), rest

    def request_rescan(self) -> None:
        """Tell readers of the ring to look through the table."""
        self._changes.write(ChangeKind.TIERS)

    def forget(self) -> None:
        """Nothing that is here counts any more, for readers at once."""
        self._epoch[0] += 1
        self._old += self._held + len(self._absent)
        self._held = 0
        self._absent.clear()
        self.request_rescan()

    def release_tier(self, tier: int) -> None:
        """A tier holds nothing any more; `sweep` clears its bits, and `hold` takes none till then.

        Whoever looks meanwhile may find them: its status should say that it is not usable.
        """
        self._leaving |= 1 << tier
        self._left[tier] = self.places

    def is_releasing(self, tier: int) -> bool:
        """Whether `sweep` has still to clear a tier's bits."""
        return tier in self._left

    @property
    def is_swept(self) -> bool:
        """Nothing is left to do for `sweep`."""
        return not (self._old or self._left)

    def sweep(self) -> None:
        """Remove some of what is old, and some bits of tiers that leave: a few milliseconds."""
        if self.is_swept:
            return
        begin = self._swept
        end = min(begin + LOOKED_AT, self.places)
        if self._left:
            self._strip_all(begin, end)
        removed = 0
        for place in np.flatnonzero(self._is_old(begin, end)).tolist():
            at = (begin + place) * WORDS
            # What is shifted to this place may be old, too.
            while self._words[at] and self._words[at + 1] & _EPOCH != self._epoch[0]:
                self._old -= 1
                removed += 1
                self._remove(at)
            if removed >= SWEPT_AT_ONCE:
                end = begin + place + 1
                break
        self._swept = end if end < self.places else 0
        for tier in list(self._left):
            self._left[tier] -= end - begin
            if self._left[tier] <= 0:
                del self._left[tier]
                self._leaving &= ~(1 << tier)
                self.request_rescan()

    def _columns(
        self, begin: int, end: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """The entries of some places as bytes and as halves of words: [n, 72] and [n, 18]."""
        part = self._bytes[begin * ENTRY_BYTES : end * ENTRY_BYTES]
        table = np.frombuffer(part, np.uint8).reshape(-1, ENTRY_BYTES)
        return table, np.frombuffer(part, np.uint32).reshape(-1, ENTRY_BYTES // 4)

    def _is_old(self, begin: int, end: int) -> npt.NDArray[np.bool_]:
        table, halves = self._columns(begin, end)
        old: npt.NDArray[np.bool_] = (table[:, 0] != 0) & (halves[:, 2] != self._epoch[0])
        return old

    def _strip_all(self, begin: int, end: int) -> None:
        """`_strip` all entries of these places."""
        table, halves = self._columns(begin, end)
        tiers = table[:, 1]
        some = np.flatnonzero(tiers & self._leaving)
        tiers[some] &= 0xFF & ~self._leaving
        gone = some[(tiers[some] == 0) & (halves[some, 2] == self._epoch[0])]
        halves[gone, 2] = 0
        self._held -= len(gone)
        self._old += len(gone)

    def _strip(self, at: int) -> None:
        """Clear an entry's bits of tiers that leave; without another bit it is old."""
        words = self._words
        word = words[at]
        if not word >> 8 & self._leaving:
            return
        words[at] = word = word & ~(self._leaving << 8)
        if not word & 0xFF00 and words[at + 1] & _EPOCH == self._epoch[0]:
            words[at + 1] &= ~_EPOCH
            self._held -= 1
            self._old += 1

    def set_health(self, tier: int, health: TierHealth) -> None:
        """Tell readers what is known of a tier."""
        at = tier * STATUS_STRIDE // 8
        for i, value in enumerate(health):
            self._status[at + i] = int(value)

    # -------------------------------------------------------------- inspection

    def check_integrity(self) -> None:
        """Raise IntegrityError where an entry cannot be found, or counts are wrong."""
        words, epoch = self._words, self._epoch[0]
        self.check_places(0, self.places)
        states: dict[bytes, int] = {}
        table, halves = self._columns(0, self.places)
        occupied = table[:, 0] != 0
        current = np.flatnonzero(occupied & (halves[:, 2] == epoch))
        for at in (current * WORDS).tolist():
            states[self._key(at)] = words[at] & 0xFF
        held = sum(state == HELD for state in states.values())
        absent = {key for key, state in states.items() if state == ABSENT}
        old = int(np.count_nonzero(occupied)) - len(current)
        if len(states) != len(current):
            raise IntegrityError(f"a key has two entries: {self!r}")
        if (held, old) != (self._held, self._old) or absent != self._absent.keys():
            raise IntegrityError(f"{held} chunks are held, {len(absent)} not, {old} old: {self!r}")

    def check_places(self, begin: int, end: int) -> int:
        """How many entries these places have; IntegrityError where one is not as it should be."""
        words, epoch = self._words, self._epoch[0]
        table, _ = self._columns(begin, min(end, self.places))
        places = (np.flatnonzero(table[:, 0]) + begin).tolist()
        for place in places:
            at = place * WORDS
            word, key = words[at], self._key(at)
            home = word >> 32 & self._mask
            if crc32(key) != word >> 32 or not 0 < len(key) <= KEY_BYTES:
                raise IntegrityError(f"the entry at place {place} has another key: {self!r}")
            if not home <= place < home + self._limit or not all(words[home * WORDS : at : WORDS]):
                raise IntegrityError(f"the entry at place {place} cannot be found: {self!r}")
            if words[at + 1] & _EPOCH != epoch:
                continue
            state, tiers = word & 0xFF, word >> 8 & 0xFF
            if state not in {HELD, ABSENT} or (state == HELD) != bool(tiers):
                raise IntegrityError(
                    f"the entry at place {place} has state {state}, tiers {tiers}: {self!r}"
                )
            if tiers >> self.num_tiers:
                raise IntegrityError(f"the entry at place {place} has tiers {tiers}: {self!r}")
        return len(places)

    def __repr__(self) -> str:
        return (
            f"<TierTable {self._held} held, {len(self._absent)} absent, {self._old} old of"
            f" {self.capacity}>"
        )


def _blocks(
    first: npt.NDArray[np.integer], count: npt.NDArray[np.integer], groups: npt.NDArray[np.integer]
) -> npt.NDArray[np.uint64]:
    """The third words of entries: [n]."""
    words = (column.astype(np.uint64) for column in (first, count, groups))
    held, held_count, group = words
    packed: npt.NDArray[np.uint64] = held | held_count << np.uint64(16) | group << np.uint64(32)
    return packed


def _is_part(blocks: int, first: int, count: int, group: int) -> bool:
    """Whether these blocks are some of those of an entry's third word."""
    held, held_count, held_group = blocks & 0xFFFF, blocks >> 16 & 0xFFFF, blocks >> 32 & 0xFFFF
    return group == held_group and held <= first and first + count <= held + held_count
