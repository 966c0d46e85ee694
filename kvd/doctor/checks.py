"""The checks: each gets the facts of the machine and yields verdicts."""

import os
import platform
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from kvd.config.values import TierSetting
from kvd.doctor import Finding, Verdict, fail, ok, warn
from kvd.doctor.facts import Facts
from kvd.doctor.probes import (
    BLOCK_BYTES,
    PATIENCE_SECONDS,
    PROBE_THREADS,
    DiskFacts,
    StoreFacts,
    TierFacts,
    size_shortage,
)
from kvd.machine import cuda
from kvd.machine.process import MAX_DIRECTORY_BYTES, mode_problem
from kvd.metrics.reading import rate
from kvd_proto.capacity import CONTEXT_GPU_BYTES, pin_gpu_bytes, pin_kernel_bytes
from kvd_proto.text import explain_denied, format_size

OLDEST_KERNEL = (5, 4)  # pidfd_open came with 5.3; 5.4 is a long-term release
FILES_PER_SESSION = 4  # connection, pidfd, and a worker's descriptors
SPARE_FILES = 256


Check = Callable[[Facts], Iterator[Verdict]]
CHECKS: dict[str, Check] = {}
"""The checks by the name of their findings, in the order of output."""


def check(name: str) -> Callable[[Check], Check]:
    """Register the function as the check of this name."""
    return lambda function: CHECKS.setdefault(name, function)


@check("machine")
def machine(facts: Facts) -> Iterator[Verdict]:
    """Kernel and Python."""
    text = f"Linux {facts.kernel}, Python {platform.python_version()}, {facts.cpus} processors"
    number = tuple(int(part) for part in facts.kernel.split("-")[0].split(".")[:2])
    if number < OLDEST_KERNEL:
        yield fail(text, "kvd needs Linux 5.4 or newer: it watches processes by pidfd")
    else:
        yield ok(text)


@check("processes")
def processes(facts: Facts) -> Iterator[Verdict]:
    """The processes that a daemon starts: lanes, HTTP."""
    if facts.child_problem:
        yield fail(
            f"this user cannot start {sys.executable}: {facts.child_problem}",
            "lanes and HTTP run in processes of it: install kvd with a Python that its user may"
            " execute, such as PYTHON=/usr/bin/python3 deploy/systemd/install.sh",
        )
    else:
        yield ok(f"this user can start {sys.executable}")


@check("memory")
def memory(facts: Facts) -> Iterator[Verdict]:
    """The pool fits the machine."""
    memory, configured, reserve = (
        facts.memory,
        facts.settings.pool_bytes,
        facts.settings.reserve_bytes,
    )
    size = "auto" if configured is None else format_size(configured)
    text = (
        f"{format_size(memory.available)} of {format_size(memory.total)} available, cpu_bytes is"
        f" {size}{_pinning(facts)}"
    )
    limits, pool_bytes = facts.limits, facts.pool_bytes_to_create
    if facts.runtime.holder is not None:
        yield ok(f"{text} and taken already")
    elif limits is None:  # check "pool directory" reports it
        yield ok(text)
    elif configured is None and (shortage := limits.reserve_shortage(reserve)):
        yield warn(shortage.text, shortage.remedy)
    elif shortage := limits.machine_shortage(pool_bytes):
        yield fail(shortage.text, shortage.remedy)
    elif limits.filesystem.writable and pool_bytes - limits.existing_bytes + limits.pin_bytes(
        pool_bytes
    ) > max(0, memory.available - reserve):
        yield warn(
            f"{text}: less than {format_size(reserve)} is left for other processes",
            "make cpu_bytes smaller: when memory runs out, the kernel kills processes",
        )
    else:
        yield ok(
            f"{text}; the kept pool has {format_size(limits.existing_bytes)} of it"
            if limits.existing_bytes
            else text
        )


