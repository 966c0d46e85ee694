"""A job of one chunk, from submission to seen finished, beside a bare ZeroMQ round trip.

Two ranks in processes of their own, first one after the other, then at the same time. A bare
round trip is a frame as long as a job's, from a DEALER socket to a ROUTER's process and back,
by the same ranks in the same turns. An engine does not wait for its jobs: what its step pays is
`JobBlocks.of`, `submit`, and a `get_finished`, with a result or without.

`python latency.py` prints the figures, and where the time goes; `python latency.py RUNTIME_DIR
ENGINE RANK` is one rank, and `python latency.py ENDPOINT` the process that sends frames back.
"""

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import zmq
from harness import (
    MIB,
    POLL_SECONDS,
    SECONDS,
    Daemon,
    Figures,
    engine_name,
    fresh_keys,
    layout,
    wait_found,
)
from rich.console import Console
from rich.table import Table

from kvd_client import JobBlocks, Load, Store
from kvd_client.memory import HostMemory
from kvd_client.scheduler import Scheduler
from kvd_client.worker import Worker
from kvd_proto.messages import Fingerprint

# A chunk has 128 KiB on every rank.
WORLD_SIZE, TENSORS, PAGE, NUM_BLOCKS, BLOCKS_PER_CHUNK = 2, 4, 16384, 64, 2
POOL = 256 * MIB
CHUNKS = 250  # jobs in a series; bare round trips, stores and loads take turns
SERIES = 4
FRAME_BYTES = 240  # of a job of one chunk
MODES = ("alone", "together")
JOBS = ("store", "load")
KINDS = ("bare", *JOBS)
STEPS = ("JobBlocks.of", "submit", "wait", "get_finished")
STAGES = {
    "queued": "lane: until the first byte (plan, checks)",
    "copied": "lane: copy, checks",
    "reported": "lane: answer",
}


class Series(NamedTuple):
    """What was measured of one mode and kind.

    us: microseconds of each job, by step: [jobs, steps]. lane_us: of one job, by stage.
    """

    us: "np.ndarray[tuple[int, int], np.dtype[np.float64]]"
    lane_us: dict[str, float]

    def percentile(self, q: float) -> float:
        """Of whole jobs."""
        return float(np.percentile(self.us.sum(axis=1), q))


def measure() -> Figures:
    """Percentiles over all jobs of both ranks at once, of stores and loads apart, and of one."""
    series = run()
    figures: Figures = {}
    one_bare = series["alone", "bare"].percentile(50)
    for mode in MODES:
        name = "" if mode == "together" else "alone_"
        both = np.concatenate([series[mode, kind].us.sum(axis=1) for kind in ("store", "load")])
        figures |= {
            f"{name}bare_p50_us": series[mode, "bare"].percentile(50),
            f"{name}job_p50_us": float(np.percentile(both, 50)),
            f"{name}job_p99_us": float(np.percentile(both, 99)),
            f"{name}job_ratio": float(np.percentile(both, 50)) / one_bare,
        }
        for kind in ("store", "load"):
            figures[f"{name}{kind}_job_p50_us"] = series[mode, kind].percentile(50)
    return figures


