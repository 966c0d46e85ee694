"""NUMA nodes: those of GPUs, those of a file's memory, and running on one.

A page is allocated on the node of the processor that touches it first, or on another one if that
node is full, unless a memory policy says otherwise (numactl, systemd's NUMAPolicy, the tmpfs option
mpol). So kvd places memory by allocating it on processors of the intended node. This respects such
policies and needs no privilege: containers may not set a memory policy.
"""

import contextlib
import ctypes
import mmap
import os
import re
from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each visible GPU, by bus id
SYSFS = Path("/sys")
_NODES = Path("devices/system/node")
_MAPS = Path("/proc/self/numa_maps")
_UUID = re.compile(r"^GPU UUID:\s+GPU-([0-9a-fA-F-]{36})\s*$", re.MULTILINE)
_SAMPLES = 1024
_GOLDEN = 0.6180339887498949  # the fractions of its multiples are evenly spread


@dataclass(frozen=True, slots=True)
class Node:
    """A NUMA node, and its processors that this process may use."""

    number: int
    cpus: frozenset[int]


def number_of_nodes() -> int:
    """Return the number of online nodes; 1 if the kernel does not report it."""
    try:
        return len(parse_cpu_list((SYSFS / _NODES / "online").read_text("ascii")))
    except (OSError, ValueError):
        return 1


@dataclass(frozen=True, slots=True)
class GpuNode:
    """A GPU's node. device: as lanes name the GPU, ``cuda:<32 hex digits>``; empty if unknown."""

    device: str
    node: Node


def has_gpus() -> bool:
    """Return whether GPUs are visible."""
    return any(GPUS.glob("*"))


def gpu_nodes(allowed: AbstractSet[int]) -> tuple[GpuNode, ...]:
    """Return the node of each visible GPU, in order of the GPUs' bus ids.

    Left out are GPUs whose node is unknown or has no processor in `allowed`: the daemon may be
    bound to a part of the machine. Empty on a machine with one node.
    """
    if number_of_nodes() < 2:
        return ()
    nodes_of_gpus = []
    for gpu in sorted(GPUS.glob("*")):
        with contextlib.suppress(OSError, ValueError):
            numa_file = SYSFS / "bus/pci/devices" / gpu.name / "numa_node"
            node_number = int(numa_file.read_text("ascii"))  # -1 if unknown: no such folder
            cpu_list = (SYSFS / _NODES / f"node{node_number}" / "cpulist").read_text("ascii")
            if cpus := parse_cpu_list(cpu_list) & allowed:
                nodes_of_gpus.append(GpuNode(_device(gpu), Node(node_number, frozenset(cpus))))
    return tuple(nodes_of_gpus)


def _device(gpu: Path) -> str:
    """Return the device's name, from the driver's line ``GPU UUID: GPU-01234567-89ab-…``."""
    try:
        text = (gpu / "information").read_text("utf-8", "replace")
    except OSError:
        return ""
    uuid = _UUID.search(text)
    return "cuda:" + uuid[1].replace("-", "").lower() if uuid else ""


def run_on(node: Node) -> None:
    """Bind the calling thread to a node's processors; ignore a refusal."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, node.cpus)


def parse_cpu_list(text: str) -> set[int]:
    """Parse a list of the kernel such as "0-3,8".

    Raises:
        ValueError: `text` is no such list.
    """
    cpus: set[int] = set()
    for item in text.strip().split(","):
        first, _, last = item.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def sample_offsets(nbytes: int) -> list[int]:
    """Return a thousand offsets below `nbytes`, evenly spread without a period."""
    return [int(index * _GOLDEN % 1 * nbytes) for index in range(_SAMPLES)]


def node_shares(fd: int, begin: int, end: int) -> dict[int, float]:
    """Return the share of a memory file's bytes begin..end - 1 on each node, from a sample.

    All bytes must be allocated, and `begin` must be the start of a page. Empty if the kernel does
    not report it.
    """
    nbytes = end - begin
    pages: dict[int, int] = {}
    try:
        with mmap.mmap(fd, nbytes, offset=begin) as mapping:
            for offset in sample_offsets(nbytes):
                mapping[offset]  # maps the page into this process
            pointer = ctypes.c_char.from_buffer(mapping)
            address = f"{ctypes.addressof(pointer):08x}"
            del pointer  # the mapping cannot be closed while it exists
            with _MAPS.open(encoding="utf-8", errors="replace") as lines:
                maps_line = next((line for line in lines if line.startswith(f"{address} ")), "")
    except (OSError, ValueError):
        return {}
    for word in maps_line.split():
        name, _, count = word.partition("=")
        if name[:1] == "N" and name[1:].isdecimal() and count.isdecimal():
            pages[int(name[1:])] = int(count)
    return {node: count / sum(pages.values()) for node, count in sorted(pages.items())}


def describe_shares(shares: Mapping[int, float]) -> str:
    """Return the shares as text, such as "75 % on node 0, 25 % on node 1"."""
    return ", ".join(f"{100 * share:.0f} % on node {node}" for node, share in shares.items())
