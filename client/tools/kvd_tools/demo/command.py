"""`kvd demo`: a private daemon, a few ranks, a workload, and a check of every loaded byte."""

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TextIO

import click
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

from kvd_client.errors import KvdClientError
from kvd_client.scheduler import Scheduler
from kvd_proto.errors import SizeError
from kvd_proto.text import parse_size
from kvd_tools.demo.engine import NO_FIGURES, DemoEngine, settled_figures
from kvd_tools.demo.processes import ENGINE, Daemon, RankProcesses, RankSetup
from kvd_tools.demo.workload import (
    BLOCKS_PER_CHUNK,
    STRIDES,
    Prompt,
    conversations,
    distinct_pieces,
)

MEMCPY_BYTES = 64 * 2**20
MEMCPY_RUNS = 5
MEANING = {
    "requests": "prompts served",
    "lookups": "keys looked up in shared memory",
    "hit_chunks": "chunks found and used, both groups",
    "stored_chunks": "chunks written to the pool",
    "loaded_chunks": "chunks read back from the pool",
    "evicted_chunks": "chunks that made room for others",
    "refused_chunks": "offered chunks that got no slot",
    "failed_loads": "loads that became misses",
    "failed_stores": "stores that came to nothing",
    "verified_bytes": "bytes compared after loading",
    "mismatched_bytes": "of these, wrong ones",
    "strayed_bytes": "bytes changed where nothing may be written",
    "store_GBps": "ranks to pool, the lane's copy time",
    "load_GBps": "pool to ranks, the lane's copy time",
    "tier_stored_chunks": "chunks stored in tiers, with --tier",
    "tier_loaded_chunks": "chunks promoted from tiers",
    "tier_in_GBps": "pool to tiers, while a transfer was in flight",
    "tier_out_GBps": "tiers to pool, while a transfer was in flight",
    "memcpy_GBps": "one contiguous copy, for comparison",
    "jobs": "stores and loads, each rank's counted",
    "job_p50_us": "submitted to seen finished, median",
    "job_p99_us": "the same, 99th percentile",
    "lookup_us_per_key": "from the scheduler's process",
    "wall_seconds": "serving all requests",
    "world_size": "rank processes",
    "device": "where the KV tensors are",
}
"""The figures, in their order. Chunks count once, bytes and jobs once for each rank."""

Summary = dict[str, int | float | str | None]


def memcpy_rate() -> float:
    """Return the best rate of a few contiguous copies in this process, in 1e9 bytes a second."""
    source = np.ones(MEMCPY_BYTES, np.uint8)
    target = np.zeros(MEMCPY_BYTES, np.uint8)
    best = float("inf")
    for _ in range(MEMCPY_RUNS):
        started = time.perf_counter()
        np.copyto(target, source)
        best = min(best, time.perf_counter() - started)
    return MEMCPY_BYTES / best / 1e9


def summarize(
    counts: Counter[str],
    job_ns: Sequence[int],
    other_figures: Mapping[str, int | float | str | None],
) -> Summary:
    """Return the object of the JSON file. Rates are in 1e9 bytes a second."""
    p50, p99 = np.percentile(job_ns or [0], [50, 99]) / 1e3
    computed: Summary = {
        **{
            f"{kind}_GBps": round(counts[f"{kind}_bytes"] / max(1, counts[f"{kind}_ns"]), 3)
            for kind in ("store", "load")
        },
        "jobs": len(job_ns),
        "job_p50_us": round(float(p50), 1),
        "job_p99_us": round(float(p99), 1),
        "lookup_us_per_key": round(counts["lookup_ns"] / 1e3 / max(1, counts["lookups"]), 3),
        **other_figures,
    }
    return {name: computed.get(name, counts[name]) for name in MEANING}


def summary_table(summary: Summary) -> Table:
    """Return a table of the figures that this run has."""
    table = Table("figure", "value", "what it is", title="kvd demo")
    table.columns[1].justify = "right"
    for name, value in summary.items():
        if value is not None:
            text = f"{value:,}" if isinstance(value, int) else str(value)
            table.add_row(name, text, MEANING[name])
    return table


MAX_WORLD_SIZE = 16
POOL_SHARE = 0.4  # of the working set, so that the daemon evicts chunks
TIER_POOL_SHARE = 0.15  # the same with a tier, so that many chunks are promoted
MAX_POOL_BYTES = 2**30  # unless --cpu-bytes says otherwise
MIN_BLOCKS = 256
ATTACH_SECONDS = 30.0
POLL_SECONDS = 0.5


