"""`kvd serve --handover`: a new daemon takes over from the one that serves, or leaves it alone."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import psutil
import pytest

from kvd.broker.keep import area_name
from kvd_client import LookupResult
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine, keys_of
from tests.daemon.test_engines import wait_hit
from tests.daemon.test_operating import kvd
from tests.soak.handovers import run

KEEP = ("--keep-pool", "yes")
OVER = (*KEEP, "--handover")
LONG = ("--drain-seconds", "100", "--lane-timeout-seconds", "60")
PATIENCE = 60.0


def wait_until(condition: Callable[[], bool], what: object) -> None:
    """Until it holds; what is missing is said otherwise."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end, what() if callable(what) else what
        time.sleep(0.01)


def ended(daemon: Daemon) -> tuple[int, str]:
    """Its exit status, once it has one, and its log."""
    return daemon.process.wait(PATIENCE), daemon.log.read_text()


def serves_on(daemon: Daemon, engine: Engine, name: str) -> None:
    """It is the daemon that serves, it is ready and takes stores, whose bytes are right."""
    report = daemon.wait_ready()
    assert report["pid"] == daemon.process.pid
    engine.wait_attached(daemon)
    keys = keys_of(name, 3)
    wait_until(lambda: bool(engine.store(keys)) or engine.load(keys)[0] == 3, "no store is taken")
    wait_hit(engine, keys)
    assert engine.load(keys) == (3, 0)


@contextmanager
def unfinished_store(engine: Engine) -> Iterator[None]:
    """A handover waits for it."""
    ticket = engine.scheduler.prepare_store(keys_of("unfinished", 1))
    assert ticket.keys
    yield
    engine.scheduler.complete_store(ticket.keys, success=False)


@pytest.fixture
def old(start_daemon: StartDaemon) -> Daemon:
    """A ready daemon that keeps its pool and has a long time to drain."""
    return start_daemon(*KEEP, *LONG)


# ------------------------------------------------------------------ it works


def test_a_new_daemon_takes_over(old: Daemon, start_daemon: StartDaemon) -> None:
    """The old one ends with 0, the engine that stays hits again, all files are the new one's."""
    keys = keys_of("kept", 20)
    with Engine(old.runtime_dir).wait_attached() as engine:
        for at in range(0, 20, 10):
            engine.store(keys[at : at + 10])
        wait_hit(engine, keys)
        new = start_daemon(*OVER, ready=False)
        status, log = ended(old)
        assert status == 0, log
        assert re.search(rf"handed over to pid {new.process.pid} after .*: leaving", log)
        report = new.wait_ready()
        assert report["pid"] == new.process.pid
        assert not report["draining"]
        engine.wait_attached(new)
        assert engine.load(keys[:10]) == (10, 0)
        assert engine.load(keys[10:]) == (10, 0)
        serves_on(new, engine, "new")
    names = {path.name for path in new.runtime_dir.iterdir()}
    assert {"kvd.lock", "door.sock", "broker.sock", "http.sock"} <= names
    assert (new.runtime_dir / "kvd.lock").read_text().strip() == str(new.process.pid)
    assert new.stop() == 0
    assert list(new.runtime_dir.iterdir()) == []


@pytest.mark.slow
def test_three_handovers_under_traffic() -> None:
    """Two engines store and load all the while: every READY chunk stays one, with its bytes."""
    loop = run(handovers=3, seed=20261121)
    assert not loop.tally.violations
    assert loop.statuses == [0, 0, 0]
    assert loop.tally.kept
    assert loop.tally.verified_bytes
    assert loop.calls
    assert not loop.late


