"""What a scheduler sends to the daemon: decisions as a `Step`, totals as a `Ping` once a second.

The outbox also remembers stores that have begun until the daemon answers their step; from then on
the directory shows their state.
"""

import time
from collections.abc import Collection, Sequence
from typing import NamedTuple

from kvd_client.arguments import Blocks
from kvd_client.tickets import StoreAnswer
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

MAX_DESCRIBED_BYTES = 4 * 2**20
"""Limit for the descriptions of a step, which keeps the largest step below a message's limit."""


class Given(NamedTuple):
    """The slots that one step gives to keys, with their new generations.

    pinned: slots of the chunks that the step pins.
    """

    keys: list[bytes]
    slots: list[int]
    generations: list[int]
    pinned: list[int]


class Outbox:
    """The decisions of one scheduler, in one attachment, that are still to be sent or answered.

    For one thread at a time.

    Args:
        blocks_per_chunk: of the namespace.

    Attributes:
        keys: keys whose stores begin in this step.
        begun: keys whose stores have begun in steps not answered yet; the value is the `keys` list
            of the step, whose identity tells steps apart.
        given: the slots of these stores, with their new generations: a chunk that the directory
            has there under another generation is being replaced.
        pinned: slots of chunks pinned by steps not answered yet; the value is the `Given.pinned`
            of the latest such step.
        since: `time.monotonic()` of the oldest item; meaningless if the outbox is empty.
    """

    def __init__(self, blocks_per_chunk: int) -> None:
        self._whole = (0, blocks_per_chunk)
        self.begun: dict[bytes, list[bytes]] = {}
        self.given: dict[int, int] = {}
        self.pinned: dict[int, list[int]] = {}
        self._sent: dict[int, Given] = {}  # by request number
        self.since = 0.0
        self._dropped: list[bytes] = []
        self._begin_step()

    def _begin_step(self) -> None:
        self.keys: list[bytes] = []
        self._slots: list[int] = []
        self._generations: list[int] = []
        self._blocks: list[Blocks] = []
        self._descriptions: list[bytes] = []
        self._described_bytes = 0
        self._late: list[bytes] = []
        self._pins: list[Pin] = []
        self._pinned: list[int] = []
        self._unpinned: list[int] = []
        self._used: list[bytes] = []
        self._used_counts: list[int] = []
        self._prompt_counts: list[int] = []
        self._labels = bytearray()
        self._missed: list[bytes] = []
        self._unstored: list[bytes] = []
        self._sought: list[bytes] = []
        self._items = len(self._dropped)
        self._present = self._pending = self._not_yet = self._refused = 0

    # ----------------------------------------------------------------- put in

    def room(self, items: int) -> bool:
        """Return whether `items` more keys, chunks and leases of a request fit this step."""
        return self._items + items <= MAX_KEYS and len(self._used_counts) < MAX_FINISHED

    def room_for(self, described: int) -> bool:
        """Return whether `described` more bytes of descriptions fit this step."""
        return self._described_bytes + described <= MAX_DESCRIBED_BYTES

    def _add(self, items: int) -> None:
        if not self._items:
            self.since = time.monotonic()
        self._items += items

    def begin(
        self, key: bytes, slot: int, generation: int, blocks: Blocks, description: bytes = b""
    ) -> None:
        """Add the begin of a store of a chunk's blocks. Call it for a prompt's head first."""
        self._add(1)
        self.begun[key] = self.keys
        self.given[slot] = generation
        if description:
            self._descriptions += [b""] * (len(self.keys) - len(self._descriptions))
            self._descriptions.append(description)
            self._described_bytes += len(description)
        self.keys.append(key)
        self._slots.append(slot)
        self._generations.append(generation)
        self._blocks.append(blocks)

    def count(self, answers: Sequence[StoreAnswer]) -> None:
        """Count the answers to keys that were offered."""
        if not self:
            self.since = time.monotonic()
        self._present += answers.count(StoreAnswer.PRESENT)
        self._pending += answers.count(StoreAnswer.PENDING)
        self._not_yet += answers.count(StoreAnswer.NOT_YET)
        self._refused += answers.count(StoreAnswer.FULL)

    def drop(self, keys: Collection[bytes]) -> None:
        """Add stores that are given up.

        The daemon executes a step's drops before its begins, so drops of this step's own keys go
        into the next step.
        """
        self._add(len(keys))
        for key in keys:
            if self.begun.get(key) is self.keys:
                self._late.append(key)
            else:
                self.begun.pop(key, None)
                self._dropped.append(key)

    def pin(
        self, lease: int, lease_ms: int, slots: Sequence[int], generations: Sequence[int]
    ) -> None:
        """Add a lease that pins chunks."""
        self._add(len(slots))
        self._pinned += slots
        self.pinned.update(dict.fromkeys(slots, self._pinned))
        packed = IntArray.of(slots, "u4"), IntArray.of(generations, "u8")
        self._pins.append(
            Pin(lease=lease, lease_ms=lease_ms, slots=packed[0], generations=packed[1])
        )

    def unpin(self, lease: int) -> None:
        """Add the end of a lease."""
        self._add(1)
        self._unpinned.append(lease)

    def use(self, keys: Collection[bytes], prompt: int, label: int) -> None:
        """Add a finished request: its chunks, of which the first `prompt` are the prompt's."""
        self._add(len(keys))
        self._used.extend(keys)
        self._used_counts.append(len(keys))
        self._prompt_counts.append(prompt)
        self._labels.append(label)

    def miss(self, keys: Collection[bytes]) -> None:
        """Add keys that a prompt's lookup has not found."""
        self._add(len(keys))
        self._missed.extend(keys)

    def leave_out(self, keys: Collection[bytes]) -> None:
        """Add keys that got no slot and are not offered again."""
        self._add(len(keys))
        self._unstored.extend(keys)

    def seek(self, keys: Collection[bytes]) -> None:
        """Add keys to promote from tiers, a prompt's head first."""
        self._add(len(keys))
        self._sought.extend(keys)

    # --------------------------------------------------------------- take out

    @property
    def urgent(self) -> bool:
        """Whether to send at once: there are items, or keys that got no slot (loans are needed).

        Other counts may wait for the next message.
        """
        return bool(self._items or self._refused)

    def __bool__(self) -> bool:
        """Whether there is anything to send."""
        return self.urgent or bool(self._present or self._pending or self._not_yet)

    def take(self, wanted: int) -> tuple[Step, Given]:
        """Return all items as a step, with the slots that it gives to keys, and begin the next."""
        first = count = NO_ITEMS
        if self._blocks.count(self._whole) < len(self._blocks):
            first = IntArray.of([first for first, _ in self._blocks], "u2")
            count = IntArray.of([count for _, count in self._blocks], "u2")
        keys, late, descriptions = self.keys, self._late, self._descriptions
        given = Given(keys, self._slots, self._generations, self._pinned)
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
            pins=tuple(self._pins),
            unpinned=tuple(self._unpinned),
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
            wanted=wanted,
            present=self._present,
            pending=self._pending,
            not_yet=self._not_yet,
            refused=self._refused,
            sought=tuple(self._sought),
        )
        self._dropped = late
        for key in late:
            self.begun.pop(key, None)
        self._begin_step()
        return step, given

    def sent(self, request: int, given: Given) -> None:
        """Record the request number under which a step of `take` was sent."""
        if given.keys or given.pinned:
            self._sent[request] = given

    def answered(self, request: int) -> None:
        """Forget the begins and pins of an answered step: the directory shows them now."""
        step = self._sent.pop(request, None)
        if step is None:
            return
        for key in step.keys:
            if self.begun.get(key) is step.keys:
                del self.begun[key]
        for slot, generation in zip(step.slots, step.generations, strict=True):
            if self.given.get(slot) == generation:
                del self.given[slot]
        for slot in step.pinned:
            if self.pinned.get(slot) is step.pinned:
                del self.pinned[slot]


