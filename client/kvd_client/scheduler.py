"""The scheduler's side: what is cached, where to store, what to load."""

import contextlib
import itertools
import logging
import mmap
import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvd_client.arguments import (
    Blocks,
    check_blocks,
    check_key,
    collection,
    flag,
    pack_blocks,
    request_keys,
    seconds,
    shown,
    whole,
)
from kvd_client.connection import Notice
from kvd_client.errors import UsageError
from kvd_client.readiness import ReadyNews
from kvd_client.session import M, Session
from kvd_client.tickets import LoadTicket, StoreTicket
from kvd_proto.directory import DirectoryView, LookupResult
from kvd_proto.errors import DirectoryError
from kvd_proto.messages import (
    MAX_KEY_BYTES,
    Attached,
    CompleteLoad,
    CompleteStore,
    Detached,
    LoadPrepared,
    Lookups,
    Message,
    Ping,
    PrepareLoad,
    PrepareStore,
    RequestFinished,
    RequestNoted,
    Reset,
    ResetDone,
    Status,
    StatusReport,
    StoreAnswer,
    StoreCompleted,
    StorePrepared,
)

MAX_LEASE_SECONDS = 600.0
RESET_SECONDS = 30.0  # it takes a daemon milliseconds for ten thousands of chunks
MAX_TOKENS = 2**48  # of one request; totals have room for tens of thousands of such
_ANSWERS = {int(answer): answer for answer in StoreAnswer}
_MISS, _HIT = LookupResult.MISS, LookupResult.HIT

_NOT_TOLD = StoreCompleted(ready=0, pending=0, dropped=0)

log = logging.getLogger("kvd_client")


@dataclass(slots=True)
class LookupCounts:
    """Totals of one session. Adding takes no lock: with several threads a few may be lost."""

    chunks: int = 0
    hit_chunks: int = 0
    tokens: int = 0
    hit_tokens: int = 0


