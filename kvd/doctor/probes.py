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
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import msgspec

from kvd.config.values import TierSetting, parse_tier
from kvd.errors import ConfigError, CudaMissing, LaneError
from kvd.machine import cuda
from kvd.machine.memory import Shortage
from kvd.tier.contract import backend_options, check_tiers

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

ProbeFields = dict[str, Any]

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


@dataclass(frozen=True)
class Gpu:
    """One device.

    ipc, descriptors: memory can be shared by handle, and as a descriptor.
    refusal: why no lane can use it; empty where one can.
    """

    uuid: str
    name: str
    bus: str
    ipc: bool
    descriptors: bool
    refusal: str = ""


@dataclass(frozen=True)
class Gpus:
    """All of them.

    nodes: device files of the NVIDIA driver that are here. kernel: version of its kernel module.
    cuda: version of the CUDA driver, 1000 * major + 10 * minor, 0 where unknown.
    missing: what is not there, which is as it should be on a machine without GPUs.
    problem: how the driver fails.
    """

    nodes: tuple[str, ...] = ()
    kernel: str = ""
    cuda: int = 0
    devices: tuple[Gpu, ...] = ()
    missing: str = ""
    problem: str = ""


def probe_tier(text: str) -> TierFacts:
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
    said, problem, hung = run_python(
        "-m", "kvd.doctor.probes", "tier", text, seconds=PATIENCE_SECONDS
    )
    found: ProbeFields = {}
    for line in said.decode(errors="replace").splitlines():
        if line.startswith("{"):  # what a library prints is not ours
            found |= json.loads(line)
    doing = found.pop("doing", "starting")
    disk = msgspec.convert(found, DiskFacts) if setting.kind == "disk" else None
    store = msgspec.convert(found, StoreFacts) if setting.kind == "mooncake" else None
    return TierFacts(
        setting=setting, problem=problem, hung=doing if hung else "", disk=disk, store=store
    )


def probe_gpus() -> Gpus:
    """What is here; it never hangs."""
    nodes = tuple(sorted(str(path) for path in Path("/dev").glob("nvidia*")))
    try:
        kernel = Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        kernel = ""
    said, problem, hung = run_python("-m", "kvd.doctor.probes", "gpus")
    if hung:
        problem = f"no answer within {CHILD_SECONDS:g} s"
    if problem:
        return Gpus(nodes, kernel, problem=f"asking the CUDA driver failed: {problem}")
    return replace(msgspec.json.decode(said, type=Gpus), nodes=nodes, kernel=kernel)


def size_shortage(setting: TierSetting, disk: DiskFacts) -> Shortage | None:
    """Return why a disk tier's size cannot be reached, as its own process says at its start."""
    from kvd.tier.disk.directory import DiskOptions  # noqa: PLC0415  # few have one

    return DiskOptions.parse(backend_options(setting)).shortage(disk.size, disk.free, disk.held)


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
    """Probe what the command line names, `gpus` or `tier SETTING`; print JSON."""
    if sys.argv[1] == "gpus":
        print_gpus()
    else:
        print_tier(parse_tier(sys.argv[2]))


def print_tier(setting: TierSetting) -> None:
    """Print what is known of a tier as it becomes known, one JSON object a line."""
    looks = {"disk": look_at_disk, "mooncake": look_at_store}
    for found in looks.get(setting.kind, lambda _: iter(()))(setting):
        sys.stdout.write(json.dumps(found) + "\n")
        sys.stdout.flush()


def print_gpus() -> None:
    """Print what the CUDA driver says as JSON."""
    version, found, missing, problem = 0, [], "", ""
    try:
        cuda.start()
        version = cuda.version()
        for device, uuid in cuda.devices():
            name, bus = cuda.device_name(device), cuda.pci_bus_id(device)
            shared = cuda.can_share(device)
            found.append(Gpu(uuid.hex(), name, bus, *shared, cuda.compute_mode_problem(device)))
    except CudaMissing as error:
        missing = str(error)
        with contextlib.suppress(LaneError):
            version = cuda.version()  # of one that is too old
    except LaneError as error:
        problem = str(error)
    said = Gpus(cuda=version, devices=tuple(found), missing=missing, problem=problem)
    sys.stdout.buffer.write(msgspec.json.encode(said))


def look_at_disk(setting: TierSetting) -> Iterator[ProbeFields]:
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
        yield measure_disk(place, room.f_bavail * room.f_frsize)


def _mount(place: Path) -> ProbeFields:
    """The mount that a path lies on, without touching it, and the device below."""
    found: list[str] = []
    for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        words = line.split()
        at = words[4].encode("latin-1", "replace").decode("unicode_escape")
        if place.is_relative_to(at) and (not found or len(at) >= len(found[4])):
            found = [*words[:4], at, *words[5:]]
    kind, source = found[found.index("-") + 1 : found.index("-") + 3]
    told: ProbeFields = {"filesystem": kind, "mounted_at": found[4], "source": source}
    if kind in MEMORY:
        return told | {"medium": "memory"}
    if kind in NETWORK:
        return told | {"medium": "network"}
    number = found[2]
    if number.startswith("0:") and source.startswith("/dev/"):
        status = Path(source).stat()
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return told | _device(_BLOCK_DEVICES / number)


def _device(entry: Path) -> ProbeFields:
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


def measure_disk(place: Path, free: int) -> ProbeFields:
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


def look_at_store(setting: TierSetting) -> Iterator[ProbeFields]:
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


if __name__ == "__main__":
    main()
