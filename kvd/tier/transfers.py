"""What a thread does with a part of a batch: look, seal or verify, call the backend, look again.

A put needs no pin. A slot is looked at before its bytes are read and again when their check word
is known: if it holds the chunk both times, the word is the chunk's. Bytes that change later no
longer fit it, so that a get finds a miss and no wrong bytes.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence

from kvd.errors import TierError
from kvd.logs import fault_text
from kvd.tier.batches import Batch, Kind, Part
from kvd.tier.contract import Chunk, Space, Tier
from kvd.tier.seal import Damaged, check_of, seal, unseal
from kvd.wire.tiering import Outcome
from kvd_proto.directory import SlotState

log = logging.getLogger("kvd.tier")
_SAY_AGAIN = 10.0  # seconds after which the same error is logged again


class Transfers:
    """Carries out parts on a backend; from several threads at a time.

    Args:
        tier: the backend.
        name: of the tier, for the log.
    """

    def __init__(self, tier: Tier, name: str) -> None:
        self._tier = tier
        self._name = name
        self._lock = threading.Lock()
        self._said: tuple[str, float] = ("", 0.0)

    def run(self, part: Part) -> None:
        """Carry it out; every chunk of it has its outcome then. Raises nothing."""
        batch = part.batch
        try:
            if time.monotonic() > batch.deadline:
                batch.fail(Outcome.LATE, "", part.begin, part.end)
            elif batch.space is None or batch.stale:
                batch.fail(Outcome.GONE, "", part.begin, part.end)
            elif batch.kind is Kind.PUT:
                self._put(part, batch.space)
            elif batch.kind is Kind.GET:
                self._get(part, batch.space)
            else:
                self._ask(part, batch.space)
        except TierError as error:
            batch.fail(Outcome.FAILED, str(error), part.begin, part.end)
            self._say(f"{self._name}: a {batch.kind.name} of {len(batch.keys)} failed: {error}")
        except Exception as error:
            batch.fail(Outcome.FAILED, fault_text(error), part.begin, part.end)
            log.exception("%s: a bug in the tier failed a %s", self._name, batch.kind.name)

    def _put(self, part: Part, space: Space) -> None:
        batch, place = part.batch, part.batch.place
        chunks, numbers = [], []
        for i in range(part.begin, part.end):
            slot, generation, key = batch.slots[i], batch.generations[i], batch.keys[i]
            batch.outcomes[i] = Outcome.GONE
            if not place.holds(slot, generation, SlotState.READY, key):
                continue
            shares = place.shares(slot)
            description = place.description(slot, generation)
            check = check_of(shares)
            if not place.holds(slot, generation, SlotState.READY, key):
                continue
            coverage = batch.coverages[i]
            head = seal(space, key, coverage, check, description)
            chunks.append(Chunk(space, key, shares, head, coverage, check))
            numbers.append(i)
        outcomes = self._call(self._tier.put, chunks, batch.deadline)
        moved_on = []
        for i, outcome in zip(numbers, outcomes, strict=True):
            batch.outcomes[i] = outcome
            if outcome is Outcome.OK and not self._is_still(batch, i, SlotState.READY):
                batch.outcomes[i] = Outcome.GONE
                moved_on.append(batch.keys[i])
        if moved_on:  # what was written may be of the slot's next chunk
            self._remove(space, moved_on)

    def _get(self, part: Part, space: Space) -> None:
        batch, place = part.batch, part.batch.place
        chunks, numbers = [], []
        for i in range(part.begin, part.end):
            slot, generation, key = batch.slots[i], batch.generations[i], batch.keys[i]
            batch.outcomes[i] = Outcome.GONE
            if place.holds(slot, generation, SlotState.WRITING, key):
                chunks.append(Chunk(space, key, place.shares(slot)))
                numbers.append(i)
        outcomes = self._call(self._tier.get, chunks, batch.deadline)
        for i, chunk, outcome in zip(numbers, chunks, outcomes, strict=True):
            batch.outcomes[i] = outcome
            if outcome is Outcome.OK:
                batch.outcomes[i] = self._verify(batch, i, chunk)

    def _verify(self, batch: Batch, i: int, chunk: Chunk) -> Outcome:
        try:
            sealed = unseal(chunk.head, chunk.space, chunk.key)
            if check_of(chunk.shares) != sealed.check:
                raise Damaged("the check word does not fit the bytes")
        except Damaged as error:
            text = f"slot {batch.slots[i]}: {error}"
            log.warning("%s: a damaged record is dropped, %s", self._name, text)
            batch.error = text
            self._remove(chunk.space, [chunk.key])
            return Outcome.CORRUPT
        if not self._is_still(batch, i, SlotState.WRITING):
            return Outcome.GONE
        batch.coverages[i] = sealed.coverage
        batch.descriptions[i] = sealed.description
        return Outcome.OK

    def _ask(self, part: Part, space: Space) -> None:
        batch = part.batch
        keys = batch.keys[part.begin : part.end]
        found = self._tier.contains(space, keys, batch.deadline) if keys else []
        for i, there in zip(range(part.begin, part.end), found, strict=True):
            batch.outcomes[i] = Outcome.OK if there else Outcome.ABSENT

    def _remove(self, space: Space, keys: Sequence[bytes]) -> None:
        try:
            self._tier.remove(space, keys)
        except TierError as error:  # a get compares the check word again
            self._say(f"{self._name}: a record that should go stays: {error}")

    @staticmethod
    def _is_still(batch: Batch, i: int, state: SlotState) -> bool:
        holds = batch.place.holds(batch.slots[i], batch.generations[i], state, batch.keys[i])
        return holds and not batch.stale

    @staticmethod
    def _call(
        method: Callable[[Sequence[Chunk], float], list[Outcome]],
        chunks: Sequence[Chunk],
        deadline: float,
    ) -> list[Outcome]:
        """Have the backend do its part.

        Raises:
            TierError: it failed, or answers for another number of chunks.
        """
        outcomes = list(map(Outcome, method(chunks, deadline))) if chunks else []
        if len(outcomes) != len(chunks):
            raise TierError(f"the backend answers for {len(outcomes)} of {len(chunks)} chunks")
        return outcomes

    def _say(self, text: str) -> None:
        """Log an error, the same one only now and then."""
        now = time.monotonic()
        with self._lock:
            if self._said[0] == text and now < self._said[1]:
                return
            self._said = text, now + _SAY_AGAIN
        log.warning("%s", text)
