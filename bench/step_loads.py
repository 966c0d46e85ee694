"""Measures a real vLLM engine on CPU: time to first token of small and large hits.

With loads within the step (`sync_load_budget_bytes`) and beside the steps, with and without
asynchronous scheduling; while the engine is idle, and while it generates for another request. One
engine is alive at a time, each is started several times, in rotated order. Needs vLLM 0.33. Prints
a table, writes bench/out/step_loads.json. Runs with the Python of an environment with vLLM:
`.venv-vllm-0.33/bin/python bench/step_loads.py`.
"""

import argparse
import json
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
from harness import Daemon, median
from needs import check_needs, missing_engine
from rich.console import Console
from rich.table import Table
from variants import BLOCK_TOKENS, CPU_BYTES, MODEL, engine_options

from kvd_tools.models import write_model
from kvd_tools.vllm_engine import VllmServer, kvd_transfer

OUT = Path(__file__).parent / "out" / "step_loads.json"
BUDGET = 2**30
HITS = (1, 8, 60)  # blocks
TAIL = 12  # tokens after a hit
FILLERS = 4  # prompts that together fill the engine's own cache
PROMPT_BLOCKS = 60
VOCABULARY = 2000
STREAM_TOKENS = 400
SAMPLES = 8


@dataclass(frozen=True, slots=True)
class Variant:
    """How an engine loads its hits."""

    name: str
    budget: int
    asynchronous: bool


VARIANTS = (
    Variant("within the step", BUDGET, asynchronous=False),
    Variant("beside the steps", 0, asynchronous=False),
    Variant("beside the steps, async scheduling", 0, asynchronous=True),
)
Key = tuple[str, bool, int]
"""A variant's name, whether the engine generates meanwhile, blocks of the hit."""


def main() -> None:
    """Start and ask every variant in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--starts", type=int, default=2, help="of each engine")
    parser.add_argument("--samples", type=int, default=SAMPLES, help="of each hit and start")
    options = parser.parse_args()
    check_needs(missing_engine("vllm", "0.33"))
    from kvd_client.vllm.metrics import STEP_LOADS, STEP_LOADS_LATE  # noqa: PLC0415  # needs vLLM

    seconds: defaultdict[Key, list[float]] = defaultdict(list)
    counts: defaultdict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as place:
        model = write_model(Path(place) / "model", MODEL)
        for number in range(options.starts):
            turn = number % len(VARIANTS)
            for variant in (*VARIANTS[turn:], *VARIANTS[:turn]):
                with _engine(variant, model, Path(place)) as engine:
                    for key, sample in _measure(engine, variant, options.samples):
                        seconds[key].append(sample)
                    counts[variant.name] = [engine.metric(n) for n in (STEP_LOADS, STEP_LOADS_LATE)]
    machine = (
        f"{os.cpu_count()} CPUs, vLLM {version('vllm')}, {options.starts} starts,"
        f" {options.samples} prompts of each kind in each"
    )
    figures = {
        f"{name}, {'generating' if busy else 'idle'}, {blocks} blocks": 1e3 * median(samples)
        for (name, busy, blocks), samples in seconds.items()
    }
    table = Table(title=f"first token in ms, median; {machine}")
    for column in ("loads", "engine", *(f"{blocks} blocks" for blocks in HITS)):
        table.add_column(column)
    for variant in VARIANTS:
        for busy in (False, True):
            row = [_text(seconds[variant.name, busy, blocks]) for blocks in HITS]
            table.add_row(variant.name, "generates" if busy else "idle", *row)
    Console(width=120).print(table)
    for name, (loads, late) in counts.items():
        print(f"{name}: {loads:.0f} loads within steps, {late:.0f} late, in the last start")
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(json.dumps({"first_token_ms": figures, "machine": machine}, indent=2) + "\n")


@contextmanager
def _engine(variant: Variant, model: Path, place: Path) -> Iterator[VllmServer]:
    """A daemon, and an engine of this kind."""
    with Daemon(CPU_BYTES) as daemon:
        extra = {"sync_load_budget_bytes": variant.budget} if variant.budget else {}
        transfer = kvd_transfer(daemon.runtime_dir, required=True, **extra)
        scheduling = "--async-scheduling" if variant.asynchronous else "--no-async-scheduling"
        options = engine_options(model, transfer)
        options = replace(options, args=[*options.args, scheduling])
        with VllmServer(options, place / "engine.log") as engine:
            yield engine


def _measure(engine: VllmServer, variant: Variant, samples: int) -> Iterator[tuple[Key, float]]:
    """Times to first token of complete hits that the engine's own cache does not have."""
    rng = np.random.default_rng(0)

    def tokens(count: int) -> list[int]:
        drawn: list[int] = rng.integers(0, VOCABULARY, count).tolist()
        return drawn

    measured, *fillers = (tokens(PROMPT_BLOCKS * BLOCK_TOKENS) for _ in range(1 + FILLERS))
    for prompt in (measured, *fillers):
        engine.generate([prompt + tokens(TAIL)])
    for busy in (False, True):
        with _generating(engine, tokens(TAIL)) if busy else _idle():
            for blocks in HITS * samples:
                for filler in fillers:
                    engine.generate([filler + tokens(TAIL)], max_tokens=1)
                prompt = measured[: blocks * BLOCK_TOKENS] + tokens(TAIL)
                (answer,) = engine.generate([prompt], max_tokens=2)
                if answer.cached_tokens == blocks * BLOCK_TOKENS:
                    yield (variant.name, busy, blocks), answer.first_token_seconds


@contextmanager
def _idle() -> Iterator[None]:
    yield


@contextmanager
def _generating(engine: VllmServer, prompt: list[int]) -> Iterator[None]:
    """Have the engine generate for another request all the while."""
    ended = threading.Event()

    def generate() -> None:
        while not ended.is_set():
            engine.generate([prompt], max_tokens=STREAM_TOKENS)

    thread = threading.Thread(target=generate)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _text(samples: list[float]) -> str:
    if not samples:
        return "-"
    ms = 1e3 * np.array(samples)
    return f"{np.median(ms):.0f} ({ms.min():.0f}-{ms.max():.0f}), n={len(ms)}"


if __name__ == "__main__":
    main()
