"""With `scrub` the bytes of chunks are not in the pool any more; without it they are."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from kvd.broker.keep import area_name
from kvd_client import LookupResult
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import TENSORS, Engine, content, keys_of, make_layout
from tests.daemon.test_engines import wait_hit
from tests.waiting import eventually

POOL = "8MiB"
SCRUB = ("--scrub", "yes")
KEEP = ("--keep-pool", "yes", *SCRUB)


def secrets_of(key: bytes, world_size: int = 2) -> list[bytes]:
    """What only the pages of this chunk begin with."""
    return [
        content(key, rank, tensor, inside)[:64].tobytes()
        for rank in range(world_size)
        for tensor in range(TENSORS)
        for inside in range(make_layout().blocks_per_chunk)
    ]


def pages_left(daemon: Daemon, keys: list[bytes]) -> dict[bytes, int]:
    """How many pages of which of the chunks the pool's file holds, read as its owner can."""
    pool = (Path("/dev/shm") / area_name(daemon.runtime_dir) / "pool").read_bytes()
    found = {key: sum(secret in pool for secret in secrets_of(key)) for key in keys}
    return {key: pages for key, pages in found.items() if pages}


def command(daemon: Daemon, *words: str) -> list[str]:
    """A kvd command for this daemon."""
    return [sys.executable, "-m", "kvd", *words, "--runtime-dir", str(daemon.runtime_dir)]


def kvd(daemon: Daemon, *words: str) -> None:
    """Run a command; it must succeed."""
    subprocess.run(command(daemon, *words), check=True, timeout=60, stdout=subprocess.PIPE)


def wait_until(daemon: Daemon, is_so: Callable[[], bool]) -> None:
    """Until something holds that nobody announces."""
    eventually(daemon.status, lambda _report: is_so())


def wait_clean(daemon: Daemon) -> None:
    """Until nothing is left to be wiped."""
    wait_until(daemon, lambda: not daemon.status()["pool"]["scrub_left_bytes"])


def stored(engine: Engine, keys: list[bytes]) -> None:
    """Store the keys and wait until all are READY."""
    for at in range(0, len(keys), 10):
        engine.store(keys[at : at + 10])
    wait_hit(engine, keys)


def lane_of(daemon: Daemon) -> psutil.Process:
    """The host lane's process."""
    (lane,) = daemon.status()["lanes"]
    return psutil.Process(lane["pid"])


@pytest.mark.parametrize("scrub", ["yes", "no"])
@pytest.mark.parametrize("words", [("clear", "--yes"), ("evict", "--older-than", "0s")])
@pytest.mark.parametrize("stays", [True, False])
def test_what_an_operator_drops_is_gone_when_the_command_ends(
    start_daemon: StartDaemon, scrub: str, words: tuple[str, ...], stays: bool
) -> None:
    """Cleared or evicted, with an engine or without: no byte is left, but with scrub off all."""
    daemon = start_daemon("--scrub", scrub, cpu_bytes=POOL)
    keys = keys_of("secret", 20)
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        stored(engine, keys)
        assert len(pages_left(daemon, keys)) == 20
        if stays:
            kvd(daemon, *words)
            left = pages_left(daemon, keys)
            stored(engine, keys)
            assert engine.load(keys[:10]) == (10, 0)
    if not stays:
        wait_until(daemon, lambda: not daemon.status()["engines"])
        kvd(daemon, *words)
        left = pages_left(daemon, keys)
    assert len(left) == (0 if scrub == "yes" else 20)
    assert (daemon.status()["pool"]["scrubbed_bytes"] > 0) == (scrub == "yes")


@pytest.mark.parametrize("scrub", ["yes", "no"])
def test_room_changes_hands_without_what_was_in_it(start_daemon: StartDaemon, scrub: str) -> None:
    """A model that takes another's room gets it zeroed: only what is still cached is there."""
    daemon = start_daemon("--scrub", scrub, cpu_bytes=POOL)
    old, new = keys_of("old", 240), keys_of("new", 200)
    with Engine(daemon.runtime_dir, name="old", model="old").wait_attached() as engine:
        stored(engine, old)
    wait_until(daemon, lambda: not daemon.status()["engines"])
    with Engine(daemon.runtime_dir, name="new", model="new").wait_attached() as engine:
        missing = new
        for _ in range(300):  # what does not find room at once is asked for again
            engine.store(missing[:10], group=1)  # which fills half of each slot
            found = engine.scheduler.lookup_many(new)
            missing = [k for k, hit in zip(new, found, strict=True) if hit is LookupResult.MISS]
            if not missing:
                break
        wait_hit(engine, new)
        assert engine.load(new[-10:], group=1) == (10, 0)
    wait_clean(daemon)
    (kept,) = (n for n in daemon.status()["namespaces"] if n["model"] == "old")
    left = pages_left(daemon, old)
    if scrub == "yes":
        assert len(left) == kept["chunks"]["ready"] < 60
    else:
        assert len(left) > kept["chunks"]["ready"]


