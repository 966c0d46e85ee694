"""Zero bytes of a mapping."""

from kvd.errors import LaneError

_ZEROS = bytes(2**20)


def zero_bytes(mapping: memoryview, begin: int, end: int) -> None:
    """Zero bytes begin..end - 1.

    Raises:
        LaneError: they are not all inside the mapping; nothing was zeroed.
    """
    if not 0 <= begin <= end <= len(mapping):
        raise LaneError(f"bytes {begin} to {end} of {len(mapping)}")
    for start in range(begin, end, len(_ZEROS)):
        until = min(start + len(_ZEROS), end)
        mapping[start:until] = _ZEROS if until - start == len(_ZEROS) else bytes(until - start)
