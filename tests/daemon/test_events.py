"""The daemon publishes KV events: what subscribers believe is what engines find."""

import contextlib
import signal
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil
import pytest

from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.serving import run_kvd
from tests.daemon.subscribers import Subscriber, blocks_of, described, found
from tests.processes import children_running, frozen, has_ended
from tests.routers.wire import BlockStored
from tests.waiting import PATIENCE, eventually

TOPIC = "kv@engine@model"
KEEP = ("--keep-pool", "yes")


def free_port() -> int:
    """A port that nobody has now."""
    with socket.create_server(("127.0.0.1", 0)) as found_one:
        port: int = found_one.getsockname()[1]
        return port


@pytest.fixture
def endpoint() -> str:
    """Where a daemon publishes that may be started again."""
    return f"tcp://127.0.0.1:{free_port()}"


@contextlib.contextmanager
def engine_of(daemon: Daemon, name: str = "engine", model: str = "model") -> Iterator[Engine]:
    """An attached engine of one rank."""
    with Engine(daemon.runtime_dir, name, world_size=1, model=model) as engine:
        yield engine.wait_attached(daemon)


def store(engine: Engine, keys: list[bytes]) -> None:
    """Store chunks that must be READY then."""
    for at in range(0, len(keys), 10):
        engine.store(keys[at : at + 10], describe=described)
    wait_hit(engine, keys)


def publisher_of(daemon: Daemon) -> psutil.Process:
    """The process that serves, once it does."""
    report = eventually(lambda: daemon.status()["publisher"], lambda said: said["up"])
    return psutil.Process(report["pid"])


def wait_subscribed(daemon: Daemon, topics: int = 1) -> None:
    """Until there is a subscription, and a topic for each engine: nothing is told again then."""
    eventually(
        lambda: daemon.status()["publisher"],
        lambda said: said["subscriptions"] == 1 and said["topics"] == topics,
    )


def test_what_is_stored_is_told_with_all_that_a_router_needs(
    start_daemon: StartDaemon, endpoint: str
) -> None:
    """Hashes, tokens and sizes, on the engine's topic, numbered without gaps."""
    daemon = start_daemon("--events", endpoint)
    keys = keys_of("told", 30)
    with engine_of(daemon) as engine, Subscriber(endpoint) as router:
        store(engine, keys)
        router.until_held(TOPIC, blocks_of(keys))
        assert router.gaps == 0
        for message in router.messages:
            assert message.batch.data_parallel_rank == 0
            for event in message.batch.events:
                if isinstance(event, BlockStored):
                    place = event.medium, event.locality, event.ownership
                    assert place == ("CPU", "LOCAL", "kvd")
                    assert (event.block_size, len(event.token_ids)) == (16, 32)
                    assert event.kv_cache_spec_kind == "full_attention"


def test_a_subscriber_that_comes_late_is_told_everything(
    start_daemon: StartDaemon, endpoint: str
) -> None:
    """Also by a second one that wants one topic only; the first one counts nothing twice."""
    daemon = start_daemon("--events", endpoint)
    keys = keys_of("late", 40)
    with engine_of(daemon) as engine, engine_of(daemon, "other") as other:
        store(engine, keys)
        with Subscriber(endpoint) as early:
            for topic in (TOPIC, "kv@other@model"):
                early.until_held(topic, blocks_of(keys))
            with Subscriber(endpoint, "kv@other@") as late:
                late.until_held("kv@other@model", blocks_of(keys))
                assert not late.told.held(TOPIC)
            more = keys_of("more", 5)
            store(other, more)
            early.until_held(TOPIC, blocks_of(keys + more))
            assert early.gaps == 0
            assert early.told.repeated == 0


def test_what_goes_is_taken_back(start_daemon: StartDaemon, endpoint: str) -> None:
    """Chunks that are evicted, cleared by the operator, and all of an engine that leaves."""
    daemon = start_daemon("--events", endpoint, cpu_bytes="1MiB")
    first, keys = keys_of("first", 40), keys_of("evicting", 80)
    with Subscriber(endpoint) as router, engine_of(daemon, "stays") as engine:
        with engine_of(daemon, "leaves") as leaving:
            store(leaving, first)
            engine.store(keys, describe=described)
            wait_hit(engine, keys[-5:])
            held = found(engine, first + keys)
            assert held < blocks_of(first + keys), "some were evicted"
            for topic in ("kv@leaves@model", "kv@stays@model"):
                router.until_held(topic, held)
        router.until_held("kv@leaves@model", set())
        assert router.told.held("kv@stays@model") == held
        assert run_kvd("clear", "--runtime-dir", str(daemon.runtime_dir), "--yes").returncode == 0
        router.until_held("kv@stays@model", set())
        assert router.gaps == router.told.repeated == 0
        assert router.told.events["AllBlocksCleared"] == 0


