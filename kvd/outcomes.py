"""What becomes of a chunk in a tier: for the broker, the link, and backends of other packages."""

from enum import IntEnum


class Outcome(IntEnum):
    """How the put or get of one chunk ended."""

    OK = 0  # a put: a get finds it from now on; a tier that keeps, also once it was killed
    ABSENT = 1  # a get: it is not there, or not any more
    FULL = 2  # a put: no room, and none can be made
    CORRUPT = 3  # a get: what was read is not what was put; the backend has dropped it
    FAILED = 4  # an error of the medium
    LATE = 5  # the deadline passed first
    GONE = 6  # the slot holds another chunk by now
