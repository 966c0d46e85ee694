"""What schedulers ask of the cache: where chunks may be written, where they lie, forget them all.

Each is decided by the table of the namespace that the engine is attached to; slots that the
table gives up while lanes may be writing there are called back from the lanes.
"""

from typing import TypeAlias

from kvd.broker.effects import ChunksReady, Effect
from kvd.broker.operations import Handler
from kvd.broker.sessions import Engine, Request, Session
from kvd.broker.state import BrokerState
from kvd.broker.tiering import Tiering
from kvd.cache.directory import Blocks
from kvd.cache.namespaces import Namespace
from kvd.errors import Refused
from kvd_proto.arrays import IntArray
from kvd_proto.messages import (
    NO_GENERATIONS,
    NO_ITEMS,
    NO_SLOTS,
    Error,
    ErrorCode,
    Message,
    Pin,
    Reset,
    Step,
    Stepped,
)

SPARE_SECONDS = 1.0  # loans that were not used for so long go where others get too few
_NOTHING = Stepped(slots=NO_SLOTS, generations=NO_GENERATIONS)

_Slots: TypeAlias = tuple[list[int], list[int]]  # with their generations


class Caching:
    """Decisions about engines' chunks."""

    def __init__(self, state: BrokerState, tiering: Tiering) -> None:
        self._state = state
        self._tiering = tiering

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which request; each refuses engines that are not complete."""
        return {
            Step: self._step,
            Reset: self._reset,
        }

    def _step(self, request: Request[Step]) -> list[Effect]:
        """Carry out what a scheduler has decided, and lend it slots for what it will decide."""
        message, session, now = request.message, request.session, request.now
        if session.kind != "scheduler":
            raise Refused(ErrorCode.BAD_STATE, f"STEP by a {session.kind}, only schedulers may")
        engine, namespace = _served(session)
        slots, generations, pins = _fitting(message)
        blocks = _blocks(message, namespace)
        table, owner, state = namespace.table, engine.number, self._state
        revoke, ready = [], 0
        if message.dropped:
            revoke += table.stores.drop(message.dropped, owner)
        if message.keys:
            ready, over = table.stores.begin(
                message.keys,
                slots,
                generations,
                owner,
                now,
                blocks,
                seconds=state.settings.ticket_seconds,
                descriptions=message.descriptions,
            )
            revoke += over
        for pin, pinned in zip(message.pins, pins, strict=True):
            self._pin(pin, pinned, namespace, owner, now)
        for number in message.unpinned:
            table.loads.unpin(number, owner)
        if message.used:
            table.loads.finished(message.used)
        if message.present or message.pending or message.not_yet or message.refused:
            table.stores.note_offered(
                message.present,
                message.pending,
                message.not_yet,
                message.refused,
                draining=state.draining,
            )
        lent, effects = self._lend(engine, namespace, message, now)
        if revoke:
            effects += state.revoke(namespace, revoke)
        if ready:
            effects.append(ChunksReady(owner))
        if message.sought:
            effects += self._tiering.seek(namespace, owner, message.sought, now)
        return [request.reply(lent), *effects]

    def _pin(self, pin: Pin, pinned: _Slots, namespace: Namespace, owner: int, now: float) -> None:
        table, settings = namespace.table, self._state.settings
        if table.slots.leases.held_by(owner) >= settings.max_leases:
            self._state.reached("max_leases")
            table.loads.refuse_pin(len(pin.slots))
            return
        seconds = min(pin.lease_ms / 1000, settings.lease_seconds)
        table.loads.pin(pin.lease, *pinned, owner, now, seconds)

    def _lend(
        self, engine: Engine, namespace: Namespace, message: Step, now: float
    ) -> tuple[Stepped, list[Effect]]:
        """Lend slots that are free, and to an engine that stores others, too.

        An engine gets a part of its share ahead of need, so that others that come find free slots.
        One that stores gets what other engines do not use, or where they use all of theirs, what is
        evicted. An engine that only loads takes nobody's room, not even its own chunks'; nor does
        one that has just been attached, so that what a daemon has kept is there for the first
        request.
        """
        state, table, owner, wanted = self._state, namespace.table, engine.number, message.wanted
        first, engine.stepped = not engine.stepped, True
        engines = max(1, namespace.engines)
        # One that says nothing else asks for slots in bulk.
        bulk = not first and message == Step(wanted=wanted)
        if not bulk:
            wanted = min(wanted, table.lending.most_ahead(engines))
        have = len(table.slots.loans.of(owner))
        if 2 * have >= wanted or state.draining or not state.allocated:
            return _NOTHING, []
        stores = message.keys or message.refused or bulk
        spare = bool(stores) and self._spare(owner, now)
        slots, generations = table.lending.lend(
            owner,
            wanted,
            engines,
            now,
            state.usable_bytes(engine),
            evict=bool(stores) and not spare,
        )
        effects: list[Effect] = []
        if stores and 2 * (have + len(slots)) < wanted:  # free when lanes have been asked
            for each in state.open_namespaces:
                refs = each.table.lending.call_in_spare(now - SPARE_SECONDS, but=owner)
                effects += state.revoke(each, refs)
        if not slots:
            return _NOTHING, effects
        lent = Stepped(slots=IntArray.of(slots, "u4"), generations=IntArray.of(generations, "u8"))
        return lent, effects

    def _spare(self, owner: int, now: float) -> bool:
        """Whether other engines have loans that they have not used for a while."""
        return any(
            each.table.slots.loans.idle_since(now - SPARE_SECONDS, but=owner)
            for each in self._state.open_namespaces
        )

    def _reset(self, request: Request[Reset]) -> list[Effect]:
        """Answer at once: nothing of before is found any more; slots are freed afterwards."""
        _, namespace = _attached(request.session)
        done, slots, lack = self._state.reset(namespace)
        # It asks again, and finds nothing until it has its answer.
        reply = Error.of(ErrorCode.NOT_READY, lack) if lack else done
        effects: list[Effect] = [request.reply(reply)]
        if not namespace.temporary:  # that of a self-test concerns nobody else
            text = f"{request.session.who} reset its namespace: {done.dropped} chunks dropped"
            if done.deferred:
                text += f"; {done.deferred} more go when their leases end"
            effects.append(request.session.event(text))
        effects += self._tiering.reset(namespace)
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


def _fitting(message: Step) -> tuple[list[int], list[int], list[_Slots]]:
    """A step's slots and generations, and those of its pins; refused where they do not fit."""
    slots, generations = message.slots.tolist(), message.generations.tolist()
    if not len(message.keys) == len(slots) == len(generations):
        raise Refused(
            ErrorCode.BAD_MESSAGE,
            f"{len(slots)} slots and {len(generations)} generations for {len(message.keys)} keys",
        )
    if len(message.descriptions) not in {0, len(slots)}:
        raise Refused(
            ErrorCode.BAD_MESSAGE,
            f"{len(message.descriptions)} descriptions for {len(slots)} keys",
        )
    pins = [(pin.slots.tolist(), pin.generations.tolist()) for pin in message.pins]
    for pinned, of in pins:
        if len(pinned) != len(of):
            raise Refused(
                ErrorCode.BAD_MESSAGE,
                f"{len(of)} generations for the {len(pinned)} slots of a pin",
            )
    return slots, generations, pins


def _blocks(message: Step, namespace: Namespace) -> list[Blocks]:
    """Return what of each chunk is meant; nothing where it is all of every chunk."""
    first, count, keys = message.first, message.count, len(message.keys)
    if first is NO_ITEMS and count is NO_ITEMS:
        return []
    if not len(first) == len(count) in {0, keys}:
        raise Refused(
            ErrorCode.BAD_MESSAGE,
            f"{len(first)} first blocks and {len(count)} counts for {keys} keys",
        )
    if not len(first):
        return []
    blocks = list(zip(first.tolist(), count.tolist(), strict=True))
    whole = namespace.geometry.blocks_per_chunk
    for begin, number in blocks:
        if number < 1 or begin + number > whole:
            raise Refused(
                ErrorCode.BAD_MESSAGE, f"{number} blocks from {begin} on of a chunk of {whole}"
            )
    return blocks
