"""An engine without a model: a scheduler and ranks in a process that obeys a pipe.

While it runs it stores parts of its model's conversations, which it describes, and uses them. It
publishes what changes in the pool as the vLLM connector does, with vLLM's own publisher. It keeps
the sets of chunks that `Scheduler.take_changes` returned, in memory and in tiers. If the daemon has
tiers it requests promotions of some of what it uses.
"""

import random
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from vllm.distributed.kv_events import KVEventBatch, ZmqEventPublisher
from vllm.v1.core.block_pool import BlockPool

from kvd_client import ChunkBlocks, Store, StoreAnswer, StoreTicket, announcer
from kvd_client.changes import Differences
from kvd_client.tickets import pack_chunks
from kvd_client.vllm.events import PoolEvents
from tests.daemon.engines import Engine, make_layout
from tests.routers.content import (
    CHUNKS,
    CONVERSATIONS,
    FACTOR,
    KINDS,
    MAIN_GROUP,
    Chunk,
    conversation,
)
from tests.routers.indexer import endpoints
from tests.routers.llmd import BLOCK_TOKENS

NAP_SECONDS = 0.005
BLOCKS = CHUNKS * FACTOR + 1  # one is the null block
PARTIAL = 0.2  # so many of a window's stores begin with the last block of a chunk
PROMOTED = 0.3  # of conversations
JOB_SECONDS = 10.0  # a lane may have been killed meanwhile
MAX_DEPARTED = 64  # far fewer than a model's chunks that only tiers have


@dataclass(frozen=True, slots=True)
class Spec:
    """One engine; those of one model share its chunks."""

    name: str
    instance: int  # its number for routers
    model: str  # whose conversations it stores
    ranks: int
    repeat_seconds: float  # in which it publishes everything once more; 0: never

    @property
    def topic(self) -> str:
        """Under which it publishes, as llm-d expects it."""
        return f"kv@{self.name}@{self.model}"


class RecordingScheduler:
    """A scheduler that records which chunks its changes have named."""

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = scheduler
        self.ready: set[bytes] = set()
        self.in_tiers: set[bytes] = set()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheduler, name)

    def repeat_changes(self) -> None:
        """Let all that is there be named again, and nothing else be removed."""
        self._scheduler.repeat_changes()
        self.ready.clear()
        self.in_tiers.clear()

    def take_changes(self) -> Differences:
        """Return what `Scheduler.take_changes` does."""
        changes: Differences = self._scheduler.take_changes()
        self.ready.difference_update(changes.removed)
        self.ready.update(changes.stored)
        self.in_tiers.difference_update(changes.removed_from_tiers)
        self.in_tiers.update(changes.stored_in_tiers)
        return changes


class Member:
    """One engine's life. It publishes from its first "run" on: routers are connected by then."""

    def __init__(
        self, pipe: Connection, engine: Engine, spec: Spec, folder: Path, seed: int
    ) -> None:
        self._pipe = pipe
        self._engine = engine
        self._random = random.Random(seed)
        self._running = False
        self._publishing = False
        self._recorded = RecordingScheduler(engine.scheduler)
        self._events = PoolEvents(self._recorded, [MAIN_GROUP], spec.repeat_seconds)  # type: ignore[arg-type]  # it delegates
        self._device_pool = BlockPool(2, True, BLOCK_TOKENS, enable_kv_cache_events=True)
        self._events.watch(self._device_pool)
        self._publisher = ZmqEventPublisher(0, *endpoints(folder, spec.name), topic=spec.topic)

    def live(self) -> None:
        """Obey until the pipe says "end" or is closed."""
        with suppress(EOFError):
            while True:
                if self._pipe.poll(0 if self._running else NAP_SECONDS):
                    command = self._pipe.recv()
                    if command == "end":
                        return
                    self._pipe.send(self._obey(command))
                if self._running:
                    self._store_and_use()
                self._engine.scheduler.end_step()
                if self._publishing:
                    events = [*self._device_pool.take_events(), *self._events.take()]
                    if events:
                        self._publisher.publish(KVEventBatch(ts=time.time(), events=events))

    def _obey(self, command: str) -> object:
        scheduler = self._engine.scheduler
        if command == "reset":
            scheduler.reset()
        elif command == "reset own cache":
            assert self._device_pool.reset_prefix_cache()
        elif command == "known":
            complete = scheduler.attached and not scheduler.changes_waiting
            return (self._recorded.ready, self._recorded.in_tiers) if complete else None
        elif command == "probe":
            self._publisher.publish(KVEventBatch(ts=time.time(), events=[]))
        else:
            self._running = command == "run"
            self._publishing |= self._running
        return command

    def _store_and_use(self) -> None:
        """Store the beginning of a conversation, as far as there is room, and use all of it."""
        chance, engine = self._random, self._engine
        group = chance.randrange(len(KINDS))
        number = int(CONVERSATIONS ** chance.random())
        chunks = conversation(engine.model, number, group)[: chance.randint(1, CHUNKS)]
        missing = FACTOR - 1 if group and chance.random() < PARTIAL else 0
        keys = [chunk.key for chunk in chunks]
        if engine.scheduler.tiers and chance.random() < PROMOTED:
            engine.scheduler.request_promotion(keys)
        ranges = [(missing, FACTOR - missing), *[(0, FACTOR)] * (len(keys) - 1)]
        described = [chunk.description() for chunk in chunks]
        ticket = engine.scheduler.prepare_store(keys, ranges, described)
        if ticket.keys:
            self._store(ticket, chunks, missing)
        engine.scheduler.request_finished(keys)
        if not ticket.served or StoreAnswer.FULL in ticket.answers:
            engine.scheduler.reserve(len(keys), NAP_SECONDS)

    def _store(self, ticket: StoreTicket, chunks: list[Chunk], missing: int) -> None:
        engine = self._engine
        blocks = range(1, 1 + len(chunks) * FACTOR - missing)
        groups = [ChunkBlocks((), ())] * len(KINDS)
        groups[chunks[0].group] = ChunkBlocks([chunk.key for chunk in chunks], blocks, missing)
        arrays = pack_chunks(ticket, groups, engine.layout)
        engine.job += 1
        for worker in engine.workers.values():
            worker.submit(Store, engine.job, arrays)
        engine.scheduler.end_step()  # lanes wait for it
        success = True
        for worker in engine.workers.values():
            worker.wait([engine.job], JOB_SECONDS)
            results = {result.job_id: result.success for result in worker.get_finished()}
            success &= results.get(engine.job, False)
        engine.scheduler.complete_store(ticket, success=success)


def run_engine(pipe: Connection, folder: Path, spec: Spec, seed: int) -> None:
    """Run one engine in this process until its pipe ends it."""
    announcer.MAX_DEPARTED = MAX_DEPARTED
    with (folder / f"{spec.name}.log").open("a") as log:
        sys.stdout = sys.stderr = log
        layout = make_layout(blocks=BLOCKS)
        run = folder / "run"
        with Engine(
            run, spec.name, spec.ranks, spec.model, layout, steps=True, events=True
        ) as engine:
            pipe.send("started")
            Member(pipe, engine, spec, folder, seed).live()
