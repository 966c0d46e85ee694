"""The pool's memory, in a process that moves its bytes."""

import mmap
import os

from kvd.errors import PoolError


def map_pool(pool_fd: int, pool_bytes: int) -> memoryview:
    """Map the pool's file, writable; the descriptor stays the caller's.

    Raises:
        PoolError: the file is smaller than `pool_bytes`, or cannot be mapped.
    """
    have = os.fstat(pool_fd).st_size
    if have < pool_bytes:
        raise PoolError(f"the pool's file has {have} bytes, {pool_bytes} were promised")
    try:
        return memoryview(mmap.mmap(pool_fd, pool_bytes))
    except (OSError, ValueError) as error:
        raise PoolError(f"the pool's {pool_bytes} bytes cannot be mapped: {error}") from error
