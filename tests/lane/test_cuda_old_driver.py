"""Drivers older than the bindings: what they lack is done without, and said."""

import logging
import sys
from pathlib import Path

import numpy as np
import pytest

from kvd.lane.devices.cuda import driver
from kvd.lane.devices.device import Direction
from tests.fakecuda.harness import FakeCuda
from tests.lane.cuda_checks import SIZES, engine_only, submit
from tests.lane.cuda_memory import CudaWorkers
from tests.lane.cuda_rig import CudaRig, TestDriver, load
from tests.lane.device_contract import drain, pattern

pytestmark = pytest.mark.fakecuda

NBYTES = 4096


def there_and_back(rig: CudaRig) -> None:
    """Store and load a few bytes; both are reported whole, with a time."""
    memory, source = rig.attach(SIZES)
    rig.put(source, 0, 0, pattern(NBYTES, 1))
    for number, direction in enumerate((Direction.STORE, Direction.LOAD)):
        submit(rig, number, memory, direction, [(0, number * NBYTES, 0, NBYTES)])
        done = drain(rig.device)[number]
        assert (done.error, done.nbytes) == ("", NBYTES)
        assert done.nanoseconds > 0
    np.testing.assert_array_equal(rig.get(source, 0, NBYTES, NBYTES), pattern(NBYTES, 1))


def test_a_driver_that_is_older_than_the_bindings_serves_and_is_named(
    fakecuda: FakeCuda, tmp_path: Path
) -> None:
    """CUDA 12.4: the bindings cannot ask it for times; all copies count, and a line says it."""
    said = fakecuda.check(
        serve_on_an_old_driver, str(fakecuda.library), str(tmp_path / "log"), DRIVER_VERSION=12040
    )
    assert "it is for CUDA 12.4, and only from 12.8 on (driver 570)" in said


def serve_on_an_old_driver(library: str, log: str) -> None:
    """A process of its own: the bindings look for functions once."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s", stream=sys.stdout, force=True)
    fake_driver = load(FakeCuda(Path(library)), Path(log))
    with pytest.raises(RuntimeError, match="cuEventElapsedTime"):
        driver.bindings().cuEventElapsedTime(0, 0)
    rig = CudaRig(fake_driver, CudaWorkers(ipc=True), engine_only())
    there_and_back(rig)
    rig.close()


def test_a_time_that_is_not_told_fails_no_transfer(
    fake_driver: TestDriver, ipc_workers: CudaWorkers
) -> None:
    """The driver refuses each question for a time; the bytes arrived, so the copies are good."""
    fake_driver.set("fail=cuEventElapsedTime:*:801")
    rig = CudaRig(fake_driver, ipc_workers, engine_only())
    try:
        there_and_back(rig)
    finally:
        rig.close()


def test_a_driver_that_is_too_old_is_named_with_the_remedy(fakecuda: FakeCuda) -> None:
    """CUDA 11.8: the lane does not start, and says which driver to install."""
    done = fakecuda.run(start, DRIVER_VERSION=11080)
    assert done.returncode
    assert "CudaMissing: the NVIDIA driver is too old: it is for CUDA 11.8" in done.stderr
    assert "12.0 or newer (driver 525)" in done.stderr


def start() -> None:
    """Start the driver."""
    driver.start()
