"""What a start must pass: the checks that `kvd serve` runs first, and `kvd doctor` with others.

Checks change nothing. A `fail` of a check here keeps `kvd serve` from starting, a `warn` is logged
by it. This module imports little: a start waits for it.
"""

import contextlib
import os
import platform
import re
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property
from pathlib import Path

from kvd.config.settings import Settings
from kvd.config.values import group_ids, parse_listen, parse_tiers, user_ids
from kvd.doctor import Level, Verdict, fail, warn
from kvd.errors import AddressUnavailable, ConfigError, KvdError
from kvd.machine.directories import check_pool_dir, check_runtime_dir, metadata_directory
from kvd.machine.memory import (
    Filesystem,
    MachineMemory,
    MemoryLimit,
    PoolLimits,
    ResourceLimit,
    Shortage,
    allocated_bytes,
    memory_limit,
    pool_directory_name,
    resource_limit,
)
from kvd.machine.numa import has_gpus
from kvd.machine.pools import (
    UnusedPool,
    describe_unused,
    unused_pools,
    unused_remedy,
    unused_text,
)
from kvd.machine.process import LOCK_RETRY_SECONDS, LOCK_SECONDS
from kvd.wire.listener import bind_tcp

OLDEST_KERNEL = (5, 4)  # pidfd_open came with 5.3; 5.4 is a long-term release
OPEN_FILES = 96
"""Files that a process of a daemon without sessions may open; lanes use numbers from 64 on."""


class StartFacts:
    """Facts about this machine for a start with these settings, each read once on first use.

    Limits are those of the daemon that serves the runtime directory, if there is one, since a
    service's differ from a login's; otherwise those of this process. Sizes are in bytes; a limit is
    None if there is none. A fact that cannot be read raises OSError in the check that needs it.

    Args:
        settings: of the daemon.
        warnings: probable mistakes that were found while they were read.
    """

    def __init__(self, settings: Settings, warnings: Sequence[str] = ()) -> None:
        self.settings, self.warnings = settings, warnings

    @cached_property
    def has_proc(self) -> bool:
        """Whether /proc shows this process."""
        return Path("/proc/self/stat").exists()

    @cached_property
    def kernel(self) -> str:
        """Release of the kernel."""
        return platform.release()

    @cached_property
    def runtime_path(self) -> Path:
        """The absolute path of the runtime directory."""
        return Path(self.settings.runtime_dir).absolute()

    @cached_property
    def pool_path(self) -> Path:
        """The absolute path of `pool_dir`."""
        return Path(self.settings.pool_dir).absolute()

    @cached_property
    def daemon(self) -> int | None:
        """Pid of another process that holds the runtime directory; None if none does."""
        holder = lock_holder(self.runtime_path)
        return None if holder == os.getpid() else holder

    @cached_property
    def runtime_problem(self) -> ConfigError | None:
        """Why the runtime directory cannot be used; None if it can, or a daemon uses it."""
        if self.daemon is not None:
            return None
        return _problem(lambda: check_runtime_dir(self.runtime_path))

    @cached_property
    def pool_problem(self) -> ConfigError | None:
        """Why the pool's directory cannot be used; None if it can."""
        return _problem(lambda: check_pool_dir(Path(self.settings.pool_dir)))

    @cached_property
    def user_problems(self) -> list[ConfigError]:
        """Users and groups of the settings that this machine does not have."""
        users, groups = self.settings.allow_users, self.settings.allow_groups
        problems = [_problem(lambda: user_ids(users)), _problem(lambda: group_ids(groups))]
        return [problem for problem in problems if problem is not None]

    @cached_property
    def tier_problems(self) -> list[ConfigError]:
        """Why tiers' backends cannot be had or refuse their options."""
        if not self.settings.tier:
            return []
        from kvd.tier.contract import tier_problems  # noqa: PLC0415  # most daemons have no tier

        return tier_problems(parse_tiers(self.settings.tier))

    @cached_property
    def port_problem(self) -> ConfigError | None:
        """Why `http_listen` cannot be bound; None if it can, or is off."""
        address = parse_listen(self.settings.http_listen)
        return None if address is None else _problem(lambda: bind_tcp(address).close())

    @cached_property
    def open_files(self) -> int | None:
        """Limit of open files."""
        try:  # the hard limit: the daemon raises its soft one itself
            _, limit = resource.prlimit(self.daemon or 0, resource.RLIMIT_NOFILE)
        except (PermissionError, ProcessLookupError):
            _, limit = resource.getrlimit(resource.RLIMIT_NOFILE)
        return None if limit == resource.RLIM_INFINITY else limit

    @cached_property
    def resource_limit(self) -> ResourceLimit | None:
        """The tightest resource limit on the pool's size."""
        try:
            return resource_limit(self.daemon)
        except (PermissionError, ProcessLookupError):
            return resource_limit()

    @cached_property
    def subject(self) -> str:
        """The owner of the limits, as text."""
        if self.daemon is None:
            return "a process started from here"
        return f"the daemon, pid {self.daemon}"

    @cached_property
    def memory(self) -> MachineMemory:
        """Memory of the machine."""
        return MachineMemory.read()

    @cached_property
    def cgroup(self) -> MemoryLimit | None:
        """The control group's limit of memory."""
        return memory_limit(self.daemon)

    @cached_property
    def filesystem(self) -> Filesystem | None:
        """The filesystem of the pool's directory; None if that is no directory."""
        path = Path(self.settings.pool_dir)
        return Filesystem.of(path) if path.is_dir() else None

    @cached_property
    def metadata_directory(self) -> Path:
        """The directory of the pool's metadata, which may not exist; a daemon locks it."""
        if self.filesystem is None:
            return Path(self.settings.pool_dir)
        return metadata_directory(self.filesystem, self.runtime_path)

    @cached_property
    def pool_holder(self) -> int | None:
        """Pid of a daemon that uses the pool and not the runtime directory; None if none does."""
        deadline = time.monotonic() + LOCK_SECONDS  # another process may only be examining it
        while (holder := lock_holder(self.metadata_directory)) not in (self.daemon, os.getpid()):
            if holder is None or time.monotonic() >= deadline:
                return holder
            time.sleep(LOCK_RETRY_SECONDS)
        return None

    @cached_property
    def existing_bytes(self) -> int | None:
        """Bytes of pools that a daemon runs with or has left, and the next one reuses or frees.

        None if they are a running daemon's that this user may not see.
        """
        try:
            own_directory = Path(self.settings.pool_dir) / pool_directory_name(self.runtime_path)
            own_bytes = allocated_bytes(own_directory / "pool")
        except PermissionError:
            if self.daemon is None:
                raise
            return None
        others = [pool.nbytes for pool in self.unused_pools if pool.uid == os.geteuid()]
        if self.settings.unused_pools == "remove":
            return own_bytes + sum(others)
        if self.settings.unused_pools == "adopt" and not own_bytes:
            return max(others, default=0)  # the start itself knows which it may adopt
        return own_bytes

    @cached_property
    def unused_pools(self) -> list[UnusedPool]:
        """Pools of other runtime directories that no process uses."""
        return unused_pools(self.pool_path, self.runtime_path)

    @cached_property
    def pinned(self) -> bool:
        """Whether lanes would pin the pool: GPUs are visible."""
        return has_gpus()

    @property
    def limits(self) -> PoolLimits | None:
        """Limits on the pool of a start, where a daemon that runs has ended; None if unknown."""
        if self.filesystem is None or self.existing_bytes is None:
            return None
        return PoolLimits(
            self.filesystem,
            self.memory,
            self.cgroup,
            self.existing_bytes,
            int(self.pinned),
            self.resource_limit,
        )


