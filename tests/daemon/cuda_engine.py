"""An engine in CUDA memory: its scheduler here, its ranks in processes of their own."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Self

from kvd_client import LookupResult, Scheduler
from tests.asked import Asked
from tests.daemon.cuda_rank import Rank
from tests.daemon.engines import FACTOR, PAGE, wait_boot
from tests.daemon.serving import Daemon
from tests.waiting import DEADLINE, PATIENCE, eventually


@dataclass
class CudaEngine:
    """A scheduler here, ranks in processes of their own with memory on one device."""

    runtime_dir: Path
    name: str = "engine"
    world_size: int = 2
    kind: str = "ipc"
    page: int = PAGE
    rank_type: type[Rank] = Rank
    ranks: dict[int, Asked] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.runtime_dir, self.name, deadline=DEADLINE)
        self.job = 0
        for rank in range(self.world_size):
            self.add(rank)

    def add(self, rank: int) -> None:
        """Start a rank."""
        make = partial(self.rank_type, kind=self.kind, page=self.page)
        self.ranks[rank] = Asked(make, self.runtime_dir, self.name, rank, self.world_size)

    def register(self) -> str:
        """Register all ranks that are not; the name of their device."""
        (device,) = {rank.ask("register") for rank in self.ranks.values()}
        self.wait_attached()
        assert isinstance(device, str)
        return device

    def replace(self, rank: int) -> None:
        """Another process for a rank that was killed, registered."""
        self.add(rank)
        self.ranks[rank].ask("register")
        self.wait_attached()

    def wait_attached(self, to: Daemon | None = None) -> None:
        """Until the engine is complete for everybody; `to` is as for `Engine.wait_attached`."""
        if to is not None:
            boot = bytes.fromhex(to.status()["boot_id"])
            wait_boot(self.scheduler, boot)
            for rank in self.ranks.values():
                rank.ask("wait_boot", boot)
        assert self.scheduler.wait_attached(PATIENCE)
        assert all(rank.ask("wait_attached") for rank in self.ranks.values())

    def submit(self, kind: str, ticket: Any, blocks: Sequence[int]) -> int:
        """One job of every rank; its number."""
        self.job += 1
        for rank in self.ranks.values():
            slots, generations = ticket.slots.tolist(), ticket.generations.tolist()
            rank.ask("submit", kind, self.job, blocks, slots, generations)
        return self.job

    def succeeded(self, job: int) -> bool:
        """Wait for a job; whether all ranks did it."""
        results = [rank.ask("result", job) for rank in self.ranks.values()]
        return all(result.success for result in results)

    def store(self, keys: list[bytes], first_block: int = 1) -> None:
        """Fill, store and complete; until all of it is a hit."""
        blocks = blocks_of(keys, first_block)
        for rank in self.ranks.values():
            rank.ask("fill", keys, blocks)
        ticket = self.scheduler.prepare_store(keys)
        assert list(ticket.keys) == keys
        assert self.succeeded(self.submit("store", ticket, blocks))
        self.scheduler.complete_store(ticket.keys)
        self.wait_hit(keys)

    def wait_hit(self, keys: list[bytes]) -> None:
        """Until every lane's report has been counted."""
        eventually(lambda: self.scheduler.lookup_many(keys), {LookupResult.HIT}.issuperset)

    def load(self, keys: list[bytes], first_block: int = 33) -> int:
        """Poison other blocks and load there; wrong bytes of all ranks."""
        ticket = self.scheduler.prepare_load(keys)
        assert list(ticket.keys) == keys
        blocks = blocks_of(keys, first_block)
        for rank in self.ranks.values():
            rank.ask("poison", blocks)
        assert self.succeeded(self.submit("load", ticket, blocks))
        self.scheduler.complete_load(ticket)
        return sum(rank.ask("wrong_bytes", keys, blocks) for rank in self.ranks.values())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        for rank in self.ranks.values():
            rank.close()
        self.scheduler.close()


def blocks_of(keys: Sequence[bytes], first: int) -> list[int]:
    """Blocks for these keys."""
    return list(range(first, first + len(keys) * FACTOR))


def lane_of(daemon: Daemon) -> dict[str, Any]:
    """The status of the only CUDA lane."""
    found = [lane for lane in daemon.status()["lanes"] if lane["device"] != "host"]
    assert len(found) == 1, found
    lane: dict[str, Any] = found[0]
    return lane


def wait_lane(daemon: Daemon, **wanted: object) -> dict[str, Any]:
    """Until the CUDA lane's status, its counters among it, is as given."""
    return eventually(
        lambda: lane_of(daemon), lambda lane: wanted.items() <= {**lane["counters"], **lane}.items()
    )
