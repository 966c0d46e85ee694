"""Engines that share a daemon: every byte is right, and each gets its part."""

import select
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from kvd.metrics.counts import STAGES
from kvd.wire.tool import ToolConnection
from kvd_client import ChunkBlocks, JobResult, LookupResult, Scheduler, Worker, attachment
from kvd_proto.messages import Drain, Resume
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, engine_of, keys_of, make_layout, wait_hit
from tests.daemon.serving import wait_state
from tests.daemon.slots import wait_slots
from tests.processes import LONG
from tests.waiting import DEADLINE, PATIENCE, eventually


def test_two_ranks_store_and_load_every_byte(shared_daemon: Daemon, label: str) -> None:
    """Both groups of both ranks come back, from other blocks, over poisoned memory."""
    make_engine = partial(Engine, shared_daemon.runtime_dir, label, model=label)
    with make_engine().wait_attached() as engine:
        full, window = keys_of("full", 10), keys_of("window", 6)
        assert engine.store(full) == full
        assert engine.store(window, first_block=21, group=1) == window
        wait_hit(engine, full + window)
        assert engine.load(full) == (10, 0)
        assert engine.load(window, group=1) == (6, 0)
    # The pool outlives the engine, also where the next one has more GPU blocks.
    with make_engine(layout=make_layout(blocks=128)).wait_attached() as engine:
        assert engine.scheduler.lookup_many(full) == [LookupResult.HIT] * 10
        assert engine.load(full) == (10, 0)


