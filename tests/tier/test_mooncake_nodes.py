"""Two daemons as two nodes of a Mooncake cluster, with an engine each; all of it breaks."""

import itertools
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from kvd_client import LookupResult
from kvd_client.decisions import NO_TIER
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.hidden import assert_hidden, texts_of
from tests.daemon.serving import Daemon, started_daemons
from tests.http.serving import over_unix
from tests.tier.mooncake_cluster import Cluster, Node, why_not
from tests.waiting import eventually

REASON = why_not()
pytestmark = pytest.mark.skipif(bool(REASON), reason=REASON)


@dataclass
class Place:
    """A node: its network, its daemon and its engine."""

    node: Node
    daemon: Daemon
    engine: Engine

    @property
    def tier(self) -> dict[str, Any]:
        """What the daemon's status says of its tier."""
        (tier,) = self.daemon.status()["tiers"]
        found: dict[str, Any] = tier
        return found

    def keep(self, keys: list[bytes]) -> None:
        """Store, ask for what was stored, and wait until the cluster has it."""
        before = self.tier["counters"]["puts"]["ok"]
        assert self.engine.store(keys) == keys
        wait_hit(self.engine, keys)

        def kept() -> int:  # a put that is late is made when it is asked for again
            assert self.engine.load(keys) == (len(keys), 0)
            puts: int = self.tier["counters"]["puts"]["ok"]
            return puts

        eventually(kept, lambda now: now >= before + len(keys))

    def bring(self, keys: list[bytes]) -> None:
        """Seek chunks until all are in memory, and compare their bytes."""

        def sought() -> list[LookupResult]:
            self.engine.scheduler.request_promotion(keys)
            return self.engine.scheduler.lookup_many(keys)

        eventually(sought, {LookupResult.HIT}.issuperset)
        assert self.engine.load(keys) == (len(keys), 0)

    def opened(self) -> int:
        """How often the breaker has opened."""
        return sum(self.tier["counters"]["opened"].values())

    def ask_until_open(self) -> None:
        """Go on as an engine does, with one prompt after another, until the tier is set aside."""
        before, turn = self.opened(), itertools.count()

        def asked() -> int:
            self.engine.scheduler.request_promotion(keys_of(f"{before}-ask-{next(turn)}", 1))
            return self.opened()

        eventually(asked, lambda now: now > before)

    def misses(self, keys: list[bytes]) -> None:
        """What cannot be had is sought, and is a miss in the end."""
        self.engine.scheduler.request_promotion(keys)
        eventually(lambda: self.engine.scheduler.lookup_many(keys), {LookupResult.MISS}.issuperset)


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """A master and a store."""
    with Cluster.running(megabytes=256) as cluster:
        yield cluster


@contextmanager
def place(cluster: Cluster, name: str) -> Iterator[Place]:
    """A node with daemon and engine."""
    node = cluster.add_node(name)
    tier = "--tier", f"mooncake:master={cluster.master_address}"
    with (
        tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path,
        started_daemons(Path(path) / "run") as start,
        Engine((daemon := start(*tier, before=node.command())).runtime_dir, name) as engine,
    ):
        started = Place(node, daemon, engine.wait_attached())
        eventually(lambda: started.tier["usable"])
        yield started


@pytest.fixture(scope="module")
def here(cluster: Cluster) -> Iterator[Place]:
    """A node that computes."""
    with place(cluster, "here") as started:
        yield started


@pytest.fixture(scope="module")
def there(cluster: Cluster) -> Iterator[Place]:
    """Another node, which has computed nothing."""
    with place(cluster, "there") as started:
        yield started


def test_what_one_stored_the_other_loads(here: Place, there: Place) -> None:
    """Chunks that one node kept in the cluster come up on the other, with every byte."""
    keys = keys_of("shared", 6)
    here.keep(keys)
    there.bring(keys)
    assert there.tier["counters"]["gets"]["ok"] >= 6
    assert there.tier["medium"] == "remote"
    assert here.tier["counters"]["gets"]["ok"] == 0  # its own copy wins
    there.misses(keys_of("nobody", 3))


def test_damaged_objects_are_told_of_without_their_keys(
    cluster: Cluster, here: Place, there: Place
) -> None:
    """They are misses, and nothing that may be read has a part of a key."""
    keys = keys_of("SECRETKEY", 2)  # three would open the breaker
    here.keep(keys)
    names = [name.hex() for name in (here.engine.scheduler.namespace, *keys)]
    spoiling = sys.executable, "-m", "tests.tier.mooncake_cluster", cluster.master_address, *names
    # A process of its own: threads of Mooncake's stay in the network in which they began.
    subprocess.run(cluster.add_node("spoiler").command(*spoiling), check=True, timeout=60)

    def corrupt() -> int:
        there.engine.scheduler.request_promotion(keys)
        gets: int = there.tier["counters"]["gets"]["corrupt"]
        return gets

    eventually(corrupt, (2).__eq__)
    there.misses(keys)
    with over_unix(there.daemon) as http:
        texts = texts_of(there.daemon, http)
    assert "checksum" in there.tier["last_error"]
    assert_hidden(texts, keys[0][:4])


@pytest.mark.nightly
@pytest.mark.parametrize("part", ["store", "master", "network"])
def test_what_breaks_comes_back(cluster: Cluster, here: Place, there: Place, part: str) -> None:
    """Meanwhile memory goes on and the rest is missed; then all serves again by itself."""
    keys, own, again = (keys_of(f"{part}-{name}", 4) for name in ("kept", "memory", "again"))
    here.keep(keys)
    there.engine.store(own)
    wait_hit(there.engine, own)
    if part == "store":
        cluster.kill_store()
        cluster.wait_segments(0)
    elif part == "master":
        cluster.kill_master()
    else:
        cluster.cut(there.node)
    if part != "store":
        there.ask_until_open()
        assert there.engine.scheduler.find_tier(keys[0]) == NO_TIER
    there.misses(keys)
    assert there.engine.load(own) == (4, 0)
    if part == "store":
        cluster.start_store(1)
        eventually(lambda: not here.tier["full"])
    elif part == "master":
        assert "start mooncake_master" in there.tier["last_error"]
        cluster.start_master()
        cluster.wait_segments(1)
    else:
        cluster.mend(there.node)
    for place in (here, there):
        eventually(lambda place=place: place.tier["breaker"], "closed".__eq__)  # type: ignore[misc]
    if part == "network":
        there.bring(keys)
    here.keep(again)
    there.bring(again)


def test_the_node_that_stored_is_lost(here: Place, there: Place) -> None:
    """What a node kept before it was killed is found by the others."""
    keys = keys_of("survive", 5)
    here.keep(keys)
    here.engine.close()
    here.daemon.stop(signal.SIGKILL)
    there.bring(keys)
