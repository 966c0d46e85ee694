"""`kvd status`, `kvd engines` and `kvd namespaces`, against reports that say what a test wants."""

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from kvd.cli import cli
from kvd.cli.tables import print_report
from kvd.report.app import Exposition
from kvd.wire.tool import ToolConnection
from kvd_proto.messages import Status, StatusReport
from tests.client.fake_daemon import FakeDaemon
from tests.report.reports import loaded_report
from tests.waiting import PATIENCE, eventually

EVIL = "a\x1b[2J\0\u202e"
SHOWN = "a\\x1b[2J\\x00\\u202e"
LONG = "org/a-model-with-a-name-that-is-longer-than-most-terminals-are-wide-" + "x" * 60


def report_with(name: str) -> dict[str, Any]:
    """A loaded daemon's report in which an engine, a model and an event have this name."""
    report = loaded_report(60.0)
    report["engines"][0]["name"] = name
    for space in report["namespaces"]:
        space["model"] = name
    report["events"][0]["text"] = f"engine {name} is here"
    return report


@pytest.fixture
def daemon(runtime_dir: Path) -> Any:
    """Makes a daemon that reports names as a careless one would."""
    runtime_dir.mkdir(mode=0o700)
    started: list[FakeDaemon] = []

    def start(name: str) -> Path:
        fake = FakeDaemon(runtime_dir)
        started.append(fake)
        fake.replies[Status] = lambda _: StatusReport(status=report_with(name))
        return runtime_dir

    yield start
    for fake in started:
        fake.kill()


def told(where: Path, *command: str) -> str:
    """What a command prints, as soon as the daemon answers it in time."""

    def run() -> Result:
        return CliRunner().invoke(cli, [*command, "--runtime-dir", str(where)])

    return eventually(run, lambda result: result.exit_code == 0).output


@pytest.mark.parametrize("command", ["status", "engines", "namespaces", "top"])
def test_names_are_whole_with_wide(daemon: Any, command: str) -> None:
    """Each command that shows names takes --wide."""
    where = daemon(LONG)
    once = ("--once", "--interval", "0.1") if command == "top" else ()
    assert LONG in told(where, command, "--wide", *once)


@pytest.mark.parametrize(
    "command", [["engines"], ["namespaces"], ["status"], ["top", "--once", "--interval", "0.1"]]
)
def test_no_command_writes_a_names_escapes_to_the_terminal(
    daemon: Any, command: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """ESC, NUL and changes of direction are written out, also where a daemon lets them pass."""
    monkeypatch.setenv("COLUMNS", "200")
    where = daemon(EVIL)
    text = told(where, *command)
    assert not set("\x1b\0\u202e") & set(text)
    assert SHOWN in text


def test_no_name_puts_controls_into_the_metrics(daemon: Any) -> None:
    """What HTTP serves is made of the report as tools receive it."""
    where = daemon(EVIL)
    with ToolConnection(where, PATIENCE) as control:
        report = control.status()
    text = Exposition(report, 0.0).encode("")[0].decode()
    assert SHOWN.replace("\\", "\\\\") in text
    assert not set("\x1b\0\u202e") & set(text)


def test_names_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in names and errors are printed as they are."""
    report = loaded_report(1.0)
    report["engines"][0]["name"] = "[red]evil[/]"
    report["namespaces"][0]["model"] = "[/]"
    print_report(report)
    assert "[red]evil[/]" in capsys.readouterr().out
