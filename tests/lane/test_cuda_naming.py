"""Names of devices and nodes of the machine: what the CUDA lane knows without a driver."""

import os
from pathlib import Path

import pytest

from kvd.lane.cuda.backend import bind_near_device, show_mig_slice

HEX = "0123456789abcdef0123456789abcdef"
DASHED = "01234567-89ab-cdef-0123-456789abcdef"


def test_a_slice_is_shown_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MIG slice is chosen by the environment before the driver starts; a whole device is not."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "untouched")
    show_mig_slice(f"cuda:{HEX}")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "untouched"
    show_mig_slice(f"cuda:MIG-{HEX}")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == f"MIG-{DASHED}"


@pytest.mark.parametrize(
    ("near", "allowed", "bound"),
    [
        ("2-3,6\n", {0, 1, 2, 6}, [{2, 6}]),
        ("0-7\n", {0, 1}, []),  # one node, or a device without a node
        ("8-9\n", {0, 1}, []),  # which this process may not use
        (None, {0, 1}, []),
    ],
)
def test_a_lane_stays_near_its_device(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    near: str | None,
    allowed: set[int],
    bound: list[set[int]],
) -> None:
    """On a machine with several nodes the process is bound to the device's processors."""
    folder = tmp_path / "bus/pci/devices/0000:17:00.0"
    folder.mkdir(parents=True)
    if near is not None:
        (folder / "local_cpulist").write_text(near, "ascii")
    found: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: allowed)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, cpus: found.append(cpus))
    bind_near_device("0000:17:00.0", tmp_path)
    assert found == bound
