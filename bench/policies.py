"""Hits by eviction policy and by what requests say of their return, on a trace.

`python bench/policies.py TRACE` prints the share of chunks found in pools of 2, 5, 10 and 25 % of
the trace's chunks: LRU, adaptive with labels of several kinds, and Belady, which knows the future.
TRACE is what `kvd replay` takes. The labels are made from the trace's own future: a request goes
on when a later one has its last whole chunk, and the gap is the time until then.

`--liar` splits the requests by conversation between two clients of one namespace, one of which
lies always, and prints what the other one finds.
"""

import argparse
import math
import random
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kvd.cache.adaptive import POLICIES
from kvd.replay import (
    GHOSTS_PER_SLOT,
    NEVER,
    TOKENS_PER_ID,
    USERS,
    Hits,
    Trace,
    continuations,
    labels_for,
    read_trace,
    replay_belady,
    replay_policy,
    return_gaps,
)
from kvd_proto.messages import Label

PERCENT = (2, 5, 10, 25)
LIARS = (0.2, 0.5)  # shares of the conversations
GAP_LABELS = (Label.DONE, Label.UNDER_10S, Label.UNDER_60S, Label.UNDER_600S, Label.LATER)
Labels = Sequence[Label] | None


def main() -> None:
    """Read the trace, play it, print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ghosts", type=float, default=GHOSTS_PER_SLOT, help="by slot of the pool")
    parser.add_argument("--seed", type=int, default=0, help="of the noise in labels")
    parser.add_argument("--percent", type=float, nargs="+", default=PERCENT, help="of the chunks")
    parser.add_argument("--liar", action="store_true")
    args, trace = parse_with_trace(parser)
    touches = sum(len(request.chunks) for request in trace.requests)
    hours = (trace.requests[-1].time - trace.requests[0].time) / 3600
    print(
        f"{args.trace.name}: {len(trace.requests):,} requests in {hours:.1f} h, {touches:,} chunks"
        f" asked for, {trace.num_chunks:,} different ones"
    )
    if args.liar:
        print_liars(trace, args)
    else:
        print_policies(trace, touches, args)


def parse_with_trace(parser: argparse.ArgumentParser) -> tuple[argparse.Namespace, Trace]:
    """Parse the command line, which also names a trace, and read that."""
    parser.add_argument("trace", type=Path)
    parser.add_argument("--tokens-per-id", type=int, default=TOKENS_PER_ID)
    parser.add_argument("--ids-per-chunk", type=int, default=1)
    parser.add_argument("--users", type=int, default=USERS)
    args = parser.parse_args()
    return args, read_trace(
        args.trace,
        tokens_per_id=args.tokens_per_id,
        ids_per_chunk=args.ids_per_chunk,
        users=args.users,
    )


def print_policies(trace: Trace, touches: int, args: argparse.Namespace) -> None:
    """Print hits in % of chunks asked for; a row for each policy and kind of labels."""
    pools = [max(1, round(trace.num_chunks * percent / 100)) for percent in args.percent]
    print_row("hits in %", *(f"{percent:g} %" for percent in args.percent), "least over LRU", "us")
    lru: list[float] = []
    for name, policy, labels in (
        ("LRU", "lru", None),
        *kinds_of_labels(trace, random.Random(args.seed)),
    ):
        begin = time.process_time()
        shares = [
            100 * int(replay(trace, policy, pool, labels, args.ghosts).sum()) / touches
            for pool in pools
        ]
        cost = 1e6 * (time.process_time() - begin) / touches / len(pools)
        lru = lru or shares
        least = min(share - base for share, base in zip(shares, lru, strict=True))
        print_row(name, *(f"{share:.1f}" for share in shares), f"{least:+.2f}", f"{cost:.2f}")
    belady = [100 * int(replay_belady(trace, pool).sum()) / touches for pool in pools]
    print_row("Belady", *(f"{share:.1f}" for share in belady), "", "")


def print_row(*cells: str) -> None:
    """Print a row of a table; a long trace takes minutes for each."""
    print("|", " | ".join(cells), "|", flush=True)


def replay(trace: Trace, policy: str, num_slots: int, labels: Labels, ghosts: float) -> Hits:
    """Chunks that each request finds."""
    return replay_policy(trace, POLICIES[policy], num_slots, labels=labels, ghosts_per_slot=ghosts)


def kinds_of_labels(trace: Trace, rng: random.Random) -> Iterator[tuple[str, str, Labels]]:
    """A row's name, its policy and its labels."""
    gaps = return_gaps(trace)
    done = [Label.DONE if gap == NEVER else Label.NONE for gap in gaps]
    noisy = [gap * math.exp(rng.gauss(0, 1)) for gap in gaps]
    yield "adaptive, no labels", "adaptive", None
    yield 'adaptive + "done"', "adaptive", done
    yield "adaptive + gaps + done", "adaptive", labels_for(gaps)
    yield (
        "the same, gaps x e^N(0,1), 10 % wrong",
        "adaptive",
        corrupted(labels_for(noisy), 0.1, GAP_LABELS, rng),
    )
    yield "the same, 30 % wrong", "adaptive", corrupted(labels_for(gaps), 0.3, GAP_LABELS, rng)
    yield (
        'adaptive + "done", 30 % wrong',
        "adaptive",
        corrupted(done, 0.3, (Label.NONE, Label.DONE), rng),
    )


