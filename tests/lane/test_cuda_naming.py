"""Names of devices and nodes of the machine: what the CUDA lane knows without a driver."""

import os
from pathlib import Path

import pytest

from kvd.lane.devices.cuda.uuids import show_slice, stay_near

HEX = "0123456789abcdef0123456789abcdef"
DASHED = "01234567-89ab-cdef-0123-456789abcdef"


def test_a_slice_is_shown_to_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    """A MIG slice is chosen by the environment before the driver starts; a whole device is not."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "untouched")
    show_slice(f"cuda:{HEX}")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "untouched"
    show_slice(f"cuda:MIG-{HEX}")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == f"MIG-{DASHED}"


def test_a_lane_stays_on_its_devices_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with several nodes the process is bound to the device's processors."""
    _machine(tmp_path, nodes={0: "0-1", 1: "2-3,6"}, device_node=1)
    bound: list[set[int]] = []
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 6})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, cpus: bound.append(cpus))
    stay_near("0000:17:00.0", tmp_path)
    assert bound == [{2, 6}]


@pytest.mark.parametrize(
    ("nodes", "device_node"), [({0: "0-3"}, 0), ({0: "0", 1: "1"}, -1), ({0: "0", 1: "9"}, 1)]
)
def test_an_unknown_node_binds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nodes: dict[int, str], device_node: int
) -> None:
    """One node, a device without a node, or a node that this process may not use."""
    _machine(tmp_path, nodes, device_node)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1})
    monkeypatch.setattr(os, "sched_setaffinity", lambda _pid, _cpus: pytest.fail("bound"))
    stay_near("0000:17:00.0", tmp_path)
    stay_near("0000:99:00.0", tmp_path)


def _machine(sysfs: Path, nodes: dict[int, str], device_node: int) -> None:
    for node, cpus in nodes.items():
        folder = sysfs / f"devices/system/node/node{node}"
        folder.mkdir(parents=True)
        (folder / "cpulist").write_text(f"{cpus}\n", "ascii")
    folder = sysfs / "bus/pci/devices/0000:17:00.0"
    folder.mkdir(parents=True)
    (folder / "numa_node").write_text(f"{device_node}\n", "ascii")
