"""`kvd status`: what the daemon says of itself."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from kvd.cli.options import runtime_dir_option
from kvd.control import Control
from kvd.errors import NotRunning
from kvd_proto.messages import Status, StatusReport
from kvd_proto.sizes import format_size

_POLL_SECONDS = 0.05


@click.command()
@runtime_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print the whole report as JSON.")
@click.option("--wait", type=float, default=0.0, help="Wait up to this many seconds for ready.")
def status(*, runtime_dir: Path, as_json: bool, wait: float) -> None:
    """Show the daemon's state; exit status 0 only when it is ready.

    \b
    Examples:
      kvd status
      kvd status --runtime-dir /run/kvd --json | jq .pool
      kvd status --wait 30 && start-my-engine
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    deadline = time.monotonic() + wait
    while True:
        report, problem = _ask(runtime_dir)
        if (report is not None and report["ready"]) or time.monotonic() >= deadline:
            break
        time.sleep(_POLL_SECONDS)
    if report is None:
        raise click.ClickException(problem)
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _print_table(report)
    sys.exit(0 if report["ready"] else 1)


def _ask(runtime_dir: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        with Control(runtime_dir) as control:
            reply = control.request(Status())
    except NotRunning as error:
        return None, str(error)
    if not isinstance(reply, StatusReport):
        return None, f"the daemon answered {reply}"
    return reply.status, ""


def _print_table(report: dict[str, Any]) -> None:
    from rich.console import Console  # noqa: PLC0415  # --json must not pay for it
    from rich.table import Table  # noqa: PLC0415

    console = Console()
    reasons = "; ".join(report["not_ready"])
    state = "[green]ready[/]" if report["ready"] else f"[red]not ready[/] ({reasons})"
    console.print(f"{report['version']}  pid {report['pid']}  {state}")
    console.print(f"boot id {report['boot_id']}   pool {format_size(report['pool']['cpu_bytes'])}")

    lanes = Table("lane", "state", "pid", "queued jobs", "workers", "restarts", title="Lanes")
    for lane in report["lanes"]:
        lanes.add_row(
            lane["device"],
            "up" if lane["up"] else f"down: {lane['last_error'] or 'starting'}",
            str(lane["pid"]),
            str(lane["queued_jobs"]),
            str(lane["workers"]),
            str(lane["restarts"]),
        )
    console.print(lanes)

    spaces = Table("namespace", "model", "engines", "chunk", "chunks", title="Namespaces")
    for space in report["namespaces"]:
        chunks = ", ".join(f"{value} {name}" for name, value in space["chunks"].items() if value)
        spaces.add_row(
            space["id"][:8],
            space["model"],
            str(space["engines"]),
            format_size(space["bytes_per_chunk"]),
            f"{chunks or 'empty'} of {space['num_chunks']}",
        )
    console.print(spaces)

    engines = Table("engine", "state", "ranks", "pids", title="Engines")
    for engine in report["engines"]:
        missing = engine["missing_ranks"]
        engines.add_row(
            engine["name"],
            "attached" if engine["attached"] else _waiting(missing),
            str(engine["world_size"]),
            " ".join(str(session["pid"]) for session in engine["sessions"]),
        )
    console.print(engines)
    counters = Table("counter", "value", title="Counters")
    for name, value in report["counters"].items():
        if not isinstance(value, dict):
            counters.add_row(name, f"{value:.3f}" if isinstance(value, float) else str(value))
    console.print(counters)


def _waiting(missing: list[int]) -> str:
    return f"waiting for ranks {missing}" if missing else "no rank is registered"
