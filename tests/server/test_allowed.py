"""Who may connect, by what the kernel tells of a peer."""

import os
import socket

import pytest

from kvd.client_names import Peer
from kvd.errors import ConfigError
from kvd.server.runtime_dir import AllowList
from kvd.wire.server import peer_of
from tests.daemon.users import needs_root


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
