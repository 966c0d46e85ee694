"""The scheduler's side: what is cached, where to store, what to load."""

import contextlib
import itertools
import logging
import mmap
import os
import threading
from collections.abc import Callable, Collection
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np

from kvd_client.arguments import collection, flag, seconds, shown, whole
from kvd_client.attaching import AttachState, why_not_attached
from kvd_client.block_ranges import Blocks, check_blocks, pack_blocks
from kvd_client.control_socket import Notice
from kvd_client.errors import UsageError
from kvd_client.lookup_counts import LookupCounts
from kvd_client.readiness import ReadyNews
from kvd_client.session import Session
from kvd_client.tickets import LoadTicket, ResetSummary, StoreSummary, StoreTicket
from kvd_proto.answers import LookupResult, StoreAnswer
from kvd_proto.directory import DirectoryView
from kvd_proto.errors import DirectoryError
from kvd_proto.messages import (
    MAX_KEY_BYTES,
    MAX_KEYS,
    Attached,
    CompleteLoad,
    CompleteStore,
    Detached,
    LoadPrepared,
    Message,
    PrepareLoad,
    PrepareStore,
    RequestFinished,
    RequestNoted,
    Reset,
    ResetDone,
    Status,
    StatusReport,
    StoreCompleted,
    StorePrepared,
)

MAX_LEASE_SECONDS = 600.0
MAX_TOKENS = 2**48  # of one request; totals have room for tens of thousands of such
_ANSWERS = {int(answer): answer for answer in StoreAnswer}
_MISS, _HIT = LookupResult.MISS, LookupResult.HIT
M = TypeVar("M", bound=Message)

log = logging.getLogger("kvd_client")


@dataclass(frozen=True, slots=True)
class Attachment:
    """The namespace that an engine's chunks live in."""

    directory: DirectoryView
    namespace: bytes
    world_size: int
    bytes_per_chunk: int
    num_chunks: int


