"""Pools that killed daemons of other runtime directories have left: named, removed, adopted."""

import fcntl
import os
import re
import shlex
import shutil
import signal
import socket
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from kvd.machine.memory import pool_directory_name
from kvd.machine.pools import remove_unused_pools
from kvd.server.reset_file import ResetFile
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, engine_of, keys_of, wait_hit
from tests.daemon.serving import run_kvd
from tests.daemon.users import needs_root
from tests.processes import has_ended
from tests.waiting import PATIENCE, eventually

SIZE = "4MiB"
KEYS = 5
StartIn = Callable[..., Daemon]


@pytest.fixture
def pool_dir() -> Iterator[Path]:
    """A directory on tmpfs with the pools of one test."""
    with tempfile.TemporaryDirectory(prefix="pools-", dir="/dev/shm") as path:
        yield Path(path)


@pytest.fixture
def start(start_daemon: StartDaemon, runtime_dir: Path, pool_dir: Path) -> StartIn:
    """Starts a daemon with this name of its runtime directory, which keeps its pool."""

    def start(name: str, *extra: str, where: Path = pool_dir, **options: object) -> Daemon:
        flags = ("--keep-pool", "yes", "--pool-dir", str(where), *extra)
        options = {"cpu_bytes": SIZE} | options
        return start_daemon(*flags, where=runtime_dir.parent / name, **options)

    return start


def kill(daemon: Daemon) -> None:
    """Kill a daemon; its children have ended, too."""
    children = psutil.Process(daemon.process.pid).children()
    daemon.stop(signal.SIGKILL)
    eventually(lambda: all(map(has_ended, children)))


def leave(daemon: Daemon, name: str = "left") -> list[bytes]:
    """Store chunks and kill the daemon; the chunks' keys."""
    with engine_of(daemon) as engine:
        keys = engine.stored(name, KEYS)
    kill(daemon)
    return keys


def directory(daemon: Daemon, pool_dir: Path) -> Path:
    """Where the daemon keeps its pool."""
    return pool_dir / pool_directory_name(daemon.runtime_dir)


def loaded(daemon: Daemon, keys: list[bytes]) -> int:
    """How many chunks a new engine loads, all with the right bytes."""
    with Engine(daemon.runtime_dir, "other", 1).wait_attached() as engine:
        chunks, wrong_bytes = engine.load(keys)
    assert wrong_bytes == 0
    return chunks


def test_a_pool_dir_that_does_not_exist_is_named() -> None:
    """One error with the setting, and exit status 1."""
    done = run_kvd("purge", "--pool-dir", "/nonexistent", "--unused")
    assert (done.returncode, done.stdout) == (1, "")
    assert "pool_dir = /nonexistent: " in done.stderr


def command_in(text: str) -> list[str]:
    """The arguments of the command that removes unused pools, as a text names it."""
    found = re.search(r"kvd (purge \S+ \S+ \S+ \S+ --unused)", text)
    assert found, text
    return shlex.split(found[1])


def test_pools_of_killed_daemons_are_named_and_all_but_the_one_in_use_are_removed(
    start: StartIn, pool_dir: Path
) -> None:
    """Eight daemons in a row, each with another runtime directory: seven pools are unused.

    The eighth daemon's log and the doctor name all seven with the command that removes them.
    """
    killed = []
    for number in range(7):
        killed.append(start(f"run{number}"))
        kill(killed[-1])
    last = start("last")
    with engine_of(last) as engine:
        keys = engine.stored("kept", KEYS)
    log = last.wait_log("unused pools take 28.")
    (line,) = (line for line in log.splitlines() if "unused pools take" in line)
    assert "warning" in line
    doctor = run_kvd("doctor", "--pool-dir", str(pool_dir), "--runtime-dir", str(last.runtime_dir))
    for daemon in killed:
        named = rf"4\.\d+ MiB of {daemon.runtime_dir}, started \S+ m?s ago"
        assert re.search(named, line), line
        assert re.search(named, doctor.stdout), doctor
    assert "unused pools take" not in killed[0].log.read_text()
    assert command_in(doctor.stdout) == command_in(line)
    elsewhere = str(last.runtime_dir.parent / "elsewhere")
    done = run_kvd("purge", "--runtime-dir", elsewhere, "--pool-dir", str(pool_dir), "--unused")
    assert done.returncode == 0, done
    assert done.stdout.count("is removed") == 7
    assert f"{directory(last, pool_dir)} is left: it is in use" in done.stdout
    assert re.search(r"^28\.\d+ MiB given back$", done.stdout, re.MULTILINE)
    assert list(pool_dir.iterdir()) == [directory(last, pool_dir)]
    assert loaded(last, keys) == KEYS


