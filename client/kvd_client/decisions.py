"""The scheduler's own decisions: slots for new chunks, chunks to load, chunks to promote.

Decisions read the directory in shared memory; the next step tells the daemon.

- A slot on loan is empty, or holds a chunk that would be evicted next, which lookups find until the
  slot is given to another key. The daemon reclaims loans without a message, so only the directory
  says whether a loan is still valid.
- A reuse filter keeps out prompts that are seen once: a key is stored at its n-th offer.
- Promotion of a chunk from a tier is requested with the step. It has no reply: the directory shows
  the result.
"""

from collections import OrderedDict
from collections.abc import Callable, Container, Iterable, Sequence
from typing import NamedTuple, TypeAlias

from kvd_client.arguments import Blocks, shown
from kvd_client.errors import UsageError
from kvd_client.outbox import Outbox
from kvd_client.tickets import StoreAnswer
from kvd_proto.directory import DirectoryView, Entry, SlotState
from kvd_proto.messages import TierInfo
from kvd_proto.tier_table import TierHealth, TierTableView

_READY = int(SlotState.READY)
_ACCEPTED, _PRESENT = StoreAnswer.ACCEPTED, StoreAnswer.PRESENT
_PENDING, _FULL, _NOT_YET = StoreAnswer.PENDING, StoreAnswer.FULL, StoreAnswer.NOT_YET

LEAST_WANTED = 64
DECAY = 1 / 32  # of the peak, with each step or answer after loans were taken
Loan: TypeAlias = tuple[int, int]
"""A slot and its generation."""
IsLent: TypeAlias = Callable[[int, int], bool]
"""Whether a slot is on loan with this generation."""

NOT_BELOW = -1
"""No usable tier has the blocks."""
UNKNOWN = -2
"""A usable shared tier may have the chunk: it has not been asked recently."""

SEEK_AGAIN_SECONDS = 2.0  # before the same key is sent again
MAX_SOUGHT_KEYS = 65_536  # keys remembered as sent


class Loans:
    """The loans of one scheduler. For one thread at a time."""

    def __init__(self) -> None:
        self._at_hand: OrderedDict[int, int] = OrderedDict()  # slot -> generation, oldest first
        self._pinned: dict[int, int] = {}  # loans passed over by `take` since the latest answer
        self._asked = 0  # calls of `take` since the latest answer
        self._peak = 0.0

    @property
    def wanted(self) -> int:
        """The number of loans to have: twice the recent peak of takes between two answers."""
        return max(LEAST_WANTED, 2 * round(self._peak))

    def add(self, loans: Iterable[Loan]) -> None:
        """Add the loans of an answer, maybe none, and start a new count of takes.

        Takes are counted from answer to answer, since they are served from the same loans.
        """
        self.end_step()
        self._asked = 0
        at_hand = self._at_hand
        at_hand.update(self._pinned)
        self._pinned.clear()
        for slot, generation in loans:
            if at_hand.get(slot, -1) < generation:  # answers may be taken in out of order
                at_hand.pop(slot, None)
                at_hand[slot] = generation

    def take(self, is_lent: IsLent, pinned: Container[int] = ()) -> Loan | None:
        """Remove and return a valid loan; None if there is none.

        A slot whose chunk is `pinned` is passed over until the daemon's next answer: when the
        daemon reads the pin, it ends the loan or refuses the pin.
        """
        self._asked += 1
        at_hand = self._at_hand
        while at_hand:
            loan = at_hand.popitem(last=False)
            if loan[0] in pinned:
                self._pinned[loan[0]] = loan[1]
            elif is_lent(*loan):
                return loan
        return None

    def defer(self, slots: Iterable[int]) -> None:
        """Move these slots' loans to the end of the order: their chunks were just used."""
        if at_hand := self._at_hand:
            for slot in slots:
                if slot in at_hand:
                    at_hand.move_to_end(slot)

    def count(self, is_lent: IsLent) -> int:
        """Remove invalid loans; return how many are left, including those of pinned chunks."""
        for loans in (self._at_hand, self._pinned):
            for slot, generation in list(loans.items()):
                if not is_lent(slot, generation):
                    del loans[slot]
        return len(self._at_hand) + len(self._pinned)

    def end_step(self) -> None:
        """Update the peak of takes; a step without takes does not lower it."""
        if self._asked:
            self._peak = max(float(self._asked), self._peak * (1 - DECAY))

    def clear(self) -> None:
        """Remove all loans, which the daemon has ended."""
        self._at_hand.clear()
        self._pinned.clear()

    def __len__(self) -> int:
        """The number of loans that `take` may still try, including invalid ones."""
        return len(self._at_hand)


