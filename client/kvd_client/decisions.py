"""The scheduler's own decisions: slots for new chunks, chunks to load, chunks to promote.

Decisions read the directory in shared memory; the next step tells the daemon.

- A slot on loan is empty, or holds a chunk that would be evicted next, which lookups find until the
  slot is assigned to another key. The daemon reclaims loans without a message, so only the
  directory says whether a loan is still valid.
- A reuse filter keeps out prompts that are seen once: a key is stored at its n-th offer.
- Promotion of a chunk from a tier is requested by the step. The request has no reply: the directory
  shows the result.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from kvd_client.errors import UsageError, shown
from kvd_client.outbox import Outbox
from kvd_client.tickets import BlockRange, StoreAnswer
from kvd_proto.directory import DirectoryView, Entry, SlotState
from kvd_proto.messages import TierInfo
from kvd_proto.tier_table import TierHealth, TierTableView

_READY = int(SlotState.READY)
_ACCEPTED, _PRESENT = StoreAnswer.ACCEPTED, StoreAnswer.PRESENT
_PENDING, _FULL, _NOT_YET = StoreAnswer.PENDING, StoreAnswer.FULL, StoreAnswer.NOT_YET

MIN_LOANS_WANTED = 64
PEAK_DECAY = 1 / 32  # of the peak of takes, with each step or answer that follows a take
Loan: TypeAlias = tuple[int, int]
"""A slot and its generation."""
IsLent: TypeAlias = Callable[[int, int], bool]
"""Whether a slot is on loan with this generation."""

NO_TIER = -1
"""No usable tier has the blocks."""
TIER_UNKNOWN = -2
"""A usable shared tier may have the chunk: the daemon has not queried it recently."""

REREQUEST_SECONDS = 2.0  # before promotion of the same key is requested again
MAX_REQUESTED_KEYS = 65_536  # keys remembered as requested


class LoanQueue:
    """The loans of one scheduler, in the order in which to take them. For one thread at a time."""

    def __init__(self) -> None:
        self._at_hand: OrderedDict[int, int] = OrderedDict()  # slot -> generation, oldest first
        self._skipped: dict[int, int] = {}  # by `take` since the latest answer
        self._num_takes = 0  # since the latest answer
        self._peak_takes = 0.0

    @property
    def num_wanted(self) -> int:
        """The number of loans to have: twice the recent peak of takes between two answers."""
        return max(MIN_LOANS_WANTED, 2 * round(self._peak_takes))

    def add(self, loans: Iterable[Loan]) -> None:
        """Add the loans of an answer, maybe none, and start a new count of takes.

        Takes are counted from answer to answer, since they are served from the same loans.
        """
        self.end_step()
        self._num_takes = 0
        at_hand = self._at_hand
        at_hand.update(self._skipped)
        self._skipped.clear()
        for slot, generation in loans:
            if at_hand.get(slot, -1) < generation:  # answers may be read out of order
                at_hand.pop(slot, None)
                at_hand[slot] = generation

    def take(self, is_lent: IsLent, pinned: Container[int] = ()) -> Loan | None:
        """Remove and return a valid loan; None if there is none.

        A slot whose chunk is `pinned` is skipped until the daemon's next answer: when the
        daemon reads the pin, it ends the loan or refuses the pin.
        """
        self._num_takes += 1
        at_hand = self._at_hand
        while at_hand:
            loan = at_hand.popitem(last=False)
            if loan[0] in pinned:
                self._skipped[loan[0]] = loan[1]
            elif is_lent(*loan):
                return loan
        return None

    def defer(self, slots: Iterable[int]) -> None:
        """Move the loans of these slots to the end of the queue: their chunks were just used."""
        if at_hand := self._at_hand:
            for slot in slots:
                if slot in at_hand:
                    at_hand.move_to_end(slot)

    def count(self, is_lent: IsLent) -> int:
        """Remove invalid loans; return how many are left, including those of pinned chunks."""
        for loans in (self._at_hand, self._skipped):
            for slot, generation in list(loans.items()):
                if not is_lent(slot, generation):
                    del loans[slot]
        return len(self._at_hand) + len(self._skipped)

    def end_step(self) -> None:
        """Update the peak of takes; a step without takes does not lower it."""
        if self._num_takes:
            self._peak_takes = max(float(self._num_takes), self._peak_takes * (1 - PEAK_DECAY))

    def clear(self) -> None:
        """Remove all loans, which the daemon has ended."""
        self._at_hand.clear()
        self._skipped.clear()

    def __len__(self) -> int:
        """The number of loans that `take` may still try, including invalid ones."""
        return len(self._at_hand)


class ReuseFilter:
    """Admits a key at its `threshold`-th offer; 1: at its first.

    It remembers the latest `capacity` keys that were not admitted yet.
    """

    def __init__(self, threshold: int, capacity: int) -> None:
        self.threshold = threshold
        self.capacity = capacity
        self._num_offers: OrderedDict[bytes, int] = OrderedDict()

    def admit(self, key: bytes) -> bool:
        """Count an offer; return True if the key has now been offered often enough."""
        count = self._num_offers.pop(key, 0) + 1
        if count >= self.threshold:
            return True
        self._remember(key, count)
        return False

    def undo_admission(self, key: bytes) -> None:
        """Note that an admitted key got no slot: its next offer admits it again."""
        if self.threshold > 1:
            self._remember(key, self.threshold - 1)

    def _remember(self, key: bytes, count: int) -> None:
        if len(self._num_offers) >= self.capacity:
            self._num_offers.popitem(last=False)
        self._num_offers[key] = count

    def __len__(self) -> int:
        return len(self._num_offers)


class KeySlots(NamedTuple):
    """Keys of a request, in its order, each with its slot and generation."""

    keys: list[bytes]
    slots: list[int]
    generations: list[int]


class Decisions:
    """The decisions of one attachment; `outbox` collects them for the daemon. For one thread."""

    def __init__(self, directory: DirectoryView, loans: LoanQueue, reuse: ReuseFilter) -> None:
        self.outbox = Outbox(directory.blocks_per_chunk)
        self._directory = directory
        self._loans = loans
        self._reuse = reuse

    def offer(
        self,
        keys: Sequence[bytes],
        ranges: Sequence[BlockRange] | None,
        describe: Callable[[int], bytes],
    ) -> tuple[list[StoreAnswer], KeySlots]:
        """Start to store the keys that are new; answer each key by the first of these that applies.

        1. PENDING: an engine is storing it, or it was accepted earlier in this call.
        2. PRESENT: it is READY, and the offered blocks do not extend its blocks.
        3. NOT_YET: it is not cached, and the reuse filter does not admit it.
        4. FULL: there is no loan, or the step has no room for the description.
        5. ACCEPTED: it has a slot.

        Args:
            keys: a prompt's head first.
            ranges: for each key the blocks to store; None: all blocks of all chunks.
            describe: returns the description of the i-th key's chunk, empty for none. It is called
                only for keys that can be accepted. If it raises, the stores of the keys before it
                go on without a ticket, until the daemon gives them up.

        Returns:
            An answer to each key, and the slots of accepted keys.
        """
        outbox, loans, reuse = self.outbox, self._loans, self._reuse
        find_entry, take, start_store = (
            self._entry_unless_reassigned,
            loans.take,
            outbox.start_store,
        )
        is_lent, pinned = self._directory.is_lent, outbox.step_of_pinned
        started_stores = outbox.started_stores
        has_filter = reuse.threshold > 1
        filtered: set[bytes] = set()  # not admitted: counts a repeated key once
        blocks = (0, self._directory.blocks_per_chunk)
        answers: list[StoreAnswer] = []
        accepted_keys, slots, generations = accepted = KeySlots([], [], [])
        for i, key in enumerate(keys):
            if ranges is not None:
                blocks = ranges[i]
            if key in started_stores:
                answers.append(_PENDING)
                continue
            entry = find_entry(key)
            if entry is not None:
                if entry[2] != _READY:
                    answers.append(_PENDING)
                    continue
                if entry[3:] == blocks or not _covers(blocks, entry[3], entry[4]):
                    loans.defer(entry[:1])
                    answers.append(_PRESENT)
                    continue
            elif has_filter and (key in filtered or not reuse.admit(key)):
                filtered.add(key)
                answers.append(_NOT_YET)
                continue
            description = describe(i) if loans else b""
            is_full = description and not outbox.has_description_room(len(description))
            if is_full or (loan := take(is_lent, pinned)) is None:
                if has_filter and entry is None:
                    reuse.undo_admission(key)
                answers.append(_FULL)
                continue
            answers.append(_ACCEPTED)
            start_store(key, *loan, blocks, description)
            accepted_keys.append(key)
            slots.append(loan[0])
            generations.append(loan[1])
        if len(accepted_keys) < len(answers):
            outbox.count_answers(answers)
        return answers, accepted

    def _entry_unless_reassigned(self, key: bytes) -> Entry | None:
        """Return a key's entry in the directory; None also if its slot was reassigned."""
        entry, reassigned = self._directory.entry(key), self.outbox.reassigned
        if entry is not None and reassigned.get(entry[0], entry[1]) != entry[1]:
            return None
        return entry

    def find(
        self, keys: Sequence[bytes], ranges: Sequence[BlockRange] | None
    ) -> tuple[list[bool], KeySlots]:
        """Return which keys are READY with the blocks needed, and the slots of these keys.

        Chunks whose slots were reassigned are not found. Loans of the slots found are taken last.
        """
        find_entry = self._entry_unless_reassigned
        first, count = 0, self._directory.blocks_per_chunk
        found_mask: list[bool] = []
        hits = KeySlots([], [], [])
        for i, key in enumerate(keys):
            if ranges is not None:
                first, count = ranges[i]
            entry = find_entry(key)
            if (
                entry is None
                or entry[2] != _READY
                or first < entry[3]
                or entry[3] + entry[4] < first + count
            ):
                found_mask.append(False)
                continue
            found_mask.append(True)
            hits.keys.append(key)
            hits.slots.append(entry[0])
            hits.generations.append(entry[1])
        self._loans.defer(hits.slots)
        return found_mask, hits

    def check(self, ranges: Sequence[BlockRange]) -> None:
        """Check that the blocks are within a chunk.

        Raises:
            UsageError: some are not.
        """
        blocks_per_chunk = self._directory.blocks_per_chunk
        for blocks in ranges:
            if sum(blocks) > blocks_per_chunk:
                raise UsageError(f"blocks={shown(blocks)}: a chunk has {blocks_per_chunk} blocks")


