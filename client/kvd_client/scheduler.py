"""`Scheduler`, the client of an engine's scheduler: lookups, stores, loads.

Calls made during an engine's step decide from shared memory, which shows READY chunks and slots on
loan, and send their decisions to the daemon afterwards. They never wait for the daemon, nor for a
lock that is held while waiting.

A `Scheduler` is a session. Its parts: `Attachments` (decisions and their messages), `Changes` (KV
events to publish), `Totals` (reported counts), `ReadyNews` (for event loops).
"""

import contextlib
import os
import time
from collections.abc import Callable, Collection, Container, Mapping
from typing import Any

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
from kvd_client.attachment import Attachment, Attachments
from kvd_client.change_reader import DEFAULT_LIMIT, Differences, Place
from kvd_client.changes import Changes, Source
from kvd_client.connection import Connection, Notice
from kvd_client.decisions import NOT_BELOW, Seeking
from kvd_client.errors import UsageError, get_logger
from kvd_client.outbox import Outbox, Totals
from kvd_client.readiness import ReadyNews
from kvd_client.session import Session
from kvd_client.tickets import LoadTicket, StoreAnswer, StoreTicket
from kvd_proto.changes import MAX_CHANGES
from kvd_proto.descriptions import Description
from kvd_proto.directory import MAX_SLOTS, Entry, LookupResult, SlotState
from kvd_proto.messages import (
    LABEL_ONLY,
    MAX_KEY_BYTES,
    MAX_TIERS,
    Attached,
    Detached,
    Label,
    Message,
    Ping,
    Reset,
    ResetDone,
    Step,
    TierInfo,
)
from kvd_proto.tier_table import TierHealth

RESET_SECONDS = 30.0  # timeout; a daemon needs milliseconds for tens of thousands of chunks
MAX_LEASE_SECONDS = 600.0
MAX_TOKENS = 2**48  # in one call; totals have room for tens of thousands of such
AGAIN_SECONDS = 0.01  # before `reserve` asks the daemon for loans again

_MISS, _HIT, _HIT_PENDING = LookupResult.MISS, LookupResult.HIT, LookupResult.HIT_PENDING
_U4, _U8, _BOOL = np.dtype("<u4"), np.dtype("<u8"), np.dtype(np.bool_)

log = get_logger()


