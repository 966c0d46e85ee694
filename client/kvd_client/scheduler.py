"""`Scheduler`, the client of an engine's scheduler: lookups, stores, loads.

Calls made during an engine step decide from shared memory, which shows READY chunks and slots on
loan, and send their decisions to the daemon afterwards. They never wait for the daemon, nor for a
lock that is held while waiting.
"""

import contextlib
import struct
import time
from collections.abc import Callable, Collection
from zlib import crc32

import numpy as np

from kvd_client.attachment import Attachment
from kvd_client.decisions import NO_TIER
from kvd_client.errors import (
    UsageError,
    check_collection,
    check_flag,
    check_int,
    check_seconds,
    shown,
)
from kvd_client.outbox import Outbox
from kvd_client.scheduler_session import SchedulerSession
from kvd_client.tickets import (
    BlockRange,
    LoadTicket,
    StoreAnswer,
    StoreTicket,
    check_block_ranges,
    check_blocks,
    check_descriptions,
    check_key,
    check_keys,
    check_label,
    no_description,
)
from kvd_proto.directory import RECORD_BYTES, LookupResult, SlotState
from kvd_proto.messages import LABEL_ONLY, MAX_KEY_BYTES, MAX_TIERS, Label, TierInfo
from kvd_proto.tier_table import TierHealth

MAX_LEASE_SECONDS = 600.0
MAX_TOKENS = 2**48  # in one call; totals have room for tens of thousands of such

_MISS, _HIT, _HIT_PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING
_FIRST_BLOCK = 0
_U4, _U8, _BOOL = np.dtype("<u4"), np.dtype("<u8"), np.dtype(np.bool_)