def test_a_namespace_that_ends_leaves_nothing(start_daemon: StartDaemon) -> None:
    """The chunks of a temporary engine are wiped when it has left; nobody asked for it."""
    daemon = start_daemon(*SCRUB, cpu_bytes=POOL)
    keys = keys_of("passing", 20)
    with Engine(daemon.runtime_dir, temporary=True).wait_attached() as engine:
        stored(engine, keys)
        assert len(pages_left(daemon, keys)) == 20
    wait_until(daemon, lambda: not daemon.status()["namespaces"])
    wait_clean(daemon)
    assert not pages_left(daemon, keys)


def test_a_lane_that_dies_first_leaves_it_to_the_next(start_daemon: StartDaemon) -> None:
    """What a lane was told to wipe and has not is wiped by its successor; the command waits."""
    daemon = start_daemon(*SCRUB, "--lane-timeout-seconds", "60", cpu_bytes=POOL)
    keys = keys_of("secret", 20)
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        stored(engine, keys)
        lane = lane_of(daemon)
        lane.suspend()
        with subprocess.Popen(command(daemon, "clear", "--yes")) as clearing:
            wait_until(daemon, lambda: daemon.status()["pool"]["scrub_left_bytes"] > 0)
            assert len(pages_left(daemon, keys)) == 20
            assert clearing.poll() is None
            lane.kill()
            assert clearing.wait(30) == 0
        assert not pages_left(daemon, keys)


def test_a_killed_daemon_leaves_it_to_the_next(start_daemon: StartDaemon) -> None:
    """What nobody had wiped at the kill is wiped by the next daemon, and what it kept is whole."""
    first = start_daemon(*KEEP, "--lane-timeout-seconds", "60", cpu_bytes=POOL)
    secret, half, kept = keys_of("secret", 60), keys_of("half", 5), keys_of("kept", 20)
    with (
        Engine(first.runtime_dir, name="a", model="a").wait_attached() as one,
        Engine(first.runtime_dir, name="b", model="b").wait_attached() as two,
    ):
        stored(one, secret)
        stored(two, kept)
        ticket = two.scheduler.prepare_store(half)
        jobs = two.submit("store", [0], two.fill(half, 1), ticket.slots, ticket.generations)
        two.results(jobs)
        lane_of(first).suspend()
        with subprocess.Popen(
            command(first, "clear", "--yes", "--namespace", "a"), stderr=subprocess.PIPE
        ) as clearing:
            wait_until(first, lambda: first.status()["pool"]["scrub_left_bytes"] > 0)
            first.stop(signal.SIGKILL)
            assert clearing.wait(30) != 0
    assert len(pages_left(first, secret)) == 60
    assert len(pages_left(first, half)) == 5
    second = start_daemon(*KEEP, cpu_bytes=POOL)
    wait_clean(second)
    assert not pages_left(second, secret + half)
    assert len(pages_left(second, kept)) == 20
    with Engine(second.runtime_dir, name="b", model="b").wait_attached() as two:
        assert two.load(kept[:10]) == (10, 0)
        assert two.load(kept[10:]) == (10, 0)
        stored(two, half)


def test_a_daemon_that_takes_over_wipes_what_the_other_gave_up(start_daemon: StartDaemon) -> None:
    """A chunk that was half stored at the handover is zeroed, and one that was whole is kept."""
    first = start_daemon(*KEEP, "--drain-seconds", "1", cpu_bytes=POOL)
    half, kept = keys_of("half", 5), keys_of("kept", 20)
    with Engine(first.runtime_dir).wait_attached() as engine:
        stored(engine, kept)
        ticket = engine.scheduler.prepare_store(half)
        jobs = engine.submit("store", [0], engine.fill(half, 1), ticket.slots, ticket.generations)
        engine.results(jobs)
        assert len(pages_left(first, half)) == 5
        second = start_daemon(*KEEP, "--handover", cpu_bytes=POOL, ready=False)
        assert first.process.wait(timeout=30) == 0
        second.wait_ready()
        wait_clean(second)
        assert not pages_left(second, half)
        engine.wait_attached()
        assert engine.load(kept[:10]) == (10, 0)
        assert engine.load(kept[10:]) == (10, 0)


def test_a_pool_that_is_not_gone_on_with_is_given_back(start_daemon: StartDaemon) -> None:
    """Started cold, the daemon takes fresh memory, of which the kernel has zeroed every page."""
    first = start_daemon(*KEEP, cpu_bytes=POOL)
    keys = keys_of("secret", 20)
    with Engine(first.runtime_dir).wait_attached() as engine:
        stored(engine, keys)
        first.stop(signal.SIGKILL)
    assert len(pages_left(first, keys)) == 20
    second = start_daemon(*KEEP, "--cold", cpu_bytes=POOL)
    assert second.status()["pool"]["scrub_left_bytes"] == 0
    assert not pages_left(second, keys)
