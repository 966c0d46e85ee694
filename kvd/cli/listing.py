"""`kvd engines` and `kvd namespaces`: who is here, and what is kept for whom."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from kvd.cli.options import runtime_dir_option
from kvd.wire.tool import Control
from kvd_proto.durations import format_duration
from kvd_proto.sizes import format_size

_PIPED_COLUMNS = 10_000


@click.command()
@runtime_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print `engines` of the report as JSON.")
def engines(*, runtime_dir: Path, as_json: bool) -> None:
    """List the engines that are connected, with every rank.

    \b
    Examples:
      kvd engines
      kvd engines --json | jq '.[] | select(.attached | not) | .name'
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    report = _report(runtime_dir)
    if as_json:
        print(json.dumps(report["engines"], indent=2))
        return
    rows = []
    for engine in report["engines"]:
        state = "attached" if engine["attached"] else _missing(engine)
        space = (engine["namespace"] or "")[:8]
        for index, session in enumerate(engine["sessions"]):
            name = (engine["name"], state, space) if index == 0 else ("", "", "")
            rank = "" if session["rank"] is None else str(session["rank"])
            rows.append(
                (
                    *name,
                    session["kind"],
                    rank,
                    session["device"] or "",
                    f"{session['pid']}",
                    f"{session['uid']}",
                    format_duration(session["seconds"]),
                )
            )
    columns = ("engine", "state", "namespace", "session", "rank", "device", "pid", "uid", "since")
    _print(columns, rows, empty="no engine is connected")


@click.command()
@runtime_dir_option
@click.option("--json", "as_json", is_flag=True, help="Print `namespaces` of the report as JSON.")
def namespaces(*, runtime_dir: Path, as_json: bool) -> None:
    """List the namespaces: whose chunks are kept, how many, in how much of the pool.

    \b
    Examples:
      kvd namespaces
      kvd namespaces --json | jq -r '.[] | select(.engines == 0) | .id'
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    report = _report(runtime_dir)
    if as_json:
        print(json.dumps(report["namespaces"], indent=2))
        return
    rows = []
    for space in report["namespaces"]:
        chunks = space["chunks"]
        held = space["held_bytes"]
        rows.append(
            (
                space["id"][:8],
                space["model"],
                str(space["engines"]),
                f"{chunks['ready']:,}",
                f"{chunks['writing']:,}",
                f"{chunks['pinned']:,}",
                format_size(space["bytes_per_chunk"]),
                format_size(held),
            )
        )
    columns = ("namespace", "model", "engines", "ready", "writing", "pinned", "chunk", "holds")
    _print(columns, rows, empty="no namespace is open")


def _report(runtime_dir: Path) -> dict[str, Any]:
    with Control(runtime_dir) as daemon:
        return daemon.status()


def _missing(engine: dict[str, Any]) -> str:
    missing = engine["missing_ranks"]
    return f"waits for ranks {missing}" if missing else "no rank registered"


def _print(columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], *, empty: str) -> None:
    if not rows:
        print(empty)
        return
    from rich.console import Console  # noqa: PLC0415  # --json must not pay for it
    from rich.table import Table  # noqa: PLC0415
    from rich.text import Text  # noqa: PLC0415

    table = Table(*columns)
    for row in rows:
        table.add_row(*map(Text, row))  # a name is no markup
    # What another program reads has no width that names would have to be cut for.
    Console(width=None if sys.stdout.isatty() else _PIPED_COLUMNS).print(table)
