"""The loop of a tier's process: orders of the broker in, answers out.

It calls nothing of the backend: a medium that hangs keeps threads, and pings are answered.
"""

import dataclasses
import logging
import os
import select
import time
import weakref
from collections import Counter, deque
from typing import TypeAlias

from kvd.errors import TierError
from kvd.machine.files import open_files_remedy
from kvd.tier.batches import Batch, Kind, Part, refused
from kvd.tier.clerk import Begun, Clerk, Dropped, Event, Tidied
from kvd.tier.contract import Space, Tier
from kvd.tier.place import Place
from kvd.tier.transfers import Transfers
from kvd.tier.workers import Workers
from kvd.wire.tiering import (
    TIERING,
    Ask,
    CloseSpace,
    Drop,
    Get,
    Gone,
    Held,
    NewEpoch,
    OpenSpace,
    Outcome,
    Put,
    SpaceOpened,
    StopTier,
    TierPing,
    TierPong,
    TierReady,
)
from kvd_proto.channel import Channel, close_all
from kvd_proto.errors import DecodeError, DescriptorsLost
from kvd_proto.messages import Message

log = logging.getLogger("kvd.tier")
_ORDERS_A_TURN = 64
_LOOK_MS = 50  # between looks at what waits for threads
_AGAIN_SECONDS = 1.0  # between tries to begin a namespace
_Key: TypeAlias = tuple[bytes, bytes]
"""A namespace's id and a chunk's key."""


