"""How long a quiet engine's loads take alone, and beside an engine that stores without end.

`python bench/fairness.py` prints a table and, as its last line, JSON. Alone and beside the
flood take turns, so that both see the same machine. `python bench/fairness.py RUNTIME_DIR
ENGINE` is the flooding engine: it stores from a line "go" to a line "stop".
"""

import json
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from harness import MIB, Daemon, Figures, engine_name, fresh_keys, median

from kvd_client.memory import HostMemory
from kvd_client.scheduler import Scheduler
from kvd_client.worker import Worker
from kvd_proto.answers import LookupResult
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import Fingerprint

TENSORS, PAGE, NUM_BLOCKS, BLOCKS_PER_CHUNK = 8, 16384, 256, 2
CHUNK = TENSORS * PAGE * BLOCKS_PER_CHUNK
LOAD_CHUNKS, LOADS, ROUNDS = 16, 200, 9  # 4 MiB a load
FLOOD_CHUNKS, FLOOD_JOBS = 16, 32  # so much is queued at any time
POOL = 256 * MIB
SECONDS = 60.0
NAP = 0.001


def layout() -> RankLayout:
    """One rank; a chunk has 256 KiB in 16 fragments."""
    size = NUM_BLOCKS * PAGE
    return RankLayout(
        num_blocks=NUM_BLOCKS,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
        hash_block_size=16,
        storages=(TENSORS * size,),
        tensors=tuple(
            TensorSpec(storage=0, offset=i * size, page_bytes=PAGE, block_stride=PAGE)
            for i in range(TENSORS)
        ),
        groups=(
            GroupSpec(
                refs=tuple(TensorRef(tensor=i, page_bytes=PAGE) for i in range(TENSORS)),
                block_size=16,
            ),
        ),
    )


@contextmanager
def engine(runtime_dir: Path, name: str, model: str) -> Iterator[tuple[Scheduler, Worker]]:
    """An engine of one rank in this process."""
    memory = HostMemory.allocate(TENSORS * NUM_BLOCKS * PAGE)
    memory.array[:] = 1
    with Worker(runtime_dir, name, 0, 1) as worker, Scheduler(runtime_dir, name) as scheduler:
        worker.register([memory], layout(), Fingerprint(model=model), required=True)
        if not (worker.wait_attached(SECONDS) and scheduler.wait_attached(SECONDS)):
            raise RuntimeError("the engine does not become complete")
        yield scheduler, worker
    memory.close()


def flood(runtime_dir: Path, name: str) -> None:
    """Store new chunks, many jobs at a time, while told to; ends with its input."""
    storing, waiting, job = False, 0, 0
    blocks = list(range(1, 1 + FLOOD_CHUNKS * BLOCKS_PER_CHUNK))
    with engine(runtime_dir, name, "greedy") as (scheduler, worker):
        print("here", flush=True)
        while True:
            idle = not storing or waiting >= FLOOD_JOBS
            if select.select([sys.stdin], [], [], NAP if idle else 0.0)[0]:
                line = sys.stdin.readline()
                if not line:
                    return
                storing = line == "go\n"
                while not storing and waiting:
                    waiting -= len(worker.get_finished())
                    time.sleep(NAP)
                print(job, flush=True)
            waiting -= len(worker.get_finished())
            if storing and waiting < FLOOD_JOBS:
                ticket = scheduler.prepare_store(fresh_keys(FLOOD_CHUNKS))
                if not ticket.keys:
                    time.sleep(NAP)
                    continue
                job += 1
                waiting += 1
                count = len(ticket.keys) * BLOCKS_PER_CHUNK
                worker.submit_store(
                    job, blocks[:count], [count], [0], ticket.slots, ticket.generations
                )


def store(scheduler: Scheduler, worker: Worker, keys: list[bytes], job: int) -> None:
    """Store LOAD_CHUNKS keys, until all are hits."""
    ticket = scheduler.prepare_store(keys)
    blocks = list(range(1, 1 + LOAD_CHUNKS * BLOCKS_PER_CHUNK))
    worker.submit_store(job, blocks, [len(blocks)], [0], ticket.slots, ticket.generations)
    worker.wait([job], SECONDS)
    worker.get_finished()
    scheduler.complete_store(keys)
    while any(hit is not LookupResult.HIT for hit in scheduler.lookup_many(keys)):
        time.sleep(NAP)


