"""The keys of one namespace that engines want from tiers, one engine's after another's.

Each engine has a queue of its own, a prompt's head first, and `pop` takes from the queues in turn:
ten keys of one engine wait for ten of another, not for all of them.
"""

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kvd.broker.tiers.tier import Tier

MAX_REQUESTS = 65536
"""Keys of an engine that waits alone; of n that wait, the last one may have an n-th of them."""


class PromotionRequest(NamedTuple):
    """A key that engines want in memory.

    Attributes:
        key: of the chunk.
        engines: that want it; it stands in the queue of the first.
        since: monotonic seconds.
        tier: the shared tier that has said that it has the chunk.
    """

    key: bytes
    engines: frozenset[int]
    since: float
    tier: Tier | None = None

    def joined(self, other: "PromotionRequest | None") -> "PromotionRequest":
        """This one, for the engines of another request of the same key, too."""
        return self._replace(engines=self.engines | other.engines) if other else self


class PromotionRequests:
    """Requests of one namespace; the engine whose turn it is comes first in `_queues`."""

    def __init__(self) -> None:
        self._queues: OrderedDict[int, deque[PromotionRequest]] = OrderedDict()
        self._count = 0

    def extend(self, engine: int, keys: Sequence[bytes], now: float) -> int:
        """Append an engine's keys, as far as there is room.

        Returns:
            How many found no room.
        """
        queue = self._queues.get(engine, deque())
        engines = len(self._queues.keys() | {engine})
        accepted = keys[: max(0, MAX_REQUESTS // engines - len(queue))]
        if accepted:
            wanted_by = frozenset({engine})
            self._queues[engine] = queue
            queue.extend(PromotionRequest(key, wanted_by, now) for key in accepted)
            self._count += len(accepted)
        return len(keys) - len(accepted)

    def pop(self) -> PromotionRequest:
        """Take the next key of the engine whose turn it is; the turn passes to the next engine.

        Raises:
            KeyError: there is no request.
        """
        engine, queue = self._queues.popitem(last=False)
        request = queue.popleft()
        if queue:
            self._queues[engine] = queue
        self._count -= 1
        return request

    def put_back(self, requests: Iterable[PromotionRequest]) -> None:
        """Have these come next, in this order; also more than there is room for."""
        for request in reversed(list(requests)):
            engine = min(request.engines, default=-1)  # none: the tier was set aside meanwhile
            self._queues.setdefault(engine, deque()).appendleft(request)
            self._queues.move_to_end(engine, last=False)
            self._count += 1

    def clear(self) -> int:
        """Forget all.

        Returns:
            How many there were.
        """
        count, self._count = self._count, 0
        self._queues.clear()
        return count

    def __len__(self) -> int:
        return self._count

    def __repr__(self) -> str:
        return f"<PromotionRequests {self._count} of {len(self._queues)} engines>"
