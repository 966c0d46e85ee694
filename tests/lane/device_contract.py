"""The conformance suite of device backends: inherit `DeviceContract` and give it a `Rig`.

A rig makes the backend and reaches all memory behind its back, so that a
backend that moves nothing, or moves to the wrong place, cannot agree with itself.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvd.errors import ImportFailed, LaneError
from kvd.lane.devices.device import Device, Direction, Finished, MemoryId, Transfer
from kvd_proto.expand import Copies
from kvd_proto.messages import Handle
from tests.lane.support import Memory
from tests.waiting import PATIENCE

Bytes = npt.NDArray[np.uint8]
Run = tuple[int, int, int, int]  # storage, tensor offset, arena offset, bytes


@dataclass(frozen=True)
class Source:
    """A worker's memory as it comes with a registration."""

    handles: tuple[Handle, ...]
    descriptors: Sequence[int]


class Rig(ABC):
    """A backend with a pool, and raw access to the pool and to workers' memory."""

    device: Device
    pool: Memory

    @abstractmethod
    def make_worker(self, sizes: Sequence[int]) -> Source:
        """Memory of a new worker."""

    @abstractmethod
    def spoil(self, source: Source) -> Source:
        """The same with a handle, not the first, that names nothing."""

    @abstractmethod
    def get(self, source: Source, storage: int, offset: int, nbytes: int) -> Bytes:
        """A copy of a worker's bytes."""

    @abstractmethod
    def put(self, source: Source, storage: int, offset: int, data: Bytes) -> None:
        """Write a worker's bytes."""

    @abstractmethod
    def close(self) -> None:
        """Let go of everything."""

    def attach(self, sizes: Sequence[int]) -> tuple[MemoryId, Source]:
        """A worker with these storages, mapped."""
        source = self.make_worker(sizes)
        return self.device.import_memory(source.handles, sizes, source.descriptors), source

    def get_pool(self, offset: int, nbytes: int) -> Bytes:
        """A copy of the pool's bytes, through a mapping of the tests' own."""
        return self.pool.bytes[offset : offset + nbytes].copy()

    def put_pool(self, offset: int, data: Bytes) -> None:
        """Write the pool's bytes."""
        self.pool.bytes[offset : offset + len(data)] = data


def transfer(
    number: int, memory: MemoryId, direction: Direction, runs: Sequence[Run], pool_base: int = 0
) -> Transfer:
    """A transfer of these runs."""
    columns = np.array(runs, dtype=np.int64).reshape(-1, 4).T
    copies = Copies(columns[0].astype(np.int32), columns[1], columns[2], columns[3])
    return Transfer(number, memory, direction, pool_base, copies, int(columns[3].sum()))


def drain(device: Device, seconds: float = PATIENCE) -> dict[int, Finished]:
    """Look until nothing is in flight; what has finished, by number."""
    finished: dict[int, Finished] = {}
    deadline = time.monotonic() + seconds
    while device.in_flight:
        for item in device.progress():
            assert item.transfer.job not in finished
            finished[item.transfer.job] = item
        assert time.monotonic() < deadline, "the device does not finish"
    return finished


