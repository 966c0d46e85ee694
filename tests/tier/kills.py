"""Kill daemon and tier in mid-write, start them again, and look at every chunk that was kept.

    make tier-kills PASSES=200 SEED=7

Two engines of two models share a pool that is too small for what they use, above a disk tier that
is large enough. Every daemon begins with an empty pool. After each end

- every chunk that the tier had acknowledged (the table of the directory said so) is there again,
  and comes up with the right bytes and the description that its engine gave;
- what it found beyond these comes up as well: a chunk that was written and not acknowledged;
- nothing is loaded that has a wrong byte, at any moment;
- nothing is found that was cleared before. (Both engines use other keys after a clear, so that
  there is always something to write.)

The last line of the output is JSON.
"""

import json
import random
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from kvd.wire.tool import Control
from kvd_client import LookupResult
from kvd_client.seeking import NOT_BELOW
from kvd_proto.descriptions import encode
from kvd_proto.directory import DirectoryView
from kvd_proto.messages import Clear, Cleared
from tests.daemon.engines import Engine, described, keys_of, make_layout, read_descriptions
from tests.daemon.serving import Daemon, StartDaemon, started_daemons
from tests.processes import kill_and_wait
from tests.waiting import PATIENCE, PAUSE, eventually

POOL = str(8 * 2**20)
DISK = "128MiB"
KEYS = 240
BATCH = 12
LONGEST = 0.5
TIER_ALONE = 0.5  # of the ends are the tier's process's
CLEARED = 0.5  # of the turns begin with nothing
SEEK_SECONDS = 5.0


@dataclass
class Tally:
    """What was done and seen."""

    daemon_kills: int = 0
    tier_kills: int = 0
    stores: int = 0
    loads: int = 0
    clears: int = 0
    acknowledged: int = 0
    unacknowledged: int = 0
    found_again: int = 0
    described: int = 0
    verified_bytes: int = 0
    corrupt: int = 0
    violations: list[str] = field(default_factory=list)

    def report(self) -> dict[str, object]:
        """As one JSON object."""
        return asdict(self) | {
            "violations": len(self.violations),
            "first_violations": self.violations[:5],
        }


class Client:
    """An engine, the keys it uses, and the directory that it sees."""

    def __init__(self, runtime_dir: Path, name: str, *, replicated: bool) -> None:
        page = 8192 if replicated else 4096
        layout = make_layout(page=page, replicated=replicated)
        self.engine = Engine(runtime_dir, name=name, model=name, layout=layout, events=True)
        self.name = name
        self.keys = keys_of(name, KEYS)
        self.directory: DirectoryView | None = None
        self.chunk_bytes = 2 * 2 * page * len(self.engine.workers)

    def attach(self, daemon: Daemon) -> None:
        """Until the directory of this daemon is here."""
        attached = self.engine.wait_attached(daemon).scheduler._attachment
        assert attached is not None
        self.directory = attached.directory

    def kept(self) -> set[bytes]:
        """What the tier has acknowledged, as the directory says it."""
        tiers = self.directory.tiers if self.directory is not None else None
        if tiers is None:
            return set()
        return {key for key, place in tiers.held(0, tiers.places) if place.tiers}

    def bring_up(self, keys: list[bytes], seconds: float) -> list[bytes]:
        """Seek these, and wait until they are hits; those that are not in time are missing."""
        scheduler = self.engine.scheduler
        end = time.monotonic() + seconds
        while True:
            found = scheduler.lookup_many(keys)
            missing = [
                key
                for key, result in zip(keys, found, strict=True)
                if result is not LookupResult.HIT and scheduler.below(key) != NOT_BELOW
            ]
            if not missing or time.monotonic() > end:
                hits = zip(keys, found, strict=True)
                return [key for key, result in hits if result is LookupResult.HIT]
            scheduler.seek(missing)
            scheduler.end_step()
            time.sleep(PAUSE)


