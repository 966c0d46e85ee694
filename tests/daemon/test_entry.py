"""Who may come in, and what a process without descriptors can still do."""

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from kvd_client.errors import RegistrationError
from kvd_proto.messages import ErrorCode, Ping, Pong
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.users import OTHER_UID, as_user, needs_root
from tests.full import fill_up
from tests.raw_client import RawClient, code_of, text_of
from tests.waiting import PATIENCE


@pytest.fixture(autouse=True)
def _reachable(runtime_dir: Path) -> None:
    """Let another user come as far as the runtime directory."""
    runtime_dir.parent.chmod(0o711)


@needs_root
def test_a_user_who_is_not_on_the_list_is_refused_with_one_error(
    start_daemon: StartDaemon,
) -> None:
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
    with Engine(daemon.runtime_dir, name="victim", world_size=1).wait_attached() as victim:
        keys = keys_of("private", 2)
        victim.store(keys)
        wait_hit(victim, keys)
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
    with Engine(daemon.runtime_dir, name="first", world_size=1).wait_attached() as first:
        keys = keys_of("mine", 2)
        first.store(keys)
        wait_hit(first, keys)
        with as_user():
            second = Engine(daemon.runtime_dir, name="second", world_size=1).wait_attached()
        with second:
            assert second.load(keys) == (0, 0)
        with Engine(daemon.runtime_dir, name="third", world_size=1).wait_attached() as third:
            assert third.load(keys) == (2, 0)


@contextmanager
def descriptors_limited(pid: int, more: int) -> Iterator[None]:
    """The process may open so many descriptors more than it has now."""
    before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
    count = len(list(Path(f"/proc/{pid}/fd").iterdir()))
    resource.prlimit(pid, resource.RLIMIT_NOFILE, (count + more, before[1]))
    try:
        yield
    finally:
        resource.prlimit(pid, resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize("more", [0, 1, 2, 3, 9])
def test_sessions_work_on_without_descriptors(daemon: Daemon, more: int) -> None:
    """New connections to every socket are refused; no session ends, and later all are served."""
    with Engine(daemon.runtime_dir).wait_attached() as engine, ExitStack() as stack:
        engine.store(keys_of("known", 1))  # lanes know it
        keys = keys_of("kept", 4)
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
            assert engine.store(keys) == keys
            wait_hit(engine, keys)
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


@pytest.mark.parametrize("more", [0, 1, 3, 4])
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
            keys = keys_of("kept", 4)
            engine.store(keys)
            wait_hit(engine, keys)
        with Engine(daemon.runtime_dir, name="later", world_size=1).wait_attached():
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
        keys = keys_of("kept", 4)
        assert engine.store(keys) == keys
        with Engine(daemon.runtime_dir, name="other", model="other") as other:
            assert not other.scheduler.wait_attached(0.5)
            wait_hit(engine, keys)
            assert engine.load(keys) == (4, 0)
            filler.unlink()
            other.wait_attached()
            assert other.store(keys_of("late", 2))
        assert daemon.process.poll() is None
