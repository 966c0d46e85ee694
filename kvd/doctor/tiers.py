"""What lies below the pool, looked at by a process of its own: a disk that hangs hangs who asks.

That process tells what it finds as it goes, a line each, so that what it stood at is known when
its time is up. It is killed then and not waited for: what hangs in the kernel may not die.
"""

import contextlib
import errno
import importlib
import importlib.metadata
import json
import mmap
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from kvd.config.values import TierSetting, parse_tier
from kvd.doctor import Said, fail, ok, warn
from kvd.errors import ConfigError
from kvd.machine.room import Shortage
from kvd.metrics.reading import rate
from kvd.tier.backends import check_tiers, options_of
from kvd_proto.sizes import format_size

PATIENCE_SECONDS = 8.0
CHILD_SECONDS = 20.0  # for a process that looks at no tier
PROBE_SECONDS = 0.1  # to write, and as long to read
PROBE_BYTES = 256 * 2**20
BLOCK_BYTES = 2**20
PROBE_THREADS = 4
CONNECT_SECONDS = 2.0
MEMORY = frozenset(("tmpfs", "ramfs", "hugetlbfs"))
NETWORK = frozenset(("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "beegfs"))
_MOONCAKE = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
_MOUNTS = Path("/proc/self/mountinfo")
_BLOCK_DEVICES = Path("/sys/dev/block")

Facts = dict[str, Any]

left_behind: list[subprocess.Popen[bytes]] = []
"""Processes that were killed, and have ended or hang in the kernel."""


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """Where a directory lies, and how fast that is.

    exists: the directory is there; else the rest is of the nearest one above it that is.
    filesystem, mounted_at, source: of its mount. device: the disk's name; empty where it has none.
    medium: `NVMe`, `SSD`, `rotating`, `virtual disk`, `memory`, `network`, or `unknown`.
    held: bytes that the directory's files take. free, size: of the file system.
    direct: it takes I/O past the page cache. written, read: bytes a second, None if not measured.
    """

    exists: bool = False
    filesystem: str = ""
    mounted_at: str = ""
    source: str = ""
    device: str = ""
    medium: str = "unknown"
    size: int = 0
    free: int = 0
    held: int = 0
    writable: bool = False
    direct: bool = False
    written: float | None = None
    read: float | None = None


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """A shared store. package: its version; missing: why it cannot be used; refused: the master."""

    package: str = ""
    missing: str = ""
    master: str = ""
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class TierFacts:
    """One configured tier.

    problem: why it cannot be, or could not be looked at.
    hung: what was being done when the time was up; empty where it was not.
    """

    setting: TierSetting
    problem: str = ""
    hung: str = ""
    disk: DiskFacts | None = None
    store: StoreFacts | None = None


def ask(text: str) -> TierFacts:
    """Look at a tier, in bounded time.

    Raises:
        ConfigError: the text is no tier.
        OSError: no process can be started.
    """
    setting = parse_tier(text)
    try:
        check_tiers([setting])
    except ConfigError as error:
        return TierFacts(setting=setting, problem=str(error))
    said, problem, hung = run_python("-m", "kvd.doctor.tiers", text, seconds=PATIENCE_SECONDS)
    found: Facts = {}
    for line in said.decode(errors="replace").splitlines():
        if line.startswith("{"):  # what a library prints is not ours
            found |= json.loads(line)
    doing = found.pop("doing", "starting")
    disk = msgspec.convert(found, DiskFacts) if setting.kind == "disk" else None
    store = msgspec.convert(found, StoreFacts) if setting.kind == "mooncake" else None
    return TierFacts(
        setting=setting, problem=problem, hung=doing if hung else "", disk=disk, store=store
    )


def size_shortage(setting: TierSetting, disk: DiskFacts) -> Shortage | None:
    """Return why a disk tier's size cannot be reached, as its own process says at its start."""
    from kvd.tier.disk.directory import DiskOptions  # noqa: PLC0415  # few have one

    return DiskOptions.parse(options_of(setting)).shortage(disk.size, disk.free, disk.held)


def run_python(*arguments: str, seconds: float = CHILD_SECONDS) -> tuple[bytes, str, bool]:
    """What another process of this Python has printed, why it failed, and whether it hung.

    It is killed when its time is up, and not waited for.

    Raises:
        OSError: none can be started.
    """
    process = subprocess.Popen(
        [sys.executable, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        said, complained = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as late:
        process.kill()
        left_behind.append(process)
        for end in (process.stdout, process.stderr):
            if end is not None:
                end.close()
        return late.stdout or b"", "", True
    last = complained.decode(errors="replace").strip().rpartition("\n")[2]
    return said, (last or f"exit status {process.returncode}") if process.returncode else "", False


# ---------------------------------------------------- in the process of its own


def main() -> None:
    """Print what is found of the tier that the command line names."""
    setting = parse_tier(sys.argv[1])
    looks = {"disk": look_at_disk, "mooncake": look_at_store}
    for found in looks.get(setting.kind, lambda _: iter(()))(setting):
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def look_at_disk(setting: TierSetting) -> Iterator[Facts]:
    """Yield what is so of a directory, piece by piece: names of `DiskFacts`, and `doing`."""
    wanted = Path(setting.target)
    yield {"doing": f"looking at {wanted}"}
    yield _mount(wanted)  # by its name alone, so that what hangs is known by its mount
    wanted = wanted.resolve()
    yield _mount(wanted)
    place = next(each for each in (wanted, *wanted.parents) if each.is_dir())
    yield {"exists": place == wanted, "doing": f"asking the file system of {place} for its room"}
    room = os.statvfs(place)
    yield {"size": room.f_blocks * room.f_frsize, "free": room.f_bavail * room.f_frsize}
    yield {
        "held": _held(wanted) if place == wanted else 0,
        "writable": os.access(place, os.W_OK | os.X_OK),
        "doing": f"writing and reading a file in {place}",
    }
    if os.access(place, os.W_OK | os.X_OK):
        yield probe(place, room.f_bavail * room.f_frsize)


def _mount(place: Path) -> Facts:
    """The mount that a path lies on, without touching it, and the device below."""
    found: list[str] = []
    for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        words = line.split()
        at = words[4].encode("latin-1", "replace").decode("unicode_escape")
        if place.is_relative_to(at) and (not found or len(at) >= len(found[4])):
            found = [*words[:4], at, *words[5:]]
    kind, source = found[found.index("-") + 1 : found.index("-") + 3]
    told: Facts = {"filesystem": kind, "mounted_at": found[4], "source": source}
    if kind in MEMORY:
        return told | {"medium": "memory"}
    if kind in NETWORK:
        return told | {"medium": "network"}
    number = found[2]
    if number.startswith("0:") and source.startswith("/dev/"):
        status = Path(source).stat()
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return told | _device(_BLOCK_DEVICES / number)


def _device(entry: Path) -> Facts:
    """What a block device is; one that is made of others is what its first one is."""
    if not entry.exists():
        return {}
    device = entry.resolve()
    if (device / "partition").exists():
        device = device.parent
    slaves = sorted((device / "slaves").glob("*"))
    if slaves:
        return _device(slaves[0])
    if device.name.startswith("nvme"):
        medium = "NVMe"
    elif device.name.startswith(("vd", "xvd")):  # which say that they rotate, whatever is below
        medium = "virtual disk"
    else:
        flag = (device / "queue/rotational").read_text(encoding="ascii").strip()
        medium = "rotating" if flag == "1" else "SSD"
    return {"device": device.name, "medium": medium}


def _held(place: Path) -> int:
    total = 0
    for folder, _, names in os.walk(place):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512  # noqa: PTH118
    return total


def probe(place: Path, free: int) -> Facts:
    """Write and read a file without a name for a moment, past the page cache, as a tier does."""
    try:
        file = _open_unnamed(place, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return {"direct": False}
    blocks = max(PROBE_THREADS, min(PROBE_BYTES, free // 100) // BLOCK_BYTES)
    try:
        written, rate = _rate(file, blocks, write=True)
        return {"direct": True, "written": rate, "read": _rate(file, written, write=False)[1]}
    finally:
        os.close(file)


def _open_unnamed(place: Path, flags: int) -> int:
    try:
        return os.open(place, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT}:
            raise
    path = place / f".kvd-doctor-{os.getpid()}"
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    path.unlink()
    return file


def _rate(file: int, blocks: int, *, write: bool) -> tuple[int, float]:
    """How many blocks, and bytes a second; at most `blocks`, each once, for a moment."""
    turn, begin = count(), time.perf_counter()
    move = os.pwritev if write else os.preadv

    def work(_: int) -> int:
        moved = 0
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:
            buffer[:] = os.urandom(BLOCK_BYTES)
            for block in turn:
                if block >= blocks or (moved and time.perf_counter() - begin > PROBE_SECONDS):
                    return moved
                move(file, [buffer], block * BLOCK_BYTES)
                moved += 1
        return moved

    with ThreadPoolExecutor(PROBE_THREADS) as threads:
        moved = sum(threads.map(work, range(PROBE_THREADS)))
    return moved, moved * BLOCK_BYTES / (time.perf_counter() - begin)


def look_at_store(setting: TierSetting) -> Iterator[Facts]:
    """Yield what is so of Mooncake's package and master: names of `StoreFacts`, and `doing`."""
    master = setting.options["master"]
    yield {"master": master, "doing": f"connecting to {master}"}
    host, _, port = master.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_SECONDS).close()
    except OSError as error:
        yield {"refused": str(error)}
    yield {"doing": "importing mooncake.store"}
    try:
        importlib.import_module("mooncake.store")
    except ImportError as error:
        yield {"missing": str(error)}
        return
    for name in _MOONCAKE:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield {"package": f"{name} {importlib.metadata.version(name)}"}


def said_of_tier(tier: TierFacts) -> Iterator[Said]:
    """Its disk or its store is there, is what it seems, and has room."""
    name = tier.setting.text
    if tier.problem:
        told = tier.problem if name in tier.problem else f"{name}: {tier.problem}"
        yield fail(told, "until then the daemon serves from memory alone")
    elif tier.hung:
        where = f" ({_place_of(tier.disk)})" if tier.disk and tier.disk.mounted_at else ""
        yield fail(
            f"{name}: it hangs: no answer within {PATIENCE_SECONDS:g} s of {tier.hung}{where}",
            "look at dmesg, and at the mount's server if it has one; a tier that hangs is set"
            " aside, and costs misses",
        )
    elif tier.disk:
        yield from _disk_tier(name, tier.setting, tier.disk)
    elif tier.store:
        yield from _store_tier(name, tier.store)
    else:
        yield ok(f"{name}: its options are right; there is nothing to look at")


def _place_of(disk: DiskFacts) -> str:
    named = f"{disk.device}, " if disk.device and not disk.source.endswith(disk.device) else ""
    return f"{disk.filesystem} at {disk.mounted_at} of {disk.source} ({named}{disk.medium})"


def _disk_tier(name: str, setting: TierSetting, disk: DiskFacts) -> Iterator[Said]:
    text = f"{name}: {_place_of(disk)}, {format_size(disk.free)} of {format_size(disk.size)} free"
    if not disk.writable:
        missing = "" if disk.exists else ", and it is not there yet"
        yield fail(
            f"{text}; this user may not write there{missing}",
            f"mkdir -p {setting.target}, owned by the daemon's user, mode 0700; under systemd"
            f" ReadWritePaths={setting.target} too, in a container a volume",
        )
        return
    if disk.written and disk.read:
        text += (
            f"; {PROBE_THREADS} threads write {rate(disk.written)} and read {rate(disk.read)}"
            f" in blocks of {format_size(BLOCK_BYTES)}"
        )
    problems = list(_disk_problems(setting, disk))
    for problem, remedy in problems:
        yield warn(f"{text}; {problem}", remedy)
        text = name
    if not problems:
        yield ok(text)


def _disk_problems(setting: TierSetting, disk: DiskFacts) -> Iterator[tuple[str, str]]:
    if disk.medium == "memory":
        what = "this is memory: it takes what the pool could have, and does not outlive a reboot"
        yield what, "a directory on a disk, or a larger cpu_bytes in its place"
    elif disk.medium in {"network", "rotating"}:
        over = "a file system over a network" if disk.medium == "network" else "a rotating disk"
        yield over, "a local NVMe: loading from here is hardly faster than computing"
    elif disk.mounted_at == "/":
        remedy = (
            "if a disk was to be mounted there, it is not (findmnt); else a floor of free space"
        )
        yield "this is the root file system", f"{remedy} is left to the system"
    elif not disk.direct:
        yield "it takes no I/O past the page cache (O_DIRECT)", "ext4 or xfs on a local disk"
    if shortage := size_shortage(setting, disk):
        yield shortage.text, shortage.remedy


def _store_tier(name: str, store: StoreFacts) -> Iterator[Said]:
    if store.missing:
        yield fail(
            f"{name}: the package cannot be used: {store.missing}",
            "pip install mooncake-transfer-engine-non-cuda, and of the system libibverbs1,"
            " librdmacm1 and libnuma1",
        )
    if store.refused:
        yield fail(
            f"{name}: the master at {store.master} does not answer: {store.refused}",
            "start mooncake_master, or see whether a firewall or the unit's IPAddressAllow is in"
            " the way",
        )
    if not store.missing and not store.refused:
        yield ok(f"{name}: {store.package}; the master at {store.master} takes connections")


if __name__ == "__main__":
    main()
