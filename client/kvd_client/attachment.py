"""What a scheduler has while it is attached: the directory, its loans, and the line to the daemon.

Here decisions become messages, and their answers loans. Nothing here waits, and the scheduler lets
one thread in at a time.
"""

import mmap
import os
import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from kvd_client.connection import Connection, Notice
from kvd_client.decisions import Decisions, Loan, Loans, ReuseFilter, Seeking
from kvd_client.errors import DaemonLost, get_logger
from kvd_proto.descriptions import DescriptionsView
from kvd_proto.directory import DirectoryView
from kvd_proto.errors import DirectoryError
from kvd_proto.messages import Attached, Error, ErrorCode, Message, Stepped

MAX_UNANSWERED = 64  # messages; what comes then is collected until some are answered
SEVERAL = 16  # messages without an answer, after which the keeper looks for answers
LEAST_REMEMBERED = 1024  # keys, by the reuse filter
# The daemon has detached the engine, and with that dropped what a step says.
_VOID = (ErrorCode.NOT_READY, ErrorCode.LANE_LOST)

log = get_logger()


@dataclass(slots=True)
class Kept:
    """What a scheduler keeps from one attachment to the next.

    loans: none of before; how many it needs.
    reuse: how often keys were offered.
    """

    loans: Loans = field(default_factory=Loans)
    reuse: ReuseFilter = field(default_factory=lambda: ReuseFilter(1, LEAST_REMEMBERED))


class Attachment:
    """One attachment of a scheduler.

    Args:
        attached: the daemon's notice.
        directory: of the namespace.
        descriptions: of its chunks; None where there are none.
        line: the connection over which the notice came.
        kept: what the scheduler keeps.
        answer: the daemon's to the attachment's first step.
        wake: has the keeper look at the line.

    Attributes:
        seeking: of the tiers; None where there are none.

    Raises:
        DaemonLost: the first step was refused.
    """

    def __init__(  # noqa: PLR0917 an attachment has these parts
        self,
        attached: Attached,
        directory: DirectoryView,
        descriptions: DescriptionsView | None,
        line: Connection,
        kept: Kept,
        answer: Message,
        wake: Callable[[], None],
    ) -> None:
        self.attached = attached
        self.directory = directory
        self.descriptions = descriptions
        self.line = line
        self._kept = kept
        self._wake = wake
        if attached.reuse_threshold != kept.reuse.threshold:
            remembered = max(LEAST_REMEMBERED, attached.num_chunks)
            kept.reuse = ReuseFilter(attached.reuse_threshold, remembered)
        self.begin()
        self.lend(answer)

    def begin(self) -> None:
        """Begin with nothing: what was lent or begun is void."""
        self._kept.loans.clear()
        self.decisions = Decisions(self.directory, self._kept.loans, self._kept.reuse)
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
        self._kept.loans.end_step()
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
            if not self._post(self._kept.loans.wanted):
                return

    def send_left(self, seconds: float) -> None:
        """The same, where the oldest of it was left for so long."""
        outbox = self.decisions.outbox
        if outbox and time.monotonic() >= outbox.since + seconds:
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
            len(self._kept.loans) < len(keys)
            or not self.decisions.outbox.begun.keys().isdisjoint(keys)
        ):
            self.take_in()

    def count_loans(self) -> int:
        """How many there are to use."""
        self.take_in()
        return self._kept.loans.count(self.directory.is_lent)

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
            self._kept.loans.add(loans)
        elif not isinstance(answer, Error):
            raise DaemonLost(f"a step was answered by {type(answer).__name__}")
        elif answer.code not in _VOID:
            raise DaemonLost(f"a step was refused: {answer.text} [{answer.code}]")

    def __repr__(self) -> str:
        return f"<Attachment to {self.attached.namespace.hex()[:8]}: {self.decisions!r}>"


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
