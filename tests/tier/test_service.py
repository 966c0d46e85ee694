"""The service of a tier's process, between a double in memory and a broker made by hand."""

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.errors import TierError
from kvd.logs import LineFormatter
from kvd.outcomes import Outcome
from kvd.tier.batches import HEAD_BYTES, Damaged, SealedHead, checksum_of, seal, space_id, unseal
from kvd.tier.contract import BackendOptions, Chunk, Space
from kvd.wire.tiering import BatchResult, NamespaceOpened, StopTier
from kvd_proto.directory import SlotState
from tests.daemon.hidden import assert_hidden
from tests.tier.areas import POISON
from tests.tier.broker import SHARES, FakeBroker
from tests.tier.doubles.memory_tier import MemoryTier
from tests.waiting import PATIENCE, eventually

OK, ABSENT, GONE, FAILED = Outcome.OK, Outcome.ABSENT, Outcome.GONE, Outcome.FAILED
POISONED = bytes((POISON,)) * sum(SHARES)
OPTIONS = BackendOptions("", {})


class Hooked(MemoryTier):
    """A double that calls the test before or after it does something."""

    before_put: Callable[[], object] | None = None
    after_put: Callable[[], object] | None = None
    before_get: Callable[[], object] | None = None
    after_get: Callable[[Sequence[Chunk]], object] | None = None
    is_closed = False

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

    def close(self) -> None:
        """See TierBackend."""
        self.is_closed = True


@pytest.fixture
def tier(tmp_path: Path) -> Hooked:
    """A double that hangs while the test's folder has a file named hang."""
    return Hooked(BackendOptions("", {"hang": str(tmp_path / "hang")}))


@pytest.fixture
def broker(tier: Hooked) -> Iterator[FakeBroker]:
    """A service around the double; its first namespace is open with a salt."""
    with FakeBroker(tier) as made:
        made.spaces[0].open()
        assert made.scan() == {}
        yield made


class Holding:
    """Threads wait inside a call of the backend until they are let go."""

    def __init__(self) -> None:
        self._inside, self._released = threading.Semaphore(0), threading.Event()
        self.release = self._released.set

    def __call__(self) -> None:
        """Wait, as a call of the backend."""
        self._inside.release()
        self._released.wait(PATIENCE)

    def wait_for(self, count: int) -> None:
        """Until so many threads are inside."""
        for _ in range(count):
            assert self._inside.acquire(timeout=PATIENCE)


@pytest.mark.parametrize("state", [SlotState.FREE, SlotState.WRITING, SlotState.DRAINING])
def test_a_put_looks_first(broker: FakeBroker, tier: Hooked, state: SlotState) -> None:
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
    assert broker.outcomes(space.put(1, space.store_all([b"k"]))) == [OK]
    generation = space.expect(1, b"k")
    space.set(1, state, b"k", generation)
    other = (b"k", 2, space.expect(2, b"another"))
    old = (b"k", 3, space.expect(3, b"k") - 1)
    assert broker.outcomes(space.get(2, [(b"k", 1, generation), other, old])) == [GONE] * 3
    assert [space.read(slot) for slot in (1, 2, 3)] == [POISONED] * 3


def test_slots_are_looked_at_afterwards(broker: FakeBroker, tier: Hooked) -> None:
    """A slot that moves on while its chunk is put or got: GONE, and nothing is kept."""
    space = broker.spaces[0]
    tier.after_put = lambda: space.store(0, b"new")
    assert broker.outcomes(space.put(1, space.store_all([b"k"]))) == [GONE]
    assert tier.capacity().chunks == 0
    tier.after_put = None
    assert broker.outcomes(space.put(2, space.store_all([b"k"]))) == [OK]
    (row,) = space.expect_all([b"k"])
    tier.before_get = lambda: space.set(row[1], SlotState.DRAINING, b"k", row[2])
    assert broker.outcomes(space.get(3, [row])) == [GONE]


def turn_bit(chunks: Sequence[Chunk]) -> None:
    """One bit of the first chunk is wrong."""
    chunks[0].shares[1][999] ^= 0x80


def cut_heads(chunks: Sequence[Chunk]) -> None:
    """Neither head is one."""
    chunks[0].head, chunks[1].head = b"", b"\0" * 100


