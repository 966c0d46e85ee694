"""How long a daemon needs from exec to its first answers, by how many chunks it finds.

    python bench/restart.py [CHUNKS ...]

An engine stores so many chunks of 4 KiB. Then the daemon is killed and started again, with
memory and chunks in place.
"""

import argparse
import json
import tempfile
from pathlib import Path

from harness import SPARE, Daemon, Engine, Figures, layout, median

PAGE = 4096
BATCH = 1000
LAYOUT = layout(1, PAGE, BATCH + 1)
RUNS = 5


def measure(chunks: int, runs: int) -> Figures:
    """Medians over `runs` restarts, each after a kill -9.

    Afterwards one restart with an engine shows that the chunks are of use.

    Raises:
        RuntimeError: a chunk is not there.
    """
    pool = (chunks + SPARE * BATCH) * PAGE
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir="/dev/shm") as path:
        place = Path(path)
        with Daemon(pool, place=place) as daemon, Engine(daemon.runtime_dir, LAYOUT) as engine:
            keys, _ = engine.fill(chunks, BATCH)
            engine.stored(keys)
        answers, readies = [], []
        for _ in range(runs):
            with Daemon(pool, place=place) as daemon:
                known = sum(n["chunks"]["ready"] for n in daemon.status()["namespaces"])
            if known != chunks:
                raise RuntimeError(f"{known} of {chunks} chunks are there")
            answers.append(daemon.answer_ms)
            readies.append(daemon.start_ms)
        with Daemon(pool, place=place) as daemon, Engine(daemon.runtime_dir, LAYOUT) as engine:
            if keys:
                engine.find(keys[-1:])
    return {
        "chunks": chunks,
        "exec_to_answer_ms": median(answers),
        "exec_to_ready_ms": median(readies),
    }


def main() -> None:
    """One line of JSON for each number of chunks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("chunks", nargs="*", type=int, default=[0, 100_000, 1_000_000])
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args()
    for chunks in options.chunks:
        print(json.dumps(measure(chunks, options.runs)), flush=True)


if __name__ == "__main__":
    main()
