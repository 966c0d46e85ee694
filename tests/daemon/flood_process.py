"""An engine that stores without end, as a process of its own: keys, chunks and memory in plenty.

Prints ``flooding`` when the daemon evicts for it, and stops with its input. Stores
are kept coming: many jobs wait in the lane at any time.
"""

import select
import sys
from pathlib import Path

from tests.daemon.engines import Engine, keys_of, make_layout

JOBS, CHUNKS, PAGE = 16, 4, 64 * 1024


def main() -> None:
    """One rank, which never waits for a job."""
    layout = make_layout(page=PAGE)
    engine = Engine(Path(sys.argv[1]), sys.argv[2], 1, sys.argv[2], layout)
    turn, waiting, told = 0, 0, False
    with engine.wait_attached():
        while not select.select([sys.stdin], [], [], 0.0 if waiting < JOBS else 0.001)[0]:
            worker = engine.workers[0]
            waiting -= len(worker.get_finished())
            if waiting >= JOBS:
                continue
            turn += 1
            ticket = engine.scheduler.prepare_store(keys_of(f"flood-{turn}", CHUNKS))
            if ticket.keys:
                blocks = list(range(1, 1 + len(ticket.keys) * layout.blocks_per_chunk))
                engine.submit("store", [0], blocks, ticket.slots, ticket.generations)
                waiting += 1
            if ticket.evicted and not told:
                print("flooding", flush=True)
                told = True


if __name__ == "__main__":
    main()
