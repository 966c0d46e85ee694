"""What the defaults should be, by the figures that gpu_explore.py finds: figures in, lines out.

A choice that costs something (more blocks, larger pieces, another order) must be better than the
one before it by more than what a card's own figure varies.
"""

from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from math import exp, log
from typing import Any, TypeVar

NOISE = 0.04
SAID_LETTERS = 300
KERNEL_GAIN = 1.25  # the lane's own rule: a kernel takes the GPU from whoever computes

Row = Mapping[str, Any]
Key = TypeVar("Key", bound=Hashable)


def advice(result: Mapping[str, Any]) -> list[str]:
    """A line for each default; one without figures has none.

    Args:
        result: of gpu_explore.py.
    """
    batches, kernels = rows(result, "batch"), rows(result, "kernel")
    return [
        line
        for line in (
            _overlap(batches),
            _order(batches),
            _number(batches),
            _blocks(kernels),
            *_threshold(batches, kernels),
            _pieces(result.get("pieces") or {}),
            _layout(result.get("layouts") or {}),
        )
        if line
    ]


def facts(result: Mapping[str, Any]) -> Iterator[str]:
    """Lines about what no default follows from: MPS, users, layouts."""
    for name, found in (result.get("beside") or {}).items():
        yield f"beside {name}: {_shared(found)}"
    for pair, said in (result.get("users") or {}).items():
        yield f"{pair}: {said[:SAID_LETTERS]}"
    for name, found in (result.get("layouts") or {}).items():
        yield f"layouts, {name.replace('_', ' ')}: {found['median']:.2f}, n {found['n']}"


def rows(result: Mapping[str, Any], kind: str) -> list[Row]:
    """Of one kind of sweep, those that have figures."""
    return [row for row in result.get(kind) or [] if "median" in row]


def gain(found: Iterable[Row], key: str, same: Sequence[str]) -> float | None:
    """How many times faster rows with `key` are than those without.

    The geometric mean over pairs that are else the same; None where there is no pair.

    Args:
        found: rows with a `median`.
        key: of a truth.
        same: keys in which the two rows of a pair agree.
    """
    by = {(bool(row[key]), tuple(row[each] for each in same)): row["median"] for row in found}
    logs = [
        log(rate / by[False, rest])
        for (has, rest), rate in by.items()
        if has and (False, rest) in by
    ]
    return exp(sum(logs) / len(logs)) if logs else None


def cheapest(rates: Mapping[Key, Sequence[float]]) -> tuple[Key, dict[Key, float]] | None:
    """The first choice that is about as fast as the best, and each one's share of the best.

    Args:
        rates: by choice, the cheapest first; of each as many, of the same cases in the same order.
    """
    means = {
        choice: exp(sum(map(log, found)) / len(found)) for choice, found in rates.items() if found
    }
    if not means:
        return None
    best = max(means.values())
    shares = {choice: mean / best for choice, mean in means.items()}
    return next(choice for choice, share in shares.items() if share >= 1 - NOISE), shares


def _overlap(batches: Sequence[Row]) -> str:
    if not batches:
        return ""
    same = ("fragment", "direction", "number", "any_order")
    found = gain(batches, "overlap", same)
    if found is None:
        return "overlap: not measured, batches with the flag were refused or the driver is older"
    chosen = int(found >= 1 - NOISE)
    return f"overlap={chosen}: batches for copy engines only have {found:.2f} x the GB/s"


def _order(batches: Sequence[Row]) -> str:
    loads = [row for row in batches if row["direction"] == "load"]
    same = ("fragment", "number", "overlap")
    found = gain(loads, "any_order", same)
    if found is None:
        return ""
    chosen = "any" if found > 1 + NOISE else "stream"
    return f"order={chosen}: loads in any order have {found:.2f} x the GB/s of stream order"


