"""kvd beside the manager that vLLM has inside the engine: the same prompts, the same figures."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvd_tools.demo_vllm.engine import EngineProcess
from kvd_tools.demo_vllm.options import EngineOptions
from kvd_tools.demo_vllm.wire import Answer
from tests.conftest import StartDaemon
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    BLOCK,
    MAX_MODEL_LEN,
    TEST_SECONDS,
    Setting,
    ask_all,
    far_apart,
    prompts,
    wait_served,
    wait_stored,
    with_in_process_copy,
    with_kvd,
)

CHUNK_BYTES = 64 * 1024  # of one block: 32 tokens of two heads of 32 numbers in four layers, twice
POOL_CHUNKS = 64
HOT_CHUNKS, COLD_CHUNKS = 20, 10


Rounds = list[list[Answer]]


def ask_rounds(engine: EngineProcess, asked: Sequence[list[int]], rounds: int) -> Rounds:
    """All prompts one by one, so many times; the engine's own cache is emptied in between."""
    answers: Rounds = []
    for _ in range(rounds):
        if answers:
            engine.reset()
        answers.append(ask_all(engine, asked))
    return answers


def hits(answers: Rounds) -> list[list[int]]:
    """Cached tokens of every prompt, by round."""
    return [[answer.cached_tokens for answer in each] for each in answers]


def in_process(  # how the engine is built, and what it is asked
    options: EngineOptions,
    folder: Path,
    start_engine: StartEngine,
    asked: Sequence[list[int]],
    *,
    rounds: int = 1,
    pool_bytes: int,
    blocks_per_chunk: int,
) -> tuple[dict[str, int], Rounds]:
    """Chunks stored and evicted by vLLM's own manager, and the answers."""
    figures = folder / "figures.json"
    engine = start_engine(
        with_in_process_copy(
            options, pool_bytes=pool_bytes, blocks_per_chunk=blocks_per_chunk, figures=figures
        )
    )
    engine.wait_ready()
    answers = ask_rounds(engine, asked, rounds)
    engine.close()
    counted: dict[str, int] = json.loads(figures.read_text(encoding="utf-8"))
    return counted, answers


@pytest.mark.timeout(TEST_SECONDS)
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
    theirs, their_answers = in_process(
        options, tmp_path, start_engine, asked, pool_bytes=pool_bytes, blocks_per_chunk=1
    )

    daemon = start_daemon(cpu_bytes=str(pool_bytes))
    engine = start_engine(with_kvd(replace(options), daemon.runtime_dir, blocks_per_chunk=1))
    engine.wait_ready()
    wait_served(daemon, engine)
    answers = ask_rounds(engine, asked, 1)
    wait_stored(daemon, at_least=POOL_CHUNKS)
    (namespace,) = daemon.status()["namespaces"]
    assert namespace["num_chunks"] == POOL_CHUNKS
    counters = namespace["counters"]
    ours = {"stored": counters["stored"], "evicted": counters["evicted"]}
    print(f"kvd {ours} {hits(answers)}, vLLM's own {theirs} {hits(their_answers)}")
    needed = HOT_CHUNKS + 6 * COLD_CHUNKS
    assert theirs == ours == {"stored": needed, "evicted": needed - POOL_CHUNKS}
    assert hits(answers) == hits(their_answers)
    assert hits(answers)[0][2::2] == [HOT_CHUNKS * BLOCK] * 6


@pytest.mark.timeout(TEST_SECONDS)
def test_windows_that_begin_inside_each_others_chunks_are_found(
    models: Path, tmp_path: Path, start_daemon: StartDaemon, start_engine: StartEngine
) -> None:
    """A chunk stored from a window's edge on is a miss for who needs all of it, and then whole."""
    options = Setting("hybrid").options(models)
    (text,) = prompts(1, seed=3, tokens=MAX_MODEL_LEN)
    edges = [text[:length] for length in (232, 360, 488)]  # windows begin inside chunks
    asked = [text[:length] for length in (136, 264, 392, 232, 520, 360, 488, 700)]
    pool_bytes = 64 * 2**20
    _, theirs = in_process(
        options, tmp_path, start_engine, asked, rounds=2, pool_bytes=pool_bytes, blocks_per_chunk=4
    )

    daemon = start_daemon(cpu_bytes=str(pool_bytes))
    engine = start_engine(with_kvd(replace(options), daemon.runtime_dir, blocks_per_chunk=4))
    engine.wait_ready()
    wait_served(daemon, engine)
    # The engine's own cache has the prompts, kvd's nothing: of the windows only what is behind
    # their edges is still there to be stored.
    ask_rounds(engine, edges, 1)
    wait_stored(daemon)
    clear = [
        sys.executable,
        "-m",
        "kvd",
        "clear",
        "--yes",
        "--runtime-dir",
        str(daemon.runtime_dir),
    ]
    subprocess.run(clear, check=True)
    assert hits(ask_rounds(engine, edges, 1)) == [[224, 352, 480]]
    wait_stored(daemon)
    engine.reset()
    ours = []
    for _ in range(2):
        ours += ask_rounds(engine, asked, 1)
        wait_stored(daemon)  # the engine's blocks are free before the daemon has heard of it
        engine.reset()
    (namespace,) = daemon.status()["namespaces"]
    counters = namespace["counters"]
    print(f"kvd {hits(ours)}, vLLM's own {hits(theirs)}, {counters}")
    assert counters["misses"] == 0  # no load was planned that could not be done
    assert "a load failed" not in engine.log.read_text(encoding="utf-8", errors="replace")
    assert counters["replaced"] >= len(edges)
    assert hits(ours)[1] == hits(theirs)[1]
    for answers in ours:
        for answer, expected in zip(answers, theirs[0], strict=True):
            assert not far_apart(answer, expected)
