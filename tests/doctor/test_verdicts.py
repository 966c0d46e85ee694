"""`kvd serve` and `kvd doctor` judge settings and machines alike, whatever is wrong with them."""

import json
import logging
import os
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from kvd.cli import cli
from kvd.doctor.checks import CHECKS
from kvd.doctor.facts import Facts
from kvd.doctor.probes import Gpus
from kvd.doctor.start import START_CHECKS
from kvd.machine.memory import pool_directory_name
from tests.daemon.serving import StartDaemon
from tests.daemon.users import OTHER_UID, as_stranger, needs_root
from tests.full import fill_up
from tests.processes import ROOT, python
from tests.waiting import PATIENCE

QUOTA = "quota = {!r}: needs a table in TOML, not JSON"
NO_TIER = "is no tier; give NAME:TARGET"
OWN_BYTES = "leaves nothing to chunks, since the tier's own files take 124 KiB; give a size"
MASTER = "give host and port of mooncake_master, such as master=10.0.0.1:50051"
DISK = "disk:/data,size=1GiB"
WRONG_SETTINGS: list[tuple[str, str, str]] = [
    ("runtime_dir", "", "needs the path of a directory"),
    ("runtime_dir", "/" + "x" * 120, "121 bytes, a socket's path leaves 81"),
    ("runtime_dir", "/etc/passwd/x", "/etc/passwd is no directory; choose another"),
    ("pool_dir", "/nonexistent", "pool_dir = /nonexistent: no such directory"),
    ("pool_dir", "/etc/passwd", "pool_dir = /etc/passwd: this is not a directory"),
    ("http_listen", "9330", "http_listen = '9330': not an address; give HOST:PORT"),
    ("http_listen", "localhost", "not an address"),
    ("http_listen", "localhost:99999", "not an address"),
    ("http_listen", "no host:80", "http_listen = no host:80: no such host"),
    ("cpu_bytes", "900TiB", "does not fit the machine's memory"),
    ("cpu_bytes", "5", "cpu_bytes = '5': needs a size of at least 64 KiB"),
    ("cpu_bytes", "64Gi", "did you mean 64GiB?"),
    ("cpu_bytes", "-5GiB", "cpu_bytes = '-5GiB': needs a size"),
    ("cpu_bytes", "99999EiB", "cpu_bytes = '99999EiB': needs a size"),
    ("host_ratio", "nan", "host_ratio = 'nan': needs a number above 0"),
    ("reserve", "x", "reserve = 'x': needs a size"),
    ("policy", "mru", "policy = 'mru': needs one of adaptive, lru"),
    ("keep_pool", "true", "keep_pool = 'true': needs one of yes, no"),
    ("reuse_threshold", "1.5", "reuse_threshold = '1.5': needs a whole number from 1 to 1000"),
    ("change_ring", "1", "change_ring = '1': needs a whole number"),
    ("lease_seconds", "soon", "lease_seconds = 'soon': needs a number above 0"),
    ("max_sessions", "0", "max_sessions = '0': needs a whole number from 1"),
    ("max_queued_bytes", "5", "max_queued_bytes = '5': needs a size of at least 64 KiB"),
    ("log_level", "warn", "log_level = 'warn': needs one of debug, info"),
    ("log_format", "xml", "log_format = 'xml': needs one of human, json"),
    ("allow_users", "no-such-user", "this machine has no user 'no-such-user'; create it"),
    ("allow_groups", "no-such-group", "this machine has no group 'no-such-group'; create it"),
    ("allow_users", "root,,", "allow_users = 'root,,': a name is empty; give names"),
    ("allow_users", "4294967295", "a number is above 4294967294; give names or numbers"),
    ("quota", "5", QUOTA.format("5")),
    ("quota", '{"llama": {"floor": "8GiB"}}', "needs a table in TOML, not JSON"),
    ("quota", "{llama = 5}", QUOTA.format("{llama = 5}")),
    ("quota", "{llama = {flor = 1}}", "llama: flor is neither floor nor cap; give llama a floor"),
    ("quota", "{llama = {}}", "llama: nothing is neither floor nor cap"),
    ("quota", '{llama = {cap = "150%"}}', "llama: cap = '150%': needs a size such as 8GiB"),
    ("quota", '{llama = {cap = "8Gi"}}', "did you mean 8GiB?"),
    ("quota", '{llama = {floor = "8GiB"}}', "add up to 8 GiB, the pool has 1 MiB; lower them"),
    ("quota", '{llama = {floor = "9%", cap = 1}}', "the cap of llama, 1 B, is below its floor"),
    ("tier", "disk", f"'disk' {NO_TIER}"),
    ("tier", "Disk:/data", f"'Disk:/data' {NO_TIER}"),
    ("tier", "disc:/data,size=1GiB", "no tier is called disc; known are disk"),
    ("tier", "disk:/data", "disk:/data has no size; give one"),
    ("tier", "disk:data,size=1GiB", "disk:data is no absolute directory; give one"),
    ("tier", "disk:/data,1GiB", "'1GiB' is not one key=value"),
    ("tier", f"{DISK},size=2GiB", "'size=2GiB' is given twice"),
    ("tier", "disk:/data,size=0", f"disk:/data: size=0 {OWN_BYTES}"),
    ("tier", "disk:/data,size=4KiB", f"disk:/data: size=4KiB {OWN_BYTES}"),
    ("tier", "disk:/data,size=1Gi", "disk:/data: size=1Gi is no size; did you mean 1GiB?"),
    ("tier", f"{DISK},queue=0", "queue=0 is smaller than any chunk; give the bytes"),
    ("tier", f"{DISK},queue=256", "queue=256 is smaller than any chunk"),
    ("tier", f"{DISK},queue=x", "queue=x is no size; give bytes"),
    ("tier", f"{DISK},late=0", "late=0 is out of range; give seconds from 0.01 to 60"),
    ("tier", f"{DISK},keep=some", "keep=some is unknown; use one of asked, all, never"),
    ("tier", f"{DISK},threads=0", "threads=0 is out of range; give 1 to 64"),
    ("tier", f"{DISK},floor=x", "floor=x is no size"),
    ("tier", f"{DISK},foo=1", "foo is no option of a disk; there are size, floor, threads"),
    ("tier", f"{DISK};{DISK}", "disk:/data is given twice; remove one"),
    ("tier", f"{DISK};disk:/data/b,size=1GiB", "lies in another tier's directory (/data)"),
    ("tier", "disk:/dev/shm,size=1GiB", "is or contains the pool's directory"),
    ("tier", "a:;b:;c:;d:;e:", "5 tiers; at most 4"),
    ("tier", "mooncake:", f"mooncake has no master; {MASTER}"),
    ("tier", "mooncake:master=HOST", f"mooncake: master=HOST is no HOST:PORT; {MASTER}"),
    ("tier", "mooncake:master=::1", f"mooncake: master=::1 is no HOST:PORT; {MASTER}"),
    ("tier", "mooncake:HOST:1", "mooncake takes no target; give mooncake:master=HOST:PORT"),
    ("tier", "mooncake:master=h:1,size=1GiB", "leave it out, or give segment=SIZE"),
    ("tier", "mooncake:master=h:1,protocol=x", "protocol=x is unknown; use one of tcp, rdma"),
    ("tier", "mooncake:master=h:1,devices=x", "devices=x needs protocol=rdma"),
    ("tier", "mooncake:master=h:1,segment=x", "segment=x is no size"),
    ("tier", "mooncake:master=h:1,foo=x", "unknown option foo; known are master"),
]
"""Key, value, and what the error says."""
MAY_PASS = {"900TiB"}


