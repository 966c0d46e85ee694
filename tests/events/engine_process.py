"""An engine as a process of its own, with a scheduler and ranks, told by a pipe what to do.

    python -m tests.events.engine_process PIPE RUNTIME_DIR ENGINE MODEL RANKS SEED

While it runs it stores parts of its model's conversations, which it describes, and uses them. It
keeps the sets of chunks that `Scheduler.take_changes` tells of, in memory and in tiers. Where the
daemon has tiers it seeks some of what it uses there.
"""

import random
import sys
from multiprocessing.connection import Client, Connection
from pathlib import Path

from kvd_client import ChunkBlocks, Store, StoreAnswer, StoreTicket
from kvd_client.chunk_blocks import pack_chunks
from tests.daemon.engines import Engine, make_layout
from tests.events.content import CHUNKS, CONVERSATIONS, FACTOR, KINDS, Chunk, conversation

NAP_SECONDS = 0.005
BLOCKS = CHUNKS * FACTOR + 1  # one is the null block
PARTIAL = 0.2  # so many of a window's stores begin with the last block of a chunk
SOUGHT = 0.3  # of conversations, below the pool
JOB_SECONDS = 10.0  # a lane may have been killed meanwhile


class Member:
    """One engine's life.

    Args:
        pipe: to whoever started it.
        engine: with its ranks.
        seed: of its choices.
    """

    def __init__(self, pipe: Connection, engine: Engine, seed: int) -> None:
        self._pipe = pipe
        self._engine = engine
        self._random = random.Random(seed)
        self._running = False
        self._held: set[bytes] = set()
        self._below: set[bytes] = set()

    def live(self) -> None:
        """Until it is told to end, or nobody tells it anything any more."""
        while True:
            if self._pipe.poll(0 if self._running else NAP_SECONDS):
                try:
                    command = self._pipe.recv()
                except EOFError:
                    return
                if command == "end":
                    return
                self._do(command)
            if self._running:
                self._turn()
            self._end_step()

    def _do(self, command: str) -> None:
        scheduler = self._engine.scheduler
        if command == "reset":
            scheduler.reset()
        elif command == "held":
            complete = scheduler.attached and not scheduler.changes_waiting
            self._pipe.send((complete, self._held, self._below))
        else:
            self._running = command == "run"
            self._pipe.send(command)

    def _end_step(self) -> None:
        scheduler = self._engine.scheduler
        scheduler.end_step()
        changes = scheduler.take_changes()
        self._held.difference_update(changes.removed)
        self._held.update(changes.stored)
        self._below.difference_update(changes.released)
        self._below.update(changes.kept)

    def _turn(self) -> None:
        """Store the beginning of a conversation, as far as there is room, and use all of it."""
        chance, engine = self._random, self._engine
        group = chance.randrange(len(KINDS))
        number = int(CONVERSATIONS ** chance.random())
        chunks = conversation(engine.model, number, group)[: chance.randint(1, CHUNKS)]
        missing = FACTOR - 1 if group and chance.random() < PARTIAL else 0
        keys = [chunk.key for chunk in chunks]
        if engine.scheduler.tiers and chance.random() < SOUGHT:
            engine.scheduler.seek(keys)
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
        arrays = pack_chunks(ticket, groups, FACTOR)
        engine.job += 1
        for worker in engine.workers.values():
            worker.submit(Store, engine.job, arrays)
        done = True
        for worker in engine.workers.values():
            worker.wait([engine.job], JOB_SECONDS)
            results = {result.job_id: result.success for result in worker.get_finished()}
            done &= results.get(engine.job, False)
        engine.scheduler.complete_store(ticket, success=done)


def main() -> None:
    """The command line."""
    path, runtime_dir, name, model, ranks, seed = sys.argv[1:]
    with Client(path) as pipe:
        layout = make_layout(blocks=BLOCKS)
        engine = Engine(Path(runtime_dir), name, int(ranks), model, layout, steps=True, events=True)
        with engine:
            pipe.send(name)
            Member(pipe, engine, int(seed)).live()


if __name__ == "__main__":
    main()
