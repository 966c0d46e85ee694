"""A broker made by hand at the other end of a tier service's link, with a pool and directories."""

import mmap
import os
import select
import socket
import threading
import time
import zlib
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
import numpy.typing as npt

from kvd.outcomes import Outcome
from kvd.tier.contract import TierBackend
from kvd.tier.service import TierService
from kvd.wire.tiering import (
    TIERING,
    BatchResult,
    Get,
    NamespaceOpened,
    OpenNamespace,
    Put,
    ScanResult,
    StopTier,
    TierPing,
    TierPong,
    TierReady,
)
from kvd_proto import descriptions
from kvd_proto.channel import Channel
from kvd_proto.directory import RECORD_DTYPE, DirectoryHeader, SlotState
from kvd_proto.jobs import IntArray
from kvd_proto.messages import Message
from tests.tier.areas import POISON
from tests.waiting import PATIENCE

M = TypeVar("M", bound=Message)
SLOTS = 16
SALT = b"salt-one"
SHARES = (4096, 1000)
RECORD_BYTES = 256  # of a description
ROOM = descriptions.max_description_bytes(RECORD_BYTES)


def content(key: bytes, salt: int = 0) -> bytes:
    """The bytes of a chunk's shares, one after the other."""
    seed = zlib.crc32(key + bytes((salt,)))
    return np.random.default_rng(seed).bytes(sum(SHARES))


def coverage(key: bytes) -> tuple[int, int, int]:
    """First block, count of blocks and group."""
    return key[-1] % 7, 1 + key[-1] % 5, key[0] % 3


def described(key: bytes) -> bytes:
    """What stands for the description of a chunk."""
    return b"of " + key


class Namespace:
    """A directory and descriptions that the test writes, and the slots' bytes."""

    def __init__(self, broker: "FakeBroker", name: bytes, base: int) -> None:
        header = DirectoryHeader.plan(SLOTS, name, b"b" * 16)
        self.fd = os.memfd_create("kvd-test-directory")
        os.ftruncate(self.fd, header.total_bytes)
        memory = mmap.mmap(self.fd, header.total_bytes)
        packed = header.pack()
        memory[: len(packed)] = packed
        self.records: npt.NDArray[Any] = np.frombuffer(
            memory, RECORD_DTYPE, SLOTS, header.records_offset
        )
        self.described = os.memfd_create("kvd-test-descriptions")
        os.pwrite(self.described, descriptions.pack_header(RECORD_BYTES), 0)
        self.broker, self.name = broker, name
        self.bases = (base, base + SLOTS * SHARES[0])
        self.generation = 0

    def set(self, slot: int, state: SlotState, key: bytes = b"", generation: int = 0) -> int:
        """Write a slot's record; its generation, a new one where none is given."""
        if not generation:
            self.generation += 1
            generation = self.generation
        row = self.records[slot : slot + 1]
        row["generation"], row["key_len"], row["key"] = generation, len(key), key.ljust(48, b"\0")
        row["state"] = int(state)
        return generation

    def store(self, slot: int, key: bytes, *, salt: int = 0) -> int:
        """Make a chunk READY, with its bytes and description; its generation."""
        self.set(slot, SlotState.FREE)
        self.write(slot, content(key, salt))
        generation = self.set(slot, SlotState.READY, key)
        record = descriptions.pack_record(slot, generation, described(key))
        os.pwrite(self.described, record, descriptions.record_offset(slot, RECORD_BYTES))
        return generation

    def expect(self, slot: int, key: bytes) -> int:
        """Make a slot WRITING, with other bytes in it; its generation."""
        self.write(slot, bytes((POISON,)) * sum(SHARES))
        return self.set(slot, SlotState.WRITING, key)

    def write(self, slot: int, whole: bytes) -> None:
        """Set a slot's bytes."""
        at = 0
        for base, size in zip(self.bases, SHARES, strict=True):
            begin = base + slot * size
            self.broker.pool[begin : begin + size] = whole[at : at + size]
            at += size

    def read(self, slot: int) -> bytes:
        """A slot's bytes."""
        return b"".join(
            bytes(self.broker.pool[base + slot * size : base + (slot + 1) * size])
            for base, size in zip(self.bases, SHARES, strict=True)
        )

    def order(self, salt: bytes = SALT) -> OpenNamespace:
        """What a tier is told of it."""
        return OpenNamespace(
            namespace=self.name,
            salt=salt,
            reset=False,
            slot_bytes=SHARES,
            arena_bases=self.bases,
            num_slots=SLOTS,
            description_bytes=ROOM,
        )

    def open(self, salt: bytes = SALT) -> bytes:
        """Have it opened and wait for that; the salt that holds."""
        self.broker.send(self.order(salt), (self.fd, self.described))
        while (opened := self.broker.wait_for(NamespaceOpened)).namespace != self.name:
            pass  # of another's reset
        return opened.salt

    def put(
        self, number: int, rows: Sequence[tuple[bytes, int, int]], deadline_ms: int = 60_000
    ) -> Put:
        """An order for keys, each with slot and generation."""
        keys, slots, generations = zip(*rows, strict=True) if rows else ((), (), ())
        first, count, groups = (
            IntArray.of([coverage(key)[i] for key in keys], "u2") for i in range(3)
        )
        return Put(
            number=number,
            namespace=self.name,
            keys=keys,
            slots=IntArray.of(slots, "u4"),
            generations=IntArray.of(generations, "u8"),
            first=first,
            count=count,
            groups=groups,
            deadline_ms=deadline_ms,
        )

    def get(
        self, number: int, rows: Sequence[tuple[bytes, int, int]], deadline_ms: int = 60_000
    ) -> Get:
        """An order for keys, each with slot and generation."""
        keys, slots, generations = zip(*rows, strict=True) if rows else ((), (), ())
        return Get(
            number=number,
            namespace=self.name,
            keys=keys,
            slots=IntArray.of(slots, "u4"),
            generations=IntArray.of(generations, "u8"),
            deadline_ms=deadline_ms,
        )

    def close(self) -> None:
        """Close the files."""
        os.close(self.fd)
        os.close(self.described)


