"""A tier's process and its event loop: orders of the broker in, replies out.

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
KEYS_PER_MESSAGE = 1024  # the broker handles so many in one or two milliseconds
SALT_BYTES = 8
_SWITCH_SECONDS = 0.0005  # for at most so long a computing thread keeps the loop from running
_ORDERS_PER_TURN = 64
_POLL_MS = 50  # between checks for parts that have waited beyond their deadline
_RETRY_SECONDS = 1.0  # between attempts to open a space
_ChunkRows: TypeAlias = list[tuple[bytes, tuple[int, int, int]]]
"""Keys and coverages of chunks."""
_Scan: TypeAlias = tuple[NamespaceMapping, Space, Iterator[_ChunkRows]]


class TierService:
    """The service of one tier's process, with its opened backend and all of the pool."""

    def __init__(self, link: Channel, tier: TierBackend, pool: memoryview, name: str) -> None:
        self._link, self._tier, self._pool, self._name = link, tier, pool, name
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)  # not in `run`: a hung thread may still use it
        self._callbacks: deque[Callable[[], None]] = deque()  # from threads, for the loop
        self._namespaces: dict[bytes, NamespaceMapping] = {}
        self._salts: dict[bytes, bytes] = {}  # used by the serial thread only
        self._scans: deque[_Scan] = deque()  # those whose next rows can be requested
        self._dropping: Counter[tuple[bytes, bytes]] = Counter()  # space ids and keys
        self._batches: set[Batch] = set()  # submitted to threads
        self._delayed_reports: dict[Batch, list[RemovedChunks]] = {}
        self._capacity = tier.capacity()
        self._progress = 0
        self._refreshing = self._refresh_again = self._stopping = False
        self._batch_threads = BatchThreads(
            tier, name, lambda part: self._call_in_loop(partial(self._end_part, part))
        )
        self._serial_thread = SerialThread(self._call_in_loop)

    def run(self) -> None:
        """Serve until StopTier or the broker's exit.

        After StopTier, parts that threads execute are finished; parts that wait are LATE.
        """
        poll = select.poll()
        poll.register(self._wake, select.POLLIN)
        try:
            self._announce()
            while self._batches or not self._stopping:
                wants = select.POLLOUT if self._link.wants_write else 0
                poll.register(self._link, select.POLLIN | wants)
                ready = {fd for fd, _ in poll.poll(self._timeout_ms())}
                if self._wake in ready:
                    os.eventfd_read(self._wake)
                if self._link.wants_write:
                    self._link.flush()
                if self._link.fileno() in ready or self._link.more:
                    self._read_orders()
                while self._callbacks:
                    self._callbacks.popleft()()
                for part in self._batch_threads.take_expired():
                    self._end_part(part)
                self._retry_opening()
                self._continue_scans()
            self._flush()
            self._tier.close()
        except EOFError:
            log.warning("%s: the broker has exited: ending", self._name)
        finally:
            self._batch_threads.close()
            self._serial_thread.close()
            self._link.close()

    def _call_in_loop(self, callback: Callable[[], None]) -> None:
        """Have the loop call `callback`; called by threads."""
        self._callbacks.append(callback)
        os.eventfd_write(self._wake, 1)

    def _flush(self) -> None:
        """Send all that is unsent; the broker reads until it closes the link."""
        poll = select.poll()
        poll.register(self._link, select.POLLOUT)
        while not self._link.flush():
            poll.poll()

    def _timeout_ms(self) -> int | None:
        if self._link.more:
            return 0
        retries = any(namespace.error for namespace in self._namespaces.values())
        return _POLL_MS if self._batch_threads.has_waiting or retries else None

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
        for _ in range(_ORDERS_PER_TURN):
            if (received := self._link.receive()) is not None:
                frame, fds = received
                self._execute(TIERING.decode(frame)[1], fds)
            if not self._link.more:
                return

    def _execute(self, order: Message, fds: tuple[int, ...]) -> None:
        match order:
            case Put() | Get() | Lookup():
                self._accept(Batch(order, self._namespaces[order.namespace]))
            case Drop():
                self._drop(order)
            case TierPing():
                self._answer_ping()
            case OpenNamespace():
                self._close(order.namespace)
                namespace = NamespaceMapping(order, fds, self._pool)
                self._namespaces[order.namespace] = namespace
                self._open(namespace)
            case NewSalt():
                self._reset(order)
            case CloseNamespace():
                self._close(order.namespace)
            case StopTier():
                self._stop()

    def _reset(self, order: NewSalt) -> None:
        namespace = self._namespaces.get(order.namespace)
        if namespace is not None:
            namespace.space, namespace.requested_salt = None, order.salt
            namespace.reset_unconfirmed = True
            self._refuse_pending(namespace, Outcome.GONE)
            self._open(namespace)

    def _stop(self) -> None:
        self._stopping = True
        for part in self._batch_threads.take_expired(all_parts=True):
            self._end_part(part)
        for namespace in self._namespaces.values():
            self._refuse_pending(namespace, Outcome.LATE)

    def _close(self, namespace_id: bytes) -> None:
        namespace = self._namespaces.pop(namespace_id, None)
        if namespace is not None:
            namespace.space = None
            self._refuse_pending(namespace, Outcome.GONE)

    def _accept(self, batch: Batch) -> None:
        """Submit a batch, keep it until its space is open, or refuse it."""
        namespace = batch.namespace
        if self._stopping:
            self._refuse(batch, Outcome.LATE)
        elif namespace.error:
            self._refuse(batch, Outcome.FAILED, namespace.error)
        elif namespace.space is None:
            namespace.pending_batches.append(batch)
        else:
            self._submit(batch, namespace.space)

    def _submit(self, batch: Batch, space: Space) -> None:
        order = batch.order
        if isinstance(order, Put) and any((space.id, key) in self._dropping for key in order.keys):
            # A pending removal of the key would remove the new chunk.
            self._refuse(batch, Outcome.GONE)
            return
        batch.space = space
        self._batches.add(batch)
        self._batch_threads.submit(batch.split(self._tier.batch_bytes))

    def _refuse_pending(
        self, namespace: NamespaceMapping, outcome: Outcome, error: str = ""
    ) -> None:
        batches, namespace.pending_batches = namespace.pending_batches, []
        for batch in batches:
            self._refuse(batch, outcome, error)

    def _refuse(self, batch: Batch, outcome: Outcome, error: str = "") -> None:
        batch.set_outcome(outcome, error)
        self._progress += len(batch.order.keys)
        self._send(batch.reply())

    def _answer_ping(self) -> None:
        capacity = self._capacity
        errors = (namespace.error for namespace in self._namespaces.values() if namespace.error)
        self._send(
            TierPong(
                progress=self._progress,
                busy=self._batch_threads.num_running,
                queued_bytes=self._batch_threads.queued_bytes,
                total_bytes=capacity.total,
                used_bytes=capacity.used,
                chunks=capacity.chunks,
                error=next(errors, ""),
            )
        )
        self._refresh()

    # ---------------------------------------------------------------- batches end

    def _end_part(self, part: BatchPart) -> None:
        """Count a part that has ended; if it was the batch's last, reply."""
        batch = part.batch
        self._progress += part.end - part.begin
        if not batch.end_part():
            return
        self._batches.discard(batch)
        self._send(batch.reply())
        for report in self._delayed_reports.pop(batch, ()):
            self._send(report)
        if isinstance(batch.order, Put):
            self._refresh()

    # ---------------------------------------------------------------- spaces open

    def _open(self, namespace: NamespaceMapping) -> None:
        """Have the serial thread open the namespace's space."""
        namespace.retry_at = math.inf
        requested = namespace.requested_salt
        self._serial_thread.submit(
            partial(self._open_space, namespace, requested),
            partial(self._on_opened, namespace, requested),
        )

    def _open_space(self, namespace: NamespaceMapping, requested: bytes) -> bytes:
        """Open a namespace's space in the backend; return the salt in effect. In the serial thread.

        1. Choose the salt: the broker's, else the one noted by the backend, else the one that this
           process used before, else a new one: no chunk is ever stored without a salt.
        2. Note the salt, and drop the chunks stored under the previous one.
        3. Have the backend open the space.
        """
        tier, id_ = self._tier, namespace.order.namespace
        used = self._salts.get(id_, b"")
        salt = requested or tier.salt(id_) or used or secrets.token_bytes(SALT_BYTES)
        previous = tier.note_salt(id_, salt, reset=namespace.reset_unconfirmed) or used
        self._salts[id_] = salt
        if previous not in {b"", salt}:
            tier.drop_space(namespace.space_of(previous))
        tier.open_space(namespace.space_of(salt))
        return salt

    def _on_opened(
        self, namespace: NamespaceMapping, requested: bytes, salt: bytes | TierError
    ) -> None:
        """Report the space, start its scan, and submit the batches that waited for it.

        After an error: refuse the batches, and retry later.
        """
        id_ = namespace.order.namespace
        if namespace.requested_salt != requested or self._namespaces.get(id_) is not namespace:
            return  # the namespace was reset again, or closed
        if isinstance(salt, TierError):
            if not namespace.error:
                log.error(
                    "%s: namespace %s cannot be opened: %s; retrying each second",
                    *(self._name, id_.hex()[:8], salt),
                )
            namespace.error = str(salt)
            namespace.retry_at = time.monotonic() + _RETRY_SECONDS
            self._refuse_pending(namespace, Outcome.FAILED, namespace.error)
            return
        namespace.error = ""
        namespace.salt, namespace.space = salt, namespace.space_of(salt)
        self._refresh()  # dropping chunks has freed capacity
        self._send(NamespaceOpened(namespace=id_, salt=salt))
        self._scans.append((namespace, namespace.space, self._scan(namespace.space)))
        batches, namespace.pending_batches = namespace.pending_batches, []
        for batch in batches:
            self._submit(batch, namespace.space)

    def _retry_opening(self) -> None:
        now = time.monotonic()
        for namespace in self._namespaces.values():
            if namespace.retry_at <= now:
                self._open(namespace)

    # ---------------------------------------------------------------- scans

    def _scan(self, space: Space) -> Iterator[_ChunkRows]:
        yield from self._tier.scan(space)  # runs in the serial thread

    def _continue_scans(self) -> None:
        """Request the next rows of each scan, unless the broker is behind in reading."""
        while self._scans and not self._link.wants_write:
            scan = self._scans.popleft()
            self._serial_thread.submit(partial(next, scan[2], None), partial(self._on_rows, scan))

    def _on_rows(self, scan: _Scan, result: _ChunkRows | TierError | None) -> None:
        """Report rows of a scan; None and an error end it."""
        namespace, space, _ = scan
        if namespace.space is not space:  # the namespace was reset or closed
            return
        if isinstance(result, TierError):
            log.warning("a scan of %s ends early: %s", space.id.hex()[:8], result)
        rows = result if isinstance(result, list) else []
        for begin in range(0, max(1, len(rows)), KEYS_PER_MESSAGE):
            some = rows[begin : begin + KEYS_PER_MESSAGE]
            first, count, groups = (
                IntArray.of([coverage[i] for _, coverage in some], "u2") for i in range(3)
            )
            self._send(
                ScanResult(
                    namespace=namespace.order.namespace,
                    salt=namespace.salt,
                    keys=tuple(key for key, _ in some),
                    first=first,
                    count=count,
                    groups=groups,
                    last=result is not rows,
                )
            )
        if result is rows:
            self._scans.append(scan)

    # ---------------------------------------------------------------- chunks are dropped

    def _drop(self, order: Drop) -> None:
        namespace = self._namespaces.get(order.namespace)
        if namespace is None or namespace.space is None:  # closed, or a reset drops all
            return
        space = namespace.space
        keys = Counter((space.id, key) for key in order.keys)
        self._dropping += keys
        self._serial_thread.submit(
            partial(self._tier.remove, space, order.keys), partial(self._on_removed, keys)
        )

    def _on_removed(self, keys: Counter[tuple[bytes, bytes]], result: TierError | None) -> None:
        self._dropping -= keys
        if result is not None:
            log.warning("%d chunks cannot be removed: %s", len(keys), result)

    def _refresh(self) -> None:
        """Request the keys that the backend has dropped, and its capacity.

        If a request is pending, repeat it afterwards: else chunks that the last of several puts
        evicted would be reported at the next ping only.
        """
        self._refresh_again = self._refreshing
        if not self._refreshing:
            self._refreshing = True
            self._serial_thread.submit(self._tier.take_dropped, self._on_dropped)
            self._serial_thread.submit(self._tier.capacity, self._on_capacity)

    def _on_capacity(self, capacity: Capacity | TierError) -> None:
        if isinstance(capacity, Capacity):
            self._capacity = capacity
        self._refreshing = False
        if self._refresh_again:
            self._refresh()

    def _on_dropped(self, dropped: list[tuple[bytes, list[bytes]]] | TierError) -> None:
        """Report the keys that the backend has dropped by itself."""
        names = {
            namespace.space.id: id_
            for id_, namespace in self._namespaces.items()
            if namespace.space
        }
        for space_id, keys in dropped if isinstance(dropped, list) else ():
            for begin in range(0, len(keys) if space_id in names else 0, KEYS_PER_MESSAGE):
                self._report_gone(names[space_id], keys[begin : begin + KEYS_PER_MESSAGE])

    def _report_gone(self, namespace_id: bytes, keys: Sequence[bytes]) -> None:
        """Report keys as gone; those of a running put once more after its reply.

        Otherwise that reply, which comes after the first report, would list them as stored.
        """
        for batch in self._batches:
            order = batch.order
            if isinstance(order, Put) and batch.started_ns and order.namespace == namespace_id:
                common = tuple(set(keys).intersection(order.keys))
                if common:
                    report = RemovedChunks(namespace=namespace_id, keys=common)
                    self._delayed_reports.setdefault(batch, []).append(report)
        self._send(RemovedChunks(namespace=namespace_id, keys=tuple(keys)))


def run(link_fd: int) -> int:
    """Serve until the broker stops the process; return the exit status."""
    return serve_broker(link_fd, TIERING, _open_tier, lambda error: TierFailed(error=error))


def _open_tier(link: Channel, begin: BeginTier, fds: tuple[int, ...]) -> TierService:
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
    backend = backend_class(setting)
    options = backend_options(setting)
    backend.check(options)
    tier = backend.open(options, pool)
    log.info("%s: %s; %s", name, setting.text, tier.described)
    return TierService(link, tier, pool, name)
