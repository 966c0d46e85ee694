"""`kvd selftest`: does the running daemon move bytes?

Each lane gets a small engine (`selftest_engine.py`) that runs the steps in `STEPS`. A step acts and
then proves that it did, or raises StepFailed. The proof is independent of what the step called: it
reads the memory past the daemon, the directory of chunks, or the daemon's status. So a call that
does nothing, or the wrong thing, is detected.

For tiers the self-test reports the daemon's status. No bytes go through a tier: the namespace of a
test is a temporary one, which tiers do not keep.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import click
from rich.console import Console
from rich.table import Table
from rich.text import Text

from kvd_client.errors import KvdClientError
from kvd_client.scheduler import Scheduler
from kvd_proto.directory import LookupResult
from kvd_proto.errors import SizeError
from kvd_proto.messages import HOST, Fingerprint
from kvd_proto.text import parse_duration
from kvd_tools.errors import StepFailed
from kvd_tools.selftest_engine import ANSWER_SECONDS, SelftestEngine, visible_devices

ROUNDS = 5
_POLL_SECONDS = 0.1

Reports = Sequence[dict[str, Any]]


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
    help="Test only this lane, such as host; may be given more than once [default: all].",
)
@click.option(
    "--timeout",
    default="30s",
    show_default=True,
    metavar="DURATION",
    help="Time that a lane has for each request; more is needed while it pins a large pool.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def selftest(*, runtime_dir: Path, devices: tuple[str, ...], timeout: str, as_json: bool) -> None:
    """Store, load and compare bytes through each lane of a running daemon.

    Tests the host's lane, the lanes of CUDA devices that are up, and the lanes of the
    CUDA devices that this process sees. Each test is a small engine with its own
    namespace: it stores random bytes, overwrites its memory, loads the bytes into other
    blocks, compares them, drops its chunks and leaves; its space goes back to the pool.
    Each step checks its own result. Engines are not disturbed: only if the pool is full are
    chunks evicted, least recently used ones in about one thousandth of the pool.

    For each tier below the pool, prints the daemon's status. No bytes go through a
    tier, because tiers do not keep the chunks of a test.

    Exit status 1 if a step failed, which is named, or if a tier is not used. A draining
    daemon refuses stores, so its self-test fails and says so.

    \b
    Examples:
      kvd selftest
      kvd selftest --device host --json | jq '.lanes[0].gbps'
      kvd selftest --timeout 5m   # the lane of a GPU still pins a large pool
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    try:
        seconds = parse_duration(timeout)
        lanes, tiers = _test(runtime_dir, devices, min(max(seconds, 1.0), 600.0))
    except SizeError as error:
        raise click.BadParameter(str(error), param_hint="--timeout") from error
    except KvdClientError as error:
        raise click.ClickException(str(error)) from error
    ok = all(report["ok"] for report in (*lanes, *tiers))
    if as_json:
        report = {"runtime_dir": str(runtime_dir), "ok": ok, "lanes": lanes, "tiers": tiers}
        print(json.dumps(report, indent=2))
    else:
        _print(lanes, tiers, Console())
    sys.exit(0 if ok else 1)


def _test(
    runtime_dir: Path, chosen_devices: Sequence[str], timeout: float
) -> tuple[Reports, Reports]:
    """Test the lanes; return a report of each lane and of each tier."""
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
            for device in _devices(status, chosen_devices)
        ]
        return lanes, tier_reports(observer, timeout)


def _devices(status: dict[str, Any], chosen: Sequence[str]) -> list[str]:
    """Return the chosen devices; by default the host, lanes that are up, and visible devices."""
    known = [HOST, *(lane["device"] for lane in status["lanes"] if lane["up"]), *visible_devices()]
    known = list(dict.fromkeys(known))
    for device in chosen:
        if device not in known:
            raise click.ClickException(f"--device {device}: there are {', '.join(known)}")
    return list(dict.fromkeys(chosen)) or known


