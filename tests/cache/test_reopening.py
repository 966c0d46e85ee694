"""A daemon killed between any two writes to its ledgers: what the next one makes of them."""

import contextlib
import copy
from typing import Any

import pytest
from hypothesis.stateful import rule, run_state_machine_as_test

from kvd.cache.chunks import ChunkTable
from kvd.cache.ledger import Ledger
from kvd.cache.namespaces import LedgerSetup, Namespace, Namespaces
from kvd.cache.recovery import PoolTrailer, ResetTable
from kvd.errors import LedgerDamaged
from kvd.machine.memory import TRAILER_BYTES
from kvd_proto.directory import SlotState
from tests.cache.tables import make_namespaces, pin
from tests.cache.test_machine import KEYS, KIB, Lease, TableMachine
from tests.exploring import explored

COPY_EVERY, PUT_BACK_EVERY = 23, 3  # writes; copies are made inside a change, too
CUTS = (8, 60)  # bytes of a record that were written when the kill came


class Watched:
    """Memory whose every write is followed, and where it is longer than a word cut, by a look."""

    def __init__(self, memory: memoryview, look: Any) -> None:
        self._memory = memory
        self._look = look

    def __setitem__(self, where: int | slice, value: Any) -> None:
        if isinstance(where, slice):
            for cut in CUTS:
                self._memory[where.start : where.start + cut] = value[:cut]
                self._look()
        self._memory[where] = value
        self._look()

    def __getitem__(self, where: Any) -> Any:
        return self._memory[where]

    def release(self) -> None:
        """As memory's."""
        self._memory.release()


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
        ledger._words = Watched(ledger._words, self.look)
        ledger._records = Watched(ledger._records, self.look)
        ledger._number = Watched(ledger._number, self.look)
        if not isinstance(ledger._trailer._words, Watched):
            ledger._trailer._words = Watched(ledger._trailer._words, self.look)
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
