"""How long an engine's scheduler stands still for a reset of 450,000 chunks, and what follows.

Another engine of the namespace loads nothing of before, either: it is asked right after.
"""

import random
import time

import numpy as np
from harness import Daemon, Figures, engine_name, fresh_keys, median

from kvd_client.memory import HostMemory
from kvd_client.scheduler import Scheduler
from kvd_client.worker import Worker
from kvd_proto.answers import LookupResult
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import Fingerprint

CHUNKS, BATCH, PAGE = 450_000, 4_500, 4096
ROUNDS = 3
SECONDS = 60.0


def layout() -> RankLayout:
    """The smallest chunks that there are: one page of 4 KiB."""
    return RankLayout(
        num_blocks=BATCH + 1,
        blocks_per_chunk=1,
        hash_block_size=16,
        storages=((BATCH + 1) * PAGE,),
        tensors=(TensorSpec(storage=0, offset=0, page_bytes=PAGE, block_stride=PAGE),),
        groups=(GroupSpec(refs=(TensorRef(tensor=0, page_bytes=PAGE),), block_size=16),),
    )


def measure() -> Figures:
    """Milliseconds: until the call returns, and until the slots are free; medians of the rounds."""
    waits, sweeps = [], []
    with Daemon(CHUNKS * PAGE) as daemon:
        name = engine_name()
        memory = HostMemory.allocate((BATCH + 1) * PAGE)
        with (
            Worker(daemon.runtime_dir, name, 0, 1) as worker,
            Scheduler(daemon.runtime_dir, name) as scheduler,
        ):
            worker.register([memory], layout(), Fingerprint(model="bench-reset"), required=True)
            if not worker.wait_attached(SECONDS) or not scheduler.wait_attached(SECONDS):
                raise RuntimeError("the engine does not become complete")
            for number in range(ROUNDS):
                keys = _fill(scheduler, worker, number)
                wait, sweep = _reset(scheduler, keys)
                waits.append(wait)
                sweeps.append(sweep)
        memory.close()
    return {"reset_ms": median(waits), "reset_ms_longest": max(waits), "swept_ms": median(sweeps)}


def _reset(scheduler: Scheduler, keys: list[bytes]) -> tuple[float, float]:
    """Milliseconds that the scheduler stands still, and until all room is free again."""
    some = random.Random(0).sample(keys, 1000)
    while set(scheduler.lookup_many(keys)) != {LookupResult.HIT}:
        time.sleep(0.01)
    started = time.perf_counter()
    while not scheduler.reset().served:  # as an engine does that is not told of the end of it
        pass
    wait = time.perf_counter() - started
    if set(scheduler.lookup_many(some)) != {LookupResult.MISS}:
        raise RuntimeError("a chunk is found after the reset")
    while scheduler.status()["pool"]["free_bytes"] < CHUNKS * PAGE:
        time.sleep(0.001)
    return wait * 1e3, (time.perf_counter() - started) * 1e3


def _fill(scheduler: Scheduler, worker: Worker, number: int) -> list[bytes]:
    keys: list[bytes] = []
    blocks = np.arange(1, BATCH + 1)
    for job in range(CHUNKS // BATCH):
        batch = fresh_keys(BATCH)
        ticket = scheduler.prepare_store(batch)
        if len(ticket) != BATCH:
            raise RuntimeError(f"{ticket!r} in round {number}: all keys are needed")
        worker.submit_store(job, blocks, [BATCH], [0], ticket.slots, ticket.generations)
        worker.wait([job], SECONDS)
        if not all(result.success for result in worker.get_finished()):
            raise RuntimeError("a store failed")
        scheduler.complete_store(batch)
        keys += batch
    return keys


if __name__ == "__main__":
    print({name: round(value, 2) for name, value in measure().items()})
