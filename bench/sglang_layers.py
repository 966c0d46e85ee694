"""Measures what loading layer by layer gains with a real SGLang engine on CPU.

Long beginnings are found in kvd and tails are computed: whole loads come first and the step then,
or the step begins with the first layer while others are loaded. The engine computes with one
thread less than there are cores: that core is the lane's, which then loads while the engine
computes, as a GPU's copy engine does. Attention is computed for new tokens only
(`sglang_attention.py`), or else loads would be nothing beside it. Every beginning is asked twice
with tails of their own: when the device's memory was emptied, and at once again, when it is there.
The difference is what the load costs; single differences scatter by more than that, so there are
many, and quartiles are shown. Both ways have engines of their own, started in turn. Prints a table,
writes bench/out/sglang_layers.json. Runs with the Python of an environment with SGLang, and wants a
machine at rest: `.venv-sglang/bin/python bench/sglang_layers.py`.
"""

import argparse
import json
import os
import signal
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from needs import check_needs, missing_engine
from rich.console import Console
from rich.table import Table
from sglang_engines import (
    TOKEN_BYTES,
    Asking,
    Setup,
    Way,
    in_turn,
    make_tokens,
    write_bench_model,
)
from vllm_ttft import terminate

from kvd_tools.sglang_engine import SglangServer

OUT = Path(__file__).parent / "out"
SHAPES = ((1920, 64), (1920, 256))  # tokens found and computed: whole chunks
WAYS = (Way.KVD, Way.LAYERWISE)
ROUNDS, QUICK_ROUNDS = 3, 1
TIMES = 12  # that each beginning is asked in a start
DEVICE_TOKENS = 8192
CACHE_BYTES = 3 * 10**9  # all beginnings, and all tails


@dataclass(slots=True)
class Pairs:
    """Seconds to the first token with one way and one shape: loaded, and found on the device."""

    loaded: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    elsewhere: int = 0

    def figures(self) -> dict[str, Any]:
        """In ms, and how many."""
        loads = [1e3 * (a - b) for a, b in zip(self.loaded, self.device, strict=True)]
        return {
            "pairs": len(loads),
            "elsewhere": self.elsewhere,
            "device_ms": quartiles([1e3 * seconds for seconds in self.device]),
            "loaded_ms": quartiles([1e3 * seconds for seconds in self.loaded]),
            "load_costs_ms": quartiles(loads),
            "all_load_costs_ms": loads,
        }


def main() -> None:
    """Start and ask both ways in turn."""
    signal.signal(signal.SIGTERM, terminate)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one start of each")
    rounds = QUICK_ROUNDS if parser.parse_args().quick else ROUNDS
    check_needs(missing_engine("sglang"))
    pairs = {(shape, way): Pairs() for shape in SHAPES for way in WAYS}
    others: list[float] = []
    console = Console(width=140)
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder,
        console.status("starting") as status,
    ):
        place = Path(folder)
        setup = Setup(
            model=write_bench_model(place),
            device_tokens=DEVICE_TOKENS,
            cache_bytes=CACHE_BYTES,
            threads=max(1, len(os.sched_getaffinity(0)) - 1),
            chunked_prefill=DEVICE_TOKENS,
            lean=True,
        )
        for number in range(rounds):
            for way in in_turn(number, WAYS):
                status.update(f"round {number + 1} of {rounds}: {way}")
                with setup.started(way, place / f"{number}-{way}") as engine:
                    for shape in SHAPES:
                        take(pairs[shape, way], engine, shape, others)
    report(console, pairs, others)


def take(pairs: Pairs, engine: SglangServer, shape: tuple[int, int], others: list[float]) -> None:
    """Store a beginning, and ask it again and again."""
    found, tail = shape
    asking = Asking(engine, others)
    begin = make_tokens(found, found, tail)
    for number in range(TIMES + 2):  # the first stores, the second has the engine's first steps
        loaded, device = (
            asking.ask(begin + make_tokens(tail, found, tail, number, second), forget=not second)
            for second in range(2)
        )
        if number < 2:
            continue
        if loaded.cached_tokens == device.cached_tokens == found:
            pairs.loaded.append(loaded.first_token_seconds)
            pairs.device.append(device.first_token_seconds)
        else:
            pairs.elsewhere += 1


def report(
    console: Console, pairs: dict[tuple[tuple[int, int], Way], Pairs], others: list[float]
) -> None:
    """Print the table, write the file."""
    machine = (
        f"{os.cpu_count()} CPUs, {np.mean(others):.0f}% taken by others, SGLang {version('sglang')}"
    )
    columns = ("pairs", "found on the device, ms", "loaded, ms", "the load costs, ms")
    title = f"first token, median (quartiles); {machine}"
    table = Table("found + computed", "MB", "load", *columns, title=title)
    for column in (*table.columns[1:2], *table.columns[3:]):
        column.justify = "right"
    rows = []
    for ((found, tail), way), each in pairs.items():
        figures = each.figures()
        rows.append({"found": found, "computed": tail, "way": str(way), **figures})
        spreads = (figures["device_ms"], figures["loaded_ms"], figures["load_costs_ms"])
        table.add_row(
            f"{found:,} + {tail:,}",
            f"{found * TOKEN_BYTES / 1e6:.0f}",
            str(way),
            str(figures["pairs"]),
            *("{median:,.0f} ({lower:,.0f}..{upper:,.0f})".format(**one) for one in spreads),
        )
    console.print(table)
    console.print(
        f"{sum(each.elsewhere for each in pairs.values())} pairs were not found whole, and are left"
        " out"
    )
    OUT.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine, "rows": rows}, indent=2)
    (OUT / "sglang_layers.json").write_text(text + "\n")
    console.print(f"written to {OUT / 'sglang_layers.json'}")


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """The middle half of some measurements."""
    low, middle, high = np.quantile(values, (0.25, 0.5, 0.75)).tolist()
    return {"lower": low, "median": middle, "upper": high}


if __name__ == "__main__":
    main()
