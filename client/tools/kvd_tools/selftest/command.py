"""`kvd selftest`: does the running daemon move bytes?"""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvd_client.errors import KvdClientError
from kvd_client.scheduler import Scheduler
from kvd_proto.errors import SizeError
from kvd_proto.messages import HOST
from kvd_proto.text import parse_duration
from kvd_tools.selftest.bench import ANSWER_SECONDS, Bench, visible_devices
from kvd_tools.selftest.steps import line, look_at_tiers, run

Told = Sequence[dict[str, Any]]


@click.command()
@click.option(
    "--runtime-dir",
    type=click.Path(path_type=Path, file_okay=False, readable=False),
    default=Path("/run/kvd"),
    envvar="KVD_RUNTIME_DIR",
    show_default=True,
    help="The daemon's runtime directory.",
)
@click.option(
    "--device",
    "devices",
    multiple=True,
    help="Test this lane only, such as host; may be given again [default: all].",
)
@click.option(
    "--timeout",
    default="30s",
    show_default=True,
    metavar="DURATION",
    help="How long a lane may take for one thing; more while it pins a large pool.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def selftest(*, runtime_dir: Path, devices: tuple[str, ...], timeout: str, as_json: bool) -> None:
    """Store, load and compare bytes through each lane of a running daemon.

    Tested are the host's lane, the lanes of CUDA devices that are up, and those of
    the CUDA devices that this process sees. Each test is a small engine with a
    namespace of its own: it stores random bytes, overwrites its memory, loads them
    into other blocks, compares, drops its chunks and leaves; its space goes back
    to the pool. Every step proves what it did. Engines are not disturbed: in a full
    pool only chunks used longest ago go for it, those that lie in one thousandth
    of the pool and the rest of their columns of its grid.

    Of each tier below the pool it is told what the daemon says; no bytes go through
    it, for what a test stores is kept by none.

    Exit status 1 if a step failed, which is named, or if a tier is not used. A daemon
    that drains refuses stores, so that its self-test fails and says so.

    \b
    Examples:
      kvd selftest
      kvd selftest --device host --json | jq '.lanes[0].gbps'
      kvd selftest --timeout 5m   # the lane of a GPU still pins a large pool
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    try:
        seconds = parse_duration(timeout)
        report, tiers = _test(runtime_dir, devices, min(max(seconds, 1.0), 600.0))
    except SizeError as error:
        raise click.BadParameter(str(error), param_hint="--timeout") from error
    except KvdClientError as error:
        raise click.ClickException(str(error)) from error
    good = all(each["ok"] for each in (*report, *tiers))
    if as_json:
        told = {"runtime_dir": str(runtime_dir), "ok": good, "lanes": report, "tiers": tiers}
        print(json.dumps(told, indent=2))
    else:
        _print(report, tiers, Console())
    sys.exit(0 if good else 1)


def _test(runtime_dir: Path, wanted: Sequence[str], timeout: float) -> tuple[Told, Told]:
    """Of each lane, and of each tier."""
    with Scheduler(runtime_dir, f"selftest-{os.getpid()}", deadline=ANSWER_SECONDS) as observer:
        status = observer.status()
        if not status:
            raise click.ClickException(
                f"no daemon answers in {runtime_dir}; start one with:"
                f" kvd serve --runtime-dir {runtime_dir}"
            )
        if not status["pool"]["cpu_bytes"]:
            raise click.ClickException(
                "the pool has no size yet: cpu_bytes is auto, and no engine has registered; start"
                " an engine first, or give the daemon --cpu-bytes"
            )
        lanes = [
            _test_lane(runtime_dir, device, observer, status["pool"]["cpu_bytes"], timeout)
            for device in _devices(status, wanted)
        ]
        return lanes, look_at_tiers(observer, timeout)


def _devices(status: dict[str, Any], wanted: Sequence[str]) -> list[str]:
    """The host, lanes that are up, devices that are visible here; or those that were asked for."""
    known = [HOST, *(lane["device"] for lane in status["lanes"] if lane["up"]), *visible_devices()]
    known = list(dict.fromkeys(known))
    for device in wanted:
        if device not in known:
            raise click.ClickException(f"--device {device}: there are {', '.join(known)}")
    return list(dict.fromkeys(wanted)) or known


def _test_lane(
    runtime_dir: Path, device: str, observer: Scheduler, pool_bytes: int, timeout: float
) -> dict[str, Any]:
    """Return one lane's steps and, where all were done, medians of its jobs.

    gbps: 10^9 bytes a second of copying in the lane; latency_seconds: of a whole job, as an
    engine waits for it. Both by "store" and "load".
    """
    with Bench(runtime_dir, device, observer, pool_bytes, timeout) as bench:
        steps = run(bench)
    last = steps[-1]
    samples = bench.samples if last["ok"] else {}
    return {
        "device": device,
        "ok": last["ok"],
        "failed_step": None if last["ok"] else last["name"],
        "text": "" if last["ok"] else last["text"],
        "steps": steps,
        "job_bytes": max((job.bytes for moved in samples.values() for job, _ in moved), default=0),
        "gbps": {
            kind: median(job.bytes / max(job.seconds, 1e-9) for job, _ in moved) / 1e9
            for kind, moved in samples.items()
        },
        "latency_seconds": {
            kind: median(seconds for _, seconds in moved) for kind, moved in samples.items()
        },
    }


def _print(lanes: Told, tiers: Told, console: Console) -> None:
    """Print a table of the steps for each lane with what it measured, and a line for each tier."""
    for lane in lanes:
        device = lane["device"]
        table = Table("step", "", "seen", "seconds", title=f"lane {device}")
        for step in lane["steps"]:
            mark = "[green]ok[/]" if step["ok"] else "[bold red]FAILED[/]"
            table.add_row(step["name"], mark, step["text"], f"{step['seconds']:.3f}")
        console.print(table)
        if not lane["ok"]:
            console.print(f"[bold red]{device}: {lane['failed_step']} failed:[/] {lane['text']}")
        for kind, gbps in lane["gbps"].items():
            milliseconds = lane["latency_seconds"][kind] * 1000
            console.print(
                f"{device}: {kind} {gbps:.2f} GB/s,"
                f" {milliseconds:.2f} ms a job of {lane['job_bytes']} bytes"
            )
    for tier in tiers:
        console.print(Text(line(tier), "" if tier["ok"] else "bold red"))
