"""Runs: chunks of one namespace in slots that follow each other, which one call moves."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from kvd.tier.contract import Chunk
from kvd.tier.disk.aligned import run_slots
from kvd.tier.disk.records import Record
from kvd.tier.disk.slabs import Slab


@dataclass(frozen=True, slots=True)
class Item:
    """One chunk of a batch, and its slot.

    Attributes:
        index: in the batch.
        record: of the slot: the one that is there, or that it will have.
    """

    index: int
    chunk: Chunk
    slab: Slab
    slot: int
    record: Record


def runs(items: Iterable[Item]) -> Iterator[list[Item]]:
    """Put together what one call can move."""
    run: list[Item] = []
    for item in sorted(items, key=lambda item: (item.slab.number, item.slot)):
        if run and not _follows(run, item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _follows(run: list[Item], item: Item) -> bool:
    last = run[-1]
    return (
        item.slab is last.slab
        and item.slot == last.slot + 1
        and item.chunk.space == last.chunk.space
        and len(run) < run_slots(item.chunk.space)
    )
