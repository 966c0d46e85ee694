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
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from kvd.errors import ImportFailed, LaneError
from kvd.lane.device import CompletedTransfer, Device, Direction, MemoryId, Transfer
from kvd_proto.copies import Copies
from kvd_proto.messages import Handle
from tests.lane.support import Memory
from tests.waiting import PATIENCE

Bytes = npt.NDArray[np.uint8]
Run = tuple[int, int, int, int]  # storage, tensor offset, arena offset, bytes


@dataclass(frozen=True)
class Source:
    """A worker's memory as it comes with a registration; the rig knows where storages begin."""

    handles: tuple[Handle, ...]
    descriptors: Sequence[int]
    addresses: Sequence[int]


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

    def submit(
        self,
        number: int,
        memory: MemoryId,
        direction: Direction,
        runs: Sequence[Run],
        pool_base: int = 0,
    ) -> None:
        """Prepare these runs, and submit all in one transfer."""
        moves = self.device.prepare(memory, direction, pool_base, copies_of(runs))
        nbytes = sum(size for *_, size in runs)
        self.device.submit(Transfer(number, memory, direction, moves, 0, len(moves), nbytes))

    def move(self, memory: MemoryId, direction: Direction, runs: Sequence[Run]) -> None:
        """Move these runs, which must work, before returning."""
        self.submit(1, memory, direction, runs)
        assert drain(self.device)[1].error == ""

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


def copies_of(runs: Sequence[Run]) -> Copies:
    """These runs."""
    columns = np.ascontiguousarray(np.array(runs, dtype=np.int64).reshape(-1, 4).T)
    return Copies(columns[0].astype(np.int32), columns[1], columns[2], columns[3])


def drain(device: Device, seconds: float = PATIENCE) -> dict[int, CompletedTransfer]:
    """Look until nothing is in flight; what has finished, by number."""
    finished: dict[int, CompletedTransfer] = {}
    deadline = time.monotonic() + seconds
    while device.in_flight:
        late = time.monotonic() >= deadline  # before the look: a look that comes late counts, too
        for item in device.progress():
            assert item.transfer.job not in finished
            finished[item.transfer.job] = item
        assert not (late and device.in_flight), "the device does not finish"
    return finished