class Loop:
    """The daemon with its tier, the engines, and what has become of them."""

    def __init__(self, start: StartDaemon, runtime_dir: Path, disk: Path, seed: int) -> None:
        self.start = start
        self.disk = disk
        self.random = random.Random(seed)
        self.tally = Tally()
        self.daemon = self.begin()
        self.clients = [
            Client(runtime_dir, "split", replicated=False),
            Client(runtime_dir, "alike", replicated=True),
        ]
        self.attach()

    def begin(self) -> Daemon:
        """The next daemon, with an empty pool."""
        tier = f"disk:{self.disk},size={DISK},floor=0,keep=all"
        return self.start("--tier", tier, cpu_bytes=POOL, ready=False)

    def attach(self) -> None:
        """Until the directory of this daemon is here, and its tier serves."""
        for client in self.clients:
            client.attach(self.daemon)
        self.tier()

    def tier(self) -> psutil.Process:
        """The tier's process, once it serves."""
        pid = eventually(self._serving)
        return psutil.Process(pid)

    def _serving(self) -> int:
        tier = self.daemon.status()["tiers"][0]
        return int(tier["pid"]) if tier["state"] == "up" else 0

    def clear(self) -> None:
        """Drop every chunk, here and in the tier; the engines go on with other keys."""
        with Control(self.daemon.runtime_dir) as control:
            control.ask(Clear(), Cleared, PATIENCE)
        eventually(lambda: self.daemon.status()["tiers"][0]["chunks"], lambda left: not left)
        self.tally.clears += 1
        for client in self.clients:
            client.keys = keys_of(f"{client.name}-{self.tally.clears}", KEYS)

    def turn(self) -> None:
        """Store and load until something is killed, then have it back, then look."""
        if self.random.random() < CLEARED:
            self.clear()
        alone = self.random.random() < TIER_ALONE
        process = self.tier()
        pid = process.pid if alone else self.daemon.process.pid
        kept: list[set[bytes]] = []
        ended = threading.Event()

        def end() -> None:
            # What is acknowledged before the kill is to be there after it.
            kept.extend(client.kept() for client in self.clients)
            kill_and_wait(pid)
            ended.set()

        timer = threading.Timer(self.random.uniform(0.0, LONGEST), end)
        timer.start()
        try:
            while not ended.is_set():
                self.step()
        finally:
            timer.join()
        if alone:
            self.tally.tier_kills += 1
            self.tier()
        else:
            self.tally.daemon_kills += 1
            # The directory of the dead daemon still says what it was told to the last moment.
            kept = [client.kept() for client in self.clients]
            self.daemon.process.wait(timeout=PATIENCE)
            self.daemon = self.begin()
            self.attach()
        for client, were in zip(self.clients, kept, strict=True):
            self.look(client, were)

    def step(self) -> None:
        """One store or load of some keys, which may fail in every way but a wrong byte."""
        client = self.random.choice(self.clients)
        at = self.random.randrange(KEYS - BATCH)
        keys = client.keys[at : at + self.random.randint(1, BATCH)]
        if self.random.random() < 0.4:
            self.load(client, client.bring_up(keys, seconds=0.05))
            return
        engine = client.engine
        ticket = engine.scheduler.prepare_store(
            keys, descriptions=[encode(described(key)) for key in keys]
        )
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
        if not keys:
            return 0
        found, wrong = client.engine.load(keys)
        self.tally.loads += found
        self.tally.verified_bytes += found * client.chunk_bytes
        if wrong:
            self.tally.violations.append(f"{wrong} wrong bytes among {keys[0]!r} and following")
        return found

    def look(self, client: Client, were: set[bytes]) -> None:
        """Hold what the tier has now against what it had acknowledged."""
        self.tally.acknowledged += len(were)
        end = time.monotonic() + PATIENCE
        while (missing := were - client.kept()) and time.monotonic() < end:
            time.sleep(PAUSE)
        if missing:
            self.tally.violations.append(f"{len(missing)} kept chunks are lost: {min(missing)!r}")
        now = client.kept()
        if cleared := now.difference(client.keys):
            self.tally.violations.append(f"{len(cleared)} are back: {min(cleared)!r}")
        self.tally.unacknowledged += len(now - were)
        keys = sorted(now.intersection(client.keys))
        for at in range(0, len(keys), BATCH):
            self.look_at(client, keys[at : at + BATCH])
        counts = self.daemon.status()["tiers"][0]["counters"]["gets"]
        self.tally.corrupt += counts["corrupt"]

    def look_at(self, client: Client, keys: list[bytes]) -> None:
        """Bring these up, and compare bytes and descriptions."""
        end = time.monotonic() + PATIENCE
        left = keys
        while left and time.monotonic() < end:
            up = client.bring_up(left, SEEK_SECONDS)
            told = read_descriptions(client.engine.scheduler, up)
            for key, description in zip(up, told, strict=True):
                if description is not None and description != described(key):
                    self.tally.violations.append(f"{key!r} is described wrongly")
                self.tally.described += description is not None
            if up and self.load(client, up) == len(up):
                self.tally.found_again += len(up)
                left = [key for key in left if key not in up]
        if left:
            self.tally.violations.append(f"{len(left)} kept chunks do not come up: {left[0]!r}")

    def close(self) -> None:
        """End the engines; the daemons end with their context."""
        for client in self.clients:
            client.engine.close()


def run(passes: int, seed: int) -> Tally:
    """End daemon or tier so many times."""
    with (
        tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path,  # short
        tempfile.TemporaryDirectory(prefix="kvd-tier-", dir="/var/tmp") as disk,  # no tmpfs
    ):
        runtime_dir = Path(path) / "run"
        with started_daemons(runtime_dir) as start:
            loop = Loop(start, runtime_dir, Path(disk), seed)
            try:
                for _ in range(passes):
                    loop.turn()
            finally:
                loop.close()
            return loop.tally


def main() -> int:
    """The command line: passes and seed."""
    passes = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    seed = int(sys.argv[2]) if len(sys.argv) > 2 else random.SystemRandom().randrange(2**31)
    print(f"passes {passes}, seed {seed}", flush=True)
    began = time.monotonic()
    tally = run(passes, seed)
    print(
        json.dumps({"seconds": round(time.monotonic() - began, 1), "seed": seed} | tally.report())
    )
    return 1 if tally.violations else 0


if __name__ == "__main__":
    sys.exit(main())
