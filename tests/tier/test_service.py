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
from kvd.tier.contract import BackendOptions, Chunk, Space
from kvd.wire.tiering import (
    BatchResult,
    NamespaceOpened,
    StopTier,
)
from kvd_proto.directory import SlotState
from tests.daemon.hidden import assert_hidden
from tests.tier.areas import POISON
from tests.tier.broker import SHARES, FakeBroker
from tests.tier.doubles.memory_tier import MemoryTier
from tests.waiting import PATIENCE, eventually

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


def test_slots_are_looked_at_afterwards() -> None:
    """A slot that moves on while its chunk is put or got: GONE, and nothing is kept."""
    tier = Hooked(BackendOptions("", {}))
    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        row = (b"k", 0, space.store(0, b"k"))
        tier.after_put = lambda: space.store(0, b"new")
        assert broker.outcomes(space.put(1, [row])) == [GONE]
        assert tier.capacity().chunks == 0
        tier.after_put = None
        assert broker.outcomes(space.put(2, [(b"k", 0, space.store(0, b"k"))])) == [OK]
        generation = space.expect(1, b"k")
        tier.before_get = lambda: space.set(1, SlotState.DRAINING, b"k", generation)
        assert broker.outcomes(space.get(3, [(b"k", 1, generation)])) == [GONE]


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


def test_puts_leave_a_thread_for_gets() -> None:
    """While puts hang in all threads that they may have, gets are served."""
    tier = Hooked(BackendOptions("", {}))
    inside, go_on = threading.Semaphore(0), threading.Event()

    def hold() -> None:
        inside.release()
        go_on.wait(PATIENCE)

    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        assert broker.outcomes(space.put(0, [(b"k", 0, space.store(0, b"k"))])) == [OK]
        tier.before_put = hold
        for number in range(1, 8):
            key = bytes((4, number))
            broker.send(space.put(number, [(key, number, space.store(number, key))]))
        for _ in range(tier.threads - 1):  # a thread that gives way begins later than a get's
            assert inside.acquire(timeout=PATIENCE)
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
        go_on.wait(PATIENCE)

    tier.before_put = hold
    with FakeBroker(tier) as broker:
        space = broker.spaces[0]
        space.open()
        for number in range(6):
            key = bytes((8, number))
            broker.send(space.put(number, [(key, number, space.store(number, key))]))
        for _ in range(tier.threads - 1):
            assert inside.acquire(timeout=PATIENCE)
        broker.send(StopTier())
        late = [broker.wait_for(BatchResult).outcomes.tolist() for _ in range(6 - tier.threads + 1)]
        assert late == [[Outcome.LATE]] * len(late)
        go_on.set()
        broker.join()
        ends = [broker.wait_for(BatchResult).outcomes.tolist() for _ in range(tier.threads - 1)]
        assert ends == [[OK]] * len(ends)
        assert closed.is_set()
