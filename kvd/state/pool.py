"""One byte budget, shared by namespaces whose chunks differ in size.

Every extent of the pool belongs to one namespace or to none, and a namespace uses
only columns of which it owns every extent (see `kvd.state.geometry`). Alone, it
owns them all and reaches ``cpu_bytes // bytes_per_chunk`` chunks.

Whoever needs room gets, in this order: free extents; columns of others that hold
nothing; and, while it stays within its fair share (the budget divided by the
number of namespaces with engines attached), the column used least recently of
those that hold more than theirs. A namespace that holds nothing may take its first
column from anybody. Beyond that it must evict its own chunks. No column is taken
in which a chunk is pinned, being written or draining.

Quotas (`kvd.state.quotas`) bound all of it: nobody claims beyond a cap, nobody
takes what leaves another model below its floor, and who is below its own may take
from anybody else.

Where freed slots are scrubbed (`kvd.state.scrubbing`), a column goes back when all of it
is clean. What is taken from others comes later then: its extents are promised to the
taker, who gets the column with the last clean slot; one such move is under way at a time.

While the pool's memory is still coming into being (see `kvd.filling`) only columns
whose bytes are all there are given away, and nothing is taken or evicted for them. So it
is while the rest of a kept pool is being scrubbed.
"""

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError
from kvd.filling import FillOrder
from kvd.quota import Quota
from kvd.state.geometry import Extents, Geometry
from kvd.state.quotas import Group, Quotas
from kvd.state.scrubbing import Piece, Run, Scrubber
from kvd.state.space import Space, Tenant


@dataclass(frozen=True, slots=True)
class _Take:
    """A column to take, and the columns of others that go for it."""

    column: int
    others: tuple[tuple[Space, int], ...]


@dataclass(frozen=True, slots=True)
class _Move:
    """A take whose columns are shut and not clean yet; `extents` are promised to `taker`."""

    taker: Space
    column: int
    extents: frozenset[int]
    waits: tuple[tuple[Space, int], ...]

    @property
    def is_over(self) -> bool:
        """The others' columns have all gone."""
        return not any(column in space.shut for space, column in self.waits)


