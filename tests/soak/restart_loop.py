"""Kill the daemon at random moments under load, start it again, and look at every chunk.

    make restart-loop KILLS=200 SEED=7

Two engines of two models share a pool that is too small for them. After each end of the
daemon the directory as it was at that moment (the engines' mappings of it stay) is held
against what the next daemon has:

- every chunk that was READY is a hit, under its generation, and loads with the right bytes;
- every chunk that is a hit is described as its engine has described it;
- nothing else is a hit.

There are two exceptions, both of an operation that the kill cut off: a chunk whose last
share had just been reported may be one already, and those that the daemon was evicting for
slots to lend, in the answer to a step, may be gone.

The last line of the output is JSON.
"""

import json
import random
import signal
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from kvd_client import LookupResult
from kvd_client.connection import Connection
from kvd_proto.descriptions import encode
from kvd_proto.directory import HEADER_BYTES, RECORD_DTYPE, DirectoryView, SlotState
from tests.daemon.engines import Engine, described, keys_of, make_layout, read_descriptions
from tests.daemon.serving import Daemon, StartDaemon, started_daemons

POOL = str(4 * 2**20)
KEYS = 160
BATCH = 12
LONGEST = 0.6
GENTLE = 0.1  # of the ends are SIGTERM
KEPT = ("generation", "ranks_done", "first", "count", "group")
"""Of a slot's record, what the next daemon has as it was."""
Record = tuple[int, ...]


