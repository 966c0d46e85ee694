"""Who is let in by a running daemon, and what users cannot do to each other."""

from pathlib import Path

import pytest

from kvd_proto.messages import ErrorCode, Ping, Pong
from tests.conftest import StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.users import OTHER_UID, as_user, needs_root
from tests.raw_client import RawClient, code_of, text_of


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
