"""The self-test and `make gpu`: both pass where all is well, and say what is wrong elsewhere."""

import json
import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from kvd_client import LookupResult, Scheduler
from kvd_tools import selftest_engine
from kvd_tools.selftest import STEPS, run_steps
from kvd_tools.selftest_engine import SelftestEngine
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import Engine
from tests.fakecuda.harness import FakeCuda
from tests.gpu.stand_ins import bare_python
from tests.processes import python
from tests.waiting import DEADLINE, PATIENCE

MIB = 2**20


def host_steps(daemon: Daemon) -> list[dict[str, Any]]:
    """The self-test of the host's lane in this process; its memory is given back."""
    with (
        Scheduler(daemon.runtime_dir, "observer", deadline=DEADLINE) as observer,
        SelftestEngine(daemon.runtime_dir, "host", observer, 64 * MIB, PATIENCE) as engine,
    ):
        return run_steps(engine)


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A daemon on a busy machine is sound, too."""
    for name in ("ANSWER_SECONDS", "PATIENCE_SECONDS"):
        monkeypatch.setattr(selftest_engine, name, PATIENCE)


def selftest(
    runtime_dir: Path, *arguments: str, patience: float = PATIENCE
) -> subprocess.CompletedProcess[str]:
    """`kvd selftest` as a command, to its end; what it asked for may take so long."""
    program = (
        "from kvd_tools import selftest, selftest_engine;"
        f"selftest_engine.ANSWER_SECONDS = selftest.ANSWER_SECONDS = {PATIENCE};"
        f"selftest_engine.PATIENCE_SECONDS = {patience};"
        "selftest.selftest()"
    )
    environment = os.environ | {"COLUMNS": "200"}
    return python("-c", program, "--runtime-dir", runtime_dir, *arguments, environment=environment)


def test_a_sound_daemon_passes_and_is_left_as_it_was(shared_daemon: Daemon) -> None:
    """Every step proves something; afterwards nothing of it is there and no room is held."""
    steps = host_steps(shared_daemon)
    assert [step["name"] for step in steps] == list(STEPS)
    assert all(step["ok"] and step["text"] for step in steps), steps
    report = shared_daemon.status()
    assert report["namespaces"] == []
    assert report["pool"]["free_bytes"] == report["pool"]["cpu_bytes"]
    assert report["engines"] == []


Move = Callable[[SelftestEngine, str, Any, Any], None]
_move: Move = SelftestEngine._move
_leave = SelftestEngine.leave


def _nothing(*_: object) -> None:
    """Do nothing."""


def _moves(kind: str, choose: Callable[[SelftestEngine, Any], Any]) -> Move:
    """Jobs of one kind take the blocks that `choose` returns; without blocks they do nothing."""

    def move(engine: SelftestEngine, given: str, ticket: Any, blocks: Any) -> None:
        chosen = choose(engine, blocks) if given == kind else blocks
        if chosen is not None:
            _move(engine, given, ticket, chosen)

    return move


def _late(engine: SelftestEngine) -> None:
    """The engine is still there after the steps."""
    selftest_engine.PATIENCE_SECONDS = 0.5  # what is waited for does not come
    if vars(engine).setdefault("asked", False):
        _leave(engine)
    vars(engine)["asked"] = True


MOVES = [
    (_moves("store", lambda *_: None), "store"),
    (_moves("load", lambda *_: None), "load"),
    (_moves("load", lambda engine, blocks: engine.source[: len(blocks)]), "load"),
    (_moves("store", lambda engine, blocks: engine.destination[: len(blocks)]), "compare"),
    (_moves("load", lambda _, blocks: blocks[::-1]), "compare"),
]


@pytest.mark.parametrize(
    ("owner", "name", "lie", "found_by"),
    [
        (SelftestEngine, "write", _nothing, "memory"),
        (SelftestEngine, "poison", _nothing, "poison"),
        (SelftestEngine, "differences", lambda *_: 7, "fill"),
        (SelftestEngine, "differences", lambda *_: 0, "compare"),
        *((SelftestEngine, "_move", move, step) for move, step in MOVES),
        (Scheduler, "reset", _nothing, "measure"),
        (SelftestEngine, "leave", _late, "leave"),
    ],
)
def test_a_part_that_says_it_was_done_is_found_out(
    shared_daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    owner: type,
    name: str,
    lie: Callable[..., object],
    found_by: str,
) -> None:
    """What the steps call may lie: bytes that were not moved, or not there, are noticed."""
    if found_by == "store":  # what is waited for does not come
        monkeypatch.setattr(selftest_engine, "PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(owner, name, lie)
    last = host_steps(shared_daemon)[-1]
    monkeypatch.undo()
    assert (last["name"], last["ok"]) == (found_by, False), last


def test_the_command_reports_every_lane(shared_daemon: Daemon) -> None:
    """Exit status 0, rates and latencies in JSON; a table for people; 1 for an unknown device."""
    done = selftest(shared_daemon.runtime_dir, "--json")
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    (lane,) = report["lanes"]
    assert (report["ok"], lane["device"], lane["failed_step"]) == (True, "host", None)
    assert [step["name"] for step in lane["steps"]] == list(STEPS)
    assert all(lane["gbps"][kind] > 0 for kind in ("store", "load"))
    assert all(lane["latency_seconds"][kind] > 0 for kind in ("store", "load"))
    done = selftest(shared_daemon.runtime_dir)
    assert done.returncode == 0
    assert "lane host" in done.stdout
    assert "GB/s" in done.stdout
    done = selftest(shared_daemon.runtime_dir, "--device", "cuda:7")
    assert done.returncode == 1
    assert "--device cuda:7: there are host" in done.stderr


def test_engines_are_not_disturbed_by_it_in_a_full_pool(start_daemon: StartDaemon) -> None:
    """Where every slot is in use it fails and says why; else next to nothing is evicted."""
    daemon = start_daemon(cpu_bytes="32MiB")
    with Engine(daemon.runtime_dir).wait_attached() as engine:
        total = engine.scheduler.num_chunks
        keys = engine.stored("full", total)
        with engine.scheduler.prepare_load(keys) as ticket:
            assert len(ticket) == total
            done = selftest(daemon.runtime_dir, patience=5.0)
            assert done.returncode == 1
            assert "store failed: the pool is full" in done.stdout
            assert set(engine.scheduler.lookup_many(keys)) == {LookupResult.HIT}
        assert selftest(daemon.runtime_dir).returncode == 0
        hits = [key for key in keys if engine.scheduler.lookup(key) is LookupResult.HIT]
        (namespace,) = daemon.status()["namespaces"]
        assert 0 < namespace["counters"]["yielded"] <= total / 100
        assert engine.load(hits) == (len(hits), 0)


@pytest.mark.slow
@pytest.mark.fakecuda
def test_every_cuda_device_is_tested_too(
    fakecuda_folder: Path, start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each device that the process sees gets a lane and passes, with unkind timing."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fakecuda_folder))
    monkeypatch.setenv("FAKECUDA_SEED", "7")
    monkeypatch.setenv("FAKECUDA_DEVICES", "2")
    monkeypatch.delenv("FAKECUDA_LOG", raising=False)
    daemon = start_daemon()
    done = selftest(daemon.runtime_dir, "--json")
    assert done.returncode == 0, done
    lanes = json.loads(done.stdout)["lanes"]
    names = [lane["device"] for lane in lanes]
    assert [name.partition(":")[0] for name in names] == ["host", "cuda", "cuda"]
    assert all(lane["ok"] and lane["gbps"]["load"] > 0 for lane in lanes)
    assert daemon.status()["namespaces"] == []
    monkeypatch.setenv("FAKECUDA_DEVICES", "1")
    done = selftest(daemon.runtime_dir, "--json", "--device", names[2])
    assert done.returncode == 1
    (lane,) = json.loads(done.stdout)["lanes"]
    assert (lane["device"], lane["failed_step"]) == (names[2], "memory")
    assert f"this process does not see {names[2]}" in lane["text"]


WHOLE = 280.0  # seconds of all parts, each with daemons of its own
FRAGMENT, ENDLESS = 65536, 2**40  # no pool has room for fragments of the second length
TESTS = "every_byte_back and driver_rank-ipc or cannot_be_exported"
PARTS = {"beside": 22, "pins 2": 6, "pins 6": 6, "exporter": 4, "lanes": 17}  # figures of each


@pytest.mark.nightly
@pytest.mark.fakecuda
@pytest.mark.timeout(400)
def test_make_gpu_writes_every_figure_but_those_of_a_part_that_fails(
    fakecuda: FakeCuda, tmp_path: Path
) -> None:
    """Tests and benchmark run on a bare Python; a part that fails costs its own figures."""
    bare_python(tmp_path)
    settings = {"PYTHONPATH": str(tmp_path), "PYTEST_ADDOPTS": f"-k '{TESTS}'"}
    environment = fakecuda.environment() | settings
    environment.pop("LD_PRELOAD", None)  # naps: its parts have limits
    out = tmp_path / "out"
    done = python(
        *("tests/gpu/run.py", "--mib", 2, "--rounds", 1, "--out", out),
        *("--fragments", f"{FRAGMENT},{ENDLESS}"),
        environment=environment,
        seconds=WHOLE,
    )
    assert done.returncode == 1, done.stdout + done.stderr
    result = json.loads((out / "gpu.json").read_text())
    failed = f"fragments {ENDLESS}"
    assert result["missing"].pop(failed)  # the last line of what its daemon said
    assert "does not fit" in (out / "gpu" / f"fragments-{ENDLESS}.log").read_text("utf-8")
    assert result["missing"] == {}
    assert result["device"].startswith("kvd test double")
    (row,) = result["fragments"]
    assert (row["bytes"], row["moved"]) == (FRAGMENT, 2**21)
    for direction in ("store", "load", "both"):
        assert set(row[direction]) == {"kvd", "batch", "ratio", "cpu_ms_per_GB"}
        assert all(figure["median"] > 0 for figure in row[direction].values())
    assert {part: len(result[part]) for part in PARTS} == PARTS
    assert result["exporter"]["bytes"] == "as they were"
    if not os.getuid():  # which alone may open memory of another user
        opened = [name for name, text in result["users"].items() if text == "works"]
        assert opened == ["exporter_0_opener_0"]
    assert f"\nnot measured: {failed}: " in done.stdout
    assert "\ntests: 2 of 2 passed\n" in done.stdout
    assert "lane cuda:" in (out / "gpu-tests" / "daemons.log").read_text()


def test_make_gpu_refuses_in_a_sentence_without_a_gpu() -> None:
    """No driver, no device: one line that says so, before anything else is looked at."""
    if not python("tests/gpu/probe.py").returncode:
        pytest.skip("there is a GPU")
    done = python("tests/gpu/run.py")
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("make gpu: ")
    assert "it needs a machine with an NVIDIA GPU" in line
