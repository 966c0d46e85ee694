"""The driver's ways with every choice that there is, in turns: what a lane's defaults rest on."""

import itertools
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from gpu_device import WARM_AGAIN_SECONDS, Gpu
from gpu_figures import spread
from gpu_raw import Reference

from kvd.errors import CudaError
from kvd.lane.devices.cuda.driver import BatchCopy
from kvd.lane.devices.device import Direction

SECONDS, LEAST_ROUNDS = 18.0, 3
NUMBERS = (32, 256, 2048)
BLOCKS = (4, 8, 12, 16, 24, 32)

Choice = tuple[tuple[str, Any], ...]


def batches(gpu: Gpu, fragment: int, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """GB/s of batches, by number of fragments a call, flags and order of sources.

    Args:
        gpu: where.
        fragment: bytes that lie in one place.
        nbytes: to move at a time.
        rounds: at most; see `in_turns`.
    """
    reference = Reference(gpu, nbytes)
    overlaps = (False, True) if BatchCopy.can_ask_overlap() else (False,)
    ways: dict[Choice, Callable[[], float]] = {}
    for number, overlap in itertools.product(NUMBERS, overlaps):
        for direction, any_order in (
            (Direction.LOAD, True),
            (Direction.LOAD, False),
            (Direction.STORE, False),
        ):
            chosen = {"overlap": overlap, "any_order": any_order}
            way = partial(reference.batched, fragment, direction, at_once=number, **chosen)
            ways[_choice(direction, number=number, **chosen)] = way
    found = in_turns(gpu, ways, rounds)
    reference.close()
    return [{"fragment": fragment, **row} for row in found]


def kernels(gpu: Gpu, fragment: int, nbytes: int, rounds: int) -> list[dict[str, Any]]:
    """GB/s of the lane's kernel by number of blocks; as `batches`."""
    reference = Reference(gpu, nbytes)
    ways: dict[Choice, Callable[[], float]] = {
        _choice(direction, blocks=blocks): partial(
            reference.by_kernel, fragment, direction, blocks=blocks
        )
        for blocks, direction in itertools.product(BLOCKS, Direction)
    }
    found = in_turns(gpu, ways, rounds)
    reference.close()
    return [{"fragment": fragment, **row} for row in found]


def in_turns(
    gpu: Gpu, ways: Mapping[Choice, Callable[[], float]], rounds: int
) -> list[dict[str, Any]]:
    """A row for each way: its choices and the spread of its GB/s, or why it cannot be used.

    Args:
        gpu: warmed up before each round.
        ways: all asked once a round, in another order each time. One that the driver refuses is
            asked once only.
        rounds: at most, fewer where time is over. A first one does not count.
    """
    rng = np.random.default_rng(0)
    samples: dict[Choice, list[float]] = {choice: [] for choice in ways}
    refused: dict[Choice, str] = {}
    gpu.warm()
    end = time.monotonic() + SECONDS
    for number in range(rounds + 1):
        if number > LEAST_ROUNDS and time.monotonic() > end:
            break
        gpu.warm(WARM_AGAIN_SECONDS)
        for choice in _shuffled(list(ways), rng):
            if choice in refused:
                continue
            try:
                rate = ways[choice]()
            except CudaError as error:
                gpu.wait()
                refused[choice] = str(error)
                continue
            if number:
                samples[choice].append(rate)
    return [
        dict(choice) | ({"refused": refused[choice]} if choice in refused else {**spread(rates)})
        for choice, rates in samples.items()
    ]


def _choice(direction: Direction, **chosen: Any) -> Choice:
    return (("direction", direction.value), *chosen.items())


def _shuffled(choices: Sequence[Choice], rng: np.random.Generator) -> list[Choice]:
    return [choices[at] for at in rng.permutation(len(choices))]