def pattern(nbytes: int, seed: int) -> Bytes:
    """Random bytes."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


class DeviceContract:
    """Inherit, and define a `rig` fixture with a pool of at least 1 MiB."""

    SIZES = (65536, 32768)

    def test_every_transfer_is_reported_once(self, rig: Rig) -> None:
        """Several in flight, both directions: each number comes back once; idle, it has room."""
        memory, _ = rig.attach(self.SIZES)
        assert all(map(rig.device.has_room, Direction))
        for number in range(6):
            direction = Direction.STORE if number % 2 else Direction.LOAD
            run = (0, number * 1000, number * 2000, 1000)
            rig.submit(number, memory, direction, [run])
        assert rig.device.in_flight == 6
        assert set(drain(rig.device)) == set(range(6))
        assert rig.device.progress() == []
        assert all(map(rig.device.has_room, Direction))

    def test_memory_in_use_is_not_released(self, rig: Rig) -> None:
        """Releasing memory with a transfer in flight is refused; after draining it works, once."""
        memory, _ = rig.attach(self.SIZES)
        rig.submit(1, memory, Direction.STORE, [(0, 0, 0, 10)])
        with pytest.raises(LaneError, match="in flight"):
            rig.device.release_memory(memory)
        with pytest.raises(LaneError, match="in flight"):
            rig.device.close()
        drain(rig.device)
        rig.device.release_memory(memory)
        with pytest.raises(LaneError):
            rig.device.release_memory(memory)
        with pytest.raises(LaneError):
            rig.submit(2, memory, Direction.STORE, [(0, 0, 0, 10)])

    def test_runs_are_given_in_pieces(self, rig: Rig) -> None:
        """Prepared once: no run is above a piece, `ends` counts bytes, each range moves its own."""
        rig.device.piece_bytes = dict.fromkeys(Direction, 5000)
        memory, source = rig.attach(self.SIZES)
        data = pattern(30_000, 1)
        rig.put(source, 0, 0, data)
        runs = [(0, 0, 100, 12_000), (0, 12_000, 70_000, 18_000)]
        moves = rig.device.prepare(memory, Direction.STORE, 4096, copies_of(runs))
        ends = [int(end) for end in moves.ends]
        sizes = np.diff([0, *ends])
        assert (ends[-1], len(ends)) == (30_000, len(moves))
        assert (sizes > 0).all()
        assert (sizes <= 5000).all()
        for begin in reversed(range(len(moves))):
            piece = (begin, begin + 1, int(sizes[begin]))
            rig.put_pool(0, np.zeros(2**17, np.uint8))
            rig.device.submit(Transfer(begin, memory, Direction.STORE, moves, *piece))
            assert drain(rig.device)[begin].error == ""
            moved = np.concatenate([rig.get_pool(4196, 12_000), rig.get_pool(74_096, 18_000)])
            begin_byte = ends[begin] - int(sizes[begin])
            expected = np.zeros(30_000, np.uint8)
            expected[begin_byte : ends[begin]] = data[begin_byte : ends[begin]]
            np.testing.assert_array_equal(moved, expected)

    def test_loads_arrive_in_the_order_of_their_pieces(self, rig: Rig) -> None:
        """What is reported is there, and all that was given before: a load's layers count on it."""
        memory, source = rig.attach(self.SIZES)
        count, size = 12, 4000
        data = pattern(count * size, 1)
        rig.put_pool(0, data)
        runs = [(0, n * size, (count - 1 - n) * size, size) for n in range(count)]
        expected = data.reshape(count, size)[::-1].reshape(-1)
        moves = rig.device.prepare(memory, Direction.LOAD, 0, copies_of(runs))
        given = pieces = moved = 0
        while given < len(moves):
            end, nbytes = moves.next_piece(given, size)
            rig.device.submit(Transfer(pieces, memory, Direction.LOAD, moves, given, end, nbytes))
            given, pieces = end, pieces + 1
        reported: list[int] = []
        deadline = time.monotonic() + PATIENCE
        while rig.device.in_flight:
            for item in rig.device.progress():
                assert item.error == ""
                reported.append(item.transfer.job)
                moved += item.transfer.nbytes
                np.testing.assert_array_equal(rig.get(source, 0, 0, moved), expected[:moved])
            assert time.monotonic() < deadline, "the device does not finish"
        assert reported == list(range(pieces))
        assert moved == len(data)

    def test_memory_that_is_not_as_promised_is_refused(self, rig: Rig) -> None:
        """Less than the layout says, with the figures, and a bad handle; a good one works then."""
        source = rig.make_worker(self.SIZES)
        sizes = (self.SIZES[0], 2**40)
        with pytest.raises(ImportFailed, match=r"\d+ bytes"):
            rig.device.import_memory(source.handles, sizes, source.descriptors)
        spoilt = rig.spoil(source)
        with pytest.raises(ImportFailed):
            rig.device.import_memory(spoilt.handles, self.SIZES, spoilt.descriptors)
        rig.device.import_memory(source.handles, self.SIZES, source.descriptors)

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
        skew=st.integers(0, 63),
        pool_base=st.sampled_from([0, 512, 65536]),
        seed=st.integers(0, 1000),
    )
    @example(pieces=[(0, 15, 4096), (1, 7, 4096), (0, 0, 1)], skew=0, pool_base=512, seed=1)
    def test_exactly_the_runs_are_moved(
        self, rig: Rig, pieces: list[tuple[int, int, int]], skew: int, pool_base: int, seed: int
    ) -> None:
        """What one worker stores another loads: where the runs say, and no other byte changes."""
        memory, source = rig.attach(self.SIZES)
        other_memory, target = rig.attach(self.SIZES)
        data = [pattern(size, seed + index) for index, size in enumerate(self.SIZES)]
        for index, size in enumerate(self.SIZES):
            rig.put(source, index, 0, data[index])
            rig.put(target, index, 0, np.full(size, 0xEE, np.uint8))
        rig.put_pool(0, np.full(2**20, 0xAB, np.uint8))
        runs = [
            (storage, place * 4096 + min(skew, 4096 - size), number * 5000 + skew % 7, size)
            for number, (storage, place, size) in enumerate(pieces)
        ]
        nbytes = sum(size for *_, size in pieces)
        pool = np.full(2**20, 0xAB, np.uint8)
        expected = [np.full(size, 0xEE, np.uint8) for size in self.SIZES]
        for storage, offset, at, size in runs:
            moved = data[storage][offset : offset + size]
            pool[pool_base + at : pool_base + at + size] = moved
            expected[storage][offset : offset + size] = moved
        for direction, worker in ((Direction.STORE, memory), (Direction.LOAD, other_memory)):
            rig.submit(1, worker, direction, runs, pool_base)
            done = drain(rig.device)[1]
            assert (done.arrived_bytes, done.error) == (nbytes, "")
            np.testing.assert_array_equal(rig.get_pool(0, 2**20), pool)
        for index, size in enumerate(self.SIZES):
            np.testing.assert_array_equal(rig.get(source, index, 0, size), data[index])
            np.testing.assert_array_equal(rig.get(target, index, 0, size), expected[index])
        rig.device.release_memory(memory)
        rig.device.release_memory(other_memory)
