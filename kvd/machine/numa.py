"""Where memory lies on a machine whose processors and memory are in several NUMA nodes.

A page comes from the node of the processor that asks for it first, or from another one where that
is full, unless somebody has ordered otherwise: numactl, systemd's NUMAPolicy, the option mpol of a
tmpfs. So memory is placed by allocating it on processors of the node that it is for. That keeps
such orders, and needs no right: containers may not set a memory policy.
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

GPUS = Path("/proc/driver/nvidia/gpus")  # a folder for each that can be seen from here, by bus id
SYSFS = Path("/sys")
_NODES = Path("devices/system/node")
_MAPS = Path("/proc/self/numa_maps")
_UUID = re.compile(r"^GPU UUID:\s+GPU-([0-9a-fA-F-]{36})\s*$", re.MULTILINE)
_SAMPLES = 1024
_GOLDEN = 0.6180339887498949  # the fractions of its multiples are as even as can be


@dataclass(frozen=True, slots=True)
class Node:
    """A node, and its processors that this process may use."""

    number: int
    cpus: frozenset[int]


def number_of_nodes() -> int:
    """How many nodes have memory or processors; 1 where the kernel does not say."""
    try:
        return len(numbers((SYSFS / _NODES / "online").read_text("ascii")))
    except (OSError, ValueError):
        return 1


@dataclass(frozen=True, slots=True)
class GpuNode:
    """A GPU's node. device: as lanes name the GPU, ``cuda:<32 hex digits>``; empty if unknown."""

    device: str
    node: Node


def has_gpus() -> bool:
    """Whether GPUs can be seen from here."""
    return any(GPUS.glob("*"))


def gpu_nodes(allowed: AbstractSet[int]) -> tuple[GpuNode, ...]:
    """Return the node of each GPU that can be seen from here, in order of the GPUs' bus ids.

    None on a machine of one node, without GPUs, or that does not say where they sit; and only
    nodes of which processors are `allowed`: a daemon may have been bound to a part of the machine.
    """
    if number_of_nodes() < 2:
        return ()
    nodes_of_gpus = []
    for gpu in sorted(GPUS.glob("*")):
        with contextlib.suppress(OSError, ValueError):
            place = SYSFS / "bus/pci/devices" / gpu.name / "numa_node"
            number = int(place.read_text("ascii"))  # -1 where it is not known: no such folder
            text = (SYSFS / _NODES / f"node{number}" / "cpulist").read_text("ascii")
            if cpus := numbers(text) & allowed:
                nodes_of_gpus.append(GpuNode(_device(gpu), Node(number, frozenset(cpus))))
    return tuple(nodes_of_gpus)


def _device(gpu: Path) -> str:
    """The device's name, from the line ``GPU UUID: GPU-01234567-89ab-…`` of the driver."""
    try:
        text = (gpu / "information").read_text("utf-8", "replace")
    except OSError:
        return ""
    uuid = _UUID.search(text)
    return "cuda:" + uuid[1].replace("-", "").lower() if uuid else ""


def run_on(node: Node) -> None:
    """Let the calling thread run on a node; where the system refuses, it stays where it is."""
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, node.cpus)


def numbers(text: str) -> set[int]:
    """What a list of the kernel's such as "0-3,8" names.

    Raises:
        ValueError: it is no such list.
    """
    named: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            named.update(range(int(first), int(last or first) + 1))
    return named


def samples(nbytes: int) -> list[int]:
    """A thousand places among so many bytes, spread evenly and in step with no pattern."""
    return [int(sample * _GOLDEN % 1 * nbytes) for sample in range(_SAMPLES)]


def shares_of(fd: int, begin: int, end: int) -> dict[int, float]:
    """By node: the share of bytes begin..end - 1 of a memory file there, from a thousand pages.

    All of them must be allocated, and `begin` be the start of a page. Empty where the kernel does
    not say.
    """
    nbytes = end - begin
    pages: dict[int, int] = {}
    try:
        with mmap.mmap(fd, nbytes, offset=begin) as mapping:
            for at in samples(nbytes):
                mapping[at]  # so the page is in this process's page table
            first = ctypes.c_char.from_buffer(mapping)
            address = f"{ctypes.addressof(first):08x}"
            del first  # the mapping ends here
            with _MAPS.open(encoding="utf-8", errors="replace") as lines:
                found = next((line for line in lines if line.startswith(f"{address} ")), "")
    except (OSError, ValueError):
        return {}
    for word in found.split():
        name, _, count = word.partition("=")
        if name[:1] == "N" and name[1:].isdecimal() and count.isdecimal():
            pages[int(name[1:])] = int(count)
    return {node: count / sum(pages.values()) for node, count in sorted(pages.items())}


def described(shares: Mapping[int, float]) -> str:
    """The same in words, such as "75 % on node 0, 25 % on node 1"."""
    return ", ".join(f"{100 * share:.0f} % on node {node}" for node, share in shares.items())
