"""Probes of tiers and GPUs in child processes, since a broken disk or driver can hang for ever.

A child prints each result as it becomes known, one JSON object a line, so that the step at which it
hangs is known. At the timeout it is killed and not waited for: a process that hangs in the kernel
may not exit.
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
from kvd.errors import CudaMissing, LaneError
from kvd.machine import cuda
from kvd.machine.memory import Shortage
from kvd.tier.contract import backend_options

PATIENCE_SECONDS = 8.0
CHILD_SECONDS = 20.0  # for other probes than tiers
PROBE_SECONDS = 0.1  # to write, and as long to read
PROBE_BYTES = 256 * 2**20
BLOCK_BYTES = 2**20
PROBE_THREADS = 4
CONNECT_SECONDS = 2.0
MEMORY_FILESYSTEMS = frozenset(("tmpfs", "ramfs", "hugetlbfs"))
NETWORK_FILESYSTEMS = frozenset(
    ("nfs", "nfs4", "cifs", "smb3", "9p", "ceph", "glusterfs", "lustre", "beegfs")
)
_MOONCAKE_PACKAGES = ("mooncake-transfer-engine", "mooncake-transfer-engine-non-cuda")
_MOUNTS = Path("/proc/self/mountinfo")
_BLOCK_DEVICES = Path("/sys/dev/block")

ProbeFields = dict[str, Any]

abandoned: list[subprocess.Popen[bytes]] = []
"""Processes that were killed at their timeout; some may still hang in the kernel."""


@dataclass(frozen=True, kw_only=True)
class DiskFacts:
    """The disk under a directory, and its speed.

    exists: the directory exists; if not, the other fields describe its nearest existing parent.
    filesystem, mounted_at, source: of its mount. device: the disk's name; empty if unknown.
    medium: `NVMe`, `SSD`, `rotating`, `virtual disk`, `memory`, `network`, or `unknown`.
    existing_bytes: bytes that the directory's files take. free, size: of the file system, in bytes.
    direct: O_DIRECT works. written, read: bytes per second; None if not measured.
    """

    exists: bool = False
    filesystem: str = ""
    mounted_at: str = ""
    source: str = ""
    device: str = ""
    medium: str = "unknown"
    size: int = 0
    free: int = 0
    existing_bytes: int = 0
    writable: bool = False
    direct: bool = False
    written: float | None = None
    read: float | None = None


@dataclass(frozen=True, kw_only=True)
class StoreFacts:
    """A shared store. package: its version. missing, refused: why package, master do not work."""

    package: str = ""
    missing: str = ""
    master: str = ""
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class TierFacts:
    """One configured tier.

    problem: why the probe failed.
    hung: the step that had not ended at the timeout; empty if the probe ended.
    """

    setting: TierSetting
    problem: str = ""
    hung: str = ""
    disk: DiskFacts | None = None
    store: StoreFacts | None = None


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    ipc, descriptors: memory can be shared by IPC handle, by file descriptor.
    refusal: why no lane can use the GPU; empty if one can.
    """

    uuid: str
    name: str
    bus: str
    ipc: bool
    descriptors: bool
    refusal: str = ""


@dataclass(frozen=True)
class Gpus:
    """The GPUs and their driver.

    nodes: device files of the NVIDIA driver. module: version of its kernel module.
    cuda: version of the CUDA driver, 1000 * major + 10 * minor; 0 if unknown.
    missing: why there is no driver or device; no problem on a machine without GPUs.
    problem: why the driver fails.
    """

    nodes: tuple[str, ...] = ()
    module: str = ""
    cuda: int = 0
    devices: tuple[Gpu, ...] = ()
    missing: str = ""
    problem: str = ""


def probe_tier(text: str) -> TierFacts:
    """Probe a tier whose setting is valid, in bounded time.

    Raises:
        OSError: no process can be started.
    """
    setting = parse_tier(text)
    output, problem, hung = run_python(
        "-m", "kvd.doctor.probes", "tier", text, seconds=PATIENCE_SECONDS
    )
    fields: ProbeFields = {}
    for line in output.decode(errors="replace").splitlines():
        if line.startswith("{"):  # libraries may print other lines
            fields |= json.loads(line)
    step = fields.pop("doing", "starting")
    disk = msgspec.convert(fields, DiskFacts) if setting.kind == "disk" else None
    store = msgspec.convert(fields, StoreFacts) if setting.kind == "mooncake" else None
    return TierFacts(
        setting=setting, problem=problem, hung=step if hung else "", disk=disk, store=store
    )


