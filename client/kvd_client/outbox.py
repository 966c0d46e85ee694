"""What a scheduler sends to the daemon: decisions as a `Step`, totals as a `Ping` once a second.

The outbox also remembers the stores and pins of a step until the daemon answers it; from then on
the directory shows their state.
"""

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvd_client.tickets import BlockRange, StoreAnswer
from kvd_proto.jobs import IntArray
from kvd_proto.messages import (
    MAX_FINISHED,
    MAX_KEYS,
    NO_ITEMS,
    NO_SLOTS,
    KvEvents,
    Lookups,
    Pin,
    Ping,
    Step,
)

MAX_DESCRIBED_BYTES = 4 * 2**20  # in a step, so that the largest step fits a message


class UnansweredStep(NamedTuple):
    """The slots that a step assigns to keys, with their new generations, until it is answered.

    pinned: slots of the chunks that the step pins.
    """

    keys: list[bytes]
    slots: list[int]
    generations: list[int]
    pinned: list[int]


class Outbox:
    """The decisions of one scheduler, in one attachment, that are not sent or not answered yet.

    For one thread at a time.

    Args:
        blocks_per_chunk: of the namespace.

    Attributes:
        keys: keys whose stores start in this step.
        started_stores: keys whose stores started in steps not answered yet; the value is the
            `keys` list of the step, whose identity tells steps apart.
        reassigned: the slots of these stores, with their new generations: a chunk that the
            directory has there under another generation is being replaced.
        step_of_pinned: slots of chunks pinned by steps not answered yet; the value is the
            `UnansweredStep.pinned` of the latest such step.
        oldest_at: `time.monotonic()` of the oldest item; meaningless if the outbox is empty.
    """

    def __init__(self, blocks_per_chunk: int) -> None:
        self._whole_chunk = (0, blocks_per_chunk)
        self.started_stores: dict[bytes, list[bytes]] = {}
        self.reassigned: dict[int, int] = {}
        self.step_of_pinned: dict[int, list[int]] = {}
        self._unanswered: dict[int, UnansweredStep] = {}  # by request id
        self.oldest_at = 0.0
        self._dropped: list[bytes] = []
        self._begin_step()

    def _begin_step(self) -> None:
        """Start collecting the next step."""
        self.keys: list[bytes] = []
        self._slots: list[int] = []
        self._generations: list[int] = []
        self._blocks: list[BlockRange] = []
        self._descriptions: list[bytes] = []
        self._described_bytes = 0
        self._dropped_next: list[bytes] = []
        self._leases_begun: list[Pin] = []
        self._pinned_slots: list[int] = []
        self._leases_ended: list[int] = []
        self._used: list[bytes] = []
        self._used_counts: list[int] = []
        self._prompt_counts: list[int] = []
        self._labels = bytearray()
        self._missed: list[bytes] = []
        self._unstored: list[bytes] = []
        self._sought: list[bytes] = []
        self._num_items = len(self._dropped)
        self._present = self._pending = self._not_yet = self._refused = 0

    # --------------------------------------------------------------------- add

    def has_room(self, num_items: int) -> bool:
        """Return whether so many more keys, chunks and leases of a request fit this step."""
        return self._num_items + num_items <= MAX_KEYS and len(self._used_counts) < MAX_FINISHED

    def has_description_room(self, nbytes: int) -> bool:
        """Return whether `nbytes` more of descriptions fit this step."""
        return self._described_bytes + nbytes <= MAX_DESCRIBED_BYTES

    def _count_items(self, num_items: int) -> None:
        """Count items of this step; the first one sets `oldest_at`. Nothing is refused."""
        if not self._num_items:
            self.oldest_at = time.monotonic()
        self._num_items += num_items

    def start_store(
        self, key: bytes, slot: int, generation: int, blocks: BlockRange, description: bytes
    ) -> None:
        """Add the start of a store of a chunk's blocks. Call it in a prompt's order, head first.

        The caller has checked `has_room` and `has_description_room`.
        """
        self._count_items(1)
        self.started_stores[key] = self.keys  # this list object tells which step
        self.reassigned[slot] = generation
        if description:
            self._descriptions += [b""] * (len(self.keys) - len(self._descriptions))
            self._descriptions.append(description)
            self._described_bytes += len(description)
        self.keys.append(key)
        self._slots.append(slot)
        self._generations.append(generation)
        self._blocks.append(blocks)

    def count_answers(self, answers: Sequence[StoreAnswer]) -> None:
        """Count the answers to keys that were offered."""
        if not self:
            self.oldest_at = time.monotonic()
        self._present += answers.count(StoreAnswer.PRESENT)
        self._pending += answers.count(StoreAnswer.PENDING)
        self._not_yet += answers.count(StoreAnswer.NOT_YET)
        self._refused += answers.count(StoreAnswer.FULL)

    def drop(self, keys: Collection[bytes]) -> None:
        """Add stores to drop.

        The daemon drops a step's stores before it starts others, so drops of stores that this step
        starts go into the next step.
        """
        self._count_items(len(keys))
        for key in keys:
            if self.started_stores.get(key) is self.keys:
                self._dropped_next.append(key)
            else:
                self.started_stores.pop(key, None)
                self._dropped.append(key)

    def pin(
        self, lease: int, lease_ms: int, slots: Sequence[int], generations: Sequence[int]
    ) -> None:
        """Add a new lease. Until the step is answered, no key gets one of its slots."""
        self._count_items(len(slots))
        self._pinned_slots += slots
        # This list object tells which step pins the slots.
        self.step_of_pinned.update(dict.fromkeys(slots, self._pinned_slots))
        packed = IntArray.of(slots, "u4"), IntArray.of(generations, "u8")
        self._leases_begun.append(
            Pin(lease=lease, lease_ms=lease_ms, slots=packed[0], generations=packed[1])
        )

    def unpin(self, lease: int) -> None:
        """Add the end of a lease."""
        self._count_items(1)
        self._leases_ended.append(lease)

    def use(self, keys: Collection[bytes], num_prompt: int, label: int) -> None:
        """Add a finished request: its chunks, of which the first `num_prompt` are the prompt's."""
        self._count_items(len(keys))
        self._used.extend(keys)
        self._used_counts.append(len(keys))
        self._prompt_counts.append(num_prompt)
        self._labels.append(label)

    def miss(self, keys: Collection[bytes]) -> None:
        """Add keys that a prompt's lookup has not found."""
        self._count_items(len(keys))
        self._missed.extend(keys)

    def leave_out(self, keys: Collection[bytes]) -> None:
        """Add keys that got no slot and are not offered again."""
        self._count_items(len(keys))
        self._unstored.extend(keys)

    def promote(self, keys: Collection[bytes]) -> None:
        """Add keys to promote from tiers, a prompt's head first."""
        self._count_items(len(keys))
        self._sought.extend(keys)

    # -------------------------------------------------------------------- send

    @property
    def is_urgent(self) -> bool:
        """Whether to send at once: there are items, or keys that got no slot (loans are needed).

        Other counts may wait for the next message.
        """
        return bool(self._num_items or self._refused)

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return self.is_urgent or bool(self._present or self._pending or self._not_yet)

    def take(self, loans_wanted: int) -> tuple[Step, UnansweredStep]:
        """Return all items as a step, and what to remember of it; begin the next step."""
        first = count = NO_ITEMS
        if self._blocks.count(self._whole_chunk) < len(self._blocks):
            first = IntArray.of([first for first, _ in self._blocks], "u2")
            count = IntArray.of([count for _, count in self._blocks], "u2")
        keys, dropped_next, descriptions = self.keys, self._dropped_next, self._descriptions
        unanswered = UnansweredStep(keys, self._slots, self._generations, self._pinned_slots)
        if self._described_bytes:
            descriptions += [b""] * (len(keys) - len(descriptions))
        else:
            descriptions = []
        step = Step(
            dropped=tuple(self._dropped),
            missed=tuple(self._missed),
            keys=tuple(keys),
            slots=IntArray.of(self._slots, "u4"),
            generations=IntArray.of(self._generations, "u8"),
            first=first,
            count=count,
            descriptions=tuple(descriptions),
            pins=tuple(self._leases_begun),
            unpinned=tuple(self._leases_ended),
            used=tuple(self._used),
            used_counts=IntArray.of(self._used_counts, "u4")
            if len(self._used_counts) > 1
            else NO_SLOTS,
            prompt_counts=(
                IntArray.of(self._prompt_counts, "u4")
                if self._prompt_counts != self._used_counts
                else NO_SLOTS
            ),
            labels=bytes(self._labels) if any(self._labels) else b"",
            unstored=tuple(self._unstored),
            wanted=loans_wanted,
            present=self._present,
            pending=self._pending,
            not_yet=self._not_yet,
            refused=self._refused,
            sought=tuple(self._sought),
        )
        self._dropped = dropped_next
        for key in dropped_next:
            self.started_stores.pop(key, None)
        self._begin_step()
        return step, unanswered

    def on_sent(self, request_id: int, step: UnansweredStep) -> None:
        """Record the request id under which a step of `take` was sent."""
        if step.keys or step.pinned:
            self._unanswered[request_id] = step

    def on_answered(self, request_id: int) -> None:
        """Forget the stores and pins of an answered step: the directory shows them now."""
        step = self._unanswered.pop(request_id, None)
        if step is None:
            return
        for key in step.keys:
            if self.started_stores.get(key) is step.keys:
                del self.started_stores[key]
        for slot, generation in zip(step.slots, step.generations, strict=True):
            if self.reassigned.get(slot) == generation:
                del self.reassigned[slot]
        for slot in step.pinned:
            if self.step_of_pinned.get(slot) is step.pinned:
                del self.step_of_pinned[slot]


