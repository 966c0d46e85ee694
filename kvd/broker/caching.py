"""What schedulers ask of the cache: where chunks may be written, where they lie, forget them all.

Each is decided by the table of the namespace that the engine is attached to; slots that the
table gives up while lanes may be writing there are called back from the lanes.
"""

from kvd.broker.effects import Effect
from kvd.broker.operations import Handler
from kvd.broker.sessions import Engine, Request, Session
from kvd.broker.state import BrokerState
from kvd.cache.directory import Blocks
from kvd.cache.namespaces import Namespace
from kvd.errors import Refused
from kvd_proto.messages import (
    CompleteLoad,
    CompleteStore,
    ErrorCode,
    Message,
    Ok,
    PrepareLoad,
    PrepareStore,
    RequestFinished,
    RequestNoted,
    Reset,
)


class Caching:
    """Decisions about engines' chunks."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which request; each refuses engines that are not complete."""
        return {
            PrepareStore: self._prepare_store,
            CompleteStore: self._complete_store,
            PrepareLoad: self._prepare_load,
            CompleteLoad: self._complete_load,
            RequestFinished: self._request_finished,
            Reset: self._reset,
        }

    def _prepare_store(self, request: Request[PrepareStore]) -> list[Effect]:
        message, state = request.message, self._state
        if state.draining:
            if request.session.engine is not None and request.session.engine.namespace is not None:
                request.session.engine.namespace.table.count_refused(len(message.keys))
            raise Refused(ErrorCode.DRAINING, "the daemon is draining, it takes no new chunks")
        if not state.allocated:
            raise Refused(ErrorCode.NOT_READY, "nothing of the pool's memory is there yet")
        engine, namespace = _served(request.session)
        reply = namespace.table.prepare_store(
            message.keys,
            engine.number,
            request.now,
            state.usable_bytes(engine),
            _blocks(message, namespace),
            seconds=state.settings.ticket_seconds,
        )
        return [request.reply(reply)]

    def _complete_store(self, request: Request[CompleteStore]) -> list[Effect]:
        engine, namespace = _attached(request.session)
        reply, slots = namespace.table.complete_store(
            request.message.keys, engine.number, success=request.message.success
        )
        return [request.reply(reply), *self._state.revoke(namespace, slots)]

    def _prepare_load(self, request: Request[PrepareLoad]) -> list[Effect]:
        message, settings = request.message, self._state.settings
        engine, namespace = _served(request.session)
        held = namespace.table.slots.leases.held_by(engine.number)
        if held >= settings.max_leases:
            raise Refused(
                ErrorCode.LIMIT,
                f"engine {engine.name!r} holds {held} leases: give them back when loads have"
                f" ended, or raise max_leases (now {settings.max_leases})",
                limit="max_leases",
            )
        seconds = min(message.lease_ms / 1000, settings.lease_seconds)
        reply = namespace.table.prepare_load(
            message.keys,
            engine.number,
            request.now,
            seconds,
            self._state.usable_bytes(engine),
            _blocks(message, namespace),
        )
        return [request.reply(reply)]

    @staticmethod
    def _complete_load(request: Request[CompleteLoad]) -> list[Effect]:
        engine, namespace = _attached(request.session)
        namespace.table.complete_load(request.message.lease, engine.number)
        return [request.reply(Ok())]

    @staticmethod
    def _request_finished(request: Request[RequestFinished]) -> list[Effect]:
        _, namespace = _attached(request.session)
        return [request.reply(RequestNoted(found=namespace.table.finished(request.message.keys)))]

    def _reset(self, request: Request[Reset]) -> list[Effect]:
        """Answer at once: nothing of before is found any more; slots are freed afterwards."""
        _, namespace = _attached(request.session)
        done, slots = namespace.table.reset()
        effects: list[Effect] = [request.reply(done)]
        if not namespace.temporary:  # that of a self-test concerns nobody else
            text = f"{request.session.who} reset its namespace: {done.dropped} chunks dropped"
            if done.deferred:
                text += f"; {done.deferred} more go when their leases end"
            effects.append(request.session.event(text))
        return [*effects, *self._state.revoke(namespace, slots)]


def _attached(session: Session) -> tuple[Engine, Namespace]:
    """Return the session's engine and its namespace, or refuse one that is not complete."""
    engine = session.engine
    if engine is None:
        raise Refused(ErrorCode.BAD_STATE, "this session belongs to no engine")
    if engine.namespace is None:
        missing = engine.missing_ranks
        lacks = f"ranks {list(missing)} have not" if missing else "no rank has"
        raise Refused(ErrorCode.NOT_READY, f"engine {engine.name!r}: {lacks} registered yet")
    return engine, engine.namespace


def _served(session: Session) -> tuple[Engine, Namespace]:
    """Return the same, or refuse an engine with a rank whose lane is not there."""
    engine, namespace = _attached(session)
    for rank, worker in engine.workers.items():
        if not worker.imported and worker.registration is not None:
            raise Refused(
                ErrorCode.LANE_LOST,
                f"engine {engine.name!r}: lane {worker.registration.device} of rank {rank} is"
                " being replaced; try again later",
            )
    return engine, namespace


def _blocks(message: PrepareStore | PrepareLoad, namespace: Namespace) -> list[Blocks]:
    """Return what of each chunk is meant; nothing where it is all of every chunk."""
    first, count, keys = message.first, message.count, len(message.keys)
    if not len(first) == len(count) in {0, keys}:
        raise Refused(
            ErrorCode.BAD_MESSAGE,
            f"{len(first)} first blocks and {len(count)} counts for {keys} keys",
        )
    blocks = list(zip(first.numpy().tolist(), count.numpy().tolist(), strict=True))
    whole = namespace.geometry.blocks_per_chunk
    for begin, number in blocks:
        if number < 1 or begin + number > whole:
            raise Refused(
                ErrorCode.BAD_MESSAGE, f"{number} blocks from {begin} on of a chunk of {whole}"
            )
    return blocks