def _pinning(facts: Facts) -> str:
    """Return the memory that pinning the pool takes, as text; empty without a GPU."""
    if not facts.pinned:
        return ""
    pool = facts.settings.pool_bytes
    nbytes = 2**30 if pool is None else pool
    return (
        f"; each lane that pins {'a GiB' if pool is None else 'all'} of it takes"
        f" {format_size(pin_kernel_bytes(nbytes, 1))} of kernel memory and"
        f" {format_size(pin_gpu_bytes(nbytes))} of its GPU's, beside"
        f" {format_size(CONTEXT_GPU_BYTES)} for its context"
    )


@check("swap")
def swap(facts: Facts) -> Iterator[Verdict]:
    """Memory that has been swapped out."""
    if facts.swap_used:
        yield warn(
            f"{format_size(facts.swap_used)} are in swap",
            "the pool can be swapped out until a GPU pins it: switch swap off",
        )


@check("cgroup")
def control_group(facts: Facts) -> Iterator[Verdict]:
    """The limit of the control group leaves room for the pool."""
    group, limits = facts.cgroup, facts.limits
    if group is None:
        yield ok(f"no memory limit for {facts.subject}")
    elif limits is not None and (shortage := limits.cgroup_shortage(facts.pool_bytes_to_create)):
        yield fail(shortage.text, shortage.remedy)
    else:
        yield ok(
            f"{group.group} may take {format_size(group.limit)} and has"
            f" {format_size(group.free_bytes)} left"
        )


@check("pool directory")
def pool_dir(facts: Facts) -> Iterator[Verdict]:
    """The pool's filesystem is in memory, large enough and writable."""
    directory, limits = facts.pool, facts.limits
    name = f"pool_dir = {directory.path}"
    if limits is None:
        yield fail(f"{name}: no such directory", "use a tmpfs such as /dev/shm")
        return
    filesystem = limits.filesystem
    text = (
        f"{name}: {filesystem.kind} at {filesystem.mounted_at},"
        f" {format_size(filesystem.free_bytes)} of {format_size(filesystem.total_bytes)} free"
    )
    if shortage := limits.medium_problem():
        yield fail(shortage.text, shortage.remedy)
    elif not directory.writable:
        yield fail(f"{text}: not writable for this user", "run kvd as its own user")
    elif problem := mode_problem(directory.path, directory.mode):
        yield fail(name, problem)
    elif filesystem.writable and (
        shortage := limits.filesystem_shortage(facts.pool_bytes_to_create)
    ):
        yield fail(shortage.text, shortage.remedy)
    else:
        yield ok(text)


@check("huge pages")
def huge_pages(facts: Facts) -> Iterator[Verdict]:
    """Huge pages: enough for a pool in them; otherwise only their number."""
    pages, size = facts.huge_pages.get("HugePages_Free", 0), facts.huge_pages.get("Hugepagesize", 0)
    total = facts.huge_pages.get("HugePages_Total", 0)
    limits = facts.limits
    if limits is None or limits.filesystem.writable:
        text = f"{pages} of {total} huge pages of {format_size(size)} are free"
        yield ok(f"{text}; " + ("the pool does not lie in them" if total else "none are set aside"))
        return
    filesystem = limits.filesystem
    required = (
        0
        if facts.runtime.holder is not None
        else max(facts.pool_bytes_to_create, filesystem.page_bytes)
    )
    if shortage := limits.filesystem_shortage(required):
        yield fail(shortage.text, shortage.remedy)
    else:
        yield ok(
            f"{filesystem.free_bytes // filesystem.page_bytes} of {filesystem.huge_pages} huge"
            f" pages of {format_size(filesystem.page_bytes)} are free"
        )


@check("open files")
def open_files(facts: Facts) -> Iterator[Verdict]:
    """The limit of open files suffices for all sessions."""
    required = facts.settings.max_sessions * FILES_PER_SESSION + SPARE_FILES
    if facts.open_files is None or facts.open_files >= required:
        limit = "any number of" if facts.open_files is None else f"{facts.open_files}"
        yield ok(f"{facts.subject} may open {limit} files")
    else:
        yield warn(
            f"{facts.subject} may open {facts.open_files} files;"
            f" max_sessions = {facts.settings.max_sessions} may need {required}",
            f"LimitNOFILE={required} in the unit, --ulimit nofile={required} in Docker, or a"
            " smaller max_sessions",
        )


