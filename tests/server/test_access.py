"""Who may connect, why a process may not reach a path, and the remedy."""

import grp
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.client_names import Peer
from kvd.errors import ConfigError
from kvd.server.runtime_dir import AllowList
from kvd.wire.server import peer_of
from kvd_proto.text import explain_denied
from tests.daemon.users import OTHER_UID, as_stranger, needs_root

NOBODY = 65534
GROUP = next((group for group in grp.getgrall() if group.gr_gid not in {0, NOBODY}), None)

needs_group = pytest.mark.skipif(GROUP is None, reason="there is no other group")


@pytest.fixture
def closed(runtime_dir: Path) -> Path:
    """A directory that only root and a group may enter, with a closed one in it."""
    runtime_dir.parent.chmod(0o711)
    runtime_dir.mkdir(0o750)
    (runtime_dir / "inner").mkdir(0o700)
    assert GROUP is not None
    os.chown(runtime_dir, 0, GROUP.gr_gid)
    return runtime_dir


def explain(path: Path, uid: int = OTHER_UID) -> str | None:
    """What a process of this user, who is in no other group, is told."""
    with as_stranger(uid):
        return explain_denied(path)


@pytest.fixture
def broker_socket(runtime_dir: Path) -> Iterator[Path]:
    """A socket in a directory that all may enter."""
    runtime_dir.parent.chmod(0o711)
    runtime_dir.mkdir(0o755)
    with socket.socket(socket.AF_UNIX) as listener:
        path = runtime_dir / "broker.sock"
        listener.bind(str(path))
        yield path


@needs_root
@needs_group
def test_the_first_directory_that_is_closed_is_named_with_the_remedy(closed: Path) -> None:
    """Uid, directory, mode and group, and the command that puts this user into the group."""
    assert GROUP is not None
    name = GROUP.gr_name
    assert explain(closed / "inner" / "broker.sock") == (
        f"uid {OTHER_UID} may not enter {closed} (mode 0750, group {name}):"
        f" usermod -aG {name} {OTHER_UID}, then log in again"
    )
    link = closed.parent / "link"
    link.symlink_to(closed)
    assert explain(link) == explain(closed)
    assert explain_denied(closed / "inner") is None


@needs_root
def test_a_socket_that_may_not_be_written_is_named(broker_socket: Path) -> None:
    """Every directory is open, and connecting would fail all the same."""
    broker_socket.chmod(0o666)
    assert explain(broker_socket) is None
    broker_socket.chmod(0o600)
    words = f"uid {OTHER_UID} may not connect to {broker_socket} (mode 0600, "
    assert str(explain(broker_socket)).startswith(words)


@pytest.mark.parametrize(
    ("peer", "allowed"),
    [
        (Peer(1, 1001, 1), True),
        (Peer(1, 1002, 1), False),
        (Peer(1, 1002, 50), True),
        (Peer(1, 1002, 1, (7, 50)), True),
        (Peer(1, 1002, 1, (7, 1001)), False),
        (Peer(1, 7, 1), True),
        (Peer(1, 0, 0), True),
    ],
)
def test_a_list_lets_in_its_users_groups_root_and_the_daemon(
    monkeypatch: pytest.MonkeyPatch, peer: Peer, *, allowed: bool
) -> None:
    """A user or any group suffices; ids of users are not taken for ids of groups."""
    monkeypatch.setattr(os, "geteuid", lambda: 7)
    objection = AllowList("1001", "50").objection(peer)
    assert bool(objection) is not allowed
    if objection:
        assert str(peer.uid) in objection
        assert "allow_users" in objection


def test_names_are_looked_up_on_this_machine() -> None:
    """Names and numbers mix; an unknown name is refused with the key and the remedy."""
    allowed = AllowList("root, 1234", "root")
    assert allowed.users == {0, 1234}
    assert allowed.groups == {0}
    with pytest.raises(ConfigError, match=r"allow_groups.*'no-such-group'.*not known"):
        AllowList("", "no-such-group")


@needs_root
@pytest.mark.parametrize(("count", "known"), [(3, 3), (256, 256), (257, 0)])
def test_a_process_of_many_groups_is_known_by_them_or_by_none(count: int, known: int) -> None:
    """The kernel tells 256 of them in one answer; more are no reason to end anything."""
    before = os.getgroups()
    os.setgroups(range(100, 100 + count))
    try:
        ours, theirs = socket.socketpair(socket.AF_UNIX)
    finally:
        os.setgroups(before)
    with ours, theirs:
        assert len(peer_of(ours).groups) == known
