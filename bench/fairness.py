"""How long a quiet engine's loads take alone, and beside an engine that stores without end.

`python bench/fairness.py` prints a table and, as its last line, JSON. Alone and beside the
flood take turns, so that both see the same machine. `python bench/fairness.py RUNTIME_DIR`
is the flooding engine: it stores from a line "go" to a line "stop".
"""

import json
import select
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from harness import MIB, Daemon, Engine, Figures, fresh_keys, layout, median

TENSORS, PAGE, NUM_BLOCKS, BLOCKS_PER_CHUNK = 8, 16384, 256, 2
CHUNK = TENSORS * PAGE * BLOCKS_PER_CHUNK
LOAD_CHUNKS, LOADS, ROUNDS = 16, 200, 9  # 4 MiB a job
FLOOD_JOBS = 32  # so many are queued at any time
POOL = 256 * MIB
NAP = 0.001
BLOCKS = np.arange(1, 1 + LOAD_CHUNKS * BLOCKS_PER_CHUNK)


def make(runtime_dir: Path, model: str) -> Engine:
    """An engine of one rank in this process; a chunk has 256 KiB in 16 fragments."""
    return Engine(runtime_dir, layout(TENSORS, PAGE, NUM_BLOCKS, BLOCKS_PER_CHUNK), model=model)


def flood(runtime_dir: Path) -> None:
    """Store new chunks, many jobs at a time, while told to; ends with its input."""
    storing, waiting, job = False, 0, 0
    with make(runtime_dir, "greedy") as engine:
        worker = engine.worker
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
                ticket = engine.scheduler.prepare_store(fresh_keys(LOAD_CHUNKS))
                if not ticket.keys:
                    time.sleep(NAP)
                    continue
                job = engine.submit(ticket, BLOCKS[: len(ticket) * BLOCKS_PER_CHUNK])
                waiting += 1


def load(engine: Engine, keys: list[bytes]) -> float:
    """Milliseconds of a load, from the question to the bytes."""
    started = time.perf_counter()
    with engine.find(keys) as ticket:
        engine.finish(engine.submit(ticket, BLOCKS))
        return (time.perf_counter() - started) * 1e3


def measure() -> Figures:
    """Percentiles alone and beside the flood: medians of the rounds, and of the rounds' ratios."""
    spread: dict[str, list[float]] = {}
    with Daemon(POOL) as daemon:
        child = subprocess.Popen(
            [sys.executable, __file__, str(daemon.runtime_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # as engines are: the kernel shares out CPUs by session
        )
        try:
            tell(child)
            with make(daemon.runtime_dir, "quiet") as engine:
                keys = fresh_keys(LOAD_CHUNKS)
                engine.finish(engine.submit(engine.offer(keys), BLOCKS))
                engine.stored(keys)
                for number in range(ROUNDS + 1):
                    figures = one_round(child, engine, keys)
                    for name, value in figures.items() if number else ():  # the first warms up
                        spread.setdefault(name, []).append(value)
        finally:
            child.communicate()
    return {name: median(values) for name, values in spread.items()}


def one_round(child: "subprocess.Popen[str]", engine: Engine, keys: list[bytes]) -> Figures:
    """A series alone, and one beside the flood."""
    alone = np.array([load(engine, keys) for _ in range(LOADS)])
    before = tell(child, "go")
    started = time.perf_counter()
    time.sleep(0.1)  # until its queue is full
    beside = np.array([load(engine, keys) for _ in range(LOADS)])
    stored = tell(child, "stop") - before
    seconds = time.perf_counter() - started
    figures = {
        f"{name}_p{percent}_ms": float(np.percentile(values, percent))
        for name, values in (("alone", alone), ("beside", beside))
        for percent in (50, 99)
    }
    figures["p50_ratio"] = figures["beside_p50_ms"] / figures["alone_p50_ms"]
    figures["p99_ratio"] = figures["beside_p99_ms"] / figures["alone_p99_ms"]
    figures["flood_gb_s"] = stored * LOAD_CHUNKS * CHUNK / seconds / 1e9
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
        flood(Path(sys.argv[1]))
    else:
        main()
