"""How fast the directory answers, what it costs, and how long `prepare_store` takes.

Run it alone to see the figures, or take `measure()`. Lookups are measured in
another process, which maps the directory read-only as a client does.
"""

import json
import mmap
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from kvd.cache.directory import DirectoryWriter, directory_bytes
from kvd.cache.namespaces import Namespaces
from kvd_proto.answers import LookupResult, StoreAnswer
from kvd_proto.directory import DirectoryHeader, DirectoryView, SlotState

CHUNKS = 100_000
KEY_BYTES = 36  # a 32-byte block hash and a group index
REPEATS = 5


def make_keys(count: int, seed: int) -> list[bytes]:
    """Random keys, the same for the same seed."""
    source = random.Random(seed)
    return [source.randbytes(KEY_BYTES) for _ in range(count)]


def measure() -> dict[str, float]:
    """All figures of this file, as medians of repeated runs."""
    with tempfile.NamedTemporaryFile(prefix="kvd-bench-") as file:
        file.truncate(directory_bytes(CHUNKS))
        with mmap.mmap(file.fileno(), 0) as buffer:
            writer = DirectoryWriter(buffer, DirectoryHeader.plan(CHUNKS, bytes(16), bytes(16)))
            writer.begin(make_keys(CHUNKS, seed=1), range(CHUNKS), owner=1)
            for slot in range(CHUNKS):
                writer.write_state(slot, SlotState.READY)
            writer.release()
        done = subprocess.run(
            [sys.executable, __file__, file.name], capture_output=True, text=True, check=True
        )
    figures: dict[str, float] = json.loads(done.stdout)
    figures["directory_bytes_per_chunk"] = directory_bytes(1_000_000) / 1_000_000
    for policy in ("lru", "arc"):
        figures[f"prepare_store_1000_in_process_{policy}_ms"] = prepare_store_ms(policy)
    return figures


def look_up(path: Path) -> dict[str, float]:
    """The reader's side: microseconds a key for hits, misses and a plain dict."""
    keys, others = make_keys(CHUNKS, seed=1), make_keys(CHUNKS, seed=2)
    random.Random(3).shuffle(keys)
    plain = dict.fromkeys(make_keys(CHUNKS, seed=1), LookupResult.HIT)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as buffer:
        view = DirectoryView(buffer)
        hits, misses = view.lookup_many(keys), view.lookup_many(others)
        if set(hits) != {LookupResult.HIT} or set(misses) != {LookupResult.MISS}:
            raise SystemExit("the directory gave wrong answers")
        figures = {
            "lookup_us_per_key": _us_per_key(lambda: view.lookup_many(keys)),
            "lookup_miss_us_per_key": _us_per_key(lambda: view.lookup_many(others)),
            "dict_us_per_key": _us_per_key(lambda: list(map(plain.get, keys))),
        }
        view.release()
    return figures


def _us_per_key(work: Callable[[], object]) -> float:
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return statistics.median(times) / CHUNKS * 1e6


def prepare_store_ms(policy: str, runs: int = 30) -> float:
    """Milliseconds of one `prepare_store` of 1,000 new keys in a full namespace of 100,000.

    Every call evicts 1,000 chunks. Without the message that carries it.
    """
    namespaces = Namespaces(
        CHUNKS * 8192,
        boot_id=bytes(16),
        make_buffer=lambda _, size: bytearray(size),
        policy=policy,
    )
    namespace = namespaces.open(bytes(16), (4096, 4096), world_size=2, replicated=False)
    namespaces.attach_engine(namespace)
    table, times = namespace.table, []
    for run in range(CHUNKS // 1000 + runs):
        keys = make_keys(1000, seed=1000 + run)
        start = time.perf_counter()
        decision = table.prepare_store(keys, 1, 0.0)
        times.append(time.perf_counter() - start)
        if set(decision.answers.numpy().tolist()) != {StoreAnswer.ACCEPTED}:
            raise SystemExit("a store was refused")
        for rank in range(2):
            refs = decision.slots.numpy().tolist(), decision.generations.numpy().tolist()
            table.share_done(1, rank, *refs, [0] * 1000, [1] * 1000, ok=True)
    return statistics.median(times[-runs:]) * 1000


if __name__ == "__main__":
    result = look_up(Path(sys.argv[1])) if len(sys.argv) > 1 else measure()
    print(json.dumps(result, indent=2))
