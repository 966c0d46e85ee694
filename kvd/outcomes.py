"""The outcome of one chunk in a tier: for the broker, the link, and backends of other packages."""

from enum import IntEnum


class Outcome(IntEnum):
    """How the put or get of one chunk ended."""

    OK = 0  # put: a get finds the chunk from now on; in a persistent tier also after a SIGKILL
    ABSENT = 1  # get: the tier does not have the chunk
    FULL = 2  # put: no space is left and none can be freed
    CORRUPT = 3  # get: the bytes are not those that were put; the backend has dropped the chunk
    FAILED = 4  # the medium reported an error
    LATE = 5  # the deadline passed first
    GONE = 6  # the slot holds another chunk now