class ReuseFilter:
    """Lets a key pass at its `threshold`-th offer; 1: every key passes.

    It remembers the latest `capacity` keys that have not passed yet.
    """

    def __init__(self, threshold: int, capacity: int) -> None:
        self.threshold = threshold
        self.capacity = capacity
        self._offers: OrderedDict[bytes, int] = OrderedDict()

    def offer(self, key: bytes) -> bool:
        """Count an offer; return True if the key has now been offered often enough."""
        count = self._offers.pop(key, 0) + 1
        if count >= self.threshold:
            return True
        self._remember(key, count)
        return False

    def give_back(self, key: bytes) -> None:
        """Let a key that passed but got no slot pass again at its next offer."""
        if self.threshold > 1:
            self._remember(key, self.threshold - 1)

    def _remember(self, key: bytes, count: int) -> None:
        if len(self._offers) >= self.capacity:
            self._offers.popitem(last=False)
        self._offers[key] = count

    def __len__(self) -> int:
        return len(self._offers)


class Chosen(NamedTuple):
    """The keys of a request that have a slot, with slots and generations, in its order."""

    keys: list[bytes]
    slots: list[int]
    generations: list[int]


class Decisions:
    """The decisions of one attachment; `outbox` collects them for the daemon. For one thread."""

    def __init__(self, directory: DirectoryView, loans: Loans, reuse: ReuseFilter) -> None:
        self.outbox = Outbox(directory.blocks_per_chunk)
        self._directory = directory
        self._loans = loans
        self._reuse = reuse

    def offer(
        self,
        keys: Sequence[bytes],
        ranges: Sequence[Blocks] | None,
        describe: Callable[[int], bytes],
    ) -> tuple[list[StoreAnswer], Chosen]:
        """Begin to store the keys that are new, as far as there are loans.

        A repeated key is PENDING if its first occurrence was accepted, else it gets the same
        answer. A chunk that is READY with a part of the offered blocks is stored anew.

        Args:
            keys: a prompt's head first.
            ranges: for each key the blocks to store; None: all blocks of all chunks.
            describe: returns the description of the i-th key's chunk, empty for none. It is called
                only for keys that can be accepted. If the step has no room for the description,
                the key is FULL. If `describe` raises, the stores of the keys before it go on
                without a ticket, until the daemon gives them up.

        Returns:
            An answer to each key, and the slots of accepted keys.
        """
        outbox, loans, reuse = self.outbox, self._loans, self._reuse
        entry, take, begin, begun = self._entry, loans.take, outbox.begin, outbox.begun
        is_lent, pinned = self._directory.is_lent, outbox.pinned
        filtered = reuse.threshold > 1
        counted: set[bytes] = set()  # by the filter, in this call
        blocks = (0, self._directory.blocks_per_chunk)
        answers: list[StoreAnswer] = []
        stored, slots, generations = chosen = Chosen([], [], [])
        for i, key in enumerate(keys):
            if ranges is not None:
                blocks = ranges[i]
            if key in begun:
                answers.append(_PENDING)
                continue
            found = entry(key)
            if found is not None:
                if found[2] != _READY:
                    answers.append(_PENDING)
                    continue
                if found[3:] == blocks or not _covers(blocks, found[3], found[4]):
                    loans.defer(found[:1])
                    answers.append(_PRESENT)
                    continue
            elif filtered and (key in counted or not reuse.offer(key)):
                counted.add(key)
                answers.append(_NOT_YET)
                continue
            description = describe(i) if loans else b""
            no_room = description and not outbox.room_for(len(description))
            if no_room or (loan := take(is_lent, pinned)) is None:
                if filtered and found is None:
                    reuse.give_back(key)
                answers.append(_FULL)
                continue
            answers.append(_ACCEPTED)
            begin(key, *loan, blocks, description)
            stored.append(key)
            slots.append(loan[0])
            generations.append(loan[1])
        if len(stored) < len(answers):
            outbox.count(answers)
        return answers, chosen

    def _entry(self, key: bytes) -> Entry | None:
        """Return the directory's entry of a key; None also if its slot was given to another key."""
        found, given = self._directory.entry(key), self.outbox.given
        if found is not None and given.get(found[0], found[1]) != found[1]:
            return None
        return found

    def find(
        self, keys: Sequence[bytes], ranges: Sequence[Blocks] | None
    ) -> tuple[list[bool], Chosen]:
        """Return which keys are READY with the blocks needed, and their slots.

        Chunks whose slots were given to other keys are not found. Loans of the slots found are
        taken last.
        """
        entry = self._entry
        first, count = 0, self._directory.blocks_per_chunk
        found: list[bool] = []
        chosen = Chosen([], [], [])
        for i, key in enumerate(keys):
            if ranges is not None:
                first, count = ranges[i]
            there = entry(key)
            if (
                there is None
                or there[2] != _READY
                or first < there[3]
                or there[3] + there[4] < first + count
            ):
                found.append(False)
                continue
            found.append(True)
            chosen.keys.append(key)
            chosen.slots.append(there[0])
            chosen.generations.append(there[1])
        self._loans.defer(chosen.slots)
        return found, chosen

    def check(self, ranges: Sequence[Blocks]) -> None:
        """Check that the blocks are within a chunk.

        Raises:
            UsageError: some are not.
        """
        whole = self._directory.blocks_per_chunk
        for blocks in ranges:
            if sum(blocks) > whole:
                raise UsageError(f"blocks={shown(blocks)}: a chunk has {whole} blocks")


