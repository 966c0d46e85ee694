"""What a scheduler reads of the tiers below the daemon's memory, without a message."""

from kvd_client.arguments import check_blocks, check_key, whole
from kvd_client.decisions import NOT_BELOW
from kvd_client.scheduler_changes import SchedulerChanges
from kvd_proto.messages import MAX_KEY_BYTES, MAX_TIERS, TierInfo
from kvd_proto.tier_table import TierStatus


class SchedulerTiers(SchedulerChanges):
    """What a `Scheduler` knows of tiers; its arguments are that one's."""

    @property
    def tiers(self) -> tuple[TierInfo, ...]:
        """The tiers, in the order in which they are asked; empty where there are none.

        Also while the engine is not attached, and while a reset has no answer.
        """
        there = self._attachment
        return there.attached.tiers if there is not None and self._seeking is not None else ()

    def below(self, key: bytes, first: int = 0, count: int | None = None) -> int:
        """Return which tier has a chunk that `lookup` does not find; `seek` brings it up.

        From shared memory, and a hint as `lookup` is. The tier must have the blocks
        `first`..`first + count - 1` of the chunk; without a count, all from `first` on.

        Returns:
            The number of the first usable tier that has them, in `tiers`, also while they are on
            their way. `NOT_BELOW` (-1): none has. `UNKNOWN` (-2): a usable shared tier may have
            them, and `seek` asks it; when it has answered this is `NOT_BELOW`, or `lookup` says
            HIT_PENDING.
        """
        if key.__class__ is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            check_key(key)
        if first.__class__ is not int or first or count is not None:
            check_blocks(first, count)
        seeking = self._seeking
        if seeking is None:
            self._check_open()
            return NOT_BELOW
        return seeking.below(key, first, count)

    def tier_status(self, number: int) -> TierStatus | None:
        """Return whether a tier is usable, how fast promotions are, and how much of them waits.

        Args:
            number: of the tier, in `tiers`.

        Returns:
            None where there is none of this number now.
        """
        wanted = whole("number", number, 0, MAX_TIERS - 1)
        seeking = self._seeking
        return None if seeking is None else seeking.status(wanted)