def test_a_pool_is_in_use_until_the_last_lane_of_a_dead_daemon_has_ended(
    start: StartIn, pool_dir: Path
) -> None:
    """Its daemon is dead, a process holds a lane's lock: the pool is left, and removed later."""
    daemon = start("run")
    with (directory(daemon, pool_dir) / "pool").open("rb") as pool:
        fcntl.flock(pool, fcntl.LOCK_SH)  # as a lane has it
        kill(daemon)
        purge = ("purge", "--pool-dir", str(pool_dir), "--unused")
        assert "is left: it is in use" in run_kvd(*purge).stdout
        assert (directory(daemon, pool_dir) / "pool").exists()
    assert "is removed" in run_kvd(*purge).stdout
    assert not list(pool_dir.iterdir())


def test_daemons_that_start_while_unused_pools_are_removed_keep_theirs(
    start: StartIn, pool_dir: Path
) -> None:
    """A removal runs all the time: each daemon starts, and its chunks are there until its end."""
    ended, freed = threading.Event(), list[int]()

    def remove() -> None:
        while not ended.is_set():
            removals = remove_unused_pools(pool_dir, Path("/run/elsewhere"))
            freed.extend(nbytes for nbytes, _ in removals if nbytes)

    remover = threading.Thread(target=remove)
    remover.start()
    try:
        for number in range(1, 4):
            daemon = start("run")
            with engine_of(daemon) as engine:
                keys = engine.stored("kept", KEYS)
                assert engine.load(keys) == (KEYS, 0)
            assert (directory(daemon, pool_dir) / "manifest.json").exists()
            kill(daemon)
            eventually(lambda: len(freed), number.__eq__)
    finally:
        ended.set()
        remover.join()


def test_what_is_no_pool_of_this_user_is_left_and_named(start: StartIn, pool_dir: Path) -> None:
    """Foreign files and directories, a pool with foreign files, another user's pool."""
    daemon, foreign = start("run"), start("foreign")
    kill(daemon)
    kill(foreign)
    (pool_dir / "kvd-notes").mkdir()
    (pool_dir / "kvd-0123456789ab").write_text("precious")
    (pool_dir / "kvd-0123456789ac").mkdir()
    precious = directory(daemon, pool_dir) / "precious.txt"
    precious.write_text("precious")
    if os.geteuid() == 0:
        os.chown(directory(foreign, pool_dir), 65534, 65534)
        for file in directory(foreign, pool_dir).iterdir():
            os.chown(file, 65534, 65534)
    before = sorted(pool_dir.rglob("*"))
    done = run_kvd("purge", "--pool-dir", str(pool_dir), "--unused")
    assert f"{directory(daemon, pool_dir)} is left: precious.txt in it is no file" in done.stdout
    assert "kvd-0123456789ab is left: " in done.stdout
    assert "kvd-0123456789ac is left: it has no pool" in done.stdout
    if os.geteuid() == 0:
        assert f"{directory(foreign, pool_dir)} is left: it belongs to uid 65534" in done.stdout
        assert sorted(pool_dir.rglob("*")) == before
        doctor = run_kvd("doctor", "--pool-dir", str(pool_dir))
        assert re.search(r"runuser -u \w+ -- kvd purge .* --unused", doctor.stdout), doctor