def test_no_two_daemons_have_the_pool(old: Daemon, start_daemon: StartDaemon) -> None:
    """Whenever one looks, the lanes that map the pool, so that they can write, are one daemon's."""
    watch = Watch(Path("/dev/shm") / area_name(old.runtime_dir) / "pool")
    with Engine(old.runtime_dir).wait_attached() as engine, watch:
        daemon = old
        for turn in range(2):
            serves_on(daemon, engine, f"turn-{turn}")
            watch.wait_owners(turn + 1)
            new = start_daemon(*OVER, *LONG, ready=False)
            assert ended(daemon)[0] == 0
            daemon = new
        serves_on(daemon, engine, "end")
        watch.wait_owners(3)
    assert len(watch.owners) == 3, watch.owners
    assert not watch.shared


class Watch:
    """A thread that looks again and again which daemons' lanes map the pool."""

    def __init__(self, pool: Path) -> None:
        self.owners: list[int] = []
        self.shared: list[set[int]] = []
        self._pool = str(pool)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)

    def wait_owners(self, count: int) -> None:
        """Until so many have been seen."""
        wait_until(lambda: len(self.owners) >= count, lambda: self.owners)

    def _run(self) -> None:
        while not self._stop.is_set():
            found = self._owners(psutil.process_iter())
            self.owners += set(found.values()) - set(self.owners)
            # A look at all processes takes a while: those that still map it did so all the time.
            owners = set(self._owners(found).values()) if len(found) > 1 else set()
            if len(owners) > 1:
                self.shared.append(owners)

    def _owners(self, processes: Iterable[psutil.Process]) -> dict[psutil.Process, int]:
        """The lanes among them, with the brokers, which are their parents."""
        found = {}
        for process in processes:
            try:
                maps = Path(f"/proc/{process.pid}/maps").read_text()
                if any("rw-s" in line and line.endswith(self._pool) for line in maps.splitlines()):
                    found[process] = process.ppid()
            except (OSError, psutil.Error):
                continue
        return found


def test_without_a_daemon_it_starts_as_usual(start_daemon: StartDaemon) -> None:
    """Nobody to take over from: said at info, and served."""
    daemon = start_daemon(*OVER)
    daemon.wait_log("nothing to take over, starting as usual")


def test_a_daemon_that_was_killed_is_no_obstacle(old: Daemon, start_daemon: StartDaemon) -> None:
    """Its sockets lie about, its lock does not: the new one starts with its chunks."""
    keys = keys_of("kept", 5)
    with Engine(old.runtime_dir).wait_attached() as engine:
        engine.store(keys)
        wait_hit(engine, keys)
        old.stop(signal.SIGKILL)
        new = start_daemon(*OVER)
        engine.wait_attached(new)
        assert engine.load(keys) == (5, 0)
    new.wait_log("starting as usual")


def test_loads_go_on_until_the_old_one_stops(old: Daemon, start_daemon: StartDaemon) -> None:
    """While it waits for a store, loads bring their bytes and new stores are refused."""
    keys = keys_of("kept", 4)
    with Engine(old.runtime_dir).wait_attached() as engine:
        engine.store(keys)
        wait_hit(engine, keys)
        with unfinished_store(engine):
            new = start_daemon(*OVER, ready=False)
            old.wait_log("handing over to pid")
            assert engine.store(keys_of("refused", 2)) == []
            assert engine.load(keys) == (4, 0)
            report = old.status()
            assert (report["ready"], report["draining"], report["drain"]) == (False, True, None)
        assert ended(old)[0] == 0
        engine.wait_attached(new)
        assert engine.load(keys) == (4, 0)


def test_sigterm_to_the_old_one_hastens_it(old: Daemon, start_daemon: StartDaemon) -> None:
    """It ends as ever, without a second look at what has begun; the one that waits serves."""
    with Engine(old.runtime_dir).wait_attached() as engine, unfinished_store(engine):
        new = start_daemon(*OVER, ready=False)
        old.wait_log("handing over to pid")
        assert old.stop() == 0
        assert new.wait_ready()["pid"] == new.process.pid
    assert (new.runtime_dir / "kvd.lock").read_text().strip() == str(new.process.pid)


