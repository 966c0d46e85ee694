"""Operators' commands and a real daemon, with an engine that checks every byte."""

import subprocess
from pathlib import Path

from kvd_client import LookupResult
from tests.conftest import Daemon
from tests.daemon.engines import Engine, keys_of
from tests.daemon.test_engines import wait_hit
from tests.daemon.test_serve import run_kvd


def kvd(daemon: Daemon, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of `kvd` for this daemon, to its end."""
    command, *rest = arguments
    return run_kvd(command, "--runtime-dir", str(daemon.runtime_dir), *rest)


def test_a_drained_daemon_refuses_stores_and_serves_loads(daemon: Daemon) -> None:
    """Stores come to nothing without an error, loads bring the right bytes, resume ends it."""
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        keys = keys_of("kept", 4)
        engine.store(keys)
        wait_hit(engine, keys)
        drained = kvd(daemon, "drain", "--wait", "20s")
        assert (drained.returncode, drained.stderr) == (0, "")
        assert drained.stdout == "drained: no new stores; nothing is in flight\n"
        report = daemon.status()
        assert not report["ready"]
        assert report["drain"]["uid"] == report["engines"][0]["sessions"][0]["uid"]
        assert engine.store(keys_of("refused", 2)) == []
        assert engine.load(keys) == (4, 0)
        with Engine(daemon.runtime_dir, name="late").wait_attached() as late:
            assert late.load(keys) == (4, 0)
        assert kvd(daemon, "status").returncode == 1
        assert kvd(daemon, "resume").stdout == "resumed: stores are taken\n"
        assert kvd(daemon, "resume").stdout == "stores are taken as before\n"
        assert len(engine.store(keys_of("taken", 2))) == 2
        daemon.wait_ready()
    assert f"drained by uid {report['drain']['uid']} pid " in daemon.log.read_text()


def test_a_drain_waits_for_what_is_in_flight(daemon: Daemon) -> None:
    """With a lease and an unfinished store the wait fails and counts them; then it succeeds."""
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        keys = keys_of("kept", 3)
        engine.store(keys)
        wait_hit(engine, keys)
        lease = engine.scheduler.prepare_load(keys)
        writing = engine.scheduler.prepare_store(keys_of("begun", 2))
        drained = kvd(daemon, "drain", "--wait", "200ms")
        assert drained.returncode == 1
        assert "2 chunks being written, 1 leases" in drained.stdout
        blocks = engine.fill(writing.keys, 1)
        jobs = engine.submit("store", [0, 1], blocks, writing.slots, writing.generations)
        assert all(result.success for result in engine.results(jobs).values())
        engine.scheduler.complete_store(writing.keys)
        engine.scheduler.complete_load(lease)
        assert kvd(daemon, "drain", "--wait", "20s").returncode == 0
        assert engine.scheduler.lookup(writing.keys[0]) is LookupResult.HIT
        assert engine.load(list(writing.keys)) == (2, 0)


def test_sigterm_ends_a_drained_daemon(daemon: Daemon) -> None:
    """An operator's drain does not keep the daemon from its own."""
    assert kvd(daemon, "drain").returncode == 0
    assert daemon.stop() == 0


def test_without_a_daemon_the_commands_say_how_to_start_one(tmp_path: Path) -> None:
    """One sentence and exit status 1."""
    for command in ("drain", "resume"):
        done = run_kvd(command, "--runtime-dir", str(tmp_path))
        assert done.returncode == 1
        assert f"kvd serve --runtime-dir {tmp_path}" in done.stderr
        assert "Traceback" not in done.stderr


def test_a_wait_that_is_no_duration_is_refused(tmp_path: Path) -> None:
    """The value and the way to write it are named."""
    done = run_kvd("drain", "--runtime-dir", str(tmp_path), "--wait", "soon")
    assert done.returncode == 2
    assert "'soon' is no duration" in done.stderr
