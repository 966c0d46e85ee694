"""What a daemon finds of the one before: ledgers and resets, whenever a write was cut short."""

import contextlib
import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import rule, run_state_machine_as_test

from kvd.cache.chunks import ChunkTable
from kvd.cache.ledger import Ledger
from kvd.cache.namespaces import LedgerSetup, Namespace, Namespaces
from kvd.cache.recovery import MAX_RESETS, RESET_BYTES, SALT_BYTES, PoolTrailer, ResetTable
from kvd.errors import LedgerDamaged
from kvd.machine.memory import TRAILER_BYTES
from kvd_proto.directory import SlotState
from tests.cache.tables import PAGE, Watched, add, make_namespaces, pin
from tests.cache.test_machine import KEYS, KIB, Lease, TableMachine
from tests.exploring import explored

COPY_EVERY, PUT_BACK_EVERY = 23, 3  # writes; copies are made inside a change, too
CUTS = (8, 60)  # bytes of a record that were written when the kill came


def held(table: ChunkTable) -> dict[bytes, tuple[int, int]]:
    """READY chunks: slot and generation by key."""
    directory = table.directory
    return {
        directory.key(slot): (slot, directory.generation(slot))
        for slot in directory.slots_in(SlotState.READY)
        if directory.find(directory.key(slot)) == slot  # a doomed one is nobody's any more
    }


class Reopening(TableMachine):
    """The same; and after every write to a ledger the daemon might be killed, or is."""

    tiers = ()  # their table is not kept

    def __init__(self) -> None:
        self.buffers: dict[str, bytearray] = {}
        self.trailer = bytearray(TRAILER_BYTES)
        self.older_ledgers: dict[str, bytearray] = {}
        self.older: tuple[dict[str, bytearray], bytearray] | None = None
        self.epoch = self.looks = 0
        self.resets = ResetTable()  # as the file has them
        self.models = []
        super().__init__()

    def begin(self) -> Namespaces:
        """What the ledgers hold."""
        return self.start(self.buffers, self.trailer)

    def start(self, buffers: dict[str, bytearray], memory: bytearray) -> Namespaces:
        """A daemon's namespaces with what these ledgers and this trailer hold."""
        self.epoch += 1

        def make(name: str, size: int) -> bytearray:
            buffers[name] = bytearray(size)
            return buffers[name]

        trailer = PoolTrailer(memory)
        ledger_setup = LedgerSetup(make, "pool", trailer, self.epoch << 32)
        namespaces = make_namespaces(
            64 * KIB, ledger_setup=ledger_setup, resets=self.resets, policy=self.policy
        )
        for buffer in buffers.values():
            ledger = Ledger(buffer, trailer)
            if len(ledger) and not namespaces.is_outdated(ledger):
                namespaces.reopen(ledger)
        return namespaces

    def open(self, number: int) -> Namespace:
        """A namespace whose ledger is watched."""
        namespace = super().open(number)
        ledger: Any = namespace.directory.ledger
        ledger._words = Watched(ledger._words, self.look, CUTS)
        ledger._records = Watched(ledger._records, self.look, CUTS)
        ledger._number = Watched(ledger._number, self.look, CUTS)
        if not isinstance(ledger._trailer._words, Watched):
            ledger._trailer._words = Watched(ledger._trailer._words, self.look, CUTS)
        return namespace

    def copy(self) -> tuple[dict[str, bytearray], bytearray]:
        """The files as they are now."""
        copies = {name: bytearray(buffer) for name, buffer in self.buffers.items()}
        return copies, bytearray(self.trailer)

    def look(self) -> None:
        """Between two writes: what is kept is complete and nobody else's to write."""
        self.check(*self.copy())
        self.looks += 1
        if not self.looks % COPY_EVERY:
            self.older_ledgers, _ = self.copy()
        elif not self.looks % PUT_BACK_EVERY:
            self.put_back()

    def put_back(self) -> None:
        """Somebody puts back older ledgers, or an older pool: what is believed is right."""
        ledgers, trailer = self.copy()
        with contextlib.suppress(LedgerDamaged):
            self.check(copy.deepcopy(self.older_ledgers), trailer)
        if self.older is not None:
            with contextlib.suppress(LedgerDamaged):
                newer = self.start(ledgers, bytearray(self.older[1]))
                older = self.start(*copy.deepcopy(self.older))
                for namespace in newer:
                    before = older.get(namespace.id)
                    if before is not None:  # its ledger was empty: the first record is under way
                        assert held(namespace.table).items() <= held(before.table).items()

    @rule()
    def copy_files(self) -> None:
        """Somebody copies the files between two changes."""
        self.older = self.copy()

    def check(self, buffers: dict[str, bytearray], trailer: bytearray) -> None:
        """What the next daemon makes of these files is READY here, and whole."""
        following = self.start(buffers, trailer)
        following.check_integrity()
        for model in self.models:
            namespace = following.get(model.namespace.id)
            if namespace is None:
                continue
            directory = model.table.directory
            for key, (slot, generation) in held(namespace.table).items():
                assert (directory.key(slot), directory.generation(slot)) == (key, generation)
                writers = model.table.space.geometry.writers(slot)
                assert directory.ranks_done(slot) & writers == writers
                assert directory.state(slot) in {SlotState.READY, SlotState.WRITING}
                assert directory.blocks(slot) == namespace.table.directory.blocks(slot)

    @rule()
    def kill(self) -> None:
        """The next daemon has exactly what was READY, where and as it was, in the same order."""
        before = [held(model.table) for model in self.models]
        salts = [model.namespace.salt for model in self.models]
        self.namespaces = self.begin()
        for number, model in enumerate(self.models):
            model.namespace = self.open(number)
            model.table = model.namespace.table
            model.chunks = {key: chunk for key, chunk in model.chunks.items() if chunk.ready}
            for gone in (model.draining, model.leases, model.doomed, model.loans, model.ghosts):
                gone.clear()
            for forgotten in (model.on_ready, model.on_asked, model.was_reset):
                forgotten.clear()
            # With `all`, tiers also get what the daemon before has left.
            model.on_ready += sorted(chunk.ref for chunk in model.chunks.values())
            model.marks = {chunk.ref: 1 for chunk in model.chunks.values()}
            assert model.table.expire(self.now) == []
        assert [held(model.table) for model in self.models] == before
        assert [model.namespace.salt for model in self.models] == salts