# -------------------------------------------- what can fail fails beforehand


def refused_untouched(
    old: Daemon, start_daemon: StartDaemon, *options: str, **settings: str
) -> str:
    """A new daemon that cannot serve ends with 1 and one line; the old one was not asked."""
    with Engine(old.runtime_dir).wait_attached() as engine:
        new = start_daemon(*OVER, *options, ready=False, **settings)
        status, log = ended(new)
        assert status == 1, log
        assert "Traceback" not in log
        errors = [line for line in log.splitlines() if " ERROR " in line]
        assert len(errors) == 1, log
        assert "handing over" not in old.log.read_text()
        serves_on(old, engine, "before")
    return errors[0]


def test_a_pool_that_does_not_fit_is_found_first(old: Daemon, start_daemon: StartDaemon) -> None:
    """The figures and the remedy; the old daemon serves undisturbed."""
    error = refused_untouched(old, start_daemon, cpu_bytes="100TiB")
    assert "a pool of 100 TiB does not fit" in error
    assert "--cpu-bytes" in error


def test_an_address_in_use_is_found_first(old: Daemon, start_daemon: StartDaemon) -> None:
    """HTTP's new address is tried before anything is asked."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        error = refused_untouched(old, start_daemon, "--http-listen", address)
    assert address in error


def test_the_same_address_is_no_obstacle(start_daemon: StartDaemon) -> None:
    """HTTP goes on at the address of the old daemon, which gives it back before the lock."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    listen = ("--http-listen", address)
    old = start_daemon(*KEEP, *listen)
    new = start_daemon(*OVER, *listen)
    assert ended(old)[0] == 0
    new.wait_log(f"HTTP on http://{address}")


