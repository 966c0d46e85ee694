"""`kvd serve` and the commands of an operator."""

import fcntl
import json
import os
import random
import re
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvd.logs import MAX_PER_MINUTE, WINDOW_SECONDS
from kvd_client import LookupResult, StoreAnswer
from kvd_proto.channel import close_all
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, engine_of, keys_of, wait_hit
from tests.daemon.serving import run_kvd, wait_state
from tests.daemon.users import OTHER_UID, as_user, needs_root
from tests.processes import children_running, kill_and_wait, python
from tests.raw_client import RawClient
from tests.waiting import PATIENCE, eventually


def kvd(daemon: Daemon, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command of `kvd` for this daemon, to its end."""
    return run_kvd(*command.split(), "--runtime-dir", str(daemon.runtime_dir), *arguments)


@pytest.mark.parametrize(
    "command",
    ["status", "engines", "namespaces", "config reload", "config show --running", "selftest"],
)
def test_a_command_for_programs_prints_its_error_as_json(tmp_path: Path, command: str) -> None:
    """With --json and no daemon: one object on stdout, the line for people, exit status 1."""
    done = run_kvd(*command.split(), "--runtime-dir", str(tmp_path), "--json")
    assert done.returncode == 1
    assert done.stderr == f"Error: {json.loads(done.stdout)['error']}\n"
    assert "no daemon answers" in done.stderr


@needs_root
@pytest.mark.parametrize(
    "command",
    [
        "status --wait 2m",
        "top --once",
        "engines",
        "drain",
        "resume",
        "clear --yes",
        "evict --older-than 1h",
        "config reload",
        "config show --running",
        "selftest",
        "purge",
    ],
)
def test_a_directory_that_may_not_be_entered_is_named_at_once(
    runtime_dir: Path, command: str
) -> None:
    """Every command says uid, directory, mode and remedy; none waits or advises `kvd serve`."""
    runtime_dir.parent.chmod(0o711)
    runtime_dir.mkdir(0o750)
    os.chown(runtime_dir, 0, OTHER_UID)
    elsewhere = str(runtime_dir.parent / "elsewhere")
    # The other user may not be able to import: what the command needs is there after this.
    run_kvd(*command.replace("2m", "0").split(), "--runtime-dir", elsewhere)
    begin = time.monotonic()
    with as_user(OTHER_UID + 1):
        done = run_kvd(*command.split(), "--runtime-dir", str(runtime_dir))
    assert time.monotonic() - begin < PATIENCE
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    denied = f"uid {OTHER_UID + 1} may not enter {runtime_dir} (mode 0750, group {OTHER_UID}): "
    assert f"{denied}usermod -aG {OTHER_UID} {OTHER_UID + 1}" in done.stderr
    assert "kvd serve" not in done.stderr


def test_sigterm_drains_and_leaves_nothing(daemon: Daemon) -> None:
    """SIGTERM ends the daemon with 0; sockets, lock and pool are gone."""
    log = daemon.wait_log("pool of 64 MiB at ")
    pool = Path(log.split("pool of 64 MiB at ")[1].split()[0])
    assert pool.exists()
    assert daemon.stop() == 0
    assert not pool.exists()
    assert list(daemon.runtime_dir.iterdir()) == []


def test_errors_of_settings_follow_the_format_of_the_log(tmp_path: Path) -> None:
    """One line of JSON for each that is wrong, where the file with the errors says so."""
    file = tmp_path / "kvd.toml"
    file.write_text('policy = "mru"\nreserve = "x"\nlog_format = "json"\n')
    done = run_kvd("serve", "--config", str(file), "--runtime-dir", str(tmp_path / "run"))
    assert done.returncode == os.EX_CONFIG
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [line["event"].split(":")[1] for line in lines] == ["1", "2"]
    assert {line["level"] for line in lines} == {"error"}


def test_nothing_large_is_imported_before_the_lane_is_started() -> None:
    """The broker's own imports run beside the lane's, and the directory is locked before most."""
    later = "{'numpy', 'kvd_proto.messages'}"
    done = python("-c", f"import sys, kvd.cli.serve; print({later} & set(sys.modules))")
    assert done.stdout == "set()\n", done.stderr


def test_a_lane_that_dies_before_the_pool_is_there_is_started_again(
    start_daemon: StartDaemon,
) -> None:
    """Its end is told, and the first engine is served by the next one."""
    daemon = start_daemon("--reserve", "0", cpu_bytes="auto", ready=False)
    pid = daemon.process.pid
    (lane,) = eventually(lambda: children_running(pid, "kvd.lane"), lambda lanes: len(lanes) == 1)
    kill_and_wait(lane.pid)
    eventually(lambda: daemon.status()["lanes"][0]["state"] == "down")
    with engine_of(daemon):
        assert daemon.status()["lanes"][0]["state"] == "up"


@pytest.mark.parametrize("files", [8, 14])
def test_a_start_that_may_open_no_file_says_so(tmp_path: Path, files: int) -> None:
    """One clear error with the remedy, whatever it was that it wanted to open."""
    limited = (
        f"import resource; resource.setrlimit(resource.RLIMIT_NOFILE, ({files}, {files}));"
        "import runpy; runpy.run_module('kvd', run_name='__main__', alter_sys=True)"
    )
    options = ("--runtime-dir", str(tmp_path / "run"), "--pool-dir", str(tmp_path))
    done = python("-c", limited, "serve", *options, "--cpu-bytes", "4MiB", "--http-listen", "off")
    assert done.returncode == 1
    assert "raise LimitNOFILE" in done.stderr
    assert "Traceback" not in done.stderr


def test_reload_takes_up_what_it_can_and_names_the_rest(
    start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """The command says what changed, what waits and where it was found; the log says who asked.

    SIGHUP does what the command does, and ends neither broker nor lane.
    """
    file = tmp_path / "kvd.toml"
    file.write_text("lease_seconds = 30.0\n")
    daemon = start_daemon("--config", str(file))
    file.write_text('lease_seconds = 20.0\npolicy = "lru"\nlog_level = "debug"\n')
    done = kvd(daemon, "config reload")
    assert done.returncode == 0, done.stderr
    assert f"lease_seconds: 30.0 -> 20.0  ({file}:1)" in done.stdout
    assert "restart" in done.stdout
    assert f"policy: adaptive -> lru  ({file}:2)" in done.stdout
    log = daemon.wait_log("configuration reloaded by")
    assert f"uid {os.getuid()} pid " in log
    shown = kvd(daemon, "config show", "--running").stdout
    rows = {line.split()[0]: line for line in shown.splitlines()}
    assert "20.0" in rows["lease_seconds"]
    assert "after a restart lru" in rows["policy"]
    assert "--cpu-bytes" in rows["cpu_bytes"]
    lane = daemon.status()["lanes"][0]["pid"]
    file.write_text("lease_seconds = 10.0\n")
    os.kill(lane, signal.SIGHUP)
    daemon.process.send_signal(signal.SIGHUP)
    daemon.wait_log("configuration reloaded by SIGHUP: lease_seconds = 10.0 (was 20.0)")
    assert daemon.wait_ready()["lanes"][0]["pid"] == lane


@pytest.mark.parametrize("where", ["full", "gone", "closed"])
def test_a_stderr_that_takes_nothing_stops_nothing(start_daemon: StartDaemon, where: str) -> None:
    """The daemon serves and ends as ever with its stderr full, without a reader, or closed."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    os.write(write, b"x" * 4096)
    stderr = {"full": f">/proc/{os.getpid()}/fd/{write}", "gone": "> >(:)", "closed": ">&-"}
    daemon = start_daemon(before=("bash", "-c", f'exec "$@" 2{stderr[where]}', "bash"))
    report = daemon.wait_ready()
    assert report["lanes"][0]["up"]
    assert (daemon.runtime_dir / "kvd.lock").read_text() == f"{report['pid']}\n"
    assert daemon.stop() == 0
    close_all((read, write))


def test_what_a_client_repeats_is_written_a_hundred_times_and_then_counted(
    start_daemon: StartDaemon,
) -> None:
    """A client that sends nonsense again and again fills no log."""
    daemon = start_daemon()
    times, begun = MAX_PER_MINUTE + 40, time.monotonic()
    for _ in range(times):
        with RawClient(daemon.runtime_dir) as client:
            client.send_bytes(b"\x01\0")
            assert client.hung_up()
    daemon.stop()
    lines = [line for line in daemon.log.read_text().splitlines() if "is closed: a message" in line]
    written = [line for line in lines if "left out" not in line]
    left_out = sum(int(n) for n in re.findall(r"left out (\d+) more lines", "\n".join(lines)))
    windows = 1 + (time.monotonic() - begun) // WINDOW_SECONDS
    assert len(written) <= windows * MAX_PER_MINUTE
    assert len(written) + left_out == times


def test_a_drained_daemon_ends_what_began_refuses_stores_and_serves_loads(daemon: Daemon) -> None:
    """A wait counts what is in flight; then nothing is stored, without an error, until resume."""
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        keys = engine.stored("kept", 3)
        lease = engine.scheduler.prepare_load(keys)
        writing = engine.begin(keys_of("begun", 2))
        wait_state(daemon, writing=2, pinned=3)
        drained = kvd(daemon, "drain", "--wait", "200ms")
        assert drained.returncode == 1
        assert "2 chunks being written, 1 leases" in drained.stdout
        blocks = engine.fill(writing.keys, 1)
        assert engine.moves("store", blocks, writing.slots, writing.generations)
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
        stored = engine.moves("store", blocks, ticket.slots, ticket.generations)
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
                chunks, wrong_bytes = store_and_load(engine, chance)
                assert wrong_bytes == 0
                loaded += chunks
            done = under_way.result()
            assert (done.returncode, done.stderr) == (0, ""), done


def test_clear_and_evict_say_how_many(daemon: Daemon) -> None:
    """Without --yes and nobody to answer nothing is cleared; with it everything is."""
    with engine_of(daemon, "one") as one, engine_of(daemon, "two", model="other") as two:
        keys = keys_of("kept", 4)
        for engine in (one, two):
            engine.store(keys)
            wait_hit(engine, keys)
        refused = kvd(daemon, "clear")
        assert refused.returncode == 1
        assert "--yes" in refused.stderr
        done = kvd(daemon, "evict", "--older-than", "1h")
        assert done.stdout == "all open namespaces: 0 chunks evicted, 0 B\n"
        done = kvd(daemon, "evict", "--older-than", "0", "--namespace", "other")
        assert done.stdout.endswith("(other): 4 chunks evicted, 64 KiB\n"), done
        eventually(lambda: set(two.scheduler.lookup_many(keys)), {LookupResult.MISS}.__eq__)
        assert one.load(keys) == (4, 0)
        lease = one.scheduler.prepare_load(keys[:1])
        eventually(lambda: daemon.status()["leases"])
        done = kvd(daemon, "clear", "--yes")
        assert done.stdout == (
            "all open namespaces: 3 chunks dropped, 48 KiB; 1 more go when their leases end\n"
        )
        one.scheduler.complete_load(lease)
        eventually(lambda: set(one.scheduler.lookup_many(keys)), {LookupResult.MISS}.__eq__)
        assert one.store(keys) == keys
    daemon.wait_log("all open namespaces cleared by uid ")


def test_explain_says_what_became_of_a_chunk(daemon: Daemon) -> None:
    """A chunk that is here, one that was dropped and one that never was; a key that is none."""
    with Engine(daemon.runtime_dir, name="one").wait_attached() as engine:
        keys = engine.stored("fate", 1)
        here = kvd(daemon, "explain", keys[0].hex())
        assert re.search(r"\(model\): READY in slot \d+, last used \d+ s ago\n", here.stdout), here
        assert "1 chunks evicted" in kvd(daemon, "evict", "--older-than", "0").stdout
        gone = kvd(daemon, "explain", keys[0].hex(), "--namespace", "model")
        assert re.search(r": dropped \d+ s ago by kvd evict\n", gone.stdout), gone
        assert ": never seen, as far back as" in kvd(daemon, "explain", "c0ffee").stdout
        refused = kvd(daemon, "explain", "c0ffe")
        assert refused.returncode == 2
        assert "'c0ffe': a key has 2 to 96 hex digits" in refused.stderr
