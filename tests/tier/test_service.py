"""The service of a tier's process, between the double in memory and a broker made by hand."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from kvd.errors import TierError
from kvd.logs import LineFormatter
from kvd.outcomes import Outcome
from kvd.tier.batches import seal, space_id, unseal
from kvd.tier.contract import BackendOptions, Capacity, Chunk, Space
from kvd.wire.tiering import (
    BatchResult,
    CloseNamespace,
    Drop,
    Lookup,
    NamespaceOpened,
    NewSalt,
    RemovedChunks,
    ScanResult,
    StopTier,
    TierReady,
)
from kvd_proto.directory import SlotState
from tests.daemon.hidden import assert_hidden
from tests.tier.areas import POISON
from tests.tier.broker import SHARES, FakeBroker, content, coverage, described
from tests.tier.doubles.memory_tier import MemoryTier
from tests.waiting import eventually

OK, ABSENT, GONE = Outcome.OK, Outcome.ABSENT, Outcome.GONE
POISONED = bytes((POISON,)) * sum(SHARES)


def memory(**values: str) -> MemoryTier:
    """A double with these options."""
    return MemoryTier.open(BackendOptions("", values), memoryview(b""))


@pytest.fixture
def tier() -> MemoryTier:
    """A double that does nothing but keep."""
    return memory()


@pytest.fixture
def broker(tier: MemoryTier) -> Iterator[FakeBroker]:
    """A service around the double; its first namespace is open with a salt."""
    with FakeBroker(tier) as made:
        made.spaces[0].open()
        assert made.held() == {}
        yield made


class Hooked(MemoryTier):
    """A double that calls the test before it does something."""

    before_put: Callable[[], object] | None = None
    after_put: Callable[[], object] | None = None
    before_get: Callable[[], object] | None = None
    after_get: Callable[[Sequence[Chunk]], object] | None = None

    def put(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """See TierBackend."""
        if self.before_put:
            self.before_put()
        outcomes = super().put(chunks, deadline)
        if self.after_put:
            self.after_put()
        return outcomes

    def get(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """See TierBackend."""
        if self.before_get:
            self.before_get()
        outcomes = super().get(chunks, deadline)
        if self.after_get:
            self.after_get(chunks)
        return outcomes


def test_it_says_what_it_is(broker: FakeBroker) -> None:
    """The first message tells pid and how full the medium is."""
    ready = broker.ready
    assert isinstance(ready, TierReady)
    assert ready.pid == os.getpid()
    assert (ready.total_bytes, ready.used_bytes, ready.chunks) == (64 * 2**20, 0, 0)


def test_down_and_up(broker: FakeBroker) -> None:
    """What goes down from one slot comes up into another, with coverage and description."""
    space = broker.spaces[0]
    keys = [bytes((1, i)) * 3 for i in range(5)]
    rows = [(key, slot, space.store(slot, key)) for slot, key in enumerate(keys)]
    put = broker.done(space.put(1, rows))
    assert put.number == 1
    assert put.outcomes.tolist() == [OK] * 5
    up = [(key, slot, space.expect(slot, key)) for slot, key in enumerate(keys, 8)]
    done = broker.done(space.get(2, up))
    assert (done.number, done.outcomes.tolist()) == (2, [OK] * 5)
    assert [space.read(slot) for _, slot, _ in up] == [content(key) for key in keys]
    columns = done.first.tolist(), done.count.tolist(), done.groups.tolist()
    assert list(zip(*columns, strict=True)) == [coverage(key) for key in keys]
    assert list(done.descriptions) == [described(key) for key in keys]
    assert done.nanoseconds > 0


def test_without_descriptions(broker: FakeBroker) -> None:
    """A namespace without descriptions has empty ones."""
    space = broker.spaces[1]
    broker.send(space.order(), (space.fd,))
    broker.wait_for(NamespaceOpened)
    row = (b"k", 0, space.store(0, b"k"))
    assert broker.outcomes(space.put(1, [row])) == [OK]
    done = broker.done(space.get(2, [(b"k", 1, space.expect(1, b"k"))]))
    assert (done.outcomes.tolist(), done.descriptions) == ([OK], (b"",))


def test_what_is_not_there(broker: FakeBroker) -> None:
    """A get of a key that was never put is ABSENT and leaves the slot alone."""
    space = broker.spaces[0]
    assert broker.outcomes(space.get(1, [(b"k", 3, space.expect(3, b"k"))])) == [ABSENT]
    assert space.read(3) == POISONED


@pytest.mark.parametrize("state", [SlotState.FREE, SlotState.WRITING, SlotState.DRAINING])
def test_a_put_looks_first(broker: FakeBroker, tier: MemoryTier, state: SlotState) -> None:
    """A slot that is not READY with this key and generation is not put: GONE."""
    space = broker.spaces[0]
    generation = space.store(0, b"k")
    space.set(0, state, b"k", generation)
    other = (b"other", 1, space.store(1, b"key"))
    old = (b"old", 2, space.store(2, b"old") - 1)
    outside = [(b"far", slot, 1) for slot in (16, 2**32 - 1)]
    rows = [(b"k", 0, generation), other, old, *outside]
    assert broker.outcomes(space.put(1, rows)) == [GONE] * 5
    assert tier.capacity().chunks == 0


@pytest.mark.parametrize("state", [SlotState.FREE, SlotState.READY, SlotState.DRAINING])
def test_a_get_looks_first(broker: FakeBroker, state: SlotState) -> None:
    """A slot that is not WRITING with this key and generation is not written: GONE."""
    space = broker.spaces[0]
    assert broker.outcomes(space.put(1, [(b"k", 0, space.store(0, b"k"))])) == [OK]
    generation = space.expect(1, b"k")
    space.set(1, state, b"k", generation)
    other = (b"k", 2, space.expect(2, b"another"))
    old = (b"k", 3, space.expect(3, b"k") - 1)
    assert broker.outcomes(space.get(2, [(b"k", 1, generation), other, old])) == [GONE] * 3
    assert [space.read(slot) for slot in (1, 2, 3)] == [POISONED] * 3


def test_a_put_looks_afterwards() -> None:
    """A slot that moves on while its chunk is put: GONE, and nothing is kept."""
    tier = Hooked(BackendOptions("", {}))
    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        row = (b"k", 0, space.store(0, b"k"))
        tier.after_put = lambda: space.store(0, b"new")
        assert broker.outcomes(space.put(1, [row])) == [GONE]
        assert tier.capacity().chunks == 0


def test_bytes_that_change_under_a_put() -> None:
    """A record with bytes of another chunk is CORRUPT when it is got, and dropped."""
    tier = Hooked(BackendOptions("", {}))
    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        row = (b"k", 0, space.store(0, b"k"))
        tier.before_put = lambda: space.write(0, content(b"other"))
        assert broker.outcomes(space.put(1, [row])) == [OK]
        get = broker.done(space.get(2, [(b"k", 1, space.expect(1, b"k"))]))
        assert get.outcomes.tolist() == [Outcome.CORRUPT]
        assert "checksum" in get.error
        assert broker.outcomes(space.get(3, [(b"k", 1, space.expect(1, b"k"))])) == [ABSENT]


def test_a_get_looks_afterwards() -> None:
    """A slot that was given up while it was filled: GONE."""
    tier = Hooked(BackendOptions("", {}))
    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        assert broker.outcomes(space.put(1, [(b"k", 0, space.store(0, b"k"))])) == [OK]
        generation = space.expect(1, b"k")
        tier.before_get = lambda: space.set(1, SlotState.DRAINING, b"k", generation)
        assert broker.outcomes(space.get(2, [(b"k", 1, generation)])) == [GONE]


def test_every_wrong_record_is_found_out(caplog: pytest.LogCaptureFixture) -> None:
    """Wrong bytes and a wrong head are CORRUPT, another chunk's head ABSENT; all are dropped.

    Neither the log nor the answer has any part of a key.
    """
    tier = Hooked(BackendOptions("", {}))
    heads = [b"", b"\0" * 100]
    keys = b"SECRET-a", b"SECRET-b"

    def turn_bit(chunks: Sequence[Chunk]) -> None:
        chunks[0].shares[1][999] ^= 0x80

    def swap_heads(chunks: Sequence[Chunk]) -> None:
        chunks[0].head, chunks[1].head = chunks[1].head, chunks[0].head

    def cut_head(chunks: Sequence[Chunk]) -> None:
        chunks[0].head, chunks[1].head = heads

    with FakeBroker(tier) as broker, caplog.at_level(logging.WARNING):
        space = broker.spaces[0]
        space.open()
        for number, (break_it, wrong) in enumerate([(turn_bit, 1), (cut_head, 2)]):
            rows = [(key, slot, space.store(slot, key)) for slot, key in enumerate(keys)]
            assert broker.outcomes(space.put(number, rows)) == [OK, OK]
            tier.after_get = break_it
            up = [(key, slot, space.expect(slot, key)) for slot, key in enumerate(keys, 8)]
            done = broker.done(space.get(number, up))
            assert done.outcomes.tolist() == [Outcome.CORRUPT] * wrong + [OK] * (2 - wrong)
            assert done.error.startswith(f"slot {7 + wrong}: ")
            assert_hidden([done.error], b"SECR")
            assert tier.capacity().chunks == 2 - wrong
            tier.after_get = None
        rows = [(key, slot, space.store(slot, key)) for slot, key in enumerate(keys)]
        assert broker.outcomes(space.put(8, rows)) == [OK, OK]
        tier.after_get = swap_heads
        up = [(key, slot, space.expect(slot, key)) for slot, key in enumerate(keys, 8)]
        assert broker.outcomes(space.get(9, up)) == [ABSENT, ABSENT]
        assert tier.capacity().chunks == 0
        assert caplog.text.count("a damaged record is dropped, slot") == 3
        assert "the record is of another chunk" in caplog.text
        assert_hidden([caplog.text], b"SECR")


def test_a_fault_of_a_backend_shows_no_key(caplog: pytest.LogCaptureFixture) -> None:
    """An exception that holds a key fails the batch; log and answer name it without the key."""
    tier = Hooked(BackendOptions("", {}))

    def fault() -> None:
        raise KeyError(b"SECRET")

    tier.before_get = fault
    with FakeBroker(tier) as broker, caplog.at_level(logging.WARNING):
        space = broker.spaces[0]
        space.open()
        done = broker.done(space.get(1, [(b"SECRET", 8, space.expect(8, b"SECRET"))]))
    assert done.outcomes.tolist() == [Outcome.FAILED]
    assert done.error == "KeyError(b'…')"
    record = caplog.records[0]
    logged = LineFormatter("plain", "tier", {}).format(record)
    assert "a bug in the tier failed a GET" in logged
    assert "KeyError: b'…'" in logged
    assert_hidden([done.error, logged], b"SECR")


def test_it_says_how_many_records_were_damaged(tier: MemoryTier) -> None:
    """The first message has what the backend has counted while it was opened."""
    tier.damaged_records = 3
    with FakeBroker(tier) as broker:
        assert isinstance(broker.ready, TierReady)
        assert broker.ready.damaged_records == 3


def test_asking(broker: FakeBroker) -> None:
    """A Lookup says for each key whether it is there."""
    space = broker.spaces[0]
    assert broker.outcomes(space.put(1, [(b"k", 0, space.store(0, b"k"))])) == [OK]
    ask = Lookup(number=2, namespace=space.name, keys=(b"x", b"k", b"y"), deadline_ms=60_000)
    assert broker.outcomes(ask) == [ABSENT, OK, ABSENT]


def test_dropping(broker: FakeBroker, tier: MemoryTier) -> None:
    """A Drop removes the chunks; those that are not there are no error."""
    space = broker.spaces[0]
    rows = [(key, slot, space.store(slot, key)) for slot, key in enumerate((b"a", b"b"))]
    assert broker.outcomes(space.put(1, rows)) == [OK, OK]
    broker.send(Drop(namespace=space.name, keys=(b"a", b"never")))
    eventually(lambda: tier.capacity().chunks, lambda left: left == 1)
    again = (b"a", 2, space.store(2, b"a"))
    eventually(lambda: broker.outcomes(space.put(2, [again])), lambda found: found == [OK])


def test_what_is_held_is_told() -> None:
    """Opening a namespace tells all that is kept of it, in pieces."""
    tier = memory()
    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        assert space.open(b"5") == b"5"
        assert broker.held() == {}
        keys = [bytes((2, i)) for i in range(10)]
        rows = [(key, slot, space.store(slot, key)) for slot, key in enumerate(keys)]
        assert broker.outcomes(space.put(1, rows)) == [OK] * 10
        broker.send(CloseNamespace(namespace=space.name))
        assert space.open(b"") == b"5"
        assert broker.held() == {key: coverage(key) for key in keys}


def test_a_long_scan_in_small_messages() -> None:
    """A scan of many chunks comes in small messages, and orders between them."""

    class Many(MemoryTier):
        def scan(self, space: Space) -> Iterator[list[tuple[bytes, tuple[int, int, int]]]]:
            del space
            for at in range(0, 20_000, 5_000):
                yield [(b"%047d" % i, (1, 2, 3)) for i in range(at, at + 5_000)]

    with FakeBroker(Many(BackendOptions("", {}))) as broker:
        broker.spaces[0].open()
        assert broker.pong()
        found = broker.held()
    assert found == {b"%047d" % i: (1, 2, 3) for i in range(20_000)}


def test_a_scan_that_fails_ends(caplog: pytest.LogCaptureFixture) -> None:
    """A scan that raises ends with what it found."""

    class Broken(MemoryTier):
        def scan(self, space: Space) -> Iterator[list[tuple[bytes, tuple[int, int, int]]]]:
            yield [(b"k", (0, 1, 0))]
            raise TierError(f"{space.id!r}: the index cannot be read")

    with FakeBroker(Broken(BackendOptions("", {}))) as broker:
        broker.spaces[0].open()
        assert broker.held() == {b"k": (0, 1, 0)}
    assert "ends early" in caplog.text


def test_what_is_evicted_is_told() -> None:
    """What the backend drops by itself is reported after the put that it was dropped for."""
    size = 4 * (sum(SHARES) + 200)
    tier = memory(size=str(size))
    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        keys = [bytes((3, i)) for i in range(8)]
        for slot, key in enumerate(keys):
            assert broker.outcomes(space.put(slot, [(key, slot, space.store(slot, key))])) == [OK]
        gone: set[bytes] = set()
        while len(gone) < 4:
            message = broker.wait_for(RemovedChunks)
            assert message.namespace == space.name
            gone |= set(message.keys)
        assert gone == set(keys[:4])
        eventually(lambda: broker.pong().chunks, lambda chunks: chunks == 4)


def test_what_is_evicted_while_evictions_are_asked_for_is_told() -> None:
    """A chunk that is dropped while the backend is being asked is reported without a ping."""
    inside, go_on = threading.Event(), threading.Event()

    class Slow(MemoryTier):
        slow = False

        def capacity(self) -> Capacity:
            if self.slow:
                inside.set()
                go_on.wait()
            return super().capacity()

    tier = Slow(BackendOptions("", {"size": str(sum(SHARES) + 200)}))
    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        tier.slow = True
        assert broker.outcomes(space.put(1, [(b"a", 0, space.store(0, b"a"))])) == [OK]
        inside.wait()
        assert broker.outcomes(space.put(2, [(b"b", 1, space.store(1, b"b"))])) == [OK]
        go_on.set()
        assert broker.wait_for(RemovedChunks).keys == (b"a",)


def test_another_salt(broker: FakeBroker, tier: MemoryTier) -> None:
    """After a reset nothing of before is found, and orders that follow it work."""
    space = broker.spaces[0]
    assert broker.outcomes(space.put(1, [(b"k", 0, space.store(0, b"k"))])) == [OK]
    broker.send(NewSalt(namespace=space.name, salt=b"99"))
    assert broker.outcomes(space.get(2, [(b"k", 1, space.expect(1, b"k"))])) == [ABSENT]
    assert tier.capacity().chunks == 0
    assert broker.outcomes(space.put(3, [(b"k", 0, space.store(0, b"k"))])) == [OK]
    done = broker.done(space.get(4, [(b"k", 1, space.expect(1, b"k"))]))
    assert done.outcomes.tolist() == [OK]


def test_a_reset_while_batches_run() -> None:
    """A put and a get that a reset overtakes are GONE, and nothing of them is kept."""
    tier = Hooked(BackendOptions("", {}))
    inside, go_on = threading.Semaphore(0), threading.Event()

    def hold() -> None:
        inside.release()
        go_on.wait()

    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        assert broker.outcomes(space.put(1, [(b"k", 0, space.store(0, b"k"))])) == [OK]
        tier.after_put = tier.before_get = hold
        broker.send(space.put(2, [(b"m", 1, space.store(1, b"m"))]))
        broker.send(space.get(3, [(b"k", 2, space.expect(2, b"k"))]))
        inside.acquire()
        inside.acquire()
        broker.send(NewSalt(namespace=space.name, salt=b"7"))
        broker.pong()
        go_on.set()
        dones = [broker.wait_for(BatchResult) for _ in range(2)]
        ends = {done.number: done.outcomes.tolist() for done in dones}
        assert ends[2] == [GONE]
        assert ends[3] in ([GONE], [ABSENT])
        # The clerk drops what was there before the reset, and nothing waits for that.
        eventually(lambda: tier.capacity().chunks, lambda chunks: chunks == 0)


def test_puts_leave_a_thread_for_gets() -> None:
    """While puts hang in all threads that they may have, gets are served."""
    tier = Hooked(BackendOptions("", {}))
    inside, go_on = threading.Semaphore(0), threading.Event()

    def hold() -> None:
        inside.release()
        go_on.wait()

    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        assert broker.outcomes(space.put(0, [(b"k", 0, space.store(0, b"k"))])) == [OK]
        tier.before_put = hold
        for number in range(1, 8):
            key = bytes((4, number))
            broker.send(space.put(number, [(key, number, space.store(number, key))]))
        for _ in range(tier.threads - 1):  # a thread that gives way begins later than a get's
            inside.acquire()
        done = broker.done(space.get(9, [(b"k", 10, space.expect(10, b"k"))]))
        assert (done.number, done.outcomes.tolist()) == (9, [OK])
        pong = broker.pong()
        assert pong.busy == tier.threads - 1
        assert pong.queued_bytes == (7 - pong.busy) * sum(SHARES)
        go_on.set()
        assert [broker.wait_for(BatchResult).outcomes.tolist() for _ in range(7)] == [[OK]] * 7
        assert broker.pong().progress == 9


def test_puts_give_way() -> None:
    """The thread that carries a put has a tenth of others' share, that of a get has all of it."""
    tier, nice = Hooked(BackendOptions("", {})), dict[str, int]()

    def note(kind: str) -> None:
        nice[kind] = os.getpriority(os.PRIO_PROCESS, 0)  # of the thread

    tier.before_put = lambda: note("put")
    tier.before_get = lambda: note("get")
    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        assert broker.outcomes(space.put(1, [(b"k", 0, space.store(0, b"k"))])) == [OK]
        assert broker.outcomes(space.get(2, [(b"k", 1, space.expect(1, b"k"))])) == [OK]
    note("here")
    assert nice == {"put": min(19, nice["here"] + 10), "get": nice["here"], "here": nice["here"]}


