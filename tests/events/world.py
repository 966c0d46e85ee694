"""A daemon that publishes, four engines, and whoever reads what is published."""

import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, Listener
from pathlib import Path

from kvd_proto.changes import HEAD_AT
from tests.chaos.processes import Config, Daemon, Process
from tests.daemon.slots import directory_fd
from tests.events.expected import Expected, held, held_below
from tests.events.subscriber import Subscriber, address_in
from tests.processes import children_running
from tests.waiting import eventually

CONFIG: Config = {
    "cpu-bytes": "6MiB",
    "change-ring": "1024",
    "keep-pool": "yes",
    "quota": '{left = {cap = "60%"}, right = {floor = "25%"}}',
}


WITH_TIER: Config = CONFIG | {"tier": "memory:,size=8MiB,keep=all"}
"""The tier has room for a third more than the pool, and drops the oldest for each further one."""


@dataclass(frozen=True, slots=True)
class Spec:
    """One engine; those of one model share its chunks."""

    name: str
    model: str
    ranks: int

    @property
    def topic(self) -> str:
        """Where the daemon publishes for it."""
        return f"kv@{self.name}@{self.model}"


SPECS = (Spec("a", "left", 2), Spec("b", "left", 2), Spec("c", "right", 1), Spec("d", "right", 1))


class EngineProcess(Process):
    """An engine: the process that runs, has run last or will run.

    Args:
        folder: of the run.
        spec: which engine.
        seed: of its choices.
    """

    def __init__(self, folder: Path, spec: Spec, seed: int) -> None:
        super().__init__(folder / f"{spec.name}.log")
        self.spec = spec
        self._folder = folder
        self._seed = seed
        self._pipe: Connection | None = None

    def start(self) -> None:
        """The next process; returns once it has connected."""
        path = self._folder / f"{self.spec.name}-{self.starts}.pipe"
        with Listener(str(path)) as listener:
            spec, seed = self.spec, str(self._seed + self.starts)
            arguments = (str(path), str(self._folder / "run"), spec.name, spec.model)
            self.launch("tests.events.engine_process", *arguments, str(spec.ranks), seed)
            self._pipe = listener.accept()
            assert self._pipe.recv() == spec.name

    def tell(self, command: str) -> None:
        """A command that it does not answer."""
        assert self._pipe is not None
        self._pipe.send(command)

    def ask(self, command: str) -> object:
        """A command, and its answer."""
        self.tell(command)
        assert self._pipe is not None
        return self._pipe.recv()

    def held(self) -> tuple[set[bytes], set[bytes]] | None:
        """What its scheduler was told of, in memory and in tiers; None: there is more to take."""
        answer = self.ask("held")
        assert isinstance(answer, tuple)
        complete, keys, below = answer
        return (keys, below) if complete else None

    def kill(self) -> None:
        """End it by SIGKILL."""
        self.end(signal.SIGKILL)
        if self._pipe is not None:
            self._pipe.close()


