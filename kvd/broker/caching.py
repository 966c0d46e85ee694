"""What schedulers ask of the cache: where chunks may be written, where they lie, forget them all.

Each is decided by the table of the namespace that the engine is attached to; what that gives
up while lanes may be writing there is called back from them.
"""

from kvd.broker.admission import check_leases
from kvd.broker.effects import Effect, Event, Reply
from kvd.broker.operations import Handler
from kvd.broker.sessions import Session
from kvd.broker.state import BrokerState
from kvd.cache.directory import Blocks
from kvd.errors import Refused
from kvd_proto.arrays import IntArray
from kvd_proto.messages import (
    CompleteLoad,
    CompleteStore,
    ErrorCode,
    LoadCompleted,
    LoadPrepared,
    Message,
    PrepareLoad,
    PrepareStore,
    RequestFinished,
    RequestNoted,
    Reset,
    ResetDone,
    StoreCompleted,
    StorePrepared,
)


class Caching:
    """Decisions about engines' chunks over the shared state.

    Args:
        state: shared.
    """

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def handlers(self) -> dict[type[Message], Handler]:
        """Who serves which request; each refuses engines that are not complete."""
        return {
            PrepareStore: self._prepare_store,
            CompleteStore: self._complete_store,
            PrepareLoad: self._prepare_load,
            CompleteLoad: self._complete_load,
            RequestFinished: self._request_finished,
            Reset: self._reset,
        }

    def _prepare_store(
        self, session: Session, request_id: int, message: PrepareStore, now: float
    ) -> list[Effect]:
        self._open_for_work(session, len(message.keys))
        engine, namespace = self._state.served_namespace(session.engine)
        usable = self._state.usable_bytes(engine)
        blocks = _blocks(message, namespace.geometry.blocks_per_chunk)
        decision = namespace.table.prepare_store(
            message.keys,
            engine.number,
            now,
            usable,
            blocks,
            seconds=self._state.settings.ticket_seconds,
        )
        reply = StorePrepared(
            answers=IntArray.of(decision.answers, "u1"),
            slots=IntArray.of(decision.slots, "u4"),
            generations=IntArray.of(decision.generations, "u8"),
            evicted=tuple(decision.evicted),
        )
        return [Reply(session.number, request_id, reply)]

    def _complete_store(
        self, session: Session, request_id: int, message: CompleteStore, now: float
    ) -> list[Effect]:
        del now
        engine, namespace = self._state.attached_namespace(session.engine)
        summary, slots = namespace.table.complete_store(
            message.keys, engine.number, success=message.success
        )
        reply = StoreCompleted(
            ready=summary.ready, pending=summary.pending, dropped=summary.dropped
        )
        return [Reply(session.number, request_id, reply), *self._state.revoke(namespace, slots)]

    def _prepare_load(
        self, session: Session, request_id: int, message: PrepareLoad, now: float
    ) -> list[Effect]:
        engine, namespace = self._state.served_namespace(session.engine)
        check_leases(engine, namespace, self._state.settings.max_leases)
        seconds = min(message.lease_ms / 1000, self._state.settings.lease_seconds)
        usable = self._state.usable_bytes(engine)
        blocks = _blocks(message, namespace.geometry.blocks_per_chunk)
        decision = namespace.table.prepare_load(
            message.keys, engine.number, now, seconds, usable, blocks
        )
        reply = LoadPrepared(
            lease=decision.lease_id,
            lease_ms=int(seconds * 1000),
            found=IntArray.of(decision.found, "u1"),
            slots=IntArray.of(decision.slots, "u4"),
            generations=IntArray.of(decision.generations, "u8"),
        )
        return [Reply(session.number, request_id, reply)]

    def _complete_load(
        self, session: Session, request_id: int, message: CompleteLoad, now: float
    ) -> list[Effect]:
        del now
        engine, namespace = self._state.attached_namespace(session.engine)
        released = namespace.table.complete_load(message.lease, engine.number)
        return [Reply(session.number, request_id, LoadCompleted(released=released))]

    def _request_finished(
        self, session: Session, request_id: int, message: RequestFinished, now: float
    ) -> list[Effect]:
        del now
        _, namespace = self._state.attached_namespace(session.engine)
        found = namespace.table.finished(message.keys)
        return [Reply(session.number, request_id, RequestNoted(found=found))]

    def _reset(self, session: Session, request_id: int, message: Reset, now: float) -> list[Effect]:
        """Answered at once: nothing of before is found any more; slots are freed afterwards."""
        del message, now
        _, namespace = self._state.attached_namespace(session.engine)
        done = namespace.table.reset()
        reply = Reply(
            session.number, request_id, ResetDone(dropped=done.dropped, deferred=done.deferred)
        )
        told: list[Effect] = []
        if not namespace.temporary:  # that of a self-test is its own affair
            text = f"{session.who} reset its namespace: {done.dropped} chunks dropped"
            if done.deferred:
                text += f"; {done.deferred} more go when their leases end"
            told.append(Event(text, fields=session.who.fields))
        return [reply, *told, *self._state.revoke(namespace, done.revoke)]

    def _open_for_work(self, session: Session, keys: int) -> None:
        if self._state.draining:
            if session.engine is not None and session.engine.namespace is not None:
                session.engine.namespace.table.count_refused(keys)
            raise Refused(ErrorCode.DRAINING, "the daemon is draining, it takes no new chunks")
        if not self._state.allocated:
            raise Refused(ErrorCode.NOT_READY, "nothing of the pool's memory is there yet")


def _blocks(message: PrepareStore | PrepareLoad, blocks_per_chunk: int) -> list[Blocks]:
    """What of each chunk is meant; nothing where it is all of every chunk."""
    first, count, keys = message.first, message.count, len(message.keys)
    if not len(first) == len(count) in {0, keys}:
        raise Refused(
            ErrorCode.BAD_MESSAGE,
            f"{len(first)} first blocks and {len(count)} counts for {keys} keys",
        )
    blocks = list(zip(first.numpy().tolist(), count.numpy().tolist(), strict=True))
    for begin, number in blocks:
        if begin < 0 or number < 1 or begin + number > blocks_per_chunk:
            raise Refused(
                ErrorCode.BAD_MESSAGE,
                f"{number} blocks from {begin} on of a chunk of {blocks_per_chunk}",
            )
    return blocks