@dataclass
class Tally:
    """What was done and seen."""

    kills: int = 0
    stops: int = 0
    stores: int = 0
    loads: int = 0
    kept: int = 0
    described: int = 0
    completing: int = 0
    evicting: int = 0
    verified_bytes: int = 0
    ready_ms: list[int] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)

    def report(self) -> dict[str, object]:
        """As one JSON object; the time from exec to attached engines as median and maximum."""
        times = sorted(self.ready_ms)
        return asdict(self) | {
            "violations": len(self.violations),
            "first_violations": self.violations[:5],
            "ready_ms": [times[len(times) // 2], times[-1]] if times else [],
        }


class Client:
    """An engine, the keys it uses, and the directory that it sees."""

    def __init__(self, runtime_dir: Path, name: str, *, replicated: bool) -> None:
        page = 8192 if replicated else 4096
        layout = make_layout(page=page, replicated=replicated)
        self.engine = Engine(runtime_dir, name=name, model=name, layout=layout, events=True)
        self.keys = keys_of(name, KEYS)
        self.directory: DirectoryView | None = None
        self.line: Connection | None = None
        ranks = len(self.engine.workers)
        self.chunk_bytes = 2 * 2 * page * ranks

    def attach(self, daemon: Daemon) -> None:
        """Until the directory of this daemon is here."""
        attached = self.engine.wait_attached(daemon).scheduler._attachment
        assert attached is not None
        self.directory = attached.directory
        self.line = attached.line

    @property
    def asking(self) -> bool:
        """Whether the daemon has not answered all that it was told."""
        return self.line is not None and self.line.unanswered > 0

    def records(self, state: SlotState) -> dict[bytes, Record]:
        """The chunks in this state, by key, as the directory has them."""
        directory = self.directory
        assert directory is not None
        whole = directory._whole
        table = np.frombuffer(whole, RECORD_DTYPE, directory.num_slots, HEADER_BYTES)
        return {
            bytes(row["key"])[: row["key_len"]]: tuple(row[list(KEPT)].tolist())
            for row in table[table["state"] == state]
        }


class Loop:
    """The daemon, its engines, and what has become of them."""

    def __init__(self, start: StartDaemon, runtime_dir: Path, seed: int) -> None:
        self.start = start
        self.random = random.Random(seed)
        self.tally = Tally()
        self.daemon = self.begin()
        self.clients = [
            Client(runtime_dir, "split", replicated=False),
            Client(runtime_dir, "alike", replicated=True),
        ]
        for client in self.clients:
            client.attach(self.daemon)

    def begin(self) -> Daemon:
        """The next daemon; nobody waits for it here."""
        return self.start("--keep-pool", "yes", cpu_bytes=POOL, ready=False)

    def turn(self) -> None:
        """Load until the daemon's end, then the next one, then look."""
        number = signal.SIGTERM if self.random.random() < GENTLE else signal.SIGKILL
        delay = self.random.uniform(0.0, LONGEST)
        timer = threading.Timer(delay, self.daemon.process.send_signal, (number,))
        timer.start()
        try:
            while self.daemon.process.poll() is None:
                self.step()
        finally:
            timer.join()
        self.tally.stops += number == signal.SIGTERM
        self.tally.kills += number == signal.SIGKILL
        asking = any(client.asking for client in self.clients)  # they share the pool
        ready = [client.records(SlotState.READY) for client in self.clients]
        writing = [client.records(SlotState.WRITING) for client in self.clients]
        self.daemon = self.begin()
        began = time.monotonic()
        for client in self.clients:
            client.attach(self.daemon)
        self.tally.ready_ms.append(int((time.monotonic() - began) * 1000))
        for client, were, wrote in zip(self.clients, ready, writing, strict=True):
            self.look(client, were, wrote, asking=asking)

    def step(self) -> None:
        """One store or load of some keys, which may fail in every way but a wrong byte."""
        client = self.random.choice(self.clients)
        at = self.random.randrange(KEYS - BATCH)
        keys = client.keys[at : at + self.random.randint(1, BATCH)]
        if self.random.random() < 0.5:
            self.load(client, keys)
            return
        engine = client.engine
        descriptions = [encode(described(key)) for key in keys]
        ticket = engine.scheduler.prepare_store(keys, descriptions=descriptions)
        if ticket.keys:
            blocks = engine.fill(ticket.keys, 1)
            jobs = engine.submit(
                "store", list(engine.workers), blocks, ticket.slots, ticket.generations
            )
            engine.results(jobs)
            engine.scheduler.complete_store(ticket)
            self.tally.stores += len(ticket.keys)

    def load(self, client: Client, keys: list[bytes]) -> int:
        """Load what is there; how many chunks came, every byte of them looked at."""
        found, wrong = client.engine.load(keys)
        self.tally.loads += found
        self.tally.verified_bytes += found * client.chunk_bytes
        if wrong:
            self.tally.violations.append(f"{wrong} wrong bytes among {keys[0]!r} and following")
        return found

    def look(
        self, client: Client, were: dict[bytes, Record], wrote: dict[bytes, Record], *, asking: bool
    ) -> None:
        """Hold what the new daemon has against what the old one had."""
        now = client.records(SlotState.READY)
        missing = {key for key in were if now.get(key) != were[key]}
        if missing and asking:
            self.tally.evicting += len(missing)
        elif missing:
            self.tally.violations.append(f"{len(missing)} READY chunks are gone: {min(missing)!r}")
        for key in now.keys() - were.keys():
            record = wrote.get(key)
            if record is None or not record[1] or now[key] != record:
                self.tally.violations.append(f"{key!r} is a hit that never was READY")
            self.tally.completing += 1
        self.tally.kept += len(now)
        scheduler = client.engine.scheduler
        for key in client.keys:
            if (scheduler.lookup(key) is LookupResult.HIT) != (key in now):
                self.tally.violations.append(f"{key!r} is looked up wrongly")
        kept = sorted(now)
        for key, description in zip(kept, read_descriptions(scheduler, kept), strict=True):
            if description != described(key):
                self.tally.violations.append(f"{key!r} is described wrongly: {description}")
            self.tally.described += 1
        loaded = sum(self.load(client, kept[at : at + BATCH]) for at in range(0, len(kept), BATCH))
        if loaded != len(kept):
            self.tally.violations.append(f"{len(kept) - loaded} kept chunks cannot be loaded")

    def close(self) -> None:
        """End the engines; the daemons end with their context."""
        for client in self.clients:
            client.engine.close()


def run(kills: int, seed: int) -> Tally:
    """End the daemon so many times."""
    with tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path:  # short
        runtime_dir = Path(path) / "run"
        with started_daemons(runtime_dir) as start:
            loop = Loop(start, runtime_dir, seed)
            try:
                for _ in range(kills):
                    loop.turn()
            finally:
                loop.close()
            return loop.tally


def main() -> int:
    """The command line: kills and seed."""
    kills = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(2**31)
    print(f"kills {kills}, seed {seed}", flush=True)
    began = time.monotonic()
    tally = run(kills, seed)
    print(
        json.dumps({"seconds": round(time.monotonic() - began, 1), "seed": seed} | tally.report())
    )
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