class Scheduler(Session):
    """The client of an engine's scheduler.

    Calls made during an engine step never block on the daemon: lookups, `prepare_*`, `complete_*`,
    `request_finished`, `end_step`. What they cannot do is a miss or an empty ticket. All methods
    may be called from any thread. They raise `UsageError` for invalid arguments, and after `close`.

    Args:
        runtime_dir: the daemon's runtime directory.
        engine: the engine's name, unique to it and the same in its workers.
        deadline: seconds to wait for an answer of the daemon before the session is given up.
        counts_tokens: the engine calls `count_tokens`; otherwise the daemon knows only keys looked
            up and found, and shows no share of prompt tokens.
        steps: the engine calls `end_step`, which sends the decisions since the last one; otherwise
            each call sends its own at once. A store is copied only after its decision was sent, so
            end the step before waiting for the store.
        events: the engine publishes what `take_changes` returns as KV events: it describes its
            chunks, and the number and delay of published changes are reported to the daemon.

    Raises:
        UsageError: an invalid argument. An absent daemon is no error.
    """

    _kind = "scheduler"

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
        self._events = flag("events", events)
        self._totals = Totals(with_tokens=flag("counts_tokens", counts_tokens))
        super().__init__(runtime_dir, engine, deadline)
        self._ready_news = ReadyNews()
        self._changes = Changes()
        self._attachments = Attachments(self._look_in, self._wake)
        # `_look_in` replaces these with each attachment, so that lookups need no check for one.
        self._find: Callable[..., LookupResult]
        self._entry: Callable[[bytes], Entry | None]
        self._begun: Container[bytes]
        self._given: Mapping[int, int]
        self._seeking: Seeking | None
        self._look_in(None)
        self._start()

    @property
    def attached(self) -> bool:
        """Whether every rank is registered and has a lane, so that chunks can be found."""
        return self._attachments.current is not None

    @property
    def namespace(self) -> bytes:
        """The id of the namespace, 16 bytes; empty while not attached."""
        there = self._attachments.current
        return there.attached.namespace if there else b""

    @property
    def num_chunks(self) -> int:
        """The largest number of chunks of the namespace; 0 while not attached."""
        there = self._attachments.current
        return there.attached.num_chunks if there else 0

    @property
    def bytes_per_chunk(self) -> int:
        """Bytes of a chunk, all ranks together; 0 while not attached."""
        there = self._attachments.current
        return there.attached.bytes_per_chunk if there else 0

    def status(self) -> dict[str, Any]:
        """Return the daemon's state as `kvd status --json` prints it; empty without a daemon."""
        reply = self._report()
        return {} if reply is None else reply.status

    def close(self) -> None:
        """End the session: leases are dropped, unfinished stores given up. May be called again."""
        super().close()
        self._on_lost()
        self._ready_news.close()

    # ---------------------------------------------------------------- lookups

    def lookup(self, key: bytes, first: int = 0, count: int | None = None) -> LookupResult:
        """Return HIT, HIT_PENDING (being written) or MISS, from shared memory, without a message.

        The result is a hint: `prepare_load` decides. A key has 1 to 48 bytes. A chunk without all
        blocks `first`..`first + count - 1` is a MISS; without a count, all from `first` on.
        """
        if key.__class__ is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            check_key(key)
        if first.__class__ is not int or first or count is not None:
            check_blocks(first, count)
        found = self._find(key, first, count)
        counts = self._totals.counts
        counts["chunks"] += 1
        if found is _HIT and self._given and self._is_given(key):
            found = _MISS
        if found is _HIT:
            counts["hit_chunks"] += 1
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
        self._totals.counts["chunks"] += len(found)
        self._totals.counts["hit_chunks"] += found.count(_HIT)
        if begun := self._begun:
            for i, key in enumerate(keys):
                if found[i] is _MISS and key in begun:
                    found[i] = _HIT_PENDING
        return found

    def held(self, key: bytes) -> Blocks | None:
        """Return which blocks a READY chunk has, as (first, count); None if it is not READY.

        For engines whose chunks are often partial. Like `lookup` a hint from shared memory.
        """
        if key.__class__ is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            check_key(key)
        found = self._entry(key)
        self._totals.counts["chunks"] += 1
        if found is None or found[2] != SlotState.READY or self._is_given(key):
            return None
        self._totals.counts["hit_chunks"] += 1
        return found[3], found[4]

    def _is_given(self, key: bytes) -> bool:
        """Whether this scheduler has given the chunk's slot to another key."""
        found = self._entry(key)
        return found is not None and self._given.get(found[0], found[1]) != found[1]

    def count_tokens(self, asked: int, found: int) -> None:
        """Count prompt tokens that were looked up and found, for the daemon's statistics.

        Sends nothing itself: counts go with the next report, at most once a second.
        """
        whole("asked", asked, 0, MAX_TOKENS)
        whole("found", found, 0, asked)
        self._totals.counts["tokens"] += asked
        self._totals.counts["hit_tokens"] += found
        if not self.attached:
            self._totals.counts["detached_tokens"] += asked

    def count_aborted(self, requests: int) -> None:
        """Count requests that the engine gives up because a load has failed; as `count_tokens`."""
        self._totals.counts["aborted_requests"] += whole("requests", requests, 0, MAX_TOKENS)

    def count_hints(self, hints: int = 0, ignored: int = 0, cut: int = 0) -> None:
        """Count requests with a hint, hint fields ignored, and hint numbers that were clamped."""
        self._totals.counts["hints"] += whole("hints", hints, 0)
        self._totals.counts["hints_ignored"] += whole("ignored", ignored, 0)
        self._totals.counts["hints_cut"] += whole("cut", cut, 0)

    def set_prefill_seconds(self, seconds_per_token: float) -> None:
        """Report how long the engine takes to compute one token of a prompt, as measured."""
        value = seconds("seconds_per_token", seconds_per_token)
        self._totals.prefill_ns = round(value * 1e9)

    # ----------------------------------------------------------------- stores

    def prepare_store(
        self,
        keys: Collection[bytes],
        blocks: Collection[Blocks] | None = None,
        descriptions: Collection[bytes | None] | Callable[[int], bytes] | None = None,
    ) -> StoreTicket:
        """Give slots on loan to the keys that are new; the ticket has an answer for each key.

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
        wanted = request_keys(keys)
        ranges = block_ranges(blocks, len(wanted))
        describe, described_bytes = chunk_descriptions(descriptions, len(wanted))
        self._check_open()
        with self._attachments.lock:
            there = self._attachments.serving
            if there is None:
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
            serial = next(self._attachments.serials)
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
        """End stores; without success, unfinished ones are dropped.

        With success nothing is sent: the daemon learns from its lanes what was stored.

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
        with self._attachments.lock:
            there, over = self._attachments.current, 0 < serial < self._attachments.first_store
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
        """Find chunks to load, and pin them until `complete_load` or the end of the lease.

        The step sends the pin. If a chunk is evicted before the daemon reads the pin, its load
        fails.

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
        with self._attachments.lock:
            there = self._attachments.serving
            if there is None or not there.has_room(len(wanted)):
                return LoadTicket(found=np.zeros(len(wanted), _BOOL))
            found, chosen = there.decisions.find(wanted, ranges)
            lease = 0
            if chosen.keys:
                lease = next(self._attachments.serials)
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
        """End a ticket's lease; no effect if it has none, or its session has ended."""
        if not isinstance(ticket, LoadTicket):
            raise UsageError(f"ticket={shown(ticket)}: pass what prepare_load returned")
        lease = whole("ticket.lease", ticket.lease, 0)
        self._check_open()
        if not lease:
            return
        with self._attachments.lock:
            there, over = self._attachments.current, lease < self._attachments.first_lease
            if there is not None and not over and there.has_room(1):
                there.decisions.outbox.unpin(lease)
                self._end_call(there)

    @staticmethod
    def _leave(complete: Callable[[], None]) -> None:
        """Complete a ticket at the end of its `with` block; no effect after `close`."""
        with contextlib.suppress(UsageError):
            complete()

    # ------------------------------------------------------------------ tiers

    @property
    def tiers(self) -> tuple[TierInfo, ...]:
        """The tiers, in the order in which they are tried; empty if there are none.

        Also empty while the engine is not attached, and while a reset has no answer.
        """
        there = self._attachments.current
        return there.attached.tiers if there is not None and self._seeking is not None else ()

    def below(self, key: bytes, first: int = 0, count: int | None = None) -> int:
        """Return which tier has a chunk that `lookup` does not find; `seek` promotes it.

        Like `lookup` a hint from shared memory. The tier must have the blocks
        `first`..`first + count - 1` of the chunk; without a count, all from `first` on.

        Returns:
            The index in `tiers` of the first usable tier that has the blocks, also while they are
            being promoted. `NOT_BELOW` (-1): none has. `UNKNOWN` (-2): a usable shared tier may
            have them, and `seek` asks it; once it has answered, this is `NOT_BELOW`, or `lookup`
            returns HIT_PENDING.
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

    def tier_status(self, number: int) -> TierHealth | None:
        """Return whether a tier is usable, how fast promotions are, and how many bytes wait.

        Args:
            number: the tier's index in `tiers`.

        Returns:
            The status; None if there is no such tier now.
        """
        wanted = whole("number", number, 0, MAX_TIERS - 1)
        seeking = self._seeking
        return None if seeking is None else seeking.status(wanted)

    def seek(self, keys: Collection[bytes]) -> int:
        """Request promotion of chunks that are, or may be, in tiers (see `below`) into memory.

        The step sends the request. Rate limit: a key is sent at most once every two seconds until
        it has been loaded. `lookup` returns HIT_PENDING during the promotion, then HIT, or MISS
        again if it fails; `take_ready` reports the change. There is no guarantee, so limit how
        long you wait.

        Args:
            keys: a prompt's head first.

        Returns:
            How many keys are sent.
        """
        wanted = request_keys(keys)
        self._check_open()
        with self._attachments.lock:
            there = self._attachments.serving
            if there is None or (seeking := there.seeking) is None:
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

        Uses and their times decide about eviction. Report each request by a call of its own, in
        the order in which they end.

        Args:
            keys: of all chunks that the request's tokens fill, a prompt's head first, including
                those not found or not stored.
            prompt: how many of them, from the first on, are of the prompt; None: all.
            label: when the next request with these chunks is expected; see `label`.
        """
        used = request_keys(keys)
        asked = len(used) if prompt is None else whole("prompt", prompt, 0, len(used))
        self._put(Outbox.use, used, asked, request_label(label))

    def label(self, keys: Collection[bytes], label: Label) -> None:
        """Replace the label of a request that was reported before.

        Args:
            keys: those of the report.
            label: when the next request with these chunks is expected. A hint: the daemon learns
                how far to trust it.
        """
        self._put(Outbox.use, request_keys(keys), 0, LABEL_ONLY | request_label(label))

    def report_missed(self, keys: Collection[bytes]) -> None:
        """Report the keys that a prompt's lookup has missed, once it has ended, for statistics.

        Args:
            keys: of the prompt's chunks that must be computed; of one group only, if each token
                has keys in several.
        """
        self._put(Outbox.miss, request_keys(keys))

    def give_up(self, keys: Collection[bytes]) -> None:
        """Report keys that were answered FULL and are not offered again."""
        self._put(Outbox.leave_out, request_keys(keys))

    def _put(self, put: Callable[..., None], keys: Collection[bytes], *more: int) -> None:
        """Add keys to the step; no effect if the engine is detached, or the step has no room."""
        self._check_open()
        with self._attachments.lock:
            there = self._attachments.current
            if there is not None and keys and there.has_room(len(keys)):
                put(there.decisions.outbox, keys, *more)
                self._end_call(there)

    def end_step(self) -> None:
        """Send the decisions since the last step to the daemon, if there are any.

        Never blocks.
        """
        self._check_open()
        with self._attachments.lock:
            there = self._attachments.current
            if there is not None:
                there.end_step(self.deadline, all_of_it=not self._steps)

    def _end_call(self, there: Attachment) -> None:
        """Send decisions at once, if the engine does not call `end_step`."""
        if not self._steps:
            there.end_step(self.deadline, all_of_it=True)

    def reserve(self, slots: int, timeout: float | None = None) -> int:
        """Ask for loans and wait for them: for bulk work, outside an engine's steps.

        The daemon lends free slots, and by eviction only a part of the pool.

        Args:
            slots: how many loans the next stores need, in all.
            timeout: seconds to wait at most; None: the deadline.

        Returns:
            The number of loans now: fewer, as many or more. 0 if the engine is not attached.
        """
        wanted = whole("slots", slots, 0, MAX_SLOTS)
        patience = self.deadline if timeout is None else seconds("timeout", timeout)
        self._check_open()
        end, asked = time.monotonic() + patience, 0.0
        while True:
            with self._attachments.lock:
                there = self._attachments.current
                if there is None:
                    return 0
                loans, now = there.count_loans(), time.monotonic()
                if loans >= wanted:
                    return loans
                idle = self._attachments.owed is None and not there.line.unanswered
                if idle and now >= asked + AGAIN_SECONDS:  # other engines may have freed slots
                    there.ask_for(wanted, loans)
                    asked = now
            if now >= end:
                return loans
            if there.line.wait_readable(min(end - now, AGAIN_SECONDS)):
                return loans

    @property
    def loans(self) -> int | None:
        """How many loans are at hand; None if there is none, but an unanswered step may bring some.

        0 if there is none and the daemon has answered all, or if nothing can be stored.
        """
        with self._attachments.lock:
            there = self._attachments.serving
            if there is None:
                return 0
            return there.count_loans() or (None if there.line.unanswered else 0)

    def reset(self, timeout: float | None = None) -> ResetDone | None:
        """Drop every chunk of this engine's namespace, for all engines that share it.

        If the daemon cannot be reached or does not answer in time, the request is repeated in the
        background. Until it is answered, this engine finds and stores nothing.

        Args:
            timeout: seconds to wait for the answer; None: the deadline.

        Returns:
            How many chunks were dropped, and how many will be at the end of their leases; None if
            the daemon has not answered yet.
        """
        patience = self.deadline if timeout is None else seconds("timeout", timeout)
        self._check_open()
        with self._changed:
            owed = self._attachments.begin_reset()
            self._changes.reset()
            self._ready_news.set()
            self._wake()
            self._changed.wait_for(lambda: owed or not self.attached, patience)
        return owed[0] if owed else None

    # ------------------------------------------------------------ event loops

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take_ready` would return True.

        It stays the same until `close`; remove it from the event loop before that.
        """
        self._check_open()
        return self._ready_news.fileno()

    def take_ready(self) -> bool:
        """Return whether lookups may have changed since the last call. Never blocks.

        True if chunks became READY, if the engine was attached or detached, and if a reset was
        begun or answered. Then `lookup` the keys of interest again.
        """
        self._check_open()
        return self._ready_news.take()

    # -------------------------------------------------------------- KV events

    @property
    def describes(self) -> bool:
        """Whether `prepare_store` uses descriptions.

        True if the scheduler was made with `events=True` and the namespace it is attached to keeps
        descriptions; otherwise `prepare_store` ignores them. It may change with each attachment.
        """
        there = self._attachments.current
        return self._events and there is not None and there.descriptions is not None

    def take_changes(self, limit: int = DEFAULT_LIMIT) -> Differences:
        """Return which chunks became READY or ceased to be since the last call, each change once.

        And which ones are in tiers now, and which in none any more.

        All differences returned so far add up to what lookups find, whichever engine stored or
        dropped the chunks. A reset revokes all of them, and so does an engine that stays detached
        for `ABSENT_SECONDS`; until then nothing changes. Never blocks: it reads shared memory.

        Args:
            limit: the largest number of changes to read; for the rest see `changes_waiting`.
        """
        most = whole("limit", limit, 1, MAX_CHANGES)
        self._check_open()
        return self._changes.take(most)

    @property
    def changes_waiting(self) -> bool:
        """Whether `take_changes` has something to do."""
        return self._changes.waiting

    @property
    def changes_behind(self) -> bool:
        """Whether the last `take_changes` left changes unread that existed when it began."""
        return self._changes.behind

    def repeat_changes(self) -> None:
        """Make `take_changes` return everything that is READY again, from the start.

        Call it after routers were told that nothing is cached.
        """
        self._check_open()
        self._changes.repeat()

    def description(self, place: Place) -> Description | None:
        """Return the description of the chunk that `take_changes` found at this place.

        None if it has none, or is not there any more.
        """
        if not isinstance(place, Place):
            raise UsageError(f"place={shown(place)}: pass one that take_changes returned")
        return self._changes.description(place)

    # -------------------------------------------------------- session's events

    def _on_open(self) -> None:
        self._totals.begin_session()
        self._changes.begin_session()

    def _news(self) -> Ping | None:
        return self._totals.report(self._changes.report() if self._events else None)

    def _tell_rest(self, patience: float) -> None:
        self._attachments.send_rest(patience)

    def _on_notice(self, notice: Notice) -> None:
        message, line = notice.message, self._connection
        if isinstance(message, Attached):
            answer = self._borrow()
            if (
                answer is not None
                and line is not None
                and self._attachments.attach(notice, message, line, answer)
            ):
                self._has_switched(notice.fds.pop() if len(notice.fds) > 1 else -1)
            else:
                self._on_lost()
        elif isinstance(message, Detached):
            log.info("engine %s is detached: %s", self.engine, message.reason)
            self._on_lost()

    def _on_lost(self) -> None:
        self._attachments.detach()
        self._has_switched()

    def _has_switched(self, ready_pipe: int = -1) -> None:
        """Wake event loops and waiters after `attached` may have changed."""
        self._ready_news.replace(ready_pipe)
        self._ready_news.set()
        with self._changed:
            self._changed.notify_all()

    def _work(self) -> bool:
        """Send the reset that is owed, if any, and process its answer."""
        owed = self._attachments.owed
        if owed is not None and self.attached:
            reply = self._ask(Reset(), RESET_SECONDS)
            lent = self._borrow() if isinstance(reply, ResetDone) else None
            if isinstance(reply, ResetDone) and lent is not None:
                with self._changed:
                    self._attachments.end_reset(owed, lent)
                    self._ready_news.set()
                    owed.append(reply)
                    self._changed.notify_all()
        return True

    def _borrow(self) -> Message | None:
        """Ask for loans and return the answer; None if there is none. For the keeper's thread."""
        return self._ask(Step(wanted=self._attachments.loans_wanted), self.deadline)

    def _tend(self, connection: Connection) -> None:
        if not self._attachments.tend(connection):
            connection.take_in()

    def _on_fork(self) -> None:
        # A forked child has no session to load with, so its lookups find nothing.
        self._attachments.abandon()
        self._ready_news.abandon()
        self._look_in(None)
        self._changes = Changes()

    def _look_in(self, there: Attachment | None) -> None:
        """Make lookups and KV events read an attachment's directory; None: they find nothing."""
        if there is None:
            self._find, self._entry = self._find_nothing, self._no_entry
            self._begun, self._given, self._seeking = (), {}, None
            self._changes.switch(None)
        else:
            outbox = there.decisions.outbox
            self._find, self._entry = there.directory.lookup, there.directory.entry
            self._begun, self._given, self._seeking = outbox.begun, outbox.given, there.seeking
            self._changes.switch(Source(there.directory, there.descriptions))

    def _find_nothing(self, key: bytes, first: int = 0, count: int | None = None) -> LookupResult:
        del key, first, count
        self._check_open()
        return LookupResult.MISS

    def _no_entry(self, key: bytes) -> Entry | None:
        del key
        self._check_open()
        return None
