"""What schedulers ask of the cache: where chunks may be written, where they lie, forget them all.

Each is decided by the table of the namespace that the engine is attached to; slots that the
table gives up while lanes may be writing there are called back from the lanes.
"""

from itertools import accumulate
from typing import TypeAlias

from kvd.broker.effects import Effect
from kvd.broker.engines.sessions import Engine, Request, Session
from kvd.broker.requests.operations import Handler
from kvd.broker.state import BrokerState
from kvd.broker.tiers.tiering import Tiering
from kvd.cache.directory import Blocks, Refs
from kvd.cache.namespaces import Namespace
from kvd.errors import Refused
from kvd_proto.jobs import IntArray
from kvd_proto.messages import (
    MAX_FINISHED,
    NO_GENERATIONS,
    NO_ITEMS,
    NO_SLOTS,
    Error,
    ErrorCode,
    Keys,
    Message,
    Pin,
    Reset,
    Step,
    Stepped,
)

UNUSED_SECONDS = 0.25  # of others' loans, until they end where an engine gets too few
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
        """Serve one scheduler's Step: book what it has decided, then lend it slots.

        Checks come first. After them nothing is refused: what cannot be had is lost, and counted.
        The reply says what was lent; then lanes are told which slots to leave, and tiers what to
        bring up.
        """
        step, now = request.message, request.now
        engine, namespace = _served_scheduler(request.session)
        slots, generations, pins = _checked_slots(step)
        blocks = _checked_blocks(step, namespace)
        uses = _checked_uses(step)
        table, owner, state = namespace.table, engine.number, self._state
        to_revoke: Refs = []
        if step.missed:
            table.misses.count(step.missed, now)
        if step.dropped:
            to_revoke += table.stores.drop(step.dropped, owner)
        if step.keys:
            table.stores.begin(
                step.keys,
                slots,
                generations,
                owner,
                now,
                blocks,
                seconds=state.settings.ticket_seconds,
                descriptions=step.descriptions,
            )
        for pin, pinned in zip(step.pins, pins, strict=True):
            self._pin(pin, pinned, namespace, owner, now)
        for number in step.unpinned:
            table.loads.unpin(number, owner)
        for keys, prompt, label in uses:
            table.finish_request(keys, prompt, label, now)
        if step.unstored:
            table.stores.remember_unstored(step.unstored, now)
        if step.present or step.pending or step.not_yet or step.refused:
            table.stores.count_offered(
                step.present, step.pending, step.not_yet, step.refused, draining=state.draining
            )
        effects: list[Effect] = [request.reply(self._lend(engine, namespace, step, now))]
        if to_revoke:
            effects += state.revoke(namespace, to_revoke)
        if step.sought:
            effects += self._tiering.request_promotion(namespace, owner, step.sought, now)
        return effects

    def _pin(self, pin: Pin, pinned: _Slots, namespace: Namespace, owner: int, now: float) -> None:
        table, settings = namespace.table, self._state.settings
        if table.slots.leases.count(owner) >= settings.max_leases:
            self._state.reached("max_leases")
            table.loads.count_refused_pin(len(pin.slots))
            return
        seconds = min(pin.lease_ms / 1000, settings.lease_seconds)
        table.loads.pin(pin.lease, *pinned, owner, now, seconds)

    def _lend(self, engine: Engine, namespace: Namespace, step: Step, now: float) -> Stepped:
        """Lend slots ahead of need, and as many as were refused for want of a loan.

        Only an engine that stores evicts other namespaces' chunks, and not with its first step, so
        that what a daemon has kept is there for the first request. Where it gets too few, loans end
        that other engines have not used for a while.
        """
        state, table, owner = self._state, namespace.table, engine.number
        first, engine.stepped = not engine.stepped, True
        engines, lending = max(1, namespace.engines), table.lending
        # A step that says nothing else asks for slots in bulk.
        bulk = not first and step == Step(wanted=step.wanted)
        have, share = table.slots.loans.count(owner), lending.share(engines)
        wanted = step.wanted if bulk else min(step.wanted, lending.most_ahead(engines))
        need = min(wanted, share) - have if 2 * have < wanted else 0
        need = max(need, min(step.refused, share) - have)
        if need <= 0 or state.draining or not state.allocated:
            return _NOTHING
        stores = bool(step.keys or step.refused or bulk)
        slots, generations = lending.lend(
            owner, need, engines, now, state.usable_bytes(engine), evict=stores
        )
        if stores and len(slots) < need:
            for each in state.open_namespaces:
                each.table.lending.end_unused_loans(now - UNUSED_SECONDS, but=owner)
        if not slots:
            return _NOTHING
        return Stepped(slots=IntArray.of(slots, "u4"), generations=IntArray.of(generations, "u8"))

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


