"""Measures what the size of a chunk costs a real SGLang engine on CPU, in its first token.

For each page size two engines, which differ in `chunk_tokens` only, are asked in turn. A beginning
is asked when the device's memory was emptied, so that it has to be loaded, and at once again with
another tail, when it is on the device: the difference is what the load costs, and what the engine
computes because the last chunk ends after the beginning. One beginning ends where chunks of both
sizes end, the other in the middle of the larger ones, as prompts do on average. Attention is
computed for new tokens only (`sglang_attention.py`). Prints a table, writes
bench/out/sglang_chunks.json. Runs with the Python of an environment with SGLang:
`.venv-sglang/bin/python bench/sglang_chunks.py`.
"""

import argparse
import json
import os
import signal
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from needs import check_needs, missing_engine
from rich.console import Console
from rich.table import Table
from sglang_engines import TOKEN_BYTES, Asking, Setup, Way, make_tokens, write_bench_model
from sglang_layers import quartiles
from vllm_ttft import terminate

from kvd_tools.sglang_engine import SglangServer

OUT = Path(__file__).parent / "out"
PAGES = (16, 1)  # tokens
CHUNKS = (16, 64)  # tokens
BEGINNINGS = (1920, 1952)  # tokens: whole chunks of 64, and half a chunk more
TAIL = 64  # tokens, never the same
TIMES = 10  # that each beginning is asked
DEVICE_TOKENS = 2560  # a prompt with its answer
CACHE_BYTES = 12 * 10**8  # both beginnings, and all tails


@dataclass(slots=True)
class Asked:
    """One engine's seconds to the first token for one beginning: loaded, and on the device.

    unexpected: how often other tokens were found than chunks can hold; left out.
    """

    loaded: list[float] = field(default_factory=list)
    device: list[float] = field(default_factory=list)
    unexpected: int = 0

    def figures(self) -> dict[str, Any]:
        """In ms, and how many."""
        costs = [1e3 * (a - b) for a, b in zip(self.loaded, self.device, strict=True)]
        return {
            "times": len(costs),
            "unexpected": self.unexpected,
            "device_ms": quartiles([1e3 * seconds for seconds in self.device]),
            "loaded_ms": quartiles([1e3 * seconds for seconds in self.loaded]),
            "costs_ms": quartiles(costs),
            "all_costs_ms": costs,
        }


Results = dict[tuple[int, int, int], Asked]
"""By tokens of a page, of the beginning, and of a chunk."""


def main() -> None:
    """Start two engines for each page size, and ask them."""
    signal.signal(signal.SIGTERM, terminate)
    results: Results = {}
    others: list[float] = []
    console = Console(width=140)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--page", type=int, action="append", choices=PAGES, help="only these")
    pages = parser.parse_args().page or PAGES
    check_needs(missing_engine("sglang"))
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        model = write_bench_model(Path(folder))
        for page in pages:
            setup = Setup(
                model=model,
                device_tokens=DEVICE_TOKENS,
                cache_bytes=CACHE_BYTES,
                threads=max(1, len(os.sched_getaffinity(0)) - 1),
                chunked_prefill=DEVICE_TOKENS,
                lean=True,
                page_tokens=page,
            )
            with ExitStack() as stack, console.status(f"pages of {page}"):
                engines = {
                    chunk: stack.enter_context(
                        setup.started(Way.KVD, Path(folder) / f"{page}-{chunk}", chunk_tokens=chunk)
                    )
                    for chunk in CHUNKS
                }
                for beginning in BEGINNINGS:
                    for chunk, asked in ask(engines, beginning, others).items():
                        results[page, beginning, chunk] = asked
    report(console, results, others)


def ask(engines: dict[int, SglangServer], beginning: int, others: list[float]) -> dict[int, Asked]:
    """Ask both engines in turn, in reversed order every second time.

    Args:
        engines: by tokens of a chunk.
        beginning: tokens.
        others: takes how busy the CPUs were when nothing was asked, percent.
    """
    results = {chunk: Asked() for chunk in engines}
    tokens = make_tokens(beginning, beginning)
    for number in range(TIMES + 2):  # the first stores, the second has the engine's first steps
        for chunk in list(engines)[:: 1 if number % 2 else -1]:
            asking = Asking(engines[chunk], others)
            tails = [make_tokens(TAIL, beginning, number, again) for again in range(2)]
            loaded = asking.ask(tokens + tails[0], forget=True)
            device = asking.ask(tokens + tails[1])
            found = (loaded.cached_tokens, device.cached_tokens)
            if number < 2:
                continue
            if found == (beginning // chunk * chunk, beginning):
                results[chunk].loaded.append(loaded.first_token_seconds)
                results[chunk].device.append(device.first_token_seconds)
            else:
                results[chunk].unexpected += 1
    return results


def report(console: Console, results: Results, others: list[float]) -> None:
    """Print the table, write the file."""
    machine = (
        f"{os.cpu_count()} CPUs, {np.mean(others):.0f}% taken by others, SGLang {version('sglang')}"
    )
    columns = ("times", "found", "found on the device, ms", "loaded, ms", "over the device, ms")
    title = f"first token, median (quartiles); {TOKEN_BYTES // 1024} KiB a token; {machine}"
    table = Table("page", "beginning + tail", "chunk", *columns, title=title)
    rows = []
    for (page, beginning, chunk), asked in results.items():
        figures = asked.figures()
        rows.append({"page": page, "beginning": beginning, "chunk": chunk, **figures})
        spreads = (figures["device_ms"], figures["loaded_ms"], figures["costs_ms"])
        table.add_row(
            str(page),
            f"{beginning:,} + {TAIL}",
            str(chunk),
            str(figures["times"]),
            f"{beginning // chunk * chunk:,}",
            *("{median:,.0f} ({lower:,.0f}..{upper:,.0f})".format(**one) for one in spreads),
        )
    console.print(table)
    console.print(f"{sum(each.unexpected for each in results.values())} answers are left out")
    OUT.mkdir(exist_ok=True)
    text = json.dumps({"machine": machine, "rows": rows}, indent=2)
    (OUT / "sglang_chunks.json").write_text(text + "\n")
    console.print(f"written to {OUT / 'sglang_chunks.json'}")


if __name__ == "__main__":
    main()
