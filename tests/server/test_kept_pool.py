"""What one daemon leaves and the next one takes over, in files but without processes."""

import errno
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from kvd.cache.chunks import ChunkTable
from kvd.cache.ledger import Ledger
from kvd.cache.namespaces import Namespace, Namespaces
from kvd.cache.recovery import PoolTrailer, ResetTable
from kvd.errors import MemoryShortage, PoolError, Refusal
from kvd.machine.memory import TRAILER_BYTES, Filesystem, pool_directory_name
from kvd.server import persistent_pool, state_files
from kvd.server.client_files import DescriptionFiles
from kvd.server.persistent_pool import MakeNamespaces, PersistentPool
from kvd.server.pool_memory import PoolMemory
from kvd.server.state_files import MANIFEST_VERSION
from kvd_proto.directory import SlotState
from tests.cache.tables import PAGE, add, make_namespaces, store
from tests.descriptors import open_files
from tests.full import fill_up
from tests.server.hugetlbfs import hugetlbfs_double

SIZE = 256 * PAGE
RUNTIME = Path("/run/kvd-test")
NAMES = ("00" * 16, "01" * 16)  # of the namespaces that `add` opens


@dataclass
class Life:
    """One daemon's life with its pool: from its start to a kill."""

    keep: PersistentPool
    pool: PoolMemory
    namespaces: Namespaces
    descriptions: DescriptionFiles
    ended: bool = False

    def open(self, which: int = 0) -> Namespace:
        """A namespace, with an engine."""
        if which:
            return add(self.namespaces, 1, 3 * PAGE, world_size=3, replicated=True)
        return add(self.namespaces, 0, PAGE, PAGE, description_record_bytes=128)

    def table(self) -> ChunkTable:
        """The chunks of the first namespace, which is here already."""
        return next(iter(self.namespaces)).table

    @property
    def held(self) -> list[set[bytes]]:
        """The keys of the READY chunks, by namespace; none may be anything else."""
        self.namespaces.check_integrity()
        return [ready_keys(namespace.table) for namespace in self.namespaces]

    def allocate(self) -> None:
        """Have all of the pool, or the error."""
        self.pool.start(lambda: None)
        while not self.pool.ready and not self.pool.error:
            os.sched_yield()

    def kill(self) -> None:
        """The kernel lets go of everything, and nothing is undone."""
        self.ended = True
        self.descriptions.close()
        os.close(self.pool.fd)
        locks = [fd for fd, path in open_files().items() if path == str(self.pool.path.parent)]
        for fd in locks:
            os.close(fd)

    def end(self) -> None:
        """Nothing is written any more, and all locks are let go of."""
        if not self.ended:
            self.ended = True
            self.pool.close()
            self.descriptions.close()
            self.keep.close()


Start = Callable[..., Life]


def maker(cpu_bytes: int, **options: Any) -> MakeNamespaces:
    """As the daemon makes its namespaces."""
    return lambda ledger_setup, fill: make_namespaces(
        cpu_bytes, ledger_setup=ledger_setup, fill=fill, **options
    )


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Starts lives in one pool_dir, the one before ended; the last one is ended with the test."""
    lives: list[Life] = []

    def begin_life(
        cpu_bytes: int = SIZE,
        *,
        persistent: bool = True,
        cold: bool = False,
        resets: ResetTable | None = None,
    ) -> Life:
        for life in lives:
            life.end()
        lives.clear()
        keep = PersistentPool(tmp_path, RUNTIME, persistent=persistent, cold=cold)
        descriptions = DescriptionFiles(keep.open_descriptions)
        try:
            make = maker(cpu_bytes, make_descriptions=descriptions.make, resets=resets)
            pool, namespaces = keep.open(cpu_bytes, make)
        except (PoolError, Refusal):
            keep.close()
            raise
        lives.append(Life(keep, pool, namespaces, descriptions))
        if pool.may_be_used:  # as the daemon's loop does before lanes start
            keep.commit()
        return lives[0]

    yield begin_life
    for life in lives:
        life.end()


def keys_of(name: str, count: int) -> list[bytes]:
    """Names of chunks."""
    return [f"{name} {number}".encode() for number in range(count)]


def ready_keys(table: ChunkTable) -> set[bytes]:
    """The keys of a table's READY chunks."""
    directory = table.directory
    return {directory.key(slot) for slot in directory.slots_in(SlotState.READY)}


