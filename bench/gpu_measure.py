"""Measures one part of what gpu.py shows, in a process of its own.

`python gpu_measure.py --part NAME --part-out FILE --log FILE --mib N --rounds N`
"""

import argparse
import json
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gpu_beside
import gpu_pins
from gpu_device import WARM_AGAIN_SECONDS, Gpu, RawBatch
from gpu_engine import GpuEngine, pool_bytes
from gpu_figures import Samples, Skipped
from harness import MIB, Daemon, cpu_seconds

from kvd.lane.device import Direction

DIRECTIONS = {
    "store": (Direction.STORE,),
    "load": (Direction.LOAD,),
    "both": (Direction.LOAD, Direction.STORE),
}
LEAST_ROUNDS, ROUNDS_SECONDS = 3, 8.0
MOST_ROUNDS_BESIDE, MOST_ROUNDS_PINNING = 5, 2

Figures = dict[str, dict[str, float]]
"""By direction, by figure."""


def main() -> int:
    """Write the figures of the part that the command line names, or why there are none.

    Returns:
        The exit status: 1 where the part failed.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", required=True)
    parser.add_argument("--part-out", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True, help="for the daemons' lines")
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    options = parser.parse_args()
    figures: Mapping[str, Any]
    try:
        figures = measure(options)
    except Skipped as skipped:
        figures = {"skipped": str(skipped)}
    except Exception as error:  # noqa: BLE001  # the other parts go on
        traceback.print_exc()
        cause = str(error).strip().rpartition("\n")[2]
        figures = {"error": f"{type(error).__name__}: {cause}"}
    options.part_out.write_text(json.dumps(figures), encoding="utf-8")
    return int("error" in figures)


def measure(options: argparse.Namespace) -> Mapping[str, Any]:
    """The figures of one part: a word, for some with what it is measured of."""
    kind, _, which = options.part.partition(" ")
    nbytes, rounds = options.mib * MIB, options.rounds
    if kind == "users":
        return gpu_pins.users()
    if kind == "lanes":
        return gpu_pins.two_lanes(nbytes, min(rounds, MOST_ROUNDS_PINNING))
    gpu = Gpu()
    sections: dict[str, Callable[[], Mapping[str, Any]]] = {
        "device": gpu.describe,
        "fragments": lambda: fragments(gpu, int(which), nbytes, rounds, options.log),
        "beside": lambda: gpu_beside.measure(
            gpu, nbytes, min(rounds, MOST_ROUNDS_BESIDE), options.log
        ),
        "pins": lambda: gpu_pins.by_size(gpu, int(which) * MIB),
        "exporter": lambda: gpu_pins.killed_exporter(gpu),
    }
    return sections[kind]()


def fragments(gpu: Gpu, fragment: int, nbytes: int, rounds: int, log: Path) -> dict[str, Any]:
    """By direction and figure of a round: its spread.

    Args:
        gpu: where.
        fragment: bytes that lie in one place.
        nbytes: to move at a time, about.
        rounds: at most; fewer where they take long. A first one does not count.
        log: the daemon's.
    """
    samples = {name: Samples() for name in DIRECTIONS}
    with (
        Daemon(pool_bytes(fragment, nbytes), log=log) as daemon,
        GpuEngine(gpu, daemon, fragment, nbytes) as engine,
    ):
        lane = daemon.lane_pid()
        pieces = {direction: engine.pieces(direction) for direction in Direction}
        raw = RawBatch(gpu, pieces, engine.nbytes)
        gpu.warm()
        _by_kvd(engine, lane)
        engine.check()
        _by_driver(raw)
        engine.check()  # the driver loads the same bytes into the same blocks
        end = time.monotonic() + ROUNDS_SECONDS
        for number in range(rounds):
            if number >= LEAST_ROUNDS and time.monotonic() > end:
                break
            gpu.warm(WARM_AGAIN_SECONDS)
            for name, figures in _round(engine, raw, lane, kvd_first=not number % 2).items():
                for figure, value in figures.items():
                    samples[name].keep(figure, value)
        raw.close()
        moved = engine.nbytes
    spreads = {name: by_figure.spreads() for name, by_figure in samples.items()}
    return {"bytes": fragment, "moved": moved, **spreads}


def _round(engine: GpuEngine, raw: RawBatch, lane: int, *, kvd_first: bool) -> Figures:
    """GB/s of kvd and of the raw batch in every direction; `ratio` is the first to the second.

    `cpu_ms_per_GB` is the processor time of the lane's process.
    """
    figures = _by_kvd(engine, lane) if kvd_first else _by_driver(raw)
    for name, others in (_by_driver(raw) if kvd_first else _by_kvd(engine, lane)).items():
        figures[name] |= others
        figures[name]["ratio"] = figures[name]["kvd"] / figures[name]["batch"]
    return figures


def _by_kvd(engine: GpuEngine, lane: int) -> Figures:
    figures: Figures = {}
    keys: list[bytes] = []
    for name, directions in DIRECTIONS.items():
        began = cpu_seconds(lane)
        fresh, gbps = engine.move(keys, store=Direction.STORE in directions)
        keys = keys or fresh
        milliseconds = 1e3 * (cpu_seconds(lane) - began)
        moved = engine.nbytes * len(directions) / 1e9
        figures[name] = {"kvd": gbps, "cpu_ms_per_GB": milliseconds / moved}
    return figures


def _by_driver(raw: RawBatch) -> Figures:
    return {name: {"batch": raw.move(*ways)} for name, ways in DIRECTIONS.items()}


if __name__ == "__main__":
    sys.exit(main())
