"""Labels of requests: what an engine expects of a request's chunks once it has finished.

A label is a hint. The eviction policy learns for each label when chunks that carry it are used
again; a label neither keeps a chunk nor removes one.
"""

from enum import IntEnum

MAX_SECONDS = 86_400
"""Longer waits are cut to this."""
LABEL_ONLY = 0x80
"""Set in a label's byte: the request was reported before, and only its label is new."""


class Label(IntEnum):
    """When the next request that uses the same chunks is expected."""

    NONE = 0  # nothing is known
    DONE = 1  # no request will continue this one
    UNDER_10S = 2
    UNDER_60S = 3
    UNDER_600S = 4
    LATER = 5


def label_for(seconds: float) -> Label:
    """The label of a request that is continued after so many seconds; negative counts as 0."""
    if seconds < 10:
        return Label.UNDER_10S
    if seconds < 60:
        return Label.UNDER_60S
    return Label.UNDER_600S if seconds < 600 else Label.LATER
