"""A scheduler's attachment to its namespace: the directory, loans, and the connection.

It sends decisions as `Step` messages, and takes loans from the answers. Calls made during an
engine step never block.
"""

import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd_client.connection import Connection, Notice
from kvd_client.decisions import Decisions, Loan, LoanQueue, ReuseFilter, SchedulerTiers
from kvd_client.errors import DaemonLost, get_logger
from kvd_proto.descriptions import DescriptionsView
from kvd_proto.directory import DirectoryView
from kvd_proto.errors import DirectoryError
from kvd_proto.messages import Attached, Error, ErrorCode, Message, ResetDone, Stepped

MAX_UNANSWERED = 64  # messages; further decisions are collected until some are answered
WAKE_INTERVAL = 16  # the keeper reads answers at each multiple of so many unanswered messages
MIN_REMEMBERED_KEYS = 1024  # in the reuse filter
OVERDUE_SECONDS = 1.0  # after which the keeper sends decisions that no `end_step` has sent
# The daemon has detached the engine, so what the step says is void anyway.
_DETACHED_CODES = (ErrorCode.NOT_READY, ErrorCode.LANE_LOST)

log = get_logger()


class Attachment:
    """One attachment of a scheduler, announced by the notice `attached`. For one thread at a time.

    `loans` and `reuse` are shared by all attachments of the scheduler; `answer` is the daemon's to
    the first step; `wake` wakes the keeper to check the connection. `decisions` begin anew with
    each reset; `tiers` is None if the daemon has none.

    Raises:
        DaemonLost: the first step was refused.
    """

    def __init__(  # noqa: PLR0917 an attachment has these parts
        self,
        attached: Attached,
        directory: DirectoryView,
        descriptions: DescriptionsView | None,
        connection: Connection,
        loans: LoanQueue,
        reuse: ReuseFilter,
        answer: Message,
        wake: Callable[[], None],
    ) -> None:
        self.attached = attached
        self.directory = directory
        self.descriptions = descriptions
        self.connection = connection
        self._loans = loans
        self._reuse = reuse
        self._wake = wake
        self.start_empty()
        self.add_loans(answer)

    def start_empty(self) -> None:
        """Void all loans and stores started before, and start new decisions."""
        self._loans.clear()
        self.decisions = Decisions(self.directory, self._loans, self._reuse)
        table, infos = self.directory.tiers, self.attached.tiers
        self.tiers = SchedulerTiers(self.directory, table, infos) if table and infos else None

    # -------------------------------------------------------------------- send

    def has_room(self, num_items: int, described_bytes: int = 0) -> bool:
        """Return whether so many more keys, chunks and leases fit the next message.

        If not, or if `described_bytes` of descriptions do not fit, the message is sent first.
        """
        outbox = self.decisions.outbox
        if not outbox.has_room(num_items) or (
            described_bytes and not outbox.has_description_room(described_bytes)
        ):
            self.send()
        return self.decisions.outbox.has_room(num_items)

    def end_step(self, timeout: float, *, only_if_urgent: bool) -> None:
        """Send the step's decisions; if there are none, read the daemon's answers.

        Doing both would double the longest step. If every step sends, the keeper reads the
        answers, or `prepare_store` when it lacks loans.

        Args:
            timeout: seconds after which the keeper checks why there is no answer.
            only_if_urgent: send nothing unless some of it is urgent, see `Outbox.is_urgent`.
        """
        connection, outbox = self.connection, self.decisions.outbox
        self._loans.end_step()
        sends = outbox.is_urgent if only_if_urgent else bool(outbox)
        if connection.has_replies and not sends:
            self.read_answers()
        num_unanswered = connection.num_unanswered
        if num_unanswered and (
            num_unanswered % WAKE_INTERVAL == 0 or connection.is_overdue(timeout)
        ):
            self._wake()
        if sends:
            self.send()

    def send(self) -> None:
        """Send the outbox, unless `MAX_UNANSWERED` messages have no answer yet."""
        while self.decisions.outbox and self.connection.num_unanswered < MAX_UNANSWERED:
            if not self._post_step(self._loans.num_wanted):
                return

    def send_overdue(self) -> None:
        """Send the outbox if its oldest item is `OVERDUE_SECONDS` old."""
        outbox = self.decisions.outbox
        if outbox and time.monotonic() >= outbox.oldest_at + OVERDUE_SECONDS:
            self.send()

    def _post_step(self, loans_wanted: int) -> bool:
        outbox = self.decisions.outbox
        step, unanswered = outbox.take(loans_wanted)
        request_id = self.connection.post(step)
        if request_id:
            outbox.on_sent(request_id, unanswered)
        if not request_id or self.connection.wants_write:
            self._wake()  # the keeper ends the session, or sends the rest of a large step
        return bool(request_id)

    # ------------------------------------------------------------------- loans

    def read_answers_for(self, keys: Sequence[bytes]) -> None:
        """Read the daemon's answers if they may matter for a store of these keys.

        They do if there are fewer loans than keys, or if a store of one of the keys has started.
        """
        if self.connection.has_replies and (
            len(self._loans) < len(keys)
            or not self.decisions.outbox.started_stores.keys().isdisjoint(keys)
        ):
            self.read_answers()

    def count_loans(self) -> int:
        """Read the daemon's answers; return the number of loans at hand."""
        self.read_answers()
        return self._loans.count(self.directory.is_lent)

    def request_loans(self, num_needed: int, num_loans: int) -> None:
        """Request `num_needed` loans in all, of which `num_loans` are at hand."""
        # The daemon lends more only if less than half of the wanted loans are lent.
        self._post_step(max(num_needed, 2 * num_loans + 1))

    def read_answers(self) -> None:
        """Receive and process the daemon's answers."""
        connection = self.connection
        connection.receive_all()
        try:
            for request_id, reply in connection.take_replies():
                self.decisions.outbox.on_answered(request_id)
                self.add_loans(reply)
        except DaemonLost as error:
            connection.failure = connection.failure or str(error)
        if connection.failure:
            self._wake()

    def add_loans(self, answer: Message) -> None:
        """Add the loans in an answer to a step.

        Raises:
            DaemonLost: the step was refused, unless because the engine is detached, or the answer
                is invalid: the two sides' states may differ.
        """
        if isinstance(answer, Stepped):
            slots, generations = answer.slots.numpy(), answer.generations.numpy()
            if len(slots) != len(generations):
                text = f"Stepped has {len(slots)} slots and {len(generations)} generations"
                raise DaemonLost(text)
            loans: list[Loan] = list(zip(slots.tolist(), generations.tolist(), strict=True))
            self._loans.add(loans)
        elif not isinstance(answer, Error):
            raise DaemonLost(f"a step was answered by {type(answer).__name__}")
        elif answer.code not in _DETACHED_CODES:
            raise DaemonLost(f"a step was refused: {answer.text} [{answer.code}]")


