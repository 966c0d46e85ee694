"""The disk tier beside fio, on one device, with files of one size, block size and depth.

``python bench/disk.py DIRECTORY [--bytes 2GiB] [--rounds 3] [--records 1000000]``. Each round
writes files over that are full, as a tier's are after a while, and reads them; all sides in turn,
through O_DIRECT, four threads each that go through the file together; figures are medians of the
rounds. kvd evicts for each chunk that it writes, and has a tail of 4 KiB beside each, which does
not count as bytes.

fio uses one buffer a thread again and again, a tier all of a pool, whose pages the kernel has to
look up one by one. So there is a plain loop, too: four threads that call pwritev and preadv with
the memory that kvd is given, and do nothing else. ``checked``: with the xxh3-64 that the tier's
process computes of each chunk, before a put and after a get. ``huge``: with memory in pages of
2 MiB (MADV_HUGEPAGE), as a pool on hugetlbfs has.
"""

import argparse
import json
import mmap
import os
import random
import resource
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from harness import MIB, Figures, median
from needs import check_needs, missing_program

from kvd.outcomes import Outcome
from kvd.tier.batches import checksum_of
from kvd.tier.contract import BackendOptions, Chunk, Space
from kvd.tier.disk import DiskTier
from kvd.tier.disk.slabs import Record, pack_header
from kvd_proto.text import parse_size

THREADS = 4
POOL = 64 * MIB
KEY = 34
REBUILDS = 3
SLOTS = 20_000  # of a slab in the rebuild
SLOT_BYTES = 4096
Taken = tuple[float, float]  # GB/s, and ms of processor a GB


def _fio(folder: Path, nbytes: int, block: int) -> Iterator[Taken]:
    file = folder / "fio"
    _fio_run(file, "write", nbytes, block)
    for direction in ("write", "read"):
        job = _fio_run(file, direction, nbytes, block)
        seconds = job[direction]["runtime"] / 1e3
        cpu = THREADS * seconds * (job["usr_cpu"] + job["sys_cpu"]) / 100
        yield job[direction]["bw_bytes"] / 1e9, cpu / nbytes * 1e12
    file.unlink()


def _fio_run(file: Path, direction: str, nbytes: int, block: int) -> dict[str, Any]:
    others = (THREADS - 1) * block  # each thread has every fourth block
    told = subprocess.run(
        [
            *("fio", "--name=t", f"--filename={file}", f"--bs={block}", "--direct=1"),
            *(f"--rw={direction}:{others}", "--ioengine=psync", f"--numjobs={THREADS}"),
            *(f"--size={nbytes - others}", f"--offset_increment={block}"),
            *(f"--io_size={nbytes // THREADS}", f"--filesize={nbytes}"),
            *("--fallocate=posix", "--thread", "--group_reporting", "--output-format=json"),
        ],
        check=True,
        stdout=subprocess.PIPE,
    ).stdout
    job: dict[str, Any] = json.loads(told)["jobs"][0]
    if job[direction]["io_bytes"] != nbytes:
        raise RuntimeError(f"fio moved {job[direction]['io_bytes']} of {nbytes} bytes")
    return job


