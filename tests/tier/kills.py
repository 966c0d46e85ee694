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

import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvd.wire.tool import ToolConnection
from kvd_client import LookupResult
from kvd_client.decisions import NO_TIER
from kvd_proto.messages import Clear, Cleared
from tests.daemon.engines import described, keys_of, read_descriptions
from tests.daemon.serving import Daemon, StartDaemon
from tests.processes import kill_and_wait
from tests.soak import kill_loop
from tests.soak.kill_loop import BATCH, KillLoop
from tests.waiting import PATIENCE, PAUSE, eventually

POOL = str(8 * 2**20)
DISK = "128MiB"
LONGEST = 0.5
TIER_ALONE = 0.5  # of the ends are the tier's process's
CLEARED = 0.5  # of the turns begin with nothing
SEEK_SECONDS = 5.0


@dataclass
class Tally(kill_loop.Tally):
    """What was done and seen."""

    daemon_kills: int = 0
    tier_kills: int = 0
    clears: int = 0
    acknowledged: int = 0
    unacknowledged: int = 0
    found_again: int = 0
    corrupt: int = 0


class Client(kill_loop.Client):
    """One that also knows what the tier has, and has it brought up."""

    def kept(self) -> set[bytes]:
        """What the tier has acknowledged, as the directory says it."""
        tiers = self.directory.tiers if self.directory is not None else None
        if tiers is None:
            return set()
        return {key for key, place in tiers.held_chunks(0, tiers.places) if place.tiers}

    def bring_up(self, keys: list[bytes], seconds: float) -> list[bytes]:
        """Seek these, and wait until they are hits; those that are not in time are missing."""
        scheduler = self.engine.scheduler
        end = time.monotonic() + seconds
        while True:
            results = scheduler.lookup_many(keys)
            missing = [
                key
                for key, result in zip(keys, results, strict=True)
                if result is not LookupResult.HIT and scheduler.find_tier(key) != NO_TIER
            ]
            if not missing or time.monotonic() > end:
                hits = zip(keys, results, strict=True)
                return [key for key, result in hits if result is LookupResult.HIT]
            scheduler.request_promotion(missing)
            scheduler.end_step()
            time.sleep(PAUSE)


class Loop(KillLoop[Client, Tally]):
    """A daemon with a disk tier."""

    KEYS = 240
    LOADS = 0.4

    def __init__(self, start: StartDaemon, runtime_dir: Path, disk: Path, seed: int) -> None:
        self.disk = disk
        super().__init__(start, runtime_dir, seed, Tally(), Client)

    def begin(self) -> Daemon:
        """The next daemon, with an empty pool."""
        tier = f"disk:{self.disk},size={DISK},floor=0,keep=all"
        return self.start("--tier", tier, cpu_bytes=POOL, ready=False)

    def attach(self) -> None:
        """Until the directory of this daemon is here, and its tier serves."""
        super().attach()
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
        with ToolConnection(self.daemon.runtime_dir) as control:
            control.ask(Clear(), Cleared, PATIENCE)
        self.tally.clears += 1
        for client in self.clients:
            client.keys = keys_of(f"{client.name}-{self.tally.clears}", self.KEYS)

    def turn(self) -> None:
        """Store and load until something is killed, then have it back, then look."""
        if self.random.random() < CLEARED:
            self.clear()
        alone = self.random.random() < TIER_ALONE

        def end(seconds: float) -> list[set[bytes]]:
            time.sleep(seconds)
            # What is acknowledged before the kill is to be there after it.
            kept = [client.kept() for client in self.clients]
            kill_and_wait(self.tier().pid if alone else self.daemon.process.pid)
            return kept

        with ThreadPoolExecutor(1) as killer:
            killing = killer.submit(end, self.random.uniform(0.0, LONGEST))
            while not killing.done():
                self.step()
        kept = killing.result()
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
        for client, acknowledged in zip(self.clients, kept, strict=True):
            self.look(client, acknowledged)

    def wanted(self, client: Client, keys: list[bytes]) -> list[bytes]:
        """Those that come up at once."""
        return client.bring_up(keys, seconds=0.05)

    def look(self, client: Client, acknowledged: set[bytes]) -> None:
        """Hold what the tier has now against what it had acknowledged."""
        self.tally.acknowledged += len(acknowledged)
        end = time.monotonic() + PATIENCE
        while (missing := acknowledged - client.kept()) and time.monotonic() < end:
            time.sleep(PAUSE)
        if missing:
            self.wrong(f"{len(missing)} kept chunks are lost: {min(missing)!r}")
        now = client.kept()
        if cleared := now.difference(client.keys):
            self.wrong(f"{len(cleared)} are back: {min(cleared)!r}")
        self.tally.unacknowledged += len(now - acknowledged)
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
            descriptions = read_descriptions(client.engine.scheduler, up)
            for key, description in zip(up, descriptions, strict=True):
                if description is not None and description != described(key):
                    self.wrong(f"{key!r} is described wrongly")
                self.tally.described += description is not None
            if up and self.load(client, up) == len(up):
                self.tally.found_again += len(up)
                left = [key for key in left if key not in up]
        if left:
            self.wrong(f"{len(left)} kept chunks do not come up: {left[0]!r}")


def run(passes: int, seed: int) -> Tally:
    """End daemon or tier so many times."""
    with tempfile.TemporaryDirectory(prefix="kvd-tier-", dir="/var/tmp") as disk:  # no tmpfs
        return kill_loop.play(lambda start, path: Loop(start, path, Path(disk), seed), passes)


if __name__ == "__main__":
    sys.exit(kill_loop.main(run))
