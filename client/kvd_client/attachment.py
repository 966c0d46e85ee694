"""A scheduler's attachment to its namespace: the directory, loans, and the connection.

It sends decisions as `Step` messages, and takes loans from the answers. Calls made during an
engine's step never block.
"""

import itertools
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence

from kvd_client.connection import Connection, Notice
from kvd_client.decisions import Decisions, Loan, Loans, ReuseFilter, Seeking
from kvd_client.errors import DaemonLost, get_logger
from kvd_proto.descriptions import DescriptionsView
from kvd_proto.directory import DirectoryView
from kvd_proto.errors import DirectoryError
from kvd_proto.messages import Attached, Error, ErrorCode, Message, ResetDone, Stepped

MAX_UNANSWERED = 64  # messages; further decisions are collected until some are answered
SEVERAL = 16  # unanswered messages after which the keeper reads answers
LEAST_REMEMBERED = 1024  # keys in the reuse filter, at least
LEFT_BEHIND_SECONDS = 1.0  # after which the keeper sends what no `end_step` has sent
# The daemon has detached the engine, which has voided what the step says.
_VOID = (ErrorCode.NOT_READY, ErrorCode.LANE_LOST)

log = get_logger()


class Attachment:
    """One attachment of a scheduler, announced by `attached` over `line`. For one thread at a time.

    `loans` and `reuse` are shared by all attachments of the scheduler; `answer` is the daemon's to
    the first step; `wake` wakes the keeper to check the line. `seeking` is None without tiers.

    Raises:
        DaemonLost: the first step was refused.
    """

    def __init__(  # noqa: PLR0917 an attachment has these parts
        self,
        attached: Attached,
        directory: DirectoryView,
        descriptions: DescriptionsView | None,
        line: Connection,
        loans: Loans,
        reuse: ReuseFilter,
        answer: Message,
        wake: Callable[[], None],
    ) -> None:
        self.attached = attached
        self.directory = directory
        self.descriptions = descriptions
        self.line = line
        self._loans = loans
        self._reuse = reuse
        self._wake = wake
        self.begin()
        self.lend(answer)

    def begin(self) -> None:
        """Start empty: loans and stores begun before are void."""
        self._loans.clear()
        self.decisions = Decisions(self.directory, self._loans, self._reuse)
        table, tiers = self.directory.tiers, self.attached.tiers
        self.seeking = Seeking(self.directory, table, tiers) if table and tiers else None

    # ----------------------------------------------------------------- to tell

    def has_room(self, items: int, described: int = 0) -> bool:
        """Return whether `items` more keys, chunks and leases fit the next message.

        If not, or if `described` bytes of descriptions do not fit, the message is sent first.
        """
        outbox = self.decisions.outbox
        if not outbox.room(items) or (described and not outbox.room_for(described)):
            self.send()
        return self.decisions.outbox.room(items)

    def end_step(self, patience: float, *, all_of_it: bool) -> None:
        """Send the step's decisions; if there are none, read the daemon's answers.

        Doing both would double the longest step. If every step sends, the keeper reads the
        answers, or `prepare_store` when it lacks loans.

        Args:
            patience: seconds after which the keeper checks why there is no answer.
            all_of_it: also send what is not urgent, see `Outbox.urgent`.
        """
        line, outbox = self.line, self.decisions.outbox
        self._loans.end_step()
        tells = bool(outbox) if all_of_it else outbox.urgent
        if line.has_replies and not tells:
            self.take_in()
        unanswered = line.unanswered
        if unanswered and (unanswered % SEVERAL == 0 or line.is_overdue(patience)):
            self._wake()
        if tells:
            self.send()

    def send(self) -> None:
        """Send the outbox, unless `MAX_UNANSWERED` messages have no answer yet."""
        while self.decisions.outbox and self.line.unanswered < MAX_UNANSWERED:
            if not self._post(self._loans.wanted):
                return

    def send_left(self) -> None:
        """Send the outbox if its oldest item is `LEFT_BEHIND_SECONDS` old."""
        outbox = self.decisions.outbox
        if outbox and time.monotonic() >= outbox.since + LEFT_BEHIND_SECONDS:
            self.send()

    def _post(self, wanted: int) -> bool:
        outbox = self.decisions.outbox
        step, given = outbox.take(wanted)
        request = self.line.post(step)
        if request:
            outbox.sent(request, given)
        if not request or self.line.wants_write:
            self._wake()  # the keeper ends the session, or sends the rest of a large step
        return bool(request)

    # ------------------------------------------------------------------- loans

    def look(self, keys: Sequence[bytes]) -> None:
        """Read the daemon's answers if they may matter for a store of these keys.

        That is if loans are fewer than keys, or if a store of one of the keys has begun.
        """
        if self.line.has_replies and (
            len(self._loans) < len(keys) or not self.decisions.outbox.begun.keys().isdisjoint(keys)
        ):
            self.take_in()

    def count_loans(self) -> int:
        """Read the daemon's answers; return the number of loans at hand."""
        self.take_in()
        return self._loans.count(self.directory.is_lent)

    def ask_for(self, loans: int, there: int) -> None:
        """Ask the daemon for `loans` in all, of which `there` are at hand."""
        # The daemon lends more only if less than half of what is wanted is lent.
        self._post(max(loans, 2 * there + 1))

    def take_in(self) -> None:
        """Read and process the daemon's answers."""
        line = self.line
        line.take_in()
        try:
            for request, reply in line.replies():
                self.decisions.outbox.answered(request)
                self.lend(reply)
        except DaemonLost as error:
            line.failed = line.failed or str(error)
        if line.failed:
            self._wake()

    def lend(self, answer: Message) -> None:
        """Add the loans in an answer to a step.

        Raises:
            DaemonLost: the step was refused, unless because the engine is detached, or the answer
                is invalid: the two sides' states may differ.
        """
        if isinstance(answer, Stepped):
            slots, generations = answer.slots.numpy(), answer.generations.numpy()
            if len(slots) != len(generations):
                raise DaemonLost("Stepped contradicts itself")
            loans: list[Loan] = list(zip(slots.tolist(), generations.tolist(), strict=True))
            self._loans.add(loans)
        elif not isinstance(answer, Error):
            raise DaemonLost(f"a step was answered by {type(answer).__name__}")
        elif answer.code not in _VOID:
            raise DaemonLost(f"a step was refused: {answer.text} [{answer.code}]")