class Scheduler(Session):
    """An engine's scheduler.

    Whatever happens to the daemon, every call returns within `deadline`
    seconds; what could not be done is a miss or an empty ticket. All methods
    may be called from any thread. They raise `UsageError` for invalid arguments,
    and once it is closed.

    Args:
        runtime_dir: the daemon's runtime directory.
        engine: the engine's name; its workers use the same, another engine another one.
        deadline: seconds that the daemon may take for an answer.
        counts_tokens: the engine calls `count_tokens`; otherwise the daemon counts a chunk's
            tokens for each lookup.

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
    ) -> None:
        self._counts_tokens = flag("counts_tokens", counts_tokens)
        super().__init__(runtime_dir, engine, deadline)
        self._attached: tuple[Attached, DirectoryView] | None = None
        self._ready_news = ReadyNews()
        # A reset that no daemon has answered yet; its answer is put into it.
        self._owed: list[ResetDone] | None = None
        # Replaced whenever that changes, so that a lookup tests nothing.
        self._find: Callable[..., LookupResult] = self._find_nothing
        self._counts = LookupCounts()
        self._reported: Lookups | None = None
        self._start()

    # ---------------------------------------------------------------- lookups

    def lookup(self, key: bytes, first: int = 0, count: int | None = None) -> LookupResult:
        """Return HIT, HIT_PENDING (being written) or MISS, from shared memory, without a message.

        A hint; `prepare_load` decides. A key has 1 to 48 bytes. A chunk that lacks some of the
        blocks `first`..`first + count - 1` is a MISS; without a count, one from `first` on.
        """
        if key.__class__ is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            check_key(key)
        if first.__class__ is not int or first or count is not None:
            check_blocks(first, count)
        found = self._find(key, first, count)
        counts = self._counts
        counts.chunks += 1
        if found is _HIT:
            counts.hit_chunks += 1
        return found

    def lookup_many(self, keys: Collection[bytes]) -> list[LookupResult]:
        """Return `lookup` of every key, in order."""
        if keys.__class__ is not list and keys.__class__ is not tuple:
            keys = collection("keys", keys, "keys")
        for key in keys:
            check_key(key)
        found = list(map(self._find, keys))
        self._counts.chunks += len(found)
        self._counts.hit_chunks += found.count(_HIT)
        return found

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

    def _find_nothing(self, key: bytes, first: int = 0, count: int | None = None) -> LookupResult:
        del key, first, count
        self._check_open()
        return _MISS

    # ----------------------------------------------------------------- stores

    def prepare_store(
        self, keys: Collection[bytes], blocks: Collection[Blocks] | None = None
    ) -> StoreTicket:
        """Ask for slots. Some keys may be accepted and others not; see the ticket's answers.

        `blocks` are the blocks of each key's chunk that will be stored, as pairs (first block,
        count); None: all of them. A cached chunk with fewer blocks may be accepted again; it is
        found until the new one takes its place.
        """
        wanted = request_keys(keys)
        first, count = pack_blocks(blocks, len(wanted))
        reply = self._prepare(PrepareStore(keys=wanted, first=first, count=count), StorePrepared)
        if reply is None:
            return StoreTicket()
        answers = reply.answers.numpy().tolist()
        slots, generations = reply.slots.numpy(), reply.generations.numpy()
        accepted = tuple(
            key
            for key, answer in zip(wanted, answers, strict=False)
            if answer == StoreAnswer.ACCEPTED
        )
        if (
            len(answers) != len(wanted)
            or not set(answers) <= _ANSWERS.keys()
            or not len(accepted) == len(slots) == len(generations)
        ):
            self._inconsistent(reply)
            return StoreTicket()
        return StoreTicket(
            keys=accepted,
            slots=slots,
            generations=generations,
            answers=tuple([_ANSWERS[answer] for answer in answers]),
            evicted=reply.evicted,
            on_exit=lambda success: self._leave(
                lambda: accepted and self.complete_store(accepted, success)
            ),
        )

    def complete_store(
        self, stored: StoreTicket | Collection[bytes], success: bool = True
    ) -> StoreCompleted:
        """End these stores; without success what is unfinished is dropped.

        Args:
            stored: a ticket, or some of its keys.
            success: whether all ranks have stored their shares.

        Returns:
            How many of their chunks are ready, pending (still being written) and dropped; all 0
            where the daemon has not answered.
        """
        ended = request_keys(stored.keys if isinstance(stored, StoreTicket) else stored)
        reply = self._settle(CompleteStore(keys=ended, success=flag("success", success)))
        return reply if isinstance(reply, StoreCompleted) else _NOT_TOLD

    # ------------------------------------------------------------------ loads

    def prepare_load(
        self,
        keys: Collection[bytes],
        lease_seconds: float = 60.0,
        blocks: Collection[Blocks] | None = None,
    ) -> LoadTicket:
        """Pin chunks for loading, until `complete_load` or the lease's end.

        `blocks` are the blocks of each key's chunk that will be loaded, as pairs (first block,
        count); None: all of them. A chunk that lacks some of them is not found.
        """
        wanted = request_keys(keys)
        lease = seconds("lease_seconds", lease_seconds, MAX_LEASE_SECONDS, positive=True)
        first, count = pack_blocks(blocks, len(wanted))
        nothing = LoadTicket(found=np.zeros(len(wanted), np.bool_))
        lease_ms = max(1, round(lease * 1000))
        message = PrepareLoad(keys=wanted, lease_ms=lease_ms, first=first, count=count)
        reply = self._prepare(message, LoadPrepared)
        if reply is None:
            return nothing
        found = reply.found.numpy().astype(np.bool_)
        slots, generations = reply.slots.numpy(), reply.generations.numpy()
        pinned = int(found.sum())
        if len(found) != len(wanted) or not pinned == len(slots) == len(generations):
            self._inconsistent(reply)
            return nothing
        ticket = LoadTicket(
            keys=tuple(itertools.compress(wanted, found.tolist())),
            slots=slots,
            generations=generations,
            found=found,
            lease=reply.lease,
            lease_seconds=reply.lease_ms / 1000,
            on_exit=lambda _: self._leave(lambda: self.complete_load(ticket)),
        )
        return ticket

    def complete_load(self, ticket: LoadTicket) -> None:
        """End a ticket's lease; nothing happens where it had none."""
        if not isinstance(ticket, LoadTicket):
            raise UsageError(f"ticket={shown(ticket)}: pass what prepare_load returned")
        whole("ticket.lease", ticket.lease, 0)
        self._check_open()
        if ticket.lease:
            self._settle(CompleteLoad(lease=ticket.lease))

    def _leave(self, complete: Callable[[], object]) -> None:
        """Complete a ticket at its block's end, unless the session has ended, and all with it."""
        with contextlib.suppress(UsageError):
            complete()

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

    # ----------------------------------------------------------------- others

    def request_finished(self, keys: Collection[bytes]) -> int:
        """Report the chunks that a finished request loaded, stored or found present.

        The daemon evicts the least recently used chunks, and counts uses by this call: one for
        each key. A prompt's head comes first. For several requests at once, put those of the last
        one first.

        Returns:
            How many of them are cached.
        """
        reply = self._prepare(RequestFinished(keys=request_keys(keys)), RequestNoted)
        return 0 if reply is None else reply.found

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
            self._owed = owed
            self._choose()
            self._wake()
            self._changed.wait_for(lambda: owed or not self.attached, patience)
        return owed[0] if owed else None

    def _work(self) -> bool:
        """Ask for the reset that is owed, if one is."""
        owed = self._owed
        if owed is not None and self.attached:
            reply = self._ask(Reset(), RESET_SECONDS)
            if isinstance(reply, ResetDone):
                with self._changed:
                    owed.append(reply)
                    if self._owed is owed:  # none was asked for later
                        self._owed = None
                        self._choose()
                    self._changed.notify_all()
        return True

    def status(self) -> dict[str, Any]:
        """Return the daemon's state as `kvd status --json` prints it; empty without a daemon."""
        reply = self._request(Status(), StatusReport)
        return {} if reply is None else reply.status

    @property
    def attached(self) -> bool:
        """Whether every rank is registered and has a lane, so that chunks can be found."""
        return self._attached is not None

    @property
    def namespace(self) -> bytes:
        """The id of the namespace, 16 bytes; empty while not attached."""
        attached = self._attached
        return attached[0].namespace if attached else b""

    @property
    def num_chunks(self) -> int:
        """The largest number of chunks of the namespace; 0 while not attached."""
        attached = self._attached
        return attached[0].num_chunks if attached else 0

    @property
    def bytes_per_chunk(self) -> int:
        """Bytes of a chunk, all ranks together; 0 while not attached."""
        attached = self._attached
        return attached[0].bytes_per_chunk if attached else 0

    def close(self) -> None:
        """End the session: leases are dropped, unfinished stores given up. May be called again."""
        super().close()
        self._attach(None)
        self._ready_news.close()

    # -------------------------------------------------------- session's events

    def _on_open(self) -> None:
        # What the session before has not reported is not counted.
        self._counts, self._reported = LookupCounts(), None

    def _news(self) -> Ping | None:
        """The totals of this session; None where the daemon has been told."""
        counts = self._counts
        lookups = Lookups(
            chunks=counts.chunks,
            hit_chunks=counts.hit_chunks,
            tokens=counts.tokens if self._counts_tokens else None,
            hit_tokens=counts.hit_tokens if self._counts_tokens else None,
        )
        if lookups == self._reported or counts == LookupCounts():
            return None
        self._reported = lookups
        return Ping(lookups=lookups)

    def _on_notice(self, notice: Notice) -> None:
        message = notice.message
        if isinstance(message, Attached):
            directory = _map(notice)
            ready_pipe = notice.fds.pop() if len(notice.fds) > 1 else -1
            self._attach(None if directory is None else (message, directory), ready_pipe)
        elif isinstance(message, Detached):
            log.info("engine %s is detached: %s", self.engine, message.reason)
            self._attach(None)

    def _on_lost(self) -> None:
        self._attach(None)

    def _on_fork(self) -> None:
        # The child reads no directory that it cannot load from.
        self._ready_news.abandon()
        self._attached = None
        self._find = self._find_nothing

    def _attach(
        self, attached: tuple[Attached, DirectoryView] | None, ready_pipe: int = -1
    ) -> None:
        self._ready_news.replace(ready_pipe)
        with self._changed:
            self._attached = attached
            self._choose()
            self._changed.notify_all()

    def _choose(self) -> None:
        """Choose what lookups read: the directory, where its chunks can be loaded."""
        attached = None if self._owed is not None else self._attached
        self._find = self._find_nothing if attached is None else attached[1].lookup
        self._ready_news.set()  # not before: an event loop that is woken up looks things up

    def _prepare(self, message: Message, kind: type[M]) -> M | None:
        """As `_request`, but nothing is asked for while a reset is owed."""
        if self._owed is not None:
            self._check_open()
            return None
        return self._request(message, kind)

    def _inconsistent(self, reply: Message) -> None:
        self._give_up(self._connection, f"{type(reply).__name__} contradicts itself")


def _map(notice: Notice) -> DirectoryView | None:
    """Map the directory that came with the notice; the mapping outlives the descriptor."""
    if not 1 <= len(notice.fds) <= 2:
        log.error("ATTACHED came with %d descriptors, one or two are needed", len(notice.fds))
        return None
    try:
        size = os.fstat(notice.fds[0]).st_size
        return DirectoryView(mmap.mmap(notice.fds[0], size, prot=mmap.PROT_READ))
    except (OSError, ValueError, DirectoryError):
        log.exception("the directory of the chunks cannot be read; nothing will be found")
        return None
