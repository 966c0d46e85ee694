"""What every backend of a tier does, as tests that its own test module inherits.

::

    class TestDisk(Conformance):
        keeps = True

        @pytest.fixture
        def make_tier(self, tmp_path, area): …
"""

import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import ClassVar, TypeAlias

import pytest

from kvd.outcomes import Outcome
from kvd.tier.batches import checksum_of
from kvd.tier.contract import Chunk, Space, TierBackend
from tests.tier.areas import Area, begun, coverage_of, is_whole, keys_of, space_of
from tests.waiting import PATIENCE

MakeTier: TypeAlias = Callable[[int], TierBackend]
"""Opens the backend with a budget of so many bytes, on the same medium each time; the fixture
closes at its end what the test did not."""
Salts: TypeAlias = dict[bytes, set[int]]
"""By key of a stored chunk: the salts of those puts that it may be of."""
Model: TypeAlias = dict[Space, Salts]
MIB = 2**20
PAGES, ODD = 4096, 1  # where shares begin
SHARES = [
    ((4096,), PAGES),
    ((65536, 4096), PAGES),
    ((1000, 37), PAGES),
    ((1000, 24), PAGES),  # together they fill blocks of the disk
    ((1,), PAGES),
    ((100_003, 5, 4096), PAGES),
    ((MIB, MIB), PAGES),
    ((16384,) * 8, PAGES),
    ((5000,) * 3, PAGES),
    ((4096, 4096), ODD),
    ((1000, 37), ODD),
]
WEIGHTS = {"put": 50, "get": 30, "remove": 10, "reset": 3, "reopen": 3}
OK, ABSENT, LATE = Outcome.OK, Outcome.ABSENT, Outcome.LATE


def soon() -> float:
    """A deadline that nothing here reaches."""
    return time.monotonic() + 120


def put_all(tier: TierBackend, chunks: Sequence[Chunk]) -> None:
    """Put, every one of them with success."""
    assert tier.put(chunks, soon()) == [OK] * len(chunks)