def test_a_broken_installation_is_found_first(
    old: Daemon, start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A library that lanes or HTTP need and that cannot be loaded is named."""
    (tmp_path / "uvicorn.py").write_text("raise ImportError('uvicorn is broken')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    assert "uvicorn is broken" in refused_untouched(old, start_daemon)


def test_a_pool_directory_that_is_none_is_found_first(
    old: Daemon, start_daemon: StartDaemon, tmp_path: Path
) -> None:
    """Named, with the remedy."""
    nowhere = str(tmp_path / "nowhere")
    assert nowhere in refused_untouched(old, start_daemon, "--pool-dir", nowhere)


def test_what_will_start_empty_is_said_before(start_daemon: StartDaemon, tmp_path: Path) -> None:
    """Another size, another directory, nothing kept, --cold: a warning, then it serves, empty."""
    log = ""
    daemon = start_daemon(*KEEP)
    try:
        for options, cpu_bytes, words in (
            (OVER, "32MiB", "the pool has 64 MiB, 32 MiB are wanted"),
            ((*OVER, "--cold"), "32MiB", "--cold"),
            ((*OVER, "--pool-dir", str(tmp_path)), "32MiB", "kvd purge --runtime-dir"),
            (("--handover",), "32MiB", "keep_pool = no"),
            (OVER, "32MiB", "the daemon that serves keeps nothing"),
        ):
            with Engine(daemon.runtime_dir).wait_attached() as engine:
                keys = keys_of("kept", 3)
                engine.store(keys)
                wait_hit(engine, keys)
                new = start_daemon(*options, cpu_bytes=cpu_bytes)
                assert ended(daemon)[0] == 0
                engine.wait_attached(new)
                assert engine.scheduler.lookup_many(keys) == [LookupResult.MISS] * 3
            log = new.wait_log("taken over from")
            assert words in log
            assert log.index("will start empty") < log.index("taken over from")
            daemon = new
    finally:
        shutil.rmtree(tmp_path / area_name(daemon.runtime_dir), ignore_errors=True)


# ---------------------------------------------------- the new one is gone


@pytest.mark.parametrize("drained", [False, True], ids=["", "drained"])
def test_the_old_one_serves_on_where_the_new_one_dies(
    old: Daemon, start_daemon: StartDaemon, *, drained: bool
) -> None:
    """Killed while it waits: stores are taken again, an operator's drain is as it was."""
    with Engine(old.runtime_dir).wait_attached() as engine:
        with unfinished_store(engine):
            if drained:
                assert kvd(old, "drain").returncode == 0
            new = start_daemon(*OVER, ready=False)
            old.wait_log("handing over to pid")
            new.stop(signal.SIGKILL)
            old.wait_log(f"pid {new.process.pid}, which was to take over, is gone")
        report = old.status()
        assert report["draining"] is drained
        assert (report["drain"] is not None) is drained
        if drained:
            old.wait_log("ends with this daemon")
            assert engine.store(keys_of("refused", 2)) == []
            assert kvd(old, "resume").stdout == "resumed: stores are taken\n"
        serves_on(old, engine, "on")


def test_lanes_that_were_stopped_run_again(old: Daemon, start_daemon: StartDaemon) -> None:
    """Killed when lanes were told to end already: they end, others start, and loads are served."""
    with Engine(old.runtime_dir).wait_attached() as engine:
        keys = keys_of("kept", 5)
        engine.store(keys)
        wait_hit(engine, keys)
        lane = old.status()["lanes"][0]["pid"]
        os.kill(lane, signal.SIGSTOP)  # so that it does not end at once
        new = start_daemon(*OVER, ready=False)
        old.wait_log("handing over to pid")
        assert old.status()["draining"]  # answered after the turn in which lanes were told
        new.stop(signal.SIGKILL)
        old.wait_log("this daemon serves on")
        os.kill(lane, signal.SIGCONT)
        old.wait_log("lane host is lost")
        serves_on(old, engine, "on")
        assert old.status()["lanes"][0]["pid"] != lane
        assert engine.load(keys) == (5, 0)


# ------------------------------------------------------- the old one is deaf


def test_a_frozen_daemon_is_left_alone(old: Daemon, start_daemon: StartDaemon) -> None:
    """One error with its pid and the remedy, exit status 1; thawed, it serves as before."""
    with Engine(old.runtime_dir).wait_attached() as engine:
        os.kill(old.process.pid, signal.SIGSTOP)
        try:
            status, log = ended(start_daemon(*OVER, ready=False))
        finally:
            os.kill(old.process.pid, signal.SIGCONT)
        assert status == 1, log
        assert f"if it hangs: kill -9 {old.process.pid}, then kvd serve" in log
        serves_on(old, engine, "thawed")
        assert "handing over" not in old.log.read_text()


def test_one_that_freezes_on_its_way_out_is_given_up(
    old: Daemon, start_daemon: StartDaemon
) -> None:
    """The new one ends with the same error; thawed, the old one undoes what it had begun."""
    with Engine(old.runtime_dir).wait_attached() as engine:
        with unfinished_store(engine):
            new = start_daemon(*OVER, ready=False)
            new.wait_log("hands over")
            os.kill(old.process.pid, signal.SIGSTOP)
            try:
                status, log = ended(new)
            finally:
                os.kill(old.process.pid, signal.SIGCONT)
            assert status == 1, log
            assert f"if it hangs: kill -9 {old.process.pid}" in log
            old.wait_log("this daemon serves on")
        serves_on(old, engine, "thawed")


def test_killed_on_its_way_out_it_is_followed(old: Daemon, start_daemon: StartDaemon) -> None:
    """Kill -9 of the old one while the new one waits: as after any crash, with every chunk."""
    keys = keys_of("kept", 5)
    with Engine(old.runtime_dir).wait_attached() as engine:
        engine.store(keys)
        wait_hit(engine, keys)
        engine.scheduler.prepare_store(keys_of("unfinished", 1))
        new = start_daemon(*OVER, ready=False)
        new.wait_log("hands over")
        old.stop(signal.SIGKILL)
        assert new.wait_ready()["pid"] == new.process.pid
        engine.wait_attached(new)
        assert engine.load(keys) == (5, 0)


# ------------------------------------------------------------- who may not


def test_two_new_ones_at_once(old: Daemon, start_daemon: StartDaemon) -> None:
    """The second is refused with the first one's pid; so is one without --handover; one serves."""
    with Engine(old.runtime_dir).wait_attached() as engine:
        with unfinished_store(engine):
            first = start_daemon(*OVER, ready=False)
            first.wait_log("hands over")
            status, log = ended(start_daemon(*OVER, ready=False))
            assert status == 1
            assert f"pid {first.process.pid} is taking over already" in log
            status, log = ended(start_daemon(*KEEP, ready=False))
            assert status == 1
            assert f"a daemon with pid {old.process.pid} serves" in log
        assert ended(old)[0] == 0
        serves_on(first, engine, "first")


def test_an_old_version_is_left_alone(
    start_daemon: StartDaemon, runtime_dir: Path, tmp_path: Path
) -> None:
    """A daemon that does not know the request serves on; the error says stop and start."""
    script = tmp_path / "old.py"
    script.write_text(
        "from kvd_proto.codec import WIRE\n"
        "from kvd_proto.messages import HandOver\n"
        "WIRE._types = {tag: kind for tag, kind in WIRE._types.items() if kind is not HandOver}\n"
        "from kvd.__main__ import main\n"
        "main()\n"
    )
    command = [sys.executable, str(script), "serve", "--runtime-dir", str(runtime_dir)]
    command += ["--cpu-bytes", "64MiB", "--http-listen", "off", *KEEP]
    with (tmp_path / "log").open("w") as sink:
        process = subprocess.Popen(command, stderr=sink, text=True)
    old = Daemon(runtime_dir, process, tmp_path / "log")
    try:
        old.wait_ready()
        with Engine(runtime_dir).wait_attached() as engine:
            status, log = ended(start_daemon(*OVER, ready=False))
            assert status == 1
            assert f"pid {process.pid} is of a version that cannot hand over" in log
            assert "Upgrade by stop and start" in log
            serves_on(old, engine, "on")
    finally:
        old.stop(signal.SIGKILL)


def test_under_a_service_manager_it_is_refused(
    start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The manager watches this process: the error names its command, the daemon serves on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(str(tmp_path / "notify"))
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        old = start_daemon(*KEEP)
        monkeypatch.delenv("NOTIFY_SOCKET")
        with Engine(old.runtime_dir).wait_attached() as engine:
            status, log = ended(start_daemon(*OVER, ready=False))
            assert status == 1
            assert "systemctl restart kvd" in log
            serves_on(old, engine, "on")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a pid namespace")
def test_pids_of_another_namespace_do_not_matter(old: Daemon) -> None:
    """As in a second container on the same volumes: neither sees the other's pid, and it works."""
    keys = keys_of("kept", 5)
    inner = [sys.executable, "-m", "kvd", "serve", "--runtime-dir", str(old.runtime_dir)]
    inner += ["--cpu-bytes", "64MiB", "--http-listen", "off", *OVER]
    apart = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    tried = subprocess.run([*apart, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no namespaces here: {tried.stderr}")
    log = old.runtime_dir.parent / "inner.log"
    with Engine(old.runtime_dir).wait_attached() as engine:
        engine.store(keys)
        wait_hit(engine, keys)
        with log.open("w") as sink:
            process = subprocess.Popen([*apart, *inner], stderr=sink, text=True)
        try:
            new = Daemon(old.runtime_dir, process, log)
            assert ended(old)[0] == 0, log.read_text()
            report = new.wait_ready()
            assert report["pid"] == 1
            engine.wait_attached(new)
            assert engine.load(keys) == (5, 0)
        finally:
            process.kill()
            process.wait(PATIENCE)
    assert "handing over to pid 1" in old.log.read_text()
