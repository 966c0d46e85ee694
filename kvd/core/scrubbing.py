"""Which lane wipes what, where the setting `scrub` says that freed bytes are zeroed.

Any lane can: all of them map the pool. The host's does where it is up, for the others have
a device to serve.
"""

from kvd.core.effects import Effect, ToLane
from kvd.core.lanes import Lane
from kvd.core.state import BrokerState
from kvd.link import Wipe, Wiped
from kvd.state.pool import Pool
from kvd_proto.arrays import IntArray
from kvd_proto.devices import HOST


class Scrubbing:
    """Decisions about soil over the shared state."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def work(self) -> list[Effect]:
        """Keep a lane supplied; not one that ends, for the next daemon wipes what is left."""
        pool, lane = self._pool, self._lane
        if pool is None or lane is None or self._state.stopping:
            return []
        effects: list[Effect] = []
        while (piece := pool.next_piece(lane.device)) is not None:
            wipe = Wipe(
                number=piece.number,
                begins=IntArray.of((begin for begin, _ in piece.runs), "u8"),
                ends=IntArray.of((end for _, end in piece.runs), "u8"),
            )
            effects.append(ToLane(lane.device, wipe))
        return effects

    def wiped(self, message: Wiped) -> None:
        """A lane has done it."""
        if self._pool is not None:
            self._pool.wiped(message.number)

    def lane_lost(self, device: str) -> None:
        """A lane's process has ended: the next one does again what it may not have done."""
        if self._pool is not None and self._pool.scrubber is not None:
            self._pool.scrubber.lane_lost(device)

    @property
    def _pool(self) -> Pool | None:
        namespaces = self._state.namespaces
        return None if namespaces is None else namespaces.pool

    @property
    def _lane(self) -> Lane | None:
        up = [lane for lane in self._state.lanes.values() if lane.up]
        return next((lane for lane in up if lane.device == HOST), up[0] if up else None)

    def __repr__(self) -> str:
        return f"<Scrubbing of {self._pool!r}>"
