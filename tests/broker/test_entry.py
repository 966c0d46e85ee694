"""Who may come in, by what the kernel says of a peer; and whose an engine's name is."""

import pytest

from kvd.broker.identity import namespace_id
from kvd.broker.sessions import Peer, Registry
from kvd.daemon.allowed import AllowList
from kvd.errors import ConfigError, Refused
from kvd_proto.messages import ErrorCode
from tests.broker.test_registration import register


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
def test_a_list_lets_in_its_users_groups_root_and_the_daemon(peer: Peer, *, allowed: bool) -> None:
    """A user or any group suffices; ids of users are not taken for ids of groups."""
    objection = AllowList(7, frozenset({1001}), frozenset({50})).objection(peer)
    assert bool(objection) is not allowed
    if objection:
        assert str(peer.uid) in objection
        assert "allow_users" in objection


def test_without_a_list_the_file_rights_alone_decide() -> None:
    """Two empty settings turn nobody away."""
    assert AllowList.of("", " ").objection(Peer(1, 4711, 4711)) == ""


def test_names_are_looked_up_on_this_machine() -> None:
    """Names and numbers mix; an unknown name is refused with the key and the remedy."""
    allowed = AllowList.of("root, 1234", "root")
    assert (allowed.users, allowed.groups) == (frozenset({0, 1234}), frozenset({0}))
    with pytest.raises(ConfigError, match=r"allow_groups.*'no-such-group'.*not known"):
        AllowList.of("", "no-such-group")


def test_an_engines_name_belongs_to_one_user() -> None:
    """Nobody joins the engine of another user, whose slots and leases it could then name."""
    registry = Registry(max_sessions_per_user=10, max_sessions=10)
    mine, also_mine, other = (
        registry.connect(bytes([i]) * 16, Peer(i, uid, 0)) for i, uid in ((1, 5), (2, 5), (3, 6))
    )
    registry.check_name(mine, "llama")
    engine = registry.join(mine, "llama")
    registry.check_name(also_mine, "llama")
    assert registry.join(also_mine, "llama") is engine
    with pytest.raises(Refused, match="belongs to uid 5, this process to uid 6") as refused:
        registry.check_name(other, "llama")
    assert refused.value.code is ErrorCode.FORBIDDEN
    registry.check_name(other, "another")


def test_users_that_do_not_share_have_namespaces_of_their_own() -> None:
    """With share_between_users = no the user is part of the namespace's id, which nobody forges."""
    registrations = [register()]
    ids = {namespace_id(registrations, uid) for uid in (None, 5, 6)}
    assert len(ids) == 3
    assert namespace_id(registrations, 5) in ids
