"""Changes: readers say what lookups find at any interleaving with the writer, over all daemons."""

from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    rule,
    run_state_machine_as_test,
)

from kvd_client import Scheduler, scheduler_session
from kvd_client import changes as module
from kvd_client.changes import ChangeReader, ChunkLocation, Differences
from kvd_client.scheduler_session import ABSENT_SECONDS, ChangeSource, PublishedChanges
from kvd_proto.messages import Message, Reset, ResetDone
from tests.client.fake_daemon import FakeDaemon
from tests.proto.changing import KEYS, RING, Changing, InterruptedView, Operation, operations
from tests.waiting import DEADLINE, eventually

READERS = 3


class Listener:
    """A reader, and what somebody holds who applies its differences one by one."""

    def __init__(self) -> None:
        self.reader = ChangeReader(clock=lambda: 2**63)
        self.published: dict[bytes, ChunkLocation] = {}
        self.below: dict[bytes, ChunkLocation] = {}
        self.view: InterruptedView | None = None

    def attach(self, changing: Changing) -> None:
        """Follow the directory of now."""
        self.view = changing.view()
        self.reader.attach(self.view)

    def take(self, limit: int = 10**6, meanwhile: list[Operation] | None = None) -> Differences:
        """Apply the next differences."""
        if self.view is not None:
            self.view.meanwhile = meanwhile or []
        differences = self.reader.take(limit)
        assert differences.last_locations.keys() <= differences.stored_in_tiers.keys()
        assert self.view is not None or not differences.stored
        _apply(self.published, differences.stored, differences.removed)
        _apply(self.below, differences.stored_in_tiers, differences.removed_from_tiers)
        return differences

    def settle(self) -> None:
        """Take until there is nothing more."""
        for _ in range(100):
            if not self.reader.waiting:
                return
            self.take()
        raise AssertionError(f"never done: {self.reader!r}")


def _apply(
    published: dict[bytes, ChunkLocation], stored: dict[bytes, ChunkLocation], gone: list[bytes]
) -> None:
    """What differences of memory or of tiers make of what was told before."""
    for key in gone:
        assert published.pop(key, None) is not None, f"{key!r} was removed, and was not said"
    for key, place in stored.items():
        was = published.get(key)
        assert was is None or was[:4] != place[:4], f"{key!r} was stored twice at {place}"
        published[key] = place
    removed = set(gone)
    assert len(removed) == len(gone), "a key was removed twice"
    assert not removed & stored.keys(), "a key was removed and stored"


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """A snapshot has several pieces, and a call reads one or two of them."""
    monkeypatch.setattr(module, "PIECE_SLOTS", 5)
    monkeypatch.setattr(module, "MAX_SLOT_PIECES", 2)
    monkeypatch.setattr(module, "TIER_TABLE_PIECE", 5)
    monkeypatch.setattr(module, "MAX_PLACE_PIECES", 7)  # of 10