def without_runtime_dir(manifest: Path) -> None:
    """Make a manifest one of an older release."""
    text = re.sub(r',"runtime_dir":"[^"]*","access":"[^"]*"', "", manifest.read_text())
    assert "runtime_dir" not in text
    manifest.write_text(text)


def test_a_pool_of_an_older_release_is_named_and_removed_but_not_adopted(
    start: StartIn, pool_dir: Path
) -> None:
    """Its manifest names no runtime directory; the daemon of that directory finds its chunks."""
    daemon = start("run")
    keys = leave(daemon)
    without_runtime_dir(directory(daemon, pool_dir) / "manifest.json")
    other = start("other", "--unused-pools", "adopt")
    other.wait_log("an unused pool is not adopted, no manifest names its runtime directory")
    other.wait_log("MiB of an unknown runtime directory, started")
    kill(other)
    daemon = start("run")
    assert loaded(daemon, keys) == KEYS
    kill(daemon)
    without_runtime_dir(directory(daemon, pool_dir) / "manifest.json")
    assert run_kvd("purge", "--pool-dir", str(pool_dir), "--unused").stdout.count("removed") == 2


def test_a_daemon_adopts_the_newest_unused_pool_with_its_chunks(
    start: StartIn, pool_dir: Path
) -> None:
    """With unused_pools = "adopt": hits in a renamed daemon, and again in the next one.

    Then the old runtime directory is gone, as with a container.
    """
    older = start("older")
    leave(older, "older")
    daemon = start("run0")
    keys = leave(daemon)
    for number in (1, 2):
        shutil.rmtree(daemon.runtime_dir)
        earlier = daemon
        daemon = start(f"run{number}", "--unused-pools", "adopt")
        daemon.wait_log(f"MiB of {earlier.runtime_dir}, started")
        assert not directory(earlier, pool_dir).exists()
        assert loaded(daemon, keys) == KEYS
        assert re.search(r"unused pools take 4\.\d+ MiB of ", daemon.log.read_text())
        kill(daemon)
    daemon = start(f"run{number}")
    assert loaded(daemon, keys) == KEYS
    assert directory(older, pool_dir).exists()


@pytest.mark.parametrize("gone", [True, False], ids=["directory gone", "directory there"])
def test_nothing_from_before_a_reset_is_adopted(start: StartIn, gone: bool) -> None:
    """Chunks of before are a miss, those of after are hits, also after the adopter's restart."""
    daemon = start("run")
    with engine_of(daemon) as engine:
        old = engine.stored("old", KEYS)
        engine.scheduler.reset()
    new = leave(daemon, "new")
    if gone:
        shutil.rmtree(daemon.runtime_dir)
    for _ in range(2):
        adopter = start("adopter", "--unused-pools", "adopt")
        assert loaded(adopter, old) == 0
        assert loaded(adopter, new) == KEYS
        kill(adopter)


def test_a_reset_under_another_pool_dir_keeps_others_from_adopting_the_earlier_pool(
    start: StartIn, pool_dir: Path
) -> None:
    """A daemon leaves a pool for another pool_dir and resets its model there, then is gone."""
    old = leave(start("run"))
    elsewhere = pool_dir / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    daemon = start("run", where=elsewhere)
    with engine_of(daemon) as engine:
        engine.scheduler.reset()
    kill(daemon)
    shutil.rmtree(daemon.runtime_dir)
    adopter = start("adopter", "--unused-pools", "adopt")
    adopter.wait_log("is not adopted, later resets are not recorded beside it")
    assert loaded(adopter, old) == 0


