"""One byte budget, shared by namespaces whose chunks differ in size.

Every extent of the pool belongs to one namespace or to none, and a namespace uses
only columns of which it owns every extent (see `kvd.state.geometry`). Alone, it
owns them all and reaches ``cpu_bytes // bytes_per_chunk`` chunks.

Whoever needs room gets free extents first (`kvd.state.holdings` knows whose each is),
then what may be taken from others (`kvd.state.taking`). Beyond that it must evict its
own chunks.

Quotas (`kvd.state.quotas`) bound all of it: nobody claims beyond a cap, nobody
takes what leaves another model below its floor, and who is below its own may take
from anybody else.

Where freed slots are scrubbed (`kvd.state.scrubbing`), a column goes back when all of it
is clean. What is taken from others comes later then: its extents are promised to the
taker, who gets the column with the last clean slot; one such move is under way at a time.

While the pool's memory is still coming into being (see `kvd.filling`) only columns
whose bytes are all there are given away, and nothing is taken or evicted for them. So it
is while the rest of a kept pool is being scrubbed (`kvd.state.rest`).
"""

from collections import Counter
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError
from kvd.filling import FillOrder
from kvd.quota import Quota
from kvd.state.geometry import Extents, Geometry
from kvd.state.holdings import Holdings, search_order
from kvd.state.quotas import Group, Quotas
from kvd.state.rest import Rest
from kvd.state.scrubbing import Piece, Scrubber
from kvd.state.space import Space, Tenant
from kvd.state.taking import Move, Take, Taking, busy_columns


