"""Facts about this machine, without judgement; `checks.py` judges.

Limits and the control group are those of the running daemon, if there is one, since a service's
differ from a login's; otherwise those of this process.
"""

import contextlib
import grp
import os
import platform
import resource
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import psutil

from kvd.config.settings import Settings
from kvd.config.values import parse_listen
from kvd.doctor.probes import CHILD_SECONDS, Gpus, TierFacts, probe_gpus, probe_tier, run_python
from kvd.errors import ConfigError, NotRunning, SocketAccessDenied
from kvd.machine.memory import (
    Filesystem,
    MachineMemory,
    MemoryLimit,
    PoolLimits,
    allocated_bytes,
    memory_limit,
    pool_directory_name,
)
from kvd.machine.numa import gpu_nodes, has_gpus
from kvd.wire.listener import bind_tcp
from kvd.wire.tool import ToolConnection

_ANSWER_SECONDS = 3.0


@dataclass(frozen=True)
class PoolDirectory:
    """The configured directory of the pool.

    filesystem: None if the path is no directory.
    """

    path: Path
    filesystem: Filesystem | None = None
    writable: bool = False
    mode: int = 0o700


@dataclass(frozen=True)
class RuntimeFacts:
    """The runtime directory and its daemon.

    status: of the directory; None if it does not exist.
    writable: this user may write to the directory or create it.
    holder: pid of the process that holds the lock; None if none does.
    report: the daemon's status report; None without an answer.
    failure: why there is no answer; empty if there is one.
    denied: why this user may not connect, with the remedy; empty if it may.
    """

    path: Path
    status: os.stat_result | None
    group_name: str
    writable: bool
    holder: int | None = None
    report: dict[str, Any] | None = None
    failure: str = ""
    denied: str = ""


