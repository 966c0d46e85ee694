"""What is so on this machine. Gathers and judges nothing; `checks.py` judges.

Limits and the control group are those of the running daemon where there is one, since a
service has others than a login; otherwise this process's own.
"""

import ctypes
import grp
import os
import platform
import resource
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import psutil

from kvd.config.settings import Settings
from kvd.config.values import parse_listen
from kvd.daemon.http_process import bind_tcp
from kvd.daemon.runtime_dir import MAX_DIRECTORY_BYTES
from kvd.doctor.gpus import Gpus, ask_gpus
from kvd.errors import ConfigError, NotRunning
from kvd.machine.cgroup import MemoryLimit, memory_limit
from kvd.wire.tool import Control

_ANSWER_SECONDS = 3.0
_CLOCK_UNSYNCHRONIZED = 0x40  # STA_UNSYNC of linux/timex.h
_TIMEX_BYTES = 208  # of struct timex on 64-bit Linux; its status is the int at 40
_STATUS_AT = 40
_CHILD_SECONDS = 20.0
T = TypeVar("T")


class UnseenError(Exception):
    """A fact that could not be looked at, when it is asked for; says why."""


@dataclass(frozen=True)
class Filesystem:
    """Where the pool is to lie, with its mode. Sizes in bytes; `kind` as /proc/mounts names it."""

    path: Path
    exists: bool = False
    kind: str = ""
    mounted_at: str = ""
    size: int = 0
    free: int = 0
    writable: bool = False
    mode: int = 0o700


@dataclass(frozen=True)
class RuntimeFacts:
    """The runtime directory, and who serves it.

    path_bytes: length of the path, of which `most_bytes` fit before a socket's name.
    holder: pid of the process that holds the lock, if one does.
    report: what the daemon answered to STATUS; None where it did not, and then `silence` says why.
    """

    path: Path
    exists: bool
    is_directory: bool
    mode: int
    owner: int
    group: int
    group_name: str
    writable: bool
    path_bytes: int
    most_bytes: int
    holder: int | None
    report: dict[str, Any] | None
    silence: str


@dataclass(frozen=True)
class Facts:
    """Everything that the checks look at. Sizes in bytes, limits None where there is none.

    A fact in `unseen` could not be had, for the reason there: to ask for it raises `UnseenError`.

    child_problem: why this installation cannot start processes of its own; empty where it can.
    huge_pages: fields of /proc/meminfo that begin with Huge, pages counted, sizes in bytes.
    nodes: memory of each NUMA node. clock_synchronized: None where the kernel does not say.
    others: pid and command line of daemons that serve other directories.
    port_problem: why `http_listen` cannot be bound; empty where it can, or is not asked for.
    """

    settings: Settings
    kernel: str
    python: str
    subject: str
    locked: int | None
    open_files: int | None
    memory: int
    available: int
    cgroup: MemoryLimit | None
    pool: Filesystem
    huge_pages: dict[str, int]
    nodes: dict[str, int]
    gpus: Gpus
    runtime: RuntimeFacts
    others: dict[int, str]
    clock_synchronized: bool | None
    port_problem: str
    swap_used: int = 0
    cpus: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    child_problem: str = ""
    unseen: Mapping[str, str] = field(default_factory=dict)

    def __getattribute__(self, name: str) -> Any:
        """The fact.

        Raises:
            UnseenError: it could not be had.
        """
        unseen = object.__getattribute__(self, "unseen")
        if name in unseen:
            raise UnseenError(unseen[name])
        return object.__getattribute__(self, name)


def gather(settings: Settings) -> Facts:
    """Look at this machine for a daemon with these settings; takes a few seconds at most.

    What cannot be looked at is no reason not to look at the rest.
    """
    unseen: dict[str, str] = {}

    def look(fact: str, question: Callable[[], Any]) -> Any:
        try:
            return question()
        except Exception as error:  # noqa: BLE001  # whatever it is, it is what the doctor has to say
            unseen[fact] = str(error) or type(error).__name__
            return None

    runtime = look("runtime", lambda: _runtime(Path(settings.runtime_dir)))
    daemon = runtime.holder if runtime is not None else None
    questions: dict[str, Callable[[], Any]] = {
        "kernel": platform.release,
        "python": platform.python_version,
        "child_problem": _child_problem,
        "locked": lambda: _limit(daemon, resource.RLIMIT_MEMLOCK),
        "open_files": lambda: _limit(daemon, resource.RLIMIT_NOFILE),
        "memory": lambda: int(psutil.virtual_memory().total),
        "available": lambda: int(psutil.virtual_memory().available),
        "cgroup": lambda: memory_limit(daemon),
        "pool": lambda: _filesystem(Path(settings.pool_dir)),
        "huge_pages": lambda: _huge_pages(_read(Path("/proc/meminfo"))),
        "nodes": lambda: _nodes(Path("/sys/devices/system/node")),
        "gpus": ask_gpus,
        "others": lambda: _others(daemon),
        "clock_synchronized": _clock,
        "port_problem": lambda: "" if daemon else _port_problem(settings.http_listen),
        "swap_used": lambda: int(psutil.swap_memory().used),
    }
    return Facts(
        settings=settings,
        runtime=runtime,
        subject=f"the daemon, pid {daemon}" if daemon else "a process started from here",
        **{fact: look(fact, question) for fact, question in questions.items()},
        unseen=unseen,
    )


