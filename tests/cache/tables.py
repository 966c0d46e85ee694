"""Namespaces in plain memory, and chunks stored at once."""

from collections.abc import Mapping
from typing import Any

from kvd.cache.chunks import ChunkTable
from kvd.cache.namespaces import Keeping, Namespace, Namespaces
from kvd.config.settings import Settings
from kvd.config.values import Quota
from kvd.pool.filling import FillOrder
from kvd_proto.messages import StorePrepared

PAGE = 4096
MIB = 2**20


def make_namespaces(
    cpu_bytes: int,
    *,
    keeping: Keeping | None = None,
    fill: FillOrder | None = None,
    quotas: Mapping[str, Quota] | None = None,
    **settings: Any,
) -> Namespaces:
    """Return namespaces whose directories are bytearrays."""
    namespaces = Namespaces(
        cpu_bytes,
        Settings(**settings),
        boot_id=bytes(16),
        make_buffer=lambda _, size: bytearray(size),
        keeping=keeping,
        fill=fill,
    )
    namespaces.pool.set_quotas(quotas or {})
    return namespaces


def add(
    namespaces: Namespaces,
    number: int = 0,
    *slot_bytes: int,
    world_size: int | None = None,
    replicated: bool = False,
    **options: Any,
) -> Namespace:
    """Open a namespace of "model <number>", or another label, with one engine."""
    options.setdefault("label", f"model {number}")
    namespace = namespaces.open(
        bytes([number]) * 16,
        slot_bytes,
        world_size=world_size or (2 if replicated else len(slot_bytes)),
        replicated=replicated,
        **options,
    )
    namespaces.attach_engine(namespace)
    return namespace


def make_table(chunks: int, ranks: int = 1, **options: Any) -> ChunkTable:
    """Return the table of the only namespace in a pool of `chunks` chunks of four blocks."""
    namespaces = make_namespaces(chunks * ranks * PAGE, **options)
    return add(namespaces, 0, *(PAGE,) * ranks, blocks_per_chunk=4).table


def names(count: int, first: int = 0) -> list[bytes]:
    """Return keys with numbers."""
    return [b"key %d" % number for number in range(first, first + count)]


def store(table: ChunkTable, keys: list[bytes], now: float = 0.0) -> StorePrepared:
    """Store as many whole chunks as are accepted, the shares of all ranks at once."""
    decision = table.prepare_store(keys, 1, now)
    finish(table, decision)
    return decision


def finish(
    table: ChunkTable, decision: StorePrepared, first: int = 0, count: int | None = None
) -> None:
    """Report all shares of what was accepted, with these blocks or all."""
    n, count = len(decision.slots), count or table.directory.blocks_per_chunk
    refs = decision.slots.numpy(), decision.generations.numpy()
    for rank in range(table.space.geometry.world_size):
        table.share_done(1, rank, *refs, [first] * n, [count] * n, [0] * n, ok=True)