class Scheduler:
    """An engine's scheduler.

    Whatever happens to the daemon, every call returns within `deadline`
    seconds; what could not be done is a miss or an empty ticket. All methods
    may be called from any thread.

    Args:
        runtime_dir: the daemon's runtime directory.
        engine: the engine's name; its workers use the same, another engine another one.
        deadline: seconds that the daemon may take for an answer.
        counts_tokens: the engine calls `count_tokens`; otherwise the daemon's figures take each
            lookup for one chunk of tokens.

    Raises:
        UsageError: an argument that cannot be meant. An absent daemon is no error.
    """

    def __init__(
        self,
        runtime_dir: str | os.PathLike[str],
        engine: str,
        *,
        deadline: float = 1.0,
        counts_tokens: bool = False,
    ) -> None:
        self._changed = threading.Condition()
        self._attachment: Attachment | None = None
        self._ready_news = ReadyNews()
        self._silent = False
        self._owed: Reset | None = None  # a reset that no daemon has answered yet
        # Swapped on attaching, detaching, silence, loss, a reset, close and fork: a lookup tests
        # nothing.
        self._find: Callable[..., LookupResult] = self._find_nothing
        self._counts_tokens = flag("counts_tokens", counts_tokens)
        self._counts = LookupCounts(tokens=counts_tokens)
        self._session = Session(
            runtime_dir,
            "scheduler",
            engine,
            self,
            deadline=deadline,
            news=lambda: self._counts.news(),  # noqa: PLW0108  # each session has counts of its own
        )
        self._session.start()

    # ---------------------------------------------------------------- lookups

    def lookup(self, key: bytes, first: int = 0, count: int | None = None) -> LookupResult:
        """HIT, HIT_PENDING (being written) or MISS. Asks nobody: reads shared memory.

        A hint; `prepare_load` decides. A chunk that lacks some of the blocks `first`..
        `first + count - 1` is a MISS; without a count these are all from `first` on.

        Raises:
            UsageError: no bytes, empty, longer than 48 bytes; not some blocks of a chunk; or
                closed.
        """
        if key.__class__ is not bytes or not 0 < len(key) <= MAX_KEY_BYTES:
            _check_key(key)
        if first.__class__ is not int or first or count is not None:
            check_blocks(first, count)
        found = self._find(key, first, count)
        counts = self._counts
        counts.chunks += 1
        if found is _HIT:
            counts.hit_chunks += 1
        return found

    def lookup_many(self, keys: Collection[bytes]) -> list[LookupResult]:
        """`lookup` of every key, in order.

        Raises:
            UsageError: as `lookup`.
        """
        if keys.__class__ is not list and keys.__class__ is not tuple:
            keys = collection("keys", keys, "keys")
        for key in keys:
            _check_key(key)
        found = list(map(self._find, keys))
        self._counts.chunks += len(found)
        self._counts.hit_chunks += found.count(_HIT)
        return found

    def count_tokens(self, asked: int, found: int) -> None:
        """Count prompt tokens that were asked for and found, for the daemon's figures.

        No request is made: they go with the next report, once a second at most.

        Raises:
            UsageError: figures below zero, or more found than asked for.
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
        self._session.check_open()
        return _MISS

    # ----------------------------------------------------------------- stores

    def prepare_store(
        self, keys: Collection[bytes], blocks: Collection[Blocks] | None = None
    ) -> StoreTicket:
        """Ask for slots. Some keys may be accepted and others not; see the ticket's answers.

        `blocks` says what of each key's chunk will be stored, as pairs (first block, count);
        None: all of it. A chunk that is here with fewer blocks may be accepted; it is found
        until the new one takes its place.

        Raises:
            UsageError: keys that cannot be meant; or closed.
        """
        wanted = _keys(keys)
        first, count = pack_blocks(blocks, wanted)
        reply = self._ask(PrepareStore(keys=wanted, first=first, count=count), StorePrepared)
        if reply is None:
            return StoreTicket()
        answers = reply.answers.numpy().tolist()
        slots, generations = reply.slots.numpy(), reply.generations.numpy()
        accepted = tuple(
            key
            for key, answer in zip(wanted, answers, strict=False)
            if answer == StoreAnswer.ACCEPTED
        )
        if len(answers) != len(wanted) or not set(answers) <= _ANSWERS.keys():
            self._nonsense(reply)
            return StoreTicket()
        if not len(accepted) == len(slots) == len(generations):
            self._nonsense(reply)
            return StoreTicket()
        return StoreTicket(
            keys=accepted,
            slots=slots,
            generations=generations,
            answers=tuple([_ANSWERS[answer] for answer in answers]),
            evicted=reply.evicted,
            on_exit=lambda success: self._leave_store(accepted, success),
        )

    def complete_store(
        self, stored: StoreTicket | Collection[bytes], success: bool = True
    ) -> StoreSummary:
        """Say that these stores are over; without success what is unfinished is dropped.

        A daemon that is silent is told of a failure when it speaks again.

        Args:
            stored: a ticket, or some of its keys.
            success: whether all ranks have stored their shares.

        Raises:
            UsageError: keys that cannot be meant; or closed.
        """
        keys = stored.keys if isinstance(stored, StoreTicket) else stored
        message = CompleteStore(keys=_keys(keys), success=flag("success", success))
        self._session.check_open()
        tell = self._session.request if message.success else self._session.settle
        reply = tell(message)
        if not isinstance(reply, StoreCompleted):
            return StoreSummary()
        return StoreSummary(reply.ready, reply.pending, reply.dropped)

    # ------------------------------------------------------------------ loads

    def prepare_load(
        self,
        keys: Collection[bytes],
        lease_seconds: float = 60.0,
        blocks: Collection[Blocks] | None = None,
    ) -> LoadTicket:
        """Pin chunks for loading, until `complete_load` or the lease's end.

        `blocks` says what of each key's chunk will be loaded, as pairs (first block, count);
        None: all of it. A chunk that lacks some of that is not found.

        Raises:
            UsageError: keys or a lease that cannot be meant; or closed.
        """
        wanted = _keys(keys)
        if (
            not isinstance(lease_seconds, (int, float))
            or not 0 < lease_seconds <= MAX_LEASE_SECONDS
        ):
            raise UsageError(
                f"lease_seconds={shown(lease_seconds)}: above 0 and at most {MAX_LEASE_SECONDS:g}"
            )
        lease_ms = max(1, round(lease_seconds * 1000))
        first, count = pack_blocks(blocks, wanted)
        nothing = LoadTicket(found=np.zeros(len(wanted), np.bool_))
        if self._owed is not None:
            self._session.check_open()
            return nothing
        message = PrepareLoad(keys=wanted, lease_ms=lease_ms, first=first, count=count)
        reply = self._ask(message, LoadPrepared)
        if reply is None:
            return nothing
        found = reply.found.numpy().astype(np.bool_)
        slots, generations = reply.slots.numpy(), reply.generations.numpy()
        pinned = int(found.sum())
        if len(found) != len(wanted) or not pinned == len(slots) == len(generations):
            self._nonsense(reply)
            return nothing
        return LoadTicket(
            keys=tuple([key for key, here in zip(wanted, found.tolist(), strict=True) if here]),
            slots=slots,
            generations=generations,
            found=found,
            lease=reply.lease,
            lease_seconds=reply.lease_ms / 1000,
            on_exit=lambda: self._leave_load(reply.lease),
        )

    def complete_load(self, ticket: LoadTicket) -> None:
        """Give a ticket's lease back; nothing happens where it had none.

        A daemon that is silent is told when it speaks again.

        Raises:
            UsageError: not a LoadTicket; or closed.
        """
        if not isinstance(ticket, LoadTicket):
            raise UsageError(f"ticket={shown(ticket)}: pass what prepare_load returned")
        whole("ticket.lease", ticket.lease, 0)
        self._give_back(ticket.lease)

    def _give_back(self, lease: int) -> None:
        self._session.check_open()
        if lease:
            self._session.settle(CompleteLoad(lease=lease))

    # A ticket's block may end after the session, which has ended all of its leases and stores.

    def _leave_store(self, keys: tuple[bytes, ...], success: bool) -> None:
        if keys and not self._session.closed:
            with contextlib.suppress(UsageError):  # closed meanwhile
                self.complete_store(keys, success)

    def _leave_load(self, lease: int) -> None:
        if not self._session.closed:
            with contextlib.suppress(UsageError):  # closed meanwhile
                self._give_back(lease)

    # ------------------------------------------------------------ event loops

    def fileno(self) -> int:
        """A descriptor that is readable when `take_ready` has something to say.

        The descriptor is the same until `close`, before which the loop must forget it.

        Raises:
            UsageError: closed.
        """
        self._session.check_open()
        return self._ready_news.fileno()

    def take_ready(self) -> bool:
        """Whether chunks of this engine's stores became READY, or all are found or missed now.

        The latter where the engine is attached or detached, and where the daemon falls silent,
        speaks again, or has answered a reset. Since the last call; never waits. Look at what is
        of interest with `lookup`.

        Raises:
            UsageError: closed.
        """
        self._session.check_open()
        return self._ready_news.take()

    # ------------------------------------------------------------------- rest

    def request_finished(self, keys: Collection[bytes]) -> int:
        """Say that a request has finished that loaded, stored or found present these chunks.

        The daemon evicts what was used longest ago, and counts uses by this call: one for each
        key. A prompt's head comes first. For several requests at once, put those of the last
        one first.

        Returns:
            How many of them are here.

        Raises:
            UsageError: keys that cannot be meant; or closed.
        """
        reply = self._ask(RequestFinished(keys=_keys(keys)), RequestNoted)
        return 0 if reply is None else reply.found

    def reset(self, timeout: float | None = None) -> ResetSummary:
        """Drop every chunk of this engine's namespace, for all engines that share it.

        A daemon that does not answer in time, or cannot be told now, is told as soon as it
        can be, by itself. Until it has answered this engine finds nothing.

        Args:
            timeout: seconds to wait for the answer; None: the deadline.

        Raises:
            UsageError: no seconds; or closed.
        """
        patience = self._session.deadline if timeout is None else seconds("timeout", timeout)
        self._session.check_open()
        message = Reset()
        self._owe(message)
        return self._settle_reset(message, patience)

    def _settle_reset(self, message: Reset, patience: float) -> ResetSummary:
        reply = self._session.request(message, patience)
        if not isinstance(reply, ResetDone):
            return ResetSummary()
        self._answered(message)
        return ResetSummary(reply.dropped, reply.deferred, served=True)

    def _owe(self, message: Reset) -> None:
        with self._changed:
            self._owed = message
            self._choose()

    def _answered(self, message: Message) -> None:
        with self._changed:
            if self._owed is message:  # not one that was asked for later
                self._owed = None
                self._choose()

    def _make_up(self) -> None:
        """Ask for the reset that is owed, if one is: the daemon can be told now."""
        message = self._owed
        if message is not None and self.attached:
            with contextlib.suppress(UsageError):  # closed meanwhile
                self._settle_reset(message, self._session.deadline)

    def status(self) -> dict[str, Any]:
        """The daemon's state as `kvd status --json` prints it; empty without a daemon.

        Raises:
            UsageError: closed.
        """
        reply = self._ask(Status(), StatusReport)
        return {} if reply is None else reply.status

    @property
    def attached(self) -> bool:
        """Whether every rank is registered and has a lane, so that chunks can be found."""
        return self._attachment is not None

    @property
    def connected(self) -> bool:
        """Whether there is a daemon that answers."""
        return self._session.connected

    @property
    def namespace(self) -> bytes:
        """The id of the namespace, 16 bytes; empty while not attached."""
        attachment = self._attachment
        return b"" if attachment is None else attachment.namespace

    @property
    def num_chunks(self) -> int:
        """Chunks that the namespace holds at most; 0 while not attached."""
        attachment = self._attachment
        return 0 if attachment is None else attachment.num_chunks

    @property
    def bytes_per_chunk(self) -> int:
        """Bytes of a chunk, all ranks together; 0 while not attached."""
        attachment = self._attachment
        return 0 if attachment is None else attachment.bytes_per_chunk

    def wait_attached(self, timeout: float) -> AttachState:
        """Wait until `attached`, at most `timeout` seconds; true if it is, else it says why not.

        Raises:
            UsageError: closed.
        """
        self._session.check_open()
        patience = seconds("timeout", timeout)
        with self._changed:
            self._changed.wait_for(lambda: self.attached or self._session.closed, patience)
        return AttachState(True) if self.attached else why_not_attached(self._session)

    def close(self) -> None:
        """End the session: leases are dropped, unfinished stores given up. May be called again."""
        self._session.close()
        self._attach(None)
        self._ready_news.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        attachment = self._attachment
        chunks = f"{attachment.num_chunks} chunks" if attachment else "not attached"
        return f"<Scheduler {chunks}, {self._session!r}>"

    # -------------------------------------------------------- session's words

    def on_open(self) -> bool:
        """See Handler. What the last session has not told, nobody counts."""
        self._counts = LookupCounts(tokens=self._counts_tokens)
        return True

    def on_wake(self) -> bool:
        """See Handler."""
        return True

    def on_notice(self, notice: Notice) -> None:
        """See Handler: the directory comes and goes."""
        message = notice.message
        if isinstance(message, Attached):
            self._attach(_map(message, notice), notice.fds.pop() if len(notice.fds) > 1 else -1)
            self._make_up()
        elif isinstance(message, Detached):
            log.info("engine %s is detached: %s", self._session.engine, message.reason)
            self._attach(None)

    def on_silent(self, silent: bool) -> None:
        """See Handler: hits that cannot be loaded are none."""
        with self._changed:
            self._silent = silent
            self._choose()
        if not silent:
            self._make_up()

    def undo(self, request: Message, reply: Message) -> Message | None:
        """See Handler: slots and pins that nobody knows of must not outlive the silence."""
        if isinstance(request, PrepareStore) and isinstance(reply, StorePrepared):
            accepted = reply.answers.numpy() == StoreAnswer.ACCEPTED
            keys = tuple(itertools.compress(request.keys, accepted.tolist()))
            return CompleteStore(keys=keys, success=False) if keys else None
        if isinstance(reply, LoadPrepared) and len(reply.slots):
            return CompleteLoad(lease=reply.lease)
        if isinstance(reply, ResetDone):
            self._answered(request)
        return None

    def on_lost(self) -> None:
        """See Handler."""
        self._attach(None)

    def on_fork(self) -> None:
        """See Handler: the child reads no directory that it cannot load from."""
        self._changed = threading.Condition()
        self._ready_news.abandon()
        self._attachment = None
        self._find = self._find_nothing

    def _attach(self, attachment: Attachment | None, ready_pipe: int = -1) -> None:
        self._ready_news.replace(ready_pipe)
        with self._changed:
            self._attachment = attachment
            self._silent = False
            self._choose()
            self._changed.notify_all()

    def _choose(self) -> None:
        """What lookups use: the directory, where what it has can be loaded."""
        attachment = self._attachment
        usable = attachment is not None and not self._silent and self._owed is None
        self._find = attachment.directory.lookup if usable and attachment else self._find_nothing
        self._ready_news.tell()  # not before: who hears of it looks things up

    def _ask(self, message: Message, kind: type[M]) -> M | None:
        reply = self._session.request(message)
        return reply if isinstance(reply, kind) else None

    def _nonsense(self, reply: Message) -> None:
        self._session.reset(f"{type(reply).__name__} contradicts itself")


def _map(message: Attached, notice: Notice) -> Attachment | None:
    """Map the directory that came with the notice; the mapping outlives the descriptor."""
    if not 1 <= len(notice.fds) <= 2:
        log.error("ATTACHED came with %d descriptors, one or two are needed", len(notice.fds))
        return None
    try:
        size = os.fstat(notice.fds[0]).st_size
        directory = DirectoryView(mmap.mmap(notice.fds[0], size, prot=mmap.PROT_READ))
    except (OSError, ValueError, DirectoryError):
        log.exception("the directory of the chunks cannot be read; nothing will be found")
        return None
    return Attachment(
        directory,
        message.namespace,
        message.world_size,
        message.bytes_per_chunk,
        message.num_chunks,
    )


def _check_key(key: object) -> None:
    if not isinstance(key, bytes):
        raise UsageError(f"key={shown(key)}: bytes are needed, not {type(key).__name__}")
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise UsageError(
            f"a key of {len(key)} bytes: 1 to {MAX_KEY_BYTES} are possible; hash longer ones"
        )


def _keys(keys: object) -> tuple[bytes, ...]:
    wanted = collection("keys", keys, "keys")
    if len(wanted) > MAX_KEYS:
        raise UsageError(f"{len(wanted)} keys in one call: {MAX_KEYS} at most; split the call")
    for key in wanted:
        _check_key(key)
    return wanted
