"""The processes of a run, and everything that injections act on and invariants look at."""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, TypeVar

import psutil

from kvd.errors import NotRunning
from kvd.wire.tool import ToolConnection
from kvd_proto.messages import Message, Status, StatusReport
from tests.chaos.shared import HOSTILE, SPECS, Count, counts, phase_word, words
from tests.fakecuda.build import NoCompiler, compiler
from tests.processes import children_running

M = TypeVar("M", bound=Message)

END_SECONDS = 30.0
ASK_SECONDS = 30.0

Config = dict[str, str]
USUAL: Config = {
    "cpu-bytes": "12MiB",
    "policy": "adaptive",
    "keep-pool": "yes",
    "lease-seconds": "2",
    "ticket-seconds": "2",
    "lane-timeout-seconds": "2",
    "drain-seconds": "2",
    "http-listen": "off",
}


class Process:
    """A module that runs, has run or will run; the kernel ends it with this process."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.starts = 0
        self.process: subprocess.Popen[bytes] | None = None

    def launch(self, module: str, *arguments: str, **environment: str) -> None:
        """Start the next process."""
        self.starts += 1
        tether = ["-m", "kvd_tools.tether", str(os.getpid())]
        with self.log.open("ab") as sink:
            self.process = subprocess.Popen(
                [sys.executable, *tether, module, *arguments],
                stdin=subprocess.DEVNULL,
                stdout=sink,
                stderr=sink,
                env=os.environ | environment,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """Of the process that runs or has run last."""
        assert self.process is not None
        return self.process.pid

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.process is not None and self.process.poll() is None

    def end(self, number: int = 0) -> bool:
        """Signal it and wait for its end; whether that came in time, without SIGKILL."""
        if self.process is None or not self.running:
            return True
        self.process.send_signal(number)
        try:
            self.process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait(END_SECONDS)
            return False
        return True

    @property
    def status(self) -> int | None:
        """With which status it ended."""
        return None if self.process is None else self.process.returncode


class Client(Process):
    """A scheduler, whose rank is None, a rank, or the hostile engine as a whole."""

    def __init__(self, folder: Path, engine: str, rank: int | None, seed: int) -> None:
        self.name = engine if rank is None else f"{engine}-{rank}"
        super().__init__(folder / f"{self.name}.log")
        self.rank = rank
        self.counters = counts(folder, self.name)
        self._module = f"tests.chaos.{HOSTILE if engine == HOSTILE else 'client_process'}"
        self._arguments = [str(folder), str(folder / "run"), engine]
        self._seed = seed

    def start(self) -> None:
        """The next process, with choices of its own."""
        self.counters[Count.ATTACHED] = self.counters[Count.RESTS] = 0
        rank = [] if self.rank is None else [str(self.rank)]
        seed = str(self._seed + self.starts + 1)
        self.launch(self._module, *self._arguments, seed, *rank)


class Daemon(Process):
    """The daemon as a supervisor has it: there is one, or the next one is on its way."""

    def __init__(self, folder: Path, pool_dir: Path, environment: Mapping[str, str]) -> None:
        super().__init__(folder / "daemon.log")
        self.runtime_dir = folder / "run"
        self._config = USUAL
        self._places = {"runtime-dir": str(self.runtime_dir), "pool-dir": str(pool_dir)}
        self._environment = environment
        self._ended_by_us = True

    def start(self, change: Config | None = None, *flags: str) -> None:
        """The next daemon: as the last one, or as usual but for the change; with these flags."""
        if change is not None:
            self._config = USUAL | change
        self._ended_by_us = False
        with self.log.open("ab") as sink:
            sink.write(f"--- start {self.starts + 1}: {self._config}\n".encode())
        options = self._config | self._places
        arguments = [f"--{name}={value}" for name, value in options.items()]
        self.launch("kvd", "serve", *arguments, *flags, **self._environment)

    def finish(self, number: int) -> str:
        """End it by this signal; what was wrong with that, if anything was."""
        if not self.running:
            return ""
        self._ended_by_us = True
        if not self.end(number):
            return f"the daemon did not end within {END_SECONDS:g} s of signal {number}"
        if self.status == -number and (number == signal.SIGKILL or not self.serves):
            return ""  # before it serves it has nothing to finish
        return f"the daemon ended with status {self.status}" if self.status else ""

    @property
    def serves(self) -> bool:
        """Whether the last daemon has said that it serves."""
        return b"serving " in self.log.read_bytes().rpartition(b"--- start ")[2]

    def died(self, *, may_refuse: bool) -> str:
        """What is wrong where the broker ended and nobody had asked for it.

        Where it `may_refuse`, it may have ended with status 1 before it served.
        """
        if self.running or self._ended_by_us:
            return ""
        self._ended_by_us = True
        if may_refuse and self.status == 1 and not self.serves:
            return ""
        return f"the broker ended by itself, with status {self.status}"

    def ask(self, message: Message, kind: type[M]) -> M:
        """The reply to a request of an operator's tool.

        Raises:
            NotRunning: no answer in time.
        """
        with ToolConnection(self.runtime_dir, ASK_SECONDS) as tool:
            return tool.ask(message, kind)

    def report(self) -> dict[str, Any]:
        """The status, or nothing where nobody answers."""
        try:
            return self.ask(Status(), StatusReport).status
        except NotRunning:
            return {}

    def lane_pids(self) -> list[int]:
        """Lanes that run now, found without asking anybody."""
        try:
            lanes = children_running(self.pid, "kvd.lane") if self.running else []
        except psutil.Error:
            return []
        return [lane.pid for lane in lanes]


POOL_DIR_BYTES = 56 * 2**20  # room for the largest pool of a run, its ledgers, and little more
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
        engines = {spec.name: spec.ranks for spec in SPECS.values()} | {HOSTILE: 0}
        for number, (engine, ranks) in enumerate(engines.items()):
            for rank in (None, *range(ranks)):
                own = seed * 1_000_003 + number * 10_007 + (rank or 0) * 101
                client = Client(folder, engine, rank, own & 0x7FFFFFFF)
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
