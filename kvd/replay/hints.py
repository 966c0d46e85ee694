"""Hints made from a trace's own future: when each request is continued."""

import math
from collections.abc import Sequence

from kvd.replay.simulate import next_uses
from kvd.replay.traces import Trace
from kvd_proto.labels import Label, label_for

NEVER = math.inf


def continuations(trace: Trace) -> list[int]:
    """For each request the index of the next one with its last whole chunk, or their number."""
    following = []
    for request, uses in zip(trace.requests, next_uses(trace), strict=True):
        whole = min(len(uses), request.tokens // trace.tokens_per_chunk)
        following.append(int(uses[whole - 1]) if whole else len(trace.requests))
    return following


def return_gaps(trace: Trace) -> list[float]:
    """Seconds until each request is continued, or NEVER."""
    times = [*(request.time for request in trace.requests), NEVER]
    return [times[after] - times[i] for i, after in enumerate(continuations(trace))]


def labels_for(gaps: Sequence[float]) -> list[Label]:
    """The labels of requests that are continued after so many seconds."""
    return [Label.DONE if gap == NEVER else label_for(gap) for gap in gaps]
