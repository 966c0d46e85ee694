"""What eviction policies cost in the broker, `adaptive` beside `lru`.

A pool of 100,000 chunks, full. In turn 64 chunks are reserved and evicted, 64 others inserted, 64
of an older request refreshed; then both requests finish. Requests have one of six labels. Times
are the processor's, medians of all turns, once `adaptive` has learned.
"""

import time

import numpy as np
from harness import Figures, fresh_keys, median

from kvd.cache.adaptive import POLICIES, AdaptivePolicy
from kvd.cache.eviction import EvictionPolicy
from kvd.cache.ghosts import Ghosts
from kvd_proto.messages import Label

SLOTS, REQUEST = 100_000, 64
WARM_UP, TURNS = 3000, 1000
SECONDS_PER_REQUEST = 0.2
RETURNING_KEYS = 2 * SLOTS // REQUEST


def measure() -> Figures:
    """Microseconds a chunk by policy and call; the longest `learn`; bytes."""
    figures: Figures = {}
    for name in sorted(POLICIES):
        ghosts = Ghosts(2 * SLOTS)
        keys = [b""] * SLOTS
        policy = POLICIES[name](SLOTS, keys.__getitem__, ghosts)
        for call, nanoseconds in _run(policy, keys).items():
            if call == "learn":
                figures[f"{name}_learn_ms_longest"] = max(nanoseconds) / 1e6
            else:
                figures[f"{name}_{call}_us"] = median(nanoseconds) / 1e3 / REQUEST
        if isinstance(policy, AdaptivePolicy):
            figures["adaptive_tables_bytes"] = policy.nbytes_learned
        figures["ghost_bytes_per_key"] = ghosts.nbytes / (2 * SLOTS)
    return figures


def _run(policy: EvictionPolicy, keys: list[bytes]) -> dict[str, list[int]]:
    """Nanoseconds of each call; of all but `learn` once the policy has learned."""
    rng = np.random.default_rng(0)
    requests = [fresh_keys(REQUEST) for _ in range(2 * RETURNING_KEYS)]  # half of them fit
    clock = time.process_time_ns
    spent: dict[str, list[int]] = {
        call: [] for call in ("evict", "insert", "refresh", "use", "learn")
    }
    now, stored = 1.7e9, dict[int, list[int]]()  # request -> its slots
    free = [list(range(i, i + REQUEST)) for i in range(0, SLOTS - REQUEST + 1, REQUEST)]
    for turn in range(WARM_UP + TURNS):
        now += SECONDS_PER_REQUEST
        label = Label(turn % len(Label))
        started = clock()
        if not free:
            policy.evict(policy.reserve(REQUEST, lambda _: True, now), now)
        evicted = clock()
        if not free:
            gone = [request for request, slots in stored.items() if slots[0] not in policy]
            free = [stored.pop(request) for request in gone]
        request = int(rng.choice([i for i in range(len(requests)) if i not in stored]))
        slots = stored[request] = free.pop()
        for slot, key in zip(slots, requests[request], strict=True):
            keys[slot] = key
        older = stored[int(rng.choice(list(stored)))]
        times = [clock()]
        policy.insert_all(slots, now)
        times.append(clock())
        policy.refresh_all(older, now)
        times.append(clock())
        policy.use_all(slots, now, label)
        times.append(clock())
        if older is not slots:
            policy.use_all(older, now, label)
        due = True
        while due:
            started_learning = clock()
            due = policy.learn()
            spent["learn"].append(clock() - started_learning)
        if turn >= WARM_UP:
            spent["evict"].append(evicted - started)
            for call, begin, end in zip(
                ("insert", "refresh", "use"), times[:-1], times[1:], strict=True
            ):
                spent[call].append(end - begin)
    return spent


if __name__ == "__main__":
    for name, value in measure().items():
        print(f"{name:26}{value:10,.2f}")
