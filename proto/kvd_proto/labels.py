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
    UNDER_10S = 2  # one will in less than 10 s
    UNDER_60S = 3  # one will in less than 60 s
    UNDER_600S = 4  # one will in less than 600 s
    LATER = 5  # one will in 600 s or more


def label_for(seconds: float) -> Label:
    """The label of a request that is continued after so many seconds; negative counts as 0."""
    if seconds < 10:
        return Label.UNDER_10S
    if seconds < 60:
        return Label.UNDER_60S
    return Label.UNDER_600S if seconds < 600 else Label.LATER
