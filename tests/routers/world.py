"""A daemon, four engines that publish, and routers that read what they publish."""

import multiprocessing
import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec
import zmq
from vllm.distributed.kv_events import KVEventBatch

from kvd_proto.changes import HEAD_AT
from tests.chaos.world import Config, Daemon
from tests.daemon.serving import finding_doubles
from tests.daemon.slots import directory_fd
from tests.processes import children_running
from tests.routers.engine_process import Spec, run_engine
from tests.routers.expected import Expected, Indexes, held, held_below
from tests.routers.indexer import DynamoIndexer, endpoints
from tests.routers.llmd import BLOCK_TOKENS
from tests.waiting import PATIENCE, eventually

CONFIG: Config = {
    "cpu-bytes": "6MiB",
    "change-ring": "1024",
    "keep-pool": "yes",
    "quota": '{left = {cap = "60%"}, right = {floor = "25%"}}',
}
# The tier has room for a third more than the pool, and drops the oldest for each further one.
WITH_TIER: Config = CONFIG | {"tier": "memory:,size=8MiB,keep=all"}

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
_DECODER = msgspec.msgpack.Decoder(KVEventBatch)


class EngineProcess:
    """An engine: the process that runs, has run last or will run."""

    def __init__(self, folder: Path, spec: Spec, seed: int) -> None:
        self.spec = spec
        self.endpoint, self.replay = endpoints(folder, spec.name)
        self._folder = folder
        self._seed = seed
        self.process: ForkServerProcess | None = None
        self._pipe: Connection

    @property
    def pid(self) -> int:
        """Of its process."""
        assert self.process is not None
        assert self.process.pid is not None
        return self.process.pid

    def start(self) -> None:
        """Start the next process; returns once it has connected to the daemon."""
        self._pipe, theirs = _FORKS.Pipe()
        self._seed += 1
        arguments = (theirs, self._folder, self.spec, self._seed)
        self.process = _FORKS.Process(target=run_engine, args=arguments, daemon=True)
        self.process.start()
        theirs.close()
        self._answer()

    def ask(self, command: str) -> object:
        """Send a command and return its answer."""
        self._pipe.send(command)
        return self._answer()

    def _answer(self) -> object:
        assert self._pipe.poll(PATIENCE), f"{self.spec.name} does not answer"
        return self._pipe.recv()

    def end(self, *, kill: bool = False) -> None:
        """End its process, in order or by SIGKILL."""
        process, self.process = self.process, None
        if process is None:
            return
        if kill:
            process.kill()
        else:
            self._pipe.send("end")
        process.join(PATIENCE)
        assert process.exitcode is not None
        self._pipe.close()


class Subscriber:
    """Rebuilt indexes of routers, fed with the bytes that engines publish."""

    def __init__(self) -> None:
        self.indexes = Indexes()
        self.events = 0  # that came
        self.errors: list[str] = []  # wrong sequence numbers, payloads that vLLM does not decode
        self.drops = False  # what arrives
        self.sequences: dict[str, int] = {}  # the last one, by topic
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.rcvhwm = 0  # a test's indexes lose nothing by themselves
        self.socket.reconnect_ivl = 20
        self.socket.subscribe("kv@")

    def leave(self, topic: str, endpoint: str) -> None:
        """Follow an engine no more, and forget its blocks."""
        self.pump()
        self.socket.disconnect(endpoint)
        self.sequences.pop(topic, None)
        self.indexes.forget(topic)

    def pump(self) -> None:
        """Take what has arrived."""
        while self.socket.poll(0):
            name, number, payload = self.socket.recv_multipart()
            topic, sequence = name.decode(), int.from_bytes(number, "big")
            try:
                batch = _DECODER.decode(payload)
            except msgspec.MsgspecError as error:
                self.errors.append(f"{topic}: message {sequence}: {error}")
                continue
            previous = self.sequences.get(topic, -1)
            if sequence <= previous:
                self.errors.append(f"{topic}: number {sequence} after {previous}")
            self.sequences[topic] = sequence
            self.events += len(batch.events)
            if not self.drops:
                self.indexes.take(topic, batch)

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(0)


