"""What a disk, its file system and other hands may do to the disk tier."""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import signal
import socket
import stat
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import ConfigError, TierError
from kvd.outcomes import Outcome
from kvd.tier.batches import Damaged, OtherChunk, checksum_of, seal, unseal
from kvd.tier.contract import BackendOptions, Space
from kvd.tier.disk import DiskTier, slabs
from kvd.tier.disk.slot_io import Alignment, layout_of
from tests.tier.areas import Area, begun, is_whole, keys_of, space_of
from tests.tier.conformance import put_all, soon
from tests.waiting import PATIENCE, eventually

MIB = 2**20
OK, ABSENT, FULL, FAILED = Outcome.OK, Outcome.ABSENT, Outcome.FULL, Outcome.FAILED
PLACE = "tier"
_MNT_DETACH = 2
_FIFREEZE, _FITHAW = 0xC0045877, 0xC0045878  # linux/fs.h


class Disks:
    """Opens disk tiers in one folder, and closes them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.area = Area(16 * MIB)
        self._opened: list[DiskTier] = []

    def open(self, size: str = "16MiB", floor: str = "0", place: Path | None = None) -> DiskTier:
        """A tier in the folder, the same one each time."""
        options = BackendOptions(str(place or self.folder), {"size": size, "floor": floor})
        DiskTier.check(options)
        self._opened.append(DiskTier.open(options, self.area.memory))
        return self._opened[-1]

    def reopen(self, tier: DiskTier, size: str = "16MiB") -> DiskTier:
        """What the next process finds."""
        tier.close()
        return self.open(size)

    def fill(self, tier: DiskTier, space: Space, keys: list[bytes]) -> None:
        """Put all of these, a few at a time: a batch needs all of its slots at once."""
        for at in range(0, len(keys), 8):
            put_all(tier, self.area.chunks(space, keys[at : at + 8]))

    def got(self, tier: DiskTier, space: Space, keys: list[bytes]) -> list[Outcome]:
        """Outcomes of a get of these; what is OK has the right bytes."""
        back = self.area.empties(space, keys)
        outcomes = tier.get(back, soon())
        for chunk, outcome in zip(back, outcomes, strict=True):
            assert outcome is not OK or is_whole(chunk)
        return outcomes

    def close(self) -> None:
        """Close all, whose memory must agree with itself."""
        for tier in self._opened:
            tier.check_integrity()
            tier.close()


@pytest.fixture
def disks(tmp_path: Path) -> Iterator[Disks]:
    """Disk tiers in a folder of the test."""
    made = Disks(tmp_path / PLACE)
    yield made
    made.close()


@contextlib.contextmanager
def mounted(kind: str, source: str, folder: Path, options: str) -> Iterator[Path]:
    """A file system of the test's own, which goes with it."""
    folder.mkdir()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(source.encode(), os.fsencode(folder), kind.encode(), 0, options.encode()):
        pytest.skip(f"no {kind} can be mounted here: {os.strerror(ctypes.get_errno())}")
    try:
        yield folder
    finally:
        libc.umount2(os.fsencode(folder), _MNT_DETACH)


def failing(code: int = errno.EIO) -> Callable[..., Any]:
    """A call of the system that fails."""

    def fail(*_: object) -> None:
        raise OSError(code, os.strerror(code))

    return fail


def files_of(folder: Path, suffix: str) -> list[Path]:
    """The slabs' files, in their order."""
    return sorted(folder.glob(f"*{suffix}"))


def free_bytes(folder: Path) -> int:
    """What its file system has left."""
    found = os.statvfs(folder)
    return found.f_bavail * found.f_frsize


def disk_bytes(folder: Path) -> int:
    """What a directory takes with all that is in it."""
    return sum(each.stat().st_blocks * 512 for each in (folder, *folder.iterdir()))


