"""The backend for Mooncake Store, against a real master and store in network namespaces."""

from collections.abc import Iterator
from typing import ClassVar

import pytest

from kvd.errors import ConfigError
from kvd.outcomes import Outcome
from kvd.tier.contract import BackendOptions
from kvd.tier.mooncake import MooncakeTier, name_of
from tests.tier.areas import ID, Area, begun, is_whole, keys_of, space_of
from tests.tier.conformance import Conformance, MakeTier, put_all, soon
from tests.tier.mooncake_cluster import Cluster, open_tier, why_not

OK, ABSENT = Outcome.OK, Outcome.ABSENT
REASON = why_not()
needs_cluster = pytest.mark.skipif(bool(REASON), reason=REASON)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A master, a store, and a node on which this module's main thread is."""
    with Cluster.running() as cluster, cluster.add_node("here").entered():
        yield cluster


class Openers:
    """Opens the tier, and goes on with one that is open: to end one takes most of a second.

    All share one pool: what a client has registered stays where it is.
    """

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.area = Area()
        self.tier: MooncakeTier | None = None

    def __call__(self, _budget: int = 0) -> MooncakeTier:
        """An open one; another where the last was closed."""
        if self.tier is None:
            self.tier = tier = open_tier(self.cluster.master_address, self.area)
            close = tier.close

            def forget() -> None:
                self.tier = None
                close()

            tier.close = forget  # type: ignore[method-assign]
        return self.tier

    def emptied(self) -> MooncakeTier:
        """An open one on an empty cluster, which knows no namespace."""
        tier = self()
        tier._client._store.remove_all(True)
        tier._salts.clear()
        return tier


@pytest.fixture(scope="module")
def openers(cluster: Cluster) -> Iterator[Openers]:
    """What opens tiers on the cluster."""
    made = Openers(cluster)
    yield made
    if made.tier is not None:
        made.tier.close()


@needs_cluster
class TestMooncake(Conformance):
    """The conformance suite."""

    shared: ClassVar[bool] = True

    @pytest.fixture
    def area(self, openers: Openers) -> Area:
        """The module's; shares begin at pages."""
        openers.area.align = 4096
        return openers.area

    @pytest.fixture
    def make_tier(self, openers: Openers) -> MakeTier:
        """An open tier, whose cluster is empty when a test begins."""
        openers.emptied()
        return openers


@needs_cluster
class TestCluster:
    """What is the cluster's own."""

    @pytest.fixture
    def tier(self, openers: Openers) -> MooncakeTier:
        """An open tier on an empty cluster."""
        return openers.emptied()

    def test_another_node_finds_it(self, tier: MooncakeTier, openers: Openers) -> None:
        """What one client has put, another one gets, with the salt that it finds in the cluster."""
        salt = tier.salt(ID)
        assert len(salt) == 8
        tier.note_salt(ID, salt)
        space = space_of(70_000, 30, salt=salt)
        keys = keys_of("both", 6)
        put_all(tier, openers.area.chunks(space, keys))
        area = Area()
        other = open_tier(openers.cluster.master_address, area)
        assert other.salt(ID) == salt
        back = area.empties(space, keys)
        assert other.get(back, soon()) == [OK] * 6
        assert all(map(is_whole, back))
        # A reset here: who comes next has the new salt, who is there goes on with the old one.
        other.note_salt(ID, salt)
        tier.note_salt(ID, b"the next", reset=True)
        assert tier.contains(space_of(70_000, 30, salt=b"the next"), keys, soon()) == [False] * 6
        assert other.contains(space, keys, soon()) == [True] * 6
        assert other.salt(ID) == salt
        other._salts.clear()
        assert other.salt(ID) == b"the next"
        # A daemon that comes back with the salt of before takes nobody along.
        other._salts.clear()
        other.note_salt(ID, salt)
        assert other.salt(ID) == salt
        tier._salts.clear()
        assert tier.salt(ID) == b"the next"
        other.close()

    def test_a_lost_salt_is_written_again(self, tier: MooncakeTier, openers: Openers) -> None:
        """Where the store that held it is gone, the next put brings the salt back."""
        salt = tier.salt(ID)
        tier.note_salt(ID, salt)
        tier._client._store.remove_all(True)
        tier._last_rewrite -= 3600
        put_all(tier, openers.area.chunks(space_of(4096, salt=salt), keys_of("remind", 1)))
        tier._salts.clear()
        assert tier.salt(ID) == salt

    def test_an_object_of_another_shape(self, tier: MooncakeTier, openers: Openers) -> None:
        """One that is longer or damaged is CORRUPT and dropped; with other sizes none is there."""
        space = begun(tier, space_of(4096))
        keys = keys_of("shape", 3)
        put_all(tier, openers.area.chunks(space, keys))
        names = [name_of(space, key) for key in keys]
        tier._client.remove(names[:2])
        with tier._client.buffer(2**20) as (memory, address):
            memory[:8] = b"\xff" * 8  # the length of the head
            size = tier._client._store.get_size(names[2])
            tier._client.put(names[:2], [[address]] * 2, [[size], [size + 1]])
        back = openers.area.empties(space, keys)
        assert tier.get(back, soon()) == [Outcome.CORRUPT, Outcome.CORRUPT, OK]
        assert tier.contains(space, keys, soon()) == [False, False, True]
        wider = space_of(4096, description=128)
        assert tier.contains(wider, keys, soon()) == [False] * 3

    def test_keys_do_not_leave(self) -> None:
        """The name of an object shows nothing of its key, and differs with all that counts."""
        space = space_of(4096)
        others = [space_of(4096, salt=b"2"), space_of(4096, name=b"x" * 16), space_of(4095)]
        names = {name_of(each, key) for each in (space, *others) for key in (b"a", b"ab")}
        assert len(names) == 8
        assert all(len(name) == 64 and b"secret".hex() not in name for name in names)
        assert b"secret".hex() not in name_of(space, b"secret")


@pytest.mark.parametrize(
    ("target", "values", "needle"),
    [
        ("10.0.0.1:50051", {}, "mooncake takes no target; give mooncake:master=HOST:PORT"),
        ("", {}, "mooncake has no master; give host and port of mooncake_master"),
        ("", {"master": "10.0.0.1"}, "master=10.0.0.1 is no HOST:PORT; give host and port"),
        ("", {"master": "m:0"}, "master=m:0 is no HOST:PORT"),
        ("", {"master": "m:1", "size": "1GiB"}, "size=1GiB: the cluster's stores decide"),
        (
            "",
            {"master": "m:1", "protocol": "nvlink"},
            "protocol=nvlink is unknown; use one of tcp, rdma",
        ),
        ("", {"master": "m:1", "devices": "mlx5_0"}, "devices=mlx5_0 needs protocol=rdma"),
        ("", {"master": "m:1", "segment": "much"}, "segment=much"),
        ("", {"master": "m:1", "colour": "red"}, "unknown option colour; known are master, "),
    ],
)
def test_bad_options(target: str, values: dict[str, str], needle: str) -> None:
    """An option that cannot work is named with its value and the remedy."""
    with pytest.raises(ConfigError, match=needle):
        MooncakeTier.check(BackendOptions(target, values))