class AdaptiveReopening(Reopening):
    """The same under the adaptive policy."""

    policy = "adaptive"


@pytest.mark.hypothesis
@pytest.mark.parametrize(("machine", "examples"), [(Reopening, 8), (AdaptiveReopening, 2)])
def test_the_ledgers_are_right_whenever_the_daemon_is_killed(
    machine: type[Reopening], examples: int
) -> None:
    """Whatever was written last, the next daemon has whole chunks in their own slots."""
    run_state_machine_as_test(machine, settings=explored(examples, 40))


def test_a_part_that_gave_way_under_a_lease_is_not_kept() -> None:
    """Its key means the fuller chunk, also for the next daemon, whoever still reads the part."""
    machine, keys, blocks = Reopening(), KEYS[:1], (2, 6)
    machine.store(space=0, keys=keys, owner=1, blocks=blocks)
    table = machine.models[0].table
    (ref,) = pin(table, keys)
    machine.models[0].leases[1, 1] = Lease(1, 10.0, [ref[0]])
    machine.store_whole(space=0, owner=1)
    machine.kill()
    machine.agrees()


def name(number: int) -> str:
    """A namespace's id in hex."""
    return f"{number:032x}"


def table_of(numbers: list[int]) -> ResetTable:
    """A table with resets of these namespaces."""
    table = ResetTable()
    for number in numbers:
        table.draw(name(number))
    return table


def loaded(page: bytes) -> ResetTable:
    """The table of a page."""
    table = ResetTable()
    table.load(page)
    return table


NUMBERS = st.lists(st.integers(0, 250), max_size=300)


@given(NUMBERS)
def test_each_reset_gives_a_salt_that_none_was_before(numbers: list[int]) -> None:
    """Also where the namespace has lost its place, and after the page was read again."""
    table, before = ResetTable(), dict[int, set[bytes]]()
    for number in numbers:
        before.setdefault(number, {b""}).add(table.salt_of(name(number)))
        table.draw(name(number))
    again = loaded(table.pack())
    for number in range(252):
        salt = again.salt_of(name(number))
        assert salt == table.salt_of(name(number))
        assert salt not in before.get(number, ())
        assert len(salt) == SALT_BYTES or number not in numbers
    assert again.salt_of(name(251)) == again.base


def test_the_namespace_whose_reset_is_longest_ago_loses_its_place() -> None:
    """It and all that have none get a salt that none had before."""
    table = table_of(list(range(MAX_RESETS)))
    salts = {number: table.salt_of(name(number)) for number in range(MAX_RESETS)}
    assert (len(table), table.base) == (MAX_RESETS, b"")
    table = loaded(table.pack())
    table.draw(name(0))
    table.draw(name(MAX_RESETS))
    assert (len(table), len(table.base)) == (MAX_RESETS, SALT_BYTES)
    assert table.salt_of(name(1)) == table.salt_of(name(999)) == table.base
    assert table.base not in salts.values()
    assert table.salt_of(name(2)) == salts[2]


@given(NUMBERS, st.integers(0, 250), st.integers(0, RESET_BYTES))
def test_a_write_that_is_cut_short_is_seen(numbers: list[int], number: int, cut: int) -> None:
    """At any byte: what is read is the table of before, the one of after, or damaged."""
    table = table_of(numbers)
    before = table.pack()
    table.draw(name(number))
    after = table.pack()
    for at in {cut, cut // 64, 24, 28, 32, 40}:
        page = after[:at] + before[at:]
        try:
            found = loaded(page).pack()
        except LedgerDamaged:
            assert page not in {before, after}
        else:
            assert found in {before, after}


@given(NUMBERS, st.integers(0, RESET_BYTES - 1), st.integers(1, 255))
def test_a_byte_that_somebody_has_changed_is_seen(numbers: list[int], at: int, flip: int) -> None:
    """Nothing of such a page is taken over."""
    page = bytearray(table_of(numbers).pack())
    page[at] ^= flip
    table = table_of([1])
    before = table.pack()
    with pytest.raises(LedgerDamaged):
        table.load(bytes(page))
    assert table.pack() == before


def test_a_namespace_that_was_closed_keeps_its_salt() -> None:
    """Closed and opened again, it begins with the salt of its last reset."""
    namespaces = make_namespaces(4 * PAGE)
    namespace = add(namespaces, 1, PAGE)
    assert namespace.salt == b""
    _, _, lack = namespaces.reset(namespace)
    salt = namespace.salt
    assert (len(salt), lack) == (SALT_BYTES, "")
    namespaces.detach_engine(namespace)
    namespaces.close(namespace)
    assert add(namespaces, 1, PAGE).salt == salt
    assert add(namespaces, 2, PAGE).salt == b""
