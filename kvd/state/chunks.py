"""The chunk table: every decision about the chunks of one namespace.

It is the only writer of its directory, and the states of a slot are those of
`kvd_proto.states.CHUNK`::

    FREE -> WRITING     prepare_store
    WRITING -> READY    share_done, with the last rank that was expected
    WRITING -> DRAINING a share failed, complete_store without success, the ticket's
                        deadline passed, the session is gone, reset
    DRAINING -> FREE    revoked: the lanes have nothing under way there
    READY -> FREE       evicted or reset; a reset chunk that is pinned is doomed, that
                        is, it leaves the index at once and its slot at the last pin

Methods decide first and then act; none of them waits, and none raises for what a
client may send.
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError
from kvd.state.ages import Ages
from kvd.state.decisions import (
    Counters,
    LoadDecision,
    Refs,
    ResetOutcome,
    ShareOutcome,
    StoreDecision,
    StoreSummary,
)
from kvd.state.directory import DirectoryWriter
from kvd.state.geometry import Geometry
from kvd.state.leases import Leases, Tickets
from kvd.state.ledger import KeptChunks
from kvd.state.policies import POLICIES
from kvd.state.policy import ReuseFilter
from kvd.state.pool import Pool
from kvd_proto.answers import StoreAnswer
from kvd_proto.directory import KEY_BYTES, SlotState

Ints = Sequence[int] | npt.NDArray[np.integer]

_READY, _WRITING = int(SlotState.READY), int(SlotState.WRITING)
_ACCEPTED, _PRESENT = int(StoreAnswer.ACCEPTED), int(StoreAnswer.PRESENT)
_PENDING, _FULL = int(StoreAnswer.PENDING), int(StoreAnswer.FULL)
_NOT_YET, _BAD_KEY = int(StoreAnswer.NOT_YET), int(StoreAnswer.BAD_KEY)
_QUOTA = int(StoreAnswer.QUOTA)


@dataclass(frozen=True, slots=True)
class TableConfig:
    """Settings of a namespace. Leases last as long as asked, but `lease_seconds` at most."""

    policy: str = "lru"
    reuse_threshold: int = 1
    lease_seconds: float = 60.0
    ticket_seconds: float = 60.0


class ChunkTable:
    """The chunks of one namespace.

    Args:
        directory: a new directory with one slot for each of the geometry's.
        geometry: the namespace's grid in the pool.
        pool: where its room comes from.
        config: settings; `policy` is a name in `POLICIES`.
        model: whose quota counts; empty where none does.
    """

    def __init__(
        self,
        directory: DirectoryWriter,
        geometry: Geometry,
        pool: Pool,
        config: TableConfig,
        model: str = "",
    ) -> None:
        self.directory = directory
        self.config = config
        self._world_size = geometry.world_size
        self._replicated = geometry.replicated
        self._policy = POLICIES[config.policy](geometry.num_slots, directory.key)
        self._filter = (
            ReuseFilter(config.reuse_threshold, max(1024, geometry.num_slots))
            if config.reuse_threshold > 1
            else None
        )
        self._leases = Leases()
        self._tickets = Tickets()
        self._draining: set[int] = set()
        self._doomed: set[int] = set()
        ledger = directory.ledger
        self.ages = Ages(geometry.num_slots, ledger.stamps if ledger is not None else None)
        self._counters = Counters()
        self._pool = pool
        self.space = pool.join(geometry, self, model)

    def restore(self, chunks: KeptChunks) -> None:
        """Take over the chunks of the daemon before, into a table that is new.

        Raises:
            LedgerDamaged: they contradict each other.
            IntegrityError: they lie where another namespace's do.
        """
        masks = (
            np.uint64(1) << (chunks.slots % self._world_size).astype(np.uint64)
            if self._replicated
            else np.full(len(chunks), self.expected_mask(0), np.uint64)
        )
        self.directory.restore(chunks, masks)
        self._pool.restore(self.space, chunks.slots, chunks.stamps)
        self._policy.restore(chunks.slots)
        self._counters.restored = len(chunks)

    # ------------------------------------------------------------------- stores

    def prepare_store(
        self, keys: Sequence[bytes], owner: int, now: float, usable: int | None = None
    ) -> StoreDecision:
        """Give slots to as many new keys as there is room for, in the order of `keys`.

        What is evicted for it goes all or nothing: first it is known how many can
        go, then exactly those are evicted that the accepted keys need. Of equal keys
        the first counts; the others are PENDING, or what the first one got. While only
        `usable` bytes of the pool can be used, as it is filled, nothing is evicted.
        """
        self.ages.tell(now)
        answers = bytearray(len(keys))
        wanted: dict[bytes, int] = {}
        again: list[tuple[int, int]] = []
        seen: dict[bytes, int] = {}
        named: set[int] = set()
        find, state, offers = self.directory.find, self.directory.state, self._filter
        for i, key in enumerate(keys):
            if not 0 < len(key) <= KEY_BYTES:
                answers[i] = _BAD_KEY
            elif key in seen:
                again.append((i, seen[key]))
            elif (slot := find(key)) >= 0:
                answers[i] = _PRESENT if state(slot) == _READY else _PENDING
                named.add(slot)
            else:
                seen[key] = i
                if offers is None or offers.offer(key):
                    wanted[key] = i
                else:
                    answers[i] = _NOT_YET
        slots, evicted = self._room(len(wanted), named, usable)
        taken = list(wanted)[: len(slots)]
        turned_away = list(wanted.values())[len(slots) :]
        generations = self.directory.begin(taken, slots, owner)
        if not all(generations):
            slots, generations = self._return_unplaced(taken, slots, generations)
        accepted = set(taken)
        for key, i in wanted.items():
            answers[i] = _ACCEPTED if key in accepted else _FULL
        self._name_quota(answers, turned_away)
        for i, first in again:
            answers[i] = _PENDING if answers[first] == _ACCEPTED else answers[first]
        if slots:
            self._tickets.issue(owner, slots, now + self.config.ticket_seconds)
        self._count(answers, len(evicted))
        return StoreDecision(
            np.frombuffer(answers, np.uint8),
            np.array(slots, "<u4"),
            np.array(generations, "<u8"),
            evicted,
        )

    def _name_quota(self, answers: bytearray, turned_away: list[int]) -> None:
        """Where the cap is why there was no room for these keys, say so."""
        if turned_away and self._pool.is_capped(self.space):
            for i in turned_away:
                answers[i] = _QUOTA

    def _room(
        self, need: int, named: set[int], usable: int | None
    ) -> tuple[list[int], list[bytes]]:
        """Up to `need` slots, and the keys evicted for them; never slots in `named`."""
        space, pins, policy = self.space, self._leases.pins, self._policy
        if usable is not None:
            self._pool.acquire_within(space, need, usable)
            return space.take_within(need, usable), []
        if space.free_slots < need:
            self._pool.acquire(space, need)
        slots = space.take(min(need, space.free_slots))
        short = need - len(slots)
        if not short:
            return slots, []
        pinned = len(pins) - len(self._doomed)
        kept = sum(slot not in pins and slot in policy for slot in named)
        victims = policy.victims(
            min(short, len(policy) - pinned - kept),
            lambda slot: slot not in pins and slot not in named,
        )
        if victims is None:
            raise IntegrityError(f"fewer chunks may go than were counted: {self!r}")
        self.ages.evicted(victims)
        evicted = self.directory.free(victims)
        slots += sorted(victims)
        return slots, evicted

    def _return_unplaced(
        self, keys: list[bytes], slots: list[int], generations: list[int]
    ) -> tuple[list[int], list[int]]:
        """Drop what the index refused (generation 0) from `keys` and the rest; free its slots."""
        self.space.give(slot for slot, g in zip(slots, generations, strict=True) if not g)
        self._counters.index_full += generations.count(0)
        kept = [g > 0 for g in generations]
        keys[:] = [key for key, good in zip(keys, kept, strict=True) if good]
        return [s for s, good in zip(slots, kept, strict=True) if good], [
            g for g in generations if g
        ]

    def _count(self, answers: bytearray, evicted: int) -> None:
        counters = self._counters
        counters.offered += len(answers)
        counters.accepted += answers.count(_ACCEPTED)
        counters.present += answers.count(_PRESENT)
        counters.pending += answers.count(_PENDING)
        counters.full += answers.count(_FULL)
        counters.quota += answers.count(_QUOTA)
        counters.not_yet += answers.count(_NOT_YET)
        counters.bad_key += answers.count(_BAD_KEY)
        counters.evicted += evicted

    def turn_away(self, keys: int) -> None:
        """Count keys that were offered while the daemon drains."""
        self._counters.offered += keys
        self._counters.draining += keys

    def expected_mask(self, slot: int) -> int:
        """The ranks whose shares make the slot's chunk complete, as a bit mask."""
        # Where all hold the same bytes, they take turns to write.
        world = self._world_size
        return 1 << slot % world if self._replicated else (1 << world) - 1

    def share_done(  # noqa: PLR0917 a report has these six parts
        self,
        owner: int,
        rank: int,
        slots: Ints,
        generations: Ints,
        first: Ints,
        count: Ints,
        *,
        ok: bool,
        groups: Ints | None = None,
    ) -> ShareOutcome:
        """A lane reports one rank's share of these slots, [n] each; `groups` are 0 where left out.

        A chunk becomes READY with the last expected rank. One whose share failed, or
        of which no block is there on every rank, can never be READY and is given up.
        Reports about slots that have moved on, and second reports, are ignored.
        """
        directory, ready, failed, stale = self.directory, [], [], 0
        given_up: set[int] = set()
        if groups is None:
            groups = [0] * len(slots)
        columns = (map(int, column) for column in (slots, generations, first, count, groups))
        for slot, generation, block, blocks, group in zip(*columns, strict=True):
            if (
                not 0 <= slot < directory.num_slots
                or slot in given_up
                or directory.generation(slot) != generation
                or directory.state(slot) != _WRITING
                or directory.owner(slot) != owner
                or not self.expected_mask(slot) & ~directory.ranks_done(slot) & 1 << rank
            ):
                stale += 1
            elif not ok or blocks < 1:
                failed.append(slot)
                given_up.add(slot)
            else:
                done, covered = directory.add_share(slot, rank, block, blocks, group)
                if not covered:
                    failed.append(slot)
                    given_up.add(slot)
                elif done == self.expected_mask(slot):
                    directory.make_ready(slot)
                    self._tickets.close(owner, slot)
                    ready.append(slot)
        # A prompt's head comes first in a job and must be the last to be evicted.
        for slot in reversed(ready):
            self._policy.insert(slot)
        self._mark(ready)
        self._counters.stored += len(ready)
        self._counters.stale_reports += stale
        return ShareOutcome(self._refs(ready), self._give_up(failed))

    def complete_store(
        self, keys: Sequence[bytes], owner: int, *, success: bool
    ) -> tuple[StoreSummary, Refs]:
        """The engine is done with these stores. Without success what `owner` writes is given up.

        Returns:
            How the keys stand, and the slots to be revoked.
        """
        directory, ready, pending, gone = self.directory, 0, 0, 0
        failed: dict[int, None] = {}
        for key in keys:
            slot = directory.find(key)
            if slot < 0 or slot in failed:
                gone += 1
            elif directory.state(slot) == _READY:
                ready += 1
            elif success or directory.owner(slot) != owner:
                pending += 1
            else:
                failed[slot] = None
                gone += 1
        return StoreSummary(ready, pending, gone), self._give_up(list(failed))

    def _give_up(self, slots: Sequence[int]) -> Refs:
        """WRITING -> DRAINING."""
        directory = self.directory
        for slot in slots:
            directory.write_state(slot, SlotState.DRAINING)
            directory.unindex(slot)
            self._tickets.close(directory.owner(slot), slot)
        self._draining.update(slots)
        self._counters.dropped += len(slots)
        return self._refs(slots)

    def revoked(self, slots: Ints, generations: Ints) -> int:
        """The lanes have nothing under way in these slots: DRAINING -> FREE. How many it freed."""
        freed = []
        for slot, generation in zip(map(int, slots), map(int, generations), strict=True):
            if slot in self._draining and self.directory.generation(slot) == generation:
                self._draining.remove(slot)
                self.directory.write_state(slot, SlotState.FREE)
                freed.append(slot)
            else:
                self._counters.stale_reports += 1
        self.space.give(freed)
        return len(freed)

    # -------------------------------------------------------------------- loads

    def prepare_load(
        self,
        keys: Sequence[bytes],
        owner: int,
        now: float,
        duration: float,
        usable: int | None = None,
    ) -> LoadDecision:
        """Pin the keys that are READY, under a lease of `duration` seconds at most.

        While only `usable` bytes of the pool can be used, what lies elsewhere is missed.
        """
        self.ages.tell(now)
        within = self.space.is_within
        found, slots = bytearray(len(keys)), []
        find, state = self.directory.find, self.directory.state
        for i, key in enumerate(keys):
            slot = find(key)
            if slot >= 0 and state(slot) == _READY and (usable is None or within(slot, usable)):
                found[i] = 1
                slots.append(slot)
        deadline = now + min(duration, self.config.lease_seconds)
        lease_id = self._leases.grant(owner, slots, now, deadline) if slots else 0
        self._touch(slots)
        self._counters.asked += len(keys)
        self._counters.hits += len(slots)
        self._counters.misses += len(keys) - len(slots)
        self._counters.leases += bool(slots)
        array = np.array(slots, "<u4")
        first, count = self.directory.coverage(array)
        return LoadDecision(
            lease_id,
            np.frombuffer(found, np.uint8),
            array,
            self.directory.generations(array),
            first,
            count,
            deadline,
        )

    def complete_load(self, lease_id: int, owner: int) -> bool:
        """Give a lease back. False where it has run out or is not this session's."""
        unpinned = self._leases.release(lease_id, owner)
        if unpinned is None:
            return False
        self._free_doomed(unpinned)
        return True

    def touch(self, keys: Sequence[bytes]) -> int:
        """These chunks were useful, a prompt's head first. How many of them are here."""
        slots = [slot for slot in map(self.directory.find, keys) if slot >= 0]
        self._touch([slot for slot in slots if self.directory.state(slot) == _READY])
        return len(slots)

    def _touch(self, slots: list[int]) -> None:
        # The tail of a prompt is useless without its head, so it has to look colder.
        for slot in reversed(slots):
            self._policy.touch(slot)
        self._mark(slots)

    def _mark(self, slots: list[int]) -> None:
        """Note that these were of use now, the hottest first."""
        if slots:
            last = self._pool.tick(len(slots), self.ages.now)
            self.space.mark(slots, last)
            self.ages.used(slots, last)

    # ------------------------------------------------------------- ends of things

    def expire(self, now: float) -> Refs:
        """End the leases and give up the stores whose deadline has come; slots to be revoked."""
        self.ages.tell(now)
        late = self._tickets.expired(now)
        self._counters.tickets_expired += len(late)
        leases, unpinned = self._leases.expire(now)
        self._counters.leases_expired += leases
        self._free_doomed(unpinned)
        return self._give_up(late)

    def drop_owner(self, owner: int) -> Refs:
        """An owner is gone: end its leases, give up its stores; slots to be revoked."""
        self._free_doomed(self._leases.drop_owner(owner))
        return self._give_up(self._tickets.of(owner))

    def reset(self) -> ResetOutcome:
        """Drop every chunk, in one go; those that are pinned go when their leases end."""
        pins = self._leases.pins
        kept: list[int] = []
        gone: list[int] = []
        for slot in self._policy.order():
            (kept if slot in pins else gone).append(slot)
        self._policy.clear()
        if self._filter is not None:
            self._filter.clear()
        self.directory.free(gone)
        self.space.give(gone)
        for slot in kept:
            self.directory.unindex(slot)
        self._doomed.update(kept)
        revoke = self._give_up(list(self._tickets))
        self._pool.give_back(self.space)
        self._counters.reset += len(gone) + len(kept)
        return ResetOutcome(len(gone) + len(revoke), len(kept), revoke)

    def give_up_stores(self) -> Refs:
        """Give up whatever is being written, and forget offers; slots to be revoked."""
        if self._filter is not None:
            self._filter.clear()
        return self._give_up(list(self._tickets))

    def remove(
        self,
        first: int,
        count: int,
        *,
        unused_for: float | None = None,
        by_engine: bool = False,
    ) -> tuple[int, int]:
        """Drop the READY chunks in `count` slots from `first` on, for an operator or an engine.

        With `unused_for` only those that were of no use for so many seconds, and none
        that is pinned.

        Returns:
            How many went, and how many go when their leases end.
        """
        pins, policy = self._leases.pins, self._policy
        slots = [s for s in self.directory.ready_slots(first, count) if s in policy]
        if unused_for is not None:
            old = self.ages.of(slots) >= unused_for
            slots = [s for s, is_old in zip(slots, old, strict=True) if is_old and s not in pins]
        gone = [slot for slot in slots if slot not in pins]
        kept = [slot for slot in slots if slot in pins]
        for slot in slots:
            policy.remove(slot)
        self.directory.free(gone)
        self.space.give(gone)
        for slot in kept:
            self.directory.unindex(slot)
        self._doomed.update(kept)
        if by_engine:
            self._counters.reset += len(slots)
        else:
            self._counters.removed += len(slots)
        return len(gone), len(kept)

    def give_back(self) -> None:
        """Let others have the room that holds no chunk."""
        self._pool.give_back(self.space)

    def _free_doomed(self, unpinned: Iterable[int]) -> None:
        freed = self._doomed.intersection(unpinned)
        if freed:
            self._doomed -= freed
            for slot in freed:
                self.directory.write_state(slot, SlotState.FREE)
            self.space.give(freed)

    # ------------------------------------------------------------ for the pool

    def busy_slots(self) -> Iterable[int]:
        """Slots that must stay: pinned, being written, draining."""
        yield from self._leases.pins
        yield from self._tickets
        yield from self._draining

    def yield_slots(self, slots: list[int]) -> None:
        """Evict these READY, unpinned chunks: another namespace needs the room."""
        self.ages.evicted(slots)
        for slot in slots:
            self._policy.remove(slot)
        self.directory.free(slots)
        self.space.give(slots)
        self._counters.yielded += len(slots)

    # -------------------------------------------------------------- inspection

    def leases_until(self, when: float) -> int:
        """Leases that were granted at `when` or before and have not ended."""
        return self._leases.count_until(when)

    @property
    def is_idle(self) -> bool:
        """Nothing is being written, draining or pinned."""
        return not (self._tickets or self._draining or self._leases.pins)

    def leases_of(self, owner: int) -> int:
        """How many of them an owner holds."""
        return self._leases.held_by(owner)

    @property
    def leases(self) -> int:
        """Leases that have not ended."""
        return len(self._leases)

    def stats(self) -> dict[str, int]:
        """Chunks by state. Pinned and doomed ones are READY; doomed ones go at the last pin."""
        return {
            "ready": len(self._policy) + len(self._doomed),
            "writing": len(self._tickets),
            "draining": len(self._draining),
            "pinned": len(self._leases.pins),
            "doomed": len(self._doomed),
        }

    def counters(self) -> dict[str, int]:
        """Events since the namespace was opened; `Counters` says what each means."""
        return asdict(self._counters)

    def _refs(self, slots: Sequence[int]) -> Refs:
        return [(slot, self.directory.generation(slot)) for slot in slots]

    def check_integrity(self) -> None:
        """Directory, policy, leases, tickets and space say the same about every slot.

        Raises:
            IntegrityError: they do not.
        """
        for part in (self.directory, self._policy, self._leases, self._tickets, self.space):
            part.check_integrity()
        if self._filter is not None:
            self._filter.check_integrity()
        self._check_counters()
        by_state = self.directory.slots_by_state()
        order = self._policy.order()
        claims = {
            SlotState.WRITING: (list(self._tickets), "tickets"),
            SlotState.READY: ([*order, *self._doomed], "policy and doomed"),
            SlotState.DRAINING: (list(self._draining), "draining"),
        }
        for state, (slots, what) in claims.items():
            if sorted(slots) != by_state[state]:
                raise IntegrityError(f"{state.name} slots {by_state[state]}, {what} say {slots}")
        taken = {s for column in self.space.claimed for s in self.space.used_slots(column)}
        used = sorted(taken - self.space.soiled_slots)
        if used != sorted(s for state in claims for s in by_state[state]):
            raise IntegrityError(f"slots in use by the space: {used}; {self!r}")
        pins = self._leases.pins.keys()
        if not self._doomed <= pins or not pins <= set(by_state[SlotState.READY]):
            raise IntegrityError("pinned slots that are not READY, or doomed ones without a pin")
        indexed = {
            s for s in (*order, *self._tickets) if self.directory.find(self.directory.key(s)) == s
        }
        if len(indexed) != len(order) + len(self._tickets):
            raise IntegrityError("a WRITING or READY chunk cannot be found by its key")
        for slot in self._tickets:
            if self.directory.ranks_done(slot) & self.expected_mask(slot) == self.expected_mask(
                slot
            ):
                raise IntegrityError(f"slot {slot} has all shares and is not READY")

    def check_slots(self, first: int, count: int) -> int:
        """All say the same about each of `count` slots from `first` on; how many hold a chunk.

        Raises:
            IntegrityError: they do not.
        """
        states = self.directory.states(first, count)
        tickets = set(self._tickets)
        free = self.space.free_among(first, first + len(states))
        for slot, state in enumerate(states, first):
            ordered, doomed = slot in self._policy, slot in self._doomed
            claims = {
                SlotState.WRITING: slot in tickets,
                SlotState.READY: ordered != doomed,
                SlotState.DRAINING: slot in self._draining,
            }
            if [claimed for claimed, yes in claims.items() if yes] != [state] * (state != 0):
                raise IntegrityError(f"slot {slot} is {SlotState(state).name}, claimed: {claims}")
            if (slot in free) != (state == SlotState.FREE):
                raise IntegrityError(
                    f"slot {slot} is {SlotState(state).name}, but not so in {free}"
                )
            if (doomed or slot in self._leases.pins) and state != SlotState.READY:
                raise IntegrityError(f"slot {slot} is pinned and {SlotState(state).name}")
            if (ordered or slot in tickets) and self.directory.find(
                self.directory.key(slot)
            ) != slot:
                raise IntegrityError(f"the chunk in slot {slot} cannot be found by its key")
        return sum(state != SlotState.FREE for state in states)

    def _check_counters(self) -> None:
        self.ages.at_eviction.check_integrity()
        c = self._counters
        refused = c.full + c.quota + c.not_yet + c.bad_key + c.draining
        answered = c.accepted + c.present + c.pending + refused
        if c.offered != answered or c.asked != c.hits + c.misses:
            raise IntegrityError(f"keys that were offered or asked for and not answered: {c}")
        if self.ages.at_eviction.count != c.evicted + c.yielded:
            raise IntegrityError(f"chunks evicted without an age: {self.ages!r}, {c}")

    def __repr__(self) -> str:
        return (
            f"<ChunkTable {self.directory.namespace.hex()[:8]} {self._policy.name}:"
            f" {len(self._policy)} ready, {len(self._tickets)} writing,"
            f" {len(self._draining)} draining, {len(self._doomed)} doomed,"
            f" {len(self._leases.pins)} pinned, {self.space.free_slots} free at hand>"
        )