class Started(Exception):
    """The start has passed its checks."""


@dataclass
class Verdict:
    """What a command has said: its exit status, None if it serves; lines of errors, warnings."""

    status: int | None
    errors: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)


def doctor_verdict(status: int, stdout: str) -> tuple[Verdict, Verdict]:
    """What `kvd doctor --json` says in all, and what it says of a start."""
    report = json.loads(stdout)
    whole, start = Verdict(status), Verdict(status)
    if "error" in report:
        start.errors = whole.errors = report["error"].splitlines()
        return whole, start
    for finding in report["findings"]:
        line = "; ".join(filter(None, (finding["text"], finding["remedy"])))
        for verdict in (whole, start) if finding["name"] in START_CHECKS else (whole,):
            lines = {"fail": verdict.errors, "warn": verdict.warnings}.get(finding["level"], [])
            lines.append(line)
    return whole, start


def without_sizes(line: str) -> str:
    """A line without the sizes of what is free, and without others' unused pools: both change."""
    line = re.sub(r"(; )?unused pools take .* of /dev/shm: .*--unused", "", line)
    return re.sub(r"[\d.]+ ?[KMGT]iB|started [\d.]+ m?s ago", "SIZE", line)


def assert_clear(line: str, value: str) -> None:
    """An error names a long value once before its remedy, and has one or says what is needed."""
    assert len(value) < 8 or line.partition("; ")[0].count(value) <= 1, line
    assert "; " in line or ": needs " in line, line