@pytest.mark.parametrize(
    ("target", "values", "needle"),
    [
        ("var/lib", {"size": "1GiB"}, "absolute directory"),
        ("", {"size": "1GiB"}, "absolute directory"),
        ("/d", {}, "has no size; give one"),
        ("/d", {"size": "big"}, "size=big"),
        ("/d", {"size": "0"}, "size=0 leaves nothing to chunks"),
        ("/d", {"size": "1GiB", "floor": "low"}, "floor=low"),
        ("/d", {"size": "1GiB", "threads": "0"}, "threads=0 is out of range; give 1 to 64"),
        ("/d", {"size": "1GiB", "threads": "x"}, "threads=x is out of range"),
        ("/d", {"size": "1GiB", "colour": "red"}, "colour is no option"),
    ],
)
def test_bad_options(target: str, values: dict[str, str], needle: str) -> None:
    """An option that cannot work is named with its value."""
    with pytest.raises(ConfigError, match=needle):
        DiskTier.check(BackendOptions(target, values))


def made(folder: Path) -> Path:
    """The folder, which is there now."""
    folder.mkdir(parents=True)
    return folder


def opened_to_all(disks: Disks) -> None:
    """The folder's parent lets every user write."""
    made(disks.folder.parent).chmod(0o777)


REFUSED: dict[str, tuple[Callable[[Disks], object], str]] = {
    "in use": (Disks.open, "in use by another daemon"),
    "files of others": (
        lambda disks: (made(disks.folder) / "thesis.txt").write_text("all of it"),
        r"holds files of others .*thesis\.txt",
    ),
    "another version": (
        lambda disks: (made(disks.folder) / "kvd-disk").write_text("kvd disk tier, version 9\n"),
        "version 9",
    ),
    "symbolic link": (
        lambda disks: disks.folder.symlink_to(made(disks.folder.parent.parent / "there")),
        "symbolic link; give its target, .*/there",
    ),
    "missing mount": (lambda _: None, "create its parent directory, or mount"),
    "another user's": (lambda disks: os.chown(made(disks.folder), 12345, -1), "chown 0"),
    "writable by all": (opened_to_all, "lets every user replace"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_directory_that_cannot_be_used_is_refused(tmp_path: Path, case: str) -> None:
    """The error says why and what to do, and the directory stays as it was."""
    if case == "another user's" and os.geteuid() != 0:
        pytest.skip("only root gives files away")
    prepare, needle = REFUSED[case]
    disks = Disks(tmp_path / "mnt" / PLACE)
    if case not in {"missing mount", "writable by all"}:
        disks.folder.parent.mkdir()
    prepare(disks)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(TierError, match=needle):
        disks.open()
    assert sorted(tmp_path.rglob("*")) == before
    disks.close()


def test_a_file_system_that_is_read_only(tmp_path: Path, disks: Disks) -> None:
    """The error says what to do."""
    with (
        mounted("tmpfs", "none", tmp_path / "ro", "ro"),
        pytest.raises(TierError, match="mount it writable"),
    ):
        disks.open(place=tmp_path / "ro" / PLACE)


def test_modes(disks: Disks) -> None:
    """Nobody else may look into the directory, nor into its files."""
    disks.folder.mkdir(mode=0o755)
    tier = disks.open()
    put_all(tier, disks.area.chunks(begun(tier, space_of(4096)), keys_of("k", 1)))
    assert disks.folder.stat().st_mode & 0o777 == 0o700
    assert {file.stat().st_mode & 0o777 for file in disks.folder.iterdir()} == {0o600}


def test_the_floor_is_kept(
    tmp_path: Path, disks: Disks, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tier grows to the floor of the file system, and goes round in what it has.

    Where others pass the floor it gives room back, slab by slab.
    """
    monkeypatch.setattr("kvd.tier.disk.allocator._PAUSE_SECONDS", 0.0)
    with mounted("tmpfs", "none", tmp_path / "small", "size=16m") as small:
        tier = disks.open("64MiB", "8MiB", small / PLACE)
        space = begun(tier, space_of(65536))
        keys = keys_of("k", 200)
        with caplog.at_level(logging.WARNING):
            disks.fill(tier, space, keys)
        assert free_bytes(small) >= 8 * MIB
        assert 5 * MIB < (used := tier.capacity().used) <= 8 * MIB
        assert "stay free (floor)" in caplog.text
        assert disks.got(tier, space, keys[-8:]) == [OK] * 8
        (small / "of others").write_bytes(bytes(4 * MIB))
        for key in keys_of("more", 40):
            tier.put([disks.area.chunk(space, key)], soon())
        assert tier.capacity().used < used
        assert free_bytes(small) >= 8 * MIB
        tier.close()


def test_a_chunk_that_finds_no_room(
    disks: Disks, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is FULL and no file is left; a size below one chunk is a warning with the remedy."""
    small = disks.open("256KiB")
    space = begun(small, space_of(MIB))
    assert small.put(disks.area.chunks(space, keys_of("k", 2)), soon()) == [FULL] * 2
    assert "set a larger size" in caplog.text
    tier = disks.reopen(small)
    tier.open_space(space)
    with monkeypatch.context() as patch:
        patch.setattr("kvd.tier.disk.slabs.os.posix_fallocate", failing(errno.ENOSPC))
        assert tier.put([disks.area.chunk(space, b"k")], soon()) == [FULL]
    assert not files_of(disks.folder, ".slab")


def test_a_smaller_and_a_larger_size(disks: Disks) -> None:
    """With a smaller size the next process drops the oldest, with a larger one it grows."""
    tier = disks.open("8MiB")
    space = begun(tier, space_of(65536))
    keys = keys_of("k", 110)
    disks.fill(tier, space, keys)
    tier = disks.reopen(tier, "2MiB")
    assert disk_bytes(disks.folder) <= 2 * MIB
    kept = [key for piece in tier.scan(space) for key, _ in piece]
    assert len(kept) >= 20
    assert set(kept) <= set(keys[-40:])
    assert disks.got(tier, space, kept) == [OK] * len(kept)
    tier = disks.reopen(tier, "16MiB")
    disks.fill(tier, space, keys_of("more", 150))
    assert tier.capacity().chunks == len(kept) + 150


def test_a_sector_that_cannot_be_read(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    """One chunk FAILED and is dropped; its neighbours of the same call are there."""
    tier = disks.open()
    space = begun(tier, space_of(16384))
    keys = keys_of("k", 6)
    put_all(tier, disks.area.chunks(space, keys))
    bad = 2 * layout_of(space).slot_bytes
    with monkeypatch.context() as patch:
        real = os.preadv

        def moved(fd: int, pieces: list[memoryview], offset: int) -> int:
            is_bad = offset <= bad < offset + sum(map(len, pieces))
            nbytes: int = (failing() if is_bad else real)(fd, pieces, offset)
            return nbytes

        patch.setattr("kvd.tier.disk.slot_io.os.preadv", moved)
        assert disks.got(tier, space, keys) == [OK, OK, FAILED, OK, OK, OK]
        assert tier.take_dropped() == [(space.id, [keys[2]])]
        bad = 0
        with pytest.raises(TierError, match="read: Input/output error"):
            disks.got(tier, space, keys[:1])
    assert disks.got(tier, space, keys) == [ABSENT, OK, ABSENT, OK, OK, OK]


def test_a_disk_that_cannot_be_written(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A put fails with the error's name, keeps nothing, and works again when the disk does."""
    tier = disks.open()
    space = begun(tier, space_of(16384))
    keys = keys_of("k", 3)
    with monkeypatch.context() as patch:
        patch.setattr("kvd.tier.disk.slot_io.os.pwritev", failing())
        with pytest.raises(TierError, match="write: Input/output error"):
            tier.put(disks.area.chunks(space, keys), soon())
        assert tier.capacity().chunks == 0
    put_all(tier, disks.area.chunks(space, keys))
    assert disks.got(disks.reopen(tier), space, keys) == [OK] * 3


def test_a_file_system_that_does_not_say_how_full_it_is(
    disks: Disks, monkeypatch: pytest.MonkeyPatch
) -> None:
    """EIO of statvfs fails the put as any error of the medium, and takes no slot away."""
    monkeypatch.setattr("kvd.tier.disk.allocator._PAUSE_SECONDS", 0.0)
    tier = disks.open("4MiB")
    space = begun(tier, space_of(16384))
    put_all(tier, disks.area.chunks(space, keys_of("first", 1)))  # makes a slab of more slots
    slabs_before = files_of(disks.folder, ".slab")
    real = os.fstatvfs
    # The second put has an answer when it looks at the floor, and none for a new slab.
    for count, calls in ((1, iter([failing()])), (8, iter([real, failing()]))):
        monkeypatch.setattr(
            "kvd.tier.disk.directory.os.fstatvfs", lambda fd, calls=calls: next(calls)(fd)
        )
        with pytest.raises(TierError, match=f"{PLACE}: statvfs: Input/output error"):
            tier.put(disks.area.chunks(space, keys_of("more", count)), soon())
        assert disks.got(tier, space, keys_of("first", 1)) == [OK]
    monkeypatch.setattr("kvd.tier.disk.directory.os.fstatvfs", real)
    put_all(tier, disks.area.chunks(space, keys_of("few", 2)))
    assert files_of(disks.folder, ".slab") == slabs_before


@pytest.mark.parametrize("suffix", [".slab", ".index"])
@pytest.mark.parametrize("how", ["removed", "shortened"])
def test_a_file_goes_underneath(
    disks: Disks, suffix: str, how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Chunks of a slab whose file goes are gone, are told of, and their room is used anew."""
    tier = disks.open("4MiB")
    space = begun(tier, space_of(65536))
    keys = keys_of("k", 3)
    put_all(tier, disks.area.chunks(space, keys))
    for file in files_of(disks.folder, suffix):
        if how == "removed":
            file.unlink()
        else:
            os.truncate(file, 4096)
    assert disks.got(tier, space, keys) == [ABSENT] * 3
    assert sorted(tier.take_dropped()[0][1]) == keys
    assert "leave the files to kvd" in caplog.text
    assert not files_of(disks.folder, ".slab")
    put_all(tier, disks.area.chunks(space, keys))
    assert disks.got(disks.reopen(tier, "4MiB"), space, keys) == [OK] * 3


@pytest.mark.parametrize("suffix", [".slab", ".index"])
@pytest.mark.parametrize("how", ["removed", "emptied", "shortened", "scribbled"])
def test_a_file_goes_between_runs(disks: Disks, suffix: str, how: str) -> None:
    """The next process does without what is damaged, sets it aside, and serves."""
    tier = disks.open("4MiB")
    space = begun(tier, space_of(65536))
    keys = keys_of("k", 3)
    put_all(tier, disks.area.chunks(space, keys))
    tier.close()
    for file in files_of(disks.folder, suffix):
        if how == "removed":
            file.unlink()
        elif how == "emptied":  # as a power loss may leave it
            os.truncate(file, 0)
            os.truncate(file, 8192)
        elif how == "shortened":
            os.truncate(file, 4000)
        else:
            with file.open("r+b") as raw:
                raw.write(b"\xa5" * min(file.stat().st_size, MIB))
    tier = disks.open("4MiB")
    tier.open_space(space)
    if suffix == ".slab" and how == "scribbled":  # which the seal finds out
        found = disks.area.empties(space, keys)
        assert tier.get(found, soon()) == [OK] * 3
        assert not any(map(is_whole, found))
        tier.remove(space, keys)
    assert disks.got(tier, space, keys) == [ABSENT] * 3
    aside = files_of(disks.folder, ".damaged")
    whole = {(".slab", "scribbled"), (".index", "emptied")}
    assert bool(aside) == (how != "removed" and (suffix, how) not in whole)
    for _ in range(2):
        disks.fill(tier, space, keys_of("other", 60))
        assert disk_bytes(disks.folder) <= 4 * MIB
    assert disks.got(tier, space, keys_of("other", 60)[-3:]) == [OK] * 3


def test_a_slab_that_became_a_link(disks: Disks, tmp_path: Path) -> None:
    """No link in the directory is followed."""
    tier = disks.open()
    space = begun(tier, space_of(65536))
    put_all(tier, disks.area.chunks(space, keys_of("k", 1)))
    tier.close()
    slab = files_of(disks.folder, ".slab")[0]
    slab.rename(tmp_path / "moved")
    slab.symlink_to(tmp_path / "moved")
    before = (tmp_path / "moved").read_bytes()
    tier = disks.open()
    tier.open_space(space)
    assert disks.got(tier, space, keys_of("k", 1)) == [ABSENT]
    put_all(tier, disks.area.chunks(space, keys_of("k", 1)))
    assert (tmp_path / "moved").read_bytes() == before


def in_the_way(path: Path, kind: str) -> None:
    """Put something of this kind in place of what has the path."""
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
        (path / "thesis.txt").touch()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as made, contextlib.chdir(path.parent):
            made.bind(path.name)
    elif kind == "symbolic link":
        path.symlink_to(path.parent.parent)
    else:
        try:
            os.mknod(path, stat.S_IFCHR, os.makedev(1, 5))  # /dev/zero
        except PermissionError:
            pytest.skip("only root makes devices")


KINDS = ["directory", "FIFO", "socket", "symbolic link", "device"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("running", [False, True], ids=["between runs", "underneath"])
@pytest.mark.parametrize(
    "name", ["000001.slab", "000001.index", "000001.slab.new", "salts", "salts.new"]
)
def test_what_is_no_file_costs_no_other_slab(
    disks: Disks, name: str, running: bool, kind: str
) -> None:
    """It is moved out of the way at the latest by the next process; nothing waits for it."""
    tier = disks.open("4MiB")
    space = begun(tier, space_of(65536))
    keys = keys_of("k", 3)  # a slab each
    put_all(tier, disks.area.chunks(space, keys))
    tier.note_salt(b"n" * 16, b"a salt..")
    assert len(files_of(disks.folder, ".slab")) == 3
    if not running:
        tier.close()
    in_the_way(disks.folder / name, kind)
    if not running:
        tier = disks.open("4MiB")
        tier.open_space(space)
    is_lost = name in {"000001.slab", "000001.index"}
    assert disks.got(tier, space, keys) == [ABSENT if is_lost else OK, OK, OK]
    is_known = name != "salts" or running
    assert tier.note_salt(b"n" * 16, b"another.") == (b"a salt.." if is_known else b"")
    put_all(tier, disks.area.chunks(space, keys))
    tier = disks.reopen(tier, "4MiB")
    assert disks.got(tier, space, keys) == [OK] * 3
    assert tier.salt(b"n" * 16) == b"another."
    if name != "000001.slab.new":  # a complete slab has no use for that name
        assert not os.path.lexists(disks.folder / name) or (disks.folder / name).is_file()


@pytest.mark.parametrize("suffix", [".slab", ".index", ".slab.new"])
def test_what_has_the_name_of_the_next_slab_delays_it(disks: Disks, suffix: str) -> None:
    """Chunks find no room until another name is tried; what is there stays as it is."""
    tier = disks.open("4MiB")
    space = begun(tier, space_of(65536))
    planted = disks.folder / f"000001{suffix}"
    in_the_way(planted, "directory")
    chunks = disks.area.chunks(space, keys_of("k", 1))
    assert eventually(lambda: tier.put(chunks, soon()), lambda put: put == [OK])
    assert [file.name for file in files_of(disks.folder, ".slab") if file.is_file()] == [
        "000002.slab"
    ]
    assert planted.is_dir()


@pytest.mark.parametrize("kind", KINDS)
def test_a_mark_that_is_no_file_is_refused(disks: Disks, kind: str) -> None:
    """The error names it and the remedy."""
    disks.open().close()
    in_the_way(disks.folder / "kvd-disk", kind)
    with pytest.raises(TierError, match=f"{PLACE}: kvd-disk is a {kind}, no .* remove it if"):
        disks.open()


def put_sealed(disks: Disks, tier: DiskTier, space: Space, keys: list[bytes]) -> None:
    """Put chunks with the heads that the service gives them, a few at a time."""
    for at in range(0, len(keys), 8):
        chunks = disks.area.chunks(space, keys[at : at + 8])
        for chunk in chunks:
            chunk.head = seal(space, chunk.key, chunk.coverage, chunk.checksum, b"")
        put_all(tier, chunks)


def test_records_that_are_torn(disks: Disks, caplog: pytest.LogCaptureFixture) -> None:
    """With any byte of its records changed the index opens, and the seal finds what is wrong.

    Records that cannot be are dropped, counted and told of.
    """
    tier = disks.open("512MiB")
    space = begun(tier, space_of(4096))
    keys = keys_of("k", 2 * slabs.RECORD_BYTES)
    put_sealed(disks, tier, space, keys)
    tier.close()
    (index,) = files_of(disks.folder, ".index")
    raw = bytearray(index.read_bytes())
    for slot in range(1, len(keys), 2):
        at = slabs.HEADER_BYTES + slot * slabs.RECORD_BYTES + slot // 2
        raw[at] ^= 0xC0
    index.write_bytes(raw)
    tier = disks.open("512MiB")
    assert tier.damaged_records == 2  # the length of a key, and the highest byte of a sequence
    (line,) = [each.getMessage() for each in caplog.records if each.levelno >= logging.WARNING]
    assert "damaged records in its index: 2; their chunks are dropped" in line
    tier.open_space(space)
    back = disks.area.empties(space, keys)
    for number, (chunk, outcome) in enumerate(zip(back, tier.get(back, soon()), strict=True)):
        assert outcome is OK or (outcome is ABSENT and number % 2)
        if outcome is OK:
            with contextlib.suppress(Damaged):
                check = unseal(chunk.head, space, chunk.key).checksum
                assert check == checksum_of(chunk.shares)
                continue
            assert number % 2
    put_all(tier, disks.area.chunks(space, keys_of("more", 8)))
    assert disks.got(tier, space, keys_of("more", 8)) == [OK] * 8


def test_a_record_that_a_power_loss_brought_back(disks: Disks) -> None:
    """Where another chunk has been written into a record's slot, the seal says so."""
    tier = disks.open()
    space = begun(tier, space_of(8192))
    put_all(tier, disks.area.chunks(space, [b"old"]))
    (index,) = files_of(disks.folder, ".index")
    old = index.read_bytes()
    tier.remove(space, [b"old"])
    put_sealed(disks, tier, space, keys_of("new", 40))  # a slab has fewer slots
    tier.close()
    index.write_bytes(old)
    tier = disks.open()
    back = disks.area.empty(space, b"old")
    assert tier.get([back], soon()) == [OK]
    with pytest.raises(OtherChunk):
        unseal(back.head, space, b"old")


def test_two_records_of_one_key(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a process ends between a new record and the end of the old one, the new one counts."""
    tier = disks.open()
    space = begun(tier, space_of(8192))
    put_all(tier, disks.area.chunks(space, [b"k", b"other"]))
    with monkeypatch.context() as patch:
        patch.setattr(slabs.Slab, "erase_records", lambda *_: None)
        put_all(tier, [disks.area.chunk(space, b"k", salt=1)])
    tier = disks.reopen(tier)
    assert tier.capacity().chunks == 2
    back = disks.area.empty(space, b"k")
    assert tier.get([back], soon()) == [OK]
    assert is_whole(back, salt=1)


@pytest.mark.parametrize(
    "text", [b"", b"{}", b"\xff" * 100, b'{"version":7,"check":0}', b"[" * 100_000]
)
def test_the_table_of_salts_is_damaged(
    disks: Disks, text: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    """It is set aside, no salt is known, and the directory serves."""
    tier = disks.open()
    tier.note_salt(b"n" * 16, b"a salt..")
    tier.close()
    (disks.folder / "salts").write_bytes(text)
    tier = disks.open()
    assert (disks.folder / "salts.damaged").read_bytes() == text
    assert "the table of salts is damaged" in caplog.text
    assert tier.salt(b"n" * 16) == b""
    assert tier.note_salt(b"n" * 16, b"another.") == b""
    assert disks.reopen(tier).salt(b"n" * 16) == b"another."


def test_a_salt_is_durable_before_it_counts(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A salt that cannot be made durable is not noted, and the one before goes on."""
    tier = disks.open()
    tier.note_salt(b"n" * 16, b"before..")
    synced: list[str] = []
    real, write = os.fsync, os.write

    def sync(fd: int) -> None:
        synced.append(Path(f"/proc/self/fd/{fd}").readlink().name)
        real(fd)

    calls: tuple[tuple[str, Callable[..., Any]], ...] = (
        ("fsync", failing()),
        ("write", lambda fd, text: write(fd, text[:-1])),
    )
    for name, call in calls:
        with monkeypatch.context() as patch:
            patch.setattr(f"kvd.tier.disk.directory.os.{name}", call)
            with pytest.raises(TierError, match="reset cannot be noted"):
                tier.note_salt(b"n" * 16, b"after...")
        assert tier.salt(b"n" * 16) == b"before.."
    with monkeypatch.context() as patch:
        patch.setattr("kvd.tier.disk.directory.os.fsync", sync)
        assert tier.note_salt(b"n" * 16, b"after...") == b"before.."
        assert tier.note_salt(b"n" * 16, b"after...") == b"after..."
    assert synced == ["salts.new", PLACE]


def test_without_o_direct(disks: Disks, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file system without O_DIRECT is served through the page cache, and the log says so."""
    monkeypatch.setattr("kvd.tier.disk.tier.Alignment.of", lambda _folder: Alignment(1, 1))
    tier = disks.open()
    assert "no O_DIRECT" in tier.described
    space = begun(tier, space_of(1000, 37))
    put_all(tier, disks.area.chunks(space, keys_of("k", 9)))
    assert disks.got(tier, space, keys_of("k", 9)) == [OK] * 9


@contextlib.contextmanager
def frozen(place: Path) -> Iterator[None]:
    """Writes to a file system hang in the kernel."""
    root = os.open(place, os.O_RDONLY)
    fcntl.ioctl(root, _FIFREEZE, 0)
    try:
        yield
    finally:
        fcntl.ioctl(root, _FITHAW, 0)
        os.close(root)


def test_a_disk_that_hangs(tmp_path: Path, disks: Disks) -> None:
    """While a write hangs in the kernel, what needs no disk is answered, and gets are served."""
    image, place = tmp_path / "image", tmp_path / "frozen"
    image.write_bytes(bytes(24 * MIB))
    place.mkdir()
    for command in (f"mkfs.ext4 -q {image}", f"mount -o loop {image} {place}"):
        if subprocess.run(command.split(), check=False).returncode:
            pytest.skip(f"cannot be done here: {command}")
    try:
        tier = disks.open("4MiB", "0", place / PLACE)
        space = begun(tier, space_of(65536))
        keys = keys_of("k", 4)
        put_all(tier, disks.area.chunks(space, keys))
        late = disks.area.chunks(space, keys_of("late", 2))
        with ThreadPoolExecutor(1) as writer:
            with frozen(place):
                putting = writer.submit(tier.put, late, soon())
                with pytest.raises(TimeoutError):
                    putting.result(0.2)
                assert tier.contains(space, keys, soon()) == [True] * 4
                assert disks.got(tier, space, keys) == [OK] * 4
                assert tier.capacity().chunks == 4
                assert tier.take_dropped() == []
                assert sum(map(len, tier.scan(space))) == 4
            assert putting.result(PATIENCE) == [OK] * 2
        tier.close()
    finally:
        subprocess.run(["umount", place], check=False)


_WRITER = """
import sys
from kvd.tier.contract import BackendOptions
from kvd.tier.disk import DiskTier
from tests.tier.areas import Area, begun, keys_of, space_of
from tests.tier.conformance import soon
area = Area(4 * 2**20)
tier = DiskTier.open(BackendOptions(sys.argv[1], {"size": "6MiB", "floor": "0"}), area.memory)
space = begun(tier, space_of(20480, 500))
for at in range(10**6):
    keys = keys_of(f"{sys.argv[2]}-{at}", 5)
    outcomes = tier.put(area.chunks(space, keys), soon())
    gone = [key for _, some in tier.take_dropped() for key in some]
    kept = [key for key, outcome in zip(keys, outcomes) if outcome == 0]
    print(" ".join(key.hex() for key in kept), "|", " ".join(key.hex() for key in gone), flush=True)
"""


def test_killed_in_mid_write(disks: Disks) -> None:
    """Whenever a writer is killed, what it acknowledged is whole, and nothing else is found."""
    known: set[bytes] = set()
    space = space_of(20480, 500)
    for turn in range(3):
        with subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(disks.folder), str(turn)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[2],
        ) as writer:
            assert writer.stdout is not None
            for _ in range(20 + 43 * turn):
                known = known_after(known, writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            # Lines after the last one that was read were acknowledged, too.
            for line in writer.stdout:
                if line.endswith("\n"):
                    known = known_after(known, line)
        tier = disks.open("6MiB")
        tier.open_space(space)
        listed = {key for piece in tier.scan(space) for key, _ in piece}
        # A batch that was under way may have been written, and may have evicted as many.
        assert len(known - listed) <= 5
        assert len(listed - known) <= 5
        for key in sorted(listed):
            assert disks.got(tier, space, [key]) == [OK]
        known = listed
        tier.check_integrity()
        tier.close()


def known_after(known: set[bytes], line: str) -> set[bytes]:
    """What is kept after a line of the writer."""
    kept, gone = ({bytes.fromhex(key) for key in part.split()} for part in line.split("|"))
    return (known | kept) - gone


def test_a_record_of_a_large_chunk_in_a_slab_of_small_slots(disks: Disks) -> None:
    """An index that was written to the wrong place costs that chunk, once; then it is put anew."""
    tier = disks.open("64MiB")
    small, large = (begun(tier, space_of(size, name=b"%016d" % size)) for size in (4096, 65536))
    for space, key in ((small, b"s"), (large, b"l")):
        put_all(tier, [disks.area.chunk(space, key)])
    tier.close()
    one, two = files_of(disks.folder, ".index")
    begin, end = slabs.HEADER_BYTES, slabs.HEADER_BYTES + slabs.RECORD.itemsize
    with one.open("r+b") as index:
        index.seek(begin)
        index.write(struct.pack("<Q", 1000) + two.read_bytes()[begin + 8 : end])
    tier = disks.open("64MiB")
    tier.open_space(large)
    with pytest.raises(TierError, match="too small for its chunk"):
        disks.got(tier, large, [b"l"])
    assert disks.got(tier, large, [b"l"]) == [ABSENT]
    put_all(tier, [disks.area.chunk(large, b"l")])
    assert disks.got(tier, large, [b"l"]) == [OK]