def _test_lane(
    runtime_dir: Path, device: str, observer: Scheduler, pool_bytes: int, timeout: float
) -> dict[str, Any]:
    """Return the report of one lane.

    If all steps were ok, it has medians over jobs by "store" and "load": `gbps`, 10^9 bytes a
    second of copying in the lane, and `latency_seconds`, of a whole job as an engine waits for it.
    """
    with SelftestEngine(runtime_dir, device, observer, pool_bytes, timeout) as engine:
        steps = run_steps(engine)
    last = steps[-1]
    samples = engine.samples if last["ok"] else {}
    return {
        "device": device,
        "ok": last["ok"],
        "failed_step": None if last["ok"] else last["name"],
        "text": "" if last["ok"] else last["text"],
        "steps": steps,
        "job_bytes": max((job.bytes for jobs in samples.values() for job, _ in jobs), default=0),
        "gbps": {
            kind: median(job.bytes / max(job.seconds, 1e-9) for job, _ in jobs) / 1e9
            for kind, jobs in samples.items()
        },
        "latency_seconds": {
            kind: median(seconds for _, seconds in jobs) for kind, jobs in samples.items()
        },
    }


def _print(lanes: Reports, tiers: Reports, console: Console) -> None:
    """Print a table of the steps and the measurements of each lane, and a line for each tier."""
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
        console.print(Text(tier_line(tier), "" if tier["ok"] else "bold red"))


# -------------------------------------------------------------------- steps


def run_steps(engine: SelftestEngine) -> list[dict[str, Any]]:
    """Run the steps in order until one fails.

    Returns:
        For each step its name, whether it is ok, what it saw or what was wrong, and its duration.
    """
    steps: list[dict[str, Any]] = []
    for name, step in STEPS.items():
        started = time.perf_counter()
        try:
            text, ok = step(engine), True
        except KvdClientError as error:
            text, ok = str(error), False
        seconds = time.perf_counter() - started
        steps.append({"name": name, "ok": ok, "text": text, "seconds": seconds})
        if not ok:
            break
    return steps


def _memory(engine: SelftestEngine) -> str:
    engine.allocate()
    for block in (0, engine.num_blocks - 1):
        engine.write([block], [engine.content[block % len(engine.content)]])
    if (engine.rows[0] != engine.content[0]).any():
        raise StepFailed("bytes that were written into the memory cannot be read back")
    return f"{engine.num_blocks} blocks of {engine.block_bytes} bytes"


def _register(engine: SelftestEngine) -> str:
    """Register in a temporary namespace, whose label makes it unique."""
    engine.worker.register(
        [engine.memory],
        engine.layout,
        Fingerprint(model="kvd selftest", label=engine.keys[0].hex()),
        temporary=True,
        required=True,
        timeout=engine.timeout,
    )
    engine.scheduler.wait_attached(engine.timeout)
    if not engine.worker.wait_attached(engine.timeout) or not engine.scheduler.attached:
        raise StepFailed(f"no lane has mapped the memory within {engine.timeout:g} s")
    engine.namespace_id = engine.scheduler.namespace.hex()
    namespace = engine.own_namespace()
    if (
        namespace is None
        or namespace["engines"] != 1
        or namespace["chunks"]["ready"]
        or namespace["chunks"]["writing"]
    ):
        raise StepFailed(f"not in an empty namespace of its own: {namespace}")
    return f"namespace {engine.namespace_id[:8]}, used by nobody else"


def _fill(engine: SelftestEngine) -> str:
    engine.write(engine.source, engine.content)
    if num_wrong := engine.differences(engine.source):
        raise StepFailed(f"{num_wrong} bytes of the source are not those that were written")
    return f"{len(engine.source)} blocks hold random bytes"


def _store(engine: SelftestEngine) -> str:
    engine.store()
    num_stored = len(engine.stored)
    if not engine.wait_until(engine.ready):
        num_ready = engine.count(LookupResult.HIT)
        raise StepFailed(f"{num_ready} of {num_stored} stored chunks can be loaded")
    return f"{len(engine.stored)} chunks of {engine.chunk_bytes} bytes"


def _poison(engine: SelftestEngine) -> str:
    """Overwrite source and destination, but not the pool."""
    blocks = [*engine.stored_blocks(engine.source), *engine.stored_blocks(engine.destination)]
    engine.poison(blocks)
    if num_left := sum(engine.unpoisoned(blocks)):
        raise StepFailed(f"{num_left} bytes of source and destination are not overwritten")
    return f"{len(blocks)} blocks of source and destination overwritten"


def _load(engine: SelftestEngine) -> str:
    engine.load()
    destination = engine.stored_blocks(engine.destination)
    if num_untouched := engine.unpoisoned(destination).count(0):
        raise StepFailed(f"nothing was copied into {num_untouched} of the blocks")
    if num_stray := sum(engine.unpoisoned(engine.stored_blocks(engine.source))):
        raise StepFailed(f"{num_stray} bytes went into blocks that were not to be loaded")
    return f"{len(engine.stored)} chunks into other blocks"