Both = Callable[..., tuple[int, str]]


@pytest.fixture
def refused_by_both(
    runtime_dir: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> Both:
    """Runs both commands here with some settings; returns `kvd serve`'s exit status and error.

    Fails if the start passes, or the doctor says something else of it. The doctor examines no GPU.
    """

    def start(*_: object, **__: object) -> None:
        raise Started

    monkeypatch.setattr("kvd.server.loop.BrokerService", start)
    monkeypatch.setattr("kvd.cli.serve.configure", lambda *_: None)  # the log is this test's
    monkeypatch.setattr(Facts, "gpus", Gpus())
    caplog.set_level(logging.ERROR)
    defaults = {"runtime_dir": str(runtime_dir), "cpu_bytes": "1MiB", "http_listen": "off"}
    environment = {"KVD_CONFIG": "/dev/null"}

    def run(**settings: str) -> tuple[int, str]:
        values = defaults | settings
        flags = [f"--{name.replace('_', '-')}={text}" for name, text in values.items()]
        served = CliRunner().invoke(cli, ["serve", *flags], env=environment)
        assert not isinstance(served.exception, Started)
        (line,) = [record.getMessage() for record in caplog.records]
        examined = CliRunner().invoke(cli, ["doctor", "--json", *flags], env=environment)
        _, judged = doctor_verdict(examined.exit_code, examined.stdout)
        assert examined.exit_code == 1
        assert list(map(without_sizes, judged.errors)) == [without_sizes(line)]
        return served.exit_code, line

    return run


@pytest.mark.parametrize(("key", "value", "words"), WRONG_SETTINGS)
def test_a_wrong_setting_is_refused_by_both_in_the_same_words(
    key: str, value: str, words: str, refused_by_both: Both
) -> None:
    """One line, with the value once and the remedy; the status is 78, or 1 if it may pass."""
    status, line = refused_by_both(**{key: value})
    assert words in line
    assert_clear(line, value)
    assert status == (1 if value in MAY_PASS else os.EX_CONFIG)


@needs_root
@pytest.mark.parametrize(
    ("key", "mode", "gid", "words"),
    [
        ("runtime_dir", 0o755, 0, "may not write there; choose another directory"),
        ("runtime_dir", 0o750, 0, "run this as root; or choose another directory"),
        ("runtime_dir", 0o750, OTHER_UID + 1, f"usermod -aG {OTHER_UID + 1} {OTHER_UID}, then"),
        ("pool_dir", 0o755, 0, "may not write there; choose a directory that this user may"),
    ],
)
def test_another_users_directory_is_refused_by_both_in_the_same_words(
    key: str, mode: int, gid: int, words: str, runtime_dir: Path, refused_by_both: Both
) -> None:
    """One line says who may use it, or names the setting."""
    place = runtime_dir.parent / "roots"
    place.parent.chmod(0o1777)
    place.mkdir()
    place.chmod(mode)
    os.chown(place, 0, gid)
    with as_stranger():
        status, line = refused_by_both(**{key: str(place)})
    assert status == os.EX_CONFIG
    assert words in line
    assert_clear(line, str(place))


# ------------------------------------------------------------------ machines


@dataclass
class Stage:
    """Where a machine is broken.

    options: of both commands, in addition. before: of the command that runs them. environment: in
    addition.
    """

    tmp_path: Path
    runtime_dir: Path
    small_tmpfs: Callable[[Path, int], None]
    start_daemon: StartDaemon
    options: list[str] = field(default_factory=list)
    before: list[str] = field(default_factory=list)
    environment: dict[str, str] = field(default_factory=dict)
    held: list[Any] = field(default_factory=list)

    def limit(self, name: str, value: int) -> None:
        """Set a resource limit of both commands."""
        limit = f"resource.setrlimit(resource.RLIMIT_{name}, ({value}, {value}))"
        code = f"import os, resource, sys; {limit}; os.execv(sys.argv[1], sys.argv[1:])"
        self.before = [sys.executable, "-c", code]

    def command(self, *words: str) -> list[str]:
        """A command with its options."""
        options = ["--runtime-dir", str(self.runtime_dir), "--http-listen", "off"]
        size = [] if "--cpu-bytes" in self.options else ["--cpu-bytes", "1MiB"]
        kvd = [sys.executable, "-m", "kvd", *words, *options, *size, *self.options]
        return [*self.before, *kvd]

    def serve(self) -> Verdict:
        """Start a daemon; end it once it serves."""
        process = subprocess.Popen(
            self.command("serve", "--log-format", "json"),
            stderr=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=os.environ | self.environment,
        )
        verdict = Verdict(None)
        assert process.stderr is not None
        with process.stderr:
            for text in process.stderr:
                assert text.startswith("{"), text + process.stderr.read()
                line = json.loads(text)
                if line["event"].startswith("serving"):
                    break
                if line["level"] in {"error", "warning"}:
                    lines = verdict.errors if line["level"] == "error" else verdict.warnings
                    lines.append(line["event"])
            else:
                verdict.status = process.wait(PATIENCE)
        if verdict.status is None:
            process.terminate()
            assert process.wait(PATIENCE) == 0
        return verdict

    def doctor(self) -> tuple[Verdict, Verdict]:
        """See `doctor_verdict`."""
        done = subprocess.run(
            self.command("doctor", "--json"),
            capture_output=True,
            text=True,
            check=False,
            cwd=ROOT,
            env=os.environ | self.environment,
            timeout=PATIENCE,
        )
        assert done.stdout, done.stderr
        return doctor_verdict(done.returncode, done.stdout)


def in_runtime_dir(name: str, put: Callable[[Path], object]) -> Callable[[Stage], None]:
    """Put something into the runtime directory."""

    def build(stage: Stage) -> None:
        stage.runtime_dir.mkdir(mode=0o750)
        put(stage.runtime_dir / name)

    return build


def open_to_all(stage: Stage) -> None:
    """A runtime directory that every user may write."""
    stage.runtime_dir.mkdir()
    stage.runtime_dir.chmod(0o777)


def a_file(stage: Stage) -> None:
    """A file is where the runtime directory would be."""
    stage.runtime_dir.touch()


def a_dead_link(stage: Stage) -> None:
    """A link to nothing is where the runtime directory would be."""
    stage.runtime_dir.symlink_to(stage.tmp_path / "nothing")


def small_filesystem(stage: Stage, nbytes: int = 2**20) -> Path:
    """A small tmpfs of its own."""
    place = stage.tmp_path / "small"
    place.mkdir()
    stage.small_tmpfs(place, nbytes)
    return place


def read_only(stage: Stage) -> None:
    """The runtime directory's file system is read-only."""
    place = small_filesystem(stage)
    subprocess.run(["mount", "-o", "remount,ro", str(place)], check=True, timeout=60)
    stage.runtime_dir = place / "run"


def full(stage: Stage) -> None:
    """The runtime directory's file system is full."""
    stage.runtime_dir = small_filesystem(stage)
    fill_up(stage.runtime_dir)


def pool_dir(make: Callable[[Stage], Path]) -> Callable[[Stage], None]:
    """The pool lies in another directory."""

    def build(stage: Stage) -> None:
        stage.options += ["--pool-dir", str(make(stage))]

    return build


def pool_dir_open_to_all(stage: Stage) -> Path:
    """Every user may write there."""
    stage.tmp_path.chmod(0o777)
    return stage.tmp_path


def kept_pool_of_another_size(stage: Stage) -> None:
    """A stopped daemon has left its pool."""
    stage.start_daemon("--keep-pool", "yes", cpu_bytes="2MiB").stop()


def replaced_runtime_dir(stage: Stage) -> None:
    """A daemon runs, and its runtime directory was removed and made again."""
    stage.start_daemon("--keep-pool", "yes")
    shutil.rmtree(stage.runtime_dir)


def taken_port(stage: Stage) -> None:
    """Another program listens at the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    stage.held.append(listener)
    stage.options += ["--http-listen", f"127.0.0.1:{listener.getsockname()[1]}"]


def without_proc(stage: Stage) -> None:
    """Nothing is at /proc."""
    mount = ["unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
    try:
        if subprocess.run([*mount, "true"], check=False, timeout=60).returncode:
            pytest.skip("mount namespaces are not permitted here")
    except FileNotFoundError:
        pytest.skip("unshare is not installed")
    stage.before = mount


def unused_pool(stage: Stage) -> None:
    """A stopped daemon of another runtime directory has left its pool."""
    where = small_filesystem(stage, 4 * 2**20)
    stage.options += ["--pool-dir", str(where)]
    runtime_dir, stage.runtime_dir = stage.runtime_dir, stage.runtime_dir.with_name("other")
    assert stage.serve().status is None
    stage.runtime_dir = runtime_dir


def options(*words: str, **environment: str) -> Callable[[Stage], None]:
    """Options or variables alone."""

    def build(stage: Stage) -> None:
        stage.options += words
        stage.environment |= environment

    return build


Build = Callable[[Stage], None]
SOCKET = "is no socket, so no daemon created it; move it away"
REFUSED: dict[str, tuple[Build, int, str]] = {
    "runtime_dir is a file": (a_file, 78, "is no directory; choose another directory"),
    "runtime_dir is a dead link": (a_dead_link, 78, "is no directory"),
    "runtime_dir open to all": (open_to_all, 78, "mode 0777 lets every user replace"),
    "runtime_dir read-only": (read_only, 78, "the file system is read-only"),
    "runtime_dir full": (full, 78, "its file system is full; make room there"),
    "directory at a socket's path": (in_runtime_dir("http.sock", Path.mkdir), 78, SOCKET),
    "file at a lane's socket": (in_runtime_dir("lane-host-3.sock", Path.touch), 78, SOCKET),
    "link at a lane's socket": (
        in_runtime_dir("lane-host-3.sock", lambda path: path.symlink_to("elsewhere")),
        78,
        SOCKET,
    ),
    "directory at the lock": (in_runtime_dir("kvd.lock", Path.mkdir), 78, "Is a directory"),
    "pool_dir open to all": (pool_dir(pool_dir_open_to_all), 78, "chmod +t"),
    "pool_dir too small": (pool_dir(small_filesystem), 1, "enlarge it: mount -o remount,size="),
    "pool in use": (replaced_runtime_dir, 1, "its runtime directory was replaced"),
    "port in use": (taken_port, 1, "the port is in use (ss -ltnp"),
    "address of another machine": (
        options("--http-listen", "192.0.2.1:80"),
        1,
        "http_listen = 192.0.2.1:80: Cannot assign requested address; choose another",
    ),
    "RLIMIT_AS": (
        lambda stage: stage.limit("AS", 2**30),
        1,
        "RLIMIT_AS, which is 1 GiB: a lane maps the pool and takes 1 GiB itself; raise it: LimitAS",
    ),
    "RLIMIT_FSIZE": (lambda stage: stage.limit("FSIZE", 2**19), 1, "raise it: LimitFSIZE=infinity"),
    "RLIMIT_NOFILE": (lambda stage: stage.limit("NOFILE", 64), 1, "raise LimitNOFILE"),
    "no /proc": (without_proc, 78, "/proc is not mounted"),
}
SERVES: dict[str, tuple[Build, str]] = {
    "pool_dir on a disk": (pool_dir(lambda stage: stage.tmp_path), "which is not in memory"),
    "reserve above memory": (
        options("--cpu-bytes", "auto", "--reserve", "100TiB"),
        "reserve = 100 TiB leaves nothing to a pool",
    ),
    "kept pool of another size": (
        kept_pool_of_another_size,
        "the kept pool has 2 MiB, cpu_bytes is 1 MiB: it is replaced once the new pool is",
    ),
    "unused pools": (
        unused_pool,
        "to free them: kvd purge --runtime-dir",
    ),
    "misspelt variable": (options(KVD_CPU_BYTE="1"), "did you mean KVD_CPU_BYTES?"),
    "nothing": (options(), ""),
}


@pytest.fixture
def stage(
    tmp_path: Path,
    runtime_dir: Path,
    small_tmpfs: Callable[[Path, int], None],
    start_daemon: StartDaemon,
) -> Iterator[Stage]:
    """A machine that is not broken yet; pools of the daemons that it starts go with the test."""
    yield Stage(tmp_path, runtime_dir, small_tmpfs, start_daemon)
    for place in Path("/dev/shm").glob(f"{pool_directory_name(runtime_dir)}*"):
        shutil.rmtree(place)


@needs_root
@pytest.mark.parametrize("name", REFUSED)
def test_a_broken_machine_is_refused_by_both_in_the_same_words(name: str, stage: Stage) -> None:
    """One line with the cause and the remedy; `kvd serve` ends with 78, or 1 if it may pass."""
    build, status, words = REFUSED[name]
    build(stage)
    whole, start = stage.doctor()
    served = stage.serve()
    for thing in stage.held:
        thing.close()
    (line,) = served.errors
    assert words in line
    assert_clear(line, str(stage.runtime_dir))
    assert served.status == status
    assert list(map(without_sizes, start.errors)) == [without_sizes(line)]
    assert whole.status == 1
    assert "a bug in kvd" not in str(whole)


@pytest.mark.parametrize("name", SERVES)
def test_what_a_start_warns_of_the_doctor_warns_of(name: str, stage: Stage) -> None:
    """The daemon serves, the doctor finds nothing that fails, and both warn of the same."""
    build, words = SERVES[name]
    build(stage)
    whole, _ = stage.doctor()
    served = stage.serve()
    assert (served.status, served.errors) == (None, [])
    assert (whole.status, whole.errors) == (0, [])
    assert words in "\n".join(served.warnings)
    for warning in map(without_sizes, served.warnings):
        assert any(warning in without_sizes(line) for line in whole.warnings), (warning, whole)


def test_beside_a_running_daemon_the_doctor_says_what_a_start_would_do(
    start_daemon: StartDaemon, stage: Stage
) -> None:
    """It is well, another is refused beside it, and other settings and their effect are named."""
    daemon = start_daemon("--keep-pool", "yes", cpu_bytes="2MiB")
    daemon.wait_ready()
    whole, start = stage.doctor()
    served = stage.serve()
    assert served.status == 1
    assert served.errors[0].startswith(f"a daemon with pid {daemon.process.pid} serves")
    assert (whole.status, start.errors) == (0, [])
    (line,) = [line for line in whole.warnings if "runs with other settings" in line]
    assert "cpu_bytes = 2MiB (here 1MiB)" in line
    assert "the kept pool has 2 MiB, cpu_bytes is 1 MiB: it is replaced" in line
    done = python("-m", "kvd", "doctor", *stage.command()[3:])
    assert re.search("ready; kvd serve refuses to start beside it", done.stdout)


def test_settings_of_a_restart_are_judged_while_a_daemon_runs(
    start_daemon: StartDaemon, stage: Stage
) -> None:
    """A pool that would not fit after a restart is no pool that fits because one is there."""
    start_daemon(cpu_bytes="2MiB")
    stage.options += ["--cpu-bytes", "900TiB"]
    whole, start = stage.doctor()
    assert whole.status == 1
    assert "a pool of 900 TiB does not fit the machine's memory" in start.errors[0]


def test_each_check_of_a_start_is_one_of_the_doctor_or_quiet() -> None:
    """A name of a start's check that the doctor never prints as ok says nothing if all is well."""
    assert START_CHECKS.keys() - CHECKS.keys() == {"settings", "process limits"}
