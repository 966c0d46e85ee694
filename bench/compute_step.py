"""Why the step behind a load computes for longer than the same step behind a GPU-cache hit.

One vLLM engine on CPU, asked for one prompt with ever new last tokens. A hit is loaded, or found in
the same blocks of the engine's own cache; before the step that computes the tokens left, processor
caches are emptied, pages are touched, or nothing happens for a while (`step_probe.py`). The time of
that step, its thread's processor time, page faults and changes of context, by case: in an engine on
kvd, and in one with the copy inside. Runs with the Python of an environment with vLLM:
`.venv-vllm/bin/python bench/compute_step.py`.
"""

import argparse
import json
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from harness import Daemon, median
from rich.console import Console
from rich.table import Table
from variants import CPU_BYTES, MODEL, engine_options

from kvd_tools.models import write_model
from kvd_tools.vllm_engine import VllmServer, kvd_transfer

PROMPT_TOKENS, FOUND = 1900, 1888
VOCABULARY = 2000
ROUNDS, SETTLE_SECONDS = 12, 0.25
STEPS_FILE, DISTURB_FILE = "KVD_BENCH_STEPS", "KVD_BENCH_DISTURB"
# A case: its name, whether the hit is loaded, what happens before the step.
CASES = (
    ("loaded", True, ""),
    ("own cache", False, ""),
    ("loaded, caches emptied", True, "evict"),
    ("own cache, caches emptied", False, "evict"),
    ("loaded, then 50 ms of rest", True, "pause"),
    ("loaded, every page touched", True, "touch"),
    ("loaded, all KV read", True, "read"),
    ("own cache, all KV read", False, "read"),
)
ENGINES = ("kvd", "kvd, vLLM's own KV layout", "in-process")
FRESH = "loaded into blocks never used"
FIGURES = ("wall_ms", "processor_ms", "faults", "preempted", "waited", "first_ms")
Step = dict[str, float]


def main() -> None:
    """Ask every case in turn, in every round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as place:
        model = write_model(Path(place) / "model", MODEL)
        for name in ENGINES:
            folder = Path(place) / name
            folder.mkdir()
            with _engine(name, model, folder) as engine:
                steps = Asking(engine, folder).run(options.rounds)
            _show(name, steps)


@contextmanager
def _engine(name: str, model: Path, place: Path) -> Iterator[VllmServer]:
    extra: dict[str, Any]
    with ExitStack() as stack:
        if name != "in-process":
            daemon = stack.enter_context(Daemon(CPU_BYTES))
            extra = {} if name == "kvd" else {"kv_layout": "none"}
            transfer: dict[str, Any] = kvd_transfer(daemon.runtime_dir, required=True, **extra)
            transfer |= {"kv_connector": "ProbedKvd"}
        else:
            extra = {
                "spec_name": "InProcessSpec",
                "spec_module_path": "in_process",
                "blocks_per_chunk": 1,
                "bytes": CPU_BYTES,
            }
            transfer = {
                "kv_connector": "ProbedOffloading",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        transfer |= {"kv_connector_module_path": "step_probe"}
        env = {STEPS_FILE: f"{place / 'steps'}", DISTURB_FILE: f"{place / 'disturb'}"}
        options = engine_options(model, transfer, env)
        yield stack.enter_context(VllmServer(options, place / "engine.log"))


class Asking:
    """The prompts of one engine."""

    def __init__(self, engine: VllmServer, place: Path) -> None:
        self._engine = engine
        self._steps = place / "steps"
        self._disturb = place / "disturb"
        self._rng = np.random.default_rng(0)
        self._prompt = self._tokens(PROMPT_TOKENS)

    def run(self, rounds: int) -> dict[str, list[Step]]:
        """The steps of each case."""
        steps: dict[str, list[Step]] = {FRESH: [], **{name: [] for name, _, _ in CASES}}
        self._engine.generate([self._prompt], max_tokens=2)
        for number in range(rounds + 1):
            for name, loaded, disturb in CASES:
                step = self._ask(loaded, disturb)
                if number:  # until then the engine uses blocks for the first time
                    steps[name].append(step)
                elif not steps[FRESH]:
                    steps[FRESH].append(step)
        return steps

    def _ask(self, loaded: bool, disturb: str) -> Step:
        time.sleep(SETTLE_SECONDS)
        if loaded:
            self._engine.reset()
        if disturb:
            self._disturb.write_text(disturb)
        self._steps.write_text("")
        prompt = self._prompt[:FOUND] + self._tokens(PROMPT_TOKENS - FOUND)
        (answer,) = self._engine.generate([prompt], max_tokens=2)
        if answer.cached_tokens != FOUND:
            raise RuntimeError(f"{answer.cached_tokens} tokens were found, {FOUND} expected")
        step: Step = json.loads(self._steps.read_text().splitlines()[0])
        return step | {"first_ms": 1e3 * answer.first_token_seconds}

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._rng.integers(0, VOCABULARY, count).tolist()
        return tokens


def _show(name: str, steps: dict[str, list[Step]]) -> None:
    title = f"{name}: the step of {PROMPT_TOKENS - FOUND} tokens behind {FOUND:,} found, median"
    table = Table("hit", *FIGURES, title=title)
    for case, measured in steps.items():
        row = [f"{median(step[figure] for step in measured):,.1f}" for figure in FIGURES]
        low, high = (f"{f(s['wall_ms'] for s in measured):,.1f}" for f in (min, max))
        table.add_row(case, f"{row[0]} ({low}-{high})", *row[1:])
    Console(width=140).print(table)


if __name__ == "__main__":
    main()
