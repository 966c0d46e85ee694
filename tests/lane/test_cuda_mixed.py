"""Many transfers at a time, both ways, of every length, under adversarial timing."""

import random

import numpy as np
import pytest

from kvd.lane.devices.cuda.backend import Options
from kvd.lane.devices.device import Direction
from tests.lane.cuda_checks import PAGE, submit
from tests.lane.cuda_memory import CudaWorkers
from tests.lane.cuda_rig import POOL_BYTES, CudaRig, TestDriver
from tests.lane.device_contract import Run, pattern

pytestmark = pytest.mark.fakecuda

TRANSFERS = 120
AT_A_TIME = 12
PAGES, POOL_PAGES = 128, 240
LENGTHS = (100, 2048, 4000)


@pytest.mark.parametrize("seed", range(4))
def test_memory_and_pool_are_as_a_model_says(
    fake_driver: TestDriver, ipc_workers: CudaWorkers, seed: int
) -> None:
    """Whatever the order in which transfers end, each has moved its bytes when it is reported."""
    rng = random.Random(seed)
    fake_driver.set(f"seed={seed}")
    fake_driver.set("any=random")
    below = {direction: rng.choice([0, 3000, 10**6]) for direction in Direction}
    rig = CudaRig(fake_driver, ipc_workers, Options(registration_bytes=65536, kernel_below=below))
    memory, source = rig.attach((PAGES * PAGE,))
    device, pool = pattern(PAGES * PAGE, seed), pattern(POOL_BYTES, seed + 100)
    rig.put(source, 0, 0, device)
    rig.put_pool(0, pool)
    device, pool = device.copy(), pool.copy()
    free, free_in_pool = set(range(PAGES)), set(range(POOL_PAGES))
    flying: dict[int, tuple[Direction, list[Run]]] = {}
    for number in range(TRANSFERS):
        pages = rng.sample(sorted(free), rng.randint(1, 6))
        slots = rng.sample(sorted(free_in_pool), len(pages))
        runs = [
            (0, page * PAGE + skew, slot * PAGE + rng.choice([0, skew]), rng.choice(LENGTHS))
            for page, slot, skew in (
                (*pair, rng.randint(0, 40)) for pair in zip(pages, slots, strict=True)
            )
        ]
        direction = rng.choice(list(Direction))
        submit(rig, number, memory, direction, runs)
        flying[number] = (direction, runs)
        free -= set(pages)
        free_in_pool -= set(slots)
        while len(flying) >= AT_A_TIME or (number == TRANSFERS - 1 and flying):
            for finished in rig.device.progress():
                assert finished.error == ""
                direction, runs = flying.pop(finished.transfer.job)
                for _, offset, at, size in runs:
                    if direction is Direction.STORE:
                        pool[at : at + size] = device[offset : offset + size]
                    else:
                        device[offset : offset + size] = pool[at : at + size]
                    free.add(offset // PAGE)
                    free_in_pool.add(at // PAGE)
    np.testing.assert_array_equal(rig.get_pool(0, POOL_BYTES), pool)
    np.testing.assert_array_equal(rig.get(source, 0, 0, PAGES * PAGE), device)
    rig.close()