class Totals:
    """The totals that one scheduler reports once a second; tokens only if the engine counts them.

    Attributes:
        counts: of the session, by the fields of `Lookups`. Adding takes no lock: with several
            threads a few may be lost.
        prefill_ns: nanoseconds that the engine computes for one token; None: not measured.
    """

    def __init__(self, *, with_tokens: bool) -> None:
        self.counts = dict.fromkeys(Lookups.__struct_fields__, 0)
        self.prefill_ns: int | None = None
        self._with_tokens = with_tokens
        self._reported: Lookups | None = None
        self._reported_prefill_ns: int | None = None

    def begin_session(self) -> None:
        """Restart all counts at 0, but keep unreported failures.

        Failures often happen while there is no daemon to report them to.
        """
        before, told = self.counts, self._reported
        counts = dict.fromkeys(before, 0)
        for name in ("aborted_requests", "detached_tokens"):
            counts[name] = before[name] - (getattr(told, name) if told else 0)
        counts["tokens"] = counts["detached_tokens"]
        self.counts = counts
        self._reported = self._reported_prefill_ns = None

    def report(self, kv_events: KvEvents | None) -> Ping | None:
        """Return a report of what has changed since the last one; None: nothing has."""
        totals: dict[str, int | None] = {**self.counts}
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