class ReadersMachine(RuleBasedStateMachine):
    """A writer and several readers, of a ring that holds 8 changes."""

    def __init__(self) -> None:
        super().__init__()
        self.changing = Changing()
        self.listeners = [Listener() for _ in range(READERS)]

    readers = st.integers(0, READERS - 1)

    @rule(operation=operations)
    def change(self, operation: Operation) -> None:
        """One change."""
        self.changing.apply(operation)

    @rule(some=st.lists(operations, min_size=4, max_size=2 * RING))
    def change_much(self, some: list[Operation]) -> None:
        """So many that the ring may overrun."""
        for operation in some:
            self.changing.apply(operation)

    @rule(warm=st.booleans())
    def restart(self, *, warm: bool) -> None:
        """A new daemon; who was attached reads the directory of the old one until it attaches."""
        self.changing.open(warm=warm)

    @rule(reader=readers)
    def attach(self, reader: int) -> None:
        """A reader follows the directory of now, once more maybe."""
        self.listeners[reader].attach(self.changing)

    @rule(reader=readers)
    def leave(self, reader: int) -> None:
        """A reader is detached: it goes on saying what it said."""
        listener = self.listeners[reader]
        listener.reader.detach()
        listener.view = None

    @rule(reader=readers)
    def forget(self, reader: int) -> None:
        """A reader takes all back."""
        listener = self.listeners[reader]
        listener.reader.forget()
        listener.published.clear()
        listener.below.clear()

    @rule(reader=readers)
    def withdraw(self, reader: int) -> None:
        """A reset or a long absence: a reader removes all that it has said."""
        listener = self.listeners[reader]
        self.leave(reader)
        listener.reader.withdraw()
        listener.settle()
        assert not listener.published
        assert not listener.below

    @rule(reader=readers, limit=st.integers(1, 12))
    def take(self, reader: int, limit: int) -> None:
        """A reader takes some."""
        self.listeners[reader].take(limit)

    @rule(
        reader=readers,
        limit=st.integers(1, 12),
        meanwhile=st.lists(operations, min_size=1, max_size=RING + 4),
    )
    def take_meanwhile(self, reader: int, limit: int, meanwhile: list[Operation]) -> None:
        """A reader takes some, and the directory changes while it reads a piece of it."""
        self.listeners[reader].take(limit, meanwhile)

    @rule(reader=readers)
    def settle(self, reader: int) -> None:
        """At quiescence a reader says what lookups find."""
        listener = self.listeners[reader]
        listener.attach(self.changing)
        self.at_rest(listener)

    @rule()
    def rest(self) -> None:
        """And so does each that is attached to the directory of now."""
        for listener in self.listeners:
            if listener.view is not None and listener.view.is_of(self.changing):
                self.at_rest(listener)

    def at_rest(self, listener: Listener) -> None:
        """What one reader says, is told and finds are the same."""
        in_memory, below = self.changing.found(), self.changing.below()
        listener.settle()
        assert {key: place[:4] for key, place in listener.published.items()} == in_memory
        assert {key: place[2:4] for key, place in listener.below.items()} == below
        assert not listener.reader.take()

    @invariant()
    def is_sound(self) -> None:
        """Nothing contradicts itself, and a reader holds no more than what is said."""
        self.changing.writer.check_integrity()

    def teardown(self) -> None:
        """At last all are right."""
        for listener in self.listeners:
            listener.attach(self.changing)
            self.at_rest(listener)


A, B = KEYS[:2]
STORE_A, STORE_B, DROP_A = ("store", 0, 0), ("store", 1, 0), ("drop", 0, 0)


def following(*some: Operation) -> tuple[Changing, Listener]:
    """A reader that has taken all of a directory with which this was done."""
    changing, listener = Changing(), Listener()
    for operation in some:
        changing.apply(operation)
    listener.attach(changing)
    listener.settle()
    return changing, listener


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("known", [False, True])
def test_it_is_said_where_a_chunk_was_that_went_down_and_left(known: bool) -> None:
    """Its description may still be there, whether it was told in memory before or not."""
    changing, listener = following(*[STORE_A] * known)
    for operation in [*[STORE_A] * (not known), STORE_B]:
        changing.apply(operation)
    place = changing.found()[A]
    for operation in (("keep", 0, 0), DROP_A, ("drop", 1, 0)):
        changing.apply(operation)
    differences = listener.take()
    assert differences.stored_in_tiers.keys() == differences.last_locations.keys() == {A}
    assert differences.last_locations[A][:4] == place
    assert differences.removed == [A] * known
    assert not listener.take()


@pytest.mark.usefixtures("small_pieces")
def test_a_chunk_that_stayed_is_not_taken_back() -> None:
    """A warm restart says nothing of the chunks that are there again, and removes the others."""
    changing, listener = following(STORE_A, STORE_B)
    changing.open(warm=True)
    changing.apply(DROP_A)
    listener.reader.detach()
    assert not listener.take()
    listener.attach(changing)
    taken: list[Differences] = []
    while listener.reader.waiting:
        taken.append(listener.take(1))
    assert [difference for difference in taken if difference] == [Differences({}, [A])]


