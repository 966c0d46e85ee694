"""Every bound of the daemon: reached, answered in words with the setting, counted, harmless."""

import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from kvd.errors import NotRunning
from kvd.wire.tool import ToolConnection
from kvd_client import (
    Fingerprint,
    HostMemory,
    JobBlocks,
    RegistrationError,
    Scheduler,
    Store,
    Worker,
)
from kvd_client.errors import Unavailable
from kvd_proto.messages import JobStatus
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, make_layout, wait_hit
from tests.daemon.users import OTHER_UID, as_user, needs_root
from tests.raw_client import RawClient
from tests.waiting import DEADLINE, PATIENCE, eventually


def reached(daemon: Daemon) -> dict[str, int]:
    """How often each limit was reached."""
    return {name: count for name, count in daemon.status()["broker"]["limits"].items() if count}


def register(daemon: Daemon, model: str, timeout: float = 30.0) -> None:
    """A worker that insists on its registration, and leaves."""
    layout = make_layout()
    memory = [HostMemory.allocate(size) for size in layout.storages]
    with Worker(daemon.runtime_dir, model, 0, 1, deadline=DEADLINE) as worker:
        worker.register(memory, layout, Fingerprint(model=model), required=True, timeout=timeout)


def test_more_sessions_than_allowed_are_refused_with_the_setting(
    start_daemon: StartDaemon,
) -> None:
    """The error names the setting; there is room when a session has ended; others go on."""
    daemon = start_daemon("--max-sessions", "2")
    with Engine(daemon.runtime_dir, world_size=1).wait_attached() as engine:

        def refusal() -> str:
            with pytest.raises(Unavailable) as refused:
                register(daemon, "late", timeout=1.0)
            return str(refused.value)

        eventually(refusal, lambda said: "raise max_sessions (now 2)" in said)
        keys = keys_of("in", 2)
        engine.store(keys)
        wait_hit(engine, keys)
    report = eventually(daemon.status, lambda report: report["sessions"]["open"] == 1)
    assert report["broker"]["limits"]["max_sessions"] >= 1
    assert report["broker"]["refusals"]["limit"] >= 1
    with Scheduler(daemon.runtime_dir, "later", deadline=DEADLINE) as later:
        assert later.status() is not None


@needs_root
def test_one_user_leaves_room_for_others(start_daemon: StartDaemon, runtime_dir: Path) -> None:
    """Whoever has as many sessions as one user may reads the setting; another user gets in."""
    runtime_dir.parent.chmod(0o711)
    daemon = start_daemon("--max-sessions-per-user", "2")
    with as_user():
        greedy = [RawClient(daemon.runtime_dir) for _ in range(2)]
        with pytest.raises(
            NotRunning, match=rf"2 sessions of uid {OTHER_UID}.*max_sessions_per_user \(now 2\)"
        ):
            ToolConnection(daemon.runtime_dir, PATIENCE)
    with as_user(OTHER_UID + 1):
        other = RawClient(daemon.runtime_dir)
    other.hello()
    assert reached(daemon) == {"max_sessions_per_user": 1}
    greedy.pop().close()
    with as_user():
        greedy.append(RawClient(daemon.runtime_dir))
    for client in (*greedy, other):
        client.close()


@contextmanager
def many_descriptors() -> Iterator[None]:
    """This process, and those that it starts, may open as many as the system lets them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_thousand_idle_connections_cost_little_and_leave_nothing(
    start_daemon: StartDaemon,
) -> None:
    """At most 16 KiB each of the broker's memory before they say anything, and later none."""
    count, bound = 1000, 16 * 1024
    with many_descriptors():
        daemon = start_daemon("--max-sessions-per-user", "2000", "--max-sessions", "2000")
        broker = psutil.Process(daemon.process.pid)
        before = broker.memory_info().rss
        with ExitStack() as crowd:
            for _ in range(count):
                sock = crowd.enter_context(socket.socket(socket.AF_UNIX))
                sock.settimeout(PATIENCE)
                sock.connect(str(daemon.runtime_dir / "broker.sock"))
                assert sock.recv(4096)
            assert daemon.status()["sessions"]["open"] > count
            assert broker.memory_info().rss - before < count * bound
        eventually(daemon.status, lambda report: report["sessions"]["open"] <= 2)
        assert broker.memory_info().rss - before < count * bound


def test_one_model_too_many_is_refused_with_the_setting(start_daemon: StartDaemon) -> None:
    """While no namespace can give way another model is refused; afterwards it is taken."""
    daemon = start_daemon("--max-namespaces", "1")
    with Engine(daemon.runtime_dir, name="one", world_size=1, model="one").wait_attached():
        with pytest.raises(RegistrationError, match=r"raise max_namespaces \(now 1\)"):
            register(daemon, "two")
        assert reached(daemon) == {"max_namespaces": 1}
    eventually(daemon.status, lambda report: not report["engines"])
    with Engine(daemon.runtime_dir, name="two", world_size=1, model="two").wait_attached():
        assert [n["model"] for n in daemon.status()["namespaces"]] == ["two"]


def test_one_lease_too_many_pins_nothing_and_is_counted(start_daemon: StartDaemon) -> None:
    """An engine that gives no lease back gets no more; what is there it loads without one."""
    daemon = start_daemon("--max-leases", "2")
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        keys = keys_of("pinned", 4)
        engine.store(keys)
        wait_hit(engine, keys)
        tickets = [engine.scheduler.prepare_load(keys) for _ in range(3)]
        eventually(lambda: reached(daemon), {"max_leases": 1}.__eq__)
        assert daemon.status()["leases"] == 2
        assert daemon.status()["counters"]["pins_refused"] == 4
        blocks = list(range(33, 41))
        engine.poison(blocks)
        last = tickets.pop()
        jobs = engine.submit("load", [0, 1], blocks, last.slots, last.generations)
        assert all(result.success for result in engine.results(jobs).values())
        assert engine.wrong_bytes(keys, blocks) == 0
        for ticket in tickets:
            engine.scheduler.complete_load(ticket)
        assert engine.load(keys) == (4, 0)
        assert reached(daemon) == {"max_leases": 1}


def test_a_lane_full_of_one_engines_stores_serves_the_other(start_daemon: StartDaemon) -> None:
    """Above the bound the oldest stores are shed and counted; the other engine loads meanwhile."""
    daemon = start_daemon("--max-queued-jobs", "3")
    with (
        Engine(daemon.runtime_dir, "greedy", 1, "greedy").wait_attached() as greedy,
        Engine(daemon.runtime_dir, "quiet", 1, "quiet").wait_attached() as quiet,
    ):
        keys = keys_of("mine", 4)
        quiet.store(keys)
        wait_hit(quiet, keys)
        worker = greedy.workers[0]
        later = worker.timeline.reserve()  # kernels that have not ended
        for job in range(8):
            ticket = greedy.begin(keys_of(f"flood-{job}", 1))
            worker.submit(
                Store,
                job,
                JobBlocks.of([1, 2], [2, 0], [0, 0], ticket.slots, ticket.generations),
                after=later,
            )
        assert quiet.load(keys) == (4, 0)
        report = eventually(
            daemon.status, lambda report: report["counters"]["jobs"].get("store_shed", 0) >= 5
        )
        assert report["counters"]["jobs"]["store_shed"] == 5
        assert report["lanes"][0]["queued_jobs"] == 3
        assert report["lanes"][0]["counters"]["restarts"] == 0
        shed = greedy.results({0: 0})[0]
        assert shed.status is JobStatus.SHED
        assert "max_queued_jobs = 3" in shed.text
        assert quiet.load(keys) == (4, 0)
