"""`kvd status`: what the daemon says of itself."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from kvd.cli.options import runtime_dir_option
from kvd.errors import NotRunning
from kvd.wire.tool import Control

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
        from kvd.cli.status_table import print_tables  # noqa: PLC0415  # --json must not pay for it

        print_tables(report)
    sys.exit(0 if report["ready"] else 1)


def _ask(runtime_dir: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        with Control(runtime_dir) as control:
            return control.status(), ""
    except NotRunning as error:
        return None, str(error)
