"""`kvd doctor --engine`: the way of an engine's memory, shown by a tensor; accelerators faked."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from kvd.cli import cli
from kvd.cli import config as config_commands
from kvd_client import torch_memory
from kvd_client.errors import UnsupportedMemory
from kvd_tools import engine_doctor
from kvd_tools.engine_doctor import (
    EngineFinding,
    TransferOutcome,
    check_daemon,
    check_transfer,
    describe_device,
    examine_engine,
    transfer_finding,
)
from tests.daemon.serving import Daemon, StartDaemon
from tests.daemon.users import OTHER_UID, as_user, needs_root
from tests.processes import python
from tests.waiting import eventually

CPU = torch.device("cpu")


def examine(runtime_dir: Path, **variables: str) -> tuple[int, dict[str, dict[str, str]]]:
    """Exit status of the command in a process of its own, and its findings by name."""
    command = ("-m", "kvd", "doctor", "--engine", "--json", "--runtime-dir", str(runtime_dir))
    done = python(*command, environment=os.environ | variables)
    assert done.stdout, done.stderr
    return done.returncode, {each["name"]: each for each in json.loads(done.stdout)["findings"]}


def left_behind(daemon: Daemon) -> Any:
    """What the daemon still has of engines."""
    status = daemon.status()
    return status["engines"], status["namespaces"], status["sessions"]["open"] > 1


def test_a_tensor_is_registered_and_nothing_is_left(shared_daemon: Daemon) -> None:
    """On the CPU the daemon maps it; afterwards it has no engine, and gave nothing of its pool."""
    status, findings = examine(shared_daemon.runtime_dir)
    assert status == 0, findings
    assert findings["transfer"]["level"] == "ok"
    assert findings["transfer"]["text"] == "CPU: export; the daemon has taken a tensor this way"
    assert findings["torch"]["text"].startswith(f"torch {torch.__version__}, built for ")
    assert findings["accelerator"]["level"] == "ok"
    assert f"answers in {shared_daemon.runtime_dir}" in findings["daemon"]["text"]
    eventually(lambda: left_behind(shared_daemon), lambda left: left == ([], [], False))


def test_memory_that_cannot_be_exported_is_staged(
    shared_daemon: Daemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A warning on the CPU, with the reason and the costs."""

    def refuse(_storage: object) -> None:
        raise UnsupportedMemory("no room in /dev/shm")

    monkeypatch.setattr(torch_memory, "_share_cpu", refuse)
    finding = check_transfer(CPU, shared_daemon.runtime_dir)
    assert finding.level == "warn"
    assert finding.text.startswith("CPU: staging; the daemon has taken a tensor this way. ")
    assert "no room in /dev/shm" in finding.text
    assert "copied twice" in finding.remedy


@pytest.mark.parametrize("exists", [False, True])
def test_an_absent_daemon_fails_and_names_the_mount(tmp_path: Path, exists: bool) -> None:
    """Without the directory it is to be mounted, in an empty one a daemon is to be started."""
    runtime_dir = tmp_path / "run"
    if exists:
        runtime_dir.mkdir()
    by_name = {finding.name: finding for finding in examine_engine(runtime_dir)}
    daemon, transfer = by_name["daemon"], by_name["transfer"]
    assert daemon.level == "fail"
    assert str(runtime_dir) in daemon.text
    assert ("start kvd serve" if exists else "mount") in daemon.remedy
    assert transfer.text == (
        "CPU: export; the client's choice, which a daemon has not confirmed: no daemon was asked"
    )


@needs_root
def test_a_daemon_that_is_closed_to_this_user_is_not_called_absent(
    start_daemon: StartDaemon,
) -> None:
    """The finding names user, directory and group, and the command that opens it."""
    daemon = start_daemon()
    here = daemon.runtime_dir
    here.parent.chmod(0o711)
    os.chown(here, -1, 4243)
    with as_user():
        finding, has_pool = check_daemon(here)
    assert not has_pool
    assert (finding.level, finding.text) == (
        "fail",
        f"this process may not connect to the daemon in {here}",
    )
    assert f"uid {OTHER_UID} may not enter {here} (mode 0750, group 4243)" in finding.remedy
    assert f"usermod -aG 4243 {OTHER_UID}" in finding.remedy


