"""A run's bytes into its slots and out of them, and what becomes of the slots and the outcomes.

A run that fails as a whole is tried chunk by chunk: it may be one slot's fault. A slab whose files
somebody has removed or shortened is dropped with all that is in it.
"""

import errno
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from kvd.errors import TierError
from kvd.tier.contract import Chunk
from kvd.tier.disk import aligned, records
from kvd.tier.disk.aligned import Alignment
from kvd.tier.disk.growth import Growth
from kvd.tier.disk.records import TAIL_BYTES
from kvd.tier.disk.room import Room
from kvd.tier.disk.runs import Item
from kvd.tier.disk.slabs import Slab, SlabLost
from kvd.tier.disk.space import Space
from kvd.wire.tiering import Outcome

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class Answer:
    """Outcomes of a batch's chunks, and what went wrong with the medium.

    Attributes:
        deadline: monotonic seconds, after which nothing more is begun.
    """

    outcomes: list[Outcome]
    deadline: float
    errors: list[str] = field(default_factory=list)

    def set(self, run: Sequence[Item], outcome: Outcome) -> None:
        """The same outcome for all chunks of a run."""
        for item in run:
            self.outcomes[item.index] = outcome

    def take(self) -> list[Outcome]:
        """Return the outcomes.

        Raises:
            TierError: nothing of the batch went well, for an error of the medium.
        """
        if self.errors and Outcome.FAILED in self.outcomes:
            if all(outcome is Outcome.FAILED for outcome in self.outcomes):
                raise TierError(self.errors[0])
            _log.warning("%s (%d chunks of a batch)", self.errors[0], len(self.errors))
        return self.outcomes


class Moves:
    """Writes and reads runs; from several threads at a time.

    Args:
        directory: for the log.
        space: all slots.
        lock: that is taken around each call of `space`.
        growth: removes a slab's files.
        room: frees slots.
        alignment: what O_DIRECT asks for.
    """

    def __init__(  # noqa: PLR0917  # made once, by the tier
        self,
        directory: Path,
        space: Space,
        lock: threading.Lock,
        growth: Growth,
        room: Room,
        alignment: Alignment,
    ) -> None:
        self._directory, self._alignment = directory, alignment
        self._space, self._lock = space, lock
        self._growth, self._room = growth, room

    def write(self, run: list[Item], answer: Answer) -> None:
        """Write chunks into slots that were taken for them, and their records after them."""
        if time.monotonic() > answer.deadline:
            self._not_written(run, Outcome.LATE, answer)
            return
        slab, slot = run[0].slab, run[0].slot
        written = [item.record for item in run]
        try:
            slab.look()
            aligned.write(
                slab,
                slot,
                [item.chunk for item in run],
                [record.sequence for record in written],
                self._alignment,
            )
            slab.write_records(slot, written)
        except SlabLost as error:
            self._not_written(run, Outcome.FAILED, answer)
            self._lose(slab, error)
        except OSError as error:
            if len(run) > 1:  # it may be one slot's
                for item in run:
                    self.write([item], answer)
                return
            full = error.errno in (errno.ENOSPC, errno.EDQUOT)
            self._not_written(run, Outcome.FULL if full else Outcome.FAILED, answer)
            answer.errors.append(self._failed("write", run[0], error))
        else:
            self._written(run, answer)

    def _written(self, run: list[Item], answer: Answer) -> None:
        with self._lock:
            before = [self._space.written(item.slab, item.slot, item.record) for item in run]
            for item in run:
                is_kept = self._space.holds(item.slab, item.slot, item.record)
                answer.outcomes[item.index] = Outcome.OK if is_kept else Outcome.GONE
        self._room.free(before)

    def _not_written(self, run: list[Item], outcome: Outcome, answer: Answer) -> None:
        answer.set(run, outcome)
        self._room.free([(item.slab, item.slot) for item in run])

    def read(self, run: list[Item], answer: Answer) -> None:
        """Fill chunks from slots that are pinned."""
        if time.monotonic() > answer.deadline:
            answer.set(run, Outcome.LATE)
            return
        slab = run[0].slab
        try:
            slab.look()
            tails = aligned.read(slab, run[0].slot, [item.chunk for item in run], self._alignment)
        except SlabLost as error:
            self._lose(slab, error)
        except OSError as error:
            if len(run) > 1:
                for item in run:
                    self.read([item], answer)
                return
            # It would fail again: the chunk is computed and put anew, into another slot.
            answer.set(run, Outcome.FAILED)
            self._drop(run[0])
            answer.errors.append(self._failed("read", run[0], error))
        else:
            for item, tail in zip(run, tails, strict=True):
                answer.outcomes[item.index] = self._take_head(item, tail)

    def _take_head(self, item: Item, tail: memoryview) -> Outcome:
        end = TAIL_BYTES + item.record.head_bytes
        sequence = records.tail_sequence(tail, item.slab.identity)
        if sequence == item.record.sequence and end <= len(tail):
            item.chunk.head = bytes(tail[TAIL_BYTES:end])
            return Outcome.OK
        self._drop(item)
        # Another chunk's: the record is one that a power loss has kept from being erased.
        return Outcome.CORRUPT if sequence is None else Outcome.ABSENT

    def _drop(self, item: Item) -> None:
        with self._lock:
            self._space.lost(item.slab, item.slot)

    def _lose(self, slab: Slab, error: SlabLost) -> None:
        with self._lock:
            if slab.number not in self._space.slabs:
                return
            self._space.drop(slab)
        self._growth.discard(slab)
        _log.error(
            "disk:%s: %s: its chunks are lost, and its room is used anew; leave the files to kvd",
            self._directory,
            error,
        )

    def _failed(self, what: str, item: Item, error: OSError) -> str:
        return (
            f"disk:{self._directory}/{item.slab.number:06}.slab: slot {item.slot}:"
            f" {what}: {error.strerror or error}"
        )


def is_same(record: records.Record, chunk: Chunk) -> bool:
    """Whether a record is that of a chunk with these bytes and this coverage."""
    return record.shares_check == chunk.check and record.coverage == chunk.coverage
