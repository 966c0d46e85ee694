"""A namespace's slots and directory, as a tier's process sees them."""

import mmap
import os
import weakref
from collections.abc import Sequence

from kvd.errors import TierError
from kvd.tier.contract import Space
from kvd.tier.seal import HEAD_BYTES
from kvd.wire.tiering import OpenSpace
from kvd_proto.descriptions import DescriptionsView
from kvd_proto.directory import DirectoryView, SlotState
from kvd_proto.errors import DirectoryError


class Place:
    """A namespace in the pool: which bytes a slot has, and what the directory says of it.

    What is mapped goes with the last reference: threads may still look while it is closed.

    Args:
        order: the broker's.
        fds: its directory and, where they are, its descriptions; taken over.
        pool: all of it.

    Attributes:
        order: the broker's.
        asked: the space with the epoch that the broker named last.
        space: the same with the epoch that holds; None while the backend has not begun it, and
            once it is closed.
        answered: the broker was told that it has begun.

    Raises:
        TierError: it does not lie in the pool, or the descriptors are not what they should be.
    """

    def __init__(self, order: OpenSpace, fds: Sequence[int], pool: memoryview) -> None:
        for fd in fds:
            weakref.finalize(self, os.close, fd)
        bases, sizes = order.arena_bases, order.slot_bytes
        ends = [base + size * order.num_slots for base, size in zip(bases, sizes, strict=False)]
        if len(bases) != len(sizes) or not ends or max(ends) > len(pool) or min(sizes) < 1:
            raise TierError(
                f"{order.num_slots} slots of {sizes} bytes from {bases} do not lie inside the pool"
                f" of {len(pool)} bytes"
            )
        if not 1 <= len(fds) <= 2:
            raise TierError(f"a directory and perhaps descriptions are needed, {len(fds)} came")
        try:
            size = os.fstat(fds[0]).st_size
            self._directory = DirectoryView(mmap.mmap(fds[0], size, prot=mmap.PROT_READ))
        except (OSError, ValueError, DirectoryError) as error:
            raise TierError(f"the directory cannot be used: {error}") from error
        if self._directory.num_slots < order.num_slots:
            raise TierError(
                f"a directory of {self._directory.num_slots} slots for {order.num_slots}"
            )
        self._descriptions = DescriptionsView(fds[1]) if len(fds) > 1 else None
        self._pool = pool
        self.order = order
        head_bytes = HEAD_BYTES + order.description_bytes
        self.asked = Space(order.namespace, order.epoch, order.slot_bytes, head_bytes)
        self.space: Space | None = None
        self.answered = False

    def shares(self, slot: int) -> tuple[memoryview, ...]:
        """The memory of a slot, one share for each arena."""
        return tuple(
            self._pool[base + slot * size : base + (slot + 1) * size]
            for base, size in zip(self.order.arena_bases, self.order.slot_bytes, strict=True)
        )

    def holds(self, slot: int, generation: int, state: SlotState, key: bytes) -> bool:
        """Whether a slot, any number, holds this chunk in this state."""
        return slot < self.order.num_slots and self._directory.holds(slot, generation, state, key)

    def description(self, slot: int, generation: int) -> bytes:
        """The description of the chunk in a slot; empty where it has none that fits."""
        if self._descriptions is None:
            return b""
        encoded = self._descriptions.read_encoded(slot, generation)
        return encoded if len(encoded) <= self.order.description_bytes else b""

    def __repr__(self) -> str:
        return f"<Place of {self.order.namespace.hex()[:8]}, {self.order.num_slots} slots>"