def run() -> dict[tuple[str, str], Series]:
    """Every mode and kind, in turns."""
    times: dict[tuple[str, str], list[list[float]]] = defaultdict(list)
    stages: dict[tuple[str, str], dict[str, float]] = defaultdict(lambda: defaultdict(float))
    with Daemon(POOL) as daemon, contextlib.ExitStack() as ending:
        name = engine_name()
        endpoint = f"ipc://{daemon.runtime_dir}/bare.sock"
        ending.enter_context(process(endpoint))
        ranks = [
            ending.enter_context(process(str(daemon.runtime_dir), name, str(rank)))
            for rank in range(WORLD_SIZE)
        ]
        scheduler = ending.enter_context(Scheduler(daemon.runtime_dir, name))
        if not scheduler.wait_attached(SECONDS):
            raise RuntimeError("the engine does not become complete")

        def jobs_done() -> int:
            return sum(len(took) for (_, kind), took in times.items() if kind in JOBS)

        for turn in range(SERIES * len(MODES)):
            mode = MODES[turn % len(MODES)]
            groups = [ranks] if mode == "together" else [[rank] for rank in ranks]

            def series(kind: str, **asked: Any) -> None:
                before = lane_stages(daemon, jobs_done())
                for group in groups:  # noqa: B023  # it is called in this turn
                    times[mode, kind] += ask(group, {"kind": kind, **asked})  # noqa: B023
                for stage, after in lane_stages(daemon, jobs_done()).items():
                    stages[mode, kind][stage] += after - before[stage]  # noqa: B023

            series("bare", endpoint=endpoint)
            series("idle")
            keys = fresh_keys(CHUNKS)
            scheduler.reserve(CHUNKS, SECONDS)
            stores = scheduler.prepare_store(keys)
            series("store", **places(stores.slots, stores.generations))
            scheduler.complete_store(keys)
            wait_found(scheduler, keys)
            loads = scheduler.prepare_load(keys)
            series("load", **places(loads.slots, loads.generations))
            scheduler.complete_load(loads)
    return {
        which: Series(
            np.array(took),
            {
                stage: stages[which][f"{which[1]}_{stage}"] / len(took) * 1e6
                for stage in STAGES
                if which[1] in JOBS
            },
        )
        for which, took in times.items()
    }


def places(slots: "np.ndarray[Any, Any]", generations: "np.ndarray[Any, Any]") -> dict[str, Any]:
    """Where the chunks of a series are, for the ranks."""
    if len(slots) != CHUNKS:
        raise RuntimeError(f"{len(slots)} of {CHUNKS} chunks are there")
    return {"slots": slots.tolist(), "generations": generations.tolist()}


def lane_stages(daemon: Daemon, jobs: int) -> dict[str, float]:
    """Seconds that all jobs so far, so many, have spent in the lane, by direction and stage."""
    while True:  # the broker asks its lanes once a second
        stages = daemon.status()["lanes"][0]["counters"]["stages"]
        if sum(sum(stages[f"{kind}_reported"]["counts"]) for kind in JOBS) == jobs:
            return {name: histogram["sum"] for name, histogram in stages.items()}
        time.sleep(POLL_SECONDS)


def ask(ranks: list["subprocess.Popen[str]"], asked: dict[str, Any]) -> list[list[float]]:
    """Have these ranks run one series at the same time: microseconds of every job's steps."""
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(json.dumps(asked) + "\n")
        rank.stdin.flush()
    answers: list[list[float]] = []
    for rank in ranks:
        assert rank.stdout is not None
        answers += json.loads(rank.stdout.readline())
    return answers


@contextlib.contextmanager
def process(*arguments: str) -> Iterator["subprocess.Popen[str]"]:
    """This program with arguments; it ends with its standard input."""
    command = [sys.executable, __file__, *arguments]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as started:
        try:
            yield started
        finally:
            started.communicate()


# ------------------------------------------------------------ other processes


def echo(endpoint: str) -> None:
    """Send every frame back; ends with its standard input."""
    router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
    router.bind(endpoint)
    poller = zmq.Poller()
    poller.register(router, zmq.POLLIN)
    poller.register(sys.stdin.fileno(), zmq.POLLIN)
    while sys.stdin.fileno() not in dict(poller.poll()):
        for _ in range(CHUNKS):  # without looking whether to end
            router.send_multipart(router.recv_multipart())


def run_rank(runtime_dir: str, engine: str, rank: int) -> None:
    """One rank; ends with its standard input."""
    memory = HostMemory.allocate(TENSORS * NUM_BLOCKS * PAGE)
    memory.array[:] = rank
    with Worker(runtime_dir, engine, rank, WORLD_SIZE) as worker:
        shape = layout(TENSORS, PAGE, NUM_BLOCKS, BLOCKS_PER_CHUNK)
        worker.register([memory], shape, Fingerprint(model="bench-latency"), required=True)
        if not worker.wait_attached(SECONDS):
            raise RuntimeError("the engine does not become complete")
        for line in sys.stdin:
            asked = json.loads(line)
            match asked["kind"]:
                case "bare":
                    took = bare(asked["endpoint"])
                case "idle":
                    took = idle(worker)
                case _:
                    took = jobs(worker, **asked)
            print(json.dumps(took), flush=True)
    memory.close()


