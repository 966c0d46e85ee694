"""Everything that injections act on and invariants look at."""

import contextlib
import os
import signal
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.chaos.processes import Client, Daemon
from tests.chaos.shared import SPECS, Count, phase_word, words
from tests.fakecuda.build import NoCompiler, compiler

POOL_DIR_BYTES = 24 * 2**20  # room for the largest pool of a run, its ledgers, and little more
SOURCE = Path(__file__).with_name("clock.c")
FLAGS = ("-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared")


class WallClock:
    """How far the daemons' clock is from the machine's; `missing` says why it cannot be moved."""

    def __init__(self, folder: Path) -> None:
        self._offset = words(folder / "clock", 1)
        self.missing = ""
        self.environment: dict[str, str] = {}
        library = str(folder / "clock.so")
        try:
            command = [compiler(), *FLAGS, str(SOURCE), "-o", library]
        except NoCompiler as error:
            self.missing = str(error)
            return
        subprocess.run(command, check=True, timeout=60)
        self.environment = {"LD_PRELOAD": library, "KVD_CHAOS_CLOCK": str(folder / "clock")}

    def jump(self, seconds: int) -> None:
        """From now on the clock is so far ahead of the machine's, or behind it."""
        self._offset[0] = seconds & 0xFFFF_FFFF_FFFF_FFFF


class World:
    """One run; the pool's folder may be filled to the brim where `may_fill` says so."""

    def __init__(self, seed: int, folder: Path, pool_dir: Path, *, may_fill: bool) -> None:
        self.folder = folder
        self.pool_dir = pool_dir
        self.may_fill = may_fill
        self.clock = WallClock(folder)
        self.daemon = Daemon(folder, pool_dir, self.clock.environment)
        self.phase = phase_word(folder)
        self.injected: Counter[str] = Counter()
        self.skipped: dict[str, str] = {}  # why some kinds were not injected
        self.violations: list[str] = []
        self.now_doing = "at the start"
        self.clients: dict[str, Client] = {}
        self._frozen: dict[int, float] = {}  # by pid, since when
        for number, spec in enumerate(SPECS.values()):
            for rank in (None, *range(spec.ranks)):
                own = seed * 1_000_003 + number * 10_007 + (rank or 0) * 101
                client = Client(folder, spec, rank, own & 0x7FFFFFFF)
                self.clients[client.name] = client

    def violated(self, text: str) -> None:
        """An invariant does not hold."""
        self.violations.append(f"{self.now_doing}: {text}")
        print(f"VIOLATION {self.violations[-1]}", flush=True)

    def ranks(self) -> list[Client]:
        """All ranks."""
        return [client for client in self.clients.values() if client.rank is not None]

    def schedulers(self) -> list[Client]:
        """All schedulers."""
        return [client for client in self.clients.values() if client.rank is None]

    def total(self, count: Count) -> int:
        """A counter's sum."""
        return sum(client.counters[count] for client in self.clients.values())

    def freeze(self, pid: int) -> None:
        """SIGSTOP, if the process is there."""
        now = time.monotonic()  # before, for this process may be kept from running after it
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGSTOP)
            self._frozen.setdefault(pid, now)

    def thaw(self, pid: int) -> None:
        """SIGCONT, after telling a client for how long it was away."""
        since = self._frozen.pop(pid, None)
        if since is None:
            return
        for client in self.clients.values():
            if client.starts and client.pid == pid:
                client.counters[Count.STOPPED_NS] += int((time.monotonic() - since) * 1e9)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    def revive(self) -> None:
        """Start what does not run."""
        if not self.daemon.running:
            died = self.daemon.died(may_refuse="fill pool" in self.now_doing)
            if died:
                self.violated(died)
            self.daemon.start()
        for client in self.clients.values():
            if not client.running:
                client.start()

    def wait_for(self, what: Count, seconds: float) -> list[Client]:
        """Until every client has set this word; those that have not in time."""
        end = time.monotonic() + seconds
        while True:
            late = [client for client in self.clients.values() if not client.counters[what]]
            if not late or time.monotonic() > end:
                return late
            time.sleep(0.02)

    def close(self) -> None:
        """End every process."""
        for client in self.clients.values():
            if client.starts:
                self.thaw(client.pid)
                client.end(signal.SIGKILL)
        self.daemon.end(signal.SIGKILL)


@contextmanager
def made(seed: int) -> Iterator[World]:
    """A world in folders of its own, which go with the block."""
    with ExitStack() as stack:
        # Socket paths are short.
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp")))
        pool_dir = folder / "pool"
        pool_dir.mkdir()
        mounted = _mount(pool_dir)
        if mounted:
            umount = ["umount", "--lazy", str(pool_dir)]
            stack.callback(subprocess.run, umount, check=False, timeout=30)
        else:
            other = tempfile.TemporaryDirectory(prefix="kvd-chaos-", dir="/dev/shm")
            pool_dir = Path(stack.enter_context(other))
        world = World(seed, folder, pool_dir, may_fill=mounted)
        stack.callback(world.close)
        yield world


def _mount(where: Path) -> bool:
    """A tmpfs there, where this user may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={POOL_DIR_BYTES},mode=0755", "tmpfs"]
    try:
        done = subprocess.run([*command, str(where)], capture_output=True, check=False, timeout=30)
    except OSError:
        return False
    return done.returncode == 0