class SchedulerTiers:
    """Lookups in the tiers of one attachment, and the rate limit of promotion requests.

    `find_tier` and `tier_status` take no lock; the rest is for one thread at a time.
    """

    def __init__(
        self, directory: DirectoryView, table: TierTableView, tiers: Sequence[TierInfo]
    ) -> None:
        self._directory = directory
        self._table = table
        self._shared = [number for number, tier in enumerate(tiers) if tier.shared]
        self._requested_at: dict[bytes, float] = {}  # by key, oldest first

    def find_tier(self, key: bytes, first: int, count: int | None) -> int:
        """Return the first usable tier that has these blocks of the chunk.

        Also while the chunk is being promoted; not if it is READY in memory without these blocks.

        Returns:
            The tier's number, `NO_TIER` or `TIER_UNKNOWN`.
        """
        directory, table = self._directory, self._table
        if count is None:
            count = directory.blocks_per_chunk - first
        tier_place = table.find(key)
        if tier_place is None:
            return TIER_UNKNOWN if any(table.health(i).usable for i in self._shared) else NO_TIER
        tiers = tier_place.tiers
        if not tiers or not _covers((tier_place.first, tier_place.count), first, count):
            return NO_TIER
        entry = directory.entry(key)
        if entry is not None and entry[2] == _READY and not _covers(entry[3:], first, count):
            return NO_TIER
        for number in range(table.num_tiers):
            if tiers >> number & 1 and table.health(number).usable:
                return number
        return NO_TIER

    def tier_status(self, number: int) -> TierHealth | None:
        """Return a tier's published status; None if there is no tier of this number."""
        return self._table.health(number) if 0 <= number < self._table.num_tiers else None

    def take_unrequested(self, keys: Iterable[bytes], now: float) -> list[bytes]:
        """Return the keys not requested within `REREQUEST_SECONDS`, and mark them as requested."""
        requested_at, expired_at = self._requested_at, now - REREQUEST_SECONDS
        while requested_at and requested_at[oldest := next(iter(requested_at))] <= expired_at:
            del requested_at[oldest]
        unrequested = [key for key in dict.fromkeys(keys) if key not in requested_at]
        requested_at.update(dict.fromkeys(unrequested, now))
        while len(requested_at) > MAX_REQUESTED_KEYS:
            del requested_at[next(iter(requested_at))]
        return unrequested

    def on_loaded(self, keys: Iterable[bytes]) -> None:
        """Lift the rate limit for keys that are in memory: once evicted, they may be requested."""
        if self._requested_at:
            for key in keys:
                self._requested_at.pop(key, None)


def _covers(blocks: Sequence[int], first: int, count: int) -> bool:
    """Return whether `blocks` (first block, count) include `count` blocks from `first` on."""
    return blocks[0] <= first and first + count <= blocks[0] + blocks[1]