@click.command()
@click.option(
    "--world-size",
    type=click.IntRange(1, MAX_WORLD_SIZE),
    default=2,
    show_default=True,
    help="Rank processes.",
)
@click.option(
    "--requests",
    "count",
    type=click.IntRange(1),
    default=400,
    show_default=True,
    help="Number of requests.",
)
@click.option(
    "--json",
    "json_file",
    type=click.File("w", lazy=False),
    help="Write the figures to this file.",
)
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Seed of the generated requests."
)
@click.option(
    "--cpu-bytes",
    "cpu_size",
    help="Size of the pool, such as 256MiB [default: less than the working set]",
)
@click.option(
    "--tier",
    "tiers",
    multiple=True,
    metavar="TIER",
    help="Keep evicted chunks in this tier, such as disk:/tmp/tier,size=1GiB; may be given more"
    " than once.",
)
@click.option(
    "--corrupt",
    is_flag=True,
    help="Flip one bit of the first block that rank 0 stores, to see that it is found.",
)
def demo(
    *,
    world_size: int,
    count: int,
    json_file: TextIO | None,
    seed: int,
    cpu_size: str | None,
    tiers: tuple[str, ...],
    corrupt: bool,
) -> None:
    """Store and load KV bytes through a private daemon, and verify every loaded byte.

    With a tier the pool is small, and evicted chunks are promoted from the tier. The tier keeps its
    chunks: another run finds them.

    Exit status 1 if any byte is wrong.

    \b
    Examples:
      kvd demo
      kvd demo --world-size 4 --requests 100 --json out.json
      kvd demo --tier disk:/tmp/tier,size=1GiB
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    console = Console()
    try:
        cpu_bytes = None if cpu_size is None else parse_size(cpu_size)
        prompts = list(conversations(count, seed))
        signals = Signals()
        summary = _run(
            prompts, world_size, cpu_bytes, tiers, console, signals=signals, corrupt=corrupt
        )
    except (KvdClientError, SizeError) as error:
        raise click.ClickException(str(error)) from error
    console.print(summary_table(summary))
    if json_file is not None:
        json.dump(summary, json_file, indent=2)
    if summary["mismatched_bytes"] or summary["strayed_bytes"]:
        console.print(
            f"[bold red]{summary['mismatched_bytes']:,} of {summary['verified_bytes']:,} loaded"
            f" bytes are wrong, {summary['strayed_bytes']:,} bytes changed elsewhere.[/]"
        )
        sys.exit(1)
    console.print(f"[bold green]All {summary['verified_bytes']:,} loaded bytes are right.[/]")


def _run(
    prompts: list[Prompt],
    world_size: int,
    cpu_bytes: int | None,
    tiers: tuple[str, ...],
    console: Console,
    *,
    signals: "Signals",
    corrupt: bool,
) -> Summary:
    # The null block, and both groups of the longest prompt.
    num_blocks = 1 + max(MIN_BLOCKS, 2 * BLOCKS_PER_CHUNK * max(map(len, prompts)))
    if cpu_bytes is None:
        bytes_per_chunk = sum(STRIDES) * BLOCKS_PER_CHUNK * world_size
        # Two groups, although only about three of every `STEP_CHUNKS` chunks of WINDOW are stored.
        share = TIER_POOL_SHARE if tiers else POOL_SHARE
        num_chunks = int(share * 2 * distinct_pieces(prompts)) + 4
        cpu_bytes = min(num_chunks * bytes_per_chunk, MAX_POOL_BYTES)
    memcpy_gbps = memcpy_rate()
    with Daemon(cpu_bytes, tiers=tiers) as daemon:
        setups = [
            RankSetup(daemon.runtime_dir, rank, world_size, num_blocks, corrupt and not rank)
            for rank in range(world_size)
        ]
        with (
            RankProcesses(setups) as ranks,
            Scheduler(daemon.runtime_dir, ENGINE, steps=True) as scheduler,
        ):
            end = time.monotonic() + ATTACH_SECONDS
            while not scheduler.wait_attached(POLL_SECONDS):
                signals.check()
                ranks.receive(0)  # raises if a rank has ended
                if time.monotonic() > end:
                    raise daemon.lost(
                        f"the ranks are ready, but not attached after {ATTACH_SECONDS:g} s"
                    )
            engine = DemoEngine(scheduler, ranks, num_blocks)
            started = time.perf_counter()
            for prompt in track(prompts, "serving", console=console):
                signals.check()
                engine.serve(prompt)
            engine.finish_jobs()
            signals.check()
            wall_seconds = time.perf_counter() - started
            tier_figures = settled_figures(scheduler) if tiers else NO_FIGURES
            engine.counts["strayed_bytes"] = ranks.stop()
    other_figures: Summary = {
        **tier_figures,
        "memcpy_GBps": round(memcpy_gbps, 3),
        "wall_seconds": round(wall_seconds, 3),
        "world_size": world_size,
        "device": ranks.device,
    }
    return summarize(engine.counts, engine.job_ns, other_figures)


class Signals:
    """Ends the demo at Ctrl-C and SIGTERM.

    The handler raises, but Python drops an exception that is raised in a finalizer. So `check`
    raises it again.
    """

    def __init__(self) -> None:
        self._received = 0
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, _frame: object) -> None:
        self._received = number
        self.check()

    def check(self) -> None:
        """End the demo if a signal was received.

        Raises:
            KeyboardInterrupt: after Ctrl-C.
            SystemExit: after SIGTERM, with the status 128 + 15.
        """
        if self._received == signal.SIGINT:
            raise KeyboardInterrupt
        if self._received:
            sys.exit(128 + self._received)
