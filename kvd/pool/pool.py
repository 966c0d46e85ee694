"""One byte budget, shared by namespaces whose chunks differ in size.

Every extent of the pool belongs to one namespace or to none, and a namespace uses
only columns of which it owns every extent (see `kvd.pool.geometry`). Alone, it
owns them all and reaches ``cpu_bytes // bytes_per_chunk`` chunks.

Whoever needs room gets free extents first (`kvd.pool.holdings` knows whose each is),
then what may be taken from others (`kvd.pool.taking`). Beyond that it must evict its
own chunks.

Quotas (`kvd.pool.shares`) bound all of it: nobody claims beyond a cap, nobody
takes what leaves another model below its floor, and who is below its own may take
from anybody else.

While the pool's memory is still coming into being (see `kvd.pool.filling`) only columns
whose bytes are all there are given away, and nothing is taken or evicted for them.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from kvd.config.quota import Quota
from kvd.errors import IntegrityError
from kvd.pool.filling import FillOrder
from kvd.pool.geometry import Extents, Geometry
from kvd.pool.holdings import Holdings, search_order
from kvd.pool.shares import Quotas
from kvd.pool.space import Space, Tenant
from kvd.pool.taking import Taking, busy_columns


class Pool:
    """Who owns which extent of a pool of `cpu_bytes`, whose memory is filled in order `fill`."""

    def __init__(self, cpu_bytes: int, fill: FillOrder | None = None) -> None:
        self.extents = Extents(cpu_bytes)
        self.fill = fill or FillOrder.of(cpu_bytes)
        self.quotas = Quotas(self.extents)
        self._holdings = Holdings(self.extents)
        self._taking = Taking(self._holdings, self.quotas)
        self._joined = 0
        self._tick = 0
        self._barren: dict[int, int] = {}  # space -> releases when it found nothing to claim

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
            if group.room >= 0:
                continue
            columns = [
                (column not in space.empty, space.used_at(column), space.number, column, space)
                for space in group.spaces
                for busy in [busy_columns(space)]
                for column in space.claimed
                if column not in busy
            ]
            for *_, column, space in sorted(columns, key=lambda entry: entry[:4]):
                if group.room >= 0:
                    break
                self._empty_out(space, column)

    def is_capped(self, space: Space) -> bool:
        """Nothing but the model's cap keeps the space from having another column."""
        return self._taking.is_capped(space)

    def join(self, geometry: Geometry, tenant: Tenant, model: str = "") -> Space:
        """A new space, which owns nothing yet; `model` says whose quota counts, if any."""
        space = Space(geometry, tenant, self._joined, self.fill, model)
        self._joined += 1
        self._holdings.spaces.append(space)
        self.quotas.add(space)
        return space

    def leave(self, space: Space) -> None:
        """A space ends; none of its slots may be in use.

        Raises:
            IntegrityError: some are.
        """
        self.give_back(space)
        if space.claimed:
            raise IntegrityError(f"slots of {space!r} are in use")
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
                take = self._taking.best(space)
                if take is None:
                    return
                for other, theirs in take.others:
                    self._empty_out(other, theirs)
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
        return self._holdings.is_free_for(space, column) and self._taking.fits_cap(space, column)

    def _empty_out(self, space: Space, column: int) -> None:
        """Evict what is in a column and let it go."""
        used = space.used_slots(column)
        if used:
            space.tenant.yield_slots(used)
        self._holdings.release(space, column)

    def give_back(self, space: Space) -> None:
        """Release every column of a space that holds no chunk."""
        for column in list(space.empty):
            self._holdings.release(space, column)

    def check_integrity(self) -> None:
        """Extents and quotas agree with the spaces.

        Raises:
            IntegrityError: otherwise.
        """
        self._holdings.check_integrity()
        self.quotas.check_integrity(self._holdings.spaces)

    def __repr__(self) -> str:
        return f"<Pool {self.cpu_bytes} bytes, {self._holdings!r}>"