@dataclass(slots=True, eq=False)
class PendingReset:
    """A reset that the daemon has not answered yet. `reply`: the answer, once it has come."""

    reply: ResetDone | None = None


class Attachments:
    """The attachments of one scheduler, one after another. For any thread.

    `switch_source` makes lookups read an attachment's directory, or find nothing (None).

    Attributes:
        lock: held to decide and to send, never while waiting. It guards all attributes below.
        current: the attachment; None while the engine is detached. May be read without the lock.
        pending_reset: None: there is none. While there is one, lookups find nothing, and nothing is
            stored or loaded.
        serials: numbers for tickets, ascending over all sessions.
        first_store, first_lease: tickets with smaller serials are void.
    """

    def __init__(
        self, switch_source: Callable[[Attachment | None], None], wake: Callable[[], None]
    ) -> None:
        self.lock = threading.Lock()
        self.current: Attachment | None = None
        self.pending_reset: PendingReset | None = None
        self.serials = itertools.count(1)
        self.first_store = self.first_lease = 0
        self._switch_source = switch_source
        self._wake = wake
        self._loans = LoanQueue()
        self._reuse = ReuseFilter(1, MIN_REMEMBERED_KEYS)

    @property
    def loans_wanted(self) -> int:
        """The number of loans to request."""
        return self._loans.num_wanted

    @property
    def serving(self) -> Attachment | None:
        """The current attachment; None if detached or while a reset is pending."""
        return self.current if self.pending_reset is None else None

    def attach(
        self, notice: Notice, attached: Attached, connection: Connection, answer: Message
    ) -> bool:
        """Switch to the attachment that a notice announces; return whether its directory is usable.

        A pipe's descriptor is left in the notice. Other arguments and errors: see `Attachment`.
        """
        views = open_views(notice, attached)
        if views is None:
            return False
        with self.lock:
            if attached.reuse_threshold != self._reuse.threshold:
                capacity = max(MIN_REMEMBERED_KEYS, attached.num_chunks)
                self._reuse = ReuseFilter(attached.reuse_threshold, capacity)
            loans, reuse, wake = self._loans, self._reuse, self._wake
            self._switch(Attachment(attached, *views, connection, loans, reuse, answer, wake))
        return True

    def detach(self) -> None:
        """Detach; all tickets become void."""
        with self.lock:
            self._switch(None)

    def begin_reset(self) -> PendingReset:
        """Void all stores, and return a reset for the keeper to send."""
        with self.lock:
            reset = self.pending_reset = PendingReset()
            if (attachment := self.current) is not None:
                attachment.send()  # before the reset, so that it ends these stores too
                attachment.start_empty()
                self.first_store = next(self.serials)
            self._switch_source(None)
        return reset

    def end_reset(self, reset: PendingReset, loans: Message) -> None:
        """Resume after a reset with new loans: the reset has ended all others.

        Args:
            reset: what `begin_reset` returned.
            loans: the answer to a step that requested loans.

        Raises:
            DaemonLost: as `Attachment.add_loans`.
        """
        with self.lock:
            if self.current is not None:
                self.current.add_loans(loans)
            if self.pending_reset is reset:  # else another reset was requested meanwhile
                self.pending_reset = None
            self._switch_source(self.serving)

    def receive(self, connection: Connection) -> bool:
        """Read answers, send overdue decisions; return False if no attachment uses `connection`."""
        with self.lock:
            attachment = self.current
            if attachment is None or attachment.connection is not connection:
                return False
            attachment.read_answers()
            attachment.send_overdue()
            return True

    def flush(self, timeout: float) -> None:
        """Send all decisions, and wait for the answers, for `timeout` seconds at most."""
        attachment, end = self.current, time.monotonic() + timeout
        while attachment is not None and not attachment.connection.failure:
            with self.lock:
                attachment.send()
                attachment.read_answers()
            connection, left_s = attachment.connection, end - time.monotonic()
            if not connection.num_unanswered or left_s <= 0 or connection.wait_or_fail(left_s):
                return

    def abandon(self) -> None:
        """Detach in a forked child, with a new lock: a parent's thread may hold the old one."""
        self.lock = threading.Lock()
        self.current = None

    def _switch(self, attachment: Attachment | None) -> None:
        self._switch_source(attachment if self.pending_reset is None else None)
        self.current = attachment  # last: readers of `current` then do lookups
        self.first_store = self.first_lease = next(self.serials)


def open_views(
    notice: Notice, attached: Attached
) -> tuple[DirectoryView, DescriptionsView | None] | None:
    """Return the directory and the descriptions of a notice; None if there is no usable directory.

    The directory's descriptor stays in the notice, followed by a pipe's, if any. The descriptions'
    is taken from the notice, and closed with the last reference to the view.
    """
    fds, num_views = notice.fds, 2 if attached.description_bytes else 1
    if not num_views <= len(fds) <= num_views + 1:
        log.error(
            "ATTACHED came with %d descriptors, not %d or %d", len(fds), num_views, num_views + 1
        )
        return None
    try:
        size = os.fstat(fds[0]).st_size
        directory = DirectoryView(mmap.mmap(fds[0], size, prot=mmap.PROT_READ))
    except (OSError, ValueError, DirectoryError):
        log.exception("the directory of the chunks cannot be read; every lookup misses")
        return None
    if num_views == 1:
        return directory, None
    fd = fds.pop(1)
    descriptions = DescriptionsView(fd)
    weakref.finalize(descriptions, os.close, fd)
    return directory, descriptions