@check("NUMA")
def numa(facts: Facts) -> Iterator[Verdict]:
    """NUMA nodes: which have GPUs, and whether the pool fits the memory of each."""
    nodes, gpu_nodes = facts.nodes, facts.gpu_nodes
    if len(nodes) < 2:
        yield ok("one node")
        return
    text = ", ".join(f"{name} {format_size(size)}" for name, size in nodes.items())
    gpus_at = Counter(gpu_nodes)
    if len(gpus_at) == 1:
        text += f"; the GPUs sit at {gpu_nodes[0]}, where the pool is put"
    elif gpu_nodes:
        text += f"; GPUs sit at {' and '.join(sorted(gpus_at))}, each with its part of the pool"
    pool = facts.settings.pool_bytes or 0
    # The pool is cut into one equal range for each GPU, on its node.
    shares = {name: count / len(gpu_nodes) for name, count in gpus_at.items()} or dict.fromkeys(
        nodes, 1
    )
    if any(pool * share > nodes.get(name, 0) for name, share in shares.items()):
        yield warn(
            f"{text}; the pool of {format_size(pool)} spans nodes",
            "copies across nodes are slower; a daemon for each node, each near its GPUs, is the"
            " fastest",
        )
    else:
        yield ok(text)


@check("GPU")
def gpus(facts: Facts) -> Iterator[Verdict]:
    """GPUs and their driver: whether kvd can serve them, and how memory is shared."""
    driver = facts.gpus
    if 0 < driver.cuda < cuda.OLDEST_VERSION:
        yield fail(
            f"the driver is for CUDA {cuda.version_text(driver.cuda)}, kernel module"
            f" {driver.module or 'unknown'}; kvd needs {cuda.version_text(cuda.OLDEST_VERSION)}",
            "update the NVIDIA driver to 525 or newer; 570 and newer are fast",
        )
    elif not driver.devices:
        if driver.nodes or driver.module or driver.problem:
            yield fail(
                f"an NVIDIA driver (kernel module {driver.module or 'not seen'}) is here, but"
                f" {driver.problem or driver.missing or 'it shows no device'}",
                "in a container: NVIDIA_VISIBLE_DEVICES=all and"
                " NVIDIA_DRIVER_CAPABILITIES=compute,utility; under systemd:"
                " PrivateDevices=no and DeviceAllow for /dev/nvidia*; pip install"
                " cuda-bindings",
            )
        else:
            yield ok("none; engines on the CPU are served")
        return
    for gpu in driver.devices:
        methods = [("IPC handles", gpu.ipc), ("file descriptors", gpu.descriptors)]
        methods_text = " and ".join(name for name, possible in methods if possible)
        text = f"{gpu.name} {gpu.uuid[:8]} at {gpu.bus}"
        if gpu.refusal:
            yield fail(
                f"{text}: {gpu.refusal}",
                f"nvidia-smi -i {gpu.bus} -c DEFAULT, as root: an engine and kvd's lane are two"
                " processes on the GPU",
            )
        elif gpu.ipc:
            yield ok(f"{text} shares memory by {methods_text}")
        elif gpu.descriptors:
            yield warn(
                f"{text} shares memory by {methods_text} only",
                "engines need memory that has descriptors: start vLLM with"
                " --enable-cumem-allocator",
            )
        else:
            yield fail(
                f"{text} cannot share memory with another process",
                "kvd cannot serve this GPU: such sharing exists on Linux, not in WSL or on Tegra",
            )


@check("GPU driver")
def gpu_driver(facts: Facts) -> Iterator[Verdict]:
    """Whether the driver copies many fragments in one call."""
    driver = facts.gpus
    version = f"CUDA {cuda.version_text(driver.cuda)}"
    if driver.devices and driver.cuda < cuda.BATCHED_COPY_VERSION:
        yield warn(
            f"{version}, kernel module {driver.module or 'unknown'}",
            f"drivers from CUDA {cuda.version_text(cuda.BATCHED_COPY_VERSION)} on copy many"
            " fragments in one call; this one works, slower",
        )
    elif driver.devices:
        yield ok(f"{version}, kernel module {driver.module or 'unknown'}")


