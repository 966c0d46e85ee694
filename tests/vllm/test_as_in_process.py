"""kvd beside the manager that vLLM has inside the engine: the same prompts, the same figures."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvd_client.demo.vllm.engine import EngineOptions
from tests.conftest import StartDaemon
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    BLOCK,
    Setting,
    ask_all,
    prompts,
    wait_attached,
    wait_stored,
    with_in_process_copy,
    with_kvd,
)

CHUNK_BYTES = 64 * 1024  # of one block: 32 tokens of two heads of 32 numbers in four layers, twice
POOL_CHUNKS = 64
HOT_CHUNKS, COLD_CHUNKS = 20, 10


def in_process_figures(
    options: EngineOptions,
    folder: Path,
    start_engine: StartEngine,
    asked: Sequence[list[int]],
    *,
    pool_bytes: int,
    blocks_per_chunk: int,
) -> tuple[dict[str, int], list[int]]:
    """Chunks stored and evicted by vLLM's own manager, and every prompt's cached tokens."""
    figures = folder / "figures.json"
    engine = start_engine(
        with_in_process_copy(
            options, pool_bytes=pool_bytes, blocks_per_chunk=blocks_per_chunk, figures=figures
        )
    )
    engine.wait_ready()
    answers = ask_all(engine, asked)
    engine.close()
    counted: dict[str, int] = json.loads(figures.read_text(encoding="utf-8"))
    return counted, [answer.cached_tokens for answer in answers]


@pytest.mark.timeout(400)
def test_a_prefix_that_the_engines_own_cache_serves_stays(
    models: Path, tmp_path: Path, start_daemon: StartDaemon, start_engine: StartEngine
) -> None:
    """Asked again and again among others, it is stored once, as by vLLM's own manager."""
    options = Setting("dense").options(models)
    (hot,) = prompts(1, seed=1, tokens=HOT_CHUNKS * BLOCK + 8)
    asked = [hot]
    for cold in prompts(6, seed=2, tokens=COLD_CHUNKS * BLOCK + 8):
        asked += [cold, hot]
    pool_bytes = POOL_CHUNKS * CHUNK_BYTES
    theirs, their_hits = in_process_figures(
        options, tmp_path, start_engine, asked, pool_bytes=pool_bytes, blocks_per_chunk=1
    )

    daemon = start_daemon(cpu_bytes=str(pool_bytes))
    engine = start_engine(with_kvd(replace(options), daemon.runtime_dir, blocks_per_chunk=1))
    engine.wait_ready()
    wait_attached(daemon)
    hits = [answer.cached_tokens for answer in ask_all(engine, asked)]
    wait_stored(daemon, at_least=POOL_CHUNKS)
    (namespace,) = daemon.status()["namespaces"]
    assert namespace["num_chunks"] == POOL_CHUNKS
    counters = namespace["counters"]
    ours = {"stored": counters["stored"], "evicted": counters["evicted"]}
    print(f"kvd {ours} {hits}, vLLM's own {theirs} {their_hits}")
    needed = HOT_CHUNKS + 6 * COLD_CHUNKS
    assert theirs == ours == {"stored": needed, "evicted": needed - POOL_CHUNKS}
    assert hits == their_hits
    assert hits[2::2] == [HOT_CHUNKS * BLOCK] * 6
