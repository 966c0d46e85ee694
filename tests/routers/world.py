"""A daemon, four engines that publish, and routers that read what they publish."""

import json
import multiprocessing
import os
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from kvd_proto.changes import HEAD_AT
from tests.chaos.processes import Config, Daemon
from tests.daemon.serving import finding_doubles
from tests.daemon.slots import directory_fd
from tests.events.content import BLOCK_TOKENS
from tests.events.expected import Expected, held, held_below
from tests.processes import children_running
from tests.routers.engine_process import Spec, run_engine
from tests.routers.indexer import DynamoIndexer
from tests.routers.subscriber import Subscriber
from tests.waiting import PATIENCE, eventually

CONFIG: Config = {
    "cpu-bytes": "6MiB",
    "change-ring": "1024",
    "keep-pool": "yes",
    "quota": '{left = {cap = "60%"}, right = {floor = "25%"}}',
}
WITH_TIER: Config = CONFIG | {"tier": "memory:,size=8MiB,keep=all"}
"""The tier has room for a third more than the pool, and drops the oldest for each further one."""

REPEAT_SECONDS = 2.0
SPECS = (
    Spec("a", 1, "left", 2, REPEAT_SECONDS),
    Spec("b", 2, "left", 2, 0.0),
    Spec("c", 3, "right", 1, REPEAT_SECONDS),
    Spec("d", 4, "right", 1, 0.0),
)
EVERYTHING = "everything"
"""The name of the routers that hear all engines from their start on."""

_FORKS = multiprocessing.get_context("forkserver")
_FORKS.set_forkserver_preload(["tests.routers.engine_process"])  # vLLM is imported once


