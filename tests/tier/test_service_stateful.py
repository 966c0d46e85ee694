"""The service against a model of a broker: resets, drops, reuse of slots, failures, in any order.

The model knows what each key's chunk must be. A get that is OK brings exactly that, whatever
happened before; and what was acknowledged and never dropped is there.
"""

import tempfile
from pathlib import Path

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvd.outcomes import Outcome
from kvd.tier.contract import BackendOptions
from kvd.wire.tiering import (
    BatchResult,
    CloseNamespace,
    Drop,
    Get,
    Lookup,
    NamespaceOpened,
    NewSalt,
    Put,
    RemovedChunks,
    ScanResult,
    StopTier,
)
from kvd_proto.directory import SlotState
from tests.exploring import explored
from tests.tier.areas import content, coverage_of
from tests.tier.broker import SALT, SHARES, SLOTS, FakeBroker, Namespace, described
from tests.tier.doubles.memory_tier import MemoryTier
from tests.waiting import eventually

OK, ABSENT, GONE, FAILED = Outcome.OK, Outcome.ABSENT, Outcome.GONE, Outcome.FAILED
CORRUPT = Outcome.CORRUPT
KEYS = [bytes((97 + i,)) * (1 + 5 * i) for i in range(8)]
KEY = st.sampled_from(KEYS)
SLOT = st.integers(0, SLOTS - 1)
BATCH = st.lists(st.tuples(KEY, SLOT), min_size=1, max_size=5, unique_by=lambda row: row[1])
WHERE = st.integers(0, 1)
ROOM = 10 * (sum(SHARES) + 200)  # chunks


class CountingTier(MemoryTier):
    """Counts how often the service has asked for dropped keys."""

    num_takes = 0

    def take_dropped(self) -> list[tuple[bytes, list[bytes]]]:
        """Count the call when it begins."""
        self.num_takes += 1
        return super().take_dropped()


