"""What every backend of a tier does, as tests that its own test module inherits.

::

    class TestDisk(Conformance):
        keeps = True

        @pytest.fixture
        def make_tier(self, tmp_path, area): …
"""

import threading
import time
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeAlias

import pytest

from kvd.outcomes import Outcome
from kvd.tier.contract import Chunk, Space, TierBackend
from tests.tier.areas import Area, begun, coverage_of, is_whole, keys_of, space_of
from tests.waiting import PATIENCE

MakeTier: TypeAlias = Callable[[int], TierBackend]
"""Opens the backend with a budget of so many bytes, on the same medium each time; the fixture
closes at its end what the test did not."""
SHARES = [
    (4096,),
    (65536, 4096),
    (1000, 37),
    (1,),
    (100_003, 5, 4096),
    (2**20, 2**20),
    (16384,) * 8,
    (5000,) * 3,
]
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
        roomy: a budget in which 64 MiB fit.
        small: the smallest budget that makes sense, in bytes.
        slack: bytes by which `capacity` may be above the budget.
    """

    keeps: ClassVar[bool] = False
    shared: ClassVar[bool] = False
    evicts: ClassVar[bool] = True
    roomy: ClassVar[int] = 256 * 2**20
    small: ClassVar[int] = 4 * 2**20
    slack: ClassVar[int] = 0

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
        found = tier.contains(space, keys, soon())
        assert len(found) == len(keys)
        return {key for key, there in zip(keys, found, strict=True) if there}

    def scanned(self, tier: TierBackend, space: Space) -> dict[bytes, tuple[int, int, int]]:
        """What it lists, none of it twice."""
        rows = [row for piece in tier.scan(space) for row in piece]
        listed = dict(rows)
        assert len(listed) == len(rows)
        return listed

    # ------------------------------------------------------------- round trips

    @pytest.mark.parametrize("shares", SHARES, ids=str)
    def test_what_is_put_is_got_byte_for_byte(
        self, tier: TierBackend, area: Area, shares: tuple[int, ...]
    ) -> None:
        """Chunks of any share sizes come back with every byte and their heads."""
        space = self.begin(tier, *shares)
        keys = keys_of("round", 12)
        put_all(tier, area.chunks(space, keys))
        back = area.empties(space, keys)
        assert tier.get(back, soon()) == [OK] * len(keys)
        assert all(map(is_whole, back))

    @pytest.mark.parametrize("shares", [(4096, 4096), (1000, 37)], ids=str)
    def test_shares_may_begin_anywhere(
        self, make_tier: MakeTier, area: Area, shares: tuple[int, ...]
    ) -> None:
        """Shares that begin at odd places come back with every byte."""
        tier = make_tier(self.roomy)
        area.align = 1
        space = self.begin(tier, *shares)
        keys = keys_of("odd", 9)
        put_all(tier, area.chunks(space, keys))
        back = area.empties(space, keys)
        assert tier.get(back, soon()) == [OK] * len(keys)
        assert all(map(is_whole, back))

    def test_heads_of_any_length(self, tier: TierBackend, area: Area) -> None:
        """A head comes back as it was, be it empty or as long as the space allows."""
        space = self.begin(tier, 4096)
        heads = [bytes(n % 251 for n in range(size)) for size in (0, 1, 7, 64, space.head_bytes)]
        keys = keys_of("head", len(heads))
        put_all(
            tier,
            [area.chunk(space, key, head=head) for key, head in zip(keys, heads, strict=True)],
        )
        back = area.empties(space, keys)
        assert tier.get(back, soon()) == [OK] * len(keys)
        assert [chunk.head for chunk in back] == heads

    def test_keys_of_any_length(self, tier: TierBackend, area: Area) -> None:
        """Keys of 1 to 48 arbitrary bytes are different keys, though one begins another."""
        space = self.begin(tier, 512)
        keys = [b"\0" * size for size in (1, 2, 47, 48)] + [b"\xff", b"a/b", b"../x", b"\n" * 48]
        put_all(tier, area.chunks(space, keys))
        back = area.empties(space, keys)
        assert tier.get(back, soon()) == [OK] * len(keys)
        assert all(map(is_whole, back))

    def test_nothing_to_do(self, tier: TierBackend) -> None:
        """Empty batches are none."""
        space = self.begin(tier, 4096)
        assert tier.put([], soon()) == []
        assert tier.get([], soon()) == []
        assert tier.contains(space, [], soon()) == []
        tier.remove(space, [])

    def test_absent(self, tier: TierBackend, area: Area) -> None:
        """What was never put is ABSENT, also between chunks that are there."""
        space = self.begin(tier, 4096)
        keys = keys_of("some", 6)
        put_all(tier, area.chunks(space, keys[::2]))
        back = area.empties(space, keys)
        assert tier.get(back, soon()) == [OK, ABSENT] * 3
        assert all(map(is_whole, back[::2]))
        assert self.held(tier, space, keys) == set(keys[::2])

    def test_put_again(self, tier: TierBackend, area: Area) -> None:
        """A key that is put again holds the old chunk or the new one, never of both."""
        space = self.begin(tier, 5000, 300)
        keys = keys_of("again", 8)
        put_all(tier, area.chunks(space, keys))
        put_all(tier, area.chunks(space, keys, salt=1))
        back = area.empties(space, keys)
        assert tier.get(back, soon()) == [OK] * len(keys)
        assert all(is_whole(chunk) or is_whole(chunk, salt=1) for chunk in back)
        if not self.shared:
            assert self.scanned(tier, space).keys() == set(keys)
            assert tier.capacity().chunks == len(keys)

    def test_remove(self, tier: TierBackend, area: Area) -> None:
        """What is removed is gone, the rest stays, and what is not there is no error."""
        space = self.begin(tier, 4096)
        keys = keys_of("remove", 10)
        put_all(tier, area.chunks(space, keys))
        tier.remove(space, [*keys[:4], b"never there"])
        tier.remove(space, keys[:2])
        back = area.empties(space, keys)
        assert tier.get(back, soon()) == [ABSENT] * 4 + [OK] * 6
        assert self.held(tier, space, keys) == set(keys[4:])
        put_all(tier, area.chunks(space, keys[:4], salt=1))
        again = area.empties(space, keys[:4])
        assert tier.get(again, soon()) == [OK] * 4
        assert all(is_whole(chunk, salt=1) for chunk in again)

    def test_spaces_share_nothing(self, tier: TierBackend, area: Area) -> None:
        """The same keys in two namespaces are different chunks."""
        one = self.begin(tier, 4096, name=b"1" * 16)
        two = self.begin(tier, 1000, 24, name=b"2" * 16)
        keys = keys_of("both", 5)
        put_all(tier, area.chunks(one, keys))
        put_all(tier, area.chunks(two, keys[:2], salt=3))
        assert self.held(tier, two, keys) == set(keys[:2])
        tier.remove(one, keys[:1])
        back = area.empties(two, keys[:2])
        assert tier.get(back, soon()) == [OK] * 2
        assert all(is_whole(chunk, salt=3) for chunk in back)
        assert self.held(tier, one, keys) == set(keys[1:])

    # ------------------------------------------------------------- what is there

    def test_scan_equals_what_was_put(self, tier: TierBackend, area: Area) -> None:
        """A scan lists every chunk that is there with its coverage; nothing where shared."""
        space = self.begin(tier, 600)
        other = self.begin(tier, 600, name=b"o" * 16)
        keys = keys_of("scan", 300)
        for at in range(0, len(keys), 50):
            put_all(tier, area.chunks(space, keys[at : at + 50]))
        put_all(tier, area.chunks(other, keys_of("other", 3)))
        tier.remove(space, keys[:100])
        there = {} if self.shared else {key: coverage_of(key) for key in keys[100:]}
        assert self.scanned(tier, space) == there

    def test_capacity_adds_up(self, tier: TierBackend, area: Area) -> None:
        """Capacity counts chunks and at least their bytes, and counts those that go."""
        if self.shared:
            pytest.skip("others put and remove there, too")
        space = self.begin(tier, 8192)
        keys = keys_of("capacity", 40)
        before = tier.capacity()
        assert before.chunks == 0
        assert before.used <= before.total
        put_all(tier, area.chunks(space, keys))
        full = tier.capacity()
        assert full.chunks == 40
        assert before.used + 40 * 8192 <= full.used <= full.total
        tier.remove(space, keys[:30])
        assert tier.capacity().chunks == 10
        put_all(tier, area.chunks(space, keys[:30]))
        assert tier.capacity().chunks == 40
        assert tier.capacity().used <= full.used

    def test_its_budget_holds(self, make_tier: MakeTier, area: Area) -> None:
        """Three times the budget is put: it stays below, and says what it dropped or refused."""
        tier = make_tier(self.small)
        space = self.begin(tier, 40_000)
        keys = keys_of("budget", 3 * self.small // 40_000)
        put: set[bytes] = set()
        gone: list[bytes] = []
        refused = 0
        for at in range(0, len(keys), 8):
            batch = keys[at : at + 8]
            outcomes = tier.put(area.chunks(space, batch), soon())
            assert set(outcomes) <= {OK, Outcome.FULL}
            put |= {key for key, out in zip(batch, outcomes, strict=True) if out is OK}
            refused += outcomes.count(Outcome.FULL)
            for name, dropped in tier.take_dropped():
                assert name == space.id
                gone += dropped
            assert tier.capacity().used <= self.small + self.slack
        assert put
        assert refused == 0 if self.evicts else refused > 0 and not gone
        there = self.held(tier, space, keys)
        assert there <= put
        if not self.shared:
            assert there == put - set(gone)
            assert self.scanned(tier, space).keys() == there
            assert tier.take_dropped() == []
        back = area.empties(space, sorted(there))
        for at in range(0, len(back), 8):
            assert tier.get(back[at : at + 8], soon()) == [OK] * len(back[at : at + 8])
            assert all(map(is_whole, back[at : at + 8]))

    # ------------------------------------------------------------- resets

    def test_a_dropped_space_is_gone(self, tier: TierBackend, area: Area) -> None:
        """After a reset nothing of before is found under the new name, and its room is free."""
        old = self.begin(tier, 4096, salt=b"1")
        keys = keys_of("reset", 20)
        put_all(tier, area.chunks(old, keys))
        tier.drop_space(old)
        new = self.begin(tier, 4096, salt=b"2")
        assert tier.get(area.empties(new, keys), soon()) == [ABSENT] * 20
        assert self.held(tier, new, keys) == set()
        assert self.scanned(tier, new) == {}
        if not self.shared:
            assert tier.capacity().chunks == 0
        put_all(tier, area.chunks(new, keys[:3], salt=1))
        back = area.empties(new, keys[:3])
        assert tier.get(back, soon()) == [OK] * 3
        assert all(is_whole(chunk, salt=1) for chunk in back)

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
        back = area.empties(new, keys)
        assert tier.get(back, soon()) == [OK] * 4
        assert all(is_whole(chunk, salt=1) for chunk in back)

    def test_begin_again(self, tier: TierBackend, area: Area) -> None:
        """A space that begins again has what it had."""
        space = self.begin(tier, 4096)
        keys = keys_of("again", 3)
        put_all(tier, area.chunks(space, keys))
        assert self.held(tier, self.begin(tier, 4096), keys) == set(keys)

    # ------------------------------------------------------------- life

    def test_close_and_open_again(self, make_tier: MakeTier, area: Area) -> None:
        """What was acknowledged is there afterwards, with its salt, where the backend keeps."""
        namespace, salt = b"n" * 16, b"8 bytes."
        tier = make_tier(self.roomy)
        tier.note_salt(namespace, b"8 before")
        tier.note_salt(namespace, salt)
        space = self.begin(tier, 3000, 100, salt=salt)
        keys = keys_of("reopen", 30)
        put_all(tier, area.chunks(space, keys))
        tier.remove(space, keys[:10])
        tier.close()
        tier = make_tier(self.roomy)
        again = self.begin(tier, 3000, 100, salt=salt)
        back = area.empties(again, keys)
        found = tier.get(back, soon())
        assert all(is_whole(c) for c, out in zip(back, found, strict=True) if out is OK)
        if self.keeps:
            assert tier.salt(namespace) == salt
            assert found == [ABSENT] * 10 + [OK] * 20
            assert self.scanned(tier, again) == {key: coverage_of(key) for key in keys[10:]}
            assert tier.capacity().chunks == 20

    def test_a_dropped_space_after_opening_again(self, make_tier: MakeTier, area: Area) -> None:
        """What was dropped does not come back."""
        tier = make_tier(self.roomy)
        space = self.begin(tier, 4096)
        keys = keys_of("forget", 5)
        put_all(tier, area.chunks(space, keys))
        tier.drop_space(space)
        tier.close()
        tier = make_tier(self.roomy)
        again = self.begin(tier, 4096, salt=b"2")
        assert self.held(tier, again, keys) == set()
        if not self.shared:
            assert tier.capacity().chunks == 0

    def test_a_deadline_that_has_passed(self, tier: TierBackend, area: Area) -> None:
        """A batch that is late is LATE or done, and nothing of it is wrong."""
        space = self.begin(tier, 4096)
        keys = keys_of("deadline", 4)
        past = time.monotonic() - 1
        put = tier.put(area.chunks(space, keys), past)
        assert set(put) <= {OK, LATE}
        back = area.empties(space, keys)
        assert set(tier.get(back, past)) <= {OK, LATE, ABSENT}
        assert len(tier.contains(space, keys, past)) == 4
        back = area.empties(space, keys)
        for chunk, was, now in zip(back, put, tier.get(back, soon()), strict=True):
            assert now is OK or (was is LATE and now is ABSENT)
            assert now is ABSENT or is_whole(chunk)

    def test_many_threads(self, make_tier: MakeTier, area: Area) -> None:
        """Batches from several threads at a time neither mix nor lose anything."""
        tier = make_tier(self.roomy)
        space = self.begin(tier, 7000, 500)
        problems: list[str] = []
        areas = [Area(2**20) for _ in range(4)] if not self.shared else [area] * 4
        names = [keys_of(f"thread-{number}", 24) for number in range(4)]

        def work(number: int) -> None:
            own, keys = areas[number], names[number]
            try:
                for turn in range(4):
                    salt = turn & 1
                    for at in range(0, 24, 6):
                        batch = keys[at : at + 6]
                        tier.remove(space, batch)
                        put_all(tier, own.chunks(space, batch, salt=salt))
                        back = own.empties(space, batch)
                        if tier.get(back, soon()) != [OK] * 6:
                            problems.append(f"thread {number}, turn {turn}: not all came back")
                        if not all(is_whole(chunk, salt=salt) for chunk in back):
                            problems.append(f"thread {number}, turn {turn}: wrong bytes")
            except Exception as error:  # noqa: BLE001  # shown by the assertion
                problems.append(f"thread {number}: {error!r}")

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        listed = [self.scanned(tier, space) for _ in range(3)]
        for thread in threads:
            thread.join(PATIENCE)
        assert not [thread for thread in threads if thread.is_alive()]
        assert not problems
        every = {key for keys in names for key in keys}
        assert all(one.keys() <= every for one in listed)
        assert self.held(tier, space, sorted(every)) == every
        if not self.shared:
            assert self.scanned(tier, space).keys() == every
            assert tier.capacity().chunks == len(every)

    def test_what_it_says_of_itself(self, tier: TierBackend) -> None:
        """Medium, threads, batch size and a description are given."""
        assert tier.medium in {"disk", "remote", "memory"}
        assert tier.shared == self.shared
        assert tier.threads >= 1
        assert tier.batch_bytes >= 4096
        assert tier.described
