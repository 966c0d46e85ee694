"""All checks of `kvd doctor`: each gets the facts of the machine and yields verdicts.

Checks of a start (`kvd.doctor.start`) come first; one here of the same name describes what passed.
"""

import platform
import stat
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

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
from kvd.doctor.start import START_CHECKS, unused_verdicts
from kvd.machine import cuda
from kvd.machine.directories import replaced_pool_text
from kvd.metrics.reading import rate
from kvd_proto.capacity import CONTEXT_GPU_BYTES, pin_gpu_bytes, pin_kernel_bytes
from kvd_proto.text import explain_denied, format_size

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
    yield ok(f"Linux {facts.kernel}, Python {platform.python_version()}, {facts.cpus} processors")


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
    limits, pool_bytes = facts.limits, configured or 0
    new_bytes = pool_bytes - limits.existing_bytes if limits is not None else 0
    if limits is None:  # no pool_dir, or the pool is a running daemon's that this user cannot see
        yield ok(text if facts.daemon is None else f"{text} and taken already")
    elif (
        limits.filesystem.writable
        and new_bytes > 0
        and new_bytes + limits.pin_bytes(pool_bytes) > max(0, memory.available - reserve)
    ):
        yield warn(
            f"{text}: less than {format_size(reserve)} is left for other processes",
            "make cpu_bytes smaller: when memory runs out, the kernel kills processes",
        )
    else:
        owner = "kept pool" if facts.daemon is None else "daemon's pool"
        existing = format_size(limits.existing_bytes)
        yield ok(f"{text}; the {owner} has {existing} of it" if limits.existing_bytes else text)


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
    group = facts.cgroup
    if group is None:
        yield ok(f"no memory limit for {facts.subject}")
    else:
        yield ok(
            f"{group.group} may take {format_size(group.limit)} and has"
            f" {format_size(group.free_bytes)} left"
        )


@check("pool directory")
def pool_dir(facts: Facts) -> Iterator[Verdict]:
    """The pool's filesystem, and what becomes of a kept pool."""
    filesystem, configured = facts.filesystem, facts.settings.pool_bytes
    if filesystem is None:
        return
    text = (
        f"pool_dir = {filesystem.directory}: {filesystem.kind} at {filesystem.mounted_at},"
        f" {format_size(filesystem.free_bytes)} of {format_size(filesystem.total_bytes)} free"
    )
    kept_bytes = facts.kept_cpu_bytes if facts.daemon is None else None
    if kept_bytes is not None and configured not in {None, kept_bytes}:
        yield warn(
            f"{text}; {replaced_pool_text(kept_bytes, configured or 0)}",
            f"cpu_bytes = {kept_bytes} keeps it",
        )
    else:
        yield ok(text)


@check("unused pools")
def unused_pools(facts: Facts) -> Iterator[Verdict]:
    """Pools of other runtime directories, which a start adopts or removes."""
    yield from unused_verdicts(facts)


@check("huge pages")
def huge_pages(facts: Facts) -> Iterator[Verdict]:
    """Huge pages: their number."""
    pages, size = facts.huge_pages.get("HugePages_Free", 0), facts.huge_pages.get("Hugepagesize", 0)
    total = facts.huge_pages.get("HugePages_Total", 0)
    filesystem = facts.filesystem
    if filesystem is None or filesystem.writable:
        text = f"{pages} of {total} huge pages of {format_size(size)} are free"
        yield ok(f"{text}; " + ("the pool does not lie in them" if total else "none are set aside"))
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
    """The runtime directory is closed to other users."""
    runtime = facts.runtime
    name = f"runtime_dir = {runtime.path}"
    mode = runtime.status.st_mode if runtime.status else 0
    if not runtime.status:
        yield ok(f"{name}: will be made")
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
    """Each tier's medium."""
    for tier in facts.tiers:
        yield from tier_verdicts(tier)


def tier_verdicts(tier: TierFacts) -> Iterator[Verdict]:
    """Yield the verdicts of a tier: its disk or store is reachable, suitable, large enough."""
    name = tier.setting.text
    if tier.problem:
        yield fail(f"{name}: {tier.problem}", "until then the daemon serves from memory alone")
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
        yield ok(
            f"{text}, {'ready' if runtime.report['ready'] else 'not ready'}; kvd serve refuses to"
            " start beside it"
        )
        yield from _other_settings(facts, runtime.report["pool"]["cpu_bytes"])
        for condition in runtime.report["conditions"]:
            yield warn(condition["text"], condition["remedy"])
        for namespace in runtime.report["namespaces"]:
            if namespace["advice"]:
                yield ok(f"{namespace['model']}: {namespace['advice']}")
    elif runtime.denied:
        yield warn(
            f"pid {runtime.holder} serves {runtime.path}, but this user may not connect; kvd serve"
            " refuses to start beside it",
            runtime.denied,
        )
    elif runtime.holder is not None:
        yield fail(
            f"pid {runtime.holder} holds {runtime.path} and does not answer: {runtime.failure}",
            "look at its log; if it hangs: systemctl restart kvd",
        )
    else:
        yield ok(f"none serves {runtime.path}")


def _other_settings(facts: Facts, running: int) -> Iterator[Verdict]:
    """Say which of the examined settings the daemon with a pool of `running` bytes has not."""
    runtime, settings = facts.runtime, facts.settings
    differing = {
        key: (value, getattr(settings, key))
        for key, value in (runtime.settings or {}).items()
        if value != getattr(settings, key, value)
    }
    if not differing:
        return
    text = ", ".join(f"{key} = {own} (here {here})" for key, (own, here) in differing.items())
    nbytes, effect = settings.pool_bytes, ""
    if nbytes is not None and running not in {0, nbytes}:
        effect = f"; at a restart with those here {replaced_pool_text(running, nbytes)}"
    yield warn(
        f"pid {runtime.holder} runs with other settings: {text}{effect}",
        "give kvd doctor the daemon's options and environment to examine those",
    )


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
    """The address of the health endpoint."""
    yield ok(f"http_listen = {facts.settings.http_listen}")


def examine(facts: Facts) -> list[Finding]:
    """Run all checks; a check that raises becomes a finding too.

    A check of a name runs if the start's check of that name has found nothing. Without /proc only
    that is reported: other checks read there.
    """
    if not facts.has_proc:
        return [_finding("machine", verdict) for verdict in START_CHECKS["machine"](facts)]
    import psutil  # noqa: PLC0415  # reads /proc when imported

    findings: list[Finding] = []
    for name in (*(name for name in START_CHECKS if name not in CHECKS), *CHECKS):
        try:
            verdicts = list(START_CHECKS.get(name, _nothing)(facts))
            findings += [_finding(name, verdict) for verdict in verdicts]
            if not verdicts:
                for verdict in CHECKS.get(name, _nothing)(facts):
                    findings.append(_finding(name, verdict))  # verdicts before an error count
            continue
        except (OSError, psutil.Error) as error:
            path = getattr(error, "filename", None)
            denied = explain_denied(Path(path)) if isinstance(path, str) else None
            text = f"this cannot be examined: {error}"
            verdict = warn(text, denied or "run kvd doctor as the daemon's user, or as root")
        except Exception as error:  # noqa: BLE001  # the other checks still run
            text = f"this check failed: {type(error).__name__}: {error}"
            verdict = warn(text, "a bug in kvd: report it; the other lines hold")
        findings.append(_finding(name, verdict))
    return findings


def _nothing(_: Facts) -> Iterator[Verdict]:
    return iter(())


def _finding(name: str, verdict: Verdict) -> Finding:
    return Finding(name, verdict.level, verdict.text, verdict.remedy)
