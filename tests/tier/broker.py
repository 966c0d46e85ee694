"""A broker made by hand at the other end of a tier service's link, with a pool and directories."""

import mmap
import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Self, TypeAlias, TypeVar

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
    TierPing,
    TierPong,
    TierReady,
)
from kvd_proto import descriptions
from kvd_proto.channel import Channel
from kvd_proto.directory import RECORD_DTYPE, DirectoryHeader, SlotState
from kvd_proto.jobs import IntArray
from kvd_proto.messages import Message
from tests.tier.areas import POISON, bytes_of, content, coverage_of
from tests.waiting import PATIENCE

M = TypeVar("M", bound=Message)
SLOTS = 16
SALT = b"salt-one"
SHARES = (4096, 1000)
RECORD_BYTES = 256  # of a description
Row: TypeAlias = tuple[bytes, int, int]
"""Key, slot and generation."""
ROOM = descriptions.max_description_bytes(RECORD_BYTES)


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
        self.write(slot, content(key, sum(SHARES), salt).tobytes())
        generation = self.set(slot, SlotState.READY, key)
        record = descriptions.pack_record(slot, generation, described(key))
        os.pwrite(self.described, record, descriptions.record_offset(slot, RECORD_BYTES))
        return generation

    def expect(self, slot: int, key: bytes) -> int:
        """Make a slot WRITING, with other bytes in it; its generation."""
        self.write(slot, bytes((POISON,)) * sum(SHARES))
        return self.set(slot, SlotState.WRITING, key)

    def store_all(self, keys: Sequence[bytes], first: int = 0) -> list[Row]:
        """Make chunks READY in the slots from the first on."""
        return [(key, slot, self.store(slot, key)) for slot, key in enumerate(keys, first)]

    def expect_all(self, keys: Sequence[bytes], first: int = 8) -> list[Row]:
        """Make the slots from the first on WRITING."""
        return [(key, slot, self.expect(slot, key)) for slot, key in enumerate(keys, first)]

    def shares(self, slot: int) -> list[memoryview]:
        """Where a slot's bytes lie."""
        begins = [base + slot * size for base, size in zip(self.bases, SHARES, strict=True)]
        return [self.broker.pool[b : b + n] for b, n in zip(begins, SHARES, strict=True)]

    def write(self, slot: int, whole: bytes) -> None:
        """Set a slot's bytes."""
        for share in self.shares(slot):
            share[:], whole = whole[: len(share)], whole[len(share) :]

    def read(self, slot: int) -> bytes:
        """A slot's bytes."""
        return bytes_of(self.shares(slot))

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

    def put(self, number: int, rows: Sequence[Row]) -> Put:
        """An order for chunks."""
        coverages = [coverage_of(key) for key, _, _ in rows]
        first, count, groups = (IntArray.of(each, "u2") for each in zip(*coverages, strict=True))
        order = self.get(number, rows)
        return Put(
            number=number,
            namespace=self.name,
            keys=order.keys,
            slots=order.slots,
            generations=order.generations,
            first=first,
            count=count,
            groups=groups,
            deadline_ms=order.deadline_ms,
        )

    def get(self, number: int, rows: Sequence[Row], deadline_ms: int = 60_000) -> Get:
        """An order for chunks."""
        keys, slots, generations = zip(*rows, strict=True)
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

    def scan(self, name: bytes = b"") -> dict[bytes, tuple[int, int, int]]:
        """What a scan tells, to its end; that of one namespace, or the next."""
        listed: dict[bytes, tuple[int, int, int]] = {}
        while True:
            scan = self.wait_for(ScanResult)
            if name not in {b"", scan.namespace}:
                continue
            columns = scan.first.tolist(), scan.count.tolist(), scan.groups.tolist()
            listed |= dict(zip(scan.keys, zip(*columns, strict=True), strict=True))
            if scan.last:
                return listed

    def pong(self) -> TierPong:
        """The answer to a ping."""
        self.send(TierPing())
        return self.wait_for(TierPong)

    def join(self) -> None:
        """Wait until it has ended."""
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        self.ready = self.wait_for(TierReady)
        return self

    def __exit__(self, *_: object) -> None:
        self.link.close()
        self.join()
        for space in self.spaces:
            space.close()
