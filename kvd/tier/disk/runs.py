"""Runs: chunks of one namespace in slots that follow each other, which one call moves."""

from collections.abc import Iterator
from dataclasses import dataclass

from kvd.tier.contract import Chunk
from kvd.tier.disk.aligned import layout_of
from kvd.tier.disk.records import Record
from kvd.tier.disk.slabs import Slab


@dataclass(slots=True)
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


def runs(items: list[Item]) -> Iterator[list[Item]]:
    """Put together what one call can move."""
    if len(items) > 1:
        items.sort(key=_place)
    run: list[Item] = []
    for item in items:
        if run and not _follows(run, item):
            yield run
            run = []
        run.append(item)
    if run:
        yield run


def _place(item: Item) -> tuple[int, int]:
    return item.slab.number, item.slot


def _follows(run: list[Item], item: Item) -> bool:
    last = run[-1]
    space = item.chunk.space
    return (
        item.slab is last.slab
        and item.slot == last.slot + 1
        and (space is last.chunk.space or space == last.chunk.space)
        and len(run) < layout_of(space).run_slots
    )