class World:
    """One run."""

    def __init__(self, folder: Path, pool_dir: Path, seed: int, config: Config) -> None:
        self.folder = folder
        self.config = config
        self.daemon = Daemon(folder, pool_dir, finding_doubles())
        self.engines = {
            spec.name: EngineProcess(folder, spec, seed + 100 * number)
            for number, spec in enumerate(SPECS)
        }
        self.subscribers: dict[str, Subscriber] = {}  # by router, as the indexers
        self.indexers: dict[str, DynamoIndexer] = {}
        self.changes = 0  # of rings, that were waited for
        self._fds: dict[str, int] = {}  # of the directories of this daemon, by engine

    def start_daemon(self, *flags: str) -> None:
        """Start the next daemon."""
        self._forget_directories()
        self.daemon.start(self.config, *flags)

    def add_routers(self, name: str) -> None:
        """Start a router of each kind. `EVERYTHING` hears all engines, and misses nothing.

        Another one has no replay, and hears only the engines that publish everything repeatedly.
        """
        self.subscribers[name] = Subscriber()
        self.indexers[name] = DynamoIndexer(self.folder / f"indexer-{name}.log")
        for engine in self.running():
            self._follow(name, engine)

    def remove_routers(self, name: str) -> None:
        """End the routers of this name, if there are any."""
        if name in self.subscribers:
            self.subscribers.pop(name).close()
            self.indexers.pop(name).close()

    def start_engines(self) -> None:
        """Start the engines that have no process, and let them store."""
        for engine in self.engines.values():
            if engine.process is None:
                engine.start()
                for name in self.subscribers:
                    self._follow(name, engine)
                engine.ask("run")

    def end_engine(self, name: str, *, kill: bool = False) -> None:
        """End an engine, if it runs; what runs the engines tells the routers."""
        engine = self.engines[name]
        if engine.process is None:
            return
        engine.end(kill=kill)
        for router in self._routers_of(engine):
            self.subscribers[router].leave(engine.spec.topic, engine.endpoint)
            self.indexers[router].unregister(engine.spec.instance, engine.spec.model)

    def _follow(self, router: str, engine: EngineProcess) -> None:
        if router not in self._routers_of(engine):
            return
        spec, subscriber = engine.spec, self.subscribers[router]
        subscriber.socket.connect(engine.endpoint)

        def heard() -> bool:
            engine.ask("probe")
            subscriber.pump()
            return spec.topic in subscriber.sequences

        eventually(heard)  # what is published before a subscription has arrived is lost
        replay = engine.replay if router == EVERYTHING else None
        self.indexers[router].register(
            spec.instance, engine.endpoint, spec.model, BLOCK_TOKENS, replay
        )

    def _routers_of(self, engine: EngineProcess) -> list[str]:
        """Return the names of routers that follow an engine."""
        repeats = engine.spec.repeat_seconds > 0
        return [name for name in self.subscribers if repeats or name == EVERYTHING]

    def tell_all(self, command: str) -> None:
        """Let all engines "run" (they store), or "rest"."""
        for engine in self.running():
            engine.ask(command)

    def running(self) -> list[EngineProcess]:
        """Return the engines that have a process."""
        return [engine for engine in self.engines.values() if engine.process is not None]

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
            made = eventually(fewest, made.__lt__)
        self.changes += sum(self.heads().values()) - sum(before.values())

    def fill_tiers(self) -> None:
        """Wait until chunks of each model lie in the tier, where there is one.

        Its process may just have been replaced. Subscribers take what arrives meanwhile.
        """

        def filled() -> bool:
            self.pump()
            return all(held_below(self._whole(name)) for name in self._one_of_each().values())

        if "tier" in self.config:
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
        total = Counter({"set": 0, "llm-d": 0, "Dynamo": 0, "take_changes": 0})
        expected = self.expected()
        dumps = {name: indexer.dump_blocks() for name, indexer in self.indexers.items()}
        for engine in self.engines.values():
            spec, model = engine.spec, Expected()
            if engine.process is not None:
                model = expected[spec.model]
                known = engine.ask("known") or (set(), {b"incomplete"})
                assert isinstance(known, tuple)
                ready, in_tiers = known
                total["take_changes"] += len(ready ^ model.keys) + len(in_tiers ^ model.tier_keys)
            for router in self._routers_of(engine):
                total.update(self.subscribers[router].indexes.differences(spec.topic, model))
                published = dumps[router].get(spec.instance, set())
                total["Dynamo"] += model.dynamo.differences(published)
        return dict(total)

    def _one_of_each(self) -> dict[str, str]:
        """Return a running engine of each model."""
        return {engine.spec.model: engine.spec.name for engine in self.running()}

    def expected(self) -> dict[str, Expected]:
        """Return what each model's directory has, for models with a running engine."""
        index = self.subscribers[EVERYTHING].indexes.llmd
        wholes = {model: self._whole(engine) for model, engine in self._one_of_each().items()}
        return {
            model: Expected.of(model, held(whole), held_below(whole), index)
            for model, whole in wholes.items()
        }

    def _whole(self, engine: str) -> bytes:
        fd = self._directory(engine)
        return os.pread(fd, os.fstat(fd).st_size, 0)

    def _directory(self, engine: str) -> int:
        """Return a descriptor of an engine's directory, once the engine is attached."""

        def directory() -> int | None:
            assert self.daemon.running, self.daemon.log.read_text()
            return directory_fd(self.daemon.runtime_dir, engine)

        if engine not in self._fds:
            fd = eventually(directory, lambda fd: fd is not None)
            assert fd is not None
            self._fds[engine] = fd
        return self._fds[engine]

    def _forget_directories(self) -> None:
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    def close(self) -> None:
        """End everything."""
        self._forget_directories()
        for engine in self.engines.values():
            engine.end(kill=True)
        for name in list(self.subscribers):
            self.remove_routers(name)
        self.daemon.end(signal.SIGKILL)


@contextmanager
def made(seed: int, config: Config) -> Iterator[World]:
    """Make a world in folders of its own, which go with the context."""
    with (
        TemporaryDirectory(prefix="kvd-", dir="/tmp") as folder,  # socket paths are short
        TemporaryDirectory(prefix="kvd-events-", dir="/dev/shm") as pool_dir,
        closing(World(Path(folder), Path(pool_dir), seed, config)) as world,
    ):
        yield world
