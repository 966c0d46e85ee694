"""The event loop of a tier's process: orders of the broker in, answers out.

The loop leaves calls that may block to threads, so it answers pings even if the medium hangs.
"""

import logging
import math
import os
import secrets
import select
import sys
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeAlias

from kvd.config.values import parse_tier
from kvd.errors import TierError
from kvd.logs import configure
from kvd.machine.process import lock_pool, map_pool, to_high_number
from kvd.tier.batches import Batch, BatchPart, NamespaceMapping
from kvd.tier.contract import Capacity, Outcome, Space, TierBackend, backend_class, backend_options
from kvd.tier.threads import BatchThreads, SerialThread
from kvd.wire.child_process import serve_broker
from kvd.wire.tiering import (
    TIERING,
    BeginTier,
    CloseNamespace,
    Drop,
    Get,
    Lookup,
    NamespaceOpened,
    NewSalt,
    OpenNamespace,
    Put,
    RemovedChunks,
    ScanResult,
    StopTier,
    TierFailed,
    TierPing,
    TierPong,
    TierReady,
)
from kvd_proto.channel import Channel
from kvd_proto.jobs import IntArray
from kvd_proto.messages import Message

log = logging.getLogger("kvd.tier")
PER_MESSAGE = 1024  # keys: the broker handles so many in one or two milliseconds
SALT_BYTES = 8
_SWITCH_SECONDS = 0.0005  # a computing thread holds up the loop for so long
_ORDERS_A_TURN = 64
_LOOK_MS = 50  # between checks for parts that are late in the queue
_AGAIN_SECONDS = 1.0  # between attempts to begin a namespace
_Rows: TypeAlias = list[tuple[bytes, tuple[int, int, int]]]
"""Keys and coverages of chunks."""
_Scan: TypeAlias = tuple[NamespaceMapping, Space, Iterator[_Rows]]