def _problem(check: Callable[[], object]) -> ConfigError | None:
    try:
        check()
    except ConfigError as error:
        return error
    return None


def lock_holder(path: Path) -> int | None:
    """Return the pid that holds a directory's lock, from /proc/locks, without locking.

    On btrfs the directory's device is another than that of its locks, and there is no answer.
    """
    try:
        status = path.stat()
        lines = Path("/proc/locks").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    device = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}"
    for line in lines:
        words = line.split()
        if "FLOCK" in words and words[-3] == f"{device}:{status.st_ino}":
            return int(words[-4])
    return None


StartCheck = Callable[[StartFacts], Iterator[Verdict]]
START_CHECKS: dict[str, StartCheck] = {}
"""The checks of a start by the name of their findings."""


def start_check(name: str) -> Callable[[StartCheck], StartCheck]:
    """Register the function as the check of this name."""
    return lambda function: START_CHECKS.setdefault(name, function)


def _refused(error: ConfigError | None) -> Iterator[Verdict]:
    if error is not None:
        may_pass = isinstance(error, AddressUnavailable)
        yield fail(error.text, error.remedy, may_pass=may_pass)


def _too_large(
    facts: StartFacts, shortage_of: Callable[[PoolLimits, int], Shortage | None]
) -> Iterator[Verdict]:
    """Refuse a configured size that exceeds this limit, and none that is reported before it."""
    limits, nbytes = facts.limits, facts.settings.pool_bytes
    if limits is not None and nbytes is not None:
        shortage = shortage_of(limits, nbytes)
        if shortage is not None and shortage == limits.shortage(nbytes):
            pools = [] if shortage_of is PoolLimits.resource_shortage else facts.unused_pools
            others = unused_text(pools, facts.pool_path, facts.runtime_path)
            remedy = f"{shortage.remedy}; {others}" if others else shortage.remedy
            yield fail(shortage.text, remedy, may_pass=True)