class Seeking:
    """Lookups in the tiers of one attachment, and the rate limit of promotion requests.

    `below` and `status` take no lock; the rest is for one thread at a time.
    """

    def __init__(
        self, directory: DirectoryView, table: TierTableView, tiers: Sequence[TierInfo]
    ) -> None:
        self._directory = directory
        self._table = table
        self._shared = [number for number, tier in enumerate(tiers) if tier.shared]
        self._told: dict[bytes, float] = {}  # when each key was sent, oldest first

    def below(self, key: bytes, first: int, count: int | None) -> int:
        """Return the first usable tier that holds these blocks of the chunk.

        Also while the chunk is being promoted; not if it is READY in memory without these blocks.

        Returns:
            The tier's number, `NOT_BELOW` or `UNKNOWN`.
        """
        directory, table = self._directory, self._table
        if count is None:
            count = directory.blocks_per_chunk - first
        place = table.find(key)
        if place is None:
            return UNKNOWN if any(table.health(i).usable for i in self._shared) else NOT_BELOW
        tiers = place.tiers
        if not tiers or not _covers((place.first, place.count), first, count):
            return NOT_BELOW
        there = directory.entry(key)
        if there is not None and there[2] == _READY and not _covers(there[3:], first, count):
            return NOT_BELOW
        for number in range(table.num_tiers):
            if tiers >> number & 1 and table.health(number).usable:
                return number
        return NOT_BELOW

    def status(self, number: int) -> TierHealth | None:
        """Return a tier's published status; None if there is no tier of this number."""
        return self._table.health(number) if 0 <= number < self._table.num_tiers else None

    def due(self, keys: Iterable[bytes], now: float) -> list[bytes]:
        """Return the keys not sent within `SEEK_AGAIN_SECONDS`, and mark them as sent now."""
        told, before = self._told, now - SEEK_AGAIN_SECONDS
        while told and told[oldest := next(iter(told))] <= before:
            del told[oldest]
        due = [key for key in dict.fromkeys(keys) if key not in told]
        told.update(dict.fromkeys(due, now))
        while len(told) > MAX_SOUGHT_KEYS:
            del told[next(iter(told))]
        return due

    def loaded(self, keys: Iterable[bytes]) -> None:
        """Lift the rate limit for keys that are in memory: once evicted, they may be sent again."""
        if self._told:
            for key in keys:
                self._told.pop(key, None)


def _covers(held: Sequence[int], first: int, count: int) -> bool:
    """Return whether `held` (first block, count) includes `count` blocks from `first` on."""
    return held[0] <= first and first + count <= held[0] + held[1]
