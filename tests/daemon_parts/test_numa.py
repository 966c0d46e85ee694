"""Memory is taken from the nodes of the GPUs: on machines that are described, and on this one."""

import os
from pathlib import Path

import pytest

from kvd.daemon import memory
from kvd.daemon.memory import PoolMemory
from kvd.machine import numa
from kvd.machine.numa import Node, gpu_nodes, numbers, run_on, samples, shares_of
from tests.nodes import describe

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
        ({ONE: "1", OTHER: "0", THIRD: "1"}, "0-2", {0, 8, 5}, [(0, {0, 8}), (1, {5})]),
        ({ONE: "1", OTHER: "0"}, "0-2", range(4), [(0, {0, 1, 2, 3})]),  # bound to node 0
        ({ONE: "1"}, "0", range(9), []),
        ({ONE: "-1", OTHER: "", THIRD: "2"}, "0-2", range(9), []),
    ],
    ids=["no GPU", "one", "three", "bound", "one node", "not known"],
)
def test_the_nodes_of_gpus_are_those_that_the_kernel_names(
    machine: Path,
    gpus: dict[str, str],
    online: str,
    allowed: range | set[int],
    expected: list[tuple[int, set[int]]],
) -> None:
    """Only nodes of which processors may be used count, and only where there is a choice."""
    describe(machine, gpus, online)
    found = gpu_nodes(set(allowed))
    assert [(node.number, set(node.cpus)) for node in found] == expected


def test_lists_of_the_kernel() -> None:
    """Ranges and single numbers, in any number."""
    assert numbers("0-2,5,7-8\n") == {0, 1, 2, 5, 7, 8}
    assert numbers("\n") == set()
    with pytest.raises(ValueError, match="invalid literal"):
        numbers("many")


@pytest.mark.parametrize("stripe", [16 * MIB, 64 * MIB, 2**30])
def test_samples_of_a_pool_are_in_step_with_no_stripes(stripe: int) -> None:
    """A pool that is divided among two nodes is seen as that."""
    places = samples(2**40)
    assert len(set(places)) == len(places)
    assert all(0 <= place < 2**40 for place in places)
    even = sum(place // stripe % 2 for place in places) / len(places)
    assert even == pytest.approx(0.5, abs=0.03)


def here() -> list[Node]:
    """The nodes of this machine on which this process may run."""
    allowed = os.sched_getaffinity(0)
    folders = Path("/sys/devices/system/node").glob("node[0-9]*")
    found = [
        Node(int(folder.name[4:]), frozenset(numbers((folder / "cpulist").read_text()) & allowed))
        for folder in folders
    ]
    return [node for node in found if node.cpus]


def test_memory_lies_where_the_thread_ran_that_allocated_it() -> None:
    """On every node of this machine: the kernel takes pages of a memory file from there."""
    if not Path("/proc/self/numa_maps").exists() or not here():
        pytest.skip("this kernel knows no NUMA nodes (/proc/self/numa_maps)")
    before = os.sched_getaffinity(0)
    try:
        for node in here():
            run_on(node)
            fd = os.memfd_create("kvd-test")
            os.ftruncate(fd, MIB)
            os.posix_fallocate(fd, 0, MIB)
            assert shares_of(fd, MIB) == {node.number: 1.0}
            os.close(fd)
    finally:
        os.sched_setaffinity(0, before)


@pytest.fixture
def two_nodes(machine: Path) -> list[set[int]]:
    """A machine with GPUs at two nodes, which have one of this machine's processors each."""
    cpus = sorted(os.sched_getaffinity(0))
    if len(cpus) < 2:
        pytest.skip("a thread moves between two processors; this process may use one")
    describe(machine, {ONE: "0", OTHER: "1"})
    for number in (0, 1):
        file = machine / f"devices/system/node/node{number}/cpulist"
        file.write_text(f"{cpus[number]}\n", "ascii")
    return [{cpus[0]}, {cpus[1]}]


def test_a_pool_is_divided_among_the_nodes_of_its_gpus(
    two_nodes: list[set[int]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of the pool are taken from each node in turn; no other thread is moved."""
    asked: dict[int, set[int]] = {}
    before = os.sched_getaffinity(0)
    monkeypatch.setattr(memory, "_STEP", MIB)
    monkeypatch.setattr(
        os, "posix_fallocate", lambda _fd, start, _n: asked.update({start: os.sched_getaffinity(0)})
    )
    pool = PoolMemory(tmp_path / "pool", 8 * MIB)
    pool.start(lambda: None)
    assert pool._thread is not None
    pool._thread.join()
    pool.close()
    asked.pop(8 * MIB)  # the trailer
    assert asked == {step * MIB: two_nodes[step % 2] for step in range(8)}
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize(
    ("shares", "level", "says"),
    [
        ({0: 0.6, 1: 0.4}, "info", "60 % on node 0, 40 % on node 1"),
        ({0: 0.5, 2: 0.5}, "warning", "50 % on node 2; the GPUs sit at node 0, node 1"),
        ({}, "info", "not known"),
    ],
)
def test_it_is_told_where_the_pool_lies(
    two_nodes: list[set[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    shares: dict[int, float],
    level: str,
    says: str,
) -> None:
    """Once it is allocated, with the remedy where it lies elsewhere than the GPUs."""
    del two_nodes
    monkeypatch.setattr(numa, "shares_of", lambda _fd, _nbytes: shares)
    pool = PoolMemory(tmp_path / "pool", MIB)
    pool.start(lambda: None)
    assert pool._thread is not None
    pool._thread.join()
    pool.close()
    assert pool.place is not None
    assert pool.place.level == level
    assert says in pool.place.text
