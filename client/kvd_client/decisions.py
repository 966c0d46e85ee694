"""What a scheduler decides by itself about stores and loads, from the directory and its loans."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from kvd_client.arguments import Blocks, shown
from kvd_client.errors import UsageError
from kvd_client.loans import Loans
from kvd_client.outbox import Outbox
from kvd_client.reuse import ReuseFilter
from kvd_client.tickets import StoreAnswer
from kvd_proto.directory import DirectoryView, Entry, SlotState

_READY = int(SlotState.READY)
_ACCEPTED, _PRESENT = StoreAnswer.ACCEPTED, StoreAnswer.PRESENT
_PENDING, _FULL, _NOT_YET = StoreAnswer.PENDING, StoreAnswer.FULL, StoreAnswer.NOT_YET


class Chosen(NamedTuple):
    """Slots for some of the keys that were asked about.

    keys, slots, generations: of those that have one, in the order of the request.
    """

    keys: list[bytes]
    slots: list[int]
    generations: list[int]


class Decisions:
    """Those of one attachment, and what the daemon is to be told of them. For one thread at a time.

    Args:
        directory: of the namespace.
        loans: what is lent.
        reuse: says which keys may be stored.
    """

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
        """Begin to store those keys that are new, as far as there are loans.

        Of equal keys the first counts; the others are PENDING, or what the first one got. A chunk
        that is READY with a part of the offered blocks is stored anew.

        Args:
            keys: a prompt's head first.
            ranges: for each the blocks that will be stored; None: all of all chunks.
            describe: returns the description of the chunk of the i-th key, empty for none. It is
                asked about keys that can be accepted. Those whose descriptions the message has no
                room for are FULL. Where it raises, the stores of the keys before go on without a
                ticket, until the daemon gives them up.

        Returns:
            An answer to each key, and the slots of those accepted.
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
        """Where a key's chunk is; None also where its slot was given to another key."""
        found, given = self._directory.entry(key), self.outbox.given
        if found is not None and given.get(found[0], found[1]) != found[1]:
            return None
        return found

    def find(
        self, keys: Sequence[bytes], ranges: Sequence[Blocks] | None
    ) -> tuple[list[bool], Chosen]:
        """Return which keys are READY with the blocks that are needed, and their slots.

        Chunks whose slots were given to other keys count as gone. Slots that are found are the last
        to be given away.
        """
        entry = self._entry
        first, count = 0, self._directory.blocks_per_chunk
        found: list[bool] = []
        chosen = Chosen([], [], [])
        for i, key in enumerate(keys):
            if ranges is not None:
                first, count = ranges[i]
            there = entry(key)
            is_there = (
                there is not None
                and there[2] == _READY
                and there[3] <= first
                and first + count <= there[3] + there[4]
            )
            found.append(is_there)
            if there is not None and is_there:
                chosen.keys.append(key)
                chosen.slots.append(there[0])
                chosen.generations.append(there[1])
        self._loans.defer(chosen.slots)
        return found, chosen

    def check(self, ranges: Sequence[Blocks]) -> None:
        """Refuse blocks that a chunk does not have.

        Raises:
            UsageError: some are.
        """
        whole = self._directory.blocks_per_chunk
        for blocks in ranges:
            if sum(blocks) > whole:
                raise UsageError(f"blocks={shown(blocks)}: a chunk has {whole} blocks")

    def __repr__(self) -> str:
        return f"<Decisions {self._loans!r}, {self.outbox!r}, {self._reuse!r}>"


def _covers(held: Sequence[int], first: int, count: int) -> bool:
    """Whether `count` blocks from `first` on are among those held: the first, and how many."""
    return held[0] <= first and first + count <= held[0] + held[1]
