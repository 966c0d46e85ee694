"""Promotions: tiers fill slots with chunks that they keep."""

from collections.abc import Sequence

from kvd.cache.descriptions import Descriptions
from kvd.cache.directory import Refs
from kvd.cache.lending import Lending
from kvd.cache.slots import Slots
from kvd.cache.uses import Uses
from kvd.metrics.counts import ChunkCounts
from kvd_proto.directory import TIER_OWNER


class Promotions:
    """Begins and ends the promotions of one namespace."""

    def __init__(
        self,
        slots: Slots,
        lending: Lending,
        uses: Uses,
        counts: ChunkCounts,
        descriptions: Descriptions,
    ) -> None:
        self._slots = slots
        self._directory = slots.directory
        self._lending = lending
        self._uses = uses
        self._counts = counts
        self._descriptions = descriptions

    def begin(  # noqa: PLR0917 a promotion has these parts
        self,
        keys: Sequence[bytes],
        tier: str,
        now: float,
        seconds: float,
        most: int,
        usable: int | None = None,
    ) -> list[tuple[bytes, int, int]]:
        """Give up to `most` of these keys slots that a tier is to fill, a prompt's head first.

        Left out are keys that are here, or are being written, and those for which there is no
        room. What is not `done` within `seconds` is given up, by `expire`; `reset` gives all
        of them up. Such slots wait until `slots.revoked` or `slots.lane_lost` is called with the
        name of the tier's process, `tier`, which no lane has; nobody else is asked. While the pool
        is filled `usable` bytes of it can be used, and nothing is evicted.

        Returns:
            Key, slot and generation of each.
        """
        directory = self._directory
        missing = [key for key in dict.fromkeys(keys) if directory.find(key) < 0][:most]
        if not missing:
            return []
        slots = self._lending.room(len(missing), now, usable)
        found: list[tuple[bytes, int, int]] = []
        unused: list[int] = []
        for key, slot in zip(missing, slots, strict=False):
            if directory.place(key, slot, TIER_OWNER):
                found.append((key, slot, directory.generation(slot)))
            else:
                self._counts.index_full += 1
                unused.append(slot)
        self._slots.space.give(unused)
        begun = [slot for _, slot, _ in found]
        self._slots.fill(begun, tier, now + seconds, now)
        self._uses.mark(begun)
        return found

    def done(  # noqa: PLR0917 a chunk has these parts
        self,
        slot: int,
        generation: int,
        first: int,
        count: int,
        group: int,
        description: bytes = b"",
    ) -> bool:
        """A tier has filled a slot with these blocks, in the shares of all ranks: it is READY.

        False where it was given up meanwhile, or is now, because no chunk has such blocks.
        """
        directory = self._directory
        if slot not in self._slots.filling or directory.generation(slot) != generation:
            return False
        if not (first >= 0 and count > 0 and first + count <= directory.blocks_per_chunk):
            self._slots.give_up([slot])
            return False
        directory.fill(slot, self._slots.space.geometry.writers(slot), first, count, group)
        if description:
            self._descriptions.keep(slot, generation, description)
        self._slots.finish(slot)
        self._counts.promoted += 1
        if self._slots.demotable is not None:
            self._slots.demotable.promoted(slot)
        return True

    def give_up(self, refs: Refs) -> Refs:
        """Give up what a tier was to fill: those of these slots that it fills still.

        They are DRAINING until the tier has answered or is gone, see `begin`.
        """
        filling, generation = self._slots.filling, self._directory.generation
        there = [ref for ref in refs if ref[0] in filling and generation(ref[0]) == ref[1]]
        self._slots.give_up([slot for slot, _ in there])
        return there