def test_a_batch_has_one_end(tier: MemoryTier) -> None:
    """A batch above `batch_bytes` is divided among threads and answered once, in its order."""
    tier.batch_bytes = 2 * sum(SHARES)
    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        keys = [bytes((5, i)) for i in range(9)]
        rows = [(key, slot, space.store(slot, key)) for slot, key in enumerate(keys)]
        rows[4] = (b"\5other", 4, rows[4][2])
        assert broker.outcomes(space.put(1, rows)) == [OK] * 4 + [GONE] + [OK] * 4
        assert broker.pong().progress == 9
        assert broker.others == [] or not any(isinstance(m, BatchResult) for m in broker.others)


def test_while_everything_hangs(tmp_path: Path) -> None:
    """Pings are answered, and what waits for threads ends at its deadline: LATE."""
    hang = tmp_path / "hang"
    tier = memory(hang=str(hang))
    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        hang.touch()
        held = [(bytes((6, i)), i, space.expect(i, bytes((6, i)))) for i in range(tier.threads)]
        for number, row in enumerate(held):
            broker.send(space.get(number, [row]))
        eventually(lambda: broker.pong().busy, lambda busy: busy == tier.threads)
        late = broker.done(space.get(50, [(b"k", 10, space.expect(10, b"k"))], deadline_ms=1))
        assert (late.number, late.outcomes.tolist()) == (50, [Outcome.LATE])
        given_up = space.expect(11, b"m")
        broker.send(space.get(51, [(b"m", 11, given_up)]))
        space.set(11, SlotState.DRAINING, b"m", given_up)
        done = broker.wait_for(BatchResult)
        assert (done.number, done.outcomes.tolist()) == (51, [GONE])
        assert broker.pong().progress == 2
        hang.unlink()
        ends = {broker.wait_for(BatchResult).number for _ in held}
        assert ends == set(range(tier.threads))


