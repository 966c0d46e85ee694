"""Operators' commands and a real daemon, with an engine that checks every byte."""

import random
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor

from kvd_client import LookupResult, StoreAnswer
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.serving import run_kvd, wait_state
from tests.waiting import eventually


def kvd(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of `kvd` for this daemon, to its end."""
    command, *rest = arguments
    return run_kvd(command, "--runtime-dir", str(daemon.runtime_dir), *rest)


def test_a_drained_daemon_ends_what_began_refuses_stores_and_serves_loads(daemon: Daemon) -> None:
    """A wait counts what is in flight; then nothing is stored, without an error, until resume."""
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        keys = keys_of("kept", 3)
        engine.store(keys)
        wait_hit(engine, keys)
        lease = engine.scheduler.prepare_load(keys)
        writing = engine.begin(keys_of("begun", 2))
        wait_state(daemon, writing=2, pinned=3)
        drained = kvd(daemon, "drain", "--wait", "200ms")
        assert drained.returncode == 1
        assert "2 chunks being written, 1 leases" in drained.stdout
        blocks = engine.fill(writing.keys, 1)
        jobs = engine.submit("store", [0, 1], blocks, writing.slots, writing.generations)
        assert all(result.success for result in engine.results(jobs).values())
        engine.scheduler.complete_store(writing)
        engine.scheduler.complete_load(lease)
        drained = kvd(daemon, "drain", "--wait", "60s")
        assert (drained.returncode, drained.stderr) == (0, "")
        assert drained.stdout == "drained: no new stores; nothing is in flight\n"
        report = daemon.status()
        assert not report["ready"]
        assert report["drain"]["uid"] == report["engines"][0]["sessions"][0]["uid"]
        refused = engine.scheduler.prepare_store(keys_of("refused", 2))
        assert set(refused.answers) == {StoreAnswer.FULL}
        assert engine.load(list(writing.keys)) == (2, 0)
        with Engine(daemon.runtime_dir, name="late").wait_attached() as late:
            assert late.load(keys) == (3, 0)
        assert kvd(daemon, "status").returncode == 1
        assert kvd(daemon, "resume").stdout == "resumed: stores are taken\n"
        assert kvd(daemon, "resume").stdout == "stores are taken as before\n"
        assert len(engine.store(keys_of("taken", 2))) == 2
        daemon.wait_ready()
    daemon.wait_log(f"drained by uid {report['drain']['uid']} pid ")
    assert kvd(daemon, "drain").returncode == 0
    assert daemon.stop() == 0  # an operator's drain does not keep it from its own


def store_and_load(engine: Engine, chance: random.Random) -> tuple[int, int]:
    """Some of a dozen prompts' chunks: how many came back, and how many bytes were wrong."""
    keys = keys_of(f"traffic-{chance.randrange(12)}", chance.randint(1, 8))
    ticket = engine.scheduler.prepare_store(keys)
    if ticket.keys:
        blocks = engine.fill(ticket.keys, 1)
        jobs = engine.submit("store", [0, 1], blocks, ticket.slots, ticket.generations)
        stored = all(result.success for result in engine.results(jobs).values())
        engine.scheduler.complete_store(ticket, success=stored)
    return engine.load(keys)


def test_engines_keep_right_bytes_whatever_an_operator_does(start_daemon: StartDaemon) -> None:
    """Clear, evict, drain and resume under load: loads bring the right bytes or are a miss."""
    daemon = start_daemon(cpu_bytes="2MiB")
    chance = random.Random(1)
    with Engine(daemon.runtime_dir).wait_attached() as engine, ThreadPoolExecutor(1) as operator:
        for command in (
            ["clear", "--yes"],
            ["evict", "--older-than", "0"],
            ["clear", "--namespace", "model", "--yes"],
            ["evict", "--older-than", "10ms", "--namespace", "model"],
            ["drain", "--wait", "60s"],
            ["clear", "--yes"],
            ["resume"],
        ):
            under_way = operator.submit(kvd, daemon, *command)
            loaded = 0
            while loaded < (0 if daemon.status()["drain"] else 20) or not under_way.done():
                chunks, wrong = store_and_load(engine, chance)
                assert wrong == 0
                loaded += chunks
            done = under_way.result()
            assert (done.returncode, done.stderr) == (0, ""), done


def test_clear_and_evict_say_how_many(daemon: Daemon) -> None:
    """Without --yes and nobody to answer nothing is cleared; with it everything is."""
    with (
        Engine(daemon.runtime_dir, name="one").wait_attached() as one,
        Engine(daemon.runtime_dir, name="two", model="other").wait_attached() as two,
    ):
        keys = keys_of("kept", 4)
        for engine in (one, two):
            engine.store(keys)
            wait_hit(engine, keys)
        refused = kvd(daemon, "clear")
        assert refused.returncode == 1
        assert "--yes" in refused.stderr
        done = kvd(daemon, "evict", "--older-than", "1h")
        assert done.stdout == "all namespaces: 0 chunks evicted, 0 B\n"
        done = kvd(daemon, "evict", "--older-than", "0", "--namespace", "other")
        assert done.stdout.endswith("(other): 4 chunks evicted, 128 KiB\n"), done
        eventually(lambda: set(two.scheduler.lookup_many(keys)), {LookupResult.MISS}.__eq__)
        assert one.load(keys) == (4, 0)
        lease = one.scheduler.prepare_load(keys[:1])
        eventually(lambda: daemon.status()["leases"])
        done = kvd(daemon, "clear", "--yes")
        assert done.stdout == (
            "all namespaces: 3 chunks dropped, 96 KiB; 1 more go when their leases end\n"
        )
        one.scheduler.complete_load(lease)
        eventually(lambda: set(one.scheduler.lookup_many(keys)), {LookupResult.MISS}.__eq__)
        assert one.store(keys) == keys
    daemon.wait_log("all namespaces cleared by uid ")


def test_explain_says_what_became_of_a_chunk(daemon: Daemon) -> None:
    """A chunk that is here, one that was dropped and one that never was; a key that is none."""
    with Engine(daemon.runtime_dir, name="one").wait_attached() as engine:
        keys = keys_of("fate", 1)
        engine.store(keys)
        wait_hit(engine, keys)
        here = kvd(daemon, "explain", keys[0].hex())
        assert re.search(r"\(model\): READY in slot \d+, last used \d+ s ago\n", here.stdout), here
        assert "1 chunks evicted" in kvd(daemon, "evict", "--older-than", "0").stdout
        gone = kvd(daemon, "explain", keys[0].hex(), "--namespace", "model")
        assert re.search(r": dropped \d+ s ago by kvd evict\n", gone.stdout), gone
        assert ": never seen, as far back as" in kvd(daemon, "explain", "c0ffee").stdout
        wrong = kvd(daemon, "explain", "c0ffe")
        assert wrong.returncode == 2
        assert "'c0ffe': a key has 2 to 96 hex digits" in wrong.stderr