def _served_scheduler(session: Session) -> tuple[Engine, Namespace]:
    """Return a scheduler's engine and namespace, or refuse a session that may send no steps.

    Those are sessions of another kind, and of an engine with a rank whose lane is not there.
    """
    if session.kind != "scheduler":
        raise Refused(ErrorCode.BAD_STATE, f"STEP by a {session.kind}, only schedulers may")
    engine, namespace = _attached(session)
    for rank, worker in engine.workers.items():
        if not worker.imported and worker.registration is not None:
            raise Refused(
                ErrorCode.LANE_LOST,
                f"engine {engine.name!r}: lane {worker.registration.device} of rank {rank} is"
                " being replaced; try again later",
            )
    return engine, namespace


def _checked_slots(step: Step) -> tuple[list[int], list[int], list[_Slots]]:
    """A step's slots and generations, and those of its pins; refused where they do not fit."""
    slots, generations = step.slots.tolist(), step.generations.tolist()
    if not len(step.keys) == len(slots) == len(generations):
        raise Refused(
            ErrorCode.BAD_MESSAGE,
            f"{len(slots)} slots and {len(generations)} generations for {len(step.keys)} keys",
        )
    if len(step.descriptions) not in {0, len(slots)}:
        raise Refused(
            ErrorCode.BAD_MESSAGE,
            f"{len(step.descriptions)} descriptions for {len(slots)} keys",
        )
    pins = [(pin.slots.tolist(), pin.generations.tolist()) for pin in step.pins]
    for pinned, of in pins:
        if len(pinned) != len(of):
            raise Refused(
                ErrorCode.BAD_MESSAGE,
                f"{len(of)} generations for the {len(pinned)} slots of a pin",
            )
    return slots, generations, pins


def _checked_blocks(step: Step, namespace: Namespace) -> list[Blocks]:
    """Return what of each chunk is meant; nothing where it is all of every chunk."""
    first, count, keys = step.first, step.count, len(step.keys)
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


def _checked_uses(step: Step) -> list[tuple[Keys, int, int]]:
    """Return keys, count of keys of the prompt, and label of each request that has finished."""
    if not step.used:
        return []
    counts = step.used_counts.tolist() or [len(step.used)]
    if len(counts) > MAX_FINISHED:
        raise Refused(
            ErrorCode.BAD_MESSAGE,
            f"{len(counts)} finished requests in one step: {MAX_FINISHED} at most; name the others"
            " in the next step",
        )
    if 0 in counts:
        raise Refused(
            ErrorCode.BAD_MESSAGE,
            f"used_counts[{counts.index(0)}] is 0: leave out requests without keys",
        )
    prompts, labels = step.prompt_counts.tolist() or counts, step.labels or bytes(len(counts))
    if not (
        len(counts) == len(prompts) == len(labels)
        and sum(counts) == len(step.used)
        and all(prompt <= count for prompt, count in zip(prompts, counts, strict=True))
    ):
        raise Refused(
            ErrorCode.BAD_MESSAGE,
            f"{len(step.used)} used keys, {sum(counts)} of {len(counts)} requests with"
            f" {len(prompts)} prompts and {len(labels)} labels",
        )
    ends = list(accumulate(counts))
    return [
        (step.used[end - count : end], prompt, label)
        for count, end, prompt, label in zip(counts, ends, prompts, labels, strict=True)
    ]
