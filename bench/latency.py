"""A job of one chunk, from submission to seen finished, on two ranks at the same time.

`python latency.py RUNTIME_DIR ENGINE RANK` is one rank: it reads a line of JSON
for every series of jobs and answers with the microseconds of each.
"""

import json
import subprocess
import sys
import time

import numpy as np
from harness import MIB, SECONDS, Daemon, Figures, engine_name, fresh_keys, layout, wait_found

from kvd_client import JobBlocks, Load, Store
from kvd_client.memory import HostMemory
from kvd_client.scheduler import Scheduler
from kvd_client.worker import Worker
from kvd_proto.messages import Fingerprint

# A chunk has 128 KiB on every rank.
WORLD_SIZE, TENSORS, PAGE, NUM_BLOCKS, BLOCKS_PER_CHUNK = 2, 4, 16384, 64, 2
CHUNKS = 250  # jobs in a series; stores and loads take turns
SERIES = 4


def measure() -> Figures:
    """Percentiles over all jobs of both ranks, and of stores and loads apart."""
    series: dict[str, list[float]] = {"store": [], "load": []}
    with Daemon(128 * MIB) as daemon:
        name = engine_name()
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, str(daemon.runtime_dir), name, str(rank)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(WORLD_SIZE)
        ]
        try:
            with Scheduler(daemon.runtime_dir, name) as scheduler:
                if not scheduler.wait_attached(SECONDS):
                    raise RuntimeError("the engine does not become complete")
                for _ in range(SERIES):
                    keys = fresh_keys(CHUNKS)
                    stores = scheduler.prepare_store(keys)
                    series["store"] += ask(ranks, "store", stores.slots, stores.generations)
                    scheduler.complete_store(keys)
                    wait_found(scheduler, keys)
                    loads = scheduler.prepare_load(keys)
                    series["load"] += ask(ranks, "load", loads.slots, loads.generations)
                    scheduler.complete_load(loads)
        finally:
            for rank in ranks:
                rank.communicate()
    both = series["store"] + series["load"]
    return {
        "job_p50_us": float(np.percentile(both, 50)),
        "job_p99_us": float(np.percentile(both, 99)),
        "store_job_p50_us": float(np.percentile(series["store"], 50)),
        "load_job_p50_us": float(np.percentile(series["load"], 50)),
    }


def ask(
    ranks: list["subprocess.Popen[str]"],
    kind: str,
    slots: "np.ndarray[tuple[int], np.dtype[np.uint32]]",
    generations: "np.ndarray[tuple[int], np.dtype[np.uint64]]",
) -> list[float]:
    """Have all ranks run one job for every slot: microseconds of every job."""
    if len(slots) != CHUNKS:
        raise RuntimeError(f"{len(slots)} of {CHUNKS} chunks are there")
    line = json.dumps({"kind": kind, "slots": slots.tolist(), "generations": generations.tolist()})
    for rank in ranks:
        assert rank.stdin is not None
        rank.stdin.write(line + "\n")
        rank.stdin.flush()
    answers: list[float] = []
    for rank in ranks:
        assert rank.stdout is not None
        answers += json.loads(rank.stdout.readline())
    return answers


def run_rank(runtime_dir: str, engine: str, rank: int) -> None:
    """One rank; ends with its standard input."""
    memory = HostMemory.allocate(TENSORS * NUM_BLOCKS * PAGE)
    memory.array[:] = rank
    job = 0
    with Worker(runtime_dir, engine, rank, WORLD_SIZE) as worker:
        shape = layout(TENSORS, PAGE, NUM_BLOCKS, BLOCKS_PER_CHUNK)
        worker.register([memory], shape, Fingerprint(model="bench-latency"), required=True)
        if not worker.wait_attached(SECONDS):
            raise RuntimeError("the engine does not become complete")
        for line in sys.stdin:
            asked = json.loads(line)
            kind = Store if asked["kind"] == "store" else Load
            took = []
            for slot, generation in zip(asked["slots"], asked["generations"], strict=True):
                job += 1
                block = 1 + job * BLOCKS_PER_CHUNK % (NUM_BLOCKS - BLOCKS_PER_CHUNK)
                started = time.perf_counter()
                blocks = JobBlocks.of([block, block + 1], [2], [0], [slot], [generation])
                worker.submit(kind, job, blocks)
                worker.wait([job], SECONDS)
                (result,) = worker.get_finished()
                took.append((time.perf_counter() - started) * 1e6)
                if not result.success:
                    raise RuntimeError(f"the job failed: {result}")
            print(json.dumps(took), flush=True)
    memory.close()


if __name__ == "__main__":
    run_rank(sys.argv[1], sys.argv[2], int(sys.argv[3]))