def pattern(nbytes: int, seed: int) -> Bytes:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class DeviceContract:
    """Inherit, and define a `rig` fixture with a pool of at least 1 MiB."""

    SIZES = (65536, 32768)

    def test_a_store_moves_exactly_its_runs(self, rig: Rig) -> None:
        """Bytes arrive where the runs say, relative to the pool base, and nowhere else."""
        memory, source = rig.attach(self.SIZES)
        data = [pattern(size, seed) for seed, size in enumerate(self.SIZES)]
        for storage, block in enumerate(data):
            rig.put(source, storage, 0, block)
        rig.put_pool(0, np.full(2**20, 0xAB, np.uint8))
        runs = [(0, 4096, 0, 4096), (1, 100, 9000, 7), (0, 0, 20000, 1)]
        rig.device.submit(transfer(1, memory, Direction.STORE, runs, pool_base=512))
        done = drain(rig.device)
        assert (done[1].nbytes, done[1].error) == (4104, "")
        wanted = np.full(2**20, 0xAB, np.uint8)
        for storage, offset, at, size in runs:
            wanted[512 + at : 512 + at + size] = data[storage][offset : offset + size]
        np.testing.assert_array_equal(rig.get_pool(0, 2**20), wanted)

    def test_a_load_moves_exactly_its_runs(self, rig: Rig) -> None:
        """Pool bytes arrive in the worker's memory, and its other bytes stay poisoned."""
        memory, source = rig.attach(self.SIZES)
        pool = pattern(2**20, 3)
        rig.put_pool(0, pool)
        for storage, size in enumerate(self.SIZES):
            rig.put(source, storage, 0, np.full(size, 0xEE, np.uint8))
        runs = [(1, 0, 4096, 4096), (0, 65535, 50, 1), (0, 8, 60, 24)]
        rig.device.submit(transfer(1, memory, Direction.LOAD, runs, pool_base=4096))
        assert drain(rig.device)[1].nbytes == 4121
        for index, size in enumerate(self.SIZES):
            wanted = np.full(size, 0xEE, np.uint8)
            for storage, offset, at, length in runs:
                if storage == index:
                    wanted[offset : offset + length] = pool[4096 + at : 4096 + at + length]
            np.testing.assert_array_equal(rig.get(source, index, 0, size), wanted)

    def test_every_transfer_is_reported_once(self, rig: Rig) -> None:
        """Several in flight, both directions: each number comes back once, then nothing."""
        memory, _ = rig.attach(self.SIZES)
        for number in range(6):
            direction = Direction.STORE if number % 2 else Direction.LOAD
            run = (0, number * 1000, number * 2000, 1000)
            rig.device.submit(transfer(number, memory, direction, [run]))
        assert rig.device.in_flight == 6
        assert set(drain(rig.device)) == set(range(6))
        assert rig.device.progress() == []
        assert all(map(rig.device.has_room, Direction))

    def test_nothing_in_flight_has_room(self, rig: Rig) -> None:
        """An idle device takes work, and submitting does not wait for it."""
        memory, _ = rig.attach(self.SIZES)
        assert all(map(rig.device.has_room, Direction))
        rig.device.submit(transfer(1, memory, Direction.STORE, [(0, 0, 0, 10)]))
        assert rig.device.in_flight == 1
        drain(rig.device)

    def test_memory_in_use_is_not_released(self, rig: Rig) -> None:
        """Releasing memory with a transfer in flight is refused; after draining it works, once."""
        memory, _ = rig.attach(self.SIZES)
        rig.device.submit(transfer(1, memory, Direction.STORE, [(0, 0, 0, 10)]))
        with pytest.raises(LaneError, match="in flight"):
            rig.device.release_memory(memory)
        with pytest.raises(LaneError, match="in flight"):
            rig.device.close()
        drain(rig.device)
        rig.device.release_memory(memory)
        with pytest.raises(LaneError):
            rig.device.release_memory(memory)
        with pytest.raises(LaneError):
            rig.device.submit(transfer(2, memory, Direction.STORE, [(0, 0, 0, 10)]))

    def test_memory_smaller_than_promised_is_refused(self, rig: Rig) -> None:
        """A handle to less memory than the layout says is refused with the figures."""
        source = rig.make_worker(self.SIZES)
        sizes = (self.SIZES[0], 2**40)
        with pytest.raises(ImportFailed, match=r"\d+ bytes"):
            rig.device.import_memory(source.handles, sizes, source.descriptors)

    def test_a_handle_that_names_nothing_is_refused(self, rig: Rig) -> None:
        """One bad handle is refused, and the good one before it works afterwards."""
        source = rig.make_worker(self.SIZES)
        spoilt = rig.spoil(source)
        with pytest.raises(ImportFailed):
            rig.device.import_memory(spoilt.handles, self.SIZES, spoilt.descriptors)
        rig.device.import_memory(source.handles, self.SIZES, source.descriptors)

    def test_workers_do_not_see_each_other(self, rig: Rig) -> None:
        """The same offsets of two workers' memory are different bytes."""
        both = [rig.attach(self.SIZES) for _ in range(2)]
        for seed, (memory, source) in enumerate(both):
            rig.put(source, 0, 0, pattern(4096, seed))
            run = (0, 0, seed * 4096, 4096)
            rig.device.submit(transfer(seed, memory, Direction.STORE, [run]))
        drain(rig.device)
        for seed in range(2):
            np.testing.assert_array_equal(rig.get_pool(seed * 4096, 4096), pattern(4096, seed))

    @settings(
        max_examples=30,
        deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,  # examples share the rig
            HealthCheck.differing_executors,  # every backend's class runs them
        ],
    )
    @given(
        pieces=st.lists(
            st.tuples(st.integers(0, 1), st.integers(0, 7), st.integers(1, 4096)),
            min_size=1,
            max_size=8,
            unique_by=lambda piece: piece[:2],
        ),
        seed=st.integers(0, 1000),
    )
    def test_round_trips(self, rig: Rig, pieces: list[tuple[int, int, int]], seed: int) -> None:
        """Whatever is stored comes back into other memory, for any runs."""
        memory, source = rig.attach(self.SIZES)
        other_memory, target = rig.attach(self.SIZES)
        data = [pattern(size, seed + index) for index, size in enumerate(self.SIZES)]
        for index, size in enumerate(self.SIZES):
            rig.put(source, index, 0, data[index])
            rig.put(target, index, 0, np.full(size, 0xEE, np.uint8))
        rig.put_pool(0, np.full(2**20, 0xAB, np.uint8))
        runs = [
            (storage, place * 4096, number * 5000, size)
            for number, (storage, place, size) in enumerate(pieces)
        ]
        rig.device.submit(transfer(1, memory, Direction.STORE, runs))
        drain(rig.device)
        rig.device.submit(transfer(2, other_memory, Direction.LOAD, runs))
        drain(rig.device)
        for index, size in enumerate(self.SIZES):
            wanted = np.full(size, 0xEE, np.uint8)
            for storage, offset, _, length in runs:
                if storage == index:
                    wanted[offset : offset + length] = data[index][offset : offset + length]
            np.testing.assert_array_equal(rig.get(target, index, 0, size), wanted)
        rig.device.release_memory(memory)
        rig.device.release_memory(other_memory)