def area(tmp_path: Path) -> Path:
    """Where it is kept."""
    return tmp_path / pool_directory_name(RUNTIME)


@pytest.mark.parametrize("years", [-57, -1, 81, 10_000])
def test_a_clock_that_is_wrong_loses_nothing(
    start: Start, monkeypatch: pytest.MonkeyPatch, years: int
) -> None:
    """Before the epoch or past 32 bits of seconds: chunks come back, generations grow."""
    right = time.time()
    generations: list[int] = []
    for offset in (0, years, 0, years):
        monkeypatch.setattr(time, "time", lambda offset=offset: right + offset * 365 * 86_400)
        table = start().open(0).table
        (slot,) = store(table, [str(len(generations)).encode()]).slots
        assert len(ready_keys(table)) == len(generations) + 1
        generations.append(int(table.directory.generation(slot)))
    assert generations == sorted(set(generations))


@pytest.mark.parametrize(
    "change",
    [{"cpu_bytes": SIZE // 2}, {"cpu_bytes": 2 * SIZE}, {"cold": True}, {"persistent": False}],
    ids=str,
)
def test_other_settings_start_empty(
    start: Start, tmp_path: Path, change: dict[str, int | bool]
) -> None:
    """Another size, a cold start or keeping nothing: no chunk; the file's memory is used again."""
    life = start()
    store(life.open().table, keys_of("k", 9))
    life.allocate()
    life = start(**change)
    assert not len(life.namespaces)
    life.allocate()
    life.keep.commit()
    assert (area(tmp_path) / "pool").stat().st_size == life.pool.file_bytes
    store(life.open().table, keys_of("n", 5))
    if life.keep.persistent:
        assert start(**(change | {"cold": False})).held == [set(keys_of("n", 5))]
    else:
        life.end()
        assert not area(tmp_path).exists()
        start()


def kept_chunks(start: Start) -> set[bytes]:
    """Leave a pool of which every page is there, with chunks; their keys."""
    life = start()
    life.allocate()
    store(life.open(0).table, keys_of("a", 9))
    store(life.open(1).table, keys_of("b", 5))
    left = set().union(*life.held)
    life.end()
    return left


def contents(place: Path) -> dict[str, bytes]:
    """Every file of the area."""
    return {file.name: file.read_bytes() for file in place.iterdir()}


@pytest.mark.parametrize("killed", [False, True], ids=["ended", "killed"])
@pytest.mark.parametrize("change", [{}, {"cold": True}, {"persistent": False}], ids=str)
def test_a_pool_that_cannot_be_allocated_leaves_what_is_kept(
    start: Start,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, bool],
    *,
    killed: bool,
) -> None:
    """Memory runs out half-way, or the daemon is killed there: the next one has every chunk."""
    keys, place, real = kept_chunks(start), area(tmp_path), os.posix_fallocate
    before = contents(place)

    def half(fd: int, first: int, length: int) -> None:
        real(fd, first, length * 2 // 3)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    life = start(3 * SIZE, **change)
    life.open(0)
    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", half)
        life.allocate()
    assert "No space left" in life.pool.error
    taken = (place / "pool").stat().st_blocks * 512
    assert 2 * SIZE <= taken < 3 * SIZE  # the file system's own notes count
    if killed:
        life.kill()
        assert contents(place) != before
    else:
        life.keep.allocation_failed()
        assert life.keep.retained_text
        life.end()
        assert contents(place) == before
    life = start()
    assert set().union(*life.held) == keys
    assert life.pool.ready
    assert (place / "pool").stat().st_size == SIZE + TRAILER_BYTES
    assert not list(place.glob("*.new"))


def test_a_full_filesystem_hinders_no_restart(
    start: Start, tmp_path: Path, small_tmpfs: Callable[[Path, int], None]
) -> None:
    """The pool is there, so the next daemon starts with it and needs no byte more."""
    small_tmpfs(tmp_path, 2 * SIZE)
    keys = kept_chunks(start)
    fill_up(tmp_path)
    for _ in range(2):
        life = start()
        assert set().union(*life.held) == keys
        assert life.pool.ready
    with pytest.raises(PoolError, match=rf"remount,size=3M {re.escape(str(tmp_path))}"):
        start(3 * SIZE // 2)
    assert set().union(*start().held) == keys
    assert life.ended


def flip(file: Path, where: int | bytes) -> None:
    """Change one bit, at a number or where some bytes are."""
    data = bytearray(file.read_bytes())
    data[where if isinstance(where, int) else data.index(where)] ^= 1
    file.write_bytes(data)


def move_record(ledger: Path) -> None:
    """Put the record of one slot in the place of another."""
    data = bytearray(ledger.read_bytes())
    at = data.index(b"k 3") - 24
    data[at + 80 : at + 160] = data[at : at + 80]
    ledger.write_bytes(data)


Harm: TypeAlias = Callable[[Path], object]


def replaced(make: Harm) -> Harm:
    """Makes something else in a file's place."""
    return lambda file: (file.rename(file.with_name("old")), make(file))


def edited(old: str, new: str) -> Harm:
    """Replaces a part of a file's text."""
    return lambda file: file.write_text(file.read_text().replace(old, new))


def with_numbers(begun: int, ended: int) -> Harm:
    """Writes the numbers of the ledger's entry in the pool's trailer."""

    def write(pool: Path) -> None:
        with pool.open("r+b") as file:
            file.seek(SIZE)
            at = SIZE + file.read(TRAILER_BYTES).index(bytes.fromhex(NAMES[0]), 64)
            file.seek(at + 16)
            file.write(struct.pack("<QQ", begun, ended))

    return write


LEDGER, MANIFEST, POOL = f"{NAMES[0]}.ledger", "manifest.json", "pool"
LAST_EPOCH = (2**32 - 2) << 32
HARMS: list[tuple[str, Harm, str]] = [
    (LEDGER, lambda file: flip(file, 0), "no ledger"),
    (LEDGER, lambda file: flip(file, 60), "header is damaged"),
    (LEDGER, lambda file: flip(file, b"k 3"), "1 of 9 records are damaged"),
    (LEDGER, move_record, "records are damaged"),
    (LEDGER, lambda file: os.truncate(file, 5000), "cannot hold a ledger"),
    (LEDGER, lambda file: file.rename(file.with_name(f"{NAMES[1]}.ledger")), "it is that of name"),
    (LEDGER, replaced(lambda file: file.symlink_to("old")), "cannot be opened"),
    (LEDGER, lambda file: os.truncate(file, 0), "is empty: its namespace starts without chunks"),
    (LEDGER, lambda file: file.write_bytes(bytes(9000)), "is empty: its namespace starts"),
    (MANIFEST, lambda file: file.write_bytes(b"{"), "cannot be read"),
    (MANIFEST, lambda file: os.truncate(file, 2**30), "it has more than 4096 bytes"),
    (MANIFEST, Path.unlink, "there is no manifest.json; the cache starts empty"),
    (MANIFEST, edited(f'"version":{MANIFEST_VERSION}', '"version":99'), "version 99"),
    (MANIFEST, edited('"kernel":"', '"kernel":"x'), "rebooted since"),
    (MANIFEST, edited('"epoch":', '"epoch":99'), "cannot be read"),
    (MANIFEST, edited(f'"cpu_bytes":{SIZE}', f'"cpu_bytes":{2 * SIZE}'), "not have 1048576 bytes"),
    (MANIFEST, edited('"bytes":', '"bytes":-'), "cannot be read"),
    (POOL, replaced(lambda file: file.write_bytes(bytes(SIZE))), "another file"),
    (POOL, replaced(Path.mkdir), "another file"),
    (POOL, Path.unlink, "is gone"),
    (POOL, lambda file: os.truncate(file, SIZE + PAGE), "is cut off"),
    (POOL, with_numbers(2**64 - 1, 2**64 - 1), "its entry in the pool's trailer is damaged"),
    (POOL, with_numbers(LAST_EPOCH, LAST_EPOCH), "its entry in the pool's trailer is damaged"),
    (POOL, with_numbers(5, 6), "its entry in the pool's trailer is damaged"),
]


@pytest.mark.parametrize(("name", "harm", "said"), HARMS)
def test_damaged_or_foreign_pool_files_are_not_used(
    start: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    name: str,
    harm: Harm,
    said: str,
) -> None:
    """The daemon says so, starts empty and serves; the start after that is a warm one again."""
    for turn in range(2):
        life = start()
        store(life.open().table, keys_of("k", 9))
        life.end()
        harm(area(tmp_path) / name)
        caplog.clear()
        life = start()
        assert said in caplog.text
        assert not len(life.namespaces)
        life.allocate()
        life.keep.commit()
        store(life.open().table, keys_of("n", 5))
        life = start()
        assert life.held == [set(keys_of("n", 5))]
        assert len(list(area(tmp_path).glob("*.damaged-*"))) <= 1, turn
        life.table().reset()


@pytest.mark.parametrize(
    ("files", "said", "restored"),
    [
        ((".ledger",), "the ledger or the pool is an older copy", ""),
        (("pool",), "the ledger or the pool is an older copy", ""),
        ((".ledger", ".json", ".descriptions"), "is an older copy", ""),
        ((".json", ".descriptions"), "of the previous daemon are restored", "new"),
        (("",), "of the previous daemon are restored", "old"),
    ],
    ids=["ledger", "pool", "all but the pool", "manifest", "all"],
)
def test_an_older_copy_that_is_put_back_gives_no_wrong_byte(
    start: Start,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    files: tuple[str, ...],
    said: str,
    restored: str,
) -> None:
    """A ledger or a pool that is older than the other is not believed, whole as it is."""
    caplog.set_level("INFO")
    life = start()
    life.allocate()
    old = store(life.open().table, keys_of("old", 9)).slots
    older = contents(area(tmp_path))
    life = start()
    life.table().slots.drop(old)
    new = store(life.table(), keys_of("new", life.table().directory.num_slots)).slots
    assert set(old) < set(new)
    life.kill()
    for name, content in older.items():
        if name.endswith(files):
            (area(tmp_path) / name).write_bytes(content)  # the file keeps its inode
    caplog.clear()
    life = start()
    assert said in caplog.text
    keys = {"": [], "old": keys_of("old", 9), "new": keys_of("new", len(new))}[restored]
    assert life.held == ([set(keys)] if keys else [])


class Killed(BaseException):
    """The daemon is killed here."""


@pytest.mark.parametrize("size", [2 * SIZE, SIZE // 2, SIZE], ids=["larger", "smaller", "the same"])
def test_a_kill_while_a_pool_is_given_up_gives_no_wrong_byte(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """Between any two steps: the old chunks or none at once, none once others lie there."""
    steps = [
        (PoolMemory, "clear_trailer"),
        (persistent_pool, "remove_tree"),
        (PoolTrailer, "move"),
        (state_files.PoolFiles, "write_manifest"),
        (PoolMemory, "commit"),
    ]
    for owner, name in steps:
        old = kept_chunks(start)
        older = contents(area(tmp_path))
        with monkeypatch.context() as patch:

            def killed(*_: object) -> None:
                raise Killed

            if size > SIZE:
                life = start(size, cold=True)
                life.allocate()
                patch.setattr(owner, name, killed)
                with pytest.raises(Killed):
                    life.keep.commit()
                life.kill()
            else:
                patch.setattr(owner, name, killed)
                with pytest.raises(Killed):
                    start(size, cold=True)
        restored = set().union(*start().held)
        assert restored == (old if name == "clear_trailer" else set()), name
        life = start(2 * SIZE)
        life.allocate()
        life.keep.commit()
        store(life.open().table, keys_of(name, 9))
        life.end()
        for file in area(tmp_path).iterdir():  # of the pool before all but its bytes is put back
            if file.name != "pool":
                file.unlink()
        for file_name in older.keys() - {"pool"}:
            (area(tmp_path) / file_name).write_bytes(older[file_name])
        assert start().held == [], name


def test_the_ledger_of_a_closed_namespace_is_not_believed_again(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It leaves none, and one that is put back is not believed: its slots are others' by now."""
    life = start()
    namespace = life.open()
    store(namespace.table, keys_of("k", 3))
    ledger = area(tmp_path) / LEDGER
    older = ledger.read_bytes()
    assert {stat.S_IMODE(file.stat().st_mode) for file in area(tmp_path).iterdir()} == {0o600}
    for reopened in (False, True):
        life.namespaces.detach_engine(namespace)
        life.namespaces.close(namespace)
        life.keep.drop(namespace.id.hex())
        assert not list(area(tmp_path).glob("*.ledger"))
        if reopened:
            store(life.open().table, keys_of("n", 3))
        ledger.write_bytes(older)
        caplog.clear()
        life.kill()
        life = start()
        said = "is an older copy" if reopened else "the pool has no chunks of it"
        assert said in caplog.text
        assert life.held == []
        namespace = life.open()


def ledger_in(namespace: Namespace) -> Ledger:
    """The ledger that an open namespace writes."""
    ledger = namespace.directory.ledger
    assert ledger is not None
    return ledger


@pytest.mark.parametrize("twice", ["bytes", "key"])
def test_ledgers_that_contradict_each_other_are_not_believed(
    start: Start, tmp_path: Path, twice: str
) -> None:
    """The same bytes have two owners, or a key has two chunks: nothing says which one is right."""
    life = start()
    first = life.open(0)
    slots = store(first.table, keys_of("a", 2)).slots
    if twice == "key":
        ledger_in(first).record(slots[1], 7, 0, 1, 0, b"a 0")
    else:
        store(life.open(1).table, keys_of("b", 80))
        for slot in range(128):
            ledger_in(first).record(slot, 7 << 32 | slot, 0, 1, 0, f"more {slot}".encode())
    assert start().held == []
    assert list(area(tmp_path).glob("*.damaged-*"))


def test_chunks_from_before_a_reset_do_not_come_back_with_an_older_pool(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    """A pool that was left while another one was in use, in which the namespace was reset.

    Nor where the record of resets is lost.
    """
    resets = ResetTable()
    table = start(resets=resets).open(0).table
    store(table, keys_of("old", 2))
    resets.draw(NAMES[0])
    life = start(resets=resets)
    assert life.held == []
    assert "was reset while another pool was in use" in caplog.text
    namespace = life.open(0)
    assert namespace.salt == resets.salt_of(NAMES[0])
    store(namespace.table, keys_of("new", 2))
    following = start(resets=resets)
    assert following.held == [set(keys_of("new", 2))]
    _, _, lack = following.namespaces.reset(following.open(0))
    assert not lack
    store(following.table(), keys_of("newer", 2))
    assert start(resets=resets).held == [set(keys_of("newer", 2))]
    assert start(resets=ResetTable()).held == []


def test_a_foreign_pool_directory_is_left_alone(
    start: Start, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where another user has taken the name the pool goes elsewhere, and is not kept."""
    other = tmp_path / "elsewhere"
    other.mkdir()
    area(tmp_path).symlink_to(other)
    life = start()
    assert not life.keep.persistent
    assert "is no directory" in caplog.text
    store(life.open().table, keys_of("k", 3))
    life = start()
    assert life.held == []
    life.end()
    assert not list(other.iterdir())
    assert len(list(tmp_path.iterdir())) == 2
    area(tmp_path).unlink()
    start()


def test_on_hugetlbfs_only_the_pool_has_huge_pages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes are whole pages, room is what is free of them, and notes go where files are written."""
    huge, notes = hugetlbfs_double(tmp_path, monkeypatch)
    filesystem = Filesystem.of(huge)
    assert (filesystem.page_bytes, filesystem.free_bytes, filesystem.writable) == (
        2**21,
        3 * 2**21,
        False,
    )
    assert filesystem.whole_pages(2**21 + 1) == 2**22
    keep = PersistentPool(huge, RUNTIME, persistent=True)
    pool, _ = keep.open(2**21 + 1, maker(2**21 + 1))
    assert pool.path == huge / pool_directory_name(RUNTIME) / "pool"
    assert pool.nbytes == pool.fill.nbytes == 2**22
    assert pool.fill.piece_bytes % 2**21 == 0
    assert (notes / pool_directory_name(RUNTIME, huge) / "manifest.json").exists()
    assert keep.reusable_cpu_bytes() == 2**21 + 1
    remedy = r"huge pages of 2 MiB aside: echo \d > /sys/.*/nr_hugepages"
    with pytest.raises(PoolError, match=remedy):
        PoolMemory(huge / "large", 7 * 2**20)
    pool.close()
    beside = PersistentPool(notes, RUNTIME, persistent=True)  # where the notes of the other lie
    assert beside.reusable_cpu_bytes() is None
    beside.close()
    assert keep.reusable_cpu_bytes() == 2**21 + 1
    assert keep.remove() == 2**21  # the trailer, in a page of its own
    keep.close()
    assert not list(huge.iterdir())
    assert not list(notes.iterdir())


@pytest.mark.parametrize("existing", [None, 0, 3 * PAGE])
def test_a_pool_whose_file_cannot_be_extended_leaves_the_file_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, existing: int | None
) -> None:
    """None, an empty one, or one without memory: after ENOSPC it is there again, or not."""
    path = tmp_path / "pool"
    if existing is not None:
        path.touch()
        os.truncate(path, existing)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(MemoryShortage, match="cannot be created: No space left"):
        PoolMemory(path, SIZE)
    assert (path.stat().st_size if path.exists() else None) == existing
    assert str(path) not in open_files().values()
