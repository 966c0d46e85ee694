"""What moves in pieces of one length: by kvd and by the driver's own ways, in turns."""

import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from gpu_device import WARM_AGAIN_SECONDS, Gpu
from gpu_engine import GpuEngine, pool_bytes
from gpu_figures import spread
from gpu_raw import Reference
from harness import Daemon, cpu_seconds

from kvd.lane.devices.device import Direction

DIRECTIONS = {
    "store": (Direction.STORE,),
    "load": (Direction.LOAD,),
    "both": (Direction.LOAD, Direction.STORE),
}
LEAST_ROUNDS, ROUNDS_SECONDS = 3, 10.0

Found = dict[str, dict[str, float]]


class Ways:
    """All ways to move fragments of one length, each asked for all directions.

    Args:
        gpu: where.
        daemon: with the engine's lane.
        engine: of this length.
        fragment: bytes that lie in one place.
        without: ways of the driver that cannot be used here.
    """

    def __init__(
        self, gpu: Gpu, daemon: Daemon, engine: GpuEngine, fragment: int, without: Sequence[str]
    ) -> None:
        self._engine = engine
        self._lane = daemon.lane_pid()
        self._reference = reference = Reference(gpu, engine.nbytes)
        ways: dict[str, Callable[..., float]] = {
            "raw": reference.raw,
            "batch": partial(reference.batched, fragment),
            "kernel": partial(reference.by_kernel, fragment),
        }
        self._ways = {name: way for name, way in ways.items() if name not in without}

    def kvd(self) -> Found:
        """By direction: GB/s, and the lane's processor time in ms a GB."""
        found: Found = {}
        keys: list[bytes] = []
        for name, directions in DIRECTIONS.items():
            began = cpu_seconds(self._lane)
            fresh, gbps = self._engine.move(keys, store=Direction.STORE in directions)
            keys = keys or fresh
            took = cpu_seconds(self._lane) - began
            moved = self._engine.nbytes * len(directions)
            found[name] = {"kvd": gbps, "cpu_ms_per_GB": took * 1e12 / moved}
        return found

    def driver(self) -> Found:
        """By direction: GB/s of the driver's ways."""
        return {
            name: {way: measured(*directions) for way, measured in self._ways.items()}
            for name, directions in DIRECTIONS.items()
        }

    def round(self, *, kvd_first: bool) -> Found:
        """All of it, with the ratio of kvd to the raw copy."""
        found = self.kvd() if kvd_first else self.driver()
        for name, others in (self.driver() if kvd_first else self.kvd()).items():
            found[name] |= others
            found[name]["ratio"] = found[name]["kvd"] / found[name]["raw"]
        return found

    def close(self) -> None:
        """Give the reference's memory back."""
        self._reference.close()


def measure(
    gpu: Gpu,
    fragment: int,
    nbytes: int,
    rounds: int,
    log: Path,
    *,
    without: Sequence[str],
    seconds: float = ROUNDS_SECONDS,
) -> dict[str, Any]:
    """By direction and figure of `Ways.round`: its spread.

    Args:
        gpu: where.
        fragment: bytes that lie in one place.
        nbytes: to move at a time, about.
        rounds: at most; fewer where they take long. A first one does not count.
        log: the daemon's.
        without: see Ways.
        seconds: after which no more rounds begin.
    """
    found: dict[str, dict[str, list[float]]] = {name: {} for name in DIRECTIONS}
    with (
        Daemon(pool_bytes(fragment, nbytes), log=log) as daemon,
        GpuEngine(gpu, daemon, fragment, nbytes) as engine,
    ):
        ways = Ways(gpu, daemon, engine, fragment, without)
        gpu.warm()
        ways.round(kvd_first=True)
        engine.check()
        end = time.monotonic() + seconds
        for number in range(rounds):
            if number >= LEAST_ROUNDS and time.monotonic() > end:
                break
            gpu.warm(WARM_AGAIN_SECONDS)
            for name, figures in ways.round(kvd_first=not number % 2).items():
                for figure, value in figures.items():
                    found[name].setdefault(figure, []).append(value)
        ways.close()
        moved = engine.nbytes
    spreads = {
        name: {figure: spread(values) for figure, values in figures.items()}
        for name, figures in found.items()
    }
    return {"bytes": fragment, "moved": moved, **spreads}
