"""Who may come in, and every bound of the daemon: answered in words, counted, harmless."""

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from kvd.errors import NotRunning
from kvd.wire.tool import ToolConnection
from kvd_client import JobBlocks, Scheduler, Store
from kvd_client.errors import RegistrationError
from kvd_proto.messages import ErrorCode, JobStatus, Ping, Pong
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, engine_of, keys_of
from tests.daemon.users import OTHER_UID, as_user, needs_root
from tests.full import fill_up
from tests.raw_client import RawClient, code_of, text_of
from tests.waiting import DEADLINE, PATIENCE, eventually


@pytest.fixture(autouse=True)
def _reachable(runtime_dir: Path) -> None:
    """Let another user come as far as the runtime directory."""
    runtime_dir.parent.chmod(0o711)


@needs_root
def test_a_user_who_is_not_on_the_list_is_refused_with_one_error(start_daemon: StartDaemon) -> None:
    """The peer gets one Error and the end of the connection; one line is logged."""
    daemon = start_daemon("--allow-users", "4711")
    with as_user():
        stranger = RawClient(daemon.runtime_dir)
    with stranger:
        assert code_of(stranger.error_at_the_end()) is ErrorCode.FORBIDDEN
    with as_user(4711):
        welcome = RawClient(daemon.runtime_dir)
    with welcome:
        welcome.hello()
    assert daemon.status()["broker"]["refusals"][ErrorCode.FORBIDDEN.value] == 1
    assert daemon.stop() == 0
    assert daemon.log.read_text().count(f"uid {OTHER_UID}, gid 0 may not use this daemon") == 1


@needs_root
def test_an_engine_of_another_user_cannot_be_joined(start_daemon: StartDaemon) -> None:
    """Its name is taken: a scheduler of another user gets an error and no directory."""
    daemon = start_daemon()
    with engine_of(daemon, "victim") as victim:
        keys = victim.stored("private", 2)
        with as_user():
            thief = RawClient(daemon.runtime_dir)
        reply = thief.hello(engine="victim")
        assert code_of(reply) is ErrorCode.FORBIDDEN
        assert f"uid 0, this process to uid {OTHER_UID}" in text_of(reply)
        assert isinstance(thief.ask(Ping()), Pong)
        assert not thief.notices
        thief.close()
        assert victim.load(keys) == (2, 0)


@needs_root
def test_users_that_do_not_share_miss_each_others_chunks(start_daemon: StartDaemon) -> None:
    """With share_between_users = no, an engine that claims the same model finds nothing."""
    daemon = start_daemon("--share-between-users", "no")
    with engine_of(daemon, "first") as first:
        keys = first.stored("mine", 2)
        with as_user():
            second = engine_of(daemon, "second")
        with second:
            assert second.load(keys) == (0, 0)
        with engine_of(daemon, "third") as third:
            assert third.load(keys) == (2, 0)


@contextmanager
def descriptors_limited(pid: int, more: int | None) -> Iterator[None]:
    """The process may open so many descriptors more than it has now; None: all that it may."""
    soft, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    count = len(list(Path(f"/proc/{pid or 'self'}/fd").iterdir()))
    limit = hard if more is None else count + more
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (limit, hard))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.parametrize("more", [0, 2, 9])
def test_sessions_work_on_without_descriptors(daemon: Daemon, more: int) -> None:
    """New connections to every socket are refused; no session ends, and later all are served."""
    with Engine(daemon.runtime_dir).wait_attached() as engine, ExitStack() as stack:
        engine.store(keys_of("known", 1))  # lanes know it
        lane = daemon.status()["lanes"][0]
        jobs = next(daemon.runtime_dir.glob("lane-host-*.sock"))
        with descriptors_limited(daemon.process.pid, more), descriptors_limited(lane["pid"], more):
            for path in (daemon.runtime_dir / "broker.sock", jobs):
                for _ in range(20):
                    connection = stack.enter_context(socket.socket(socket.AF_UNIX))
                    connection.settimeout(PATIENCE)
                    connection.connect(str(path))
            with Engine(daemon.runtime_dir, name="late") as late:
                assert not late.scheduler.wait_attached(0.5)
            keys = engine.stored("kept", 4)
            assert engine.load(keys) == (4, 0)
            assert engine.scheduler.status()
        stack.close()
        with Engine(daemon.runtime_dir, name="another").wait_attached() as another:
            assert another.load(keys) == (4, 0)
        report = daemon.status()
        assert report["lanes"][0]["pid"] == lane["pid"]
        assert report["broker"]["limits"]["open_files"] >= 1
    assert daemon.process.poll() is None
    assert "Traceback" not in daemon.log.read_text()


