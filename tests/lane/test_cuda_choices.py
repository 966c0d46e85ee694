"""What the CUDA backend decides without a driver: thresholds, options, lists, the file of both."""

import os
import random
from collections import deque
from pathlib import Path

import pytest
from msgspec.structs import replace

from kvd.errors import LaneError
from kvd.lane.devices.cuda.calibration_file import Calibration, Identity, load, path_in, save
from kvd.lane.devices.cuda.copier import Thresholds
from kvd.lane.devices.cuda.flow import INLINE_NS, RUN_NS, run_ns
from kvd.lane.devices.cuda.measuring import COUNTS, LENGTHS, crossover, row
from kvd.lane.devices.cuda.move_kernel import Ring
from kvd.lane.devices.cuda.options import Options, read
from kvd.lane.devices.device import Direction

IDENTITY = Identity("0.1.0", 13010, "cuda:00", "a device", "in batches, no kernel")
FOUND = Calibration(IDENTITY, {Direction.LOAD: [0, 0, 8192], Direction.STORE: []}, any_order=False)


@pytest.mark.parametrize("wins", range(len(LENGTHS) + 1))
def test_the_crossover_is_where_the_kernel_stops_winning(wins: int) -> None:
    """For each number of lengths at which the kernel wins, and with few of them measured."""
    asked: list[int] = []

    def kernel_wins(length: int) -> bool:
        asked.append(length)
        return LENGTHS.index(length) < wins

    wanted = (0, *LENGTHS[1:], 2 * LENGTHS[-1])[wins]
    assert crossover(LENGTHS, kernel_wins) == wanted
    assert len(asked) == len(set(asked)) <= 4


def test_numbers_of_runs_between_two_measured_ones_are_as_the_smaller() -> None:
    """Fewer than the smallest go by the engine, more than the largest as that."""
    thresholds = Thresholds({Direction.LOAD: row([(4, 8192), (16, 16384)])})
    found = {count: thresholds.of(Direction.LOAD, count) for count in (0, 1, 3, 4, 15, 16, 9999)}
    assert found == {0: 0, 1: 0, 3: 0, 4: 8192, 15: 8192, 16: 16384, 9999: 16384}
    assert thresholds.of(Direction.STORE, 16) == 0


def test_what_is_measured_are_powers_of_two() -> None:
    """So each number of runs has its place in a row."""
    assert all(count.bit_count() == 1 for count in COUNTS)
    assert row([(count, count) for count in COUNTS])[-1] == COUNTS[-1]


def test_options_are_read_from_a_text() -> None:
    """Every name, with units; an empty text names none."""
    assert read("") == Options()
    text = (
        "piece=4MiB,bulk=16MiB,flight=128MiB,kernel=8KiB,blocks=12,order=stream,overlap=0,inline=8"
    )
    chosen = read(text)
    assert (chosen.piece_bytes, chosen.bulk_bytes) == (4 * 2**20, 16 * 2**20)
    assert (chosen.bytes_in_flight, chosen.kernel_blocks) == (128 * 2**20, 12)
    assert chosen.kernel_below == dict.fromkeys(Direction, 8192)
    assert (chosen.any_order, chosen.overlap, chosen.inline_runs) == (False, False, 8)


@pytest.mark.parametrize(
    "text", ["bulk", "bulk=", "bulk=16GiB", "bulk=many", "order=both", "blok=1", "overlap=2"]
)
def test_an_option_that_there_is_not_is_refused(text: str) -> None:
    """The error names the item and where the names are."""
    with pytest.raises(LaneError, match=rf"LANE_CUDA={text}: '{text}' .* {Options.__module__}"):
        read(text)


