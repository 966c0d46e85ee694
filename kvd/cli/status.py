"""`kvd status`, `kvd engines` and `kvd namespaces`: the report, or a part of it."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from kvd.cli.options import duration, json_option, runtime_dir_option, wide_option
from kvd.errors import AccessDenied, NotRunning
from kvd.wire.tool import Control

_POLL_SECONDS = 0.05


@click.command()
@runtime_dir_option
@json_option("Print the whole report as JSON.")
@click.option(
    "--wait",
    callback=duration,
    default="0",
    metavar="DURATION",
    help="Wait up to this long for ready, such as 30s or 2m.",
)
@wide_option
def status(*, runtime_dir: Path, as_json: bool, wait: float, wide: bool) -> None:
    """Show the daemon's state; exit status 0 only when it is ready.

    \b
    Examples:
      kvd status
      kvd status --runtime-dir /run/kvd --json | jq .pool
      kvd status --wait 30s && start-my-engine
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    deadline = time.monotonic() + wait
    while True:
        late = time.monotonic() >= deadline
        try:
            report = _report(runtime_dir)
            if late or report["ready"]:
                break
        except AccessDenied:  # which does not pass
            raise
        except NotRunning:
            if late:
                raise
        time.sleep(_POLL_SECONDS)
    _print("report", report, as_json=as_json, wide=wide)
    sys.exit(0 if report["ready"] else 1)


@click.command()
@runtime_dir_option
@json_option("Print `engines` of the report as JSON.")
@wide_option
def engines(*, runtime_dir: Path, as_json: bool, wide: bool) -> None:
    """List the engines that are connected, with every rank.

    \b
    Examples:
      kvd engines
      kvd engines --json | jq '.[] | select(.attached | not) | .name'
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    _print("engines", _report(runtime_dir)["engines"], as_json=as_json, wide=wide)


@click.command()
@runtime_dir_option
@json_option("Print `namespaces` of the report as JSON.")
@wide_option
def namespaces(*, runtime_dir: Path, as_json: bool, wide: bool) -> None:
    """List the namespaces: whose chunks are kept, how many, in how much of the pool.

    \b
    Examples:
      kvd namespaces
      kvd namespaces --json | jq -r '.[] | select(.engines == 0) | .id'
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    _print("namespaces", _report(runtime_dir)["namespaces"], as_json=as_json, wide=wide)


def _report(runtime_dir: Path) -> dict[str, Any]:
    with Control(runtime_dir) as daemon:
        return daemon.status()


def _print(kind: str, told: Any, *, as_json: bool, wide: bool) -> None:
    if as_json:
        print(json.dumps(told, indent=2))
    else:
        from kvd.cli import tables  # noqa: PLC0415  # --json must not pay for it

        getattr(tables, f"print_{kind}")(told, wide=wide)
