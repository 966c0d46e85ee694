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

import signal
import sys
import threading
import time
from dataclasses import dataclass, field

import numpy as np

from kvd_client import LookupResult
from kvd_proto.directory import HEADER_BYTES, RECORD_DTYPE, SlotState
from tests.daemon.engines import described, read_descriptions
from tests.daemon.serving import Daemon
from tests.long_runs import Report
from tests.soak import kill_loop
from tests.soak.kill_loop import BATCH, Client, KillLoop

POOL = str(4 * 2**20)
LONGEST = 0.6
GENTLE = 0.1  # of the ends are SIGTERM
KEPT = ("generation", "ranks_done", "first", "count", "group")
"""Of a slot's record, what the next daemon has as it was."""
Record = tuple[int, ...]


@dataclass
class Tally(kill_loop.Tally):
    """What was done and seen."""

    kills: int = 0
    stops: int = 0
    kept: int = 0
    completing: int = 0
    evicting: int = 0
    ready_ms: list[int] = field(default_factory=list)

    def report(self) -> Report:
        """As one JSON object; the time from exec to attached engines as median and maximum."""
        times = sorted(self.ready_ms)
        ready_ms = [times[len(times) // 2], times[-1]] if times else []
        return super().report() | {"ready_ms": ready_ms}


def records(client: Client, state: SlotState) -> dict[bytes, Record]:
    """The chunks in this state, by key, as the client's directory has them."""
    directory = client.directory
    table = np.frombuffer(directory._memory, RECORD_DTYPE, directory.num_slots, HEADER_BYTES)
    return {
        bytes(row["key"])[: row["key_len"]]: tuple(row[list(KEPT)].tolist())
        for row in table[table["state"] == state]
    }


class Loop(KillLoop[Client, Tally]):
    """A daemon that keeps its pool."""

    KEYS = 160
    LOADS = 0.5

    def begin(self) -> Daemon:
        """The next daemon, with the pool of the one before."""
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
        unanswered = [client.attachment.connection.num_unanswered for client in self.clients]
        ready = [records(client, SlotState.READY) for client in self.clients]
        writing = [records(client, SlotState.WRITING) for client in self.clients]
        self.daemon = self.begin()
        began = time.monotonic()
        self.attach()
        self.tally.ready_ms.append(int((time.monotonic() - began) * 1000))
        for client, were, wrote in zip(self.clients, ready, writing, strict=True):
            self.look(client, were, wrote, asking=any(unanswered))  # they share the pool

    def look(
        self, client: Client, were: dict[bytes, Record], wrote: dict[bytes, Record], *, asking: bool
    ) -> None:
        """Hold what the new daemon has against what the old one had."""
        now = records(client, SlotState.READY)
        missing = {key for key in were if now.get(key) != were[key]}
        if missing and asking:
            self.tally.evicting += len(missing)
        elif missing:
            self.wrong(f"{len(missing)} READY chunks are gone: {min(missing)!r}")
        for key in now.keys() - were.keys():
            record = wrote.get(key)
            if record is None or not record[1] or now[key] != record:
                self.wrong(f"{key!r} is a hit that never was READY")
            self.tally.completing += 1
        self.tally.kept += len(now)
        scheduler = client.engine.scheduler
        for key in client.keys:
            if (scheduler.lookup(key) is LookupResult.HIT) != (key in now):
                self.wrong(f"{key!r} is looked up wrongly")
        keys = sorted(now)
        for key, description in zip(keys, read_descriptions(scheduler, keys), strict=True):
            if description != described(key):
                self.wrong(f"{key!r} is described wrongly: {description}")
            self.tally.described += 1
        loaded = sum(self.load(client, keys[at : at + BATCH]) for at in range(0, len(keys), BATCH))
        if loaded != len(keys):
            self.wrong(f"{len(keys) - loaded} kept chunks cannot be loaded")


def run(kills: int, seed: int) -> Tally:
    """End the daemon so many times."""
    return kill_loop.play(lambda start, path: Loop(start, path, seed, Tally(), Client), kills)


if __name__ == "__main__":
    sys.exit(kill_loop.main(run))