def test_a_reset_that_only_the_old_runtime_directory_records_holds(
    start: StartIn, pool_dir: Path
) -> None:
    """One that is not in the copy beside the pool: no chunk of that model is adopted."""
    daemon = start("run")
    keys = leave(daemon)
    (ledger,) = directory(daemon, pool_dir).glob("*.ledger")
    assert ResetFile(daemon.runtime_dir / "kvd.resets").draw(ledger.stem) == ""
    adopter = start("adopter", "--unused-pools", "adopt")
    adopter.wait_log("is not adopted, it has no chunks, or only such as were reset")
    assert loaded(adopter, keys) == 0


def test_a_pool_of_another_identity_is_not_adopted(start: StartIn, pool_dir: Path) -> None:
    """The log says why, the pool stays, and its own runtime directory finds it."""
    keys = leave(start("run"))
    for options, reason in (
        (("--allow-groups", "0"), "other clients could connect"),
        (("--share-between-users", "no"), "other clients could connect"),
        (("--cpu-bytes", "8MiB"), "it has another cpu_bytes"),
    ):
        adopter = start("adopter", "--unused-pools", "adopt", *options)
        adopter.wait_log(f"an unused pool is not adopted, {reason}")
        adopter.wait_log("unused pools take 4.")
        adopter.stop()
        own = ("--runtime-dir", str(adopter.runtime_dir), "--pool-dir", str(pool_dir))
        assert run_kvd("purge", *own).returncode == 0
    assert loaded(start("run"), keys) == KEYS


def test_auto_adopts_a_pool_of_its_engines_size(start: StartIn) -> None:
    """With cpu_bytes = "auto" too the first engine finds the chunks."""
    keys = keys_of("auto", KEYS)
    for name, chunks in (("run", 0), ("adopter", KEYS)):
        options = ("--unused-pools", "adopt", "--reserve", "0")
        daemon = start(name, *options, cpu_bytes="auto", ready=False)
        with engine_of(daemon) as engine:
            assert engine.load(keys) == (chunks, 0)
            engine.store(keys)
            wait_hit(engine, keys)
        kill(daemon)


def test_a_daemon_removes_unused_pools_if_told_so(start: StartIn, pool_dir: Path) -> None:
    """With unused_pools = "remove" only those in use are left, and the log has what was freed.

    The service manager is asked for the time that this takes.
    """
    running, killed = start("running"), start("killed")
    kill(killed)
    address = killed.runtime_dir / "notify"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(address))
        manager.settimeout(PATIENCE)
        before = ("env", f"NOTIFY_SOCKET={address}")
        daemon = start("run", "--unused-pools", "remove", before=before)
        assert manager.recv(4096).startswith(b"EXTEND_TIMEOUT_USEC=")
    daemon.wait_log(f"MiB of {killed.runtime_dir}, started")
    assert "is removed" in daemon.log.read_text()
    assert {path.name for path in pool_dir.iterdir()} == {
        directory(running, pool_dir).name,
        directory(daemon, pool_dir).name,
    }


@needs_root
def test_a_pool_that_does_not_fit_names_the_unused_ones_and_the_command(
    start: StartIn, pool_dir: Path, small_tmpfs: Callable[[Path, int], None]
) -> None:
    """The error has sizes and directories; after its command the daemon starts.

    A daemon that removes or adopts them starts without the command.
    """
    small_tmpfs(pool_dir, 7 * 2**20)
    killed = start("killed")
    kill(killed)
    refused = start("run", ready=False)
    assert refused.process.wait() == 1
    error = refused.log.read_text().splitlines()[-1]
    assert f"does not fit {pool_dir}" in error
    assert re.search(rf"unused pools take \S+ MiB .* of {killed.runtime_dir}, started", error)
    assert "is removed" in run_kvd(*command_in(error)).stdout
    kill(start("run"))
    kill(start("remover", "--unused-pools", "remove"))
    leave(start("remover"))
    start("adopter", "--unused-pools", "adopt")