def test_missed_messages_are_sent_again(start_daemon: StartDaemon, endpoint: str) -> None:
    """From a number on, of all topics or of one; what is not kept any more begins anew."""
    again = f"tcp://127.0.0.1:{free_port()}"
    daemon = start_daemon("--events", endpoint, "--events-replay", again)
    keys = keys_of("missed", 30)
    with engine_of(daemon) as engine, Subscriber(endpoint, replay=again) as router:
        wait_subscribed(daemon)
        store(engine, keys)
        router.until_held(TOPIC, blocks_of(keys))
        middle = router.messages[len(router.messages) // 2].sequence
        wanted = [message for message in router.messages if message.sequence >= middle]
        assert router.missed(middle) == wanted
        assert router.missed(middle, TOPIC.encode()) == wanted
        assert router.missed(middle, b"kv@another@model") == []
        assert router.missed(router.last[TOPIC] + 1) == []
        (cleared,) = router.missed(1, TOPIC.encode())
        assert [type(event).__name__ for event in cleared.batch.events] == ["AllBlocksCleared"]
        assert cleared.sequence == router.last[TOPIC]
        router.told.take(TOPIC, cleared.batch)
        assert not router.told.held(TOPIC)
        router.until_held(TOPIC, blocks_of(keys))
        assert router.gaps == 0


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_daemon_that_ends_takes_everything_back_and_the_next_tells_it_anew(
    start_daemon: StartDaemon, endpoint: str, number: signal.Signals
) -> None:
    """Killed or stopped; after a warm restart the engine's chunks are told with their tokens."""
    daemon = start_daemon("--events", endpoint, *KEEP)
    keys = keys_of("kept", 30)
    with Subscriber(endpoint) as router, engine_of(daemon) as engine:
        store(engine, keys)
        router.until_held(TOPIC, blocks_of(keys))
        publisher = publisher_of(daemon)
        daemon.stop(number)
        router.until_held(TOPIC, set())
        eventually(lambda: has_ended(publisher))
        before = len(router.messages)
        second = start_daemon("--events", endpoint, *KEEP)
        engine.wait_attached(second)
        router.until_held(TOPIC, blocks_of(keys))
        assert not router.told.events["AllBlocksCleared"]
        events = [event for message in router.messages[before:] for event in message.batch.events]
        assert all(event.token_ids for event in events if isinstance(event, BlockStored))


def test_a_publisher_that_is_killed_is_followed_by_one_that_begins_anew(
    start_daemon: StartDaemon, endpoint: str
) -> None:
    """What went meanwhile is not believed for ever: everything is cleared, and told again."""
    daemon = start_daemon("--events", endpoint)
    keys = keys_of("before", 20)
    with Subscriber(endpoint) as router, engine_of(daemon) as engine:
        store(engine, keys)
        router.until_held(TOPIC, blocks_of(keys))
        first = publisher_of(daemon)
        first.kill()
        assert run_kvd("clear", "--runtime-dir", str(daemon.runtime_dir), "--yes").returncode == 0
        more = keys_of("after", 20)
        store(engine, more)
        router.until_held(TOPIC, blocks_of(more))
        assert router.told.events["AllBlocksCleared"]
        report = daemon.status()["publisher"]
        assert (report["restarts"], report["state"]) == (1, "up")
        assert "signal 9" in report["last_error"]


def test_a_daemon_and_its_publisher_that_are_killed_at_once_are_made_good(
    start_daemon: StartDaemon, endpoint: str
) -> None:
    """Nobody took back; the next daemon clears the topics, of engines that do not return too."""
    daemon = start_daemon("--events", endpoint, *KEEP)
    keys = keys_of("kept", 20)
    with Subscriber(endpoint) as router, engine_of(daemon) as engine:
        with engine_of(daemon, "gone") as gone:
            store(gone, keys)
            for topic in (TOPIC, "kv@gone@model"):
                router.until_held(topic, blocks_of(keys))
            publisher = publisher_of(daemon)
            publisher.suspend()
            daemon.stop(signal.SIGKILL)
            publisher.kill()
            eventually(lambda: has_ended(publisher))
        second = start_daemon("--events", endpoint, *KEEP)
        engine.wait_attached(second)
        router.until_held("kv@gone@model", set())
        router.until_held(TOPIC, blocks_of(keys))
        assert router.told.events["AllBlocksCleared"]


def test_the_loss_of_a_lane_takes_nothing_back(start_daemon: StartDaemon, endpoint: str) -> None:
    """The chunks are there, and are loaded again once another lane serves."""
    daemon = start_daemon("--events", endpoint)
    keys = keys_of("lane", 10)
    with Subscriber(endpoint) as router, engine_of(daemon) as engine:
        wait_subscribed(daemon)
        store(engine, keys)
        router.until_held(TOPIC, blocks_of(keys))
        before = len(router.messages)
        (lane,) = children_running(daemon.process.pid, "kvd.lane")
        lane.kill()
        eventually(lambda: daemon.status()["lanes"][0]["counters"]["restarts"], bool)
        engine.wait_attached()
        more = keys_of("more", 5)
        store(engine, more)
        router.until_held(TOPIC, blocks_of(keys + more))
        kinds = {type(e).__name__ for m in router.messages[before:] for e in m.batch.events}
        assert kinds == {"BlockStored"}


def test_a_publisher_that_hangs_holds_nobody_up(start_daemon: StartDaemon, endpoint: str) -> None:
    """Engines attach, store and leave meanwhile; when it goes on it catches up."""
    daemon = start_daemon("--events", endpoint)
    keys = keys_of("frozen", 20)
    with Subscriber(endpoint) as router, engine_of(daemon) as engine:
        store(engine, keys_of("first", 1))
        router.until_held(TOPIC, blocks_of(keys_of("first", 1)))
        with frozen(publisher_of(daemon).pid):
            with engine_of(daemon, "passing") as passing:
                store(passing, keys)
            eventually(lambda: len(daemon.status()["engines"]), lambda left: left == 1)
        router.until_held(TOPIC, blocks_of(keys_of("first", 1) + keys))
        assert router.gaps == 0


def test_an_indexer_that_listens_is_connected_to(start_daemon: StartDaemon) -> None:
    """Also one that comes after the daemon, and one that takes the place of another."""
    at = f"tcp://127.0.0.1:{free_port()}"
    daemon = start_daemon("--events", f"connect:{at}")
    keys = keys_of("central", 10)
    with engine_of(daemon) as engine:
        store(engine, keys)
        for _ in range(2):
            with Subscriber(at, binds=True) as indexer:
                indexer.until_held(TOPIC, blocks_of(keys))


def test_a_unix_socket_serves_too(start_daemon: StartDaemon, runtime_dir: Path) -> None:
    """For the daemon's user and group; what a killed daemon has left there is replaced."""
    path = runtime_dir.parent / "events.sock"
    for _ in range(2):
        daemon = start_daemon("--events", f"ipc://{path}")
        assert path.stat().st_mode & 0o777 == 0o660
        keys = keys_of("unix", 5)
        with engine_of(daemon) as engine, Subscriber(f"ipc://{path}") as router:
            store(engine, keys)
            router.until_held(TOPIC, blocks_of(keys))
        publisher = publisher_of(daemon)
        daemon.stop(signal.SIGKILL)
        eventually(partial(has_ended, publisher))
        assert path.exists()
    daemon = start_daemon("--events", f"ipc://{path}")
    daemon.stop()
    assert not path.exists()


@pytest.mark.parametrize("kind", ["tcp", "ipc"])
def test_an_address_in_use_is_said_with_the_remedy(
    start_daemon: StartDaemon, runtime_dir: Path, kind: str
) -> None:
    """A second daemon does not start, and says what to change; it has made no pool."""
    at = f"tcp://127.0.0.1:{free_port()}" if kind == "tcp" else f"ipc://{runtime_dir.parent}/e.sock"
    start_daemon("--events", at)
    second = start_daemon("--events", at, where=runtime_dir.parent / "second" / "run", ready=False)
    assert second.process.wait(PATIENCE) == 1
    log = second.log.read_text()
    assert f"events = {at}: " in log
    assert "choose another with --events" in log
    assert "pool of" not in log
    assert "Traceback" not in log


def test_every_interface_only_with_a_warning(start_daemon: StartDaemon) -> None:
    """Who reaches the machine reads prompts' token ids."""
    daemon = start_daemon("--events", "tcp://*:0", "--events-replay", "tcp://127.0.0.1:0")
    log = daemon.wait_log("everybody who reaches this machine reads which prompts are cached")
    assert log.count("everybody who reaches") == 1


def test_temporary_namespaces_are_nobodys_business(
    start_daemon: StartDaemon, endpoint: str
) -> None:
    """The self-test of a daemon that publishes is not published."""
    daemon = start_daemon("--events", endpoint)
    with Subscriber(endpoint) as router, engine_of(daemon) as engine:
        with Engine(daemon.runtime_dir, "passing", 1, temporary=True) as passing:
            passing.wait_attached()
            passing.store(keys_of("temporary", 5), describe=described)
        store(engine, keys_of("lasting", 5))
        router.until_held(TOPIC, blocks_of(keys_of("lasting", 5)))
        assert set(router.last) == {TOPIC}