def swap_heads(chunks: Sequence[Chunk]) -> None:
    """Each chunk has the other one's head."""
    chunks[0].head, chunks[1].head = chunks[1].head, chunks[0].head


@pytest.mark.parametrize(
    ("harm", "outcomes", "error", "logged"),
    [
        (turn_bit, [Outcome.CORRUPT, OK], "slot 8: ", "a damaged record is dropped, slot"),
        (cut_heads, [Outcome.CORRUPT] * 2, "slot 9: ", "a damaged record is dropped, slot"),
        (swap_heads, [ABSENT] * 2, "", "the record is of another chunk"),
    ],
)
def test_every_wrong_record_is_found_out(
    broker: FakeBroker,
    tier: Hooked,
    caplog: pytest.LogCaptureFixture,
    harm: Callable[[Sequence[Chunk]], None],
    outcomes: list[Outcome],
    error: str,
    logged: str,
) -> None:
    """Wrong bytes and a wrong head are CORRUPT, another chunk's head ABSENT; all are dropped.

    Neither the log nor the answer has any part of a key.
    """
    space, keys = broker.spaces[0], [b"SECRET-a", b"SECRET-b"]
    assert broker.outcomes(space.put(1, space.store_all(keys))) == [OK, OK]
    tier.after_get = harm
    with caplog.at_level(logging.WARNING):
        done = broker.done(space.get(2, space.expect_all(keys)))
    assert done.outcomes.tolist() == outcomes
    assert done.error[:8] == error
    assert tier.capacity().chunks == outcomes.count(OK)
    assert caplog.text.count(logged) == (outcomes.count(Outcome.CORRUPT) or 1)
    assert_hidden([done.error, caplog.text], b"SECR")


def test_a_fault_of_a_backend_shows_no_key(
    broker: FakeBroker, tier: Hooked, caplog: pytest.LogCaptureFixture
) -> None:
    """An exception that holds a key fails the batch; log and answer name it without the key."""
    space = broker.spaces[0]

    def fault() -> None:
        raise KeyError(b"SECRET")

    tier.before_get = fault
    with caplog.at_level(logging.WARNING):
        done = broker.done(space.get(1, space.expect_all([b"SECRET"])))
    assert done.outcomes.tolist() == [FAILED]
    assert done.error == "KeyError(b'…')"
    logged = LineFormatter("plain", "tier", {}).format(caplog.records[0])
    assert "a bug in the tier failed a GET" in logged
    assert "KeyError: b'…'" in logged
    assert_hidden([done.error, logged], b"SECR")