def _number(batches: Sequence[Row]) -> str:
    found = cheapest(_cases(batches, "number", ("fragment", "direction", "overlap", "any_order")))
    if found is None:
        return ""
    return f"fragments a call: {found[0]} suffice ({_shares(found[1])})"


def _blocks(kernels: Sequence[Row]) -> str:
    found = cheapest(_cases(kernels, "blocks", ("fragment", "direction")))
    return f"blocks={found[0]} ({_shares(found[1])})" if found else ""


def _threshold(batches: Sequence[Row], kernels: Sequence[Row]) -> Iterator[str]:
    """For each direction and length: how the best kernel compares with the best batch."""
    for direction in ("load", "store"):
        parts = []
        for fragment in sorted({row["fragment"] for row in kernels}):
            case = {"fragment": fragment, "direction": direction}
            kernel, batch = _best(kernels, case), _best(batches, case)
            if kernel and batch:
                way = "kernel" if kernel >= KERNEL_GAIN * batch else "copy engines"
                parts.append(f"{fragment} bytes {kernel / batch:.2f} x, {way}")
        if parts:
            yield f"{direction}s by the kernel, against batches: {'; '.join(parts)}"


def _pieces(pieces: Mapping[str, Any]) -> str:
    """Of options such as `bulk=16MiB,flight=64MiB`, by the ratio to the raw copy."""
    rates: dict[str, list[float]] = {}
    fragments = sorted({row["bytes"] for found in pieces.values() for row in found})
    for options, found in pieces.items():
        by = {row["bytes"]: row for row in found}
        if all(fragment in by for fragment in fragments):
            rates[options] = [
                by[fragment][direction]["ratio"]["median"]
                for fragment in fragments
                for direction in ("store", "load", "both")
            ]
    found = cheapest(rates)
    return f"{found[0]} ({_shares(found[1])})" if found else ""


def _layout(layouts: Mapping[str, Any]) -> str:
    worst = max((layouts[f"{work}_ratio"]["median"] for work in _works(layouts)), default=None)
    if worst is None:
        return ""
    word = "no reason against" if worst <= 1 + NOISE else "look at an engine's own attention before"
    return f"kv_layout: {word} blocks outermost: torch takes {worst:.2f} x the time at worst"


def _works(layouts: Mapping[str, Any]) -> list[str]:
    return [work for work in ("gather", "attend") if f"{work}_ratio" in layouts]


def _shared(found: Mapping[str, Any]) -> str:
    """How another process fares beside the copies."""
    alone, beside = (
        [found[f"decode_{of}_{at}_us"]["median"] for at in ("p50", "p99", "longest")]
        for of in ("alone", "beside")
    )
    shown = ", ".join(f"{a:.0f} -> {b:.0f}" for a, b in zip(alone, beside, strict=True))
    loss = found["loss_percent"]
    return (
        f"its small kernels' p50, p99, longest us {shown}; its matrix products lose"
        f" {loss['median']:.1f} ±{loss['margin']:.1f} %; kvd {found['kvd_GBps']['median']:.1f} GB/s"
    )


def _cases(found: Sequence[Row], key: str, same: Sequence[str]) -> dict[Any, list[float]]:
    """By value of `key`, lowest first: GB/s of the cases that there are for every value."""
    by: dict[Any, dict[tuple[Any, ...], float]] = {}
    for row in found:
        case = tuple(row.get(each) for each in same)
        by.setdefault(row[key], {})[case] = float(row["median"])
    if not by:
        return {}
    common = set.intersection(*(set(cases) for cases in by.values()))
    return {value: [cases[case] for case in sorted(common)] for value, cases in sorted(by.items())}


def _best(found: Sequence[Row], case: Row) -> float:
    rates = [row["median"] for row in found if all(row[key] == case[key] for key in case)]
    return float(max(rates, default=0.0))


def _shares(shares: Mapping[Any, float]) -> str:
    return ", ".join(f"{choice}: {share:.0%}" for choice, share in shares.items()) + " of the best"
