"""Requests of schedulers: steps and resets.

The table of the namespace that the engine is attached to decides. Slots that the table gives up
while lanes may be writing into them are revoked from the lanes.
"""

from itertools import accumulate
from typing import TypeAlias

from kvd.broker.effects import Effect
from kvd.broker.operations import Handler
from kvd.broker.sessions import Engine, Request, Session, check_kind
from kvd.broker.state import BrokerState
from kvd.broker.tiers.tiering import Tiering
from kvd.cache.directory import Blocks, ChunkRefs
from kvd.cache.namespaces import Namespace
from kvd.errors import Refusal
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

UNUSED_SECONDS = 0.25  # loans of others that are unused for this long end if slots lack
_NOTHING = Stepped(slots=NO_SLOTS, generations=NO_GENERATIONS)

_Slots: TypeAlias = tuple[list[int], list[int]]  # with their generations


class Caching:
    """Decisions about steps and resets."""

    def __init__(self, state: BrokerState, tiering: Tiering) -> None:
        self._state = state
        self._tiering = tiering

    def handlers(self) -> dict[type[Message], Handler]:
        """Return the handler of each request; it refuses engines that are not complete."""
        return {
            Step: self._step,
            Reset: self._reset,
        }

    def _step(self, request: Request[Step]) -> list[Effect]:
        """Serve one scheduler's Step: book what it has decided, then lend it slots.

        1. Check the message: only these checks refuse it.
        2. Book drops, stores, pins and uses. What cannot be booked is lost, and counted.
        3. Lend slots; the reply carries them.
        4. Revoke dropped slots from lanes, and request promotions from tiers.
        """
        step, now = request.message, request.now
        engine, namespace = _served_scheduler(request)
        slots, generations, pins = _checked_slots(step)
        blocks = _checked_blocks(step, namespace)
        finished = _checked_finished_requests(step)
        table, owner, state = namespace.table, engine.number, self._state
        to_revoke: ChunkRefs = []
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
        for lease in step.unpinned:
            table.loads.unpin(lease, owner)
        for keys, num_prompt_keys, label in finished:
            table.finish_request(keys, num_prompt_keys, label, now)
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
        """Pin slots under a lease, unless the engine has `max_leases`."""
        table, settings = namespace.table, self._state.settings
        if table.slots.leases.count(owner) >= settings.max_leases:
            self._state.reached("max_leases")
            table.loads.count_refused_pin(len(pin.slots))
            return
        seconds = min(pin.lease_ms / 1000, settings.lease_seconds)
        table.loads.pin(pin.lease, *pinned, owner, now, seconds)

    def _lend(self, engine: Engine, namespace: Namespace, step: Step, now: float) -> Stepped:
        """Lend an engine slots ahead of need, and as many as it lacked a loan for.

        A step that contains only `wanted` gets slots in bulk, unless it is the engine's first one.
        Only an engine that stores, or asks in bulk, may evict other chunks for its loans; if it
        gets too few, other engines' unused loans end. So the chunks that the daemon has kept over a
        restart are still there for the first request.
        """
        state, table, owner = self._state, namespace.table, engine.number
        is_first, engine.stepped = not engine.stepped, True
        num_engines, lending = max(1, namespace.engines), table.lending
        is_bulk = not is_first and step == Step(wanted=step.wanted)
        num_lent, share = table.slots.loans.count(owner), lending.share(num_engines)
        target = step.wanted if is_bulk else min(step.wanted, lending.max_ahead(num_engines))
        need = min(target, share) - num_lent if 2 * num_lent < target else 0
        need = max(need, min(step.refused, share) - num_lent)
        if need <= 0 or state.draining or not state.allocated_bytes:
            return _NOTHING
        is_storing = bool(step.keys or step.refused or is_bulk)
        usable = state.usable_bytes(engine)
        slots, generations = lending.lend(owner, need, num_engines, now, usable, evict=is_storing)
        if is_storing and len(slots) < need:
            for other in state.open_namespaces:
                other.table.lending.end_unused_loans(now - UNUSED_SECONDS, but=owner)
        if not slots:
            return _NOTHING
        return Stepped(slots=IntArray.of(slots, "u4"), generations=IntArray.of(generations, "u8"))

    def _reset(self, request: Request[Reset]) -> list[Effect]:
        """Drop all chunks: none is found from now on; their slots are freed afterwards.

        If the reset could not be recorded, the reply is NOT_READY: the scheduler tries again, and
        finds nothing until then.
        """
        _, namespace = _attached(request.session)
        reset_done, to_revoke, problem = self._state.reset(namespace)
        reply = Error.of(ErrorCode.NOT_READY, problem) if problem else reset_done
        effects: list[Effect] = [request.reply(reply)]
        if not namespace.temporary:  # a self-test's reset is not logged
            identity, num_dropped = request.session.identity, reset_done.dropped
            text = f"{identity} reset its namespace: {num_dropped} chunks dropped"
            if reset_done.deferred:
                text += f"; {reset_done.deferred} more go when their leases end"
            effects.append(request.session.event(text))
        effects += self._tiering.reset(namespace)
        return [*effects, *self._state.revoke(namespace, to_revoke)]


