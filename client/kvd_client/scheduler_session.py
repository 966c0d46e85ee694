"""A scheduler's session: it follows the broker's notices and replies, outside an engine's steps.

The keeper's thread attaches and detaches, repeats a reset until the daemon has answered it, and
sends reports. `Scheduler` adds the calls of a step.

The engine's thread takes changes for KV events from shared memory; the keeper sets the directory to
read (`PublishedChanges`). A daemon's end or restart shows as removals, or as no changes yet.
"""

import os
import threading
import time
from collections.abc import Callable, Container, Mapping
from typing import Any, NamedTuple

from kvd_client.attachment import Attachment, Attachments
from kvd_client.changes import DEFAULT_LIMIT, ChangeReader, ChunkLocation, Differences
from kvd_client.connection import Connection, Notice
from kvd_client.decisions import SchedulerTiers
from kvd_client.errors import UsageError, check_flag, check_int, check_seconds, get_logger, shown
from kvd_client.outbox import SchedulerTotals
from kvd_client.readiness import SchedulerReadiness
from kvd_client.session import ClientSession
from kvd_proto.changes import MAX_CHANGES
from kvd_proto.descriptions import Description, DescriptionsView
from kvd_proto.directory import MAX_SLOTS, NO_HITS, DirectoryView, Entry, HitTable, LookupResult
from kvd_proto.messages import (
    Attached,
    Detached,
    KvEvents,
    Message,
    Ping,
    Reset,
    ResetDone,
    Step,
)

RESET_SECONDS = 30.0  # timeout; a daemon needs milliseconds for tens of thousands of chunks
ABSENT_SECONDS = 10.0  # for which chunks stay published without a daemon; a restart takes less
RETRY_SECONDS = 0.01  # before `reserve` requests loans again

log = get_logger()