def test_a_pool_without_a_size_gets_none_from_the_doctor(start_daemon: StartDaemon) -> None:
    """With `cpu_bytes = auto` nothing is registered, and the finding says why."""
    daemon = start_daemon("--cpu-bytes", "auto")
    by_name = {finding.name: finding for finding in examine_engine(daemon.runtime_dir)}
    assert by_name["daemon"].level == "warn"
    assert "cpu_bytes is auto" in by_name["daemon"].text
    assert "no daemon was asked" in by_name["transfer"].text
    assert daemon.status()["pool"]["cpu_bytes"] == 0


def test_without_torch_it_says_what_follows(shared_daemon: Daemon, tmp_path: Path) -> None:
    """No memory is tried; the daemon still is."""
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: no such file')")
    search_path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    status, findings = examine(shared_daemon.runtime_dir, PYTHONPATH=search_path)
    assert (status, set(findings)) == (0, {"torch", "daemon"})
    assert findings["torch"]["level"] == "warn"
    assert "libtorch.so: no such file" in findings["torch"]["text"]
    assert "the engine's Python" in findings["torch"]["remedy"]


@pytest.mark.parametrize(
    ("kind", "way", "level"),
    [
        ("CPU", "export", "ok"),
        ("CUDA", "export", "ok"),
        ("CUDA", "staging", "warn"),
        ("ROCm", "staging", "ok"),
        ("XPU", "staging", "ok"),
    ],
)
def test_staging_is_a_warning_where_export_is_possible(kind: str, way: str, level: str) -> None:
    """On NVIDIA's GPUs and the CPU; elsewhere it is the usual way. Its costs are named."""
    reason = "memory of cuda:0 cannot be mapped" if way == "staging" else ""
    finding = transfer_finding(f"x:0 ({kind})", kind, TransferOutcome(way, reason))
    assert (finding.name, finding.level) == ("transfer", level)
    assert finding.text.startswith(f"x:0 ({kind}): {way}; ")
    assert reason in finding.text
    costs = f"{finding.text}{finding.remedy}".lower()
    assert ("copied twice" in costs) == (way == "staging")


def test_accelerators_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """ROCm is CUDA to torch but for its version; the device's name is torch's."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "MI300X")
    device = torch.device("cuda", 1)
    assert describe_device(device) == "cuda:1 (CUDA, MI300X)"
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert describe_device(device) == "cuda:1 (ROCm, MI300X)"
    assert describe_device(CPU) == "CPU"


def test_a_device_without_memory_fails(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Torch's error is the finding, and other devices are still examined."""

    def no_memory(*_arguments: object, **_options: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", no_memory)
    finding = check_transfer(CPU, tmp_path)
    assert (finding.name, finding.level) == ("transfer", "fail")
    assert "torch cannot allocate 4 MiB: OutOfMemoryError: CUDA out of memory" in finding.text


def test_lines_and_exit_status_are_those_of_the_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Level, name and text; the remedy on a line of its own; 1 if any line says fail."""
    finding = EngineFinding("daemon", "fail", "none answers", "start it")
    monkeypatch.setattr(engine_doctor, "examine_engine", lambda _runtime_dir: [finding])
    done = CliRunner().invoke(cli, ["doctor", "--engine"])
    assert done.output == "fail  daemon: none answers\n      → start it\n"
    assert done.exit_code == 1


def test_without_the_tools_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """As other commands of theirs do."""
    monkeypatch.setattr(config_commands, "entry_points", lambda **_selection: [])
    done = CliRunner().invoke(cli, ["doctor", "--engine"])
    assert done.exit_code == 1
    assert "kvd doctor --engine is not installed here" in done.output
    assert "pip install ./client/tools" in done.output