def _attached(session: Session) -> tuple[Engine, Namespace]:
    """Return the session's engine and its namespace, or refuse one that is not complete."""
    engine = session.engine
    if engine is None:
        raise Refusal(
            ErrorCode.BAD_STATE,
            "this session is a tool's, which belongs to no engine; connect again as scheduler",
        )
    if engine.namespace is None:
        missing = engine.missing_ranks
        ranks = f"ranks {list(missing)} have not" if missing else "no rank has"
        raise Refusal(ErrorCode.NOT_READY, f"engine {engine.name!r}: {ranks} registered yet")
    return engine, engine.namespace


def _served_scheduler(request: Request[Step]) -> tuple[Engine, Namespace]:
    """Return a scheduler's engine and namespace, or refuse the step.

    Refused are sessions of another kind, and engines with a rank whose lane is being replaced.
    """
    check_kind(request, "scheduler")
    engine, namespace = _attached(request.session)
    for rank, worker in engine.workers.items():
        if not worker.imported and worker.registration is not None:
            raise Refusal(
                ErrorCode.LANE_LOST,
                f"engine {engine.name!r}: lane {worker.registration.device} of rank {rank} is"
                " being replaced; try again later",
            )
    return engine, namespace


def _checked_slots(step: Step) -> tuple[list[int], list[int], list[_Slots]]:
    """Return a step's slots and generations, and those of its pins; refuse unequal numbers."""
    slots, generations = step.slots.tolist(), step.generations.tolist()
    if not len(step.keys) == len(slots) == len(generations):
        raise Refusal(
            ErrorCode.BAD_MESSAGE,
            f"{len(slots)} slots and {len(generations)} generations for {len(step.keys)} keys",
        )
    if len(step.descriptions) not in {0, len(slots)}:
        raise Refusal(
            ErrorCode.BAD_MESSAGE,
            f"{len(step.descriptions)} descriptions for {len(slots)} keys",
        )
    pins = [(pin.slots.tolist(), pin.generations.tolist()) for pin in step.pins]
    for pin_slots, pin_generations in pins:
        if len(pin_slots) != len(pin_generations):
            raise Refusal(
                ErrorCode.BAD_MESSAGE,
                f"{len(pin_generations)} generations for the {len(pin_slots)} slots of a pin",
            )
    return slots, generations, pins


def _checked_blocks(step: Step, namespace: Namespace) -> list[Blocks]:
    """Return the first block and the count of blocks of each stored chunk, or refuse them.

    Empty if every chunk is complete.
    """
    first, count, num_keys = step.first, step.count, len(step.keys)
    if first is NO_ITEMS and count is NO_ITEMS:
        return []
    if not len(first) == len(count) in {0, num_keys}:
        raise Refusal(
            ErrorCode.BAD_MESSAGE,
            f"{len(first)} first blocks and {len(count)} counts for {num_keys} keys",
        )
    if not len(first):
        return []
    blocks = list(zip(first.tolist(), count.tolist(), strict=True))
    blocks_per_chunk = namespace.geometry.blocks_per_chunk
    for begin, num_blocks in blocks:
        if num_blocks < 1 or begin + num_blocks > blocks_per_chunk:
            raise Refusal(
                ErrorCode.BAD_MESSAGE,
                f"{num_blocks} blocks from {begin} on of a chunk of {blocks_per_chunk}",
            )
    return blocks


def _checked_finished_requests(step: Step) -> list[tuple[Keys, int, int]]:
    """Return keys, number of prompt keys, and label of each finished request, or refuse them."""
    if not step.used:
        return []
    counts = step.used_counts.tolist() or [len(step.used)]
    if len(counts) > MAX_FINISHED:
        raise Refusal(
            ErrorCode.BAD_MESSAGE,
            f"{len(counts)} finished requests in one step: {MAX_FINISHED} at most; name the others"
            " in the next step",
        )
    if 0 in counts:
        raise Refusal(
            ErrorCode.BAD_MESSAGE,
            f"used_counts[{counts.index(0)}] is 0: leave out requests without keys",
        )
    prompts, labels = step.prompt_counts.tolist() or counts, step.labels or bytes(len(counts))
    if not (
        len(counts) == len(prompts) == len(labels)
        and sum(counts) == len(step.used)
        and all(prompt <= count for prompt, count in zip(prompts, counts, strict=True))
    ):
        raise Refusal(
            ErrorCode.BAD_MESSAGE,
            f"{len(step.used)} used keys, {sum(counts)} of {len(counts)} requests with"
            f" {len(prompts)} prompts and {len(labels)} labels",
        )
    ends = list(accumulate(counts))
    return [
        (step.used[end - count : end], prompt, label)
        for count, end, prompt, label in zip(counts, ends, prompts, labels, strict=True)
    ]