class Facts:
    """Facts about this machine for a daemon with these settings, each read once on first use.

    Sizes are in bytes; a limit is None if there is none. A fact that cannot be read raises OSError
    or psutil.Error in the check that needs it.
    """

    def __init__(self, settings: Settings) -> None:
        self.settings = settings

    @cached_property
    def kernel(self) -> str:
        """Release of the kernel."""
        return platform.release()

    @cached_property
    def cpus(self) -> int:
        """Processors that this process may use."""
        return len(os.sched_getaffinity(0))

    @cached_property
    def child_problem(self) -> str:
        """Why this Python cannot start processes; empty if it can."""
        try:
            _, problem, hung = run_python("-c", "")
        except OSError as error:
            return str(error)
        return f"no answer within {CHILD_SECONDS:g} s" if hung else problem

    @cached_property
    def runtime(self) -> RuntimeFacts:
        """The runtime directory."""
        path = Path(self.settings.runtime_dir)
        holder = _lock_holder(path)
        report, failure, denied = None, "", ""
        if holder is not None:
            try:
                with ToolConnection(path, timeout=_ANSWER_SECONDS) as control:
                    report = control.status()
            except SocketAccessDenied as error:
                denied = str(error)
            except NotRunning as error:
                failure = str(error)
        status = _status(path)
        parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
        return RuntimeFacts(
            path=path,
            status=status,
            group_name=_group_name(status.st_gid) if status else "",
            writable=os.access(parent, os.W_OK | os.X_OK),
            holder=holder,
            report=report,
            failure=failure,
            denied=denied,
        )

    @cached_property
    def daemon(self) -> int | None:
        """Pid of the daemon whose limits are used; None: those of this process."""
        with contextlib.suppress(OSError):
            return self.runtime.holder
        return None

    @property
    def wanted(self) -> int:
        """Bytes of the pool that a start would create; 0 if a daemon runs or the size is auto."""
        return 0 if self.runtime.holder is not None else self.settings.pool_bytes or 0

    @cached_property
    def subject(self) -> str:
        """The owner of the limits, as text."""
        if self.daemon is None:
            return "a process started from here"
        return f"the daemon, pid {self.daemon}"

    @cached_property
    def open_files(self) -> int | None:
        """Limit of open files."""
        try:  # the hard limit: the daemon raises its soft one itself
            _, limit = resource.prlimit(self.daemon or 0, resource.RLIMIT_NOFILE)
        except (PermissionError, ProcessLookupError):
            _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        return None if limit == resource.RLIM_INFINITY else limit

    @cached_property
    def memory(self) -> MachineMemory:
        """Memory of the machine."""
        return MachineMemory.read()

    @cached_property
    def swap_used(self) -> int:
        """Bytes in swap."""
        return int(psutil.swap_memory().used)

    @cached_property
    def cgroup(self) -> MemoryLimit | None:
        """The control group's limit of memory."""
        return memory_limit(self.daemon)

    @cached_property
    def pool(self) -> PoolDirectory:
        """The pool's directory."""
        path = Path(self.settings.pool_dir)
        if not path.is_dir():
            return PoolDirectory(path)
        writable = os.access(path, os.W_OK | os.X_OK)
        return PoolDirectory(path, Filesystem.of(path), writable, path.stat().st_mode)

    @cached_property
    def held(self) -> int:
        """Bytes of the pool that a stopped daemon has left; the next one reuses them."""
        if self.runtime.holder is not None:
            return 0
        area = pool_directory_name(Path(self.settings.runtime_dir).absolute())
        return allocated_bytes(Path(self.settings.pool_dir) / area / "pool")

    @property
    def limits(self) -> PoolLimits | None:
        """Limits on the pool that a start would create; None if its directory does not exist."""
        filesystem = self.pool.filesystem
        if filesystem is None:
            return None
        return PoolLimits(filesystem, self.memory, self.cgroup, self.held, int(self.pinned))

    @cached_property
    def pinned(self) -> bool:
        """Whether lanes would pin the pool: GPUs are visible."""
        return has_gpus()

    @cached_property
    def huge_pages(self) -> dict[str, int]:
        """Fields of /proc/meminfo that start with Huge: numbers of pages, or sizes in bytes."""
        fields = {}
        for line in _read(Path("/proc/meminfo")).splitlines():
            name, _, rest = line.partition(":")
            if name.startswith("Huge") and rest.split():
                number, *unit = rest.split()
                fields[name] = int(number) * (1024 if unit == ["kB"] else 1)
        return fields

    @cached_property
    def nodes(self) -> dict[str, int]:
        """Memory of each NUMA node."""
        nodes = {}
        for node in sorted(Path("/sys/devices/system/node").glob("node[0-9]*")):
            for line in _read(node / "meminfo").splitlines():
                words = line.split()
                if len(words) >= 4 and words[2] == "MemTotal:":
                    nodes[node.name] = int(words[3]) * 1024
        return nodes

    @cached_property
    def gpu_nodes(self) -> tuple[str, ...]:
        """The node of each GPU, in order of bus ids, if the daemon may run there."""
        try:
            allowed = os.sched_getaffinity(self.daemon or 0)
        except OSError:
            allowed = os.sched_getaffinity(0)
        return tuple(f"node{gpu.node.number}" for gpu in gpu_nodes(allowed))

    @cached_property
    def gpus(self) -> Gpus:
        """The GPUs and their driver."""
        return probe_gpus()

    @cached_property
    def others(self) -> dict[int, str]:
        """Command lines of daemons that serve other directories, by pid."""
        commands = {}
        for process in psutil.process_iter():
            try:
                words = process.cmdline()
            except psutil.Error:
                continue
            index = next((i for i, word in enumerate(words[:4]) if Path(word).name == "kvd"), None)
            serves = index is not None and words[index + 1 : index + 2] == ["serve"]
            if serves and process.pid not in (self.daemon, os.getpid()):
                commands[process.pid] = " ".join(words[index:])[:200]
        return commands

    @cached_property
    def tiers(self) -> list[TierFacts]:
        """The configured tiers."""
        return [probe_tier(text) for text in self.settings.tier]

    @cached_property
    def port_problem(self) -> str:
        """Why `http_listen` cannot be bound; empty if it can, is off, or a daemon runs."""
        try:
            address = parse_listen(self.settings.http_listen)
            if address is not None and self.daemon is None:
                bind_tcp(address).close()
        except ConfigError as error:
            return str(error)
        return ""


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _group_name(gid: int) -> str:
    """Return the group's name, or its number if it has no name here."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _status(path: Path) -> os.stat_result | None:
    try:
        return path.stat()
    except OSError:
        return None


def _lock_holder(path: Path) -> int | None:
    """Return the pid that holds the directory's lock, from /proc/locks, without locking."""
    status = _status(path)
    if status is None:
        return None
    for line in _read(Path("/proc/locks")).splitlines():
        words = line.split()
        if "FLOCK" in words and words[-3].rpartition(":")[2] == str(status.st_ino):
            return int(words[-4])
    return None