def corrupted(
    labels: Sequence[Label], share: float, among: Sequence[Label], rng: random.Random
) -> list[Label]:
    """The labels, of which this share is replaced by another one."""
    return [
        rng.choice([other for other in among if other != label]) if rng.random() < share else label
        for label in labels
    ]


def print_liars(trace: Trace, args: argparse.Namespace) -> None:
    """Print what the honest client finds, in % of its chunks, beside one that lies.

    "Least" is the largest change by a lie, in % of what the honest client finds otherwise.
    """
    gaps = return_gaps(trace)
    truth = labels_for(gaps)
    lies = {
        "the truth": truth,
        'always "done"': [Label.DONE] * len(gaps),
        'always "< 10 s"': [Label.UNDER_10S] * len(gaps),
        "the contrary": [Label.UNDER_10S if gap == NEVER else Label.DONE for gap in gaps],
    }
    asked = np.array([len(request.chunks) for request in trace.requests])
    pools = [max(1, round(trace.num_chunks * percent / 100)) for percent in args.percent]
    for share in LIARS:
        lying = of_liars(trace, share, random.Random(args.seed))
        print(f"a liar with {100 * asked[lying].sum() / asked.sum():.0f} % of the chunks")
        print_row("the liar says", *(f"honest, {p:g} %" for p in args.percent), "least", "itself")
        baseline: list[float] = []
        for name, told in {"nothing, LRU": None, **lies}.items():
            labels = told and [
                lie if liar else true
                for lie, true, liar in zip(told, truth, lying.tolist(), strict=True)
            ]
            hits = [
                replay(trace, "adaptive" if labels else "lru", pool, labels, args.ghosts)
                for pool in pools
            ]
            honest, own = (
                [100 * found[whose].sum() / asked[whose].sum() for found in hits]
                for whose in (~lying, lying)
            )
            baseline = honest if name == "the truth" else baseline
            changes = [100 * (h / b - 1) for h, b in zip(honest, baseline, strict=False)]
            print_row(
                name,
                *(f"{share:.1f}" for share in honest),
                f"{min(changes):+.1f} %" if changes else "",
                " / ".join(f"{share:.1f}" for share in own),
            )


def of_liars(trace: Trace, share: float, rng: random.Random) -> npt.NDArray[np.bool_]:
    """Which requests are the liar's: those of this share of the conversations."""
    liar: list[bool | None] = [None] * (len(trace.requests) + 1)
    for index, after in enumerate(continuations(trace)):
        own = liar[index]
        if own is None:
            own = liar[index] = rng.random() < share
        if liar[after] is None:
            liar[after] = own
    return np.array(liar[:-1], bool)


if __name__ == "__main__":
    main()