class Attachments:
    """The attachments of one scheduler, one after another. For any thread.

    `look_in` makes lookups read an attachment's directory, or find nothing (None).

    Attributes:
        lock: held to decide and to send, never while waiting. It guards all attributes below.
        current: the attachment; None while the engine is detached. May be read without the lock.
        owed: a list for the answer to a reset that the daemon has not answered yet; None: there is
            none. Until then lookups find nothing, and nothing is stored or loaded.
        serials: numbers for tickets, ascending over all sessions.
        first_store, first_lease: tickets with smaller serials are void.
    """

    def __init__(
        self, look_in: Callable[[Attachment | None], None], wake: Callable[[], None]
    ) -> None:
        self.lock = threading.Lock()
        self.current: Attachment | None = None
        self.owed: list[ResetDone] | None = None
        self.serials = itertools.count(1)
        self.first_store = self.first_lease = 0
        self._look_in = look_in
        self._wake = wake
        self._loans = Loans()
        self._reuse = ReuseFilter(1, LEAST_REMEMBERED)

    @property
    def loans_wanted(self) -> int:
        """The number of loans to ask for."""
        return self._loans.wanted

    @property
    def serving(self) -> Attachment | None:
        """The current attachment; None if detached or while a reset is owed."""
        return self.current if self.owed is None else None

    def attach(self, notice: Notice, attached: Attached, line: Connection, answer: Message) -> bool:
        """Switch to the attachment that a notice announces; return whether its directory is usable.

        A pipe's descriptor is left in the notice. Other arguments and errors: see `Attachment`.
        """
        received = receive(notice, attached)
        if received is None:
            return False
        with self.lock:
            if attached.reuse_threshold != self._reuse.threshold:
                remembered = max(LEAST_REMEMBERED, attached.num_chunks)
                self._reuse = ReuseFilter(attached.reuse_threshold, remembered)
            self._switch(
                Attachment(attached, *received, line, self._loans, self._reuse, answer, self._wake)
            )
        return True

    def detach(self) -> None:
        """Detach; all tickets become void."""
        with self.lock:
            self._switch(None)

    def begin_reset(self) -> list[ResetDone]:
        """Void all stores, and owe the daemon a reset; return the list for its answer."""
        with self.lock:
            owed: list[ResetDone] = []
            self.owed = owed
            if (there := self.current) is not None:
                there.send()  # before the reset, so that it ends these stores too
                there.begin()
                self.first_store = next(self.serials)
            self._look_in(None)
        return owed

    def end_reset(self, owed: list[ResetDone], lent: Message) -> None:
        """Resume after a reset, with the new loans in `lent`: the reset has ended all others.

        Raises:
            DaemonLost: as `Attachment.lend`.
        """
        with self.lock:
            if self.current is not None:
                self.current.lend(lent)
            if self.owed is owed:  # else another reset was requested meanwhile
                self.owed = None
            self._look_in(self.serving)

    def tend(self, line: Connection) -> bool:
        """Read answers and send what was left; return False if no attachment uses the line."""
        with self.lock:
            there = self.current
            if there is None or there.line is not line:
                return False
            there.take_in()
            there.send_left()
            return True

    def send_rest(self, patience: float) -> None:
        """Send all that is left, and wait for its answers, for `patience` seconds at most."""
        there, end = self.current, time.monotonic() + patience
        while there is not None and not there.line.failed:
            with self.lock:
                there.send()
                there.take_in()
            left = end - time.monotonic()
            if not there.line.unanswered or left <= 0 or there.line.wait_readable(left):
                return

    def abandon(self) -> None:
        """Detach in a forked child, with a new lock: a parent's thread may hold the old one."""
        self.lock = threading.Lock()
        self.current = None

    def _switch(self, attachment: Attachment | None) -> None:
        self._look_in(attachment if self.owed is None else None)
        self.current = attachment  # last: readers of `current` then do lookups
        self.first_store = self.first_lease = next(self.serials)


def receive(
    notice: Notice, attached: Attached
) -> tuple[DirectoryView, DescriptionsView | None] | None:
    """Return the directory and the descriptions of a notice; None if there is no usable directory.

    The directory's descriptor stays in the notice, followed by a pipe's, if any. The descriptions'
    is taken from the notice, and closed with the last reference to the view.
    """
    fds, needed = notice.fds, 2 if attached.description_bytes else 1
    if not needed <= len(fds) <= needed + 1:
        log.error(
            "ATTACHED came with %d descriptors, %d or %d are needed", len(fds), needed, needed + 1
        )
        return None
    try:
        size = os.fstat(fds[0]).st_size
        directory = DirectoryView(mmap.mmap(fds[0], size, prot=mmap.PROT_READ))
    except (OSError, ValueError, DirectoryError):
        log.exception("the directory of the chunks cannot be read; nothing will be found")
        return None
    if needed == 1:
        return directory, None
    fd = fds.pop(1)
    descriptions = DescriptionsView(fd)
    weakref.finalize(descriptions, os.close, fd)
    return directory, descriptions
