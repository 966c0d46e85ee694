"""Open the pool, with the chunks that the daemon before this one kept in it."""

import logging
import time
from collections.abc import Callable

from kvd.cache.ledger import Ledger
from kvd.cache.namespaces import Keeping, Namespaces
from kvd.daemon.kept_pool import KeptPool, Ledgers
from kvd.daemon.memory import PoolMemory
from kvd.errors import IntegrityError, LedgerDamaged, Refused
from kvd.pool.filling import FillOrder
from kvd_proto.sizes import format_size

log = logging.getLogger("kvd.daemon")

MakeNamespaces = Callable[[Keeping | None, FillOrder], Namespaces]


def open_pool(
    kept: KeptPool, cpu_bytes: int, make_namespaces: MakeNamespaces
) -> tuple[PoolMemory, Namespaces]:
    """Return the pool's memory, and its namespaces with every chunk that is undamaged.

    Args:
        kept: its files.
        cpu_bytes: the budget.
        make_namespaces: makes them without any namespace; called again where one is damaged.

    Raises:
        PoolError: the memory cannot be had.
        Refused: a directory cannot be made now.
    """
    pool, keeping, ledgers = kept.open(cpu_bytes)
    try:
        while True:
            namespaces = make_namespaces(keeping, pool.fill)
            if _restore(kept, ledgers, namespaces):
                return pool, namespaces
    except Refused:
        pool.close()
        raise


def _restore(kept: KeptPool, ledgers: Ledgers, namespaces: Namespaces) -> bool:
    """Reopen every ledger; return False where one was set aside and all must begin again."""
    for name, buffer in list(ledgers.items()):
        began = time.perf_counter()
        try:
            ledger = Ledger(buffer)
            if ledger.kept.namespace != name:
                raise LedgerDamaged(f"it is that of namespace {ledger.kept.namespace}")
            if not len(ledger):
                kept.drop_ledger(name)
                del ledgers[name]
                continue
            namespace = namespaces.reopen(ledger)
        except LedgerDamaged as error:
            kept.set_aside(name, error)
            del ledgers[name]
            return False
        except IntegrityError as error:
            # Two ledgers name the same bytes; either may be wrong.
            for other in ledgers:
                kept.set_aside(other, str(error))
            ledgers.clear()
            return False
        ready = namespace.table.slots.stats()["ready"]
        log.info(
            "namespace %s (%s): %d chunks, %s, of the daemon before are here again (%.0f ms)",
            name[:8],
            namespace.label,
            ready,
            format_size(ready * namespace.geometry.bytes_per_chunk),
            (time.perf_counter() - began) * 1000,
        )
    return True
