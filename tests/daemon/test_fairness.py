"""Two engines on one daemon, one of which stores more than the pool holds."""

from typing import Any

from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, make_layout, wait_hit

LAYOUT = make_layout(page=16 * 1024)  # 64 KiB a chunk: an engine's loans are a part of the pool
MIB = 2**20


def named(daemon: Daemon, model: str) -> dict[str, Any]:
    """A namespace in the report."""
    (found,) = [n for n in daemon.status()["namespaces"] if n["model"] == model]
    return dict(found)


def test_a_flood_of_stores_takes_no_floor_and_fails_no_load(start_daemon: StartDaemon) -> None:
    """The quiet engine's chunks stay and all its loads succeed, while the other fills the pool."""
    daemon = start_daemon("--quota", '{quiet = {floor = "4MiB"}}', cpu_bytes="16MiB")
    with (
        Engine(daemon.runtime_dir, "quiet", 1, "quiet", LAYOUT).wait_attached() as quiet,
        Engine(daemon.runtime_dir, "greedy", 1, "greedy", LAYOUT).wait_attached() as greedy,
    ):
        keys = keys_of("mine", 12)
        quiet.store(keys)
        wait_hit(quiet, keys)
        under_way: dict[int, int] = {}
        for turn in range(40):
            greedy.results(under_way)
            ticket = greedy.begin(keys_of(f"flood-{turn}", 16))
            blocks = list(range(1, 1 + 2 * len(ticket.keys)))
            under_way = greedy.submit("store", [0], blocks, ticket.slots, ticket.generations)
            assert quiet.load(keys) == (12, 0)
        mine, theirs = named(daemon, "quiet"), named(daemon, "greedy")
        assert theirs["counters"]["evicted"] > 0
        assert mine["counters"]["yielded"] == 0
        assert mine["counters"]["pins_late"] == 0
        assert mine["chunks"]["ready"] == 12
        (quota,) = daemon.status()["pool"]["quotas"]
        assert quota["held_bytes"] >= 12 * 64 * 1024
        assert quiet.begin(keys_of("more", 1)).slots.size == 1


def test_a_cap_keeps_a_flood_out_of_the_rest_of_the_pool(start_daemon: StartDaemon) -> None:
    """A capped engine evicts its own chunks and leaves free what it may not have."""
    daemon = start_daemon("--quota", '{greedy = {cap = "25%"}}', cpu_bytes="16MiB")
    with Engine(daemon.runtime_dir, "greedy", 1, "greedy", LAYOUT).wait_attached() as greedy:
        for turn in range(8):
            greedy.store(keys_of(f"flood-{turn}", 16))
        report = daemon.status()
        (quota,) = report["pool"]["quotas"]
        assert 3 * MIB <= quota["held_bytes"] <= quota["cap_bytes"] == 4 * MIB
        assert report["pool"]["free_bytes"] >= 12 * MIB
        assert named(daemon, "greedy")["counters"]["evicted"] > 0
