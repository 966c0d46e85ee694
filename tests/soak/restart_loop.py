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
from kvd_client.attachment import Attachment
from kvd_client.connection import Connection
from kvd_proto.directory import HEADER_BYTES, RECORD_DTYPE, SlotState
from tests.daemon.engines import described, read_descriptions
from tests.daemon.serving import Daemon
from tests.soak import kill_loop
from tests.soak.kill_loop import BATCH, KillLoop

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

    def report(self) -> dict[str, object]:
        """As one JSON object; the time from exec to attached engines as median and maximum."""
        times = sorted(self.ready_ms)
        ready_ms = [times[len(times) // 2], times[-1]] if times else []
        return super().report() | {"ready_ms": ready_ms}


class Client(kill_loop.Client):
    """One that also knows what its scheduler has told, and the records of the directory."""

    line: Connection | None = None

    def attach(self, daemon: Daemon) -> Attachment:
        """Until the directory of this daemon is here."""
        attached = super().attach(daemon)
        self.line = attached.connection
        return attached

    @property
    def asking(self) -> bool:
        """Whether the daemon has not answered all that it was told."""
        return self.line is not None and self.line.num_unanswered > 0

    def records(self, state: SlotState) -> dict[bytes, Record]:
        """The chunks in this state, by key, as the directory has them."""
        directory = self.directory
        assert directory is not None
        whole = directory._memory
        table = np.frombuffer(whole, RECORD_DTYPE, directory.num_slots, HEADER_BYTES)
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
        asking = any(client.asking for client in self.clients)  # they share the pool
        ready = [client.records(SlotState.READY) for client in self.clients]
        writing = [client.records(SlotState.WRITING) for client in self.clients]
        self.daemon = self.begin()
        began = time.monotonic()
        self.attach()
        self.tally.ready_ms.append(int((time.monotonic() - began) * 1000))
        for client, were, wrote in zip(self.clients, ready, writing, strict=True):
            self.look(client, were, wrote, asking=asking)

    def look(
        self, client: Client, were: dict[bytes, Record], wrote: dict[bytes, Record], *, asking: bool
    ) -> None:
        """Hold what the new daemon has against what the old one had."""
        now = client.records(SlotState.READY)
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
        kept = sorted(now)
        for key, description in zip(kept, read_descriptions(scheduler, kept), strict=True):
            if description != described(key):
                self.wrong(f"{key!r} is described wrongly: {description}")
            self.tally.described += 1
        loaded = sum(self.load(client, kept[at : at + BATCH]) for at in range(0, len(kept), BATCH))
        if loaded != len(kept):
            self.wrong(f"{len(kept) - loaded} kept chunks cannot be loaded")


def run(kills: int, seed: int) -> Tally:
    """End the daemon so many times."""
    return kill_loop.play(lambda start, path: Loop(start, path, seed, Tally(), Client), kills)


if __name__ == "__main__":
    sys.exit(kill_loop.main(run))
