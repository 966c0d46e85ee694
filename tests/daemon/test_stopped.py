"""Processes of a daemon that SIGSTOP has stopped: who names them, and where."""

import os
import signal
import subprocess
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import NotRunning
from kvd.machine.process import stopped_text
from kvd.wire.tool import ToolConnection
from kvd_proto.messages import Ping
from tests.daemon.serving import Daemon, StartDaemon
from tests.processes import children_running, freeze, frozen
from tests.waiting import eventually


def conditions_of(report: dict[str, Any]) -> dict[str, str]:
    """What is wrong, by the name of its rule."""
    return {condition["name"]: condition["text"] for condition in report["conditions"]}


@pytest.mark.parametrize("kind", ["lane", "tier"])
def test_a_stopped_child_is_named_until_it_goes_on(start_daemon: StartDaemon, kind: str) -> None:
    """Report, readiness and conditions have its pid and state T; afterwards none of them does."""
    daemon = start_daemon("--tier", "memory:,size=8MiB")
    eventually(lambda: daemon.status()["tiers"][0]["up"])
    (process,) = children_running(daemon.process.pid, f"kvd.{kind}")
    text = f"pid {process.pid} is stopped (state T)"

    def stopped(report: dict[str, Any]) -> bool:
        return bool(report[f"{kind}s"][0]["stopped"] == text)

    with frozen(process.pid):
        report = eventually(daemon.status, stopped)
        assert text in conditions_of(report)[f"{kind} stopped"]
        lane_check = report["checks"][1]
        assert (lane_check["text"] == text) is (kind == "lane")
        assert "lane silent" not in conditions_of(report)
    report = eventually(daemon.status, lambda report: report[f"{kind}s"][0]["stopped"] == "")
    assert f"{kind} stopped" not in conditions_of(report)


@pytest.mark.parametrize("kind", ["lane", "tier"])
def test_the_log_says_that_what_is_killed_for_silence_was_stopped(
    start_daemon: StartDaemon, kind: str
) -> None:
    """The watchdog's line and that of its end name the pid, and another process serves."""
    daemon = start_daemon("--tier", "memory:,size=8MiB", "--lane-timeout-seconds", "5")
    eventually(lambda: daemon.status()["tiers"][0]["up"])
    (process,) = children_running(daemon.process.pid, f"kvd.{kind}")
    os.kill(process.pid, signal.SIGSTOP)
    cause = f" s: pid {process.pid} is stopped (state T)"
    name = {"lane": "lane host", "tier": "tier memory"}[kind]
    log = daemon.wait_log("killed by kvd: did not report for")
    lines = [line for line in log.splitlines() if cause in line]
    assert any(f"{name} is killed: did not report for" in line for line in lines)
    assert any("killed by kvd: did not report for" in line for line in lines)
    eventually(
        daemon.status,
        lambda report: report[f"{kind}s"][0]["up"] and report[f"{kind}s"][0]["stopped"] == "",
    )


@pytest.mark.parametrize("answered", [False, True])
def test_a_tool_names_a_stopped_broker(daemon: Daemon, *, answered: bool) -> None:
    """By its pid, whether it was stopped before a tool connected or between two answers."""
    pid = daemon.process.pid
    with ToolConnection(daemon.runtime_dir) as tool:
        with frozen(pid):
            stopped = rf"pid {pid} is stopped \(state T\); let it go on with kill -CONT"
            ask = (
                partial(tool.request, Ping())
                if answered
                else partial(ToolConnection, daemon.runtime_dir)
            )
            with pytest.raises(NotRunning, match=stopped):
                ask(0.3)
        assert tool.status()["pid"] == pid


def test_only_a_stopped_process_is_called_so(tmp_path: Path) -> None:
    """One that runs is not, whatever its name is, nor one that has ended."""
    program = tmp_path / "a) T (b"
    program.symlink_to("/bin/sleep")
    with subprocess.Popen([program, "600"]) as process:
        try:
            name = Path(f"/proc/{process.pid}/comm")
            eventually(name.read_text, lambda text: "T (b" in text)
            assert stopped_text(process.pid) == ""
            freeze(process.pid)
            assert stopped_text(process.pid) == f"pid {process.pid} is stopped (state T)"
        finally:
            process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert stopped_text(process.pid) == ""
    assert stopped_text(process.pid) == ""
