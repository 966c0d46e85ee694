"""Measures one part of what gpu_transfer.py shows.

Run by gpu_transfer.py, which has no driver loaded, in a process of its own.
"""

import argparse
import sys
from collections.abc import Callable
from typing import Any

import gpu_fragments
import gpu_interference
import gpu_lane
from gpu_device import Gpu
from gpu_part import answer
from gpu_raw import Reference
from harness import MIB

TRIED_BYTES, TRIED_FRAGMENT = 2**22, 8192
INTERFERENCE_ROUNDS = 7


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


if __name__ == "__main__":
    sys.exit(answer(measure))