@pytest.mark.parametrize("more", [0, 1, 4])
def test_a_lane_without_descriptors_refuses_registrations_and_lives(
    daemon: Daemon, more: int
) -> None:
    """The refusal names limit and remedy; the lane serves on, and takes the engine later."""
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        lane = daemon.status()["lanes"][0]["pid"]
        with descriptors_limited(lane, more):
            with (
                Engine(daemon.runtime_dir, name="late", world_size=1, ranks=()) as late,
                pytest.raises(RegistrationError, match=r"raise LimitNOFILE \(ulimit -n\), now \d"),
            ):
                late.add(0)
            engine.stored("kept", 4)
        with engine_of(daemon, "later"):
            assert daemon.status()["lanes"][0]["pid"] == lane
    log = daemon.wait_log("memory not imported: ")
    assert "Traceback" not in log
    assert "is lost" not in log


def test_a_ledger_that_finds_no_room_refuses_its_engine(
    start_daemon: StartDaemon, tmp_path: Path, small_tmpfs: Callable[[Path, int], None]
) -> None:
    """No room for its ledger: the engine waits without a cache, others work; then it has one."""
    small_tmpfs(tmp_path, 12 * 2**20)
    daemon = start_daemon("--pool-dir", str(tmp_path), "--keep-pool", "yes", cpu_bytes="8MiB")
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        filler = fill_up(tmp_path)
        with Engine(daemon.runtime_dir, name="other", model="other") as other:
            assert not other.scheduler.wait_attached(0.5)
            keys = engine.stored("kept", 4)
            assert engine.load(keys) == (4, 0)
            filler.unlink()
            other.wait_attached()
            assert other.store(keys_of("late", 2))
        assert daemon.process.poll() is None


def reached(daemon: Daemon) -> dict[str, int]:
    """How often each limit was reached."""
    return {name: count for name, count in daemon.status()["broker"]["limits"].items() if count}


def test_more_sessions_than_allowed_are_refused_with_the_setting(start_daemon: StartDaemon) -> None:
    """The error names the setting; there is room when a session has ended; others go on."""
    daemon = start_daemon("--max-sessions", "2")
    with engine_of(daemon) as engine:
        with pytest.raises(NotRunning, match=r"raise max_sessions \(now 2\)"):
            ToolConnection(daemon.runtime_dir, PATIENCE)
        assert engine.stored("in", 2)
    report = eventually(daemon.status, lambda report: report["sessions"]["open"] == 1)
    assert report["broker"]["limits"]["max_sessions"] >= 1
    assert report["broker"]["refusals"]["limit"] >= 1
    with Scheduler(daemon.runtime_dir, "later", deadline=DEADLINE) as later:
        assert later.status() is not None


@needs_root
def test_one_user_leaves_room_for_others(start_daemon: StartDaemon) -> None:
    """A user with as many sessions as one may have reads the setting; another user gets in."""
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


def test_a_thousand_idle_connections_cost_little_and_leave_nothing(
    start_daemon: StartDaemon,
) -> None:
    """At most 16 KiB each of the broker's memory before they say anything, and later none."""
    count, bound = 1000, 16 * 1024
    with descriptors_limited(0, None):
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
    with engine_of(daemon, "one", model="one"):
        with (
            Engine(daemon.runtime_dir, "two", 1, "two", ranks=()) as two,
            pytest.raises(RegistrationError, match=r"raise max_namespaces \(now 1\)"),
        ):
            two.add(0)
        assert reached(daemon) == {"max_namespaces": 1}
    eventually(daemon.status, lambda report: not report["engines"])
    with engine_of(daemon, "two", model="two"):
        assert [n["model"] for n in daemon.status()["namespaces"]] == ["two"]


def test_one_lease_too_many_pins_nothing_and_is_counted(start_daemon: StartDaemon) -> None:
    """An engine that gives no lease back gets no more; what is there it loads without one."""
    daemon = start_daemon("--max-leases", "2")
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        keys = engine.stored("pinned", 4)
        tickets = [engine.scheduler.prepare_load(keys) for _ in range(3)]
        eventually(lambda: reached(daemon), {"max_leases": 1}.__eq__)
        assert daemon.status()["leases"] == 2
        assert daemon.status()["counters"]["pins_refused"] == 4
        blocks = list(range(33, 41))
        engine.poison(blocks)
        last = tickets.pop()
        assert engine.moves("load", blocks, last.slots, last.generations)
        assert engine.wrong_bytes(keys, blocks) == 0
        for ticket in tickets:
            engine.scheduler.complete_load(ticket)
        assert engine.load(keys) == (4, 0)
        assert reached(daemon) == {"max_leases": 1}


def test_a_lane_full_of_one_engines_stores_serves_the_other(start_daemon: StartDaemon) -> None:
    """Above the bound the oldest stores are shed and counted; the other engine loads meanwhile."""
    daemon = start_daemon("--max-queued-jobs", "3")
    with (
        engine_of(daemon, "greedy", model="greedy") as greedy,
        engine_of(daemon, "quiet", model="quiet") as quiet,
    ):
        keys = quiet.stored("mine", 4)
        worker = greedy.workers[0]
        later = worker.timeline.reserve()  # kernels that have not ended
        for job in range(8):
            ticket = greedy.begin(keys_of(f"flood-{job}", 1))
            blocks = JobBlocks.of([1, 2], [2, 0], [0, 0], ticket.slots, ticket.generations)
            worker.submit(Store, job, blocks, after=later)
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
