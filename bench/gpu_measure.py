"""Measures one part of what gpu_transfer.py shows, and writes its figures or why there are none.

Run by gpu_transfer.py, which has no driver loaded, in a process of its own.
"""

import argparse
import json
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gpu_fragments
import gpu_interference
import gpu_lane
from gpu_device import Gpu
from gpu_raw import Reference
from harness import MIB

TRIED_BYTES, TRIED_FRAGMENT = 2**22, 8192
INTERFERENCE_ROUNDS = 7


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
        "ways": lambda: ways(gpu),
        "latency": lambda: gpu_lane.latency(gpu, options.jobs, options.log),
        "registration": lambda: gpu_lane.registration(gpu, nbytes, 3),
        "fragments": lambda: gpu_fragments.measure(
            gpu, int(which), nbytes, options.rounds, options.log, without=options.without
        ),
        "interference": lambda: gpu_interference.measure(
            gpu, which, nbytes, min(options.rounds, INTERFERENCE_ROUNDS), options.log
        ),
    }
    if kind != "device":
        gpu.warm()
    return sections[kind]()


def ways(gpu: Gpu) -> dict[str, str]:
    """By way to copy: why it cannot be used here, empty where it moves the right bytes."""
    return Reference(gpu, TRIED_BYTES).failures(TRIED_FRAGMENT)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--part", required=True)
    parser.add_argument("--part-out", type=Path, required=True)
    parser.add_argument("--log", type=Path, required=True, help="for the daemons' lines")
    parser.add_argument("--mib", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--without", action="append", default=[], help="a way of the driver")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
