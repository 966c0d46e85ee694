"""Lanes as the broker sees them, and writes that are being called back."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from kvd.client_names import Fields
from kvd.metrics.counts import LaneCounts
from kvd.wire.link import LanePong, Revoke
from kvd_proto.arrays import IntArray

NOTHING_SAID = LanePong(sequence=0, queued_jobs=0, bytes_in_flight=0, workers=0)
"""What a lane holds that has not answered yet."""


@dataclass(slots=True)
class Lane:
    """One device's lane: its process, and what it last said.

    on_demand: it came with the first worker of its device, and goes when it ends and none is left.
    pins: it can use the pool only where it has pinned it.
    failure: why the present process cannot serve, in its own words.
    past: what the processes before the present one have done.
    usable_bytes: how much of the pool it can copy, in the order of `kvd.pool.filling`.
    pool_error: why that will never be all of it.
    """

    device: str
    on_demand: bool = False
    failure: str = ""
    usable_bytes: int = 0
    pool_error: str = ""
    incarnation: int = 0
    up: bool = False
    pins: bool = False
    pid: int = 0
    endpoint: str = ""
    last_seen: float = 0.0
    last_error: str = ""
    pings: int = 0
    last_ping: float = 0.0
    killed: bool = False
    pong: LanePong = NOTHING_SAID
    past: LaneCounts = field(default_factory=LaneCounts)

    @property
    def state(self) -> str:
        """One of "up", "starting" (it never was up), "down" (it was lost or cannot start)."""
        if self.up:
            return "up"
        return "down" if self.last_error else "starting"

    @property
    def fields(self) -> Fields:
        """Identifiers of its present or last process, for events."""
        return {"lane": self.device, "incarnation": self.incarnation, "pid": self.pid}

    @property
    def counters(self) -> LaneCounts:
        """Totals over all incarnations."""
        return self.past + self.pong.counters

    def __repr__(self) -> str:
        state = "up" if self.up else "down"
        return f"<Lane {self.device}#{self.incarnation} {state}, {self.past.restarts} restarts>"


class Revocations:
    """Slots in DRAINING, and the lanes that have not yet said that nothing writes there."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[bytes, int, int], set[str]] = {}

    def start(
        self, namespace: bytes, slots: Iterable[tuple[int, int]], devices: Iterable[str]
    ) -> Revoke:
        """Ask `devices` about these (slot, generation) pairs; the message to send to each."""
        pairs = list(slots)
        names = set(devices)
        for slot, generation in pairs:
            self._waiting[(namespace, slot, generation)] = set(names)
        return Revoke(
            namespace=namespace,
            slots=IntArray.of((slot for slot, _ in pairs), "u4"),
            generations=IntArray.of((generation for _, generation in pairs), "u8"),
        )

    def answered(
        self, device: str, namespace: bytes, slots: IntArray, generations: IntArray
    ) -> list[tuple[int, int]]:
        """The pairs that no lane writes to any more, now that `device` has answered."""
        free = []
        for slot, generation in zip(
            slots.numpy().tolist(), generations.numpy().tolist(), strict=True
        ):
            waiting = self._waiting.get((namespace, slot, generation))
            if waiting is None:
                continue
            waiting.discard(device)
            if not waiting:
                del self._waiting[(namespace, slot, generation)]
                free.append((slot, generation))
        return free

    def lane_lost(self, device: str) -> dict[bytes, list[tuple[int, int]]]:
        """A dead lane writes nowhere: the pairs, by namespace, that it alone held up."""
        free: dict[bytes, list[tuple[int, int]]] = {}
        for (namespace, slot, generation), waiting in list(self._waiting.items()):
            waiting.discard(device)
            if not waiting:
                del self._waiting[(namespace, slot, generation)]
                free.setdefault(namespace, []).append((slot, generation))
        return free

    def __len__(self) -> int:
        return len(self._waiting)

    def __repr__(self) -> str:
        return f"<Revocations {len(self)} slots>"


def arrays(
    pairs: Iterable[tuple[int, int]],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint64]]:
    """(slot, generation) pairs as two arrays, u4 and u8."""
    listed = list(pairs)
    return (
        np.array([slot for slot, _ in listed], dtype=np.uint32),
        np.array([generation for _, generation in listed], dtype=np.uint64),
    )
