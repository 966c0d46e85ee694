"""The plainest index of KV events: the set of what was stored and not removed."""

from typing import Any, NamedTuple

from tests.events.wire import low64


class Block(NamedTuple):
    """What a publisher says that it holds."""

    medium: str
    group: int | None
    hash: int


class BlockSet:
    """What each topic says."""

    def __init__(self) -> None:
        self._held: dict[str, set[Block]] = {}

    def take(self, topic: str, batch: Any) -> None:
        """Take the events of one message, in order."""
        held = self._held.setdefault(topic, set())
        for event in batch.events:
            kind = type(event).__name__
            if kind == "AllBlocksCleared":
                held.clear()
                continue
            place = event.medium or "GPU", event.group_idx
            named = {Block(*place, low64(each)) for each in event.block_hashes}
            if kind == "BlockStored":
                held |= named
            else:
                held -= named

    def forget(self, topic: str) -> None:
        """Forget what a topic holds."""
        self._held.pop(topic, None)

    def held(self, topic: str) -> set[Block]:
        """What a topic says that it holds."""
        return set(self._held.get(topic, ()))

    def __repr__(self) -> str:
        counts = {topic: len(held) for topic, held in self._held.items()}
        return f"<BlockSet {counts}>"