@start_check("settings")
def settings(facts: StartFacts) -> Iterator[Verdict]:
    """Probable mistakes, and users and groups that do not exist."""
    for text in facts.warnings:
        yield warn(*text.split("; ", 1))
    for problem in facts.user_problems:
        yield from _refused(problem)


@start_check("machine")
def machine(facts: StartFacts) -> Iterator[Verdict]:
    """Linux is new enough, and /proc is mounted."""
    number = re.match(r"(\d+)\.(\d+)", facts.kernel)
    if number and tuple(map(int, number.groups())) < OLDEST_KERNEL:
        yield fail(
            f"Linux {facts.kernel} is too old",
            "kvd needs Linux 5.4 or newer: it watches processes by pidfd",
        )
    if not facts.has_proc:
        yield fail(
            "/proc is not mounted, where kvd reads memory, limits and processes",
            "mount -t proc proc /proc",
        )


@start_check("memory")
def memory(facts: StartFacts) -> Iterator[Verdict]:
    """The pool fits the machine, and `auto` leaves something to it."""
    yield from _too_large(facts, PoolLimits.machine_shortage)
    settings, limits = facts.settings, facts.limits
    if limits is not None and settings.pool_bytes is None:
        shortage = limits.reserve_shortage(settings.reserve_bytes)
        if shortage is not None:
            yield warn(shortage.text, shortage.remedy)


@start_check("cgroup")
def control_group(facts: StartFacts) -> Iterator[Verdict]:
    """The pool fits the control group."""
    yield from _too_large(facts, PoolLimits.cgroup_shortage)


@start_check("pool directory")
def pool_dir(facts: StartFacts) -> Iterator[Verdict]:
    """The pool's directory can be used, no other daemon uses the pool, and it has the room."""
    if facts.pool_problem is not None:
        yield from _refused(facts.pool_problem)
        return
    if facts.pool_holder is not None:
        yield fail(
            f"another daemon, pid {facts.pool_holder}, uses the pool in {facts.metadata_directory}",
            "stop it: its runtime directory was replaced",
            may_pass=True,
        )
    yield from _too_large(facts, PoolLimits.filesystem_shortage)
    if facts.limits is not None and (problem := facts.limits.medium_problem()):
        yield warn(problem.text, problem.remedy)


def unused_verdicts(facts: StartFacts) -> Iterator[Verdict]:
    """Yield a warning of unused pools of other runtime directories."""
    if pools := facts.unused_pools:
        paths = facts.pool_path, facts.runtime_path
        yield warn(describe_unused(pools, facts.pool_path), unused_remedy(pools, *paths))


@start_check("unused pools")
def unused(facts: StartFacts) -> Iterator[Verdict]:
    """No daemon of another runtime directory has left a pool, unless the start looks after it."""
    if facts.settings.unused_pools == "keep":
        yield from unused_verdicts(facts)


@start_check("open files")
def open_files(facts: StartFacts) -> Iterator[Verdict]:
    """A process may have as many files as a start opens."""
    if facts.open_files is not None and facts.open_files < OPEN_FILES:
        yield fail(
            f"{facts.subject} may open {facts.open_files} files, a daemon needs {OPEN_FILES} for"
            " its start alone",
            "raise LimitNOFILE (ulimit -n)",
            may_pass=True,
        )


@start_check("process limits")
def process_limits(facts: StartFacts) -> Iterator[Verdict]:
    """A process may map a pool of this size."""
    yield from _too_large(facts, PoolLimits.resource_shortage)


@start_check("runtime directory")
def runtime_dir(facts: StartFacts) -> Iterator[Verdict]:
    """The runtime directory can be used or made."""
    yield from _refused(facts.runtime_problem)


@start_check("tier")
def tiers(facts: StartFacts) -> Iterator[Verdict]:
    """Each tier has a backend, which takes its options."""
    for problem in facts.tier_problems:
        yield from _refused(problem)


@start_check("HTTP")
def http(facts: StartFacts) -> Iterator[Verdict]:
    """The address of the health endpoint can be bound."""
    yield from _refused(facts.port_problem)


def check_start(facts: StartFacts) -> list[str]:
    """Run the checks of a start; return warnings for the log.

    What cannot be examined is left to the start itself.

    Raises:
        ConfigError: a setting cannot work; all errors, one a line.
        KvdError: likewise, but a later start may succeed.
    """
    verdicts: list[Verdict] = []
    for function in START_CHECKS.values():
        with contextlib.suppress(OSError):
            verdicts += function(facts)
    failures = [verdict for verdict in verdicts if verdict.level is Level.FAIL]
    if failures:
        passing = all(verdict.may_pass for verdict in failures)
        raise (KvdError if passing else ConfigError)("\n".join(map(_line, failures)))
    return list(map(_line, verdicts))


def _line(verdict: Verdict) -> str:
    return f"{verdict.text}; {verdict.remedy}" if verdict.remedy else verdict.text
