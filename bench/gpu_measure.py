"""Measures one part of what gpu_transfer.py shows, and writes its figures or why there are none.

Run by gpu_transfer.py, which has no driver loaded, in a process of its own.
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_interference
import gpu_lane
from gpu_device import Gpu, Reference
from gpu_engine import GpuEngine, pool_bytes
from harness import MIB, Daemon, median

from kvd.lane.devices.device import Direction

DIRECTIONS = {
    "store": (Direction.STORE,),
    "load": (Direction.LOAD,),
    "both": (Direction.LOAD, Direction.STORE),
}
LEAST_ROUNDS, ROUNDS_SECONDS = 3, 20.0


def main() -> int:
    """The exit status: 1 where there are no figures."""
    options = _options()
    found: dict[str, Any]
    try:
        found = measure(options.part, options)
    except Exception as error:  # noqa: BLE001  # the other parts go on
        traceback.print_exc()
        found = {"error": f"{type(error).__name__}: {error}"}
    options.part_out.write_text(json.dumps(found), encoding="utf-8")
    return int("error" in found)


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one part: a word, for some with what it is measured of."""
    kind, _, which = part.partition(" ")
    nbytes = options.mib * MIB
    gpu = Gpu()
    sections: dict[str, Callable[[], dict[str, Any]]] = {
        "device": gpu.describe,
        "latency": lambda: gpu_lane.latency(gpu, options.jobs, options.log),
        "registration": lambda: gpu_lane.registration(gpu, nbytes, 3),
        "fragments": lambda: fragments(gpu, int(which), nbytes, options.rounds, options.log),
        "interference": lambda: gpu_interference.measure(gpu, which, nbytes, 3, options.log),
    }
    if kind != "device":
        gpu.warm()
    return sections[kind]()


def fragments(gpu: Gpu, fragment: int, nbytes: int, rounds: int, log: Path) -> dict[str, Any]:
    """By direction: GB/s of kvd, of the raw copy, of batches.

    Args:
        gpu: where.
        fragment: bytes that lie in one place.
        nbytes: to move at a time, about.
        rounds: all in turn; a first one does not count. Fewer where they take long.
        log: the daemon's.
    """
    rates: dict[str, dict[str, list[float]]] = {
        name: {"kvd": [], "raw": [], "batch": []} for name in DIRECTIONS
    }
    with (
        Daemon(pool_bytes(fragment, nbytes), log=log) as daemon,
        GpuEngine(gpu, daemon, fragment, nbytes) as engine,
    ):
        reference = Reference(gpu, engine.nbytes)
        gpu.warm()
        end = time.monotonic() + ROUNDS_SECONDS
        for number in range(rounds + 1):
            if number > LEAST_ROUNDS and time.monotonic() > end:
                break
            keys, store = engine.move(store=True)
            _, load = engine.move(keys)
            if not number:
                engine.check()
            _, both = engine.move(keys, store=True)
            for name, kvd in (("store", store), ("load", load), ("both", both)):
                ways = DIRECTIONS[name]
                found = {"kvd": kvd, "raw": reference.raw(engine.nbytes, *ways)}
                if reference.has_batches:
                    found["batch"] = reference.batched(engine.nbytes, fragment, *ways)
                if number:
                    for way, value in found.items():
                        rates[name][way].append(value)
        reference.close()
    figures = {
        name: {way: median(values) if values else None for way, values in by_way.items()}
        for name, by_way in rates.items()
    }
    return {"bytes": fragment, "rounds": len(rates["store"]["kvd"]), **figures}


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", required=True)
    parser.add_argument("--part-out", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True, help="for the daemons' lines")
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--jobs", type=int, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
