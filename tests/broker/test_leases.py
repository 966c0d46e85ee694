"""How long a load may be in coming, by a clock that is moved by hand."""

import numpy as np

from kvd.broker.effects import Reply
from kvd.wire.link import Imported, ShareDone
from kvd_proto.answers import LookupResult
from kvd_proto.arrays import IntArray
from kvd_proto.messages import (
    LoadPrepared,
    Message,
    PrepareLoad,
    PrepareStore,
    StorePrepared,
)
from tests.broker.brokers import PAGE, join, lane_up
from tests.broker.test_registration import attached

TEN_MINUTES = 600
KEYS = tuple(b"key-%04d" % number for number in range(8))


class Bench:
    """A broker with an attached engine whose chunks are READY; `now` is its clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.broker, worker = attached(64 * PAGE)
        self.broker.pool_allocated(64 * PAGE)
        lane_up(self.broker)
        self.broker.supervision.received(
            "host", Imported(session=worker.number, error=""), self.now
        )
        self.scheduler = join(self.broker, "scheduler")
        assert worker.engine is not None
        assert worker.engine.namespace is not None
        self.namespace = worker.engine.namespace
        stored = self.ask(PrepareStore(keys=KEYS))
        assert isinstance(stored, StorePrepared)
        count = len(KEYS)
        share = ShareDone(
            session=worker.number,
            rank=0,
            namespace=self.namespace.id,
            slots=stored.slots,
            generations=stored.generations,
            first=IntArray.of(np.zeros(count, np.uint16), "u2"),
            count=IntArray.of(np.ones(count, np.uint16), "u2"),
            groups=IntArray.of(np.zeros(count, np.uint16), "u2"),
            ok=True,
        )
        self.broker.supervision.received("host", share, self.now)

    def ask(self, message: Message) -> Message:
        """What the scheduler is answered."""
        effects = self.broker.request(self.scheduler, 2, message, self.now)
        (reply,) = [effect.message for effect in effects if isinstance(effect, Reply)]
        return reply

    def wait(self, seconds: int) -> list[int]:
        """Let so many seconds pass; the numbers of chunks that were pinned on the way."""
        seen = {self.pinned}
        for _ in range(seconds):
            self.now += 1.0
            self.broker.tick(self.now)
            seen.add(self.pinned)
        return sorted(seen)

    @property
    def pinned(self) -> int:
        """Chunks that are pinned now."""
        return len(self.namespace.table.slots.leases.pins)

    def looked_up(self) -> set[LookupResult]:
        """What the engine reads in the directory."""
        return {self.namespace.directory.lookup(key) for key in KEYS}


def test_a_request_may_wait_for_ten_minutes_between_lookup_and_load() -> None:
    """Nothing is pinned meanwhile, and every chunk is granted when the load comes."""
    bench = Bench()
    assert bench.looked_up() == {LookupResult.HIT}
    assert bench.wait(TEN_MINUTES) == [0]
    granted = bench.ask(PrepareLoad(keys=KEYS, lease_ms=TEN_MINUTES * 1000))
    assert isinstance(granted, LoadPrepared)
    assert granted.found.numpy().all()
    assert bench.pinned == len(KEYS)


def test_a_load_that_never_ends_pins_no_longer_than_a_lease() -> None:
    """Whatever the engine asked for: afterwards the chunks are hits and evictable."""
    bench = Bench()
    bench.ask(PrepareLoad(keys=KEYS, lease_ms=TEN_MINUTES * 1000))
    longest = int(bench.broker.state.settings.lease_seconds)
    assert longest < TEN_MINUTES
    assert bench.wait(longest - 1) == [len(KEYS)]
    bench.wait(1)
    assert bench.wait(TEN_MINUTES) == [0]
    assert bench.looked_up() == {LookupResult.HIT}
