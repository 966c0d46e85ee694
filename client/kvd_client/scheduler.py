"""The scheduler's side: what is cached, where to store, what to load.

Calls of an engine's step decide by themselves, from shared memory: what is READY, and which slots
the daemon has lent, it says there. They tell the daemon what they have decided, and wait neither
for it nor for a lock that anybody holds while waiting.
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection

import numpy as np

from kvd_client.arguments import (
    Blocks,
    block_ranges,
    check_blocks,
    check_key,
    chunk_descriptions,
    collection,
    flag,
    no_description,
    request_keys,
    request_label,
    seconds,
    shown,
    whole,
)
from kvd_client.attachment import Attachment
from kvd_client.errors import UsageError
from kvd_client.scheduler_tiers import SchedulerTiers
from kvd_client.tickets import LoadTicket, StoreAnswer, StoreTicket
from kvd_proto.directory import MAX_SLOTS, LookupResult, SlotState
from kvd_proto.labels import LABEL_ONLY, Label
from kvd_proto.messages import (
    MAX_KEY_BYTES,
)

MAX_LEASE_SECONDS = 600.0
MAX_TOKENS = 2**48  # of one request; totals have room for tens of thousands of such
AGAIN_SECONDS = 0.01  # until the daemon is asked again for loans that somebody waits for

_MISS, _HIT, _HIT_PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING
_U4, _U8, _BOOL = np.dtype("<u4"), np.dtype("<u8"), np.dtype(np.bool_)


class Scheduler(SchedulerTiers):
    """An engine's scheduler.

    Whatever happens to the daemon, no call of a step waits for it: neither lookups nor
    `prepare_*`, `complete_*`, `request_finished` and `end_step`. What could not be done is a miss
    or an empty ticket. All methods may be called from any thread. They raise `UsageError` for
    invalid arguments, and once it is closed.

    Args:
        runtime_dir: the daemon's runtime directory.
        engine: the engine's name; its workers use the same, another engine another one.
        deadline: seconds that the daemon may take for an answer, before its session is given up.
        counts_tokens: the engine calls `count_tokens`; otherwise the daemon knows how many keys
            were looked up and found, and shows no share of prompt tokens.
        steps: the engine calls `end_step`, and the daemon is told then what was decided since the
            last one; otherwise each call tells it at once. Stores are copied once it has been
            told, so an engine that waits for the end of a store ends the step first.
        events: the engine publishes what `take_changes` returns as KV events: it describes its
            chunks, and reports to the daemon how many changes it has published, and how late.

    Raises:
        UsageError: an invalid argument. An absent daemon is no error.
    """

    def __init__(
        self,
        runtime_dir: str | os.PathLike[str],
        engine: str,
        *,
        deadline: float = 1.0,
        counts_tokens: bool = False,
        steps: bool = False,
        events: bool = False,
    ) -> None:
        self._steps = flag("steps", steps)
        super().__init__(
            runtime_dir, engine, deadline=deadline, counts_tokens=counts_tokens, events=events
        )

    # ---------------------------------------------------------------- lookups

    def lookup(self, key: bytes, first: int = 0, count: int | None = None) -> LookupResult:
        """Return HIT, HIT_PENDING (being written) or MISS, from shared memory, without a message.

        A hint; the load decides. A key has 1 to 48 bytes. A chunk that lacks some of the
        blocks `first`..`first + count - 1` is a MISS; without a count, one from `first` on.
        """
        if key.__class__ is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            check_key(key)
        if first.__class__ is not int or first or count is not None:
            check_blocks(first, count)
        found = self._find(key, first, count)
        counts = self._counts
        counts.chunks += 1
        if found is _HIT and self._given and self._is_given(key):
            found = _MISS
        if found is _HIT:
            counts.hit_chunks += 1
        elif found is _MISS and key in self._begun:
            return _HIT_PENDING
        return found

    def lookup_many(self, keys: Collection[bytes]) -> list[LookupResult]:
        """Return `lookup` of every key, in order."""
        if keys.__class__ is not list and keys.__class__ is not tuple:
            keys = collection("keys", keys, "keys")
        for key in keys:
            check_key(key)
        found = list(map(self._find, keys))
        if self._given:
            for i, key in enumerate(keys):
                if found[i] is _HIT and self._is_given(key):
                    found[i] = _MISS
        self._counts.chunks += len(found)
        self._counts.hit_chunks += found.count(_HIT)
        if begun := self._begun:
            for i, key in enumerate(keys):
                if found[i] is _MISS and key in begun:
                    found[i] = _HIT_PENDING
        return found

    def held(self, key: bytes) -> Blocks | None:
        """Return which blocks a READY chunk has, as (first, count); None where `lookup` misses.

        From shared memory, and a hint as `lookup` is; for engines whose chunks are often partial.
        """
        if key.__class__ is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            check_key(key)
        found = self._entry(key)
        self._counts.chunks += 1
        if found is None or found[2] != SlotState.READY or self._is_given(key):
            return None
        self._counts.hit_chunks += 1
        return found[3], found[4]

    def _is_given(self, key: bytes) -> bool:
        """Whether this scheduler has given the chunk's slot to another key."""
        found = self._entry(key)
        return found is not None and self._given.get(found[0], found[1]) != found[1]

    def count_tokens(self, asked: int, found: int) -> None:
        """Count prompt tokens that were looked up and found, for the daemon's figures.

        No request is made: they are part of the next report, once a second at most.
        """
        numbers = isinstance(asked, int) and isinstance(found, int)
        if not numbers or not 0 <= found <= asked <= MAX_TOKENS:
            raise UsageError(
                f"asked={shown(asked)}, found={shown(found)}: whole numbers are needed,"
                f" 0 <= found <= asked <= {MAX_TOKENS}"
            )
        self._counts.tokens += asked
        self._counts.hit_tokens += found
        if not self.attached:
            self._counts.detached_tokens += asked

    def count_aborted(self, requests: int) -> None:
        """Count requests that the engine gives up because a load has failed; as `count_tokens`."""
        if not isinstance(requests, int) or not 0 <= requests <= MAX_TOKENS:
            raise UsageError(
                f"requests={shown(requests)}: a whole number is needed, 0 to {MAX_TOKENS}"
            )
        self._counts.aborted_requests += requests

    def count_hints(self, hints: int = 0, ignored: int = 0, cut: int = 0) -> None:
        """Count requests with a hint, fields that were ignored, and numbers that were cut."""
        self._counts.hints += whole("hints", hints, 0)
        self._counts.hints_ignored += whole("ignored", ignored, 0)
        self._counts.hints_cut += whole("cut", cut, 0)

    def set_prefill_seconds(self, seconds_per_token: float) -> None:
        """Report how long the engine takes to compute one token of a prompt, as measured."""
        value = seconds("seconds_per_token", seconds_per_token)
        self._prefill_ns = round(value * 1e9)

    # ----------------------------------------------------------------- stores

    def prepare_store(
        self,
        keys: Collection[bytes],
        blocks: Collection[Blocks] | None = None,
        descriptions: Collection[bytes | None] | Callable[[int], bytes] | None = None,
    ) -> StoreTicket:
        """Give slots on loan to keys that are new. See the ticket's answers.

        Where loans run out the first keys have them; the others are FULL, and the daemon is told
        that more are needed: offer them again in a later step. `reserve` waits for loans.

        Args:
            keys: a prompt's head first.
            blocks: the blocks of each key's chunk that will be stored, as pairs (first block,
                count); None: all of them. A cached chunk with fewer blocks may be accepted again.
            descriptions: of each key's whole chunk, as `kvd_proto.descriptions.encode` returns it,
                or None; None: of none. They are left out unless `describes`. Those of one step have
                4 MiB at most: keys beyond are FULL. A function returns that of the i-th key, b""
                for none, and is asked about keys that may be accepted only: most are often there.
        """
        wanted = request_keys(keys)
        ranges = block_ranges(blocks, len(wanted))
        describe, described_bytes = chunk_descriptions(descriptions, len(wanted))
        self._check_open()
        with self._state:
            there = self._attachment
            if there is None or self._owed is not None:
                return StoreTicket()
            if ranges is not None:
                there.decisions.check(ranges)
            if not self.describes:
                describe, described_bytes = no_description, 0
            elif described_bytes is None:
                described_bytes = there.attached.description_bytes * len(wanted)
            there.look(wanted)
            if not there.has_room(len(wanted), described_bytes):
                return StoreTicket(answers=(StoreAnswer.FULL,) * len(wanted))
            answers, chosen = there.decisions.offer(wanted, ranges, describe)
            serial = next(self._serials)
            self._end_call(there)
        ticket = StoreTicket(
            keys=tuple(chosen.keys),
            slots=np.array(chosen.slots, _U4),
            generations=np.array(chosen.generations, _U8),
            answers=tuple(answers),
            serial=serial,
            on_exit=lambda success: self._leave(lambda: self.complete_store(ticket, success)),
        )
        return ticket

    def complete_store(self, stored: StoreTicket | Collection[bytes], success: bool = True) -> None:
        """End these stores. Without success those that are unfinished are dropped.

        Of what was stored the daemon knows from its lanes: with success nothing is sent.

        Args:
            stored: a ticket, or some of its keys.
            success: whether all ranks have stored their shares.
        """
        serial = 0
        if isinstance(stored, StoreTicket):
            serial, stored = whole("ticket.serial", stored.serial, 0), stored.keys
        keys = request_keys(stored)
        succeeded = flag("success", success)
        self._check_open()
        if succeeded or not keys:
            return
        with self._state:
            there, over = self._attachment, 0 < serial < self._first_store
            if there is not None and not over and there.has_room(len(keys)):
                there.decisions.outbox.drop(keys)
                self._end_call(there)

    # ------------------------------------------------------------------ loads

    def prepare_load(
        self,
        keys: Collection[bytes],
        lease_seconds: float = 60.0,
        blocks: Collection[Blocks] | None = None,
    ) -> LoadTicket:
        """Find chunks to load, and have them pinned until `complete_load` or the lease's end.

        The daemon is told of it with the step; of a chunk that has gone by then the load fails.

        Args:
            keys: a prompt's head first.
            lease_seconds: above 0, to 600; the daemon may give less.
            blocks: the blocks of each key's chunk that will be loaded, as pairs (first block,
                count); None: all of them. A chunk that lacks some of them is not found.
        """
        wanted = request_keys(keys)
        lease_s = seconds("lease_seconds", lease_seconds, MAX_LEASE_SECONDS, positive=True)
        ranges = block_ranges(blocks, len(wanted))
        self._check_open()
        with self._state:
            there = self._attachment
            if there is None or self._owed is not None or not there.has_room(len(wanted)):
                return LoadTicket(found=np.zeros(len(wanted), _BOOL))
            found, chosen = there.decisions.find(wanted, ranges)
            lease = 0
            if chosen.keys:
                lease = next(self._serials)
                lease_ms = max(1, round(lease_s * 1000))
                there.decisions.outbox.pin(lease, lease_ms, chosen.slots, chosen.generations)
                if there.seeking is not None:
                    there.seeking.loaded(chosen.keys)
                self._end_call(there)
        ticket = LoadTicket(
            keys=tuple(chosen.keys),
            slots=np.array(chosen.slots, _U4),
            generations=np.array(chosen.generations, _U8),
            found=np.array(found, _BOOL),
            lease=lease,
            lease_seconds=lease_s,
            on_exit=lambda _: self._leave(lambda: self.complete_load(ticket)),
        )
        return ticket

    def complete_load(self, ticket: LoadTicket) -> None:
        """End a ticket's lease; nothing happens where it had none, or its session has ended."""
        if not isinstance(ticket, LoadTicket):
            raise UsageError(f"ticket={shown(ticket)}: pass what prepare_load returned")
        lease = whole("ticket.lease", ticket.lease, 0)
        self._check_open()
        if not lease:
            return
        with self._state:
            there, over = self._attachment, lease < self._first_lease
            if there is not None and not over and there.has_room(1):
                there.decisions.outbox.unpin(lease)
                self._end_call(there)

    @staticmethod
    def _leave(complete: Callable[[], None]) -> None:
        """Complete a ticket at its block's end, unless the session has ended, and all with it."""
        with contextlib.suppress(UsageError):
            complete()

    # ------------------------------------------------------------------ tiers

    def seek(self, keys: Collection[bytes]) -> int:
        """Ask for chunks that are `below`, or may be, to be brought into memory.

        The daemon is told with the step, and of each key once in two seconds at most, unless it was
        loaded meanwhile. `lookup` says HIT_PENDING while a chunk is on its way up, then HIT, or
        MISS again where it cannot be had; `take_ready` has news of it. Wait for it as long as it is
        worth, and no longer: nothing is promised.

        Args:
            keys: a prompt's head first.

        Returns:
            Of how many the daemon is told now.
        """
        wanted = request_keys(keys)
        self._check_open()
        with self._state:
            there = self._attachment
            if there is None or (seeking := self._seeking) is None:
                return 0
            if not there.has_room(len(wanted)):
                return 0
            due = seeking.due(wanted, time.monotonic())
            if due:
                there.decisions.outbox.seek(due)
                self._end_call(there)
        return len(due)

    # ------------------------------------------------------------------ steps

    def request_finished(
        self, keys: Collection[bytes], *, prompt: int | None = None, label: Label = Label.NONE
    ) -> None:
        """Report a finished request: the daemon counts one use of each of its chunks.

        By uses and their times it decides what is evicted. Requests are reported one by one, in the
        order in which they end.

        Args:
            keys: of all chunks that the request's tokens fill, a prompt's head first; also of
                those that were not found or not stored.
            prompt: how many of them, from the first on, are of its prompt; None: all.
            label: when the next request with these chunks is expected; see `label`.
        """
        used = request_keys(keys)
        asked = len(used) if prompt is None else whole("prompt", prompt, 0, len(used))
        self._report_use(used, asked, request_label(label))

    def label(self, keys: Collection[bytes], label: Label) -> None:
        """Replace the label of a request that was reported before.

        Args:
            keys: as the request was reported.
            label: when the next request with these chunks is expected. A hint: the daemon learns
                what it is worth.
        """
        self._report_use(request_keys(keys), 0, LABEL_ONLY | request_label(label))

    def _report_use(self, keys: Collection[bytes], prompt: int, label: int) -> None:
        self._check_open()
        with self._state:
            there = self._attachment
            if there is not None and keys and there.has_room(len(keys)):
                there.decisions.outbox.use(keys, prompt, label)
                self._end_call(there)

    def report_missed(self, keys: Collection[bytes]) -> None:
        """Report what a prompt's lookup has not found, once it has ended, for the daemon's figures.

        Args:
            keys: of the prompt's chunks that must be computed; of one group where each token has
                a key in several.
        """
        missed = request_keys(keys)
        self._check_open()
        with self._state:
            there = self._attachment
            if there is not None and missed and there.has_room(len(missed)):
                there.decisions.outbox.miss(missed)
                self._end_call(there)

    def give_up(self, keys: Collection[bytes]) -> None:
        """Report keys that were answered FULL and are not offered again."""
        unstored = request_keys(keys)
        self._check_open()
        with self._state:
            there = self._attachment
            if there is not None and unstored and there.has_room(len(unstored)):
                there.decisions.outbox.leave_out(unstored)
                self._end_call(there)

    def end_step(self) -> None:
        """Tell the daemon what was decided since the last step.

        Where there is nothing to tell nothing is sent. Never waits.
        """
        self._check_open()
        with self._state:
            there = self._attachment
            if there is not None:
                there.end_step(self.deadline, all_of_it=not self._steps)

    def _end_call(self, there: Attachment) -> None:
        """Tell the daemon at once, where the engine does not say when its steps end."""
        if not self._steps:
            there.end_step(self.deadline, all_of_it=True)

    def reserve(self, slots: int, timeout: float | None = None) -> int:
        """Ask for so many loans and wait for them: for bulk work, outside an engine's steps.

        The daemon lends what is free, and by eviction a part of the pool only.

        Args:
            slots: how many the next stores need, in all.
            timeout: seconds to wait at most; None: the deadline.

        Returns:
            How many there are now: maybe fewer, maybe more. 0 where the engine is not attached.
        """
        wanted = whole("slots", slots, 0, MAX_SLOTS)
        patience = self.deadline if timeout is None else seconds("timeout", timeout)
        self._check_open()
        end, asked = time.monotonic() + patience, 0.0
        while True:
            with self._state:
                there = self._attachment
                if there is None:
                    return 0
                loans, now = there.count_loans(), time.monotonic()
                if loans >= wanted:
                    return loans
                idle = self._owed is None and not there.line.unanswered
                if idle and now >= asked + AGAIN_SECONDS:  # what others give up is free soon after
                    there.ask_for(wanted, loans)
                    asked = now
            if now >= end:
                return loans
            if there.line.wait_readable(min(end - now, AGAIN_SECONDS)):
                return loans

    @property
    def loans(self) -> int | None:
        """How many loans are at hand; None where none is, and an answer is under way that may lend.

        0 where the daemon has answered all and lent nothing, and where nothing can be stored.
        """
        with self._state:
            there = self._attachment
            if there is None or self._owed is not None:
                return 0
            return there.count_loans() or (None if there.line.unanswered else 0)