class Pool:
    """Who owns which extent of a pool of `cpu_bytes`, whose memory is filled in order `fill`.

    With `scrub` what was in use is zeroed before it is free: see `next_piece` and `wiped`.
    """

    def __init__(
        self, cpu_bytes: int, fill: FillOrder | None = None, *, scrub: bool = False
    ) -> None:
        self.extents = Extents(cpu_bytes)
        self.fill = fill or FillOrder.of(cpu_bytes)
        self._owner: list[Space | None] = [None] * self.extents.count
        self._claims = [0] * self.extents.count  # columns of the owner that touch the extent
        self._spaces: list[Space] = []
        self._joined = 0
        self._tick = 0
        self._releases = 0
        self._barren: dict[int, int] = {}  # space -> releases when it found nothing to claim
        self.quotas = Quotas(self.extents)
        self._capped: dict[int, int] = {}  # space -> moves when its cap let it take no column
        self._moves = 0
        self.scrubber = Scrubber() if scrub else None
        self._move: _Move | None = None
        self._rest: deque[int] = deque()  # pieces of the filling that nobody has looked at yet
        self._rest_pending = 0  # pieces of the scrubber for the last one that somebody has
        self._clean_bytes = self.fill.nbytes

    @property
    def cpu_bytes(self) -> int:
        """The budget."""
        return self.extents.cpu_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the extents that nobody owns."""
        held = sum(space.held for space in self._spaces)
        return self._bytes_of(None, self.extents.count - held)

    def held_bytes(self, space: Space) -> int:
        """Bytes of the extents that a space owns."""
        return self._bytes_of(space, space.held)

    def _bytes_of(self, space: Space | None, extents: int) -> int:
        owned = extents * self.extents.size
        if self._owner and self._owner[-1] is space:  # the last extent may be cut short
            owned -= self.extents.count * self.extents.size - self.extents.cpu_bytes
        return owned

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """These hold, by model; who is above a cap shrinks now, as far as nothing is in use."""
        self.quotas.set(quotas, self._spaces)
        self._releases += 1
        self._moves += 1
        self.trim()

    def trim(self) -> None:
        """Bring every model down to its cap: the columns used least recently go, if they may."""
        for group in self.quotas:
            if self.room_for(group) >= 0:
                continue
            columns = [
                (column not in space.empty, space.used_at(column), space.number, column, space)
                for space in group.spaces
                for busy in [_busy_columns(space)]
                for column in space.claimed
                if column not in busy
            ]
            for *_, column, space in sorted(columns, key=lambda entry: entry[:4]):
                if self.room_for(group) >= 0:
                    break
                self._empty_out(space, column)

    def room_for(self, group: Group) -> int:
        """Extents up to the cap, once the columns that are shut have gone."""
        return group.room + self._losses(self._shut)[group.model]

    def join(self, geometry: Geometry, tenant: Tenant, model: str = "") -> Space:
        """A new space, which owns nothing yet; `model` says whose quota counts, if any."""
        space = Space(geometry, tenant, self._joined, self.fill, model, self.scrubber)
        self._joined += 1
        self._spaces.append(space)
        self.quotas.add(space)
        return space

    def leave(self, space: Space) -> None:
        """A space ends, at once or when all that it held is clean; none of its slots may be in use.

        Raises:
            IntegrityError: some are.
        """
        self.give_back(space)
        if space.shut != set(space.claimed):
            raise IntegrityError(f"slots of {space!r} are in use")
        space.leaving = True
        space.active = False
        if self._move is not None and self._move.taker is space:
            self._move = None
        if not space.claimed:
            self._forget(space)

    def _forget(self, space: Space) -> None:
        self._spaces.remove(space)
        self.quotas.remove(space)
        self._barren.pop(space.number, None)
        self._capped.pop(space.number, None)

    def tick(self, uses: int, now: int) -> int:
        """The last of `uses` numbers greater than all before, to mark uses with.

        They are the time, `now` in microseconds, as far as that grows fast enough.
        """
        self._tick = max(self._tick + uses, now)
        return self._tick

    def fair_extents(self, space: Space) -> float:
        """How many extents a space may take from others for."""
        return self.quotas.fair(self._spaces)[space.number]

    def restore(
        self, space: Space, slots: npt.NDArray[np.int64], stamps: npt.NDArray[np.uint64]
    ) -> None:
        """Claim what holds these chunks of the daemon before, each last used at its stamp.

        Raises:
            IntegrityError: another namespace claims the same bytes.
        """
        for column in np.unique(slots // space.geometry.column_slots).tolist():
            if not self._is_free_for(space, column):
                raise IntegrityError(f"column {column} of {space!r} has two owners")
            self._claim(space, column)
        space.occupy(slots, stamps)
        self._tick = max(self._tick, int(stamps.max(initial=0)))

    def acquire_within(self, space: Space, slots: int, usable: int) -> None:
        """Claim nobody's columns with all bytes inside `usable` until `slots` are free there."""
        short = slots - space.free_within(usable)
        for column in self._order(space):
            if short <= 0:
                return
            if space.needs[column] <= usable and self._is_claimable(space, column):
                self._claim(space, column)
                short -= len(space.geometry.column_range(column))

    def acquire(self, space: Space, slots: int) -> None:
        """Claim columns until `slots` are free in `space`, or no more may be had.

        Chunks of other namespaces may be evicted for it, never those of `space`.
        """
        while space.free_slots < slots and not space.is_whole:
            column = self._claimable(space)
            if column is None:
                take = self._plan_take(space)
                if take is None or not self._take(space, take):
                    return
                column = take.column
            self._claim(space, column)

    def _take(self, space: Space, take: _Take) -> bool:
        """Make room for a column; False where it comes later, when it is clean."""
        for other, theirs in take.others:
            self._empty_out(other, theirs)
        waits = tuple((other, theirs) for other, theirs in take.others if theirs in other.shut)
        if waits:
            extents = frozenset(space.column_extents[take.column])
            self._move = _Move(space, take.column, extents, waits)
        return not waits

    def give_back(self, space: Space) -> None:
        """Release every column of a space that holds no chunk, or have it go when it is clean."""
        for column in space.claimed:
            if column in space.empty:
                self._release(space, column)
            elif column not in space.shut and space.is_left(column):
                space.shut_column(column)

    # ---------------------------------------------------------------- scrubbing

    def scrub_rest(self) -> None:
        """What lies in the pool beside the chunks in use may be anybody's: it must go.

        Until then nobody gets new room but in what is clean already, in the order of filling.
        """
        self._rest = deque(self.fill.order)
        self._clean_bytes = 0

    @property
    def clean_bytes(self) -> int | None:
        """How much of the pool may be given out, in the order of filling; None: all of it."""
        return None if self._clean_bytes >= self.fill.nbytes else self._clean_bytes

    @property
    def left_bytes(self) -> int:
        """What is to be wiped still, at most: of the rest it is known when its turn comes."""
        known = self.scrubber.left_bytes if self.scrubber is not None else 0
        return known + sum(end - begin for begin, end in map(self.fill.span, self._rest))

    def next_piece(self, device: str) -> Piece | None:
        """What the lane of `device` is to wipe now, if anything."""
        if self.scrubber is None:
            return None
        piece = self.scrubber.next(device)
        while piece is None and self._rest and not self._rest_pending:
            position = self._rest.popleft()
            self._rest_pending = self.scrubber.add_rest(self._idle_runs(position))
            if not self._rest_pending:
                self._clean_bytes = self.fill.filled_with[position]
            piece = self.scrubber.next(device)
        return piece

    def _idle_runs(self, position: int) -> list[Run]:
        """Bytes of a piece of the filling in which no slot is in use."""
        begin, end = self.fill.span(position)
        runs = []
        for used, after in sorted(run for s in self._spaces for run in s.used_runs(begin, end)):
            if begin < used:
                runs.append((begin, used))
            begin = after
        return [*runs, (begin, end)] if begin < end else runs

    def wiped(self, number: int) -> None:
        """A lane has wiped the piece of this number."""
        piece = self.scrubber.wiped(number) if self.scrubber is not None else None
        if piece is None:
            return
        space = piece.space
        if space is None:
            self._rest_pending -= 1
            if not self._rest_pending:
                done = self.fill.order[len(self.fill.order) - len(self._rest) - 1]
                self._clean_bytes = self.fill.filled_with[done]
            return
        space.cleaned(piece.slots)
        for column in space.shut & space.empty:
            self._release(space, column)
        if space.leaving and not space.claimed:
            self._forget(space)
        move = self._move
        if move is not None and move.is_over:
            self._move = None
            if self._is_claimable(move.taker, move.column):
                self._claim(move.taker, move.column)

    @property
    def _shut(self) -> list[tuple[Space, int]]:
        return [(space, column) for space in self._spaces for column in space.shut]

    def _order(self, space: Space) -> range:
        # Every other namespace starts at the far end, so that two that grow meet once
        # instead of interleaving and cutting each other's columns.
        columns = range(len(space.column_extents))
        return columns if space.number % 2 == 0 else columns[::-1]

    def _claimable(self, space: Space) -> int | None:
        if self._barren.get(space.number) == self._releases:
            return None
        for column in self._order(space):
            if self._is_claimable(space, column):
                return column
        self._barren[space.number] = self._releases
        return None

    def is_capped(self, space: Space) -> bool:
        """Nothing but the model's cap keeps the space from having another column."""
        columns = range(len(space.column_extents))
        return self.quotas.of(space) is not None and not any(
            column not in space and self._fits_cap(space, column) for column in columns
        )

    def _is_claimable(self, space: Space, column: int) -> bool:
        return self._is_free_for(space, column) and self._fits_cap(space, column)

    def _fits_cap(self, space: Space, column: int, given_up: int = 0) -> bool:
        """Whether the model may hold this column too, once it has `given_up` so many extents."""
        group = self.quotas.of(space)
        return group is None or self._gain(space, column) - given_up <= group.room

    def _gain(self, space: Space, column: int) -> int:
        return sum(self._owner[extent] is not space for extent in space.column_extents[column])

    def _losses(self, theirs: Iterable[tuple[Space, int]]) -> Counter[str]:
        """How many extents each model would lose with these columns."""
        claims = Counter((s, e) for s, column in theirs for e in s.column_extents[column])
        losses: Counter[str] = Counter()
        for (space, extent), count in claims.items():
            losses[space.model] += self._claims[extent] == count
        return losses

    def _may_lose(self, group: Group, losses: Counter[str], taker: Space) -> bool:
        """The group stays at its floor, or gives to one of its own."""
        loss = losses[group.model]
        return not loss or group.model == taker.model or group.held - loss >= group.floor

    def _empty_out(self, space: Space, column: int) -> None:
        """Evict what is in a column and let it go, at once or when it is clean."""
        used = space.used_slots(column)
        if used:
            space.tenant.yield_slots(used)
        if column in space.empty:
            self._release(space, column)
        else:
            space.shut_column(column)

    def _is_free_for(self, space: Space, column: int) -> bool:
        owner, extents = self._owner, space.column_extents[column]
        move = self._move
        if move is not None and move.taker is not space and not move.extents.isdisjoint(extents):
            return False
        return column not in space and all(
            owner[extent] is None or owner[extent] is space for extent in extents
        )

    def _plan_take(self, space: Space) -> _Take | None:
        """The best column to take from others, or None. Changes nothing."""
        if self._capped.get(space.number) == self._moves or self._move is not None:
            return None
        fair = self.quotas.fair(self._spaces)
        own, group = fair[space.number], self.quotas.of(space)
        poor = group is not None and group.below_floor
        others = [other for other in self._spaces if other is not space]
        if not poor and space.held >= own and space.held and not any(o.empty for o in others):
            return None
        rich = {other.number for other in others if other.held > fair[other.number]}
        busy = {other.number: _busy_columns(other) for other in others}
        counted = group is not None or self.quotas.has_floors
        shut, fits = self._shut, False
        best: tuple[tuple[bool, bool, int, int], _Take] | None = None
        for column in self._order(space):
            if column in space:
                continue
            theirs = self._overlapped(space, column)
            losses = self._losses([*theirs, *shut]) if counted else Counter[str]()
            if not self._fits_cap(space, column, losses[space.model] if group else 0):
                continue
            fits = True
            if any(theirs_column in busy[other.number] for other, theirs_column in theirs):
                continue
            if not all(self._may_lose(each, losses, space) for each in self.quotas):
                continue
            holding = [(other, c) for other, c in theirs if c not in other.empty]
            from_poor = any(o.number not in rich for o, _ in holding)
            if holding and space.held and not poor:
                new = self._gain(space, column)
                if space.held + new > own or from_poor:
                    continue
            used_at = max((other.used_at(c) for other, c in holding), default=0)
            rank = (bool(holding), from_poor and poor, used_at, len(theirs))
            if best is None or rank < best[0]:
                best = (rank, _Take(column, tuple(theirs)))
        if not fits:
            self._capped[space.number] = self._moves
        return best and best[1]

    def _overlapped(self, space: Space, column: int) -> list[tuple[Space, int]]:
        """The claimed columns of others that share an extent with this one."""
        found: dict[tuple[int, int], tuple[Space, int]] = {}
        for extent in space.column_extents[column]:
            other = self._owner[extent]
            if other is not None and other is not space:
                for theirs in other.columns_at[extent]:
                    if theirs in other:
                        found[other.number, theirs] = (other, theirs)
        return list(found.values())

    def _claim(self, space: Space, column: int) -> None:
        self._moves += 1
        for extent in space.column_extents[column]:
            if self._owner[extent] is None:
                self._owner[extent] = space
                space.held += 1
            self._claims[extent] += 1
        space.open_column(column)

    def _release(self, space: Space, column: int) -> None:
        space.close_column(column)
        for extent in space.column_extents[column]:
            self._claims[extent] -= 1
            if not self._claims[extent]:
                self._owner[extent] = None
                space.held -= 1
        self._releases += 1
        self._moves += 1

    def check_integrity(self) -> None:
        """Extents are owned as the claimed columns say, and no byte by two chunks.

        Raises:
            IntegrityError: otherwise.
        """
        owner: list[Space | None] = [None] * self.extents.count
        claims = [0] * self.extents.count
        shares: list[tuple[int, int, int, int]] = []
        for space in self._spaces:
            space.check_integrity()
            for column in space.claimed:
                for extent in space.column_extents[column]:
                    if owner[extent] not in (None, space):
                        raise IntegrityError(f"extent {extent} is claimed twice")
                    owner[extent] = space
                    claims[extent] += 1
                for slot in space.used_slots(column):
                    shares += [
                        (*share, space.number, slot) for share in space.geometry.shares(slot)
                    ]
            if space.held != sum(each is space for each in owner):
                raise IntegrityError(f"held extents are miscounted: {space!r}")
        if owner != self._owner or claims != self._claims:
            raise IntegrityError("extents are not owned as the claimed columns say")
        self.quotas.check_integrity(self._spaces)
        self._check_soil()
        end = 0
        for first, after, number, slot in sorted(shares):
            if first < end or after > self.cpu_bytes:
                raise IntegrityError(f"slot {slot} of space {number} overlaps or leaves the pool")
            end = after

    def _check_soil(self) -> None:
        """Every soiled slot waits for a lane once, and only what is shut goes by itself."""
        if self.scrubber is None:
            return
        self.scrubber.check_integrity()
        soil: Counter[tuple[int, int]] = Counter()
        for space, slots in self.scrubber:
            soil.update((space.number, slot) for slot in slots)
        known = {(space.number, slot) for space in self._spaces for slot in space.soiled_slots}
        if soil.keys() != known or soil.total() != len(known):
            raise IntegrityError(f"soiled slots {sorted(known)} wait as {sorted(soil.items())}")
        if any(space.leaving and set(space.claimed) != space.shut for space in self._spaces):
            raise IntegrityError("a space that leaves has columns that do not")
        move = self._move
        if move is not None and (
            move.is_over
            or any(
                owner not in (None, move.taker) and (owner, extent) not in self._going(move)
                for extent in move.extents
                for owner in (self._owner[extent],)
            )
        ):
            raise IntegrityError(f"promised extents that nobody lets go of: {move}")

    def _going(self, move: _Move) -> set[tuple[Space, int]]:
        """The extents, with their owners, that the columns hold that a move waits for."""
        return {
            (space, extent)
            for space, column in move.waits
            if column in space.shut
            for extent in space.column_extents[column]
        }

    def __repr__(self) -> str:
        free = sum(owner is None for owner in self._owner)
        return (
            f"<Pool {self.cpu_bytes} bytes, {free} of {self.extents.count} extents free,"
            f" {len(self._spaces)} namespaces>"
        )


def _busy_columns(space: Space) -> set[int]:
    """Columns in which something is pinned, being written, draining or soiled."""
    busy = {slot // space.geometry.column_slots for slot in space.tenant.busy_slots()}
    return busy | space.soiled_columns