def _compare(engine: SelftestEngine) -> str:
    """Compare the loaded bytes; then plant a wrong byte and check that the comparison finds it."""
    blocks = engine.stored_blocks(engine.destination)
    num_bytes = len(blocks) * engine.block_bytes
    if num_wrong := engine.differences(blocks):
        raise StepFailed(f"{num_wrong} of {num_bytes} loaded bytes are not those that were stored")
    damaged = engine.rows[blocks[-1]].copy()
    damaged[-1] ^= 1
    engine.write(blocks[-1:], [damaged])
    if (num_wrong := engine.differences(blocks)) != 1:
        raise StepFailed(f"a wrong byte was planted, and {num_wrong} were found")
    return f"{num_bytes} bytes are right, and one planted wrong byte was found"


def _measure(engine: SelftestEngine) -> str:
    for samples in engine.samples.values():
        samples.clear()
    for _ in range(ROUNDS):
        engine.scheduler.reset()
        engine.store()
        engine.wait_until(engine.ready)
        engine.load()
    for kind, samples in engine.samples.items():
        if len(samples) != ROUNDS or not all(job.bytes for job, _ in samples):
            raise StepFailed(f"{len(samples)} of {ROUNDS} {kind}s were measured")
    return f"{ROUNDS} more stores and loads"


def _evict(engine: SelftestEngine) -> str:
    """Reset the namespace; check by lookup, load and status that nothing is left."""
    engine.scheduler.reset()
    if num_left := engine.count(LookupResult.HIT, LookupResult.HIT_PENDING):
        raise StepFailed(f"{num_left} chunks can still be found")
    with engine.scheduler.prepare_load(engine.keys) as ticket:
        if ticket.keys or not len(ticket.found):
            raise StepFailed(f"{len(ticket.keys)} chunks can still be loaded")
    namespace = engine.own_namespace()
    if namespace is None or namespace["chunks"]["ready"]:
        raise StepFailed(f"the daemon still counts chunks: {namespace}")
    return f"none of {len(engine.keys)} keys is found"


def _leave(engine: SelftestEngine) -> str:
    engine.leave()
    if not engine.wait_until(lambda: engine.own_namespace() is None):
        raise StepFailed(f"the daemon keeps namespace {engine.namespace_id[:8]}")
    return "the namespace is gone, its space is given back"


STEPS: dict[str, Callable[[SelftestEngine], str]] = {
    "memory": _memory,
    "register": _register,
    "fill": _fill,
    "store": _store,
    "poison": _poison,
    "load": _load,
    "compare": _compare,
    "measure": _measure,
    "evict": _evict,
    "leave": _leave,
}


# -------------------------------------------------------------------- tiers


def tier_reports(observer: Scheduler, timeout: float) -> list[dict[str, Any]]:
    """Return the self-test's report of each tier; wait up to `timeout` s for those that start."""
    end = time.monotonic() + timeout
    while True:
        tiers: list[dict[str, Any]] = observer.status().get("tiers", [])
        starting = any(tier["state"] == "starting" for tier in tiers)
        if not starting or time.monotonic() > end:
            return [tier_report(tier) for tier in tiers]
        time.sleep(_POLL_SECONDS)


def tier_report(tier: dict[str, Any]) -> dict[str, Any]:
    """Return the self-test's report of a tier, from the tier's entry in the status report.

    `ok`: its process serves and its breaker is closed. `stored`, `loaded` and `corrupt` are chunks
    since the daemon's start.
    """
    counts = tier["counters"]
    return {
        "name": tier["name"],
        "ok": bool(tier["up"] and tier["usable"]),
        "state": tier["state"],
        "breaker": tier["breaker"],
        "chunks": tier["chunks"],
        "used_bytes": tier["used_bytes"],
        "stored": counts["puts"]["ok"],
        "loaded": counts["gets"]["ok"],
        "corrupt": counts["gets"]["corrupt"],
        "last_error": tier["last_error"],
    }


def tier_line(tier: dict[str, Any]) -> str:
    """Return the report of a tier as a line of text."""
    state = tier["state"] if tier["breaker"] == "closed" else f"breaker {tier['breaker']}"
    line = (
        f"tier {tier['name']}: {state}, {tier['chunks']:,} chunks; since the start"
        f" {tier['stored']:,} stored, {tier['loaded']:,} loaded, {tier['corrupt']:,} corrupt"
    )
    return f"{line}; last error: {tier['last_error']}" if tier["last_error"] else line