@pytest.mark.parametrize("error", [TierError("no disk"), ValueError("a bug"), OSError(5, "EIO")])
def test_a_backend_that_raises(
    broker: FakeBroker, tier: Hooked, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    """Whatever a backend raises, the batch FAILED, the log says why, and the next one works."""
    space = broker.spaces[0]

    def fail() -> None:
        raise error

    rows = space.store_all([b"k"])
    tier.before_put = fail
    done = broker.done(space.put(1, rows))
    assert done.outcomes.tolist() == [FAILED]
    assert str(error.args[-1]) in done.error
    assert str(error.args[-1]) in caplog.text
    tier.before_put = None
    assert broker.outcomes(space.put(2, rows)) == [OK]


def test_puts_leave_a_thread_for_gets(broker: FakeBroker, tier: Hooked) -> None:
    """While puts hang in all threads that they may have, gets are served."""
    space, hold = broker.spaces[0], Holding()
    assert broker.outcomes(space.put(0, space.store_all([b"k"]))) == [OK]
    tier.before_put = hold
    for number, row in enumerate(space.store_all([b"put-%d" % n for n in range(7)], 1), 1):
        broker.send(space.put(number, [row]))
    hold.wait_for(tier.threads - 1)  # a thread that gives way begins later than a get's
    done = broker.done(space.get(9, space.expect_all([b"k"])))
    assert (done.number, done.outcomes.tolist()) == (9, [OK])
    pong = broker.pong()
    assert pong.busy == tier.threads - 1
    assert pong.queued_bytes == (7 - pong.busy) * sum(SHARES)
    hold.release()
    assert [broker.wait_for(BatchResult).outcomes.tolist() for _ in range(7)] == [[OK]] * 7
    assert broker.pong().progress == 9


def test_puts_give_way(broker: FakeBroker, tier: Hooked) -> None:
    """The thread that carries a put has a tenth of others' share, that of a get has all of it."""
    nice = dict[str, int]()

    def note(kind: str) -> None:
        nice[kind] = os.getpriority(os.PRIO_PROCESS, 0)  # of the thread

    tier.before_put = lambda: note("put")
    tier.before_get = lambda: note("get")
    space = broker.spaces[0]
    assert broker.outcomes(space.put(1, space.store_all([b"k"]))) == [OK]
    assert broker.outcomes(space.get(2, space.expect_all([b"k"]))) == [OK]
    note("here")
    assert nice == {"put": min(19, nice["here"] + 10), "get": nice["here"], "here": nice["here"]}


def test_while_everything_hangs(broker: FakeBroker, tier: Hooked, tmp_path: Path) -> None:
    """Pings are answered, and what waits for threads ends at its deadline: LATE."""
    space, hang = broker.spaces[0], tmp_path / "hang"
    hang.touch()
    for number, row in enumerate(space.expect_all([b"%d" % n for n in range(tier.threads)], 0)):
        broker.send(space.get(number, [row]))
    eventually(lambda: broker.pong().busy, lambda busy: busy == tier.threads)
    late = broker.done(space.get(50, space.expect_all([b"k"], 10), deadline_ms=1))
    assert (late.number, late.outcomes.tolist()) == (50, [Outcome.LATE])
    (row,) = space.expect_all([b"m"], 11)
    broker.send(space.get(51, [row]))
    space.set(11, SlotState.DRAINING, b"m", row[2])
    done = broker.wait_for(BatchResult)
    assert (done.number, done.outcomes.tolist()) == (51, [GONE])
    assert broker.pong().progress == 2
    hang.unlink()
    ends = {broker.wait_for(BatchResult).number for _ in range(tier.threads)}
    assert ends == set(range(tier.threads))


def test_stopping(broker: FakeBroker, tier: Hooked) -> None:
    """It finishes what a thread is in, begins nothing more, answers for all, and closes."""
    space, hold = broker.spaces[0], Holding()
    tier.before_put = hold
    for number, row in enumerate(space.store_all([b"put-%d" % n for n in range(6)])):
        broker.send(space.put(number, [row]))
    num_begun = tier.threads - 1
    hold.wait_for(num_begun)
    broker.send(StopTier())
    for _ in range(6 - num_begun):
        assert broker.wait_for(BatchResult).outcomes.tolist() == [Outcome.LATE]
    hold.release()
    broker.join()
    for _ in range(num_begun):
        assert broker.wait_for(BatchResult).outcomes.tolist() == [OK]
    assert tier.is_closed


def test_long_descriptions_are_bounded(broker: FakeBroker, tier: Hooked) -> None:
    """Descriptions beyond what an answer holds are left out; the chunks are there."""

    def enlarge(chunks: Sequence[Chunk]) -> None:
        for chunk in chunks:
            head = unseal(chunk.head, chunk.space, chunk.key)
            chunk.head = seal(chunk.space, chunk.key, head.coverage, head.checksum, bytes(400_000))

    tier.after_get = enlarge
    space, keys = broker.spaces[0], [b"long-%d" % n for n in range(6)]
    assert broker.outcomes(space.put(1, space.store_all(keys))) == [OK] * 6
    done = broker.done(space.get(2, space.expect_all(keys)))
    assert done.outcomes.tolist() == [OK] * 6
    assert [len(one) for one in done.descriptions] == [400_000] * 2 + [0] * 4


def test_a_namespace_that_cannot_begin(caplog: pytest.LogCaptureFixture) -> None:
    """Its orders FAILED, others work, and it is tried again until it begins."""

    class Refusing(MemoryTier):
        fails = True

        def note_salt(self, namespace: bytes, salt: bytes, *, reset: bool = False) -> bytes:
            if self.fails and namespace.startswith(b"A"):
                raise TierError("no room for a salt")
            return super().note_salt(namespace, salt, reset=reset)

    tier = Refusing(OPTIONS)
    with FakeBroker(tier) as broker:
        bad, good = broker.spaces
        broker.send(bad.order(), (bad.fd,))
        done = broker.done(bad.put(1, bad.store_all([b"k"])))
        assert done.outcomes.tolist() == [FAILED]
        assert "no room for a salt" in done.error
        assert broker.pong().error == "no room for a salt"
        good.open()
        assert broker.outcomes(good.put(2, good.store_all([b"k"]))) == [OK]
        tier.fails = False
        assert broker.wait_for(NamespaceOpened).namespace == bad.name
        assert broker.outcomes(bad.put(3, bad.store_all([b"k"]))) == [OK]
        assert broker.pong().error == ""
    assert caplog.text.count("cannot be opened") == 1


@pytest.mark.parametrize("asked", [b"", b"chosen.."])
def test_the_salts_of_a_backend(asked: bytes) -> None:
    """It notes the broker's salt, or one that is drawn; what it had under another is dropped."""
    calls: list[tuple[str, bytes]] = []
    noted: dict[bytes, bytes] = {}

    class Noting(MemoryTier):
        def salt(self, namespace: bytes) -> bytes:
            return noted.get(namespace, b"")

        def note_salt(self, namespace: bytes, salt: bytes, *, reset: bool = False) -> bytes:
            del reset
            before, noted[namespace] = self.salt(namespace), salt
            return before

        def drop_space(self, space: Space) -> None:
            calls.append(("drop", space.id))

        def open_space(self, space: Space) -> None:
            calls.append(("open", space.id))

    with FakeBroker(Noting(OPTIONS)) as broker:
        name = broker.spaces[0].name
        salt = broker.spaces[0].open(asked)
        assert len(salt) == 8
        assert asked in {b"", salt}
        assert noted == {name: salt}
        broker.scan()
    with FakeBroker(Noting(OPTIONS)) as broker:
        assert broker.spaces[0].open(b"") == salt
        broker.scan()
        assert broker.spaces[0].open(b"another.") == b"another."
    old, new = space_id(name, salt), space_id(name, b"another.")
    assert calls == [("open", old), ("open", old), ("drop", old), ("open", new)]


HALF = st.integers(0, 2**16 - 1)
SPACES = st.builds(
    Space,
    st.binary(min_size=16, max_size=16),
    st.lists(st.integers(1, 2**40), min_size=1, max_size=8).map(tuple),
    st.just(4096),
)
KEYS = st.binary(min_size=1, max_size=48)
SEALED = st.builds(
    SealedHead, st.tuples(HALF, HALF, HALF), st.integers(0, 2**64 - 1), st.binary(max_size=300)
)


@given(SPACES, KEYS, SEALED, SPACES, KEYS)
def test_a_head_is_good_for_one_chunk_only(
    space: Space, key: bytes, head: SealedHead, other: Space, other_key: bytes
) -> None:
    """It says what was sealed, in the bytes that a space counts; for another chunk it is damaged.

    The other chunk has another key, space or size.
    """
    sealed = seal(space, key, head.coverage, head.checksum, head.description)
    assert len(sealed) == HEAD_BYTES + len(head.description)
    assert unseal(sealed, space, key) == head
    for place, name in (
        (space, other_key),
        (Space(other.id, space.share_bytes, 4096), key),
        (Space(space.id, other.share_bytes, 4096), key),
    ):
        if (place.id, place.chunk_bytes, name) != (space.id, space.chunk_bytes, key):
            with pytest.raises(Damaged):
                unseal(sealed, place, name)


def test_every_single_bit_of_a_record_counts() -> None:
    """A head with any one bit turned is damaged, and shares have another check word."""
    space = Space(b"n" * 16, (4096, 100), HEAD_BYTES + 40)
    head = bytearray(seal(space, b"key", (1, 2, 3), 99, b"description"))
    for bit in range(8 * len(head)):
        head[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            unseal(bytes(head), space, b"key")
        head[bit // 8] ^= 1 << bit % 8
    whole = bytearray(range(256)) * 2
    shares = memoryview(whole)[:300], memoryview(whole)[300:]
    checksum = checksum_of(shares)
    for bit in range(8 * len(whole)):
        whole[bit // 8] ^= 1 << bit % 8
        assert checksum_of(shares) != checksum
        whole[bit // 8] ^= 1 << bit % 8
    assert checksum_of(shares) == checksum
