"""How long the step computes that follows a load, and the same step behind a GPU-cache hit.

A vLLM engine on CPU is asked for one prompt with ever new last tokens. A hit is loaded, or found in
the same blocks of the engine's own cache; before the step that computes the tokens left, processor
caches are emptied, pages are touched, the core works, or nothing happens for a while
(`step_probe.py`). Prints the time of that step, its thread's processor time, page faults and
changes of context, and the time to the first token, by case: in engines on kvd, with the copy
inside, and without a connector, of which only the last figure is known. Each is started several
times, in rotated order. Runs with the Python of an environment with vLLM:
`.venv-vllm/bin/python bench/compute_step.py`.
"""

import argparse
import json
import signal
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from harness import Daemon, median
from needs import check_needs, missing_engine
from rich.console import Console
from rich.table import Table
from variants import CPU_BYTES, MODEL, engine_options
from vllm_ttft import terminate

from kvd_tools.models import write_model
from kvd_tools.vllm_engine import VllmServer, kvd_transfer

PROMPT_TOKENS, FOUND = 1900, 1888
VOCABULARY = 2000
STARTS, ROUNDS, SETTLE_SECONDS = 3, 6, 0.25
STEPS_FILE, DISTURB_FILE = "KVD_BENCH_STEPS", "KVD_BENCH_DISTURB"
# A case: its name, whether the hit is loaded, what happens before the step.
CASES = (
    ("loaded", True, ""),
    ("own cache", False, ""),
    ("loaded, then 15 ms of work", True, "work"),
    ("own cache, 15 ms of work", False, "work"),
    ("loaded, caches emptied", True, "evict"),
    ("own cache, caches emptied", False, "evict"),
    ("loaded, then 50 ms of rest", True, "pause"),
    ("loaded, every page touched", True, "touch"),
    ("loaded, all KV read", True, "read"),
    ("own cache, all KV read", False, "read"),
)
PLAIN = "no connector"
ENGINES = ("kvd", "kvd, vLLM's own KV layout", "in-process", PLAIN)
FEW = 4
FRESH = "loaded into blocks never used"
FIGURES = ("wall_ms", "processor_ms", "faults", "preempted", "waited", "first_ms")
Step = dict[str, float]
Case = tuple[str, bool, str]


def main() -> None:
    """Ask every case in turn, in every round."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--starts", type=int, default=STARTS)
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--few", action="store_true", help="only the first four cases")
    options = parser.parse_args()
    check_needs(missing_engine("vllm"))
    signal.signal(signal.SIGTERM, terminate)
    cases = CASES[:FEW] if options.few else CASES
    steps: dict[str, dict[str, list[Step]]] = {name: defaultdict(list) for name in options.engines}
    try:
        with tempfile.TemporaryDirectory(prefix="kvd-bench-") as place:
            model = write_model(Path(place) / "model", MODEL)
            for start in range(options.starts):
                turn = start % len(steps)
                for name in (*options.engines[turn:], *options.engines[:turn]):
                    folder = Path(place) / f"{start}-{name}"
                    folder.mkdir()
                    own = [case for case in cases if not case[1]]
                    with _engine(name, model, folder) as engine:
                        asking = Asking(engine, folder, own if name == PLAIN else cases)
                        for case, measured in asking.run(options.rounds).items():
                            steps[name][case] += measured
    finally:  # also where the run is ended before
        for name, measured_steps in steps.items():
            _show(name, measured_steps)


@contextmanager
def _engine(name: str, model: Path, place: Path) -> Iterator[VllmServer]:
    extra: dict[str, Any]
    with ExitStack() as stack:
        if name == PLAIN:
            transfer: dict[str, Any] | None = None
        elif name != "in-process":
            daemon = stack.enter_context(Daemon(CPU_BYTES))
            extra = {} if name == "kvd" else {"kv_layout": "none"}
            transfer = kvd_transfer(daemon.runtime_dir, required=True, **extra)
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
        if transfer is not None:
            transfer |= {"kv_connector_module_path": "step_probe"}
        env = {STEPS_FILE: f"{place / 'steps'}", DISTURB_FILE: f"{place / 'disturb'}"}
        options = engine_options(model, transfer, env)
        yield stack.enter_context(VllmServer(options, place / "engine.log"))


class Asking:
    """The prompts of one engine."""

    def __init__(self, engine: VllmServer, place: Path, cases: Sequence[Case]) -> None:
        self._engine = engine
        self._cases = cases
        self._steps = place / "steps"
        self._disturb = place / "disturb"
        self._rng = np.random.default_rng(0)
        self._prompt = self._tokens(PROMPT_TOKENS)

    def run(self, rounds: int) -> dict[str, list[Step]]:
        """The steps of each case."""
        steps: dict[str, list[Step]] = defaultdict(list)
        self._engine.generate([self._prompt], max_tokens=2)
        for number in range(rounds + 1):
            for name, loaded, disturb in self._cases:
                step = self._ask(loaded, disturb)
                if number:  # until then the engine uses blocks for the first time
                    steps[name].append(step)
                elif loaded and not disturb:
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
        lines = self._steps.read_text().splitlines()
        step: Step = json.loads(lines[0]) if lines else {}
        return step | {"first_ms": 1e3 * answer.first_token_seconds}

    def _tokens(self, count: int) -> list[int]:
        tokens: list[int] = self._rng.integers(0, VOCABULARY, count).tolist()
        return tokens


def _show(name: str, steps: Mapping[str, Sequence[Step]]) -> None:
    title = f"{name}: the step of {PROMPT_TOKENS - FOUND} tokens behind {FOUND:,} found, median"
    table = Table("hit", *FIGURES, title=title)
    for case, measured in steps.items():
        row = [_text([step[figure] for step in measured if figure in step]) for figure in FIGURES]
        table.add_row(case, *row)
    Console(width=160).print(table)


def _text(values: Sequence[float]) -> str:
    if not values:
        return ""
    return f"{median(values):,.1f} ({min(values):,.1f}-{max(values):,.1f})"


if __name__ == "__main__":
    main()