def test_lists_in_a_ring_never_overlap() -> None:
    """Whatever is taken while others are in use has room of its own, or there is none."""
    rng, words = random.Random(1), 100
    ring, used = Ring(words), deque[tuple[int, int, int]]()
    refused = 0
    for _ in range(5000):
        if used and rng.random() < 0.5:
            ring.give_back(used.popleft()[2])
            continue
        size = rng.randint(1, 40)
        room = ring.take(size)
        if room is None:
            refused += 1
            assert used
            continue
        at, taken = room
        assert 0 <= at <= words - size
        assert all(at + size <= begin or end <= at for begin, end, _ in used)
        used.append((at, at + size, taken))
    assert refused


def test_what_was_measured_is_kept(tmp_path: Path) -> None:
    """Read as it was written, and nothing else lies there."""
    place = path_in(tmp_path, "cuda:00")
    assert load(place, IDENTITY) is None
    save(place, FOUND)
    assert load(place, IDENTITY) == FOUND
    assert [path.name for path in tmp_path.iterdir()] == ["calibration-cuda-00.json"]


@pytest.mark.parametrize(
    "change",
    [
        {"kvd": "0.2.0"},
        {"driver": 13000},
        {"device": "cuda:01"},
        {"model": "x"},
        {"ways": "one by one"},
    ],
    ids=str,
)
def test_what_was_measured_of_something_else_is_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: dict[str, object]
) -> None:
    """Another kvd, driver, device or way to copy: a line says so."""
    place = path_in(tmp_path, "cuda:00")
    save(place, FOUND)
    caplog.set_level("INFO")
    assert load(place, replace(IDENTITY, **change)) is None
    (record,) = caplog.records
    assert "is of another device, driver, kvd or way to copy" in record.getMessage()


@pytest.mark.parametrize("data", [b"", b"{}", b'{"identity": 1', b"\xff"], ids=repr)
def test_a_file_that_is_not_understood_is_measured_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, data: bytes
) -> None:
    """One line, and the next measurement is kept over it."""
    place = path_in(tmp_path, "cuda:00")
    place.write_bytes(data)
    assert load(place, IDENTITY) is None
    (record,) = caplog.records
    assert "is not understood" in record.getMessage()
    save(place, FOUND)
    assert load(place, IDENTITY) == FOUND


def test_a_folder_that_cannot_be_written_costs_a_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The lane serves, and the next one measures again."""
    save(path_in(tmp_path / "gone", "cuda:00"), FOUND)
    (record,) = caplog.records
    assert "cannot be written" in record.getMessage()


def test_what_others_put_there_is_neither_followed_nor_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A link in the file's place is not read through, and replaced; nothing is written through."""
    place, theirs = path_in(tmp_path, "cuda:00"), tmp_path / "theirs"
    save(theirs, FOUND)
    before = theirs.read_bytes()
    place.symlink_to(theirs)
    place.with_suffix(f".{os.getpid()}").symlink_to(theirs)
    assert load(place, IDENTITY) is None
    assert "cannot be read" in caplog.text
    found = Calibration(IDENTITY, {}, any_order=True)
    save(place, found)
    assert (theirs.read_bytes(), place.is_symlink()) == (before, False)
    assert load(place, IDENTITY) == found


def test_a_file_of_another_user_is_not_believed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who it belongs to is looked at: a directory with the sticky bit lets others in."""
    place = path_in(tmp_path, "cuda:00")
    save(place, FOUND)
    monkeypatch.setattr(os, "geteuid", lambda: place.stat().st_uid + 1)
    assert load(place, IDENTITY) is None
    assert "is no file of user" in caplog.text


def test_what_the_driver_takes_for_a_run_is_learnt_from_many_runs() -> None:
    """A shorter time at once, a longer one by a half a step; few runs tell nothing."""
    assert run_ns(RUN_NS, 500, 5_000) == 10
    assert run_ns(RUN_NS, 500, 5_000_000) == pytest.approx(825)
    assert run_ns(RUN_NS, 8, 100) == RUN_NS
    slow = RUN_NS
    for _ in range(100):
        slow = run_ns(slow, 500, 500 * 2_000)
    assert slow == 2_000
    assert 64 * RUN_NS < INLINE_NS < 128 * RUN_NS
