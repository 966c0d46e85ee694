"""The sampled miss-ratio curve beside the exact one, on a trace.

`python bench/miss_curve.py TRACE` feeds the class that the broker uses (`kvd/cache/miss_curve.py`)
with pools of 1 to 50 % of the trace's chunks. For each it prints the exact share of hits and the
error in points, for the pool's own size and as the largest one over all sizes of a forecast.
Exact are Mattson's stack distances over all keys. The sample depends on the keys' hashes: `--runs`
takes so many, each with other keys for the same chunks.

TRACE is what `kvd replay` takes.
"""

import argparse
import time
import tracemalloc
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
from policies import parse_with_trace
from rich.console import Console
from rich.table import Table

from kvd.broker.forecast import SIZES
from kvd.cache.miss_curve import SAMPLE_EVERY, MissCurve
from kvd.replay import Trace

PERCENT = (1, 2, 5, 10, 25, 50)
KEY_BYTES = 36  # vLLM's
FACTORS = tuple(factor for _, factor in SIZES)

Prompts = list[list[bytes]]


def main() -> None:
    """Read the trace, measure, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    args, trace = parse_with_trace(parser)
    asked = sum(len(request.chunks) for request in trace.requests)
    print(
        f"{args.trace.name}: {len(trace.requests):,} requests, {asked:,} chunks asked for,"
        f" {trace.num_chunks:,} different ones; one of {SAMPLE_EVERY} sampled"
    )
    print_errors(trace, args.runs)
    print_costs(trace)


def print_errors(trace: Trace, runs: int) -> None:
    """Print the exact hits and the errors of the sampled ones, a row a pool."""
    distances = exact_distances(trace)
    asked = sum(len(request.chunks) for request in trace.requests)
    title = f"error in points, {runs} runs: mean, and in brackets the largest"
    table = Table("pool", "exact %", "at its size", "-50 to +200 %", "no limit", title=title)
    errors: dict[int, list[list[float]]] = {percent: [] for percent in PERCENT}
    for run in range(runs):
        prompts = prompts_of(trace, run)
        for percent in PERCENT:
            chunks = max(1, trace.num_chunks * percent // 100)
            curve = MissCurve(chunks, SAMPLE_EVERY)
            for keys in prompts:
                curve.record(keys, len(keys))
            curve.check_integrity()
            exact = [np.searchsorted(distances, factor * chunks) / asked for factor in FACTORS]
            sampled = [curve.hit_ratio(factor * chunks) for factor in FACTORS]
            ends = [*exact, len(distances) / asked], [*sampled, curve.ceiling]
            errors[percent].append([100 * abs(one - two) for one, two in zip(*ends, strict=True)])
    for percent in PERCENT:
        chunks = max(1, trace.num_chunks * percent // 100)
        found = np.array(errors[percent])
        at_size, around, ceiling = found[:, FACTORS.index(1.0)], found[:, :-1].max(1), found[:, -1]
        table.add_row(
            f"{percent} %",
            f"{100 * np.searchsorted(distances, chunks) / asked:.1f}",
            *(f"{one.mean():.2f} ({one.max():.2f})" for one in (at_size, around, ceiling)),
        )
    Console().print(table)


def print_costs(trace: Trace) -> None:
    """Print processor time and memory, with a pool of 10 % of the trace's chunks."""
    chunks, prompts = max(1, trace.num_chunks // 10), prompts_of(trace, 0)
    curve, records, pieces = MissCurve(chunks, SAMPLE_EVERY), [], []
    for keys in prompts:
        records.append(_seconds(curve.record, keys, len(keys)))
        pieces.append(_seconds(curve.tidy))
    mean = (sum(records) + sum(pieces)) / len(prompts)
    print(
        f"{1e6 * mean:.1f} µs a request; longest record {1e3 * max(records):.2f} ms, longest tidy"
        f" {1e3 * max(pieces):.2f} ms; {_bytes_per_key(prompts, chunks):.0f} bytes a sampled key"
    )


def _seconds(call: Callable[..., object], *arguments: object) -> float:
    """Processor time of a call."""
    began = time.thread_time()
    call(*arguments)
    return time.thread_time() - began


def _bytes_per_key(prompts: Prompts, chunks: int) -> float:
    tracemalloc.start()
    curve = MissCurve(chunks, SAMPLE_EVERY)
    for keys in prompts:
        curve.record(keys, len(keys))
    nbytes, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return nbytes / curve.num_keys


def prompts_of(trace: Trace, run: int) -> Prompts:
    """The requests with keys for their chunks, other ones for each run."""
    numbers = range(trace.num_chunks)
    keys = [f"{run}-{number}".encode().ljust(KEY_BYTES, b".") for number in numbers]
    return [[keys[chunk] for chunk in request.chunks.tolist()] for request in trace.requests]


def exact_distances(trace: Trace) -> npt.NDArray[np.int64]:
    """The stack distance of each chunk that was asked for before, ascending.

    A Fenwick tree counts the chunks by the time of their last use.
    """
    prompts: Sequence[Sequence[int]] = [request.chunks.tolist() for request in trace.requests]
    size = sum(map(len, prompts))
    tree, last_use = [0] * (size + 1), [0] * trace.num_chunks
    distances, now, live = [], 0, 0

    def add(place: int, number: int) -> None:
        while place <= size:
            tree[place] += number
            place += place & -place

    def up_to(place: int) -> int:
        total = 0
        while place:
            total += tree[place]
            place &= place - 1
        return total

    for chunks in prompts:
        distances += [live - up_to(last_use[chunk]) for chunk in chunks if last_use[chunk]]
        for chunk in reversed(chunks):  # the head is the hottest
            if last_use[chunk]:
                add(last_use[chunk], -1)
                live -= 1
            now += 1
            last_use[chunk] = now
            add(now, 1)
            live += 1
    return np.sort(np.array(distances, np.int64))


if __name__ == "__main__":
    main()
