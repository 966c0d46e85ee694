"""Keys offered for storing, and what each is answered.

A chunk that is READY with a part of its blocks, as at the edge of a sliding window, makes way
for an offer of all of these and more: it is dropped when the fuller one gets its slot, so that
no key ever means two slots. Until that is READY, its key is a miss.
"""

from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from kvd.cache.directory import Blocks, DirectoryWriter, covers
from kvd.errors import IntegrityError
from kvd_proto.directory import KEY_BYTES, SlotState
from kvd_proto.messages import StoreAnswer

_READY = int(SlotState.READY)
_ACCEPTED, _PRESENT = int(StoreAnswer.ACCEPTED), int(StoreAnswer.PRESENT)
_PENDING, _FULL = int(StoreAnswer.PENDING), int(StoreAnswer.FULL)
_NOT_YET, _BAD_KEY = int(StoreAnswer.NOT_YET), int(StoreAnswer.BAD_KEY)


class ReuseFilter:
    """Lets a key pass at its n-th offer, so that prompts seen once take no room.

    Remembers the latest `capacity` keys that have not passed yet.
    """

    def __init__(self, threshold: int, capacity: int) -> None:
        self.threshold = threshold
        self.capacity = capacity
        self._offers: OrderedDict[bytes, int] = OrderedDict()

    def offer(self, key: bytes) -> bool:
        """Count an offer; True where the key has now been offered often enough."""
        offers = self._offers
        count = offers.pop(key, 0) + 1
        if count >= self.threshold:
            return True
        if len(offers) >= self.capacity:
            offers.popitem(last=False)
        offers[key] = count
        return False

    def check_integrity(self) -> None:
        """Raise IntegrityError where the filter holds too much or a key that should pass."""
        if len(self._offers) > self.capacity:
            raise IntegrityError(f"{len(self._offers)} offers, {self.capacity} allowed")
        if any(not 0 < count < self.threshold for count in self._offers.values()):
            raise IntegrityError(f"an offer count outside 1..{self.threshold - 1}")

    def __repr__(self) -> str:
        return f"<ReuseFilter {len(self._offers)} keys below {self.threshold} offers>"


@dataclass(frozen=True, slots=True)
class Offer:
    """Keys that are offered at once. Of equal ones the first counts.

    answers: a `StoreAnswer` for each key; not final before `settle`.
    wanted: the keys to be stored, in their order, and where they stand.
    lesser: slots of chunks that are here already, with fewer blocks than are offered; by key.
    named: slots of the keys that are here; they must not be evicted for the new ones.
    again: where a key stands that came before, and where it came first.
    """

    answers: bytearray
    wanted: dict[bytes, int]
    lesser: dict[bytes, int]
    named: set[int]
    again: list[tuple[int, int]]

    @classmethod
    def of(
        cls,
        keys: Sequence[bytes],
        blocks: Sequence[Blocks],
        directory: DirectoryWriter,
        reuse: ReuseFilter | None,
    ) -> "Offer":
        """Sort the keys.

        Args:
            keys: what is offered.
            blocks: what each chunk would hold; empty: all blocks.
            directory: of the namespace.
            reuse: says which of the keys that are not here may be stored; None: all.
        """
        whole = (0, directory.blocks_per_chunk)
        answers = bytearray(len(keys))
        wanted: dict[bytes, int] = {}
        lesser: dict[bytes, int] = {}
        again: list[tuple[int, int]] = []
        seen: dict[bytes, int] = {}
        named: set[int] = set()
        find, state = directory.find, directory.state
        for i, key in enumerate(keys):
            if not 0 < len(key) <= KEY_BYTES:
                answers[i] = _BAD_KEY
            elif key in seen:
                again.append((i, seen[key]))
            elif (slot := find(key)) >= 0:
                named.add(slot)
                if state(slot) != _READY:
                    answers[i] = _PENDING
                    continue
                held, offered = directory.blocks(slot), blocks[i] if blocks else whole
                if held == offered or not covers(offered, held):
                    answers[i] = _PRESENT
                else:
                    seen[key] = wanted[key] = i
                    lesser[key] = slot
            else:
                seen[key] = i
                if reuse is None or reuse.offer(key):
                    wanted[key] = i
                else:
                    answers[i] = _NOT_YET
        return cls(answers, wanted, lesser, named, again)

    def settle(self, placed: Collection[bytes], room: int, no_room: StoreAnswer) -> bytearray:
        """The answers, now that the keys `placed` have slots.

        There was room for the first `room` of the wanted ones; the others get `no_room`.
        """
        answers, accepted = self.answers, set(placed)
        for key, i in self.wanted.items():
            answers[i] = _ACCEPTED if key in accepted else _FULL
        for i in list(self.wanted.values())[room:]:
            answers[i] = no_room
        for i, first in self.again:
            answers[i] = _PENDING if answers[first] == _ACCEPTED else answers[first]
        return answers
