"""Machines of several NUMA nodes, described as the kernel describes them."""

from pathlib import Path
from uuid import NAMESPACE_OID, uuid5

NODES = {0: "0-3,8\n", 1: "4-7\n", 2: "\n"}  # the third has memory alone


def device(bus: str) -> str:
    """How lanes name the described GPU at `bus`."""
    return "cuda:" + uuid5(NAMESPACE_OID, bus).hex


def describe(root: Path, gpus: dict[str, str], online: str = "0-2") -> None:
    """Files of the kernel's of a machine with these GPUs, each with its node as the kernel says."""
    system = root / "devices/system/node"
    system.mkdir(parents=True)
    (system / "online").write_text(f"{online}\n", "ascii")
    for number, cpus in NODES.items():
        (system / f"node{number}").mkdir()
        (system / f"node{number}" / "cpulist").write_text(cpus, "ascii")
    for bus, node in gpus.items():
        (root / "gpus" / bus).mkdir(parents=True)
        (root / "gpus" / bus / "information").write_text(
            f"Model: \t\t NVIDIA H200\nGPU UUID: \t GPU-{uuid5(NAMESPACE_OID, bus)}\nIRQ: \t 17\n"
        )
        (root / "bus/pci/devices" / bus).mkdir(parents=True)
        if node:
            (root / "bus/pci/devices" / bus / "numa_node").write_text(f"{node}\n", "ascii")