def test_a_deadline_in_the_past(broker: FakeBroker, tier: MemoryTier) -> None:
    """An order whose deadline has passed is LATE."""
    space = broker.spaces[0]
    row = (b"k", 0, space.store(0, b"k"))
    assert broker.outcomes(space.put(1, [row], deadline_ms=0)) == [Outcome.LATE]
    assert tier.capacity().chunks == 0


@pytest.mark.parametrize("error", [TierError("no disk"), ValueError("a bug"), OSError(5, "EIO")])
def test_a_backend_that_raises(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    """Whatever a backend raises, the batch FAILED, the log says why, and the next one works."""
    tier = Hooked(BackendOptions("", {}))

    def fail() -> None:
        raise error

    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        row = (b"k", 0, space.store(0, b"k"))
        tier.before_put = fail
        done = broker.done(space.put(1, [row]))
        assert done.outcomes.tolist() == [Outcome.FAILED]
        assert str(error.args[-1]) in done.error
        assert str(error.args[-1]) in caplog.text
        tier.before_put = None
        assert broker.outcomes(space.put(2, [row])) == [OK]


def test_a_backend_that_answers_too_little() -> None:
    """Outcomes that are not one for each chunk fail the batch."""

    class Short(MemoryTier):
        def put(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
            return super().put(chunks, deadline)[:-1]

    with FakeBroker(Short(BackendOptions("", {}))) as broker:
        space = broker.spaces[0]
        space.open()
        done = broker.done(space.put(1, [(b"k", 0, space.store(0, b"k"))]))
        assert done.outcomes.tolist() == [Outcome.FAILED]
        assert "shorter" in done.error


def test_a_namespace_that_cannot_begin(caplog: pytest.LogCaptureFixture) -> None:
    """Its orders FAILED, others work, and it is tried again until it begins."""

    class Refusing(MemoryTier):
        fails = True

        def note_salt(self, namespace: bytes, salt: bytes, *, reset: bool = False) -> bytes:
            if self.fails and namespace.startswith(b"A"):
                raise TierError("no room for a salt")
            return super().note_salt(namespace, salt, reset=reset)

    tier = Refusing(BackendOptions("", {}))
    with FakeBroker(tier) as broker:
        bad, good = broker.spaces
        broker.send(bad.order(), (bad.fd,))
        done = broker.done(bad.put(1, [(b"k", 0, bad.store(0, b"k"))]))
        assert done.outcomes.tolist() == [Outcome.FAILED]
        assert "no room for a salt" in done.error
        assert broker.pong().error == "no room for a salt"
        good.open()
        assert broker.outcomes(good.put(2, [(b"k", 0, good.store(0, b"k"))])) == [OK]
        tier.fails = False
        assert broker.wait_for(NamespaceOpened).namespace == bad.name
        assert broker.outcomes(bad.put(3, [(b"k", 0, bad.store(0, b"k"))])) == [OK]
        assert broker.pong().error == ""
    assert caplog.text.count("cannot be opened") == 1


def test_orders_for_what_is_not_open(broker: FakeBroker) -> None:
    """They are no error: a namespace may have been closed meanwhile."""
    space = broker.spaces[0]
    broker.send(CloseNamespace(namespace=b"?" * 16))
    broker.send(NewSalt(namespace=b"?" * 16, salt=b"4"))
    broker.send(Drop(namespace=b"?" * 16, keys=(b"k",)))
    assert broker.outcomes(space.put(2, [(b"k", 0, space.store(0, b"k"))])) == [OK]
    assert broker.outcomes(space.put(3, [])) == []


@pytest.mark.parametrize("asked", [b"", b"chosen.."])
def test_the_salts_of_a_backend(asked: bytes) -> None:
    """It notes the broker's salt, or one that is drawn; what it had under another is dropped."""
    told: list[tuple[str, bytes]] = []

    class Noting(MemoryTier):
        def salt(self, namespace: bytes) -> bytes:
            return noted.get(namespace, b"")

        def note_salt(self, namespace: bytes, salt: bytes, *, reset: bool = False) -> bytes:
            del reset
            before = noted.get(namespace, b"")
            noted[namespace] = salt
            return before

        def drop_space(self, space: Space) -> None:
            told.append(("drop", space.id))

        def open_space(self, space: Space) -> None:
            told.append(("begin", space.id))

    noted: dict[bytes, bytes] = {}
    with FakeBroker(Noting(BackendOptions("", {}))) as broker:
        space = broker.spaces[0]
        first = space.open(asked)
        assert len(first) == 8
        assert asked in {b"", first}
        assert noted == {space.name: first}
        broker.held()
    with FakeBroker(Noting(BackendOptions("", {}))) as broker:
        assert space.name == broker.spaces[0].name
        assert broker.spaces[0].open(b"") == first
        broker.held()
        assert broker.spaces[0].open(b"another.") == b"another."
    names = [space_id(space.name, salt) for salt in (first, b"another.")]
    assert told == [
        *(("begin", names[0]), ("begin", names[0])),
        *(("drop", names[0]), ("begin", names[1])),
    ]


def test_orders_before_it_has_begun(tmp_path: Path) -> None:
    """Orders for a namespace that is still beginning wait for that."""
    hang = tmp_path / "hang"
    hang.touch()
    with FakeBroker(memory(hang=str(hang))) as broker:
        space = broker.spaces[0]
        broker.send(space.order(), (space.fd,))
        broker.send(space.put(1, [(b"k", 0, space.store(0, b"k"))]))
        assert broker.pong().busy == 0
        hang.unlink()
        assert broker.wait_for(NamespaceOpened)
        assert broker.wait_for(BatchResult).outcomes.tolist() == [OK]


def test_a_reset_before_it_has_begun(tmp_path: Path) -> None:
    """A reset while a namespace begins: only the last salt is said, orders of before are GONE."""
    hang = tmp_path / "hang"
    hang.touch()
    with FakeBroker(memory(hang=str(hang))) as broker:
        space = broker.spaces[0]
        broker.send(space.order(b"1"), (space.fd,))
        broker.send(space.put(0, [(b"k", 0, space.store(0, b"k"))]))
        broker.send(NewSalt(namespace=space.name, salt=b"2"))
        assert broker.wait_for(BatchResult).outcomes.tolist() == [GONE]
        hang.unlink()
        assert broker.wait_for(NamespaceOpened).salt == b"2"
        assert broker.wait_for(ScanResult).salt == b"2"
        assert broker.outcomes(space.put(1, [(b"k", 0, space.store(0, b"k"))])) == [OK]


def test_long_descriptions_are_bounded() -> None:
    """Descriptions beyond what an answer holds are left out; the chunks are there."""
    tier = Hooked(BackendOptions("", {}))

    def enlarge(chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            said = unseal(chunk.head, chunk.space, chunk.key)
            chunk.head = seal(chunk.space, chunk.key, said.coverage, said.checksum, bytes(400_000))

    tier.after_get = enlarge
    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        keys = [bytes((7, i)) for i in range(6)]
        rows = [(key, slot, space.store(slot, key)) for slot, key in enumerate(keys)]
        assert broker.outcomes(space.put(1, rows)) == [OK] * 6
        up = [(key, slot, space.expect(slot, key)) for slot, key in enumerate(keys, 8)]
        done = broker.done(space.get(2, up))
        assert done.outcomes.tolist() == [OK] * 6
        assert [len(one) for one in done.descriptions] == [400_000] * 2 + [0] * 4


def test_stopping() -> None:
    """It finishes what a thread is in, begins nothing more, answers for all, and closes."""
    closed = threading.Event()

    class Closing(Hooked):
        def close(self) -> None:
            closed.set()

    tier = Closing(BackendOptions("", {}))
    inside, go_on = threading.Semaphore(0), threading.Event()

    def hold() -> None:
        inside.release()
        go_on.wait()

    tier.before_put = hold
    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        for number in range(6):
            key = bytes((8, number))
            broker.send(space.put(number, [(key, number, space.store(number, key))]))
        for _ in range(tier.threads - 1):
            inside.acquire()
        broker.send(StopTier())
        late = [broker.wait_for(BatchResult).outcomes.tolist() for _ in range(6 - tier.threads + 1)]
        assert late == [[Outcome.LATE]] * len(late)
        go_on.set()
        broker.join()
        ends = [broker.wait_for(BatchResult).outcomes.tolist() for _ in range(tier.threads - 1)]
        assert ends == [[OK]] * len(ends)
        assert closed.is_set()


def test_the_end_of_the_broker(tmp_path: Path) -> None:
    """When the broker's end of the link closes, the service ends, also while a thread hangs."""
    hang = tmp_path / "hang"
    broker = FakeBroker(memory(hang=str(hang)))
    with broker:
        space = broker.spaces[0]
        space.open()
        hang.touch()
        broker.send(space.get(1, [(b"k", 0, space.expect(0, b"k"))]))
        eventually(lambda: broker.pong().busy, lambda busy: busy == 1)
    hang.unlink()


def test_capacity_is_asked_elsewhere() -> None:
    """A backend whose capacity hangs keeps no ping waiting."""
    go_on = threading.Event()

    class Slow(MemoryTier):
        slow = False

        def capacity(self) -> Capacity:
            if self.slow:
                go_on.wait()
            return super().capacity()

    tier = Slow(BackendOptions("", {}))
    with FakeBroker(tier) as broker:
        tier.slow = True
        assert broker.pong().chunks == 0
        assert broker.pong().chunks == 0
        go_on.set()
