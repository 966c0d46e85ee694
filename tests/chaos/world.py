"""Everything that injections act on and invariants look at."""

import time
from collections import Counter

from tests.chaos.children import Client, Freezer
from tests.chaos.clock import WallClock
from tests.chaos.daemons import Daemon
from tests.chaos.place import Place
from tests.chaos.shared import Count, phase_word
from tests.chaos.specs import SPECS


class World:
    """One run.

    Attributes:
        seed: of the plan.
        place: its folders.
        daemon: the one under test.
        clients: schedulers and ranks by name.
        freezer: who is frozen.
        injected: how often each kind was injected; `skipped` says why some were not.
        violations: in words, all of them.
    """

    def __init__(self, seed: int, place: Place) -> None:
        self.seed = seed
        self.place = place
        self.clock = WallClock(place.folder)
        self.daemon = Daemon(place, self.clock.environment)
        self.phase = phase_word(place.folder)
        self.freezer = Freezer()
        self.injected: Counter[str] = Counter()
        self.skipped: dict[str, str] = {}
        self.violations: list[str] = []
        self.now_doing = "nothing yet"
        self.clients: dict[str, Client] = {}
        for number, spec in enumerate(SPECS.values()):
            for rank in (None, *range(spec.ranks)):
                own = seed * 1_000_003 + number * 10_007 + (rank or 0) * 101
                client = Client(place.folder, place.runtime_dir, spec, rank, own & 0x7FFFFFFF)
                self.clients[client.name] = client

    def violated(self, text: str) -> None:
        """An invariant does not hold."""
        self.violations.append(f"{self.now_doing}: {text}")
        print(f"VIOLATION {self.violations[-1]}", flush=True)

    def ranks(self) -> list[Client]:
        """All ranks."""
        return [client for client in self.clients.values() if client.rank is not None]

    def schedulers(self) -> list[Client]:
        """All schedulers."""
        return [client for client in self.clients.values() if client.rank is None]

    def total(self, count: Count, clients: list[Client]) -> int:
        """A counter's sum."""
        return sum(client.counters[count] for client in clients)

    def thaw(self, pid: int) -> None:
        """Let a frozen process go on."""
        counters = [c.counters for c in self.clients.values() if c.started and c.pid == pid]
        self.freezer.cont(pid, counters[0] if counters else None)

    def revive(self) -> None:
        """Start what does not run."""
        if not self.daemon.running:
            died = self.daemon.died()
            if died and not (self.daemon.refused_to_start() and "fill pool" in self.now_doing):
                self.violated(died)
            self.daemon.start()
        for client in self.clients.values():
            if not client.running:
                client.start()

    def wait_for(self, what: Count, seconds: float) -> list[Client]:
        """Until every client has set this word; those that have not in time."""
        end = time.monotonic() + seconds
        while True:
            late = [client for client in self.clients.values() if not client.counters[what]]
            if not late or time.monotonic() > end:
                return late
            time.sleep(0.02)