class TierService:
    """One tier process's life.

    Args:
        link: to the broker.
        tier: the backend, opened.
        pool: all of it, writable.
        name: of the tier, for the log.
    """

    def __init__(self, link: Channel, tier: Tier, pool: memoryview, name: str) -> None:
        self._link = link
        self._tier = tier
        self._pool = pool
        self._name = name
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        weakref.finalize(self, os.close, self._wake)  # a thread that hung may still use it
        self._told: deque[Part | Event] = deque()  # by the threads
        self._places: dict[bytes, Place] = {}
        self._early: dict[bytes, list[Batch]] = {}  # of namespaces that have not begun
        self._failed: dict[bytes, str] = {}  # namespaces that cannot begin, and why
        self._scans: deque[Space] = deque()  # whose next piece is to be asked for
        self._dropping: Counter[_Key] = Counter()
        self._retries: dict[bytes, float] = {}  # of those, when they are tried again
        self._batches: set[Batch] = set()  # that threads have, or will have
        self._gone_later: dict[Batch, list[Gone]] = {}
        self._capacity = tier.capacity()
        self._progress = 0
        self._tidying = self._tidy_again = self._stopping = False
        self._workers = Workers(Transfers(tier, name), tier.threads, self._tell)
        self._clerk = Clerk(tier, self._tell)

    def run(self) -> None:
        """Serve until StopTier (what a thread is in is finished first) or the broker's end."""
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
                self._hear()
                for part in self._workers.take_useless():
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

    def _flush(self) -> None:
        """Send the rest; the broker reads until its end of the link."""
        poll = select.poll()
        poll.register(self._link, select.POLLOUT)
        while not self._link.flush():
            poll.poll()

    def _patience(self) -> int | None:
        if self._link.more:
            return 0
        return _LOOK_MS if self._workers.waiting or self._retries else None

    def _announce(self) -> None:
        tier, capacity = self._tier, self._capacity
        self._send(
            TierReady(
                pid=os.getpid(),
                medium=tier.medium,
                shared=tier.shared,
                described=tier.described,
                total_bytes=capacity.total,
                used_bytes=capacity.used,
                chunks=capacity.chunks,
                damaged_records=tier.damaged_records,
            )
        )

    # ---------------------------------------------------------------- orders

    def _read_orders(self) -> None:
        for _ in range(_ORDERS_A_TURN):
            try:
                received = self._link.receive()
            except DescriptorsLost as error:
                close_all(self._link.take_descriptors())
                text = "%s: an order is left out: %s; %s"
                log.error(text, self._name, error, open_files_remedy())  # noqa: TRY400  # the text has the reason
                continue
            if received is not None:
                self._receive(*received)
            if not self._link.more:
                return

    def _receive(self, frame: bytes, fds: tuple[int, ...]) -> None:
        try:
            _, order = TIERING.decode(frame)
            if isinstance(order, OpenSpace):
                taken, fds = fds, ()
                self._open(order, taken)
            else:
                self._obey(order)
        except (DecodeError, TierError) as error:
            log.error("%s: an order cannot be carried out: %s", self._name, error)  # noqa: TRY400  # the text has the reason
        finally:
            close_all(fds)

    def _obey(self, order: Message) -> None:
        match order:
            case Put() | Get() | Ask():
                self._carry_out(order)
            case Drop():
                self._drop(order)
            case TierPing():
                self._answer_ping()
            case NewEpoch() if place := self._places.get(order.namespace):
                self._refuse_early(order.namespace, Outcome.GONE)
                self._begin(place, order.epoch)
            case CloseSpace() if order.namespace in self._places:
                self._close(order.namespace)
            case StopTier():
                self._stop()
            case _:
                raise TierError(f"{type(order).__name__} is not for now; a bug in kvd")

    def _stop(self) -> None:
        self._stopping = True
        for part in self._workers.take_all():
            self._ended(part)
        for namespace in list(self._early):
            self._refuse_early(namespace, Outcome.LATE)

    def _open(self, order: OpenSpace, fds: tuple[int, ...]) -> None:
        if order.namespace in self._places:
            self._close(order.namespace)
        place = Place(order, fds, self._pool)
        self._places[order.namespace] = place
        self._begin(place, order.epoch)

    def _begin(self, place: Place, epoch: int) -> None:
        if place.space is not None:
            self._clerk.forget(place.space)
        place.space = None
        place.asked = dataclasses.replace(place.asked, epoch=epoch)
        self._clerk.begin(place)

    def _close(self, namespace: bytes) -> None:
        place = self._places.pop(namespace)
        if place.space is not None:
            self._clerk.forget(place.space)
        place.space = None
        self._failed.pop(namespace, None)
        self._retries.pop(namespace, None)
        self._refuse_early(namespace, Outcome.GONE)

    def _carry_out(self, order: Put | Get | Ask) -> None:
        place = self._places.get(order.namespace)
        if place is None:
            self._send(refused(order, Outcome.GONE, "the namespace is not open"))
            return
        try:
            batch = Batch.of(order, place)
        except TierError as error:
            self._send(refused(order, Outcome.FAILED, str(error)))
            raise
        if self._stopping:
            self._refuse(batch, Outcome.LATE, "")
        elif order.namespace in self._failed:
            self._refuse(batch, Outcome.FAILED, self._failed[order.namespace])
        elif place.space is None:
            self._early.setdefault(order.namespace, []).append(batch)
        else:
            self._submit(batch, place.space)

    def _submit(self, batch: Batch, space: Space) -> None:
        if batch.kind is Kind.PUT and any(
            (space.id, key) in self._dropping for key in batch.keys
        ):  # its removal has not come to pass, and would take the new chunk
            self._refuse(batch, Outcome.GONE, "")
            return
        batch.space = space
        self._batches.add(batch)
        self._workers.submit(batch.parts(self._tier.batch_bytes))

    def _drop(self, order: Drop) -> None:
        place = self._places.get(order.namespace)
        if place is None or place.space is None:  # a new epoch drops all
            return
        self._dropping.update((order.namespace, key) for key in order.keys)
        self._clerk.drop(place.space, order.keys)

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
                error=next(iter(self._failed.values()), ""),
            )
        )
        self._tidy()

    def _tidy(self) -> None:
        """Ask what the backend has dropped; again, if it is being asked: it may have dropped more.

        Without that, what the last put of several dropped would be told at the next ping only.
        """
        self._tidy_again = self._tidying
        if not self._tidying:
            self._tidying = True
            self._clerk.tidy()

    # ---------------------------------------------------------------- answers

    def _tell(self, event: Part | Event) -> None:
        """Called by threads: the loop hears of it."""
        self._told.append(event)
        os.eventfd_write(self._wake, 1)

    def _hear(self) -> None:
        """Take what threads have told, in its order."""
        while self._told:
            match event := self._told.popleft():
                case Part():
                    self._ended(event)
                case Begun():
                    self._begun(event)
                case Dropped():
                    self._dropping -= Counter((event.namespace, key) for key in event.keys)
                case Tidied():
                    self._capacity = event.capacity or self._capacity
                    self._tidying = False
                    if self._tidy_again:
                        self._tidy()
                case Held():
                    self._held(event)
                case Gone():
                    self._gone(event)

    def _ended(self, part: Part) -> None:
        batch = part.batch
        self._progress += part.end - part.begin
        if not batch.ends():
            return
        self._batches.discard(batch)
        self._send(batch.done())
        for gone in self._gone_later.pop(batch, ()):
            self._send(gone)
        if batch.kind is Kind.PUT:
            self._tidy()

    def _refuse_early(self, namespace: bytes, outcome: Outcome, error: str = "") -> None:
        for batch in self._early.pop(namespace, ()):
            self._refuse(batch, outcome, error)

    def _refuse(self, batch: Batch, outcome: Outcome, error: str) -> None:
        batch.fail(outcome, error)
        self._progress += len(batch.keys)
        self._send(batch.done())

    def _begun(self, event: Begun) -> None:
        place, asked = event.place, event.asked
        if place.asked is not asked or self._places.get(asked.id) is not place:
            return  # reset again, or closed
        if event.space is None:
            if asked.id not in self._failed:
                log.error(
                    "%s: namespace %s cannot begin: %s; it is tried again each second",
                    *(self._name, asked.id.hex()[:8], event.error),
                )
            self._failed[asked.id] = event.error
            self._retries[asked.id] = time.monotonic() + _AGAIN_SECONDS
            self._refuse_early(asked.id, Outcome.FAILED, event.error)
            return
        self._failed.pop(asked.id, None)
        place.space = event.space
        self._tidy()  # another epoch has made room
        if not place.answered:  # a new epoch needs no answer
            place.answered = True
            self._send(SpaceOpened(namespace=asked.id, epoch=event.space.epoch))
            self._scans.append(event.space)
        for batch in self._early.pop(asked.id, ()):
            self._submit(batch, event.space)

    def _begin_again(self) -> None:
        """Try namespaces again that could not begin."""
        now = time.monotonic()
        for namespace in [name for name, due in self._retries.items() if due <= now]:
            del self._retries[namespace]
            self._clerk.begin(self._places[namespace])

    def _held(self, held: Held) -> None:
        place = self._places.get(held.namespace)
        space = place.space if place is not None else None
        if space is None or space.epoch != held.epoch:
            return
        self._send(held)
        if not held.last:
            self._scans.append(space)

    def _go_on_scanning(self) -> None:
        """Ask for the next pieces of scans; while the broker does not read, for none."""
        while self._scans and not self._link.wants_write:
            space = self._scans.popleft()
            place = self._places.get(space.id)
            if place is not None and place.space is space:
                self._clerk.scan(space)

    def _gone(self, gone: Gone) -> None:
        """Report what the backend dropped; of a chunk that is being put, after that."""
        for batch in self._batches:
            if batch.kind is not Kind.PUT or not batch.began:
                continue
            both = tuple(set(gone.keys).intersection(batch.keys))
            if both and batch.place.order.namespace == gone.namespace:
                later = Gone(namespace=gone.namespace, keys=both)
                self._gone_later.setdefault(batch, []).append(later)
        self._send(gone)

    def _send(self, message: Message) -> None:
        self._link.send(TIERING.encode(message))

    def __repr__(self) -> str:
        return f"<TierService {self._name}, {self._workers!r}>"
