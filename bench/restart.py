"""How long a daemon needs from exec to its first answers, by how many chunks it finds.

    python bench/restart.py [CHUNKS ...]

A ledger of so many chunks of 4 KiB is written as a daemon would have, and a first daemon
allocates the pool. Then it is killed and started again, with memory and chunks in place.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Figures, median

from kvd.broker.attachment import namespace_id
from kvd.cache.namespaces import Keeping, Namespaces
from kvd.daemon.kept_pool import KeptPool
from kvd.errors import KvdError
from kvd.pool.filling import FillOrder
from kvd.wire.tool import Control
from kvd_client import Fingerprint, HostMemory, Scheduler, Worker
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import HostHandle, Register, Status, StatusReport

PAGE = 4096
BLOCKS = 16
RUNS = 5
BATCH = 1000
PATIENCE = 60.0
LAYOUT = RankLayout(
    num_blocks=BLOCKS,
    blocks_per_chunk=1,
    hash_block_size=16,
    storages=(BLOCKS * PAGE,),
    tensors=(TensorSpec(storage=0, offset=0, page_bytes=PAGE, block_stride=PAGE),),
    groups=(GroupSpec(refs=(TensorRef(0, PAGE),), block_size=16),),
)
MODEL = Fingerprint(model="model")


@dataclass
class Place:
    """Where the daemon and its pool live."""

    runtime_dir: Path
    pool_dir: Path
    cpu_bytes: int
    log: Path

    def start(self, *options: str) -> subprocess.Popen[bytes]:
        """A daemon, with these options beside."""
        command = [sys.executable, "-m", "kvd", "serve", "--runtime-dir", str(self.runtime_dir)]
        command += ["--pool-dir", str(self.pool_dir), "--cpu-bytes", str(self.cpu_bytes)]
        with self.log.open("a") as sink:
            return subprocess.Popen([*command, "--http-listen", "off", *options], stderr=sink)


def key(number: int) -> bytes:
    """A block hash with its group."""
    return number.to_bytes(32, "big") + bytes(4)


def fill(place: Place, chunks: int) -> None:
    """Leave a pool with so many READY chunks, as a daemon does that is killed."""
    kept = KeptPool(place.pool_dir, place.runtime_dir, keeps=True)

    def make(keeping: Keeping | None, fill: FillOrder) -> Namespaces:
        return Namespaces(
            place.cpu_bytes,
            boot_id=bytes(16),
            make_buffer=lambda _, size: bytearray(size),
            keeping=keeping,
            fill=fill,
        )

    pool, namespaces = kept.open(place.cpu_bytes, make)
    pool.close()
    registration = Register(
        rank=0,
        world_size=1,
        device="host",
        fingerprint=MODEL,
        layout=LAYOUT,
        handles=(HostHandle(1),),
    )
    name = namespace_id([registration])
    opened = namespaces.open(name, (PAGE,), world_size=1, replicated=False)
    namespaces.attach_engine(opened)
    for first in range(0, chunks, BATCH):
        ready = opened.table.prepare_store(
            [key(number) for number in range(first, min(first + BATCH, chunks))], 1, 0.0
        )
        ones = [1] * len(ready.slots)
        opened.table.share_done(
            1,
            0,
            ready.slots.numpy(),
            ready.generations.numpy(),
            [0] * len(ones),
            ones,
            ok=True,
        )
    kept.close()


def status(place: Place) -> dict[str, Any]:
    """The daemon's report; empty while it does not answer."""
    try:
        with Control(place.runtime_dir, timeout=5.0) as control:
            reply = control.request(Status())
    except KvdError:
        return {}
    return reply.status if isinstance(reply, StatusReport) else {}


def restart(place: Place, chunks: int, *, engine: bool) -> tuple[float, float]:
    """Milliseconds from exec to the first report, which has every chunk, and to the end.

    The end is the daemon being ready, or with `engine` the first load of a chunk by an engine
    that has waited for the daemon.
    """
    began = time.perf_counter()
    daemon = place.start()
    try:
        while not status(place):
            check(daemon, place, began)
        answered = time.perf_counter() - began
        known = sum(n["chunks"]["ready"] for n in status(place)["namespaces"])
        if known != chunks:
            raise RuntimeError(f"{known} of {chunks} chunks are there")
        if engine:
            first_load(place, key(chunks - 1))
        while not status(place).get("ready"):
            check(daemon, place, began)
        ended = time.perf_counter() - began
    finally:
        daemon.kill()
        daemon.wait()
    return answered * 1000, ended * 1000


def first_load(place: Place, last: bytes) -> None:
    """An engine registers and finds the chunk that was stored last."""
    scheduler = Scheduler(place.runtime_dir, "engine")
    worker = Worker(place.runtime_dir, "engine", 0, 1)
    memory = [HostMemory.allocate(size) for size in LAYOUT.storages]
    try:
        worker.register(memory, LAYOUT, MODEL)
        if not scheduler.wait_attached(PATIENCE) or not scheduler.prepare_load([last]).keys:
            raise RuntimeError(f"no load: {place.log.read_text()}")
    finally:
        scheduler.close()
        worker.close()
        for item in memory:
            item.close()


def check(daemon: subprocess.Popen[bytes], place: Place, began: float) -> None:
    """The daemon lives, and there is time.

    Raises:
        RuntimeError: otherwise, with its log.
    """
    if daemon.poll() is not None or time.perf_counter() - began > PATIENCE:
        raise RuntimeError(f"not ready: {place.log.read_text()}")
    time.sleep(0.002)


def measure(chunks: int, runs: int) -> Figures:
    """Medians over `runs` restarts, each after a kill -9; the first, which allocates, is left out.

    Afterwards one restart with an engine shows that the chunks are of use.
    """
    with tempfile.TemporaryDirectory(prefix="kvd-bench-", dir="/dev/shm") as path:
        cpu_bytes = max(chunks, BLOCKS) * PAGE
        place = Place(Path(path) / "run", Path(path), cpu_bytes, Path(path) / "log")
        if chunks:
            fill(place, chunks)
        restart(place, chunks, engine=False)
        times = [restart(place, chunks, engine=False) for _ in range(runs)]
        if chunks:
            restart(place, chunks, engine=True)
    return {
        "chunks": chunks,
        "exec_to_answer_ms": median(t[0] for t in times),
        "exec_to_ready_ms": median(t[1] for t in times),
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