def test_two_engines_store_the_same_keys_at_once(
    daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both got slots before either was told of: one stores them, the other's come back."""
    monkeypatch.setattr(attachment, "OVERDUE_SECONDS", LONG)
    with engine_of(daemon, steps=True) as engine, engine_of(daemon, "rival", steps=True) as rival:
        both, keys = (engine, rival), keys_of("same", 4)
        tickets = [one.begin(keys) for one in both]
        assert [ticket.keys for ticket in tickets] == [tuple(keys)] * 2
        jobs = [
            one.submit("store", [0], one.fill(keys, 1), ticket.slots, ticket.generations)
            for one, ticket in zip(both, tickets, strict=True)
        ]
        for one in both:
            one.scheduler.end_step()
        ended = [one.results(job)[0].success for one, job in zip(both, jobs, strict=True)]
        assert sorted(ended) == [False, True]
        eventually(lambda: daemon.status()["counters"]["stores_raced"] == 4)
        for one in both:
            wait_hit(one, keys)
            assert one.load(keys) == (4, 0)
            one.scheduler.end_step()
        wait_slots(daemon, ready=4, at_hand=both)


def test_chunks_of_requests_that_wait_are_kept(start_daemon: StartDaemon) -> None:
    """Another engine stores three times what the pool holds before the load is sent."""
    daemon = start_daemon("--lease-seconds", "600", cpu_bytes="1MiB")
    with engine_of(daemon) as engine, engine_of(daemon, "other") as other:
        keys = engine.stored("kept", 8)
        with engine.scheduler.prepare_load(keys, lease_seconds=600.0) as ticket:
            assert len(ticket) == 8
            wait_state(daemon, pinned=8)
            for turn in range(24):
                other.store(keys_of(f"flood-{turn}", 8))
            blocks = list(range(33, 49))
            engine.poison(blocks)
            assert engine.moves("load", blocks, ticket.slots, ticket.generations)
            assert engine.wrong_bytes(keys, blocks) == 0
        report = daemon.status()
        assert report["counters"]["evicted"] > 64
        assert report["counters"]["pins_late"] == 0


LAYOUT = make_layout(page=16 * 1024)  # 64 KiB a chunk: an engine's loans are a part of the pool
MIB = 2**20


def named(daemon: Daemon, model: str) -> dict[str, Any]:
    """A namespace in the report."""
    namespaces = {namespace["model"]: namespace for namespace in daemon.status()["namespaces"]}
    return dict(namespaces[model])


def test_a_flood_of_stores_takes_no_floor_and_fails_no_load(start_daemon: StartDaemon) -> None:
    """The quiet engine's chunks stay and all its loads succeed, while the other fills the pool."""
    daemon = start_daemon("--quota", '{quiet = {floor = "4MiB"}}', cpu_bytes="16MiB")
    with (
        engine_of(daemon, "quiet", model="quiet", layout=LAYOUT) as quiet,
        engine_of(daemon, "greedy", model="greedy", layout=LAYOUT) as greedy,
    ):
        keys = quiet.stored("mine", 12)
        under_way: dict[int, int] = {}
        for turn in range(40):
            greedy.results(under_way)
            ticket = greedy.begin(keys_of(f"flood-{turn}", 16))
            blocks = list(range(1, 1 + 2 * len(ticket.keys)))
            under_way = greedy.submit("store", [0], blocks, ticket.slots, ticket.generations)
            assert quiet.load(keys) == (12, 0)
        mine = named(daemon, "quiet")
        assert named(daemon, "greedy")["counters"]["evicted"] > 0
        assert mine["counters"]["yielded"] == mine["counters"]["pins_late"] == 0
        assert mine["chunks"]["ready"] == 12
        (quota,) = daemon.status()["pool"]["quotas"]
        assert quota["held_bytes"] >= 12 * 64 * 1024
        assert quiet.begin(keys_of("more", 1)).slots.size == 1


def test_a_cap_keeps_a_flood_out_of_the_rest_of_the_pool(start_daemon: StartDaemon) -> None:
    """A capped engine evicts its own chunks and leaves free what it may not have."""
    daemon = start_daemon("--quota", '{greedy = {cap = "25%"}}', cpu_bytes="16MiB")
    with engine_of(daemon, "greedy", model="greedy", layout=LAYOUT) as greedy:
        for turn in range(8):
            greedy.store(keys_of(f"flood-{turn}", 16))
        report = daemon.status()
        (quota,) = report["pool"]["quotas"]
        assert 3 * MIB <= quota["held_bytes"] <= quota["cap_bytes"] == 4 * MIB
        assert report["pool"]["free_bytes"] >= 12 * MIB
        assert named(daemon, "greedy")["counters"]["evicted"] > 0


def readable(source: Scheduler | Worker, seconds: float = PATIENCE) -> bool:
    """Whether its descriptor is, within so long."""
    return bool(select.select([source], [], [], seconds)[0])


def test_descriptors_tell_of_ended_jobs_and_ready_chunks(shared_daemon: Daemon, label: str) -> None:
    """Each is readable when its call has news, and quiet when the call has taken them."""
    with engine_of(shared_daemon, label, model=label) as engine:
        worker, scheduler = engine.workers[0], engine.scheduler
        quieten(worker, worker.get_finished)
        quieten(scheduler, scheduler.take_ready)
        keys = keys_of("chunk", 4)
        ticket = scheduler.prepare_store(keys)
        blocks = engine.fill(keys, 1)
        worker.store(70, ticket, [ChunkBlocks(keys, blocks), ChunkBlocks([], [])])
        finished: list[JobResult] = []
        while not finished:
            assert readable(worker)
            finished = worker.get_finished()
        assert [(result.job_id, result.success) for result in finished] == [(70, True)]
        ready = False
        while scheduler.lookup_many(keys) != [LookupResult.HIT] * 4:
            assert readable(scheduler)
            ready |= scheduler.take_ready()
        if not ready:  # the directory said so before the descriptor
            assert readable(scheduler)
            ready = scheduler.take_ready()
        quieten(worker, worker.get_finished)
        quieten(scheduler, scheduler.take_ready)
        assert ready


def quieten(source: Scheduler | Worker, take: Callable[[], object]) -> None:
    """Take the news in, until there are none."""

    def quiet() -> bool:
        take()
        return not readable(source, 0.0)

    eventually(quiet)


def test_waiting_says_why_an_engine_is_not_attached(shared_daemon: Daemon) -> None:
    """No daemon, no rank, a missing rank: each is said, and attached is true."""
    with Scheduler(shared_daemon.runtime_dir.parent / "nowhere", "engine") as lonely:
        waited = lonely.wait_attached(0.0)
        assert not waited
        assert "no daemon answers in" in waited.why
    with Scheduler(shared_daemon.runtime_dir, "engine", deadline=DEADLINE) as early:
        eventually(lambda: "no rank of engine 'engine' is registered" in why(early))
    with Engine(shared_daemon.runtime_dir, world_size=2, ranks=[0]) as half:
        for part in (half.scheduler, half.workers[0]):
            eventually(partial(why, part), "engine 'engine' lacks rank 1 of 2".__eq__)
        half.add(1)
        assert half.scheduler.wait_attached(PATIENCE).why == ""
        with Worker(shared_daemon.runtime_dir, "engine", 1, 2, deadline=DEADLINE) as idle:
            eventually(lambda: "nothing is registered" in why(idle))


def why(client: Scheduler | Worker) -> str:
    """Why it is not attached; it may be about to connect, too."""
    return client.wait_attached(0.0).why


REFUSED = ("present", "pending", "full", "quota", "not_yet", "draining")


def test_the_figures_of_a_report_agree(start_daemon: StartDaemon) -> None:
    """Keys by answer, bytes by state, jobs by stage and evictions by age all add up.

    The engine stores more than fits, looks up, loads what is there and what is not, offers again.
    """
    quota = '{model = {floor = "1MiB", cap = "100%"}}'
    daemon = start_daemon("--quota", quota, cpu_bytes="8MiB")
    with Engine(daemon.runtime_dir, layout=make_layout(page=64 * 1024)).wait_attached() as engine:
        for name in "abcdef":
            assert len(engine.store(keys_of(name, 4))) == 4
        # The broker hears of the last shares a little later.
        eventually(lambda: not daemon.status()["namespaces"][0]["chunks"]["writing"])
        assert engine.load(keys_of("f", 4)) == (4, 0)
        assert engine.load(keys_of("a", 4)) == (0, 0)
        engine.scheduler.prepare_store(keys_of("f", 4))
        lookups = engine.scheduler.lookup_many([*keys_of("f", 4), *keys_of("a", 2)])
        assert lookups.count(LookupResult.HIT) == 4
        ticket = engine.scheduler.prepare_load(keys_of("f", 1))
        with ToolConnection(daemon.runtime_dir, PATIENCE) as control:
            control.request(Drain())
            engine.scheduler.prepare_store(keys_of("late", 3))
            eventually(lambda: daemon.status()["counters"]["draining"] == 3)
            control.request(Resume())
        nbytes = engine.scheduler.bytes_per_chunk
        report = eventually(
            daemon.status,
            lambda report: (
                report["counters"]["store_bytes"] == 24 * nbytes
                and report["counters"]["load_bytes"] == 4 * nbytes
                and report["counters"]["lookup_chunks"] >= 6
            ),
        )
        jobs = {name for name, n in report["counters"]["jobs"].items() if n}
        assert jobs == {"store_ok", "load_ok"}
        (namespace,) = report["namespaces"]
        for counters in (report["counters"], namespace["counters"]):
            assert counters["accepted"] == counters["stored"] == 24
            assert counters["present"] == 4
            assert counters["draining"] == 3
            assert counters["offered"] == counters["accepted"] + sum(counters[r] for r in REFUSED)
            assert (counters["asked"], counters["hits"], counters["pins_late"]) == (5, 5, 0)
            assert counters["stores_lost"] == counters["stores_raced"] == 0
        (lane,) = report["lanes"]
        (reported,) = report["engines"]
        for state in ("ready", "writing", "draining"):
            nbytes = namespace["chunks"][state] * namespace["bytes_per_chunk"]
            assert namespace[f"{state}_bytes"] == nbytes
        assert namespace["held_bytes"] + report["pool"]["free_bytes"] == report["pool"]["cpu_bytes"]
        assert report["pool"]["allocated_bytes"] == lane["usable_bytes"] == lane["pool_bytes"]
        evicted = namespace["counters"]["evicted"]
        assert evicted == 24 - namespace["chunks"]["ready"] > 0
        assert sum(namespace["counters"]["eviction_age"]["counts"]) == evicted
        for way in ("store", "load"):
            for stage in STAGES:
                counts = lane["counters"]["stages"][f"{way}_{stage}"]["counts"]
                assert sum(counts) == lane["counters"]["jobs"][f"{way}_ok"]
            assert report["counters"][f"{way}_bytes"] == lane["counters"][f"{way}_bytes"] > 0
        assert namespace["tokens_per_chunk"] == 32
        counted = {name: n for name, n in reported["counters"].items() if n}
        assert counted == {"lookup_chunks": 6, "hit_chunks": 4}
        assert report["counters"]["hit_chunks"] == 4
        assert (report["leases"], namespace["chunks"]["pinned"]) == (1, 1)
        engine.scheduler.complete_load(ticket)
        assert report["broker"]["requests"]["Step"] >= 6 + 1 + 1 + 2
        assert report["broker"]["refusals"] == {}
        assert report["sessions"]["open"] == 3 + 1  # who asks counts too
        assert all(check["ok"] for check in report["checks"])
        longest = report["broker"]["loop_lag_max_seconds"]
        assert 0 < longest <= report["broker"]["loop_lag"]["sum"]
        assert report["started"] < report["time"]
        assert report["broker"]["open_fds"] > 0