class World:
    """One run.

    Args:
        folder: of the run.
        pool_dir: of the daemon's pool.
        seed: of the engines' choices.
        config: of the daemon.

    Attributes:
        engines: by name.
        subscribers: by name.
        changes: of rings, that were waited for.
    """

    def __init__(self, folder: Path, pool_dir: Path, seed: int, config: Config) -> None:
        self.folder = folder
        self.config = config
        self.address = address_in(folder)
        self.daemon = Daemon(folder, pool_dir, {})
        self.engines = {
            spec.name: EngineProcess(folder, spec, seed + 100 * number)
            for number, spec in enumerate(SPECS)
        }
        self.subscribers: dict[str, Subscriber] = {}
        self.changes = 0
        self._fds: dict[str, int] = {}  # of the directories of this daemon, by engine

    def start_daemon(self, *, cold: bool = False) -> None:
        """The next daemon."""
        self._forget_directories()
        self.daemon.start(self.config | {"events": self.address}, *["--cold"] * cold)

    def subscribe(self, name: str) -> None:
        """A subscriber that knows nothing yet."""
        self.subscribers[name] = Subscriber(self.address)

    def run(self) -> None:
        """All engines store."""
        for engine in self.running():
            engine.ask("run")

    def rest(self) -> None:
        """No engine stores."""
        for engine in self.running():
            engine.ask("rest")

    def running(self) -> list[EngineProcess]:
        """Engines that have a process."""
        return [engine for engine in self.engines.values() if engine.running]

    def pump(self) -> None:
        """Let subscribers take what has come."""
        for subscriber in self.subscribers.values():
            subscriber.pump()

    def publisher_pid(self) -> int:
        """The daemon's publisher, once there is one."""
        found = eventually(lambda: children_running(self.daemon.pid, "kvd.publisher"))
        return found[0].pid

    def tier_pid(self) -> int:
        """The process of the daemon's tier, once there is one."""
        return eventually(lambda: children_running(self.daemon.pid, "kvd.tier"))[0].pid

    # ---------------------------------------------------------------- looking

    def heads(self) -> dict[str, int]:
        """By model, of which an engine runs: the number of the last change in its ring."""
        return {
            model: int.from_bytes(os.pread(self._directory(engine), 8, HEAD_AT), "little")
            for model, engine in self._one_of_each().items()
        }

    def churn(self, changes: int) -> None:
        """Wait until there were so many changes in each model's ring.

        Subscribers take what comes meanwhile.
        """
        before = self.heads()

        def since() -> dict[str, int]:
            self.pump()
            return {model: head - before[model] for model, head in self.heads().items()}

        made = eventually(since, lambda each: min(each.values()) >= changes)
        self.changes += sum(made.values())

    def quiet_differences(self) -> dict[str, int]:
        """`differences`, where nothing has changed meanwhile; else a key more of each."""
        before = self.heads()
        self.pump()
        found = self.differences()
        came = sum(each.pump() for each in self.subscribers.values())
        moved = bool(came) or self.heads() != before
        return {kind: count + moved for kind, count in found.items()}

    def _one_of_each(self) -> dict[str, str]:
        """By model an engine that runs."""
        return {engine.spec.model: engine.spec.name for engine in self.running()}

    def expected(self) -> dict[str, Expected]:
        """By model, of which an engine runs: what its directory has."""
        index = next(iter(self.subscribers.values())).indexes.llmd
        return {
            model: Expected.of(model, held(whole), held_below(whole), index)
            for model, whole in (
                (model, self._whole(engine)) for model, engine in self._one_of_each().items()
            )
        }

    def _whole(self, engine: str) -> bytes:
        fd = self._directory(engine)
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def _directory(self, engine: str) -> int:
        """A descriptor: of an engine that is attached, or will be."""
        if engine not in self._fds:
            fd = eventually(lambda: self._directory_fd(engine), _is_there)
            assert fd is not None
            self._fds[engine] = fd
        return self._fds[engine]

    def _directory_fd(self, engine: str) -> int | None:
        assert self.daemon.running, self.daemon.log.read_text()
        return directory_fd(self.daemon.runtime_dir, engine)

    def differences(self) -> dict[str, int]:
        """By kind of index, summed over topics and subscribers; all keys are there."""
        total = {"set": 0, "llm-d": 0, "Dynamo": 0, "take_changes": 0}
        expected = self.expected()
        for engine in self.engines.values():
            there = expected[engine.spec.model] if engine.running else Expected()
            if engine.running:
                told = engine.held()
                keys, below = told or (set(), set())
                total["take_changes"] += len(keys ^ there.keys) + len(below ^ there.below.keys)
                total["take_changes"] += told is None
            for subscriber in self.subscribers.values():
                for kind, count in subscriber.indexes.differences(engine.spec.topic, there).items():
                    total[kind] += count
        return total

    def _forget_directories(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def close(self) -> None:
        """End everything."""
        self._forget_directories()
        for engine in self.engines.values():
            engine.kill()
        for subscriber in self.subscribers.values():
            subscriber.close()
        self.daemon.end(signal.SIGKILL)


def _is_there(fd: int | None) -> bool:
    return fd is not None


@contextmanager
def made(seed: int, config: Config) -> Iterator[World]:
    """A world in folders of its own, gone with the block."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-", dir="/tmp"))  # socket paths are short
    pool_dir = Path(tempfile.mkdtemp(prefix="kvd-events-", dir="/dev/shm"))
    world = World(folder, pool_dir, seed, config)
    try:
        yield world
    finally:
        world.close()
        shutil.rmtree(pool_dir, ignore_errors=True)
        if os.environ.get("KVD_KEEP_LOGS"):
            print(f"logs: {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
