"""The lock on a runtime directory: one daemon has it, and the next one waits for it."""

import os
import select
from pathlib import Path

import pytest

from kvd.broker.runtime_dir import RuntimeDir, Turn
from kvd.errors import AlreadyRunning

PATIENCE = 60.0


@pytest.fixture
def held(runtime_dir: Path) -> RuntimeDir:
    """A directory that is locked."""
    runtime = RuntimeDir(runtime_dir)
    runtime.lock()
    return runtime


@pytest.mark.parametrize("to_another", [False, True], ids=["removed", "left"])
def test_who_waits_has_the_lock_of_the_file_that_is_there(
    held: RuntimeDir, *, to_another: bool
) -> None:
    """Whether the file is removed or stays: afterwards nobody else can lock the directory."""
    next_one = RuntimeDir(held.path)
    turn = Turn(next_one)
    assert not turn.wait(0.05)
    held.release(to_another=to_another)
    assert turn.wait(PATIENCE)
    next_one.lock_after(turn)
    assert next_one.holder() == str(os.getpid())
    with pytest.raises(AlreadyRunning, match=f"pid {os.getpid()} serves"):
        RuntimeDir(held.path).lock()
    next_one.release()
    assert list(held.path.iterdir()) == []


def test_the_lock_is_there_at_once_where_it_is_free(runtime_dir: Path) -> None:
    """Nobody is waited for."""
    runtime_dir.mkdir()
    turn = Turn(RuntimeDir(runtime_dir))
    assert turn.wait(PATIENCE)
    assert turn.fd >= 0
    os.close(turn.fd)
    turn.close()


def test_of_many_that_wait_one_has_it(held: RuntimeDir) -> None:
    """The others go on waiting, each for the one before, until all have had their turn."""
    places = [RuntimeDir(held.path) for _ in range(4)]
    turns = {turn.done_fd: (turn, place) for place in places for turn in [Turn(place)]}
    poller = select.poll()
    for fd in turns:
        poller.register(fd, select.POLLIN)
    held.release()
    while turns:
        ((fd, _),) = poller.poll(PATIENCE * 1000)
        poller.unregister(fd)
        turn, place = turns.pop(fd)
        place.lock_after(turn)
        assert not poller.poll(0)
        place.release()
