"""What the loops of kills have in common.

Two engines of two models share a pool that is too small for them. They store and load until
something is killed; it is started again, and what is there then is held against what was there
before.
"""

import random
import tempfile
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import ClassVar, Generic, TypeVar

from kvd_client.attachment import Attachment
from kvd_proto.descriptions import encode
from kvd_proto.directory import DirectoryView
from tests import long_runs
from tests.daemon.engines import Engine, described, keys_of, make_layout
from tests.daemon.serving import Daemon, StartDaemon, started_daemons

BATCH = 12


@dataclass
class Tally:
    """What was done and seen."""

    stores: int = 0
    loads: int = 0
    described: int = 0
    verified_bytes: int = 0
    violations: list[str] = field(default_factory=list)

    def report(self) -> long_runs.Report:
        """As one JSON object."""
        first = self.violations[:5]
        return asdict(self) | {"violations": len(self.violations), "first_violations": first}


class Client:
    """An engine, the keys it uses, and its attachment to the daemon."""

    def __init__(self, runtime_dir: Path, name: str, keys: int, *, replicated: bool) -> None:
        page = 8192 if replicated else 4096
        layout = make_layout(page=page, replicated=replicated)
        self.engine = Engine(runtime_dir, name=name, model=name, layout=layout, events=True)
        self.name = name
        self.keys = keys_of(name, keys)
        self.attachment: Attachment
        self.chunk_bytes = 2 * 2 * page * len(self.engine.workers)

    @property
    def directory(self) -> DirectoryView:
        """Of the daemon that serves, or served last."""
        return self.attachment.directory

    def attach(self, daemon: Daemon) -> None:
        """Until the directory of this daemon is here."""
        attachment = self.engine.wait_attached(daemon).scheduler._attachments.current
        assert attachment is not None
        self.attachment = attachment


ClientT = TypeVar("ClientT", bound=Client)
TallyT = TypeVar("TallyT", bound=Tally)


class KillLoop(ABC, Generic[ClientT, TallyT]):
    """The daemon, its engines, and what has become of them."""

    KEYS: ClassVar[int]
    LOADS: ClassVar[float]
    """This part of the steps are loads."""

    def __init__(
        self,
        start: StartDaemon,
        runtime_dir: Path,
        seed: int,
        tally: TallyT,
        client: type[ClientT],
    ) -> None:
        self.start = start
        self.random = random.Random(seed)
        self.tally = tally
        self.daemon = self.begin()
        self.clients = [
            client(runtime_dir, "split", self.KEYS, replicated=False),
            client(runtime_dir, "alike", self.KEYS, replicated=True),
        ]
        self.attach()

    @abstractmethod
    def begin(self) -> Daemon:
        """The next daemon; nobody waits for it here."""

    @abstractmethod
    def turn(self) -> None:
        """Store and load until something is killed, then have it back, then look."""

    def attach(self) -> None:
        """Until the directory of this daemon is here."""
        for client in self.clients:
            client.attach(self.daemon)

    def step(self) -> None:
        """One store or load of some keys, which may fail in every way but a wrong byte."""
        client = self.random.choice(self.clients)
        at = self.random.randrange(self.KEYS - BATCH)
        keys = client.keys[at : at + self.random.randint(1, BATCH)]
        if self.random.random() < self.LOADS:
            self.load(client, self.wanted(client, keys))
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

    def wanted(self, _client: ClientT, keys: list[bytes]) -> list[bytes]:
        """Which of these a step is to load."""
        return keys

    def load(self, client: ClientT, keys: list[bytes]) -> int:
        """Load what is there; how many chunks came, every byte of them looked at."""
        if not keys:
            return 0
        loaded, wrong = client.engine.load(keys)
        self.tally.loads += loaded
        self.tally.verified_bytes += loaded * client.chunk_bytes
        if wrong:
            self.wrong(f"{wrong} wrong bytes among {keys[0]!r} and following")
        return loaded

    def wrong(self, what: str) -> None:
        """Note a promise that was not kept."""
        self.tally.violations.append(what)

    def close(self) -> None:
        """End the engines; the daemons end with their context."""
        for client in self.clients:
            client.engine.close()


def play(make: Callable[[StartDaemon, Path], KillLoop[ClientT, TallyT]], turns: int) -> TallyT:
    """Play so many turns of a loop in a runtime directory of its own."""
    with tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp") as path:  # short
        runtime_dir = Path(path) / "run"
        with started_daemons(runtime_dir) as start:
            loop = make(start, runtime_dir)
            try:
                for _ in range(turns):
                    loop.turn()
            finally:
                loop.close()
            return loop.tally


def main(run: Callable[[int, int], Tally]) -> int:
    """The command line, turns and seed; the last line of the output is JSON."""
    chosen = long_runs.command_line(__doc__, 200).parse_args()
    return long_runs.main(chosen, lambda: run(chosen.amount, chosen.seed).report())