class Service(RuleBasedStateMachine):
    """A broker with two namespaces, and what it may rely on.

    The double in memory drops the oldest chunk where it has no room, and turns bits and fails as
    often as the class says.
    """

    corrupt = "0"
    fail = "0"

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.hang = Path(self.folder.name) / "hang"
        options = {"size": str(ROOM), "corrupt": self.corrupt, "fail": self.fail}
        tier = CountingTier.open(
            BackendOptions("", options | {"hang": str(self.hang)}), memoryview(b"")
        )
        tier.batch_bytes = 2 * sum(SHARES)
        self.tier = tier
        self.broker = FakeBroker(tier).__enter__()
        self.number = 0
        self.salts = [SALT, SALT]
        self.held: list[set[bytes]] = [set(), set()]  # acknowledged, and not dropped since
        self.doubted: set[bytes] = set()  # whose Drop may not be carried out yet
        for space in self.broker.spaces:
            space.open()
            assert self.broker.scan() == {}

    def space(self, where: int) -> Namespace:
        """One of the namespaces."""
        return self.broker.spaces[where]

    def next_number(self) -> int:
        """Of an order."""
        self.number += 1
        return self.number

    def done(self, order: Put | Get) -> BatchResult:
        """The result of an order."""
        done = self.broker.done(order)
        assert done.number == order.number
        return done

    def take_removed(self) -> None:
        """Wait until every key that the backend has dropped is reported, and forget these keys.

        Once the service asks for the second time from now, the answer to the first is on its way.
        """
        enough = self.tier.num_takes + 2
        eventually(lambda: self.broker.pong() and self.tier.num_takes >= enough)
        self.broker.pong()
        for message in [each for each in self.broker.others if isinstance(each, RemovedChunks)]:
            self.broker.others.remove(message)
            where = [space.name for space in self.broker.spaces].index(message.namespace)
            self.held[where] -= set(message.keys)

    @rule(where=WHERE, rows=BATCH, reused=st.just(set()) | st.sets(SLOT))
    def put(self, where: int, rows: list[tuple[bytes, int]], reused: set[int]) -> None:
        """Chunks go down; each is OK, refused, or failed with a reason.

        Slots that hold another chunk by the time of the order are GONE.
        """
        space = self.space(where)
        columns = [(key, slot, space.store(slot, key)) for key, slot in rows]
        for slot in reused:
            space.store(slot, b"another", salt=1)
        done = self.done(space.put(self.next_number(), columns))
        for (key, slot), code in zip(rows, done.outcomes.tolist(), strict=True):
            assert code != FAILED or (done.error and self.fail != "0")
            assert code in ({GONE, FAILED} if slot in reused else {OK, GONE, FAILED})
            assert code != GONE or slot in reused or self.doubted
            if code == OK:
                self.held[where].add(key)

    @rule(where=WHERE, rows=BATCH)
    def get(self, where: int, rows: list[tuple[bytes, int]]) -> None:
        """Chunks come up whole, with coverage and description, or not at all."""
        space = self.space(where)
        columns = [(key, slot, space.expect(slot, key)) for key, slot in rows]
        done = self.done(space.get(self.next_number(), columns))
        codes = done.outcomes.tolist()
        # A damaged chunk is dropped, also before its other rows.
        self.held[where] -= {
            key for (key, _), code in zip(rows, codes, strict=True) if code == CORRUPT
        }
        allowed = {OK, ABSENT}
        if self.corrupt != "0":
            allowed |= {CORRUPT, FAILED}
        covered = zip(done.first.tolist(), done.count.tolist(), done.groups.tolist(), strict=True)
        found = zip(rows, codes, covered, done.descriptions, strict=True)
        for (key, slot), code, coverage, description in found:
            assert code in allowed
            if code == OK:
                assert space.read(slot) == content(key, sum(SHARES)).tobytes()
                assert (coverage, description) == (coverage_of(key), described(key))
            elif code == ABSENT:
                self.take_removed()
                assert key not in self.held[where]

    @rule(where=WHERE, keys=st.lists(KEY, min_size=1, max_size=4))
    def ask(self, where: int, keys: list[bytes]) -> None:
        """What is held is there."""
        number, name = self.next_number(), self.space(where).name
        order = Lookup(number=number, namespace=name, keys=tuple(keys), deadline_ms=60_000)
        outcomes = self.broker.outcomes(order)
        self.take_removed()
        for key, outcome in zip(keys, outcomes, strict=True):
            assert outcome in (OK, ABSENT, FAILED)
            assert outcome is not ABSENT or key not in self.held[where]

    @rule(where=WHERE, keys=st.sets(KEY, min_size=1, max_size=3))
    def drop(self, where: int, keys: set[bytes]) -> None:
        """Chunks that the broker has dropped are not held any more."""
        self.broker.send(Drop(namespace=self.space(where).name, keys=tuple(sorted(keys))))
        self.held[where] -= keys
        self.doubted |= keys

    @rule(where=WHERE)
    def reset(self, where: int) -> None:
        """A namespace has another salt: nothing is held."""
        self.salts[where] = b"%08d" % self.next_number()
        order = NewSalt(namespace=self.space(where).name, salt=self.salts[where])
        self.broker.send(order)
        self.held[where].clear()

    @rule(where=WHERE, known=st.booleans())
    def close_and_open(self, where: int, known: bool) -> None:
        """A namespace that is opened again has its salt, and a scan tells all that is held."""
        space = self.space(where)
        self.take_removed()  # those of a closed namespace are not reported
        self.broker.send(CloseNamespace(namespace=space.name))
        self.broker.pong()
        of_resets = NamespaceOpened | ScanResult
        self.broker.others = [m for m in self.broker.others if not isinstance(m, of_resets)]
        assert space.open(self.salts[where] if known else b"") == self.salts[where]
        listed = self.broker.scan(space.name)
        assert listed.keys() >= self.held[where]
        assert listed == {key: coverage_of(key) for key in listed}

    @precondition(lambda self: not self.hang.exists())
    @rule(where=WHERE, rows=BATCH, again=BATCH)
    def reset_while_it_hangs(
        self, where: int, rows: list[tuple[bytes, int]], again: list[tuple[bytes, int]]
    ) -> None:
        """Batches that a reset overtakes end, and nothing of theirs is found afterwards."""
        space = self.space(where)
        self.hang.touch()
        orders = [
            space.put(self.next_number(), [(k, s, space.store(s, k)) for k, s in rows]),
            space.get(self.next_number(), [(k, s, space.expect(s, k)) for k, s in again]),
        ]
        for order in orders:
            self.broker.send(order)
        self.reset(where)
        self.broker.pong()
        self.hang.unlink()
        for _ in orders:
            assert OK not in self.broker.wait_for(BatchResult).outcomes.tolist()

    @rule(where=WHERE, slot=SLOT, key=KEY)
    def late(self, where: int, slot: int, key: bytes) -> None:
        """An order whose deadline has passed is LATE and touches nothing."""
        space = self.space(where)
        generation = space.expect(slot, key)
        before = space.read(slot)
        order = space.get(self.next_number(), [(key, slot, generation)], deadline_ms=0)
        assert self.broker.outcomes(order) == [Outcome.LATE]
        assert space.read(slot) == before
        space.set(slot, SlotState.FREE)

    @invariant()
    def pings_are_answered(self) -> None:
        """Nothing waits when nothing is under way, and no answer is left over."""
        pong = self.broker.pong()
        assert (pong.busy, pong.queued_bytes) == (0, 0)
        assert not [each for each in self.broker.others if isinstance(each, BatchResult)]

    def teardown(self) -> None:
        """End the service."""
        self.hang.unlink(missing_ok=True)
        self.broker.send(StopTier())
        self.broker.__exit__(None, None, None)
        self.folder.cleanup()


class BreakingService(Service):
    """The same with a medium that turns bits and fails."""

    corrupt = "0.2"
    fail = "0.1"


TestService = Service.TestCase
TestService.settings = explored(25, 25)
TestBreakingService = BreakingService.TestCase
TestBreakingService.settings = explored(25, 25)
