"""Every kind of model, chunk size and parallelism: warm answers are those of vLLM's own cache."""

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
    ask_all,
    wait_served,
    wait_stored,
    wait_told,
    with_kvd,
)

DENSE, DENSE_TP2 = Setting("dense"), Setting("dense", tensor_parallel=2)
HYBRID, MLA, MLA_TP2 = Setting("hybrid"), Setting("mla"), Setting("mla", tensor_parallel=2)
ASKED = 4


@pytest.mark.timeout(TEST_SECONDS)
@pytest.mark.parametrize(
    ("setting", "blocks_per_chunk", "restart"),
    [
        pytest.param(DENSE, 1, False, id="dense-1"),
        pytest.param(DENSE, 2, True, id="dense-2-restart"),
        pytest.param(DENSE, 4, False, id="dense-4"),
        pytest.param(DENSE_TP2, 2, True, id="dense-tp2-2-restart"),
        pytest.param(HYBRID, 1, False, id="hybrid-1"),
        pytest.param(HYBRID, 2, True, id="hybrid-2-restart"),
        pytest.param(HYBRID, 4, False, id="hybrid-4"),
        pytest.param(MLA, 2, False, id="mla-2"),
        pytest.param(MLA_TP2, 2, True, id="mla-tp2-2-restart"),
    ],
)
def test_warm_answers_are_those_of_the_engines_own_cache(
    setting: Setting,
    blocks_per_chunk: int,
    restart: bool,
    references: Callable[[Setting], References],
    models: Path,
    start_daemon: StartDaemon,
    start_engine: StartEngine,
) -> None:
    """Cold, from kvd's pool, and from it after a restart of the engine: bit for bit as without."""
    known = references(setting)
    asked = known.prompts[:ASKED]
    daemon = start_daemon(cpu_bytes="256MiB")
    options = with_kvd(
        setting.options(models), daemon.runtime_dir, blocks_per_chunk=blocks_per_chunk
    )
    engine = start_engine(options)
    engine.wait_ready()
    before = wait_served(daemon, engine)

    cold = ask_all(engine, asked)
    assert [answer.cached_tokens for answer in cold] == [0] * ASKED
    for answer, reference in zip(cold, known.cold, strict=False):
        assert not comparable(answer, reference)

    stored = wait_stored(daemon, at_least=ASKED)
    engine.reset()
    warm = ask_all(engine, asked)
    assert [answer.cached_tokens for answer in warm] == [CACHED_TOKENS] * ASKED
    for answer, reference in zip(warm, known.warm, strict=False):
        assert not comparable(answer, reference)
    told = before + 2 * ASKED * PROMPT_TOKENS
    assert wait_told(daemon, told) == ASKED * CACHED_TOKENS
    print(f"{setting}: {stored} chunks, hits {[answer.cached_tokens for answer in warm]}")

    if restart:
        engine.close()
        engine = start_engine(replace(options))
        engine.wait_ready()
        wait_served(daemon, engine)
        again = ask_all(engine, asked)
        assert [answer.cached_tokens for answer in again] == [CACHED_TOKENS] * ASKED
        for answer, reference in zip(again, known.warm, strict=False):
            assert not comparable(answer, reference)
        (namespace,) = daemon.status()["namespaces"]
        assert namespace["chunks"]["ready"] == stored
        assert namespace["replicated"] == (setting == MLA_TP2)
        assert namespace["world_size"] == setting.tensor_parallel
