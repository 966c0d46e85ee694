"""Several engines on one daemon: what they share, and what they take from each other."""

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from kvd_tools.demo_vllm.wire import comparable
from tests.conftest import StartDaemon
from tests.vllm.conftest import StartEngine
from tests.vllm.support import (
    CACHED_TOKENS,
    PROMPT_TOKENS,
    TEST_SECONDS,
    References,
    Setting,
    Traffic,
    ask_all,
    metric,
    wait_served,
    wait_stored,
    with_kvd,
)
from tests.waiting import eventually

DENSE, HYBRID = Setting("dense"), Setting("hybrid")
PROMPT_CHUNKS = CACHED_TOKENS // 64
LOAD_FAILURES = "vllm:kv_offload_kvd_load_failures"

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def test_engines_of_one_model_share_chunks_and_those_of_another_do_not(
    models: Path,
    references: Callable[[Setting], References],
    start_daemon: StartDaemon,
    start_engine: StartEngine,
) -> None:
    """What one engine stored the other loads; an engine of another model finds nothing."""
    known = references(DENSE)
    asked = known.prompts[:4]
    daemon = start_daemon()
    options = with_kvd(DENSE.options(models), daemon.runtime_dir, blocks_per_chunk=2)
    first = start_engine(options)
    second = start_engine(replace(options))
    first.wait_ready()
    second.wait_ready()
    wait_served(daemon, first, second)
    ask_all(first, asked)
    wait_stored(daemon, at_least=len(asked) * PROMPT_CHUNKS)
    shared = ask_all(second, asked)
    assert [answer.cached_tokens for answer in shared] == [CACHED_TOKENS] * len(asked)
    for answer, reference in zip(shared, known.warm, strict=False):
        assert not comparable(answer, reference)
    second.close()
    other = start_engine(with_kvd(HYBRID.options(models), daemon.runtime_dir, blocks_per_chunk=2))
    other.wait_ready()
    wait_served(daemon, first, other)
    assert [answer.cached_tokens for answer in ask_all(other, asked)] == [0] * len(asked)
    assert len(daemon.status()["namespaces"]) == 2


@pytest.mark.parametrize("setting", [DENSE, HYBRID], ids=["dense", "hybrid"])
def test_chunks_evicted_between_lookup_and_load_are_computed(
    setting: Setting,
    models: Path,
    references: Callable[[Setting], References],
    start_daemon: StartDaemon,
    start_engine: StartEngine,
) -> None:
    """The failed load is reported for its request, which is computed; the engine goes on."""
    known = references(setting)
    daemon = start_daemon(cpu_bytes="64MiB")
    options = with_kvd(setting.options(models), daemon.runtime_dir, blocks_per_chunk=2)
    first, second = start_engine(options), start_engine(replace(options))
    first.wait_ready()
    second.wait_ready()
    wait_served(daemon, first, second)
    (namespace,) = daemon.status()["namespaces"]
    # The same engines, now with a daemon that has room for little more than one prompt.
    ask_all(first, known.prompts[:1])
    needed = wait_stored(daemon, at_least=PROMPT_CHUNKS)
    daemon.stop()
    daemon = start_daemon(
        cpu_bytes=str((needed + 2) * namespace["bytes_per_chunk"]), where=daemon.runtime_dir
    )
    wait_served(daemon, first, second)
    first.reset()
    ask_all(first, known.prompts[:1])
    wait_stored(daemon, at_least=needed)
    first.reset()
    # It has reported, so that nothing of its is on the way before its load.
    eventually(
        lambda: daemon.status()["engines"],
        lambda engines: any(each["counters"]["lookup_tokens"] >= PROMPT_TOKENS for each in engines),
    )

    # The broker is to see the store, which evicts, before the load that was looked up meanwhile.
    # Engines take turns there: one that had to say something else is heard after the other. And
    # one that was slow has asked when the broker was going on again: its lookup finds nothing.
    for number in range(1, len(known.prompts)):
        os.kill(daemon.process.pid, signal.SIGSTOP)
        try:
            storing = second.submit(known.prompts[number])
            time.sleep(2)  # nothing tells that its request has been sent
            loading = first.submit(known.prompts[0])
            time.sleep(2)
        finally:
            os.kill(daemon.process.pid, signal.SIGCONT)
        stored, loaded = storing.result(60), loading.result(60)
        assert not comparable(stored, known.cold[number])
        assert not comparable(loaded, known.warm[0] if loaded.cached_tokens else known.cold[0])
        failures = metric(first, LOAD_FAILURES)
        if failures:
            break
        wait_stored(daemon)
        first.reset()
        ask_all(first, known.prompts[:1])
        wait_stored(daemon, at_least=needed)
        first.reset()
    assert loaded.cached_tokens == 0
    assert failures == 1

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
        assert not comparable(again, known.warm[0])
