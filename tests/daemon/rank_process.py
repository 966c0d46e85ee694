"""One rank as a process of its own, to be killed: registers, then stores what it is told.

Reads lines ``store <slot>@<generation>... `` and prints ``done <status>``; the
first line that it prints is ``registered``.
"""

import sys
from pathlib import Path

from kvd_client import Fingerprint, HostMemory, JobBlocks, Store, Worker
from tests.daemon.engines import make_layout
from tests.waiting import DEADLINE, PATIENCE


def main() -> None:
    """Runs until its input ends."""
    runtime_dir, engine, rank, world_size = sys.argv[1:5]
    worker = Worker(Path(runtime_dir), engine, int(rank), int(world_size), deadline=DEADLINE)
    layout = make_layout()
    memory = [HostMemory.allocate(size) for size in layout.storages]
    fingerprint = Fingerprint(model="model")
    worker.register(memory, layout, fingerprint, required=True, timeout=PATIENCE)
    print("registered", flush=True)
    for job, line in enumerate(sys.stdin):
        pairs = [part.split("@") for part in line.split()[1:]]
        blocks = list(range(1, 1 + 2 * len(pairs)))
        slots = [int(slot) for slot, _ in pairs]
        generations = [int(generation) for _, generation in pairs]
        worker.submit(
            Store, job, JobBlocks.of(blocks, [len(blocks), 0], [0, 0], slots, generations)
        )
        worker.wait([job], PATIENCE)
        print("done", *[result.status for result in worker.get_finished()], flush=True)


if __name__ == "__main__":
    main()
