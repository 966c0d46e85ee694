"""Several engines on one daemon: what they share, and what they take from each other."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvd_tools.demo_vllm.engine import EngineProcess
from tests.conftest import StartDaemon
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    CACHED_TOKENS,
    MAX_MODEL_LEN,
    PROMPT_TOKENS,
    TEST_SECONDS,
    References,
    Setting,
    Traffic,
    ask_all,
    compute_references,
    far_apart,
    metric,
    numbers,
    prompts,
    wait_served,
    wait_stored,
    with_kvd,
)
from tests.waiting import eventually

DENSE, HYBRID = Setting("dense"), Setting("hybrid")
BLOCKS_PER_CHUNK = 4
CHUNK_TOKENS = 128
PROMPT_CHUNKS = CACHED_TOKENS // CHUNK_TOKENS
LOAD_FAILURES = "vllm:kv_offload_kvd_load_failures"

pytestmark = pytest.mark.timeout(TEST_SECONDS)


@dataclass
class Pair:
    """Two engines of one hybrid model; when they start there is no daemon."""

    first: EngineProcess
    second: EngineProcess
    known: References


@pytest.fixture(scope="module")
def pair(models: Path, module_dir: Path, start_module_engine: StartEngine) -> Pair:
    """They look for a daemon in `module_dir`."""
    options = with_kvd(HYBRID.options(models), module_dir, blocks_per_chunk=BLOCKS_PER_CHUNK)
    first, second = start_module_engine(options), start_module_engine(options)
    first.wait_ready()
    second.wait_ready()
    return Pair(first, second, compute_references(first, 8))


def hits(engine: EngineProcess, asked: Sequence[list[int]]) -> list[int]:
    """Cached tokens of every prompt."""
    return [answer.cached_tokens for answer in ask_all(engine, asked)]


def test_engines_of_one_model_share_chunks_and_those_of_another_do_not(
    pair: Pair,
    models: Path,
    module_dir: Path,
    start_daemon: StartDaemon,
    start_engine: StartEngine,
) -> None:
    """What one engine stored the other loads; an engine of another model finds nothing."""
    asked = pair.known.prompts[:4]
    other = start_engine(
        with_kvd(DENSE.options(models), module_dir, blocks_per_chunk=BLOCKS_PER_CHUNK)
    )
    daemon = start_daemon(where=module_dir)
    other.wait_ready()
    wait_served(daemon, pair.first, pair.second, other)
    ask_all(pair.first, asked)
    wait_stored(daemon, at_least=len(asked) * PROMPT_CHUNKS)
    shared = ask_all(pair.second, asked)
    assert [answer.cached_tokens for answer in shared] == [CACHED_TOKENS] * len(asked)
    for answer, reference in zip(shared, pair.known.warm, strict=False):
        assert numbers(answer) == numbers(reference)
    assert hits(other, asked) == [0] * len(asked)
    assert len(daemon.status()["namespaces"]) == 2


def test_windows_that_begin_inside_each_others_chunks_are_found(
    pair: Pair, module_dir: Path, start_daemon: StartDaemon
) -> None:
    """A chunk stored from a window's edge on is a miss for who needs all of it, and then whole."""
    engine = pair.first
    (text,) = prompts(1, seed=3, tokens=MAX_MODEL_LEN)
    edges = [text[:length] for length in (232, 360, 488)]  # windows begin inside chunks
    asked = [text[:length] for length in (136, 264, 392, 232, 520, 360, 488, 700)]
    engine.reset()
    expected = ask_all(engine, asked)
    engine.reset()

    daemon = start_daemon(where=module_dir)
    wait_served(daemon, engine)
    # The engine's own cache has the prompts, kvd's nothing: of the windows only what is behind
    # their edges is still there to be stored.
    ask_all(engine, edges)
    wait_stored(daemon)
    clear = [*(sys.executable, "-m", "kvd", "clear", "--yes"), "--runtime-dir", str(module_dir)]
    subprocess.run(clear, check=True)
    assert hits(engine, edges) == [224, 352, 480]
    wait_stored(daemon)
    engine.reset()
    for turn in range(2):
        answers = ask_all(engine, asked)
        for answer, reference in zip(answers, expected, strict=True):
            assert not far_apart(answer, reference)
        if turn:
            found = [answer.cached_tokens for answer in answers]
            # Of the shorter ones that come later the engine's own cache has single blocks, too.
            assert found == [128, 256, 384, 224, 512, 352, 480, 640]
        wait_stored(daemon)  # the engine's blocks are free before the daemon knows of it
        engine.reset()
    (namespace,) = daemon.status()["namespaces"]
    counters = namespace["counters"]
    assert counters["misses"] == 0  # no load was planned that could not be done
    assert counters["replaced"] >= len(edges)


def test_chunks_evicted_between_lookup_and_load_are_computed(
    pair: Pair, module_dir: Path, start_daemon: StartDaemon
) -> None:
    """The failed load is reported for its request, which is computed; the engine goes on."""
    first, second, known = pair.first, pair.second, pair.known
    first.reset()
    second.reset()
    daemon = start_daemon(where=module_dir)
    wait_served(daemon, first, second)
    (namespace,) = daemon.status()["namespaces"]
    # The same engines, now with a daemon that has room for little more than one prompt.
    ask_all(first, known.prompts[:1])
    needed = wait_stored(daemon, at_least=PROMPT_CHUNKS)
    daemon.stop()
    daemon = start_daemon(
        cpu_bytes=str((needed + 2) * namespace["bytes_per_chunk"]), where=module_dir
    )
    wait_served(daemon, first, second)

    def store_first_prompt() -> None:
        first.reset()
        ask_all(first, known.prompts[:1])
        wait_stored(daemon, at_least=needed)
        first.reset()

    store_first_prompt()
    # It has reported, so that no other message of its comes before its load.
    eventually(
        lambda: daemon.status()["engines"],
        lambda engines: any(each["counters"]["lookup_tokens"] >= PROMPT_TOKENS for each in engines),
    )
    before = failures = metric(first, LOAD_FAILURES)
    # The broker is to process the store, which evicts, before the load, whose lookup was made
    # meanwhile. Engines take turns there, and a lookup that is late finds nothing: then again.
    for number in range(1, len(known.prompts)):
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            storing = second.submit(known.prompts[number])
            time.sleep(2)  # nothing shows that its request has been sent
            loading = first.submit(known.prompts[0])
            time.sleep(2)
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        stored, loaded = storing.result(60), loading.result(60)
        assert numbers(stored) == numbers(known.cold[number])
        assert numbers(loaded) == numbers(known.warm[0] if loaded.cached_tokens else known.cold[0])
        failures = metric(first, LOAD_FAILURES)
        if failures > before:
            break
        wait_stored(daemon)
        store_first_prompt()
    assert loaded.cached_tokens == 0
    assert failures == before + 1

    with Traffic(first, known, at_once=2) as one, Traffic(second, known, at_once=2) as other:
        one.wait_answers(2 * len(known.prompts))
        other.wait_answers(2 * len(known.prompts))
    print(one.check(), other.check(), sep="\n")
    wait_stored(daemon)
    for engine in (first, second):
        engine.reset()
        ask_all(engine, known.prompts[:1])
        wait_stored(daemon, at_least=needed)
        engine.reset()
        (again,) = ask_all(engine, known.prompts[:1])
        assert again.cached_tokens == CACHED_TOKENS
        assert numbers(again) == numbers(known.warm[0])