def loads(scheduler: Scheduler, worker: Worker, keys: list[bytes], first: int) -> list[float]:
    """Milliseconds of each load, from the question to the bytes.

    Raises:
        RuntimeError: one brought less than all.
    """
    return [one_load(scheduler, worker, keys, job) for job in range(first, first + LOADS)]


def one_load(scheduler: Scheduler, worker: Worker, keys: list[bytes], job: int) -> float:
    """The same of one load."""
    blocks = list(range(1, 1 + LOAD_CHUNKS * BLOCKS_PER_CHUNK))
    started = time.perf_counter()
    ticket = scheduler.prepare_load(keys)
    if len(ticket.keys) != len(keys):
        raise RuntimeError(f"{len(ticket.keys)} of {len(keys)} chunks are there")
    worker.submit_load(job, blocks, [len(blocks)], [0], ticket.slots, ticket.generations)
    worker.wait([job], SECONDS)
    (result,) = worker.get_finished()
    took = (time.perf_counter() - started) * 1e3
    scheduler.complete_load(ticket)
    if not result.success:
        raise RuntimeError(f"a load failed: {result}")
    return took


def measure() -> Figures:
    """Percentiles alone and beside the flood: medians of the rounds, and of the rounds' ratios."""
    spread: dict[str, list[float]] = {}
    with Daemon(POOL) as daemon:
        child = subprocess.Popen(
            [sys.executable, __file__, str(daemon.runtime_dir), engine_name()],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as engines are: the kernel shares out CPUs by session
        )
        try:
            tell(child)
            with engine(daemon.runtime_dir, engine_name(), "quiet") as (scheduler, worker):
                keys = fresh_keys(LOAD_CHUNKS)
                store(scheduler, worker, keys, 0)
                for number in range(ROUNDS + 1):
                    figures = one_round(child, scheduler, worker, keys, 1 + 2 * LOADS * number)
                    for name, value in figures.items() if number else ():  # the first warms up
                        spread.setdefault(name, []).append(value)
        finally:
            child.communicate()
    return {name: median(values) for name, values in spread.items()}


def one_round(
    child: "subprocess.Popen[str]",
    scheduler: Scheduler,
    worker: Worker,
    keys: list[bytes],
    first: int,
) -> Figures:
    """A series alone, and one beside the flood."""
    alone = np.array(loads(scheduler, worker, keys, first))
    before = tell(child, "go")
    started = time.perf_counter()
    time.sleep(0.1)  # until its queue is full
    beside = np.array(loads(scheduler, worker, keys, first + LOADS))
    stored = tell(child, "stop") - before
    seconds = time.perf_counter() - started
    figures = {
        f"{name}_p{percent}_ms": float(np.percentile(values, percent))
        for name, values in (("alone", alone), ("beside", beside))
        for percent in (50, 99)
    }
    figures["p50_ratio"] = figures["beside_p50_ms"] / figures["alone_p50_ms"]
    figures["p99_ratio"] = figures["beside_p99_ms"] / figures["alone_p99_ms"]
    figures["flood_gb_s"] = stored * FLOOD_CHUNKS * CHUNK / seconds / 1e9
    return figures


def tell(child: "subprocess.Popen[str]", word: str = "") -> int:
    """Say a word to the flooding engine; how many jobs it has submitted so far."""
    assert child.stdin is not None
    assert child.stdout is not None
    if word:
        child.stdin.write(f"{word}\n")
        child.stdin.flush()
    answer = child.stdout.readline()
    return int(answer) if word else 0


def main() -> None:
    """Print the table and the JSON."""
    figures = measure()
    for name, value in figures.items():
        print(f"{name:16} {value:8.2f}")
    print(json.dumps({name: round(value, 3) for name, value in figures.items()}))


if __name__ == "__main__":
    if len(sys.argv) > 1:
        flood(Path(sys.argv[1]), sys.argv[2])
    else:
        main()