class Conformance:
    """Tests that a backend inherits; `make_tier` is its own.

    Attributes:
        keeps: what was acknowledged is there when the backend is opened again.
        shared: as `TierBackend.shared` says.
        evicts: it makes room by itself; otherwise a full one answers FULL.
    """

    keeps: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    evicts: ClassVar[bool] = True
    roomy: ClassVar[int] = 256 * MIB
    small: ClassVar[int] = 2 * MIB

    @pytest.fixture
    def area(self) -> Area:
        """The pool; shares begin at pages."""
        return Area()

    @pytest.fixture
    def make_tier(self, area: Area) -> MakeTier:
        """The backend's own."""
        raise NotImplementedError

    @pytest.fixture
    def tier(self, make_tier: MakeTier) -> TierBackend:
        """A backend with room."""
        return make_tier(self.roomy)

    def begin(
        self, tier: TierBackend, *shares: int, name: bytes = b"n" * 16, salt: bytes = b""
    ) -> Space:
        """A namespace in use."""
        return begun(tier, space_of(*shares, name=name, salt=salt))

    def held(self, tier: TierBackend, space: Space, keys: Sequence[bytes]) -> set[bytes]:
        """Which of these it says that it has."""
        answers = tier.contains(space, keys, soon())
        return {key for key, is_held in zip(keys, answers, strict=True) if is_held}

    def scanned(self, tier: TierBackend, space: Space) -> dict[bytes, tuple[int, int, int]]:
        """What it lists, none of it twice."""
        rows = [row for piece in tier.scan(space) for row in piece]
        listed = dict(rows)
        assert len(listed) == len(rows)
        return listed

    def all_come_back(
        self, tier: TierBackend, area: Area, space: Space, keys: Sequence[bytes], salt: int = 0
    ) -> None:
        """Each of these chunks is got whole."""
        chunks = area.empties(space, keys)
        assert tier.get(chunks, soon()) == [OK] * len(keys)
        assert all(is_whole(chunk, salt=salt) for chunk in chunks)

    @pytest.mark.parametrize(("shares", "align"), SHARES, ids=str)
    def test_what_is_put_is_got_byte_for_byte(
        self, tier: TierBackend, area: Area, shares: tuple[int, ...], align: int
    ) -> None:
        """Chunks of any share sizes, at odd places too, come back with every byte and head."""
        area.align = align
        space = self.begin(tier, *shares)
        keys = keys_of("round", 12)
        put_all(tier, area.chunks(space, keys))
        self.all_come_back(tier, area, space, keys)

    def test_heads_and_keys_of_any_length(self, tier: TierBackend, area: Area) -> None:
        """Keys are 1 to 48 arbitrary bytes; a head is empty or as long as the space allows."""
        space = self.begin(tier, 512)
        heads = [bytes(n % 251 for n in range(size)) for size in (0, 1, 7, 64, space.head_bytes)]
        keys = [b"\0" * size for size in (1, 2, 47, 48)] + [b"\xff", b"a/b", b"../x", b"\n" * 48]
        chunks = [area.chunk(space, k, head=heads[i % 5]) for i, k in enumerate(keys)]
        put_all(tier, chunks)
        returned = area.empties(space, keys)
        assert tier.get(returned, soon()) == [OK] * len(keys)
        assert [chunk.head for chunk in returned] == [chunk.head for chunk in chunks]
        assert [checksum_of(c.shares) for c in returned] == [chunk.checksum for chunk in chunks]

    @pytest.mark.parametrize("seed", range(2))
    def test_any_order_of_calls(self, make_tier: MakeTier, area: Area, seed: int) -> None:
        """Whatever is called in any order, over restarts and resets, it agrees with a model.

        A chunk that is put again may stay as it was; what the backend drops, it says.
        """
        chance = random.Random(seed)
        tier = make_tier(self.small)
        shapes = (20_000,), (4096, 4096), (60_000, 5)
        spaces = [self.begin(tier, *s, name=bytes((i,)) * 16) for i, s in enumerate(shapes)]
        model: Model = {space: {} for space in spaces}
        keys = keys_of("k", 60)
        num_dropped = num_refused = 0
        kinds = chance.choices(
            ["put", "get", "remove", "reset", "reopen"], [50, 30, 10, 3, 3], k=250
        )
        for step, kind in enumerate(kinds):
            index = chance.randrange(len(spaces))
            space, some = spaces[index], chance.sample(keys, chance.randrange(7))
            if kind == "put":
                stored = self.put_some(tier, area.chunks(space, some, salt=step % 2))
                num_refused += len(some) - len(stored)
                num_dropped += self.note_put(tier, model, space, stored, salt=step % 2)
            elif kind == "get":
                self.get_some(tier, area.empties(space, some), model[space])
            elif kind == "remove":
                tier.remove(space, [*some, b"never there"])
                for key in some:
                    model[space].pop(key, None)
            elif kind == "reset":
                tier.drop_space(space)
                del model[space]
                name = bytes((index,)) * 16
                space = self.begin(tier, *shapes[index], name=name, salt=b"%d" % step)
                spaces[index] = space
                model[space] = {}
            elif self.keeps:
                tier.close()
                tier = make_tier(self.small)
                for each in spaces:
                    tier.open_space(each)
            assert self.held(tier, space, some) == model[space].keys() & set(some)
            self.agrees(tier, model)
        for space, salts in model.items():
            listed = {} if self.shared else {key: coverage_of(key) for key in salts}
            assert self.scanned(tier, space) == listed
        if not self.shared:
            assert (num_dropped > 0, num_refused > 0) == (self.evicts, not self.evicts)

    def put_some(self, tier: TierBackend, chunks: list[Chunk]) -> list[bytes]:
        """Put these; the keys of those that were not refused."""
        outcomes = tier.put(chunks, soon())
        assert set(outcomes) <= {OK, Outcome.FULL}
        return [chunk.key for chunk, out in zip(chunks, outcomes, strict=True) if out is OK]

    def note_put(
        self, tier: TierBackend, model: Model, space: Space, stored: list[bytes], salt: int
    ) -> int:
        """Take a put into the model; how many chunks the backend has dropped for it.

        Chunks of the put itself may be among these: dropped before they were put, or afterwards.
        """
        spaces = {space.id: space for space in model}
        dropped = [(spaces[id_], key) for id_, keys in tier.take_dropped() for key in keys]
        for place, key in dropped:
            assert key in model[place] or (place == space and key in stored)
            model[place].pop(key, None)
        stored_now = self.held(tier, space, stored)
        assert {(space, key) for key in stored if key not in stored_now} <= set(dropped)
        for key in stored_now:
            model[space].setdefault(key, set()).add(salt)
        return len(dropped)

    def get_some(
        self, tier: TierBackend, chunks: list[Chunk], salts: dict[bytes, set[int]]
    ) -> None:
        """Get these, which have the bytes of one of the puts that may have counted."""
        for chunk, outcome in zip(chunks, tier.get(chunks, soon()), strict=True):
            assert outcome is (OK if chunk.key in salts else ABSENT)
            if outcome is OK:
                right = {salt for salt in salts[chunk.key] if is_whole(chunk, salt=salt)}
                assert right
                salts[chunk.key] = right

    def agrees(self, tier: TierBackend, model: Model) -> None:
        """Capacity says what the model has; nothing is under way."""
        if not self.shared:
            capacity = tier.capacity()
            assert capacity.chunks == sum(map(len, model.values()))
            nbytes = sum(len(salts) * space.chunk_bytes for space, salts in model.items())
            assert nbytes <= capacity.used <= capacity.total <= self.small

    def test_a_late_put_of_a_dropped_space(self, tier: TierBackend, area: Area) -> None:
        """A put that still names the space before is never found in the new one."""
        old = self.begin(tier, 4096, salt=b"1")
        tier.drop_space(old)
        new = self.begin(tier, 4096, salt=b"2")
        keys = keys_of("late", 4)
        tier.put(area.chunks(old, keys), soon())
        assert self.held(tier, new, keys) == set()
        assert tier.get(area.empties(new, keys), soon()) == [ABSENT] * 4
        put_all(tier, area.chunks(new, keys, salt=1))
        tier.remove(old, keys)
        self.all_come_back(tier, area, new, keys, salt=1)

    def test_close_and_open_again(self, make_tier: MakeTier, area: Area) -> None:
        """What was acknowledged is there afterwards, with its salt, where the backend keeps.

        What was dropped does not come back.
        """
        namespace, salt = b"n" * 16, b"8 bytes."
        tier = make_tier(self.roomy)
        tier.note_salt(namespace, b"8 before")
        tier.note_salt(namespace, salt)
        space = self.begin(tier, 3000, 100, salt=salt)
        dropped = self.begin(tier, 4096, name=b"d" * 16)
        keys = keys_of("reopen", 30)
        put_all(tier, area.chunks(space, keys))
        put_all(tier, area.chunks(dropped, keys[:5]))
        tier.remove(space, keys[:10])
        tier.drop_space(dropped)
        tier.close()
        tier = make_tier(self.roomy)
        tier.open_space(space)
        renewed = self.begin(tier, 4096, name=b"d" * 16, salt=b"2")
        assert self.held(tier, renewed, keys) == set()
        chunks = area.empties(space, keys)
        outcomes = tier.get(chunks, soon())
        assert all(is_whole(c) for c, out in zip(chunks, outcomes, strict=True) if out is OK)
        if self.keeps:
            assert tier.salt(namespace) == salt
            assert outcomes == [ABSENT] * 10 + [OK] * 20
            assert self.scanned(tier, space) == {key: coverage_of(key) for key in keys[10:]}
            assert tier.capacity().chunks == 20
        elif not self.shared:
            assert tier.capacity().chunks == 0

    def test_a_deadline_that_has_passed(self, tier: TierBackend, area: Area) -> None:
        """A batch that is late is LATE or done, and nothing of it is wrong."""
        space = self.begin(tier, 4096)
        keys = keys_of("deadline", 4)
        past = time.monotonic() - 1
        put = tier.put(area.chunks(space, keys), past)
        assert set(put) <= {OK, LATE}
        assert set(tier.get(area.empties(space, keys), past)) <= {OK, LATE, ABSENT}
        assert len(tier.contains(space, keys, past)) == 4
        chunks = area.empties(space, keys)
        for chunk, was, now in zip(chunks, put, tier.get(chunks, soon()), strict=True):
            assert now is OK or (was is LATE and now is ABSENT)
            assert now is ABSENT or is_whole(chunk)

    def test_many_threads(self, make_tier: MakeTier, area: Area) -> None:
        """Batches from several threads at a time neither mix nor lose anything."""
        tier = make_tier(self.roomy)
        space = self.begin(tier, 7000, 500)
        areas = [Area(MIB) for _ in range(4)] if not self.shared else [area] * 4
        names = [keys_of(f"thread-{number}", 24) for number in range(4)]

        def work(number: int) -> None:
            for turn in range(4):
                for at in range(0, 24, 6):
                    batch = names[number][at : at + 6]
                    tier.remove(space, batch)
                    put_all(tier, areas[number].chunks(space, batch, salt=turn % 2))
                    self.all_come_back(tier, areas[number], space, batch, salt=turn % 2)

        with ThreadPoolExecutor(4) as threads:
            working = [threads.submit(work, number) for number in range(4)]
            listed = [self.scanned(tier, space) for _ in range(3)]
            for future in working:
                future.result(PATIENCE)
        every = {key for keys in names for key in keys}
        assert all(one.keys() <= every for one in listed)
        assert self.held(tier, space, sorted(every)) == every
        if not self.shared:
            assert self.scanned(tier, space).keys() == every
            assert tier.capacity().chunks == len(every)
