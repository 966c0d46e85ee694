"""What requests of a trace find in a pool, by eviction policy, and hints from its own future.

A request finds the chunks of its prompt up to the first that is missing. Then all its chunks are
in the pool, as far as they fit, and used once, the head last, so that it stays longest.
"""

import heapq
import math
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from kvd.cache.eviction import EvictionPolicy
from kvd.cache.ghosts import Ghosts
from kvd.replay.traces import Trace
from kvd_proto.messages import Label, label_for

Hits = npt.NDArray[np.int64]
"""Chunks found, by request."""
GHOSTS_PER_SLOT = 2.0


def replay_policy(
    trace: Trace,
    policy_type: type[EvictionPolicy],
    num_slots: int,
    *,
    labels: Sequence[Label] | None = None,
    ghosts_per_slot: float = GHOSTS_PER_SLOT,
) -> Hits:
    """Play a trace through a policy of the broker; chunks that each request finds.

    Args:
        trace: what to play.
        policy_type: one of `kvd.cache.eviction.POLICIES`.
        num_slots: chunks that the pool holds, at least 1.
        labels: one for each request; none without.
        ghosts_per_slot: evicted keys that the policy remembers, by slot of the pool.
    """
    keys = [number.to_bytes(8, "little") for number in range(trace.num_chunks)]
    chunk_in = np.zeros(num_slots, np.int32)
    slot_of = np.full(trace.num_chunks, -1, np.int64)
    free = list(range(min(num_slots, trace.num_chunks)))  # more are never needed
    pinned: set[int] = set()
    ghosts = Ghosts(int(ghosts_per_slot * num_slots))
    policy = policy_type(num_slots, lambda slot: keys[chunk_in[slot]], ghosts)
    hits = np.zeros(len(trace.requests), np.int64)

    def may_evict(slot: int) -> bool:
        return slot not in pinned

    for index, request in enumerate(trace.requests):
        now, chunks = request.time, request.chunks[:num_slots]
        slots = slot_of[chunks]
        missing = np.flatnonzero(slots < 0)
        hits[index] = missing[0] if len(missing) else len(slots)
        if hits[index]:
            policy.refresh_all(slots[: hits[index]][::-1].tolist(), now)
        if len(missing) > len(free):
            pinned.clear()
            pinned.update(slots[slots >= 0].tolist())
            victims = policy.reserve(len(missing) - len(free), may_evict, now)
            policy.evict(victims, now)
            slot_of[chunk_in[victims]] = -1
            free += victims
        if len(missing):
            new = [free.pop() for _ in range(len(missing))]
            slots[missing] = new
            chunk_in[new] = chunks[missing]
            slot_of[chunks[missing]] = new
            policy.insert_all(new[::-1], now)
        if len(slots):
            policy.use_all(slots[::-1].tolist(), now, labels[index] if labels else Label.NONE)
        while policy.learn():
            pass
    return hits


def next_uses(trace: Trace) -> list[npt.NDArray[np.int64]]:
    """For each chunk of each request, the index of the next request with it; else their number."""
    upcoming = np.full(trace.num_chunks, len(trace.requests), np.int64)
    uses = []
    for index in range(len(trace.requests) - 1, -1, -1):
        chunks = trace.requests[index].chunks
        uses.append(upcoming[chunks])
        upcoming[chunks] = index
    return uses[::-1]


def replay_belady(trace: Trace, num_slots: int) -> Hits:
    """What could be found at most: the chunk that is used again last goes first.

    A chunk that is never used again is not kept. The next request with a chunk has all chunks
    before it, too, so of a request's chunks the deepest are used again last.
    """
    never = len(trace.requests)
    present = np.zeros(trace.num_chunks, bool)
    held = 0
    runs: list[tuple[int, int, int, int]] = []  # (-next use, -end, begin, request): chunks of it
    hits = np.zeros(never, np.int64)
    for index, (request, uses) in enumerate(zip(trace.requests, next_uses(trace), strict=True)):
        chunks = request.chunks
        found = present[chunks]
        hits[index] = len(found) if found.all() else int(np.argmin(found))
        keep = uses < never
        held += int(np.count_nonzero(keep)) - int(np.count_nonzero(found))
        present[chunks] = keep
        bounds = [0, *(np.flatnonzero(np.diff(uses)) + 1).tolist(), len(uses)]
        for begin, end in pairwise(bounds):
            if begin < end and uses[begin] < never:
                heapq.heappush(runs, (-int(uses[begin]), -end, begin, index))
        while held > num_slots:
            use, end, begin, owner = heapq.heappop(runs)
            cut = max(begin, -end - (held - num_slots))
            present[trace.requests[owner].chunks[cut:-end]] = False
            held -= -end - cut
            if begin < cut:
                heapq.heappush(runs, (use, -cut, begin, owner))
    return hits


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