class EngineProcess:
    """An engine: the process that runs, has run last or will run.

    Args:
        folder: of the run.
        spec: which engine.
        seed: of its choices.
    """

    def __init__(self, folder: Path, spec: Spec, seed: int) -> None:
        self.spec = spec
        self.endpoint, self.replay = spec.endpoint(folder), spec.replay_endpoint(folder)
        self._folder = folder
        self._log = folder / f"{spec.name}.log"
        self._seed = seed
        self._process: ForkServerProcess | None = None
        self._pipe: Connection | None = None

    @property
    def running(self) -> bool:
        """Whether it has a process."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self._process is not None
        assert self._process.pid is not None
        return self._process.pid

    def start(self) -> None:
        """Start the next process; returns once it has connected to the daemon."""
        self._pipe, theirs = _FORKS.Pipe()
        self._seed += 1
        arguments = (theirs, self._folder, self.spec, self._seed)
        self._process = _FORKS.Process(target=run_engine, args=arguments, daemon=True)
        self._process.start()
        theirs.close()
        assert self._pipe.poll(PATIENCE)
        assert self._pipe.recv() == self.spec.name

    def tell(self, command: str) -> None:
        """Send a command that it does not answer."""
        assert self._pipe is not None
        self._pipe.send(command)

    def ask(self, command: str) -> object:
        """Send a command and return its answer."""
        self.tell(command)
        assert self._pipe is not None
        assert self._pipe.poll(PATIENCE), f"{self.spec.name} does not answer"
        return self._pipe.recv()

    def known(self) -> tuple[set[bytes], set[bytes]] | None:
        """Return the keys that its scheduler knows in memory and in tiers.

        None while there is more to take.
        """
        answer = self.ask("known")
        assert isinstance(answer, tuple)
        complete, ready, in_tiers = answer
        return (ready, in_tiers) if complete else None

    def stacks(self) -> str:
        """Return where its threads are, for an error."""
        os.kill(self.pid, signal.SIGUSR1)
        return eventually(self._log.read_text, lambda text: "Current thread" in text)

    def end(self, *, kill: bool = False) -> None:
        """End its process, in order or by SIGKILL."""
        process, self._process = self._process, None
        if process is None:
            return
        if kill:
            process.kill()
        else:
            self.tell("end")
        process.join(PATIENCE)
        assert process.exitcode is not None
        assert self._pipe is not None
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
        subscribers: rebuilt indexes, by name.
        indexers: Dynamo's, by name.
        changes: of rings, that were waited for.
    """

    def __init__(self, folder: Path, pool_dir: Path, seed: int, config: Config) -> None:
        self.folder = folder
        self.config = config
        self.daemon = Daemon(folder, pool_dir, finding_doubles())
        self.engines = {
            spec.name: EngineProcess(folder, spec, seed + 100 * number)
            for number, spec in enumerate(SPECS)
        }
        self.subscribers: dict[str, Subscriber] = {}
        self.indexers: dict[str, DynamoIndexer] = {}
        self.changes = 0
        self._fds: dict[str, int] = {}  # of the directories of this daemon, by engine

    def start_daemon(self, *, cold: bool = False) -> None:
        """Start the next daemon."""
        self._forget_directories()
        self.daemon.start(self.config, *["--cold"] * cold)

    def add_routers(self, name: str) -> None:
        """Start a router of each kind. `EVERYTHING` hears all engines, and misses nothing.

        Another one has no replay, and hears only the engines that publish everything repeatedly.
        """
        indexer = DynamoIndexer(self.folder / f"indexer-{name}.log")
        self.subscribers[name], self.indexers[name] = Subscriber(), indexer.__enter__()
        for engine in self.running():
            self._follow(name, engine)

    def remove_routers(self, name: str) -> None:
        """End the routers of this name, if there are any."""
        if name in self.subscribers:
            self.subscribers.pop(name).close()
            self.indexers.pop(name).__exit__()

    def start_engines(self) -> None:
        """Start the engines that have no process, and let them store."""
        for engine in self.engines.values():
            if not engine.running:
                engine.start()
                for name in self.subscribers:
                    self._follow(name, engine)
                engine.ask("run")

    def end_engine(self, name: str, *, kill: bool = False) -> None:
        """End an engine, which routers are told by what runs the engines."""
        engine = self.engines[name]
        engine.end(kill=kill)
        for router in self._routers_of(engine):
            self.subscribers[router].leave(engine.spec.topic, engine.endpoint)
            self.indexers[router].unregister(engine.spec.instance, engine.spec.model)

    def _follow(self, router: str, engine: EngineProcess) -> None:
        if router not in self._routers_of(engine):
            return
        spec = engine.spec
        replay = engine.replay if router == EVERYTHING else None
        subscriber = self.subscribers[router]
        subscriber.follow(engine.endpoint)
        # What is published before a subscription has arrived is lost.
        eventually(lambda: engine.ask("probe") and subscriber.hears(spec.topic))
        self.indexers[router].register(
            spec.instance, engine.endpoint, spec.model, BLOCK_TOKENS, replay
        )

    def _routers_of(self, engine: EngineProcess) -> list[str]:
        """Return the names of routers that follow an engine."""
        repeats = engine.spec.repeat_seconds > 0
        return [name for name in self.subscribers if repeats or name == EVERYTHING]

    def run(self) -> None:
        """Let all engines store."""
        for engine in self.running():
            engine.ask("run")

    def rest(self) -> None:
        """Let no engine store."""
        for engine in self.running():
            engine.ask("rest")

    def running(self) -> list[EngineProcess]:
        """Return the engines that have a process."""
        return [engine for engine in self.engines.values() if engine.running]

    def pump(self) -> None:
        """Let subscribers take what has arrived."""
        for subscriber in self.subscribers.values():
            subscriber.pump()

    def tier_pid(self) -> int:
        """Return the process of the daemon's tier, once there is one."""
        return eventually(lambda: children_running(self.daemon.pid, "kvd.tier"))[0].pid

    # ---------------------------------------------------------------- comparing

    def heads(self) -> dict[str, int]:
        """Return, by model of running engines, the number of the last change in its ring."""
        return {
            model: int.from_bytes(os.pread(self._directory(engine), 8, HEAD_AT), "little")
            for model, engine in self._one_of_each().items()
        }

    def churn(self, changes: int) -> None:
        """Wait until there were so many changes in each model's ring, however long each takes.

        Subscribers take what arrives meanwhile.
        """
        before = self.heads()

        def fewest() -> int:
            self.pump()
            return min(head - before[model] for model, head in self.heads().items())

        made = 0
        while made < changes:
            try:
                made = eventually(fewest, made.__lt__)
            except AssertionError as error:
                raise AssertionError(f"{made} of {changes} changes; {self.state()}") from error
        self.changes += sum(self.heads().values()) - sum(before.values())

    def state(self) -> str:
        """Return what the daemon says, and where engines are, for an error."""
        report = eventually(self.daemon.report)
        said = {name: report[name] for name in ("engines", "lanes", "namespaces")}
        return "\n".join([json.dumps(said), *(engine.stacks() for engine in self.running())])

    def fill_tiers(self) -> None:
        """Wait until chunks of each model lie in the tier, where there is one.

        Its process may just have been replaced. Subscribers take what arrives meanwhile.
        """
        if "tier" not in self.config:
            return

        def filled() -> bool:
            self.pump()
            return all(held_below(self._whole(name)) for name in self._one_of_each().values())

        eventually(filled)

    def quiet_differences(self) -> dict[str, int]:
        """Return `differences`, or one more of each if the pool has changed meanwhile."""
        before = self.heads()
        self.pump()
        differences = self.differences()
        moved = self.heads() != before
        return {kind: count + moved for kind, count in differences.items()}

    def differences(self) -> dict[str, int]:
        """Return keys that differ, by kind of index, over all engines and routers."""
        total = {"set": 0, "llm-d": 0, "Dynamo": 0, "take_changes": 0}
        expected = self.expected()
        dumps = {name: indexer.dump_blocks() for name, indexer in self.indexers.items()}
        for engine in self.engines.values():
            spec = engine.spec
            model = expected[spec.model] if engine.running else Expected()
            if engine.running:
                ready, in_tiers = engine.known() or (set(), {b"incomplete"})
                total["take_changes"] += len(ready ^ model.keys)
                total["take_changes"] += len(in_tiers ^ model.in_tiers.keys)
            for router in self._routers_of(engine):
                indexes = self.subscribers[router].indexes
                for kind, count in indexes.differences(spec.topic, model).items():
                    total[kind] += count
                total["Dynamo"] += model.dynamo_differences(dumps[router].get(spec.instance, {}))
        return total

    def _one_of_each(self) -> dict[str, str]:
        """Return a running engine of each model."""
        return {engine.spec.model: engine.spec.name for engine in self.running()}

    def expected(self) -> dict[str, Expected]:
        """Return what each model's directory has, for models with a running engine."""
        index = self.subscribers[EVERYTHING].indexes.llmd
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
        """Return a descriptor of an engine's directory, once the engine is attached."""
        if engine not in self._fds:
            fd = eventually(lambda: self._directory_fd(engine), lambda fd: fd is not None)
            assert fd is not None
            self._fds[engine] = fd
        return self._fds[engine]

    def _directory_fd(self, engine: str) -> int | None:
        assert self.daemon.running, self.daemon.log.read_text()
        return directory_fd(self.daemon.runtime_dir, engine)

    def _forget_directories(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def close(self) -> None:
        """End everything."""
        self._forget_directories()
        for engine in self.engines.values():
            engine.end(kill=True)
        for subscriber in self.subscribers.values():
            subscriber.close()
        for indexer in self.indexers.values():
            indexer.__exit__()
        self.daemon.end(signal.SIGKILL)


@contextmanager
def made(seed: int, config: Config) -> Iterator[World]:
    """Make a world in folders of its own, which go with the context."""
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
