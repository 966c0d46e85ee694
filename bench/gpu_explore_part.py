"""Measures one part of what gpu_explore.py shows; run by it, in a process of its own."""

import argparse
import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import gpu_fragments
import gpu_interference
import gpu_mps
import gpu_sweeps
import gpu_users
from gpu_device import Gpu
from gpu_part import Skipped, answer
from harness import MIB

PIECE_FRAGMENTS, PIECE_SECONDS = (8192, 65536), 4.0
BESIDE_ROUNDS = 5


def measure(part: str, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one part: a word, for some with what it is measured of."""
    kind, *which = part.split()
    nbytes, rounds = options.mib * MIB, options.rounds
    match kind:
        case "device":
            return {**Gpu().describe()}
        case "batch":
            return {"rows": gpu_sweeps.batches(Gpu(), int(which[0]), nbytes, rounds)}
        case "kernel":
            return {"rows": gpu_sweeps.kernels(Gpu(), int(which[0]), nbytes, rounds)}
        case "pieces":
            return {"rows": _pieces(which[0], nbytes, options)}
        case "beside":
            with _maybe_mps("mps" in which) as gpu:
                how = (nbytes, min(rounds, BESIDE_ROUNDS), options.log)
                return gpu_interference.measure(gpu, which[0], *how)
        case "users":
            if why := gpu_users.why_not():
                raise Skipped(why)
            return {**gpu_users.measure()}
        case "layouts":
            import gpu_layouts  # noqa: PLC0415  # torch, which takes seconds to import

            return {**gpu_layouts.measure(rounds)}
    raise ValueError(part)


def _pieces(options: str, nbytes: int, how: argparse.Namespace) -> list[dict[str, Any]]:
    """What gpu_fragments.measure finds with these options of the lane, for each length."""
    os.environ["LANE_CUDA"] = options
    gpu = Gpu()
    return [
        gpu_fragments.measure(
            *(gpu, fragment, nbytes, how.rounds, how.log),
            without=("batch", "kernel"),
            seconds=PIECE_SECONDS,
        )
        for fragment in PIECE_FRAGMENTS
    ]


@contextlib.contextmanager
def _maybe_mps(wanted: bool) -> Iterator[Gpu]:  # a part is asked for or not
    """The device, by way of MPS or not.

    Raises:
        Skipped: there is no MPS here.
        RuntimeError: it does not serve.
    """
    if not wanted:
        yield Gpu()
        return
    if why := gpu_mps.why_not():
        raise Skipped(why)
    with gpu_mps.mps() as servers:
        gpu = Gpu()
        if not servers():
            raise RuntimeError("MPS runs, but no server of it: this process does not use it")
        yield gpu


if __name__ == "__main__":
    sys.exit(answer(measure))
