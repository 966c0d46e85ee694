"""The messages of one scheduler's steps, made by hand; the slots that it was lent."""

import os
from dataclasses import dataclass, field

import numpy as np
from raw_session import Array, expect

from kvd_proto.codec import WIRE
from kvd_proto.directory import DirectoryView
from kvd_proto.jobs import IntArray
from kvd_proto.messages import Message, Pin, Step, Stepped

LEASE_MS = 60_000
KEYS_AT_ONCE = 4096
KEY_BYTES = 36  # a block hash and a group index


@dataclass(frozen=True, slots=True)
class Chunk:
    """A store that was begun."""

    key: bytes
    slot: int
    generation: int


@dataclass
class Steps:
    """Steps that are alike: so many stores begin, loads pin and unpin, chunks were of use.

    Args:
        directory: of the namespace, for what has become of the loans.
        stores: that a step begins.
        pins: loads of one chunk that a step begins; it ends as many of the step before.
        used: keys of requests that have finished.
        under_way: steps whose replies may be outstanding.
    """

    directory: DirectoryView
    stores: int = 0
    pins: int = 0
    used: int = 0
    under_way: int = 1
    begun: list[Chunk] = field(default_factory=list)
    """Stores of which nobody was told yet; whoever writes them takes them out."""
    ready: list[Chunk] = field(default_factory=list)
    """Chunks that are READY, for pins and uses."""
    loans: list[tuple[int, int]] = field(default_factory=list)
    """Slots and generations that are at hand."""
    _keys: list[bytes] = field(default_factory=list)
    _lease: int = 0
    _at: int = 0

    @property
    def wanted(self) -> int:
        """As a scheduler of this pace wants: twice what it uses until the reply has come."""
        return max(64, 2 * self.stores * self.under_way)

    @property
    def at_hand(self) -> int:
        """How many loans there are."""
        return len(self.loans)

    def next(self) -> Step:
        """The next step.

        Raises:
            RuntimeError: there are too few loans.
        """
        if len(self.loans) < self.stores:
            raise RuntimeError(f"{len(self.loans)} slots are lent, {self.stores} are needed")
        if len(self._keys) < self.stores:
            noise = os.urandom(KEYS_AT_ONCE * KEY_BYTES)  # unlike other processes' keys
            self._keys = [noise[i : i + KEY_BYTES] for i in range(0, len(noise), KEY_BYTES)]
        new = [Chunk(self._keys.pop(), *self.loans.pop()) for _ in range(self.stores)]
        self.begun += new
        pins = tuple(self._pin(chunk) for chunk in self._some(self.pins))
        return Step(
            keys=tuple(chunk.key for chunk in new),
            slots=IntArray.of([chunk.slot for chunk in new], "u4"),
            generations=IntArray.of([chunk.generation for chunk in new], "u8"),
            pins=pins,
            unpinned=tuple(pin.lease - self.pins for pin in pins if pin.lease > self.pins),
            used=tuple(chunk.key for chunk in self._some(self.used)),
            wanted=self.wanted,
        )

    def forget_lost(self) -> None:
        """Forget the loans that have ended."""
        self.loans[:] = [loan for loan in self.loans if self.directory.is_lent(*loan)]

    def took(self, frame: bytes) -> None:
        """Take the loans of a reply in."""
        self.lend(WIRE.decode(frame)[1])

    def lend(self, message: Message) -> None:
        """The same of a message."""
        reply = expect(message, Stepped)
        slots, generations = reply.slots.numpy().tolist(), reply.generations.numpy().tolist()
        self.loans += zip(slots, generations, strict=True)

    def _some(self, count: int) -> list[Chunk]:
        ready = self.ready
        self._at += count
        return [ready[(self._at + i) % len(ready)] for i in range(count)] if ready else []

    def _pin(self, chunk: Chunk) -> Pin:
        self._lease += 1
        return Pin(
            lease=self._lease,
            lease_ms=LEASE_MS,
            slots=IntArray.of([chunk.slot], "u4"),
            generations=IntArray.of([chunk.generation], "u8"),
        )


def places(chunks: list[Chunk]) -> tuple[Array, Array]:
    """Slots and generations of a job."""
    slots = np.array([chunk.slot for chunk in chunks], np.uint32)
    return slots, np.array([chunk.generation for chunk in chunks], np.uint64)