class Pool:
    """Who owns which extent of a pool of `cpu_bytes`, whose memory is filled in order `fill`.

    With `scrub` what was in use is zeroed before it is free: see `next_piece` and `wiped`.
    """

    def __init__(
        self, cpu_bytes: int, fill: FillOrder | None = None, *, scrub: bool = False
    ) -> None:
        self.extents = Extents(cpu_bytes)
        self.fill = fill or FillOrder.of(cpu_bytes)
        self.quotas = Quotas(self.extents)
        self.scrubber = Scrubber() if scrub else None
        self._holdings = Holdings(self.extents)
        self._taking = Taking(self._holdings, self.quotas)
        self._rest = Rest(self.fill)
        self._joined = 0
        self._tick = 0
        self._barren: dict[int, int] = {}  # space -> releases when it found nothing to claim
        self._move: Move | None = None

    @property
    def cpu_bytes(self) -> int:
        """The budget."""
        return self.extents.cpu_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes of the extents that nobody owns."""
        return self._holdings.free_bytes

    def held_bytes(self, space: Space) -> int:
        """Bytes of the extents that a space owns."""
        return self._holdings.held_bytes(space)

    def set_quotas(self, quotas: Mapping[str, Quota]) -> None:
        """These hold, by model; who is above a cap shrinks now, as far as nothing is in use."""
        self.quotas.set(quotas, self._holdings.spaces)
        self._barren.clear()
        self._taking.quotas_changed()
        self.trim()

    def trim(self) -> None:
        """Bring every model down to its cap: the columns used least recently go, if they may."""
        for group in self.quotas:
            if self.room_for(group) >= 0:
                continue
            columns = [
                (column not in space.empty, space.used_at(column), space.number, column, space)
                for space in group.spaces
                for busy in [busy_columns(space)]
                for column in space.claimed
                if column not in busy
            ]
            for *_, column, space in sorted(columns, key=lambda entry: entry[:4]):
                if self.room_for(group) >= 0:
                    break
                self._empty_out(space, column)

    def room_for(self, group: Group) -> int:
        """Extents up to the cap, once the columns that are shut have gone."""
        return group.room + self._holdings.losses(self._holdings.shut)[group.model]

    def is_capped(self, space: Space) -> bool:
        """Nothing but the model's cap keeps the space from having another column."""
        return self._taking.is_capped(space)

    def join(self, geometry: Geometry, tenant: Tenant, model: str = "") -> Space:
        """A new space, which owns nothing yet; `model` says whose quota counts, if any."""
        space = Space(geometry, tenant, self._joined, self.fill, model, self.scrubber)
        self._joined += 1
        self._holdings.spaces.append(space)
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
        self._holdings.spaces.remove(space)
        self.quotas.remove(space)
        self._barren.pop(space.number, None)
        self._taking.forget(space)

    def tick(self, uses: int, now: int) -> int:
        """The last of `uses` numbers greater than all before, to mark uses with.

        They are the time, `now` in microseconds, as far as that grows fast enough.
        """
        self._tick = max(self._tick + uses, now)
        return self._tick

    def fair_extents(self, space: Space) -> float:
        """How many extents a space may take from others for."""
        return self.quotas.fair(self._holdings.spaces)[space.number]

    def restore(
        self, space: Space, slots: npt.NDArray[np.int64], stamps: npt.NDArray[np.uint64]
    ) -> None:
        """Claim what holds these chunks of the daemon before, each last used at its stamp.

        Raises:
            IntegrityError: another namespace claims the same bytes.
        """
        for column in np.unique(slots // space.geometry.column_slots).tolist():
            if not self._holdings.is_free_for(space, column):
                raise IntegrityError(f"column {column} of {space!r} has two owners")
            self._holdings.claim(space, column)
        space.occupy(slots, stamps)
        self._tick = max(self._tick, int(stamps.max(initial=0)))

    # ------------------------------------------------------------------ acquiring

    def acquire_within(self, space: Space, slots: int, usable: int) -> None:
        """Claim nobody's columns with all bytes inside `usable` until `slots` are free there."""
        short = slots - space.free_within(usable)
        for column in search_order(space):
            if short <= 0:
                return
            if space.needs[column] <= usable and self._is_claimable(space, column):
                self._holdings.claim(space, column)
                short -= len(space.geometry.column_range(column))

    def acquire(self, space: Space, slots: int) -> None:
        """Claim columns until `slots` are free in `space`, or no more may be had.

        Chunks of other namespaces may be evicted for it, never those of `space`.
        """
        while space.free_slots < slots and not space.is_whole:
            column = self._claimable(space)
            if column is None:
                take = self._taking.best(space) if self._move is None else None
                if take is None or not self._take(space, take):
                    return
                column = take.column
            self._holdings.claim(space, column)

    def _claimable(self, space: Space) -> int | None:
        if self._barren.get(space.number) == self._holdings.releases:
            return None
        for column in search_order(space):
            if self._is_claimable(space, column):
                return column
        self._barren[space.number] = self._holdings.releases
        return None

    def _is_claimable(self, space: Space, column: int) -> bool:
        if self._move is not None and self._move.keeps_from(space, column):
            return False
        return self._holdings.is_free_for(space, column) and self._taking.fits_cap(space, column)

    def _take(self, space: Space, take: Take) -> bool:
        """Make room for a column; False where it comes later, when it is clean."""
        for other, theirs in take.others:
            self._empty_out(other, theirs)
        waits = tuple((other, theirs) for other, theirs in take.others if theirs in other.shut)
        if waits:
            extents = frozenset(space.column_extents[take.column])
            self._move = Move(space, take.column, extents, waits)
        return not waits

    def _empty_out(self, space: Space, column: int) -> None:
        """Evict what is in a column and let it go, at once or when it is clean."""
        used = space.used_slots(column)
        if used:
            space.tenant.yield_slots(used)
        if column in space.empty:
            self._holdings.release(space, column)
        else:
            space.shut_column(column)

    def give_back(self, space: Space) -> None:
        """Release every column of a space that holds no chunk, or have it go when it is clean."""
        for column in space.claimed:
            if column in space.empty:
                self._holdings.release(space, column)
            elif column not in space.shut and space.is_left(column):
                space.shut_column(column)

    # ---------------------------------------------------------------- scrubbing

    def scrub_rest(self) -> None:
        """What lies in the pool beside the chunks in use may be anybody's: it must go.

        Until then nobody gets new room but in what is clean already, in the order of filling.
        """
        self._rest.begin()

    @property
    def clean_bytes(self) -> int | None:
        """How much of the pool may be given out, in the order of filling; None: all of it."""
        return self._rest.clean_bytes

    @property
    def left_bytes(self) -> int:
        """What is to be wiped still, at most: of the rest it is known when its turn comes."""
        known = self.scrubber.left_bytes if self.scrubber is not None else 0
        return known + self._rest.left_bytes

    def next_piece(self, device: str) -> Piece | None:
        """What the lane of `device` is to wipe now, if anything."""
        if self.scrubber is None:
            return None
        piece = self.scrubber.next(device)
        while piece is None and self._rest.advance(self.scrubber, self._holdings.spaces):
            piece = self.scrubber.next(device)
        return piece

    def wiped(self, number: int) -> None:
        """A lane has wiped the piece of this number."""
        piece = self.scrubber.wiped(number) if self.scrubber is not None else None
        if piece is None:
            return
        space = piece.space
        if space is None:
            self._rest.wiped()
            return
        space.cleaned(piece.slots)
        for column in space.shut & space.empty:
            self._holdings.release(space, column)
        if space.leaving and not space.claimed:
            self._forget(space)
        move = self._move
        if move is not None and move.is_over:
            self._move = None
            if self._is_claimable(move.taker, move.column):
                self._holdings.claim(move.taker, move.column)

    def check_integrity(self) -> None:
        """Extents, quotas and what is to be scrubbed agree with the spaces.

        Raises:
            IntegrityError: otherwise.
        """
        self._holdings.check_integrity()
        self.quotas.check_integrity(self._holdings.spaces)
        self._check_soil()

    def _check_soil(self) -> None:
        """Every soiled slot waits for a lane once, and only what is shut goes by itself."""
        if self.scrubber is None:
            return
        self.scrubber.check_integrity()
        self._rest.check_integrity(self.scrubber)
        spaces = self._holdings.spaces
        soil: Counter[tuple[int, int]] = Counter()
        for space, slots in self.scrubber:
            soil.update((space.number, slot) for slot in slots)
        known = {(space.number, slot) for space in spaces for slot in space.soiled_slots}
        if soil.keys() != known or soil.total() != len(known):
            raise IntegrityError(f"soiled slots {sorted(known)} wait as {sorted(soil.items())}")
        if any(space.leaving and set(space.claimed) != space.shut for space in spaces):
            raise IntegrityError("a space that leaves has columns that do not")
        if self._move is not None:
            self._move.check_integrity(self._holdings)

    def __repr__(self) -> str:
        return f"<Pool {self.cpu_bytes} bytes, {self._holdings!r}>"
