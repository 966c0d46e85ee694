"""Lookups in a directory of 100,000 chunks, beside a dict; asking for 1,000 slots."""

import random
import time

import numpy as np
from harness import Daemon, Figures, engine_name, fresh_keys, median

from kvd.cache.directory import directory_bytes
from kvd_client.memory import HostMemory
from kvd_client.scheduler import Scheduler
from kvd_client.worker import Worker
from kvd_proto.answers import LookupResult
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import Fingerprint

CHUNKS, BATCH, PAGE = 100_000, 1000, 4096
BIG_DIRECTORY = 1_000_000
ROUNDS = 7
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
    """Microseconds a key, milliseconds a request, bytes a chunk."""
    with Daemon(CHUNKS * PAGE) as daemon:
        name = engine_name()
        memory = HostMemory.allocate((BATCH + 1) * PAGE)
        with Worker(daemon.runtime_dir, name, 0, 1) as worker:
            worker.register(
                [memory], layout(), Fingerprint(model="bench-looking-up"), required=True
            )
            with Scheduler(daemon.runtime_dir, name) as scheduler:
                if not worker.wait_attached(SECONDS) or not scheduler.wait_attached(SECONDS):
                    raise RuntimeError("the engine does not become complete")
                empty, _ = daemon.memory()
                keys, prepare_ms = fill(scheduler, worker)
                full, _ = daemon.memory()
                figures = look_up(scheduler, keys)
        memory.close()
    figures["prepare_store_1000_ms"] = median(prepare_ms)
    figures["directory_bytes_per_chunk"] = directory_bytes(BIG_DIRECTORY) / BIG_DIRECTORY
    figures["broker_bytes_per_chunk"] = (full - empty) * 2**20 / CHUNKS
    return figures


def fill(scheduler: Scheduler, worker: Worker) -> tuple[list[bytes], list[float]]:
    """Store CHUNKS chunks: their keys, and milliseconds for every request of BATCH slots."""
    keys: list[bytes] = []
    prepare_ms = []
    blocks = np.arange(1, BATCH + 1)
    for job in range(CHUNKS // BATCH):
        batch = fresh_keys(BATCH)
        started = time.perf_counter()
        ticket = scheduler.prepare_store(batch)
        prepare_ms.append((time.perf_counter() - started) * 1e3)
        if len(ticket) != BATCH:
            raise RuntimeError(f"{ticket!r}: all keys are needed")
        worker.submit_store(job, blocks, [BATCH], [0], ticket.slots, ticket.generations)
        worker.wait([job], SECONDS)
        if not all(result.success for result in worker.get_finished()):
            raise RuntimeError("a store failed")
        scheduler.complete_store(batch)
        keys += batch
    return keys, prepare_ms


def look_up(scheduler: Scheduler, keys: list[bytes]) -> Figures:
    """All keys in random order, one call each, the daemon's directory and a dict in turn."""
    random.Random(0).shuffle(keys)
    table = dict.fromkeys(keys, LookupResult.HIT)
    ours, theirs = [], []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        answers = [scheduler.lookup(key) for key in keys]
        ours.append((time.perf_counter() - started) / len(keys) * 1e6)
        started = time.perf_counter()
        expected = [table.get(key) for key in keys]
        theirs.append((time.perf_counter() - started) / len(keys) * 1e6)
        if answers != expected:
            raise RuntimeError("a stored chunk is not found")
    return {"lookup_us_per_key": median(ours), "dict_us_per_key": median(theirs)}