class Scheduler(SchedulerSession):
    """The client of an engine's scheduler.

    Calls made during an engine step never block on the daemon: lookups, `prepare_*`, `complete_*`,
    `request_finished`, `end_step`. What they cannot do is a miss or an empty ticket. All methods
    may be called from any thread. They raise `UsageError` for invalid arguments, and after `close`.

    For the arguments see `SchedulerSession`, which has the calls outside a step.
    """

    # ---------------------------------------------------------------- lookups

    def lookup(self, key: bytes, first: int = 0, count: int | None = None) -> LookupResult:
        """Return HIT, HIT_PENDING (being written) or MISS, from shared memory, without a message.

        The result is a hint: `prepare_load` decides. A key has 1 to 48 bytes. A chunk without all
        blocks `first`..`first + count - 1` is a MISS; without a count, all from `first` on.
        """
        if first is _FIRST_BLOCK and count is None and type(key) is bytes:
            # The common case, the hit of a whole chunk, is inlined, which halves its time. What is
            # not found here takes the general way below.
            words, mask, tries_left, records, floor, readers = self._hit_table
            hash32 = crc32(key)
            i = (hash32 & mask) * 2  # small numbers are fast
            while words[i + 1] != hash32 and words[i] and tries_left:
                tries_left -= 1
                i = (i // 2 + 1 & mask) * 2
            slot_after, reassigned = words[i], self._reassigned
            try:
                read, whole = readers[len(key)]
                generation, head, stored = read(records, slot_after * RECORD_BYTES)
            except (IndexError, struct.error):  # a key too long, or a slot that is none
                pass
            else:
                if (
                    stored == key
                    and head == whole
                    and generation > floor[0]
                    and not (reassigned and slot_after - 1 in reassigned)
                ):
                    self._totals.num_hits += 1
                    return _HIT
        check_key(key)
        if first is not _FIRST_BLOCK or count is not None:
            check_blocks(first, count)
        result = self._lookup(key, first, count)
        counts = self._totals.counts
        counts["chunks"] += 1
        if result is _HIT and self._reassigned and self._is_reassigned(key):
            result = _MISS
        if result is _HIT:
            counts["hit_chunks"] += 1
        elif result is _MISS and key in self._started_stores:
            return _HIT_PENDING
        return result

    def lookup_many(self, keys: Collection[bytes]) -> list[LookupResult]:
        """Return `lookup` of every key, in order."""
        return list(map(self.lookup, check_collection("keys", keys, "keys")))

    def cached_blocks(self, key: bytes) -> BlockRange | None:
        """Return which blocks a READY chunk has, as (first, count); None if it is not READY.

        For engines whose chunks are often partial. Like `lookup` a hint from shared memory.
        """
        if key.__class__ is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            check_key(key)
        entry = self._entry(key)
        self._totals.counts["chunks"] += 1
        if entry is None or self._is_reassigned(key):
            return None
        _, _, state, first, count, *_ = entry
        if state != SlotState.READY:
            return None
        self._totals.counts["hit_chunks"] += 1
        return first, count

    def _is_reassigned(self, key: bytes) -> bool:
        """Return whether this scheduler has assigned the chunk's slot to another key."""
        entry = self._entry(key)
        return entry is not None and self._reassigned.get(entry[0], entry[1]) != entry[1]

    def count_tokens(self, asked: int, found: int) -> None:
        """Count prompt tokens that were looked up and found, for the daemon's statistics.

        Sends nothing itself: counts are sent with the next report, at most once a second.
        """
        check_int("asked", asked, 0, MAX_TOKENS)
        check_int("found", found, 0, asked)
        self._totals.counts["tokens"] += asked
        self._totals.counts["hit_tokens"] += found
        if not self.attached:
            self._totals.counts["detached_tokens"] += asked

    def count_aborted(self, requests: int) -> None:
        """Count requests that the engine aborts because a load failed; sent as `count_tokens`."""
        self._totals.counts["aborted_requests"] += check_int("requests", requests, 0, MAX_TOKENS)

    def count_hints(self, hints: int = 0, ignored: int = 0, cut: int = 0) -> None:
        """Count requests with a hint, hint fields ignored, and hint numbers that were clamped."""
        self._totals.counts["hints"] += check_int("hints", hints, 0)
        self._totals.counts["hints_ignored"] += check_int("ignored", ignored, 0)
        self._totals.counts["hints_cut"] += check_int("cut", cut, 0)

    def set_prefill_seconds(self, seconds_per_token: float) -> None:
        """Report the measured time that the engine takes to compute one token of a prompt."""
        value = check_seconds("seconds_per_token", seconds_per_token)
        self._totals.prefill_ns = round(value * 1e9)

    # ----------------------------------------------------------------- stores

    def prepare_store(
        self,
        keys: Collection[bytes],
        blocks: Collection[BlockRange] | None = None,
        descriptions: Collection[bytes | None] | Callable[[int], bytes] | None = None,
    ) -> StoreTicket:
        """Assign slots on loan to the keys that are new; the ticket has an answer for each key.

        If loans run out, the remaining keys are FULL, and the daemon learns that more loans are
        needed: offer those keys again in a later step. `reserve` waits for loans.

        Args:
            keys: a prompt's head first.
            blocks: the blocks of each key's chunk that will be stored, as pairs (first block,
                count); None: all of them. A cached chunk with fewer blocks may be accepted again.
            descriptions: of each key's whole chunk, as `kvd_proto.descriptions.encode` returns it,
                or None; None: no key has one. Ignored unless `describes`. One step has room for
                4 MiB: keys beyond are FULL. Or a function that returns the i-th key's description,
                b"" for none; it is called only for keys that may be accepted.
        """
        keys = check_keys(keys)
        ranges = check_block_ranges(blocks, len(keys))
        describe, described_bytes = check_descriptions(descriptions, len(keys))
        self._check_open()
        with self._attachments.lock:
            attachment = self._attachments.serving
            if attachment is None:
                return StoreTicket()
            if ranges is not None:
                attachment.decisions.check(ranges)
            if not self.describes:
                describe, described_bytes = no_description, 0
            elif described_bytes is None:
                described_bytes = attachment.attached.description_bytes * len(keys)
            attachment.read_answers_for(keys)
            if not attachment.has_room(len(keys), described_bytes):
                return StoreTicket(answers=(StoreAnswer.FULL,) * len(keys))
            answers, accepted = attachment.decisions.offer(keys, ranges, describe)
            serial = next(self._attachments.serials)
            self._end_call(attachment)
        ticket = StoreTicket(
            keys=tuple(accepted.keys),
            slots=np.array(accepted.slots, _U4),
            generations=np.array(accepted.generations, _U8),
            answers=tuple(answers),
            serial=serial,
            on_exit=lambda success: self._exit_ticket(lambda: self.complete_store(ticket, success)),
        )
        return ticket

    def complete_store(self, stored: StoreTicket | Collection[bytes], success: bool = True) -> None:
        """End stores; without success, unfinished ones are dropped.

        With success nothing is sent: the daemon learns from its lanes what was stored.

        Args:
            stored: a ticket, or some of its keys.
            success: whether all ranks have stored their shares.
        """
        serial = 0
        if isinstance(stored, StoreTicket):
            serial, stored = check_int("ticket.serial", stored.serial, 0), stored.keys
        keys = check_keys(stored)
        succeeded = check_flag("success", success)
        self._check_open()
        if succeeded or not keys:
            return
        with self._attachments.lock:
            attachment = self._attachments.current
            is_void = 0 < serial < self._attachments.first_store
            if attachment is not None and not is_void and attachment.has_room(len(keys)):
                attachment.decisions.outbox.drop(keys)
                self._end_call(attachment)

    # ------------------------------------------------------------------ loads

    def prepare_load(
        self,
        keys: Collection[bytes],
        lease_seconds: float = 60.0,
        blocks: Collection[BlockRange] | None = None,
    ) -> LoadTicket:
        """Find chunks to load, and pin them until `complete_load` or the end of the lease.

        The step sends the pin. If a chunk is evicted before the daemon reads the pin, its load
        fails.

        Args:
            keys: a prompt's head first.
            lease_seconds: above 0, to 600; the daemon may grant less.
            blocks: the blocks of each key's chunk that will be loaded, as pairs (first block,
                count); None: all of them. A chunk that lacks some of them is not found.
        """
        keys = check_keys(keys)
        lease_s = check_seconds("lease_seconds", lease_seconds, MAX_LEASE_SECONDS, positive=True)
        ranges = check_block_ranges(blocks, len(keys))
        self._check_open()
        with self._attachments.lock:
            attachment = self._attachments.serving
            if attachment is None or not attachment.has_room(len(keys)):
                return LoadTicket(found=np.zeros(len(keys), _BOOL))
            found_mask, hits = attachment.decisions.find(keys, ranges)
            lease = 0
            if hits.keys:
                lease = next(self._attachments.serials)
                lease_ms = max(1, round(lease_s * 1000))
                attachment.decisions.outbox.pin(lease, lease_ms, hits.slots, hits.generations)
                if attachment.tiers is not None:
                    attachment.tiers.on_loaded(hits.keys)
                self._end_call(attachment)
        ticket = LoadTicket(
            keys=tuple(hits.keys),
            slots=np.array(hits.slots, _U4),
            generations=np.array(hits.generations, _U8),
            found=np.array(found_mask, _BOOL),
            lease=lease,
            lease_seconds=lease_s,
            on_exit=lambda _: self._exit_ticket(lambda: self.complete_load(ticket)),
        )
        return ticket

    def complete_load(self, ticket: LoadTicket) -> None:
        """End a ticket's lease; no effect if it has none, or its session has ended."""
        if not isinstance(ticket, LoadTicket):
            raise UsageError(f"ticket={shown(ticket)}: pass what prepare_load returned")
        lease = check_int("ticket.lease", ticket.lease, 0)
        self._check_open()
        if not lease:
            return
        with self._attachments.lock:
            attachment, is_void = self._attachments.current, lease < self._attachments.first_lease
            if attachment is not None and not is_void and attachment.has_room(1):
                attachment.decisions.outbox.unpin(lease)
                self._end_call(attachment)

    @staticmethod
    def _exit_ticket(complete: Callable[[], None]) -> None:
        """Complete a ticket at the end of its `with` block; no effect after `close`."""
        with contextlib.suppress(UsageError):
            complete()

    # ------------------------------------------------------------------ tiers

    @property
    def tiers(self) -> tuple[TierInfo, ...]:
        """The tiers, in the order in which they are tried; empty if there are none.

        Also empty while the engine is not attached, and while a reset has no answer.
        """
        attachment = self._attachments.current
        if attachment is None or self._tiers is None:
            return ()
        return attachment.attached.tiers

    def find_tier(self, key: bytes, first: int = 0, count: int | None = None) -> int:
        """Return which tier has a chunk that `lookup` does not find.

        Like `lookup` a hint from shared memory. The tier must have the blocks
        `first`..`first + count - 1` of the chunk; without a count, all from `first` on.
        `request_promotion` brings the chunk into memory.

        Returns:
            The index in `tiers` of the first usable tier that has the blocks, also while they are
            being promoted. `NO_TIER` (-1): none has. `TIER_UNKNOWN` (-2): a usable shared tier may
            have them, and `request_promotion` makes the daemon query it; after its answer this is
            `NO_TIER`, or `lookup` returns HIT_PENDING.
        """
        if key.__class__ is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            check_key(key)
        if first.__class__ is not int or first or count is not None:
            check_blocks(first, count)
        tiers = self._tiers
        if tiers is None:
            self._check_open()
            return NO_TIER
        return tiers.find_tier(key, first, count)

    def tier_status(self, number: int) -> TierHealth | None:
        """Return whether a tier is usable, how fast it promotes, and how many bytes come first.

        Args:
            number: the tier's index in `tiers`.

        Returns:
            The status; None if there is no such tier, or nothing is attached now.
        """
        index = check_int("number", number, 0, MAX_TIERS - 1)
        tiers = self._tiers
        return None if tiers is None else tiers.tier_status(index)

    def request_promotion(self, keys: Collection[bytes]) -> int:
        """Request promotion of chunks that are, or may be, in tiers (see `find_tier`) into memory.

        The step sends the request. Rate limit: a key is sent at most once every two seconds until
        it has been loaded. `lookup` returns HIT_PENDING during the promotion, then HIT, or MISS
        again if it fails; `take_ready` reports the change. There is no guarantee, so limit how
        long you wait.

        Args:
            keys: a prompt's head first.

        Returns:
            How many keys are sent.
        """
        keys = check_keys(keys)
        self._check_open()
        with self._attachments.lock:
            attachment = self._attachments.serving
            if attachment is None or (tiers := attachment.tiers) is None:
                return 0
            if not attachment.has_room(len(keys)):
                return 0
            to_request = tiers.take_unrequested(keys, time.monotonic())
            if to_request:
                attachment.decisions.outbox.promote(to_request)
                self._end_call(attachment)
        return len(to_request)

    # ------------------------------------------------------------------ steps

    def request_finished(
        self, keys: Collection[bytes], *, prompt: int | None = None, label: Label = Label.NONE
    ) -> None:
        """Report a finished request: the daemon counts one use of each of its chunks.

        Uses and their times decide about eviction. Report each request by a call of its own, in
        the order in which they end.

        Args:
            keys: of all chunks that the request's tokens fill, a prompt's head first, including
                those not found or not stored.
            prompt: how many of them, from the first on, are of the prompt; None: all.
            label: when the next request with these chunks is expected; see `label`.
        """
        used = check_keys(keys)
        num_prompt = len(used) if prompt is None else check_int("prompt", prompt, 0, len(used))
        self._add_to_step(Outbox.use, used, num_prompt, check_label(label))

    def label(self, keys: Collection[bytes], label: Label) -> None:
        """Replace the label of a request that was reported before.

        Args:
            keys: those of the report.
            label: when the next request with these chunks is expected. A hint: the daemon learns
                how far to trust it.
        """
        self._add_to_step(Outbox.use, check_keys(keys), 0, LABEL_ONLY | check_label(label))

    def report_missed(self, keys: Collection[bytes]) -> None:
        """Report the keys that a prompt's lookup has missed, once it has ended, for statistics.

        Args:
            keys: of the prompt's chunks that must be computed; of one group only, if each token
                has keys in several.
        """
        self._add_to_step(Outbox.miss, check_keys(keys))

    def give_up(self, keys: Collection[bytes]) -> None:
        """Report keys that were answered FULL and are not offered again, for statistics."""
        self._add_to_step(Outbox.leave_out, check_keys(keys))

    def _add_to_step(
        self, add: Callable[..., None], keys: Collection[bytes], *arguments: int
    ) -> None:
        """Add keys to the step; no effect if the engine is detached, or the step has no room."""
        self._check_open()
        with self._attachments.lock:
            attachment = self._attachments.current
            if attachment is not None and keys and attachment.has_room(len(keys)):
                add(attachment.decisions.outbox, keys, *arguments)
                self._end_call(attachment)

    def end_step(self) -> None:
        """Send the decisions since the last step to the daemon, if there are any.

        Never blocks.
        """
        self._check_open()
        with self._attachments.lock:
            attachment = self._attachments.current
            if attachment is not None:
                attachment.end_step(self.deadline, only_if_urgent=self._ends_steps)

    def _end_call(self, attachment: Attachment) -> None:
        """Send decisions at once, if the engine does not call `end_step`."""
        if not self._ends_steps:
            attachment.end_step(self.deadline, only_if_urgent=False)