class TierService:
    """The service of one tier's process.

    Args:
        link: to the broker.
        tier: the backend, opened.
        pool: all of the pool, writable.
        name: of the tier, for the log.
    """

    def __init__(self, link: Channel, tier: TierBackend, pool: memoryview, name: str) -> None:
        self._link, self._tier, self._pool, self._name = link, tier, pool, name
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)  # not in `run`: a hung thread may still use it
        self._told: deque[Callable[[], None]] = deque()  # callbacks from threads, for the loop
        self._places: dict[bytes, NamespaceMapping] = {}
        self._salts: dict[bytes, bytes] = {}  # used by the clerk's thread alone
        self._scans: deque[_Scan] = deque()  # scans whose next piece is due
        self._dropping: Counter[tuple[bytes, bytes]] = Counter()  # space ids and keys
        self._batches: set[Batch] = set()  # submitted to threads
        self._gone_later: dict[Batch, list[RemovedChunks]] = {}
        self._capacity = tier.capacity()
        self._progress = 0
        self._tidying = self._tidy_again = self._stopping = False
        self._workers = BatchThreads(
            tier, name, lambda part: self._tell(partial(self._ended, part))
        )
        self._clerk = SerialThread(self._tell)

    def run(self) -> None:
        """Serve until StopTier (parts that threads run are finished first) or the broker's exit."""
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        try:
            self._announce()
            while self._batches or not self._stopping:
                wants = select.POLLOUT if self._link.wants_write else 0
                poll.register(self._link, select.POLLIN | wants)
                ready = {fd for fd, _ in poll.poll(self._patience())}
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._link.wants_write:
                    self._link.flush()
                if self._link.fileno() in ready or self._link.more:
                    self._read_orders()
                while self._told:
                    self._told.popleft()()
                for part in self._workers.take():
                    self._ended(part)
                self._begin_again()
                self._go_on_scanning()
            self._flush()
            self._tier.close()
        except EOFError:
            log.warning("%s: the broker is gone: ending", self._name)
        finally:
            self._workers.close()
            self._clerk.close()
            self._link.close()

    def _tell(self, event: Callable[[], None]) -> None:
        """Have the loop call `event`; called by threads."""
        self._told.append(event)
        os.eventfd_write(self._wake, 1)

    def _flush(self) -> None:
        """Send all that is unsent; the broker reads until it closes the link."""
        poll = select.poll()
        poll.register(self._link, select.POLLOUT)
        while not self._link.flush():
            poll.poll()

    def _patience(self) -> int | None:
        if self._link.more:
            return 0
        retries = any(place.error for place in self._places.values())
        return _LOOK_MS if self._workers.waiting or retries else None

    def _announce(self) -> None:
        tier, capacity = self._tier, self._capacity
        self._send(
            TierReady(
                pid=os.getpid(),
                described=tier.described,
                total_bytes=capacity.total,
                used_bytes=capacity.used,
                chunks=capacity.chunks,
                damaged_records=tier.damaged_records,
            )
        )

    def _send(self, message: Message) -> None:
        self._link.send(TIERING.encode(message))

    # ---------------------------------------------------------------- orders

    def _read_orders(self) -> None:
        for _ in range(_ORDERS_A_TURN):
            if (received := self._link.receive()) is not None:
                frame, fds = received
                self._obey(TIERING.decode(frame)[1], fds)
            if not self._link.more:
                return

    def _obey(self, order: Message, fds: tuple[int, ...]) -> None:
        match order:
            case Put() | Get() | Lookup():
                self._carry_out(Batch(order, self._places[order.namespace]))
            case Drop():
                self._drop(order)
            case TierPing():
                self._answer_ping()
            case OpenNamespace():
                self._close(order.namespace)
                place = self._places[order.namespace] = NamespaceMapping(order, fds, self._pool)
                self._begin(place)
            case NewSalt():
                if known := self._places.get(order.namespace):
                    known.space, known.asked, known.reset = None, order.salt, True
                    self._refuse_early(known, Outcome.GONE)
                    self._begin(known)
            case CloseNamespace():
                self._close(order.namespace)
            case StopTier():
                self._stop()

    def _stop(self) -> None:
        self._stopping = True
        for part in self._workers.take(all_parts=True):
            self._ended(part)
        for place in self._places.values():
            self._refuse_early(place, Outcome.LATE)

    def _close(self, namespace: bytes) -> None:
        if (place := self._places.pop(namespace, None)) is not None:
            place.space = None
            self._refuse_early(place, Outcome.GONE)

    def _carry_out(self, batch: Batch) -> None:
        place = batch.place
        if self._stopping:
            self._refuse(batch, Outcome.LATE)
        elif place.error:
            self._refuse(batch, Outcome.FAILED, place.error)
        elif place.space is None:
            place.early.append(batch)
        else:
            self._submit(batch, place.space)

    def _submit(self, batch: Batch, space: Space) -> None:
        order = batch.order
        if isinstance(order, Put) and any((space.id, key) in self._dropping for key in order.keys):
            # A pending removal of the key would remove the new chunk.
            self._refuse(batch, Outcome.GONE)
            return
        batch.space = space
        self._batches.add(batch)
        self._workers.submit(batch.parts(self._tier.batch_bytes))

    def _refuse_early(self, place: NamespaceMapping, outcome: Outcome, error: str = "") -> None:
        early, place.early = place.early, []
        for batch in early:
            self._refuse(batch, outcome, error)

    def _refuse(self, batch: Batch, outcome: Outcome, error: str = "") -> None:
        batch.fail(outcome, error)
        self._progress += len(batch.order.keys)
        self._send(batch.done())

    def _answer_ping(self) -> None:
        capacity = self._capacity
        self._send(
            TierPong(
                progress=self._progress,
                busy=self._workers.busy,
                queued_bytes=self._workers.queued_bytes,
                total_bytes=capacity.total,
                used_bytes=capacity.used,
                chunks=capacity.chunks,
                error=next((place.error for place in self._places.values() if place.error), ""),
            )
        )
        self._tidy()

    # ---------------------------------------------------------------- batches end

    def _ended(self, part: BatchPart) -> None:
        batch = part.batch
        self._progress += part.end - part.begin
        if not batch.ends():
            return
        self._batches.discard(batch)
        self._send(batch.done())
        for gone in self._gone_later.pop(batch, ()):
            self._send(gone)
        if isinstance(batch.order, Put):
            self._tidy()

    # ---------------------------------------------------------------- namespaces begin

    def _begin(self, place: NamespaceMapping) -> None:
        place.retry_at = math.inf
        asked = place.asked
        self._clerk.ask(partial(self._start, place, asked), partial(self._begun, place, asked))

    def _start(self, place: NamespaceMapping, asked: bytes) -> bytes:
        """Begin a namespace in the backend; return the salt in effect. For the clerk's thread.

        1. Choose the salt: the broker's, else the one noted by the backend, else the one that this
           process used before, else a new one: no chunk is ever kept without a salt.
        2. Note the salt, and drop the chunks kept under the one before.
        3. Have the backend begin the space.
        """
        tier, namespace = self._tier, place.order.namespace
        known = self._salts.get(namespace, b"")
        salt = asked or tier.salt(namespace) or known or secrets.token_bytes(SALT_BYTES)
        before = tier.note_salt(namespace, salt, reset=place.reset) or known
        self._salts[namespace] = salt
        if before not in {b"", salt}:
            tier.drop_space(place.space_of(before))
        tier.open_space(place.space_of(salt))
        return salt

    def _begun(self, place: NamespaceMapping, asked: bytes, salt: bytes | TierError) -> None:
        namespace = place.order.namespace
        if place.asked != asked or self._places.get(namespace) is not place:
            return  # the namespace was reset again, or closed
        if isinstance(salt, TierError):
            if not place.error:
                log.error(
                    "%s: namespace %s cannot begin: %s; it is tried again each second",
                    *(self._name, namespace.hex()[:8], salt),
                )
            place.error = str(salt)
            place.retry_at = time.monotonic() + _AGAIN_SECONDS
            self._refuse_early(place, Outcome.FAILED, place.error)
            return
        place.error = ""
        place.salt, place.space = salt, place.space_of(salt)
        self._tidy()  # dropping chunks has freed capacity
        self._send(NamespaceOpened(namespace=namespace, salt=salt))
        self._scans.append((place, place.space, self._pieces(place.space)))
        early, place.early = place.early, []
        for batch in early:
            self._submit(batch, place.space)

    def _begin_again(self) -> None:
        """Retry namespaces that could not begin."""
        now = time.monotonic()
        for place in self._places.values():
            if place.retry_at <= now:
                self._begin(place)

    # ---------------------------------------------------------------- scans

    def _pieces(self, space: Space) -> Iterator[_Rows]:
        yield from self._tier.scan(space)  # runs in the clerk's thread

    def _go_on_scanning(self) -> None:
        """Request the next piece of each scan, unless the broker is behind in reading."""
        while self._scans and not self._link.wants_write:
            scan = self._scans.popleft()
            self._clerk.ask(partial(next, scan[2], None), partial(self._found, scan))

    def _found(self, scan: _Scan, found: _Rows | TierError | None) -> None:
        place, space, _ = scan
        if place.space is not space:  # the namespace was reset or closed
            return
        if isinstance(found, TierError):
            log.warning("a scan of %s ends early: %s", space.id.hex()[:8], found)
        rows = found if isinstance(found, list) else []
        for at in range(0, max(1, len(rows)), PER_MESSAGE):
            some = rows[at : at + PER_MESSAGE]
            first, count, groups = (
                IntArray.of([coverage[i] for _, coverage in some], "u2") for i in range(3)
            )
            self._send(
                ScanResult(
                    namespace=place.order.namespace,
                    salt=place.salt,
                    keys=tuple(key for key, _ in some),
                    first=first,
                    count=count,
                    groups=groups,
                    last=found is not rows,
                )
            )
        if found is rows:
            self._scans.append(scan)

    # ---------------------------------------------------------------- chunks go

    def _drop(self, order: Drop) -> None:
        place = self._places.get(order.namespace)
        if place is None or place.space is None:  # closed, or being reset, which drops all
            return
        keys = Counter((place.space.id, key) for key in order.keys)
        self._dropping += keys
        self._clerk.ask(
            partial(self._tier.remove, place.space, order.keys), partial(self._dropped, keys)
        )

    def _dropped(self, keys: Counter[tuple[bytes, bytes]], result: TierError | None) -> None:
        self._dropping -= keys
        if result is not None:
            log.warning("%d chunks that should go stay: %s", len(keys), result)

    def _tidy(self) -> None:
        """Ask the backend for dropped chunks and capacity; ask again if a request is pending.

        Else chunks dropped by the last of several puts would be reported only at the next ping.
        """
        self._tidy_again = self._tidying
        if not self._tidying:
            self._tidying = True
            self._clerk.ask(self._tier.take_dropped, self._gone)
            self._clerk.ask(self._tier.capacity, self._tidied)

    def _tidied(self, capacity: Capacity | TierError) -> None:
        if isinstance(capacity, Capacity):
            self._capacity = capacity
        self._tidying = False
        if self._tidy_again:
            self._tidy()

    def _gone(self, gone: list[tuple[bytes, list[bytes]]] | TierError) -> None:
        """Report keys that the backend dropped; again after a put of the same key has ended."""
        names = {place.space.id: name for name, place in self._places.items() if place.space}
        for space, keys in gone if isinstance(gone, list) else ():
            for at in range(0, len(keys) if space in names else 0, PER_MESSAGE):
                self._report_gone(names[space], keys[at : at + PER_MESSAGE])

    def _report_gone(self, namespace: bytes, keys: Sequence[bytes]) -> None:
        for batch in self._batches:
            order = batch.order
            if isinstance(order, Put) and batch.began and order.namespace == namespace:
                both = tuple(set(keys).intersection(order.keys))
                if both:
                    later = RemovedChunks(namespace=namespace, keys=both)
                    self._gone_later.setdefault(batch, []).append(later)
        self._send(RemovedChunks(namespace=namespace, keys=tuple(keys)))


def run(link_fd: int) -> int:
    """Serve until the broker stops the process; return the exit status."""
    return serve_broker(link_fd, TIERING, _open, lambda error: TierFailed(error=error))


def _open(link: Channel, begin: BeginTier, fds: tuple[int, ...]) -> TierService:
    """Map the pool and open the medium; return the service.

    Raises:
        KvdError: the medium cannot be used now, or the setting is invalid.
    """
    kind = begin.setting.partition(":")[0]
    name = f"tier {begin.index} ({kind})"
    configure(begin.log_level, begin.log_style, f"tier {kind}#{begin.index}", tier=begin.index)
    sys.setswitchinterval(_SWITCH_SECONDS)
    pool_fd = to_high_number(fds[0])
    lock_pool(pool_fd)
    setting = parse_tier(begin.setting)
    pool = map_pool(pool_fd, begin.pool_bytes)
    os.close(pool_fd)
    implementation = backend_class(setting)
    options = backend_options(setting)
    implementation.check(options)
    tier = implementation.open(options, pool)
    log.info("%s: %s; %s", name, setting.text, tier.described)
    return TierService(link, tier, pool, name)