class SchedulerTotals:
    """The totals that one scheduler reports once a second; tokens only if the engine counts them.

    Attributes:
        counts: of the session, by the fields of `Lookups`. Adding takes no lock: with several
            threads a few may be lost.
        num_hits: chunks looked up and found that are not in `counts`: an attribute is added to
            faster.
        prefill_ns: nanoseconds that the engine takes to compute one token; None: not measured.
    """

    def __init__(self, *, with_tokens: bool) -> None:
        self.counts = dict.fromkeys(Lookups.__struct_fields__, 0)
        self.num_hits = 0
        self.prefill_ns: int | None = None
        self._with_tokens = with_tokens
        self._reported: Lookups | None = None
        self._reported_prefill_ns: int | None = None

    def begin_session(self) -> None:
        """Restart all counts at 0, but keep unreported failures.

        Failures often happen while there is no daemon to report to.
        """
        counts_before, reported = self.counts, self._reported
        counts = dict.fromkeys(counts_before, 0)
        for name in ("aborted_requests", "detached_tokens"):
            counts[name] = counts_before[name] - (getattr(reported, name) if reported else 0)
        counts["tokens"] = counts["detached_tokens"]
        self.counts = counts
        self.num_hits = 0
        self._reported = self._reported_prefill_ns = None

    def report(self, kv_events: KvEvents | None) -> Ping | None:
        """Return a report of the totals that changed since the last one; None: none did."""
        counts, num_hits = self.counts, self.num_hits
        totals: dict[str, int | None] = {
            **counts,
            "chunks": counts["chunks"] + num_hits,
            "hit_chunks": counts["hit_chunks"] + num_hits,
        }
        if not self._with_tokens:
            totals["tokens"] = totals["hit_tokens"] = None
        lookups: Lookups | None = Lookups(**totals)  # type: ignore[arg-type]
        if lookups == self._reported or not any(totals.values()):
            lookups = None
        else:
            self._reported = lookups
        prefill_ns = self.prefill_ns if self.prefill_ns != self._reported_prefill_ns else None
        if lookups is None and kv_events is None and prefill_ns is None:
            return None
        self._reported_prefill_ns = self.prefill_ns
        return Ping(lookups=lookups, kv_events=kv_events, prefill_ns=prefill_ns)
