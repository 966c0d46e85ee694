"""How long the broker's loop stands still while it takes in what a tier has kept: 10⁶ chunks.

A daemon with a tier that says of itself that it keeps so many chunks; an engine attaches, and the
tier's scan goes into the directory. Beside it one whose tier keeps nothing. Of both: the longest
turn of the broker's loop since the daemon's start, as the daemon counts it, and the slowest of the
pings that a tool sends all the while.

`python bench/tier_scan.py [CHUNKS]` prints the figures as JSON.
"""

import json
import os
import sys
import tempfile
import time
from pathlib import Path

from harness import MIB, Daemon, Engine, Figures, find_doubles, layout

from kvd.wire.tool import ToolConnection
from kvd_client.decisions import NO_TIER
from kvd_proto.messages import Ping, Pong

CHUNKS = 10**6
SIZE = "64GiB"
PAUSE_SECONDS = 0.001  # between pings
BACKEND = '''
from memory_tier import MemoryTier

class ScanTier(MemoryTier):
    """Says that it keeps chunks that it does not."""

    def __init__(self, options):
        self.count = int(options.target)
        super().__init__(type(options)("", options.values))

    @classmethod
    def check(cls, options):
        int(options.target)

    def scan(self, space):
        for begin in range(0, self.count, 1024):
            end = min(begin + 1024, self.count)
            yield [(b"kept %026d" % number, (0, 1, 0)) for number in range(begin, end)]
'''


def make_backend(place: Path) -> None:
    """Install the backend there."""
    (place / "scan_tier.py").write_text(BACKEND)
    info = place / "scan_tier-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: scan-tier\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[kvd.tiers]\nscan = scan_tier:ScanTier\n")


def measure(chunks: int) -> Figures:
    """Seconds of the scan, and milliseconds of the longest turn and ping."""
    with Daemon(64 * MIB, "--tier", f"scan:{chunks},size={SIZE}") as daemon:
        slowest = 0.0
        with (
            ToolConnection(daemon.runtime_dir) as control,
            Engine(daemon.runtime_dir, layout(4, 16384, 64, 1)) as engine,
        ):
            began = time.perf_counter()
            last = b"kept %026d" % (chunks - 1)
            end = began + (5.0 if not chunks else 120.0)
            while time.perf_counter() < end:
                asked = time.perf_counter()
                control.ask(Ping(), Pong)
                slowest = max(slowest, time.perf_counter() - asked)
                time.sleep(PAUSE_SECONDS)
                if chunks and engine.scheduler.find_tier(last) != NO_TIER:
                    break
            took = time.perf_counter() - began
            broker = control.status()["broker"]
    name = "scan" if chunks else "empty"
    return {
        f"{name}_seconds": took,
        f"{name}_longest_turn_ms": broker["loop_lag_max_seconds"] * 1e3,
        f"{name}_slowest_ping_ms": slowest * 1e3,
    }


if __name__ == "__main__":
    count = int(sys.argv[1]) if len(sys.argv) > 1 else CHUNKS
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        make_backend(Path(folder))
        os.environ["PYTHONPATH"] = os.pathsep.join([folder, os.environ.get("PYTHONPATH", "")])
        find_doubles()
        figures = measure(0) | measure(count)
    print(json.dumps({key: round(value, 2) for key, value in figures.items()}, indent=2))