@check("runtime directory")
def runtime_dir(facts: Facts) -> Iterator[Verdict]:
    """The runtime directory: writable, closed to others, short enough for a socket's path."""
    runtime = facts.runtime
    name = f"runtime_dir = {runtime.path}"
    length = len(os.fsencode(runtime.path.absolute()))
    mode = runtime.status.st_mode if runtime.status else 0
    if length > MAX_DIRECTORY_BYTES:
        yield fail(
            f"{name}: {length} bytes, a socket's path leaves {MAX_DIRECTORY_BYTES} for it",
            "use a shorter one, such as /run/kvd",
        )
    elif runtime.status and not stat.S_ISDIR(mode):
        yield fail(f"{name}: this is no directory", "choose another path")
    elif not runtime.writable and not runtime.holder:
        yield fail(
            f"{name}: this user may not write there",
            "RuntimeDirectory=kvd in the unit, or --runtime-dir with a directory of your own",
        )
    elif not runtime.status:
        yield ok(f"{name}: will be made")
    elif problem := mode_problem(runtime.path, mode):
        yield fail(name, problem)
    elif mode & stat.S_IRWXO:
        yield warn(
            f"{name}: mode {stat.S_IMODE(mode):04o}, every user of this machine may connect",
            f"chmod 0750 {runtime.path}, and put the engines' users into group {runtime.group_name}"
            if runtime.status.st_gid  # users must not be put into root's group
            else "give it a group of its own and put the engines' users into that, such as:"
            f" groupadd --system kvd; chgrp kvd {runtime.path}; chmod 0750 {runtime.path}; usermod"
            " -aG kvd USER",
        )
    else:
        owner = f"uid {runtime.status.st_uid} gid {runtime.status.st_gid}"
        yield ok(f"{name}: mode {stat.S_IMODE(mode):04o}, {owner}")


@check("tier")
def tiers(facts: Facts) -> Iterator[Verdict]:
    """Each tier: its disk or store is reachable, suitable and large enough."""
    for tier in facts.tiers:
        yield from tier_verdicts(tier)


def tier_verdicts(tier: TierFacts) -> Iterator[Verdict]:
    """Yield the verdicts of a tier: its disk or store is reachable, suitable, large enough."""
    name = tier.setting.text
    if tier.problem:
        text = tier.problem if name in tier.problem else f"{name}: {tier.problem}"
        yield fail(text, "until then the daemon serves from memory alone")
    elif tier.hung:
        location = f" ({_location_text(tier.disk)})" if tier.disk and tier.disk.mounted_at else ""
        yield fail(
            f"{name}: no answer within {PATIENCE_SECONDS:g} s: it hangs at {tier.hung}{location}",
            "look at dmesg, and at the mount's server if it has one; a tier that hangs is set"
            " aside, and costs misses",
        )
    elif tier.disk:
        yield from _disk_tier(name, tier.setting, tier.disk)
    elif tier.store:
        yield from _store_tier(name, tier.store)
    else:
        yield ok(f"{name}: its options are valid; kvd doctor has no check of its medium")


def _location_text(disk: DiskFacts) -> str:
    named = f"{disk.device}, " if disk.device and not disk.source.endswith(disk.device) else ""
    return f"{disk.filesystem} at {disk.mounted_at} of {disk.source} ({named}{disk.medium})"


