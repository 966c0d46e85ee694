"""What a scheduler has while it is attached: the directory, its loans, and the line to the daemon.

Here decisions become messages, and their answers loans. Nothing here waits.
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

MAX_UNANSWERED = 64  # messages; what comes then is collected until some are answered
SEVERAL = 16  # messages without an answer, after which the keeper looks for answers
LEAST_REMEMBERED = 1024  # keys, by the reuse filter
LEFT_BEHIND_SECONDS = 1.0  # after which the keeper sends what no `end_step` has sent
# The daemon has detached the engine, and with that dropped what a step says.
_VOID = (ErrorCode.NOT_READY, ErrorCode.LANE_LOST)

log = get_logger()


class Attachment:
    """One attachment of a scheduler, announced by `attached` over `line`. For one thread at a time.

    `loans` and `reuse` are the scheduler's, for all its attachments; `answer` is the daemon's to
    the first step; `wake` has the keeper look at the line. Without tiers `seeking` is None.

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
        """Begin with nothing: what was lent or begun is void."""
        self._loans.clear()
        self.decisions = Decisions(self.directory, self._loans, self._reuse)
        table, tiers = self.directory.tiers, self.attached.tiers
        self.seeking = Seeking(self.directory, table, tiers) if table and tiers else None

    # ----------------------------------------------------------------- to tell

    def has_room(self, items: int, described: int = 0) -> bool:
        """Whether the daemon can be told of so many keys, chunks and leases more.

        With `described`, so many bytes of descriptions, room is made for them too, if it can be.
        """
        outbox = self.decisions.outbox
        if not outbox.room(items) or (described and not outbox.room_for(described)):
            self.send()
        return self.decisions.outbox.room(items)

    def end_step(self, patience: float, *, all_of_it: bool) -> None:
        """Tell what is to be told, or else take in what the daemon has answered.

        Both in one step would double the longest; where each step has something to tell, the
        keeper takes the answers in, and `prepare_store` where it needs more loans than there are.

        Args:
            patience: seconds after which the keeper is to look why there is no answer.
            all_of_it: also what may wait for a message that is sent for something else.
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
        """Tell what is to be told, unless very much has no answer yet."""
        while self.decisions.outbox and self.line.unanswered < MAX_UNANSWERED:
            if not self._post(self._loans.wanted):
                return

    def send_left(self) -> None:
        """The same, where the oldest of it was left for `LEFT_BEHIND_SECONDS`."""
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
            self._wake()  # the keeper gives the session up, or sends the rest of a large step
        return bool(request)

    # ------------------------------------------------------------------- loans

    def look(self, keys: Sequence[bytes]) -> None:
        """Take in what has been answered, where it may decide about stores of these keys.

        It may bring loans, and of keys that have begun it says that the directory knows them now.
        """
        if self.line.has_replies and (
            len(self._loans) < len(keys) or not self.decisions.outbox.begun.keys().isdisjoint(keys)
        ):
            self.take_in()

    def count_loans(self) -> int:
        """How many there are to use."""
        self.take_in()
        return self._loans.count(self.directory.is_lent)

    def ask_for(self, loans: int, there: int) -> None:
        """Ask for so many in all, where `there` are there."""
        # The daemon lends more only where less than half of what is wanted is lent.
        self._post(max(loans, 2 * there + 1))

    def take_in(self) -> None:
        """Take in what the daemon has answered."""
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
        """Take the loans of an answer to a step.

        Raises:
            DaemonLost: the daemon has not done what it was told, and not because it has detached
                the engine: what it holds is not what is believed here.
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

    `look_in` has lookups read an attachment's directory, or find nothing.

    Attributes:
        lock: held to decide and to send, never to wait. `current` and all below is used under it.
        current: the attachment; None while the engine is detached. May be read without the lock.
        owed: a reset that no daemon has answered yet; its answer is put into it. Until then lookups
            find nothing, and nothing is stored or loaded.
        serials: of tickets, those of one session after another.
        first_store, first_lease: tickets with smaller serials are over.
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
        """How many loans to ask for."""
        return self._loans.wanted

    @property
    def serving(self) -> Attachment | None:
        """The attachment to decide with; None also while a reset is owed."""
        return self.current if self.owed is None else None

    def attach(self, notice: Notice, attached: Attached, line: Connection, answer: Message) -> bool:
        """Attach, as a notice says; return whether there is a directory to read.

        A pipe's descriptor is left in the notice. Arguments and errors as of `Attachment`.
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
        """Detach; every ticket is over."""
        with self.lock:
            self._switch(None)

    def begin_reset(self) -> list[ResetDone]:
        """Void all that was stored, and owe a reset; return it."""
        with self.lock:
            owed: list[ResetDone] = []
            self.owed = owed
            if (there := self.current) is not None:
                there.send()  # before the reset: it is to end these stores too
                there.begin()
                self.first_store = next(self.serials)
            self._look_in(None)
        return owed

    def end_reset(self, owed: list[ResetDone], lent: Message) -> None:
        """Go on after a reset, with new loans: it has taken all back.

        Raises:
            DaemonLost: as `Attachment.lend`.
        """
        with self.lock:
            if self.current is not None:
                self.current.lend(lent)
            if self.owed is owed:  # none was asked for later
                self.owed = None
            self._look_in(self.serving)

    def tend(self, line: Connection) -> bool:
        """Take in what has arrived, send what was left; return false where the line is no one's."""
        with self.lock:
            there = self.current
            if there is None or there.line is not line:
                return False
            there.take_in()
            there.send_left()
            return True

    def send_rest(self, patience: float) -> None:
        """Send all that is left, and wait until the daemon knows; `patience` seconds at most."""
        there, end = self.current, time.monotonic() + patience
        while there is not None and not there.line.failed:
            with self.lock:
                there.send()
                there.take_in()
            left = end - time.monotonic()
            if not there.line.unanswered or left <= 0 or there.line.wait_readable(left):
                return

    def abandon(self) -> None:
        """In a forked child: the lock may be another thread's of the parent, for ever."""
        self.lock = threading.Lock()
        self.current = None

    def _switch(self, attachment: Attachment | None) -> None:
        self._look_in(attachment if self.owed is None else None)
        self.current = attachment  # last: who sees this looks things up
        self.first_store = self.first_lease = next(self.serials)


def receive(
    notice: Notice, attached: Attached
) -> tuple[DirectoryView, DescriptionsView | None] | None:
    """Return what came with the notice for a scheduler; None where there is no directory to read.

    The directory's mapping outlives its descriptor. That of the descriptions is taken from the
    notice, and closed when nobody uses them any more; a pipe's is left behind the directory's.
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