def probe_gpus() -> Gpus:
    """Probe the GPUs, in bounded time."""
    nodes = tuple(sorted(str(path) for path in Path("/dev").glob("nvidia*")))
    try:
        module = Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        module = ""
    output, problem, hung = run_python("-m", "kvd.doctor.probes", "gpus")
    if hung:
        problem = f"no answer within {CHILD_SECONDS:g} s"
    if problem:
        return Gpus(nodes, module, problem=f"asking the CUDA driver failed: {problem}")
    return replace(msgspec.json.decode(output, type=Gpus), nodes=nodes, module=module)


def size_shortage(setting: TierSetting, disk: DiskFacts) -> Shortage | None:
    """Return why a disk tier cannot reach its size, as its process would report it."""
    from kvd.tier.disk.directory import DiskOptions  # noqa: PLC0415  # few daemons have one

    return DiskOptions.parse(backend_options(setting)).shortage(
        disk.size, disk.free, disk.existing_bytes
    )


def run_python(*arguments: str, seconds: float = CHILD_SECONDS) -> tuple[bytes, str, bool]:
    """Run a Python process; return its output, why it failed ("" if not), and whether it hung.

    At the timeout the process is killed and not waited for.

    Raises:
        OSError: no process can be started.
    """
    process = subprocess.Popen(
        # -P: import nothing from the working directory.
        [sys.executable, "-P", *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        output, errors = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired as timeout:
        process.kill()
        abandoned.append(process)
        for pipe in (process.stdout, process.stderr):
            if pipe is not None:
                pipe.close()
        return timeout.stdout or b"", "", True
    status = process.returncode
    failure = errors.decode(errors="replace").strip().rpartition("\n")[2]
    if status < 0:
        failure = f"killed by signal {-status}"
    return output, (failure or f"exit status {status}") if status else "", False


# ---------------------------------------------------- in the process of its own


def main() -> None:
    """Probe what the command line names, `gpus` or `tier SETTING`; print JSON."""
    if sys.argv[1] == "gpus":
        print_gpus()
    else:
        print_tier(parse_tier(sys.argv[2]))


def print_tier(setting: TierSetting) -> None:
    """Print what is known of a tier as it becomes known, one JSON object a line."""
    probes = {"disk": probe_disk, "mooncake": probe_store}
    for fields in probes.get(setting.kind, lambda _: iter(()))(setting):
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


def print_gpus() -> None:
    """Print what the CUDA driver says as JSON."""
    version, gpus, missing, problem = 0, [], "", ""
    try:
        cuda.start()
        version = cuda.version()
        for device, uuid in cuda.devices():
            name, bus = cuda.device_name(device), cuda.pci_bus_id(device)
            shared = cuda.can_share(device)
            gpus.append(Gpu(uuid.hex(), name, bus, *shared, cuda.compute_mode_problem(device)))
    except CudaMissing as error:
        missing = str(error)
        with contextlib.suppress(LaneError):
            version = cuda.version()  # it may be too old
    except LaneError as error:
        problem = str(error)
    result = Gpus(cuda=version, devices=tuple(gpus), missing=missing, problem=problem)
    sys.stdout.buffer.write(msgspec.json.encode(result))


def probe_disk(setting: TierSetting) -> Iterator[ProbeFields]:
    """Yield fields of `DiskFacts` as they become known, and `doing`: the next step."""
    directory = Path(setting.target)
    yield {"doing": f"looking at {directory}"}
    # From the path alone, so that the mount is known if the next step hangs.
    yield _mount(directory)
    directory = directory.resolve()
    yield _mount(directory)
    existing = next(path for path in (directory, *directory.parents) if path.is_dir())
    yield {
        "exists": existing == directory,
        "doing": f"asking the file system of {existing} for its free space",
    }
    status = os.statvfs(existing)
    yield {"size": status.f_blocks * status.f_frsize, "free": status.f_bavail * status.f_frsize}
    yield {
        "existing_bytes": _allocated_bytes(directory) if existing == directory else 0,
        "writable": os.access(existing, os.W_OK | os.X_OK),
        "doing": f"writing and reading a file in {existing}",
    }
    if os.access(existing, os.W_OK | os.X_OK):
        yield measure_disk(existing, status.f_bavail * status.f_frsize)


def _mount(path: Path) -> ProbeFields:
    """Return the mount of a path, without accessing the path, and its device."""
    mount_fields: list[str] = []
    for line in _MOUNTS.read_text(encoding="utf-8", errors="surrogateescape").splitlines():
        words = line.split()
        mount_point = words[4].encode("latin-1", "replace").decode("unicode_escape")
        if path.is_relative_to(mount_point) and (
            not mount_fields or len(mount_point) >= len(mount_fields[4])
        ):
            mount_fields = [*words[:4], mount_point, *words[5:]]
    fs_type, source = mount_fields[mount_fields.index("-") + 1 : mount_fields.index("-") + 3]
    fields: ProbeFields = {"filesystem": fs_type, "mounted_at": mount_fields[4], "source": source}
    if fs_type in MEMORY_FILESYSTEMS:
        return fields | {"medium": "memory"}
    if fs_type in NETWORK_FILESYSTEMS:
        return fields | {"medium": "network"}
    number = mount_fields[2]
    if number.startswith("0:") and source.startswith("/dev/"):
        status = Path(source).stat()
        number = f"{os.major(status.st_rdev)}:{os.minor(status.st_rdev)}"
    return fields | _device(_BLOCK_DEVICES / number)


def _device(entry: Path) -> ProbeFields:
    """Return name and medium of a block device; of a combined one, those of its first part."""
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
    elif device.name.startswith(("vd", "xvd")):  # virtual disks always report that they rotate
        medium = "virtual disk"
    else:
        flag = (device / "queue/rotational").read_text(encoding="ascii").strip()
        medium = "rotating" if flag == "1" else "SSD"
    return {"device": device.name, "medium": medium}


def _allocated_bytes(directory: Path) -> int:
    total = 0
    for folder, _, names in os.walk(directory):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * 512  # noqa: PTH118
    return total


def measure_disk(directory: Path, free: int) -> ProbeFields:
    """Measure the speed with an unnamed file and O_DIRECT, as the tier uses."""
    try:
        file = _open_unnamed(directory, os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return {"direct": False}
    blocks = max(PROBE_THREADS, min(PROBE_BYTES, free // 100) // BLOCK_BYTES)
    try:
        num_written, write_rate = _measure_rate(file, blocks, write=True)
        return {
            "direct": True,
            "written": write_rate,
            "read": _measure_rate(file, num_written, write=False)[1],
        }
    finally:
        os.close(file)


def _open_unnamed(directory: Path, flags: int) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    except OSError as error:
        if error.errno not in {errno.EOPNOTSUPP, errno.EISDIR, errno.ENOENT}:
            raise
    path = directory / f".kvd-doctor-{os.getpid()}"
    file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC | flags, 0o600)
    path.unlink()
    return file


def _measure_rate(file: int, blocks: int, *, write: bool) -> tuple[int, float]:
    """Transfer up to `blocks` blocks for `PROBE_SECONDS`; return their number and bytes/s."""
    next_block, start = count(), time.perf_counter()
    transfer = os.pwritev if write else os.preadv

    def work(_: int) -> int:
        num_moved = 0
        with mmap.mmap(-1, BLOCK_BYTES) as buffer:
            buffer[:] = os.urandom(BLOCK_BYTES)
            for block in next_block:
                if block >= blocks or (num_moved and time.perf_counter() - start > PROBE_SECONDS):
                    return num_moved
                transfer(file, [buffer], block * BLOCK_BYTES)
                num_moved += 1
        return num_moved

    with ThreadPoolExecutor(PROBE_THREADS) as threads:
        num_moved = sum(threads.map(work, range(PROBE_THREADS)))
    return num_moved, num_moved * BLOCK_BYTES / (time.perf_counter() - start)


def probe_store(setting: TierSetting) -> Iterator[ProbeFields]:
    """Yield fields of `StoreFacts` as they become known, and `doing`: the next step."""
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
    for name in _MOONCAKE_PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            yield {"package": f"{name} {importlib.metadata.version(name)}"}


if __name__ == "__main__":
    main()