class FakeBroker:
    """One end of a link whose other end a service has, in a thread.

    Args:
        tier: the service's backend.

    Attributes:
        others: messages that nobody has waited for yet.
    """

    def __init__(self, tier: TierBackend) -> None:
        self.pool = memoryview(mmap.mmap(-1, 2 * SLOTS * sum(SHARES)))
        ours, theirs = socket.socketpair(socket.AF_UNIX)
        self.link = Channel(ours, b"ROUTER")
        self.others: list[Message] = []
        self.spaces = [
            Namespace(self, bytes((65 + i,)) * 16, i * SLOTS * sum(SHARES)) for i in range(2)
        ]
        self.service = TierService(Channel(theirs), tier, self.pool, "tier 0 (test)")
        self._thread = threading.Thread(target=self.service.run)
        self._thread.start()

    def send(self, message: Message, fds: Sequence[int] = ()) -> None:
        """Tell the tier."""
        self.link.send(TIERING.encode(message), fds)

    def wait_for(self, kind: type[M]) -> M:
        """The first message of this kind; others are kept."""
        end = time.monotonic() + PATIENCE
        while True:
            for i, message in enumerate(self.others):
                if isinstance(message, kind):
                    del self.others[i]
                    return message
            assert select.select([self.link], [], [], max(0.0, end - time.monotonic()))[0], (
                f"no {kind.__name__} after {PATIENCE:g} s, but {self.others}"
            )
            messages = [TIERING.decode(frame)[1] for frame, _ in self.link.receive_all()]
            self.others.extend(messages)

    def done(self, order: Message) -> BatchResult:
        """Give an order and wait for its end."""
        self.send(order)
        return self.wait_for(BatchResult)

    def outcomes(self, order: Message) -> list[Outcome]:
        """Of each chunk of an order."""
        return [Outcome(value) for value in self.done(order).outcomes.tolist()]

    def held(self, name: bytes = b"") -> dict[bytes, tuple[int, int, int]]:
        """What a scan tells, to its end; that of one namespace, or the next."""
        found: dict[bytes, tuple[int, int, int]] = {}
        while True:
            held = self.wait_for(ScanResult)
            if name not in {b"", held.namespace}:
                continue
            columns = held.first.tolist(), held.count.tolist(), held.groups.tolist()
            found |= dict(zip(held.keys, zip(*columns, strict=True), strict=True))
            if held.last:
                return found

    def pong(self) -> TierPong:
        """The answer to a ping."""
        self.send(TierPing())
        return self.wait_for(TierPong)

    def stop(self) -> None:
        """Have it end, and wait for that."""
        self.send(StopTier())
        self.join()

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        self.ready = self.wait_for(TierReady)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.link.close()
        self.join()
        for space in self.spaces:
            space.close()
