"""What `take_changes` returns, over attachments, resets and daemons."""

import os
from collections.abc import Iterable
from pathlib import Path

import pytest

from kvd_client import Scheduler, UsageError
from kvd_client.changes import ChunkLocation, Differences
from kvd_client.scheduler_session import ABSENT_SECONDS, ChangeSource, PublishedChanges
from kvd_proto.descriptions import (
    Description,
    encode,
    pack_header,
    pack_record,
    record_offset,
)
from kvd_proto.directory import DirectoryView
from kvd_proto.messages import Message, Reset, ResetDone
from tests.client.fake_daemon import RECORD_BYTES, FakeDaemon
from tests.proto.changing import KEYS, Changing
from tests.waiting import DEADLINE, eventually


def all_changes(scheduler: Scheduler) -> tuple[set[bytes], set[bytes]]:
    """Keys that came, and keys that went, until there is nothing more."""
    return summed(scheduler, scheduler.take_changes)


def summed(source: Scheduler | PublishedChanges, take: object) -> tuple[set[bytes], set[bytes]]:
    """The same of anything that has changes."""
    assert callable(take)
    waiting = "changes_waiting" if isinstance(source, Scheduler) else "waiting"
    stored: set[bytes] = set()
    removed: set[bytes] = set()
    while getattr(source, waiting):
        differences = take()
        removed |= set(differences.removed) - stored
        stored = (stored - set(differences.removed)) | differences.stored.keys()
    return stored, removed


def test_changes_are_what_lookups_find(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """What is READY at the attachment, and what comes and goes afterwards, whoever does it."""
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


@pytest.fixture
def every_absence_is_short(monkeypatch: pytest.MonkeyPatch) -> None:
    """No absence in this test counts as long."""
    monkeypatch.setattr("kvd_client.scheduler_session.ABSENT_SECONDS", 3600.0)


@pytest.mark.usefixtures("every_absence_is_short")
def test_a_daemons_successor_is_followed(runtime_dir: Path) -> None:
    """After a daemon's death the differences are those to the next one's chunks."""
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


def test_all_can_be_said_anew(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """Who has told others that nothing is cached can have all again, without removals."""
    daemon.attach(scheduler)
    daemon.make_ready(b"new")
    assert all_changes(scheduler) == ({b"ready", b"new"}, set())
    scheduler.repeat_changes()
    assert all_changes(scheduler) == ({b"ready", b"new"}, set())


def test_descriptions_are_read_by_place(daemon: FakeDaemon, scheduler: Scheduler) -> None:
    """Of a chunk that was found its description is read, of one that is gone none."""
    found = Description(parent=b"", hashes=(b"h",), tokens=bytes(8), block_size=2)
    daemon.descriptions = fd = os.memfd_create("descriptions")
    os.pwrite(fd, pack_header(RECORD_BYTES), 0)
    os.pwrite(fd, pack_record(0, 1, encode(found)), record_offset(0, RECORD_BYTES))
    assert scheduler.description(ChunkLocation(0, 1, 0, 1, 0)) is None
    daemon.attach(scheduler)
    where = scheduler.take_changes().stored[b"ready"]
    assert scheduler.description(where) == found
    assert scheduler.description(where._replace(generation=2)) is None
    with pytest.raises(UsageError, match="take_changes"):
        scheduler.description((0, 1, 0, 1, 0))  # type: ignore[arg-type]
    os.close(fd)


def test_a_closed_scheduler_has_no_changes(scheduler: Scheduler) -> None:
    """Once it is closed that is said."""
    with pytest.raises(UsageError, match="limit"):
        scheduler.take_changes(limit=0)
    scheduler.close()
    for call in (scheduler.take_changes, scheduler.repeat_changes):
        with pytest.raises(UsageError, match="closed"):
            call()


# ------------------------------------------------------------------- by the clock


class Clock:
    """Seconds that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        """Now."""
        return self.now


def following(stored: Iterable[int]) -> tuple[Clock, Changing, PublishedChanges]:
    """Changes of a directory with these chunks, all of which were told."""
    clock, changing = Clock(), Changing()
    changes = PublishedChanges(clock)
    for key in stored:
        changing.apply(("store", key, 0))
    changes.switch(source_of(changing))
    told, _ = summed(changes, lambda: changes.take(100))
    assert told == {KEYS[key] for key in stored}
    return clock, changing, changes


def source_of(changing: Changing) -> ChangeSource:
    """To read."""
    return ChangeSource(DirectoryView(memoryview(changing.buffer).toreadonly()), None)


def test_a_long_absence_takes_all_back() -> None:
    """What was said stays for ten seconds without a daemon, counted from the first of them."""
    clock, changing, changes = following([0, 1])
    changes.switch(None)
    assert changes.take(100) == Differences()
    clock.now += ABSENT_SECONDS - 1
    changes.switch(None)
    assert changes.take(100) == Differences()
    clock.now += 1
    assert summed(changes, lambda: changes.take(1)) == (set(), set(KEYS[:2]))
    changes.switch(source_of(changing))
    assert summed(changes, lambda: changes.take(100)) == (set(KEYS[:2]), set())
