"""A scheduler's session: when it is attached, what its keeper does, and the requests that wait."""

import itertools
import os
import threading
import time
from collections.abc import Callable, Container, Mapping
from typing import Any

from kvd_client.arguments import flag, seconds
from kvd_client.attachment import Attachment, Kept, receive
from kvd_client.changes import Changes, Source
from kvd_client.connection import Connection, Notice
from kvd_client.decisions import Seeking
from kvd_client.errors import get_logger
from kvd_client.lookups import LookupCounts
from kvd_client.readiness import ReadyNews
from kvd_client.session import Session
from kvd_proto.directory import Entry, LookupResult
from kvd_proto.messages import (
    Attached,
    Detached,
    Lookups,
    Message,
    Ping,
    Reset,
    ResetDone,
    Status,
    StatusReport,
    Step,
)

RESET_SECONDS = 30.0  # it takes a daemon milliseconds for ten thousands of chunks
LEFT_BEHIND_SECONDS = 1.0  # after which the keeper sends what no `end_step` has sent

log = get_logger()


class SchedulerSession(Session):
    """What a `Scheduler` has beside the calls of a step; its arguments are that one's."""

    _kind = "scheduler"

    def __init__(
        self,
        runtime_dir: str | os.PathLike[str],
        engine: str,
        *,
        deadline: float = 1.0,
        counts_tokens: bool = False,
        events: bool = False,
    ) -> None:
        self._counts_tokens = flag("counts_tokens", counts_tokens)
        self._events = flag("events", events)
        super().__init__(runtime_dir, engine, deadline)
        self._ready_news = ReadyNews()
        # Of what follows up to the gap; held to decide and to send, never to wait.
        self._state = threading.Lock()
        self._attachment: Attachment | None = None
        self._kept = Kept()
        self._serials = itertools.count(1)  # of tickets, those of one session after another
        self._first_store = self._first_lease = 0  # serials below it are over
        # A reset that no daemon has answered yet; its answer is put into it.
        self._owed: list[ResetDone] | None = None

        # Replaced whenever that changes, so that a lookup tests nothing.
        self._find: Callable[..., LookupResult] = self._find_nothing
        self._entry: Callable[[bytes], Entry | None] = self._no_entry
        self._begun: Container[bytes] = ()
        self._given: Mapping[int, int] = {}
        self._seeking: Seeking | None = None
        self._counts = LookupCounts()
        self._reported: Lookups | None = None
        self._prefill_ns: int | None = None
        self._reported_prefill_ns: int | None = None
        self._changes = Changes()
        self._start()

    def reset(self, timeout: float | None = None) -> ResetDone | None:
        """Drop every chunk of this engine's namespace, for all engines that share it.

        A daemon that cannot be asked now or does not answer in time is asked again as soon as
        possible. Until it has answered this engine finds and stores nothing.

        Args:
            timeout: seconds to wait for the answer; None: the deadline.

        Returns:
            How many chunks are dropped now, and deferred to the end of their leases; None where the
            daemon has not answered.
        """
        patience = self.deadline if timeout is None else seconds("timeout", timeout)
        self._check_open()
        owed: list[ResetDone] = []
        with self._changed:
            with self._state:
                self._owed = owed
                if (there := self._attachment) is not None:
                    there.send()  # before the reset: it is to end these stores too
                    there.begin()
                    self._first_store = next(self._serials)
                self._switch_to(self._attachment)
                self._changes.reset()
            self._ready_news.set()
            self._wake()
            self._changed.wait_for(lambda: owed or not self.attached, patience)
        return owed[0] if owed else None

    def status(self) -> dict[str, Any]:
        """Return the daemon's state as `kvd status --json` prints it; empty without a daemon."""
        reply = self._request(Status(), StatusReport)
        return {} if reply is None else reply.status

    @property
    def attached(self) -> bool:
        """Whether every rank is registered and has a lane, so that chunks can be found."""
        return self._attachment is not None

    @property
    def namespace(self) -> bytes:
        """The id of the namespace, 16 bytes; empty while not attached."""
        there = self._attachment
        return there.attached.namespace if there else b""

    @property
    def num_chunks(self) -> int:
        """The largest number of chunks of the namespace; 0 while not attached."""
        there = self._attachment
        return there.attached.num_chunks if there else 0

    @property
    def bytes_per_chunk(self) -> int:
        """Bytes of a chunk, all ranks together; 0 while not attached."""
        there = self._attachment
        return there.attached.bytes_per_chunk if there else 0

    def close(self) -> None:
        """End the session: leases are dropped, unfinished stores given up. May be called again."""
        super().close()
        self._attach(None)
        self._ready_news.close()

    # ------------------------------------------------------------ event loops

    def fileno(self) -> int:
        """Return a descriptor that is readable when `take_ready` has news.

        The descriptor is the same until `close`, before which the loop must forget it.
        """
        self._check_open()
        return self._ready_news.fileno()

    def take_ready(self) -> bool:
        """Return whether stored chunks became READY, or all chunks became found or missed.

        The latter happens when the engine is attached or detached, and when the daemon has answered
        a reset. Since the last call; never waits. Look at what is of interest with `lookup`.
        """
        self._check_open()
        return self._ready_news.take()

    # -------------------------------------------------------- session's events

    def _on_open(self) -> None:
        # What the session before has not reported is not counted, but for what has gone wrong: that
        # is often while there is no daemon.
        before, told = self._counts, self._reported
        detached = before.detached_tokens - (told.detached_tokens if told else 0)
        self._counts = LookupCounts(
            tokens=detached,
            aborted_requests=before.aborted_requests - (told.aborted_requests if told else 0),
            detached_tokens=detached,
        )
        self._reported = self._reported_prefill_ns = None
        self._changes.begin_session()

    def _news(self) -> Ping | None:
        """The totals of this session; None where the daemon has been told."""
        lookups = self._counts.report(with_tokens=self._counts_tokens) if self._counts else None
        if lookups == self._reported:
            lookups = None
        else:
            self._reported = lookups
        kv_events = self._changes.report() if self._events else None
        prefill_ns = self._prefill_ns if self._prefill_ns != self._reported_prefill_ns else None
        if lookups is None and kv_events is None and prefill_ns is None:
            return None
        self._reported_prefill_ns = self._prefill_ns
        return Ping(lookups=lookups, kv_events=kv_events, prefill_ns=prefill_ns)

    def _tell_rest(self, patience: float) -> None:
        there, end = self._attachment, time.monotonic() + patience
        while there is not None and not there.line.failed:
            with self._state:
                there.send()
                there.take_in()
            left = end - time.monotonic()
            if not there.line.unanswered or left <= 0 or there.line.wait_readable(left):
                return

    def _on_notice(self, notice: Notice) -> None:
        message, connection = notice.message, self._connection
        if isinstance(message, Attached):
            answer = self._borrow()
            if answer is None or connection is None or (got := receive(notice, message)) is None:
                self._attach(None)
                return
            with self._state:
                there = Attachment(message, *got, connection, self._kept, answer, self._wake)
            self._attach(there, notice.fds.pop() if len(notice.fds) > 1 else -1)
        elif isinstance(message, Detached):
            log.info("engine %s is detached: %s", self.engine, message.reason)
            self._attach(None)

    def _work(self) -> bool:
        """Ask for the reset that is owed, if one is."""
        owed = self._owed
        if owed is not None and self.attached:
            reply = self._ask(Reset(), RESET_SECONDS)
            # It has taken all loans back: there are new ones before anything is stored again.
            lent = self._borrow() if isinstance(reply, ResetDone) else None
            if isinstance(reply, ResetDone) and lent is not None:
                with self._changed:
                    with self._state:
                        if self._attachment is not None:
                            self._attachment.lend(lent)
                        if self._owed is owed:  # none was asked for later
                            self._owed = None
                        self._switch_to(self._attachment)
                    self._ready_news.set()
                    owed.append(reply)
                    self._changed.notify_all()
        return True

    def _borrow(self) -> Message | None:
        """Ask for loans and wait for the answer, in the keeper; None where there is none."""
        return self._ask(Step(wanted=self._kept.loans.wanted), self.deadline)

    def _tend(self, connection: Connection) -> None:
        with self._state:
            there = self._attachment
            if there is not None and there.line is connection:
                there.take_in()
                there.send_left(LEFT_BEHIND_SECONDS)
                return
        connection.take_in()

    def _on_lost(self) -> None:
        self._attach(None)

    def _on_fork(self) -> None:
        # The child reads no directory that it cannot load from.
        self._state = threading.Lock()
        self._ready_news.abandon()
        self._attachment = None
        self._find, self._begun, self._seeking = self._find_nothing, (), None
        self._given = {}
        self._entry = self._no_entry
        self._changes = Changes()

    def _attach(self, attachment: Attachment | None, ready_pipe: int = -1) -> None:
        self._ready_news.replace(ready_pipe)
        with self._changed:
            with self._state:
                self._switch_to(attachment)
                self._first_store = self._first_lease = next(self._serials)
            self._ready_news.set()
            self._changed.notify_all()

    def _switch_to(self, attachment: Attachment | None) -> None:
        """Attach or detach, and choose what lookups read: a directory that can be loaded from."""
        there = None if self._owed is not None else attachment
        if there is None:
            self._find, self._begun, self._seeking = self._find_nothing, (), None
            self._given = {}
            self._entry = self._no_entry
            self._changes.switch(None)
        else:
            self._find, self._begun = there.directory.lookup, there.decisions.outbox.begun
            self._given = there.decisions.outbox.given
            self._entry, self._seeking = there.directory.entry, there.seeking
            self._changes.switch(Source(there.directory, there.descriptions))
        self._attachment = attachment  # last: who sees this looks things up

    def _find_nothing(self, key: bytes, first: int = 0, count: int | None = None) -> LookupResult:
        del key, first, count
        self._check_open()
        return LookupResult.MISS

    def _no_entry(self, key: bytes) -> Entry | None:
        del key
        self._check_open()
        return None
