"""kvd's tier on Mooncake Store beside plain calls of Mooncake's client, of the same bytes.

A master, a store and the client run in network namespaces of their own on this machine (as root),
over TCP. Rounds alternate; figures are medians, ratios the median and the quartiles of the rounds'.
kvd's include what its tier process does around the backend: checksums, seals, comparing. Prints a
table and writes bench/out/shared_tier.json.
"""

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from rich.console import Console
from rich.table import Table

from kvd.outcomes import Outcome
from kvd.tier.batches import checksum_of, seal, unseal
from kvd.tier.contract import BackendOptions, Chunk
from kvd.tier.mooncake import MooncakeTier
from kvd.tier.mooncake_client import address_of
from tests.tier.areas import Area, keys_of, space_of
from tests.tier.mooncake_cluster import Cluster, why_not

OUT = Path(__file__).parent / "out" / "shared_tier.json"
AREA_BYTES, SHARES = 256 * 2**20, 2
DESCRIPTION = bytes(200)
LATE = 60.0
QUARTILES = ("low", "median", "high")


class Sides:
    """Both ways of one client, on chunks of one size, in as many threads as the tier has."""

    def __init__(self, tier: MooncakeTier, area: Area, chunk_bytes: int) -> None:
        self._tier = tier
        self._space = space_of(*(chunk_bytes // SHARES,) * SHARES, description=256)
        count = AREA_BYTES // 4 // chunk_bytes
        keys = keys_of(f"bench-{chunk_bytes}", count)
        self._chunks = area.chunks(self._space, keys)
        self._back = area.empties(self._space, keys)
        self._names = [f"plain-{key.decode()}" for key in keys]
        self._batch = max(1, tier.batch_bytes // chunk_bytes)
        self._pool = ThreadPoolExecutor(tier.threads)
        self.nbytes = count * chunk_bytes

    def kvd_put(self, at: int) -> None:
        """As kvd.tier.service does: checksum, seal, put."""
        chunks = self._chunks[at : at + self._batch]
        for chunk in chunks:
            chunk.checksum = checksum_of(chunk.shares)
            chunk.head = seal(self._space, chunk.key, (0, 16, 0), chunk.checksum, DESCRIPTION)
        done = self._tier.put(chunks, time.monotonic() + LATE)
        assert done == [Outcome.OK] * len(chunks), done

    def kvd_get(self, at: int) -> None:
        """As kvd.tier.service does: get, open the seal, compare."""
        chunks = self._back[at : at + self._batch]
        done = self._tier.get(chunks, time.monotonic() + LATE)
        assert done == [Outcome.OK] * len(chunks), done
        for chunk in chunks:
            assert checksum_of(chunk.shares) == unseal(chunk.head, self._space, chunk.key).checksum

    def plain_put(self, at: int) -> None:
        """The shares of a chunk are an object."""
        store = self._tier._client._store  # noqa: SLF001  # the same client, called directly
        assert set(store.batch_put_from_multi_buffers(*self._objects(self._chunks, at))) == {0}

    def plain_get(self, at: int) -> None:
        """The same, back."""
        store = self._tier._client._store  # noqa: SLF001  # the same client, called directly
        assert min(store.batch_get_into_multi_buffers(*self._objects(self._back, at))) > 0

    def _objects(
        self, chunks: Sequence[Chunk], at: int
    ) -> tuple[list[str], list[list[int]], list[list[int]]]:
        some = chunks[at : at + self._batch]
        return (
            self._names[at : at + self._batch],
            [[address_of(share) for share in chunk.shares] for chunk in some],
            [[len(share) for share in chunk.shares] for chunk in some],
        )

    def seconds(self, work: Callable[[int], None]) -> float:
        """Of one pass over all chunks."""
        begin = time.perf_counter()
        list(self._pool.map(work, range(0, len(self._chunks), self._batch)))
        return time.perf_counter() - begin

    def clear(self) -> None:
        """An empty cluster."""
        self._tier._client._store.remove_all(True)  # noqa: SLF001  # of the bench alone


def compared(sides: Sides, rounds: int) -> dict[str, float]:
    """GB/s of both, in both directions, and how they compare.

    A round writes once each way and reads twice each way, as ABBA: whatever changes slowly on the
    machine meets both.
    """
    taken: dict[str, list[float]] = {}
    for number in range(rounds + 1):  # the first warms up
        names = ["kvd", "plain"] if number % 2 else ["plain", "kvd"]
        for way, order in (("put", names), ("get", names + names[::-1])):
            seconds = dict.fromkeys(names, 0.0)
            for name in order:
                seconds[name] += sides.seconds(getattr(sides, f"{name}_{way}")) * 2 / len(order)
            for name in names if number else ():
                taken.setdefault(f"{name}_{way}", []).append(seconds[name])
        sides.clear()
    figures = {
        f"{name}_GBps": sides.nbytes / statistics.median(seconds) / 1e9
        for name, seconds in taken.items()
    }
    for way in ("put", "get"):
        pairs = zip(taken[f"plain_{way}"], taken[f"kvd_{way}"], strict=True)
        quarters = statistics.quantiles([plain / kvd for plain, kvd in pairs])
        figures |= zip([f"{way}_ratio_{n}" for n in QUARTILES], quarters, strict=True)
    return figures


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=61)
    rounds = parser.parse_args().rounds
    if reason := why_not():
        raise SystemExit(f"no Mooncake cluster can be started here: {reason}")
    columns = [f"{name}_{way}_GBps" for way in ("put", "get") for name in ("plain", "kvd")]
    table = Table("chunk", *(name.replace("_", " ") for name in columns), "put ratio", "get ratio")
    found = {}
    with (
        Cluster.running(megabytes=1024) as cluster,
        cluster.add_node("bench").entered(),
    ):
        area = Area(AREA_BYTES)
        tier = MooncakeTier.open(
            BackendOptions("", {"master": cluster.master_address}), area.memory
        )
        for chunk_bytes in (2**20, 4 * 2**20, 16 * 2**20):
            sides = Sides(tier, area, chunk_bytes)
            figures = found[f"{chunk_bytes // 2**10}KiB"] = compared(sides, rounds)
            cells = [f"{figures[name]:.2f}" for name in columns]
            for way in ("put", "get"):
                low, middle, high = (figures[f"{way}_ratio_{n}"] for n in QUARTILES)
                cells.append(f"{middle:.2f} ({low:.2f} to {high:.2f})")
            table.add_row(f"{chunk_bytes // 2**20} MiB", *cells)
        tier.close()
    Console().print(table)
    OUT.parent.mkdir(exist_ok=True)
    machine = {"cpus": os.cpu_count(), "kernel": platform.release(), "rounds": rounds}
    OUT.write_text(json.dumps({"machine": machine, "figures": found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