def _child_problem() -> str:
    try:
        done = subprocess.run(
            [sys.executable, "-c", ""],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_CHILD_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return str(error)
    last = done.stderr.strip().rpartition("\n")[2]
    return (last or f"exit status {done.returncode}") if done.returncode else ""


def _limit(pid: int | None, which: int) -> int | None:
    try:
        _, hard = resource.prlimit(pid or 0, which)  # the daemon raises its soft limits itself
    except (PermissionError, ProcessLookupError):
        _, hard = resource.getrlimit(which)
    return None if hard == resource.RLIM_INFINITY else hard


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _filesystem(path: Path) -> Filesystem:
    if not path.is_dir():
        return Filesystem(path)
    real = path.resolve()
    mounts = [line.split() for line in _read(Path("/proc/mounts")).splitlines()]
    over = [(fields[1], fields[2]) for fields in mounts if real.is_relative_to(fields[1])]
    mounted_at, kind = max(over, key=lambda mount: len(mount[0]), default=("/", ""))
    room = os.statvfs(path)
    return Filesystem(
        path=path,
        exists=True,
        kind=kind,
        mounted_at=mounted_at,
        size=room.f_blocks * room.f_frsize,
        free=room.f_bavail * room.f_frsize,
        writable=os.access(path, os.W_OK | os.X_OK),
        mode=path.stat().st_mode,
    )


def _huge_pages(meminfo: str) -> dict[str, int]:
    found = {}
    for line in meminfo.splitlines():
        name, _, rest = line.partition(":")
        if name.startswith("Huge") and rest.split():
            number, *unit = rest.split()
            found[name] = int(number) * (1024 if unit == ["kB"] else 1)
    return found


def _nodes(folder: Path) -> dict[str, int]:
    nodes = {}
    for node in sorted(folder.glob("node[0-9]*")):
        for line in _read(node / "meminfo").splitlines():
            words = line.split()
            if len(words) >= 4 and words[2] == "MemTotal:":
                nodes[node.name] = int(words[3]) * 1024
    return nodes


def _runtime(path: Path) -> RuntimeFacts:
    holder = _lock_holder(path)
    report, silence = None, ""
    if holder is not None:
        report, silence = _ask(path)
    known = _or_none(path.stat)
    parent = next(folder for folder in (path, *path.absolute().parents) if folder.exists())
    return RuntimeFacts(
        path=path,
        exists=known is not None,
        is_directory=path.is_dir(),
        mode=known.st_mode & 0o7777 if known else 0,
        owner=known.st_uid if known else -1,
        group=known.st_gid if known else -1,
        group_name=_group_name(known.st_gid) if known else "",
        writable=os.access(parent, os.W_OK | os.X_OK),
        path_bytes=len(os.fsencode(path.absolute())),
        most_bytes=MAX_DIRECTORY_BYTES,
        holder=holder,
        report=report,
        silence=silence,
    )


def _group_name(gid: int) -> str:
    """The name, or the number of a group that has none here."""
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def _or_none(look: Callable[[], T]) -> T | None:
    try:
        return look()
    except OSError:
        return None


def _lock_holder(path: Path) -> int | None:
    """The pid of whoever holds the directory's lock, as the kernel says; no lock is taken."""
    known = _or_none((path / "kvd.lock").stat)
    if known is None:
        return None
    for line in _read(Path("/proc/locks")).splitlines():
        words = line.split()
        if "FLOCK" in words and words[-3].rpartition(":")[2] == str(known.st_ino):
            return int(words[-4])
    return None


def _ask(path: Path) -> tuple[dict[str, Any] | None, str]:
    try:
        with Control(path, timeout=_ANSWER_SECONDS) as control:
            return control.status(), ""
    except NotRunning as error:
        return None, str(error)


def _others(ours: int | None) -> dict[int, str]:
    found = {}
    for process in psutil.process_iter():
        try:
            words = process.cmdline()
        except psutil.Error:
            continue
        at = next((i for i, word in enumerate(words[:4]) if Path(word).name == "kvd"), None)
        serves = at is not None and words[at + 1 : at + 2] == ["serve"]
        if serves and process.pid not in (ours, os.getpid()):
            found[process.pid] = " ".join(words[at:])[:200]
    return found


def _clock() -> bool | None:
    """Whether the kernel holds its clock to be synchronized; asked by adjtimex(2)."""
    buffer = ctypes.create_string_buffer(_TIMEX_BYTES)
    if ctypes.CDLL(None, use_errno=True).adjtimex(buffer) < 0:
        return None
    status = int.from_bytes(buffer.raw[_STATUS_AT : _STATUS_AT + 4], "little")
    return not status & _CLOCK_UNSYNCHRONIZED


def _port_problem(listen: str) -> str:
    """Why the address cannot be bound, in the daemon's own words."""
    try:
        wanted = parse_listen(listen)
        if wanted is not None:
            bind_tcp(wanted).close()
    except ConfigError as error:
        return str(error)
    return ""