def _disk_tier(name: str, setting: TierSetting, disk: DiskFacts) -> Iterator[Verdict]:
    """Yield verdicts on a disk tier's directory: rights, free space, speed."""
    text = (
        f"{name}: {_location_text(disk)}, {format_size(disk.free)} of {format_size(disk.size)} free"
    )
    if not disk.writable:
        suffix = "" if disk.exists else ", and it is not there yet"
        yield fail(
            f"{text}; this user may not write there{suffix}",
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
        problem = "this is memory: it takes what the pool could have, and does not outlive a reboot"
        yield problem, "a directory on a disk, or a larger cpu_bytes in its place"
    elif disk.medium in {"network", "rotating"}:
        problem = "a file system over a network" if disk.medium == "network" else "a rotating disk"
        yield problem, "a local NVMe: loading from here is hardly faster than computing"
    elif disk.mounted_at == "/":
        remedy = (
            "if a disk was to be mounted there, it is not (findmnt); else a floor of free space"
        )
        yield "this is the root file system", f"{remedy} is left to the system"
    elif not disk.direct:
        yield "it takes no I/O past the page cache (O_DIRECT)", "ext4 or xfs on a local disk"
    if shortage := size_shortage(setting, disk):
        yield shortage.text, shortage.remedy


def _store_tier(name: str, store: StoreFacts) -> Iterator[Verdict]:
    if store.missing:
        yield fail(
            f"{name}: the package cannot be used: {store.missing}",
            "pip install mooncake-transfer-engine-non-cuda, and of the system libibverbs1,"
            " librdmacm1, libnuma1 and libcurl4",
        )
    if store.refused:
        yield fail(
            f"{name}: the master at {store.master} does not answer: {store.refused}",
            "start mooncake_master, or see whether a firewall or the unit's IPAddressAllow is in"
            " the way",
        )
    if not store.missing and not store.refused:
        yield ok(f"{name}: {store.package}; the master at {store.master} takes connections")


@check("daemon")
def daemon(facts: Facts) -> Iterator[Verdict]:
    """The daemon that serves the directory, and others on this machine."""
    runtime = facts.runtime
    if runtime.report is not None:
        text = f"{runtime.report['version']}, pid {runtime.report['pid']}"
        yield ok(f"{text}, {'ready' if runtime.report['ready'] else 'not ready'}")
        for condition in runtime.report["conditions"]:
            yield warn(condition["text"], condition["remedy"])
        for namespace in runtime.report["namespaces"]:
            if namespace["advice"]:
                yield ok(f"{namespace['model']}: {namespace['advice']}")
    elif runtime.denied:
        yield warn(
            f"pid {runtime.holder} serves {runtime.path}, but this user may not connect",
            runtime.denied,
        )
    elif runtime.holder is not None:
        yield fail(
            f"pid {runtime.holder} holds {runtime.path} and does not answer: {runtime.failure}",
            "look at its log; if it hangs: systemctl restart kvd",
        )
    else:
        yield ok(f"none serves {runtime.path}")


@check("other daemon")
def other_daemons(facts: Facts) -> Iterator[Verdict]:
    """Daemons that serve other directories of this machine."""
    for pid, command in facts.others.items():
        yield warn(
            f"pid {pid}: {command}",
            "each has a pool of its own; one daemon for a node serves all engines",
        )


@check("HTTP")
def http(facts: Facts) -> Iterator[Verdict]:
    """The address of the health endpoint can be bound."""
    listen = facts.settings.http_listen
    if facts.port_problem:
        yield fail(facts.port_problem, "kvd serve does not start until this is fixed")
    else:
        yield ok(f"http_listen = {listen}")


def examine(facts: Facts) -> list[Finding]:
    """Run all checks; a check that raises becomes a finding too."""
    findings: list[Finding] = []
    for name, function in CHECKS.items():
        try:
            for verdict in function(facts):
                findings.append(Finding(name, *verdict))  # noqa: PERF401  # verdicts before an error count
            continue
        except (OSError, psutil.Error) as error:
            path = getattr(error, "filename", None)
            denied = explain_denied(Path(path)) if isinstance(path, str) else None
            text = f"this cannot be examined: {error}"
            verdict = warn(text, denied or "run kvd doctor as the daemon's user, or as root")
        except Exception as error:  # noqa: BLE001  # the other checks still run
            text = f"this check failed: {type(error).__name__}: {error}"
            verdict = warn(text, "a bug in kvd: report it; the other lines hold")
        findings.append(Finding(name, *verdict))
    return findings