def _memory(*, huge: bool) -> memoryview:
    """What stands for a pool: shared memory in small pages, or private memory in large ones."""
    kind = mmap.MAP_PRIVATE if huge else mmap.MAP_SHARED
    memory = mmap.mmap(-1, POOL, flags=kind | mmap.MAP_ANONYMOUS)
    if huge:
        memory.madvise(mmap.MADV_HUGEPAGE)
    view = memoryview(memory)
    view[:] = random.Random(0).randbytes(MIB) * (POOL // MIB)
    return view


def _timed(turn: Callable[[], None], nbytes: int) -> Taken:
    """Run it in as many threads as the service has."""
    threads = [threading.Thread(target=turn) for _ in range(THREADS)]
    before, started = _cpu(), time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took, cpu = time.perf_counter() - started, _cpu() - before
    return nbytes / took / 1e9, cpu / nbytes * 1e12


def _plain(folder: Path, nbytes: int, block: int, *, huge: bool = False) -> Iterator[Taken]:
    """The calls alone, from and to the same memory as kvd's."""
    memory, file = _memory(huge=huge), folder / "plain"
    fd = os.open(file, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    os.posix_fallocate(fd, 0, nbytes)
    moved: list[Taken] = []
    for move in (os.pwritev, os.pwritev, os.preadv):
        offsets = iter(range(0, nbytes, block))

        def turn(
            move: Callable[[int, list[memoryview], int], int] = move,
            offsets: Iterator[int] = offsets,
        ) -> None:
            for at in offsets:  # the interpreter's lock is held from one to the next
                if move(fd, [memory[at % POOL : at % POOL + block]], at) != block:
                    raise OSError("a block was moved in part")

        moved.append(_timed(turn, nbytes))
    yield from moved[1:]  # the first write is into room that is only allocated
    os.close(fd)
    file.unlink()


class _Side:
    """kvd with chunks of one block, so many in a batch."""

    def __init__(
        self, folder: Path, nbytes: int, block: int, batch: int, *, checked: bool, huge: bool
    ) -> None:
        self.checked = checked
        self.memory = _memory(huge=huge)
        options = BackendOptions(
            str(folder / "tier"), {"size": str(nbytes), "floor": "1GiB", "threads": "4"}
        )
        self.tier = DiskTier.open(options, self.memory)
        self.space = Space(b"n" * 16, (block,), 256)
        self.tier.open_space(self.space)
        count = nbytes * 7 // 8 // block // batch * batch  # slabs have tails, too
        self.nbytes = count * block
        self.sets = [
            [
                [self._chunk(number, block) for number in range(at, at + batch)]
                for at in range(begin, begin + count, batch)
            ]
            for begin in (0, count)
        ]

    def _chunk(self, number: int, block: int) -> Chunk:
        at = number * block % POOL
        key = number.to_bytes(8, "little").ljust(KEY, b".")
        share = self.memory[at : at + block]
        return Chunk(self.space, key, (share,), b"h" * 200, (0, 1, 0), number)

    def put(self, batch: list[Chunk]) -> list[Outcome]:
        """Check words first, as the service does."""
        self._check(batch)
        return self.tier.put(batch, time.monotonic() + 60)

    def get(self, batch: list[Chunk]) -> list[Outcome]:
        """Check words last."""
        outcomes = self.tier.get(batch, time.monotonic() + 60)
        self._check(batch)
        return outcomes

    def _check(self, batch: list[Chunk]) -> None:
        if self.checked:
            for chunk in batch:
                checksum_of(chunk.shares)

    def run(self, which: int, work: Callable[[list[Chunk]], list[Outcome]]) -> Taken:
        """All batches of a set."""
        left, lock = iter(self.sets[which]), threading.Lock()
        problems: list[str] = []

        def turn() -> None:
            while True:
                with lock:
                    batch = next(left, None)
                if batch is None:
                    return
                if set(work(batch)) != {Outcome.OK}:
                    problems.append("a batch did not go well")

        taken = _timed(turn, self.nbytes)
        if problems:
            raise RuntimeError(problems[0])
        return taken


def _kvd(
    folder: Path, nbytes: int, block: int, batch: int, *, checked: bool = False, huge: bool = False
) -> Iterator[Taken]:
    side = _Side(folder, nbytes, block, batch, checked=checked, huge=huge)
    side.run(0, side.put)
    yield side.run(1, side.put)
    yield side.run(1, side.get)
    side.tier.close()
    shutil.rmtree(folder / "tier")


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measure(folder: Path, nbytes: int, rounds: int) -> Figures:
    """GB/s and ms of processor a GB, of each side; and the ratio of medians to fio."""
    sides: dict[str, Callable[[], Iterator[Taken]]] = {
        "fio_1MiB": lambda: _fio(folder, nbytes, MIB),
        "plain_1MiB": lambda: _plain(folder, nbytes, MIB),
        "kvd_1MiB": lambda: _kvd(folder, nbytes, MIB, 1),
        "kvd_1MiB_checked": lambda: _kvd(folder, nbytes, MIB, 1, checked=True),
        "fio_4MiB": lambda: _fio(folder, nbytes, 4 * MIB),
        "plain_4MiB": lambda: _plain(folder, nbytes, 4 * MIB),
        "kvd_4x1MiB": lambda: _kvd(folder, nbytes, MIB, 4),
        "kvd_4x1MiB_checked": lambda: _kvd(folder, nbytes, MIB, 4, checked=True),
        "plain_4MiB_huge": lambda: _plain(folder, nbytes, 4 * MIB, huge=True),
        "kvd_4x1MiB_huge": lambda: _kvd(folder, nbytes, MIB, 4, huge=True),
        "kvd_4x1MiB_huge_checked": lambda: _kvd(folder, nbytes, MIB, 4, checked=True, huge=True),
        "kvd_64x64KiB": lambda: _kvd(folder, nbytes, MIB // 16, 64),
    }
    taken: dict[str, list[list[Taken]]] = {name: [] for name in sides}
    for turn in range(rounds):
        order = list(sides)
        for name in order[turn % len(order) :] + order[: turn % len(order)]:
            taken[name].append(list(sides[name]()))
    figures: Figures = {}
    for name, all_rounds in taken.items():
        for direction, which in (("write", 0), ("read", 1)):
            speeds, cpus = zip(*(pair[which] for pair in all_rounds), strict=True)
            figures[f"{name}_{direction}_GBps"] = median(speeds)
            figures[f"{name}_{direction}_cpu_ms_per_GB"] = median(cpus)
            if not name.startswith("fio"):
                beside = "fio_1MiB" if "_1MiB" in name else "fio_4MiB"
                figures[f"{name}_{direction}_of_fio"] = median(
                    own[which][0] / theirs[which][0]
                    for own, theirs in zip(all_rounds, taken[beside], strict=True)
                )
    return figures


def measure_rebuild(folder: Path, count: int) -> Figures:
    """Seconds until a directory of so many records is open; the slabs' bytes are holes."""
    place = folder / "rebuild"
    options = BackendOptions(str(place), {"size": str(count * SLOT_BYTES * 2), "floor": "0"})
    tier = DiskTier.open(options, memoryview(b""))
    tier.close()
    space = Space(b"n" * 16, (3000,), 256)
    for number, at in enumerate(range(0, count, SLOTS), 1):
        slots = min(SLOTS, count - at)
        keys = (i.to_bytes(8, "big").rjust(KEY, b".") for i in range(at, at + slots))
        written = [Record(at + i, 0, space.id, (0, 1, 0), key) for i, key in enumerate(keys, 1)]
        raw = b"".join(record.pack() for record in written)
        (place / f"{number:06}.index").write_bytes(pack_header(slots, SLOT_BYTES) + raw)
        with (place / f"{number:06}.slab").open("wb") as file:
            file.truncate(slots * SLOT_BYTES)
    took, cpus, scans = [], [], []
    for _ in range(REBUILDS):
        before, started = _cpu(), time.perf_counter()
        tier = DiskTier.open(options, memoryview(b""))
        took.append(time.perf_counter() - started)
        cpus.append(_cpu() - before)
        started = time.perf_counter()
        if sum(map(len, tier.scan(space))) != count:
            raise RuntimeError("not all records are found")
        scans.append(time.perf_counter() - started)
        tier.close()
    shutil.rmtree(place)
    return {
        "rebuild_records": count,
        "rebuild_seconds": median(took),
        "rebuild_cpu_seconds": median(cpus),
        "scan_seconds": median(scans),
    }


def main() -> None:
    """Print all figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path, help="on the device; a folder is made in it")
    parser.add_argument("--bytes", type=parse_size, default="2GiB", help="of the files of a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--records", type=int, default=1_000_000)
    arguments = parser.parse_args()
    check_needs(missing_program("fio", "fio") if arguments.rounds else "")
    folder = Path(tempfile.mkdtemp(prefix="kvd-bench-disk-", dir=arguments.directory))
    try:
        figures = measure_rebuild(folder, arguments.records) if arguments.records else {}
        figures |= measure(folder, arguments.bytes, arguments.rounds) if arguments.rounds else {}
    finally:
        shutil.rmtree(folder)
    for name, value in figures.items():
        print(f"{name:45} {float(np.round(value, 3)):>12g}")


if __name__ == "__main__":
    main()