@pytest.mark.hypothesis
@pytest.mark.usefixtures("small_pieces")
def test_readers_say_what_lookups_find() -> None:
    """Differences, applied one by one, are what lookups find, whatever comes between two calls."""
    run_state_machine_as_test(
        ReadersMachine, settings=settings(stateful_step_count=40, parent=settings.default)
    )


def all_changes(scheduler: Scheduler) -> tuple[set[bytes], set[bytes]]:
    """Keys that came, and keys that went, until there is nothing more."""
    stored: set[bytes] = set()
    removed: set[bytes] = set()
    while scheduler.changes_waiting:
        differences = scheduler.take_changes()
        removed |= set(differences.removed) - stored
        stored = (stored - set(differences.removed)) | differences.stored.keys()
    return stored, removed


def test_changes_are_what_lookups_find(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """What is READY at the attachment, and what comes and goes afterwards, whoever does it.

    An engine that has told routers that nothing is cached has all again, without removals.
    """
    assert scheduler.take_changes() == Differences()
    daemon.attach(scheduler)
    assert all_changes(scheduler) == ({b"ready"}, set())
    daemon.make_ready(b"new")
    daemon.make_ready(b"writing")
    assert scheduler.changes_waiting
    first = scheduler.take_changes(limit=1)
    assert first.stored.keys() == {b"new"}
    assert daemon.directory is not None
    daemon.directory.free([0])
    assert all_changes(scheduler) == ({b"writing"}, {b"ready"})
    scheduler.repeat_changes()
    assert all_changes(scheduler) == ({b"new", b"writing"}, set())


def test_a_daemons_successor_is_followed(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a daemon's death the differences are those to the next one's chunks."""
    monkeypatch.setattr(scheduler_session, "ABSENT_SECONDS", 3600.0)
    with FakeDaemon(runtime_dir) as first:
        scheduler = Scheduler(runtime_dir, "engine", deadline=DEADLINE)
        first.attach(scheduler)
        first.make_ready(b"lost")
        assert all_changes(scheduler) == ({b"ready", b"lost"}, set())
    with scheduler:
        eventually(lambda: not scheduler.attached)
        assert scheduler.take_changes() == Differences()
        with FakeDaemon(runtime_dir) as second:
            eventually(lambda: scheduler.connected)
            second.attach(scheduler)
            second.make_ready(b"new")
            assert all_changes(scheduler) == ({b"new"}, {b"lost"})


def test_a_reset_takes_all_back(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """A reset removes all that was said, and what is there after it is said."""
    daemon.attach(scheduler)
    assert all_changes(scheduler) == ({b"ready"}, set())
    directory = daemon.directory
    assert directory is not None

    def reset(_: Message) -> Message:
        directory.forget()
        daemon.make_ready(b"after")
        return ResetDone(dropped=1, deferred=0)

    daemon.replies[Reset] = reset
    assert scheduler.reset()
    eventually(lambda: scheduler.attached)
    assert all_changes(scheduler) == ({b"after"}, {b"ready"})


def test_a_long_absence_takes_all_back() -> None:
    """What was said stays for ten seconds without a daemon, counted from the first of them."""
    now, changing = 1000.0, Changing()
    changes = PublishedChanges(lambda: now)
    for operation in (STORE_A, STORE_B):
        changing.apply(operation)
    source = ChangeSource(changing.view(), None)
    changes.switch(source)
    assert changes.take(100).stored.keys() == {A, B}
    changes.switch(None)
    now += ABSENT_SECONDS - 1
    changes.switch(None)
    assert not changes.take(100)
    now += 1
    assert set(changes.take(100).removed) == {A, B}
    assert not changes.waiting
    changes.switch(source)
    assert changes.take(100).stored.keys() == {A, B}