def bare(endpoint: str) -> list[list[float]]:
    """Microseconds of round trips."""
    dealer: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    dealer.connect(endpoint)
    frame = bytes(FRAME_BYTES)
    took = []
    for _ in range(CHUNKS):
        started = time.perf_counter()
        dealer.send(frame)
        dealer.recv()
        took.append([(time.perf_counter() - started) * 1e6])
    dealer.close()
    return took


def idle(worker: Worker) -> list[list[float]]:
    """Microseconds of looking for results where there are none."""
    took = []
    for _ in range(CHUNKS):
        started = time.perf_counter()
        worker.get_finished()
        took.append([(time.perf_counter() - started) * 1e6])
    return took


def jobs(worker: Worker, kind: str, slots: list[int], generations: list[int]) -> list[list[float]]:
    """Microseconds of each job of one chunk, by `STEPS`."""
    message = Store if kind == "store" else Load
    took = []
    for number, (slot, generation) in enumerate(zip(slots, generations, strict=True)):
        block = 1 + number * BLOCKS_PER_CHUNK % (NUM_BLOCKS - BLOCKS_PER_CHUNK)
        stamps = [time.perf_counter()]
        blocks = JobBlocks.of([block, block + 1], [2], [0], [slot], [generation])
        stamps.append(time.perf_counter())
        worker.submit(message, number, blocks)
        stamps.append(time.perf_counter())
        worker.wait([number], SECONDS)
        stamps.append(time.perf_counter())
        (result,) = worker.get_finished()
        stamps.append(time.perf_counter())
        took.append([(end - begin) * 1e6 for begin, end in itertools.pairwise(stamps)])
        if not result.success:
            raise RuntimeError(f"the job failed: {result}")
    return took


def main() -> None:
    """Measure, and print two tables."""
    series = run()
    console = Console()
    table = Table("", *(f"{kind}, {mode}" for mode in MODES for kind in KINDS))
    stages = Table("mean µs of a job", *(f"{k}, {m}" for m in MODES for k in JOBS))
    for column in (*table.columns[1:], *stages.columns[1:]):
        column.justify = "right"
    order = [series[mode, kind] for mode in MODES for kind in KINDS]
    for q in (50, 99):
        table.add_row(f"p{q} µs", *(f"{one.percentile(q):.0f}" for one in order))
    for mode in MODES:
        bare = series[mode, "bare"].percentile(50)
        ratios = (f"{one.percentile(50) / bare:.2f}" for one in order)
        table.add_row(f"p50, of bare, {mode}", *ratios)
    of_jobs = [one for one in order if one.lane_us]
    client = [one.us.mean(axis=0) for one in of_jobs]
    for index, step in enumerate(STEPS):
        if step != "wait":
            stages.add_row(f"client: {step}", *(f"{mean[index]:.0f}" for mean in client))
    for stage, words in STAGES.items():
        stages.add_row(words, *(f"{one.lane_us[stage]:.0f}" for one in of_jobs))
    known = [
        mean.sum() - mean[STEPS.index("wait")] + sum(one.lane_us.values())
        for one, mean in zip(of_jobs, client, strict=True)
    ]
    rest = (f"{mean.sum() - sure:.0f}" for mean, sure in zip(client, known, strict=True))
    stages.add_row("the rest: wake-ups, sockets, reading", *rest)
    stages.add_row("all", *(f"{mean.sum():.0f}" for mean in client))
    idle_us = series["alone", "idle"].percentile(50)
    console.print(table, stages, f"get_finished without results: p50 {idle_us:.1f} µs", sep="\n")


if __name__ == "__main__":
    match sys.argv[1:]:
        case [runtime_dir, engine, rank]:
            run_rank(runtime_dir, engine, int(rank))
        case [endpoint]:
            echo(endpoint)
        case _:
            main()
