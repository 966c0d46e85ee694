"""Memory is taken from the nodes of the GPUs: on machines that are described, and on this one."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvd.broker.effects import OpenPool
from kvd.machine import numa
from kvd.machine.numa import Node, gpu_nodes, node_shares, parse_cpu_list, run_on
from kvd.server import pool_memory
from kvd.server.pool_memory import PoolMemory
from tests.layouts import flat_layout
from tests.nodes import describe, device
from tests.waiting import PATIENCE

MIB = 2**20


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where a machine may be described."""
    monkeypatch.setattr(numa, "SYSFS", tmp_path)
    monkeypatch.setattr(numa, "GPUS", tmp_path / "gpus")
    return tmp_path


ONE, OTHER, THIRD = "0000:17:00.0", "0000:65:00.0", "0000:ca:00.0"


@pytest.mark.parametrize(
    ("gpus", "online", "allowed", "expected"),
    [
        ({}, "0-2", range(9), []),
        ({ONE: "1"}, "0-2", range(9), [(1, {4, 5, 6, 7})]),
        (
            {THIRD: "1", OTHER: "0", ONE: "1"},
            "0-2",
            {0, 8, 5},
            [(1, {5}), (0, {0, 8}), (1, {5})],
        ),
        ({ONE: "1", OTHER: "0"}, "0-2", range(4), [(0, {0, 1, 2, 3})]),  # bound to node 0
        ({ONE: "1"}, "0", range(9), []),
        ({ONE: "-1", OTHER: "", THIRD: "2"}, "0-2", range(9), []),
    ],
    ids=["no GPU", "one", "three", "bound", "one node", "unknown"],
)
def test_the_nodes_of_gpus_are_those_that_the_kernel_names(
    machine: Path,
    gpus: dict[str, str],
    online: str,
    allowed: range | set[int],
    expected: list[tuple[int, set[int]]],
) -> None:
    """One for each GPU, in order of bus ids, whose node's processors may be used, of several."""
    describe(machine, gpus, online)
    gpu_list = gpu_nodes(set(allowed))
    assert [(gpu.node.number, set(gpu.node.cpus)) for gpu in gpu_list] == expected
    if len(expected) == len(gpus):
        assert [gpu.device for gpu in gpu_list] == [device(bus) for bus in sorted(gpus)]


def here() -> list[Node]:
    """The nodes of this machine on which this process may run."""
    allowed = os.sched_getaffinity(0)
    folders = Path("/sys/devices/system/node").glob("node[0-9]*")
    cpus = {
        int(folder.name[4:]): parse_cpu_list((folder / "cpulist").read_text()) & allowed
        for folder in folders
    }
    return [Node(number, frozenset(some)) for number, some in cpus.items() if some]


def test_memory_lies_where_the_thread_ran_that_allocated_it() -> None:
    """On every node of this machine: the kernel takes pages of a memory file from there."""
    if not Path("/proc/self/numa_maps").exists() or not here():
        pytest.skip("this kernel knows no NUMA nodes (/proc/self/numa_maps)")
    before = os.sched_getaffinity(0)
    try:
        for node in here():
            run_on(node)
            fd = os.memfd_create("kvd-test")
            os.ftruncate(fd, 2 * MIB)
            os.posix_fallocate(fd, MIB, MIB)
            assert node_shares(fd, MIB, 2 * MIB) == {node.number: 1.0}
            assert os.fstat(fd).st_blocks * 512 == MIB  # what was not asked for was not touched
            os.close(fd)
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture
def two_nodes(machine: Path) -> list[set[int]]:
    """A machine with GPUs at two nodes, which have one of this machine's processors each."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("a thread moves between two processors; this process may use one")
    describe(machine, {ONE: "0", OTHER: "1", THIRD: "1"})
    for number in (0, 1):
        file = machine / f"devices/system/node/node{number}/cpulist"
        file.write_text(f"{cpus[number]}\n", "ascii")
    return [{cpus[0]}, {cpus[1]}]


def allocated(pool: PoolMemory) -> PoolMemory:
    """The pool, once its thread has allocated all of it."""
    done = threading.Event()
    pool.start(lambda: done.set() if pool.ready else None)
    assert done.wait(PATIENCE)
    pool.close()
    return pool


THIRD_OF_POOL = -(-8 * MIB // 3 // 4096) * 4096  # the first of three GPUs' part, in whole pages


def engine(page_bytes: Sequence[int], *gpus: str, replicated: bool = False) -> OpenPool:
    """Ranks on these GPUs, by bus id, with chunks of so many bytes each."""
    layouts = [flat_layout(nbytes, replicated=replicated) for nbytes in page_bytes]
    return OpenPool(tuple(layouts), tuple(device(bus) for bus in gpus))


@pytest.mark.parametrize(
    ("ranks", "nodes", "edge"),
    [
        (None, (0, 1), THIRD_OF_POOL),
        (engine((4096,) * 3, THIRD, OTHER, ONE, replicated=True), (0, 1), THIRD_OF_POOL),
        (engine((4096,), "no bus"), (0, 1), THIRD_OF_POOL),
        (engine((4096, 3 * 4096), ONE, THIRD), (0, 1), 2 * MIB),
        (engine((4096,) * 2, THIRD, ONE), (1, 0), 4 * MIB),
    ],
    ids=["fixed size", "replicated", "unknown GPU", "two ranks", "in another order"],
)
def test_each_part_of_a_pool_is_taken_from_the_node_of_its_gpu(
    two_nodes: list[set[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: OpenPool | None,
    nodes: tuple[int, int],
    edge: int,
) -> None:
    """Equal parts by bus id, or the arenas of the engine that decides; no other thread is moved."""
    asked: dict[int, set[int]] = {}
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(pool_memory, "_STEP", MIB)
    monkeypatch.setattr(
        os, "posix_fallocate", lambda _fd, start, _n: asked.update({start: os.sched_getaffinity(0)})
    )
    allocated(PoolMemory(tmp_path / "pool", 8 * MIB, engine=ranks))
    asked.pop(8 * MIB)  # the trailer
    before_edge, behind = (two_nodes[number] for number in nodes)
    assert asked.keys() >= {0, edge}
    assert asked == {at: before_edge if at < edge else behind for at in asked}
    assert os.sched_getaffinity(0) == before


@pytest.mark.usefixtures("two_nodes")
def test_the_log_says_on_which_nodes_the_pool_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once it is allocated, with the remedy where parts lie elsewhere than their GPUs."""
    of_parts = iter([{0: 1.0}, {1: 0.7, 2: 0.3}, {1: 1.0}])
    monkeypatch.setattr(numa, "node_shares", lambda *_: next(of_parts))
    placement = allocated(PoolMemory(tmp_path / "pool", 30 * MIB)).placement
    assert placement is not None
    assert placement.level == "warning"
    assert "57 % on node 1" in placement.text
    assert "; 10 % of it is on another node" in placement.text