class SchedulerSession(ClientSession):
    """The session of an engine's scheduler: its state, loans, resets, and events to wait for.

    Its parts: `Attachments` (decisions and their messages), `PublishedChanges` (KV events to
    publish), `SchedulerTotals` (reported counts), `SchedulerReadiness` (for event loops).

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
        self._ends_steps = check_flag("steps", steps)
        self._publishes_events = check_flag("events", events)
        self._totals = SchedulerTotals(with_tokens=check_flag("counts_tokens", counts_tokens))
        super().__init__(runtime_dir, engine, deadline)
        self._readiness = SchedulerReadiness()
        self._changes = PublishedChanges()
        self._attachments = Attachments(self._switch_source, self._wake)
        # `_switch_source` replaces these with each attachment: lookups need no check for one.
        self._hit_table: HitTable
        self._lookup: Callable[..., LookupResult]
        self._entry: Callable[[bytes], Entry | None]
        self._started_stores: Container[bytes]
        self._reassigned: Mapping[int, int]
        self._tiers: SchedulerTiers | None
        self._switch_source(None)
        self._start()

    @property
    def attached(self) -> bool:
        """Whether every rank is registered and has a lane, so that chunks can be found."""
        return self._attachments.current is not None

    @property
    def namespace(self) -> bytes:
        """The id of the namespace, 16 bytes; empty while not attached."""
        attachment = self._attachments.current
        return attachment.attached.namespace if attachment else b""

    @property
    def num_chunks(self) -> int:
        """The largest number of chunks of the namespace; 0 while not attached."""
        attachment = self._attachments.current
        return attachment.attached.num_chunks if attachment else 0

    @property
    def bytes_per_chunk(self) -> int:
        """Bytes of a chunk, all ranks together; 0 while not attached."""
        attachment = self._attachments.current
        return attachment.attached.bytes_per_chunk if attachment else 0

    def status(self) -> dict[str, Any]:
        """Return the daemon's state as `kvd status --json` prints it; empty without a daemon."""
        reply = self._request_status()
        return {} if reply is None else reply.status

    def close(self) -> None:
        """End the session: leases are dropped, unfinished stores given up. May be called again."""
        super().close()
        self._on_disconnected()
        self._readiness.close()

    # -------------------------------------------------------- loans and resets

    def reserve(self, slots: int, timeout: float | None = None) -> int:
        """Request loans and wait for them: for bulk work, outside an engine's steps.

        An engine gets at most its share of the slots: those of the namespace, divided by its
        engines. A lent slot may hold a chunk, which is evicted once a key gets the slot. Other
        namespaces give up slots for at most a quarter of the share.

        Args:
            slots: how many loans the next stores need, in all.
            timeout: seconds to wait at most; None: the session's `deadline`.

        Returns:
            The number of loans now: fewer, as many or more. 0 if the engine is not attached.
        """
        num_needed = check_int("slots", slots, 0, MAX_SLOTS)
        timeout_s = self.deadline if timeout is None else check_seconds("timeout", timeout)
        self._check_open()
        end, requested_at = time.monotonic() + timeout_s, 0.0
        while True:
            with self._attachments.lock:
                attachment = self._attachments.current
                if attachment is None:
                    return 0
                num_loans, now = attachment.count_loans(), time.monotonic()
                if num_loans >= num_needed:
                    return num_loans
                connection = attachment.connection
                is_idle = self._attachments.pending_reset is None and not connection.num_unanswered
                if is_idle and now >= requested_at + RETRY_SECONDS:  # others may have freed slots
                    attachment.request_loans(num_needed, num_loans)
                    requested_at = now
            if now >= end:
                return num_loans
            if connection.wait_or_fail(min(end - now, RETRY_SECONDS)):
                return num_loans

    @property
    def loans(self) -> int | None:
        """How many loans are at hand; None if there is none, but an unanswered step may bring some.

        0 if there is none and the daemon has answered all, or if nothing can be stored.
        """
        with self._attachments.lock:
            attachment = self._attachments.serving
            if attachment is None:
                return 0
            return attachment.count_loans() or (None if attachment.connection.num_unanswered else 0)

    def reset(self, timeout: float | None = None) -> ResetDone | None:
        """Drop every chunk of this engine's namespace, for all engines that share it.

        If the daemon cannot be reached or does not answer in time, the request is repeated in the
        background. Until it is answered, this engine finds and stores nothing.

        Args:
            timeout: seconds to wait for the answer; None: the session's `deadline`.

        Returns:
            How many chunks were dropped, and how many will be at the end of their leases; None if
            the daemon has not answered yet.
        """
        timeout_s = self.deadline if timeout is None else check_seconds("timeout", timeout)
        self._check_open()
        with self._changed:
            reset = self._attachments.begin_reset()
            self._changes.reset()
            self._readiness.set()
            self._wake()
            self._changed.wait_for(lambda: reset.reply or not self.attached, timeout_s)
        return reset.reply

    # ------------------------------------------------------------ event loops

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take_ready` would return True.

        It stays the same until `close`; remove it from the event loop before that.
        """
        self._check_open()
        return self._readiness.fileno()

    def take_ready(self) -> bool:
        """Return whether lookups may have changed since the last call. Never blocks.

        True if chunks became READY, if the engine was attached or detached, and if a reset was
        begun or answered. Then `lookup` the keys of interest again.
        """
        self._check_open()
        return self._readiness.test_and_clear()

    # -------------------------------------------------------------- KV events

    @property
    def describes(self) -> bool:
        """Whether `prepare_store` uses descriptions.

        True if the scheduler was made with `events=True` and the namespace it is attached to keeps
        descriptions; otherwise `prepare_store` ignores them. It may change with each attachment.
        """
        attachment = self._attachments.current
        return (
            self._publishes_events
            and attachment is not None
            and attachment.descriptions is not None
        )

    def take_changes(self, limit: int = DEFAULT_LIMIT) -> Differences:
        """Return which chunks became READY, came into tiers, or ceased to be there.

        All differences returned so far add up to what lookups find, whichever engine stored or
        dropped the chunks. A reset revokes all of them, and so does an engine that stays detached
        for `ABSENT_SECONDS`; until then nothing changes. Never blocks: it reads shared memory.

        Args:
            limit: the largest number of changes to read; for the rest see `changes_waiting`.
        """
        max_changes = check_int("limit", limit, 1, MAX_CHANGES)
        self._check_open()
        return self._changes.take(max_changes)

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

    def description(self, location: ChunkLocation) -> Description | None:
        """Return the description of the chunk that `take_changes` returned at this location.

        None if it has none, or is not there any more.
        """
        if not isinstance(location, ChunkLocation):
            raise UsageError(f"location={shown(location)}: pass one that take_changes returned")
        return self._changes.description(location)

    # -------------------------------------------------------- session's events

    def _on_connected(self) -> None:
        self._totals.begin_session()
        self._changes.begin_session()

    def _make_report(self) -> Ping | None:
        return self._totals.report(self._changes.report() if self._publishes_events else None)

    def _flush(self, timeout: float) -> None:
        self._attachments.flush(timeout)

    def _on_notice(self, notice: Notice) -> None:
        message, connection = notice.message, self._connection
        if isinstance(message, Attached):
            answer = self._request_loans()
            if (
                answer is not None
                and connection is not None
                and self._attachments.attach(notice, message, connection, answer)
            ):
                self._on_switched(notice.fds.pop() if len(notice.fds) > 1 else -1)
            else:
                self._on_disconnected()
        elif isinstance(message, Detached):
            log.info("engine %s is detached: %s", self.engine, message.reason)
            self._on_disconnected()

    def _on_disconnected(self) -> None:
        self._attachments.detach()
        self._on_switched()

    def _on_switched(self, ready_pipe: int = -1) -> None:
        """Wake event loops and waiters after `attached` may have changed."""
        self._readiness.replace_pipe(ready_pipe)
        self._readiness.set()
        with self._changed:
            self._changed.notify_all()

    def _send_requests(self) -> bool:
        """Send the pending reset, if any, and then request loans: the reset ended the old ones.

        If the daemon refuses the reset, or leaves one of the two requests unanswered, the reset
        stays pending and is sent again.
        """
        reset = self._attachments.pending_reset
        if reset is not None and self.attached:
            reply = self._request(Reset(), RESET_SECONDS)
            loans = self._request_loans() if isinstance(reply, ResetDone) else None
            if isinstance(reply, ResetDone) and loans is not None:
                with self._changed:
                    self._attachments.end_reset(reset, loans)
                    self._readiness.set()
                    reset.reply = reply
                    self._changed.notify_all()
        return True  # False would end this connection

    def _request_loans(self) -> Message | None:
        """Request loans and return the answer; None if there is none. For the keeper's thread."""
        return self._request(Step(wanted=self._attachments.loans_wanted), self.deadline)

    def _receive(self, connection: Connection) -> None:
        if not self._attachments.receive(connection):
            connection.receive_all()

    def _on_fork(self) -> None:
        # A forked child has no session to load with, so its lookups find nothing.
        self._attachments.abandon()
        self._readiness.abandon()
        self._switch_source(None)
        self._changes = PublishedChanges()

    def _switch_source(self, attachment: Attachment | None) -> None:
        """Point lookups and the reader of changes at an attachment.

        None: lookups miss; published chunks stay published for `ABSENT_SECONDS`.
        """
        if attachment is None:
            self._hit_table = NO_HITS
            self._lookup, self._entry = self._lookup_nothing, self._no_entry
            self._started_stores, self._reassigned, self._tiers = (), {}, None
            self._changes.switch(None)
        else:
            directory, outbox = attachment.directory, attachment.decisions.outbox
            self._hit_table = directory.hit_table
            self._lookup, self._entry = directory.lookup, directory.entry
            self._started_stores, self._reassigned = outbox.started_stores, outbox.reassigned
            self._tiers = attachment.tiers
            self._changes.switch(ChangeSource(directory, attachment.descriptions))

    def _lookup_nothing(self, *_: object) -> LookupResult:
        self._check_open()
        return LookupResult.MISS

    def _no_entry(self, _: bytes) -> Entry | None:
        self._check_open()
        return None


class ChangeSource(NamedTuple):
    """What changes are read from: the views of one attachment, until a reset or its end."""

    directory: DirectoryView
    descriptions: DescriptionsView | None


class PublishedChanges:
    """The changes of one scheduler, across attachments.

    Attributes:
        behind: the last `take` left changes unread that existed when it began.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()  # held by the reading thread
        self._reader = ChangeReader()
        self._next_source: ChangeSource | None = None  # set by the keeper
        self._source: ChangeSource | None = None  # that the reader reads
        self._absent_since: float | None = clock()
        self._is_reset = False
        self._num_changes_published = 0
        self.behind = False
        self._at_session_start = KvEvents(0, 0, 0, 0)  # the totals when the session began
        self._reported = self._at_session_start

    # -------------------------------------------------------- the keeper's calls

    def switch(self, source: ChangeSource | None) -> None:
        """Set the directory to read; None: there is none."""
        if source is not None:
            self._absent_since = None
        elif self._absent_since is None:
            self._absent_since = self._clock()
        self._next_source = source

    def reset(self) -> None:
        """Make the next calls of `take` remove all that is published."""
        self._is_reset = True

    def begin_session(self) -> None:
        """Count what `report` returns from 0 on."""
        self._at_session_start = self._reported = self._totals()

    def report(self) -> KvEvents | None:
        """Return the session's totals; None if they have not changed since the last call."""
        totals = self._totals()
        if totals == self._reported:
            return None
        self._reported, at_start = totals, self._at_session_start
        return KvEvents(
            totals.published - at_start.published,
            totals.snapshots - at_start.snapshots,
            totals.overruns - at_start.overruns,
            self._reader.take_lag() // 1000,
        )

    def _totals(self) -> KvEvents:
        reader = self._reader
        return KvEvents(self._num_changes_published, reader.num_snapshots, reader.num_overruns, 0)

    # ------------------------------------------------------- the engine's calls

    @property
    def waiting(self) -> bool:
        """Whether `take` has something to do."""
        return (
            self._is_reset
            or self._reader.waiting
            or self._next_source is not self._source
            or (self._is_absent() and bool(self._reader))
        )

    def take(self, limit: int) -> Differences:
        """Return what has changed since the last call; see `ChangeReader.take`."""
        with self._lock:
            self._update_source()
            read_before = self._reader.num_changes
            differences = self._reader.take(limit)
            num_read = self._reader.num_changes - read_before
            self.behind = self._reader.is_unfinished or num_read >= limit
            self._num_changes_published += len(differences)
            return differences

    def repeat(self) -> None:
        """Make `take` return everything that is there again, as if nothing were published."""
        with self._lock:
            self._reader.forget()

    def description(self, location: ChunkLocation) -> Description | None:
        """Return the description of the chunk that is or was at this location; None: unknown."""
        source = self._source or self._next_source
        if source is None or source.descriptions is None:
            return None
        return source.descriptions.read(location.slot, location.generation)

    def _update_source(self) -> None:
        """Make the reader read what the keeper has set, after a reset or a long absence too."""
        if self._is_reset:
            self._is_reset = False  # before anything is read: another reset may come
            self._detach()
            self._reader.withdraw()
        source = self._next_source
        if source is not self._source:
            if source is None:
                self._detach()
            else:
                self._reader.attach(source.directory)
                self._source = source
        if self._is_absent():
            self._reader.withdraw()

    def _detach(self) -> None:
        self._reader.detach()
        self._source = None

    def _is_absent(self) -> bool:
        since = self._absent_since
        return since is not None and self._clock() >= since + ABSENT_SECONDS
