"""Writes a directory's tier table (format: `kvd_proto.tier_table`).

It records which chunks tiers hold, and for a while which chunks shared tiers do not have. A wrong
entry costs a miss.

A reset (`forget`) and the end of a tier (`release_tier`) make many entries invalid at once: they
become old, and are removed by `sweep` or overwritten. The ring of changes gets one
`ChangeKind.TIERS` for all of them, otherwise a change for each chunk.
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

MAX_ABSENT = 4096  # entries of chunks that no tier holds
SWEPT_AT_ONCE = 1024  # entries removed by one `sweep`: two or three milliseconds
SCANNED_AT_ONCE = 32 * SWEPT_AT_ONCE  # places scanned by one `sweep`: less than a millisecond
MAX_STEPS = 16  # places from its home on that `hold_all` tries for a key; few keys need more

_PACK = BODY.pack_into
_EPOCH = 0xFFFF_FFFF
_KEPT, _RELEASED = int(ChangeKind.KEPT), int(ChangeKind.RELEASED)


class TierTable(TierTableView):
    """Writes the tier table of a new directory: all zero but its header.

    Keys have 1 to 48 bytes, tiers are numbered as in the settings.

    Args:
        memory: the directory.
        header: of the directory, with tiers.
        changes: of the directory.
    """

    def __init__(self, memory: memoryview, header: DirectoryHeader, changes: ChangeLog) -> None:
        offset, capacity, limit = header.tiers_offset, header.tier_capacity, header.probe_limit
        memory[EPOCH_AT : EPOCH_AT + 8] = (1).to_bytes(8, "little")
        super().__init__(memory, offset, capacity, limit, header.num_tiers)
        self._changes = changes
        self._max_entries = capacity * 3 // 4
        self._num_held = self._num_old = 0
        self._absent: dict[bytes, None] = {}  # keys, the one asked for longest ago first
        self._releasing = 0  # tiers whose bits are invalid, as a bit mask
        self._to_strip: dict[int, int] = {}  # such a tier -> places that may still have its bit
        self._sweep_at = 0  # the place from which `sweep` continues

    def __len__(self) -> int:
        """Return the number of chunks that some tier holds."""
        return self._num_held

    # ---------------------------------------------------------------- one chunk

    def hold(self, key: bytes, tier: int, first: int, count: int, group: int) -> bool:
        """Record that a tier holds these blocks of a chunk.

        An entry has the same blocks for all its tiers. If another tier holds these blocks and more,
        this tier is not recorded; otherwise the latest blocks replace those before.

        Returns:
            False: the table is full, or the tier is still being released.
        """
        bit = 1 << tier
        if self._releasing & bit:
            return False
        words = self._words
        hash32 = crc32(key)
        index, spare = self._walk(key, hash32)
        if (
            index >= 0
            and words[index] & 0xFF == HELD
            and words[index + 1] & _EPOCH == self._epoch[0]
        ):
            word, blocks = words[index], words[index + 2]
            tiers = word >> 8 & 0xFF & ~self._releasing
            if blocks == first | count << 16 | group << 32:
                words[index] = word & ~0xFF00 | (tiers | bit) << 8
                if not tiers:
                    self._changes.write(_KEPT, 0, 0, first, count, group, key)
                return True
            if (others := tiers & ~bit) and _includes(blocks, first, count, group):
                words[index] = word & ~0xFF00 | others << 8
                return True
        elif not self._make_room(index, spare):
            return False
        else:
            self._absent.pop(key, None)
            self._num_held += 1
        self._write(index if index >= 0 else spare, hash32, key, HELD, bit, 0, first, count, group)
        self._changes.write(_KEPT, 0, 0, first, count, group, key)
        return True

    def release(self, key: bytes, tier: int) -> bool:
        """Record that a tier holds a chunk no more; False: it was not recorded as held."""
        words = self._words
        index, _ = self._walk(key, crc32(key))
        if index < 0 or words[index] & 0xFF != HELD or words[index + 1] & _EPOCH != self._epoch[0]:
            return False
        tiers = words[index] >> 8 & 0xFF & ~self._releasing
        if not tiers & 1 << tier:
            return False
        tiers &= ~(1 << tier)
        if tiers:
            words[index] = words[index] & ~0xFF00 | tiers << 8
        else:
            self._num_held -= 1
            self._remove(index)
            self._changes.write(_RELEASED, 0, key=key)
        return True

    def mark_absent(self, key: bytes, now: float) -> None:
        """Record that the shared tiers do not have a chunk; `now`: seconds of CLOCK_MONOTONIC.

        The table keeps the last `MAX_ABSENT` of these. Nothing is recorded if it is full, or if a
        tier holds the chunk.
        """
        words, hash32 = self._words, crc32(key)
        index, spare = self._walk(key, hash32)
        valid = index >= 0 and words[index + 1] & _EPOCH == self._epoch[0]
        if valid and words[index] & 0xFF == HELD:
            return
        if not valid and not self._make_room(index, spare):
            return
        time = int(now * 1000) & 0xFFFF_FFFF
        self._absent.pop(key, None)
        self._absent[key] = None
        self._write(index if index >= 0 else spare, hash32, key, ABSENT, 0, time, 0, 0, 0)
        if len(self._absent) > MAX_ABSENT:
            oldest = next(iter(self._absent))
            del self._absent[oldest]
            self._remove(self._walk(oldest, crc32(oldest))[0])

    def _walk(self, key: bytes, hash32: int) -> tuple[int, int]:
        """Return the word index of the key's entry, perhaps an old one, and of a spare place.

        A spare place is empty or has an old entry; the first from the key's home on. -1: none.
        """
        words, epoch, same = self._words, self._epoch[0], hash32 << 32 | len(key) << 16
        index, spare = (hash32 & self._mask) * WORDS, -1
        end, old = index + self._limit * WORDS, self._num_old
        while index < end:
            word = words[index]
            if not word:
                return -1, index if spare < 0 else spare
            if word & SAME == same and self._key(index) == key:
                return index, -1
            if old and spare < 0 and words[index + 1] & _EPOCH != epoch:
                spare = index
            index += WORDS
        return -1, spare

    def _make_room(self, index: int, spare: int) -> bool:
        """Whether an entry may be written: over the key's old entry at `index`, or at `spare`."""
        target = index if index >= 0 else spare
        if target < 0:
            return False
        word = self._words[target]
        if not word:
            return self._num_held + self._num_old + len(self._absent) < self._max_entries
        if self._words[target + 1] & _EPOCH != self._epoch[0]:
            self._num_old -= 1
        return True

    def _write(  # noqa: PLR0917  # the parts of an entry
        self,
        index: int,
        hash32: int,
        key: bytes,
        state: int,
        tiers: int,
        time: int,
        first: int,
        count: int,
        group: int,
    ) -> None:
        self._words[index] = BUSY
        _PACK(self._bytes, index * 8 + 8, self._epoch[0], time, first, count, group, key)
        self._words[index] = hash32 << 32 | len(key) << 16 | tiers << 8 | state

    def _remove(self, index: int) -> None:
        """Remove an entry, and shift back entries that the hole would separate from their homes.

        An entry is written at its new place before its old one is overwritten, so readers see it
        twice or miss it.
        """
        words, table, mask, releasing = self._words, self._bytes, self._mask, self._releasing
        last = self.places * WORDS
        hole = index
        while (index := index + WORDS) < last and (word := words[index]):
            if (word >> 32 & mask) * WORDS > hole:
                continue
            words[hole] = BUSY
            table[hole * 8 + 8 : hole * 8 + ENTRY_BYTES] = table[
                index * 8 + 8 : index * 8 + ENTRY_BYTES
            ]
            words[hole] = word
            if releasing:
                self._strip(hole)
            hole = index
        words[hole] = 0

    def _key(self, index: int) -> bytes:
        length = self._words[index] >> 16 & 0xFF
        return bytes(self._bytes[index * 8 + 24 : index * 8 + 24 + length])

    # ------------------------------------------------------------------- many

    def hold_all(
        self,
        keys: Sequence[bytes],
        tier: int,
        first: npt.NDArray[np.integer],
        count: npt.NDArray[np.integer],
        groups: npt.NDArray[np.integer],
    ) -> int:
        """`hold` many chunks, [n] each: those that a tier has found at its start.

        Writes no changes to the ring for most of them; call `request_rescan` after the last batch.

        Returns:
            How many were recorded.
        """
        n, bit = len(keys), 1 << tier
        remaining: Sequence[int] = range(n)
        num_entries = self._num_held + self._num_old + len(self._absent)
        if not self._releasing & bit and num_entries + n < self._max_entries:
            num_written, remaining = self._fill(keys, bit, _pack_blocks(first, count, groups))
            self._num_held += num_written
        num_recorded = n - len(remaining)
        for i in remaining:
            num_recorded += self.hold(keys[i], tier, int(first[i]), int(count[i]), int(groups[i]))
        return num_recorded

    def _fill(
        self, keys: Sequence[bytes], bit: int, blocks: npt.NDArray[np.uint64]
    ) -> tuple[int, list[int]]:
        """Write entries for keys that have none, with numpy, at empty places near their homes.

        All keys probe at the same time, one place per step. Of the keys that reach the same empty
        place the first takes it; so no place between an entry and its home is empty.

        Returns:
            The number of entries written, and the indices of the other keys; some of these have
            entries already.
        """
        table, _ = self._columns(0, self.places)
        words = np.frombuffer(self._bytes, np.uint64).reshape(-1, WORDS)
        hashes = np.fromiter(map(crc32, keys), np.uint64, len(keys))
        lengths = np.fromiter(map(len, keys), np.uint64, len(keys))
        same = hashes << np.uint64(32) | lengths << np.uint64(16)
        padded = np.frombuffer(b"".join(key.ljust(KEY_BYTES, b"\0") for key in keys), np.uint8)
        padded = padded.reshape(-1, KEY_BYTES)
        places = (hashes & np.uint64(self._mask)).astype(np.int64)
        probing, have_entries = np.arange(len(keys)), []
        for _ in range(min(MAX_STEPS, self._limit)):
            first_words = words[places[probing], 0]
            finished = first_words & np.uint64(SAME) == same[probing]
            have_entries += probing[finished].tolist()
            empty = np.flatnonzero(first_words == 0)
            free_places, firsts = np.unique(places[probing[empty]], return_index=True)
            winners = empty[firsts]
            placed = probing[winners]
            words[free_places, 1] = self._epoch[0]
            words[free_places, 2] = blocks[placed]
            table[free_places, -KEY_BYTES:] = padded[placed]
            # Last: readers see it now.
            words[free_places, 0] = same[placed] | np.uint64(bit << 8 | HELD)
            places[probing[first_words != 0]] += 1
            finished[winners] = True
            probing = probing[~finished]
            if not len(probing):
                break
        remaining = [*have_entries, *probing.tolist()]
        return len(keys) - len(remaining), remaining

    def request_rescan(self) -> None:
        """Make readers of the ring scan the table."""
        self._changes.write(ChangeKind.TIERS)

    def forget(self) -> None:
        """Make all entries invalid, for readers at once."""
        self._epoch[0] += 1
        self._num_old += self._num_held + len(self._absent)
        self._num_held = 0
        self._absent.clear()
        self.request_rescan()

    def release_tier(self, tier: int) -> None:
        """Begin to clear a tier's bits, which `sweep` does; until then `hold` refuses the tier.

        Readers may still find these bits: set the tier's health to not usable before.
        """
        self._releasing |= 1 << tier
        self._to_strip[tier] = self.places

    def is_releasing(self, tier: int) -> bool:
        """Whether `sweep` has not yet cleared all bits of a tier."""
        return tier in self._to_strip

    @property
    def is_swept(self) -> bool:
        """Whether `sweep` has nothing left to do."""
        return not (self._num_old or self._to_strip)

    def sweep(self) -> None:
        """Remove some old entries and some bits of released tiers, in a few milliseconds."""
        if self.is_swept:
            return
        begin = self._sweep_at
        end = min(begin + SCANNED_AT_ONCE, self.places)
        if self._to_strip:
            self._strip_all(begin, end)
        num_removed = 0
        for place in np.flatnonzero(self._is_old(begin, end)).tolist():
            index = (begin + place) * WORDS
            # An entry that is shifted to this place may be old, too.
            while self._words[index] and self._words[index + 1] & _EPOCH != self._epoch[0]:
                self._num_old -= 1
                num_removed += 1
                self._remove(index)
            if num_removed >= SWEPT_AT_ONCE:
                end = begin + place + 1
                break
        self._sweep_at = end if end < self.places else 0
        for tier in list(self._to_strip):
            self._to_strip[tier] -= end - begin
            if self._to_strip[tier] <= 0:
                del self._to_strip[tier]
                self._releasing &= ~(1 << tier)
                self.request_rescan()

    def _columns(
        self, begin: int, end: int
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint32]]:
        """Return places `begin` to `end - 1` as bytes and as half words: [n, 72] and [n, 18]."""
        entries = self._bytes[begin * ENTRY_BYTES : end * ENTRY_BYTES]
        table = np.frombuffer(entries, np.uint8).reshape(-1, ENTRY_BYTES)
        return table, np.frombuffer(entries, np.uint32).reshape(-1, ENTRY_BYTES // 4)

    def _is_old(self, begin: int, end: int) -> npt.NDArray[np.bool_]:
        table, halves = self._columns(begin, end)
        old: npt.NDArray[np.bool_] = (table[:, 0] != 0) & (halves[:, 2] != self._epoch[0])
        return old

    def _strip_all(self, begin: int, end: int) -> None:
        """`_strip` all entries at places `begin` to `end - 1`."""
        table, halves = self._columns(begin, end)
        tiers = table[:, 1]
        stripped = np.flatnonzero(tiers & self._releasing)
        tiers[stripped] &= 0xFF & ~self._releasing
        old = stripped[(tiers[stripped] == 0) & (halves[stripped, 2] == self._epoch[0])]
        halves[old, 2] = 0
        self._num_held -= len(old)
        self._num_old += len(old)

    def _strip(self, index: int) -> None:
        """Clear an entry's bits of released tiers; without another bit it becomes old."""
        words = self._words
        word = words[index]
        if not word >> 8 & self._releasing:
            return
        words[index] = word = word & ~(self._releasing << 8)
        if not word & 0xFF00 and words[index + 1] & _EPOCH == self._epoch[0]:
            words[index + 1] &= ~_EPOCH
            self._num_held -= 1
            self._num_old += 1

    def set_health(self, tier: int, health: TierHealth) -> None:
        """Publish a tier's health to readers."""
        first_word = tier * STATUS_STRIDE // 8
        for i, value in enumerate(health):
            self._status[first_word + i] = int(value)

    # -------------------------------------------------------------- inspection

    def check_integrity(self) -> None:
        """Raise IntegrityError if an entry cannot be found, or counts are wrong."""
        words, epoch = self._words, self._epoch[0]
        self.check_places(0, self.places)
        states: dict[bytes, int] = {}
        table, halves = self._columns(0, self.places)
        occupied = table[:, 0] != 0
        valid = np.flatnonzero(occupied & (halves[:, 2] == epoch))
        for index in (valid * WORDS).tolist():
            states[self._key(index)] = words[index] & 0xFF
        num_held = sum(state == HELD for state in states.values())
        absent = {key for key, state in states.items() if state == ABSENT}
        num_old = int(np.count_nonzero(occupied)) - len(valid)
        if len(states) != len(valid):
            raise IntegrityError(f"tier table: {len(valid)} entries for {len(states)} keys")
        figures = (num_held, num_old, len(absent))
        counted = (self._num_held, self._num_old, len(self._absent))
        if figures != counted or absent != self._absent.keys():
            raise IntegrityError(f"tier table: held, old and absent are {figures}, not {counted}")

    def check_places(self, begin: int, end: int) -> int:
        """Check the entries at places `begin` to `end - 1`; return their number.

        Raises:
            IntegrityError: an entry is inconsistent, or cannot be found by its key.
        """
        words, epoch = self._words, self._epoch[0]
        table, _ = self._columns(begin, min(end, self.places))
        places = (np.flatnonzero(table[:, 0]) + begin).tolist()
        for place in places:
            index = place * WORDS
            word, key = words[index], self._key(index)
            home = word >> 32 & self._mask
            if crc32(key) != word >> 32 or not 0 < len(key) <= KEY_BYTES:
                raise IntegrityError(f"tier table: the hash at place {place} is not the key's")
            if not home <= place < home + self._limit or not all(
                words[home * WORDS : index : WORDS]
            ):
                raise IntegrityError(f"tier table: the entry at place {place} cannot be found")
            if words[index + 1] & _EPOCH != epoch:
                continue
            state, tiers = word & 0xFF, word >> 8 & 0xFF
            if state not in {HELD, ABSENT} or (state == HELD) != bool(tiers):
                raise IntegrityError(f"tier table: place {place} has {state=}, {tiers=}")
            if tiers >> self.num_tiers:
                raise IntegrityError(f"tier table: place {place} has {tiers=} of {self.num_tiers}")
        return len(places)


def _pack_blocks(
    first: npt.NDArray[np.integer], count: npt.NDArray[np.integer], groups: npt.NDArray[np.integer]
) -> npt.NDArray[np.uint64]:
    """Return the third words of entries: [n]."""
    low, middle, high = (column.astype(np.uint64) for column in (first, count, groups))
    packed: npt.NDArray[np.uint64] = low | middle << np.uint64(16) | high << np.uint64(32)
    return packed


def _includes(word: int, first: int, count: int, group: int) -> bool:
    """Whether the blocks in an entry's third word include these."""
    word_first, word_count, word_group = word & 0xFFFF, word >> 16 & 0xFFFF, word >> 32 & 0xFFFF
    return group == word_group and word_first <= first and first + count <= word_first + word_count
