"""Several engines on one daemon: SGLang twice, and SGLang beside vLLM."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvd_tools.engine_server import Completion
from kvd_tools.sglang_engine import SglangServerOptions
from kvd_tools.vllm_engine import VllmServer, VllmServerOptions, kvd_transfer
from tests.conftest import Daemon
from tests.processes import ROOT
from tests.sglang.conftest import StartEngine
from tests.sglang.support import (
    CHUNK_TOKENS,
    PROMPT_TOKENS,
    TEST_SECONDS,
    ask_all,
    check,
    findable,
    prompts,
    push_out,
    wait_served,
    wait_stored,
    with_kvd,
)
from tests.waiting import DEADLINE

VLLM = ROOT / ".venv-vllm" / "bin" / "python"
PROMPTS = prompts(4)
CHUNKS = len(PROMPTS) * (PROMPT_TOKENS // CHUNK_TOKENS)
VLLM_CHUNK_TOKENS = 64
VLLM_CHUNKS = len(PROMPTS) * (PROMPT_TOKENS // VLLM_CHUNK_TOKENS)

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def test_two_engines_share_what_either_has_stored(
    daemon: Daemon, model: Path, start_engine: StartEngine, expected: list[Completion]
) -> None:
    """Each computes two prompts and finds the other's two, in one namespace."""
    options = with_kvd(SglangServerOptions(model), daemon.runtime_dir)
    one, two = start_engine(options), start_engine(options)
    one.wait_ready()
    two.wait_ready()
    wait_served(daemon, pools=2)
    check(ask_all(one, PROMPTS[:2]), expected[:2])
    check(ask_all(two, PROMPTS[2:]), expected[2:])
    wait_stored(daemon, CHUNKS)
    found = ask_all(one, PROMPTS[2:]) + ask_all(two, PROMPTS[:2])
    check(found, expected[2:] + expected[:2])
    assert min(answer.cached_tokens for answer in found) >= findable()
    assert len(daemon.status()["namespaces"]) == 1


@pytest.mark.nightly
def test_replicas_of_one_server_share_what_either_has_stored(
    daemon: Daemon, model: Path, start_engine: StartEngine, expected: list[Completion]
) -> None:
    """With data parallelism each replica is an engine of its own, in one namespace."""
    replicas = SglangServerOptions(
        model,
        args=("--dp-size", "2"),
        env={"SGLANG_CPU_OMP_THREADS_BIND": "0|0"},  # one entry a replica
    )
    engine = start_engine(with_kvd(replicas, daemon.runtime_dir))
    engine.wait_ready()
    wait_served(daemon, pools=2)
    check(engine.generate(PROMPTS[:1], routed_dp_rank=0), expected[:1])
    wait_stored(daemon, CHUNKS // len(PROMPTS))
    found = engine.generate(PROMPTS[:1], routed_dp_rank=1)
    check(found, expected[:1])
    assert found[0].cached_tokens >= findable()
    assert len(daemon.status()["namespaces"]) == 1


@pytest.mark.skipif(not VLLM.exists(), reason="vLLM's environment is missing: make .venv-vllm")
def test_sglang_and_vllm_work_at_once(
    daemon: Daemon,
    model: Path,
    start_engine: StartEngine,
    expected: list[Completion],
    tmp_path: Path,
) -> None:
    """Both find their own chunks and never each other's: bytes and hashes are not the same."""
    other = VllmServerOptions(
        model,
        num_gpu_blocks=128,
        max_model_len=1024,
        kv_transfer=kvd_transfer(
            daemon.runtime_dir, blocks_per_chunk=2, deadline=DEADLINE, load_timeout=DEADLINE
        ),
    )
    log = tmp_path / "vllm.log"
    beside = VllmServer(other, log, python=str(VLLM))
    try:
        engine = start_engine(with_kvd(SglangServerOptions(model), daemon.runtime_dir))
        engine.wait_ready()
        beside.wait_ready()
        wait_served(daemon, pools=2)
        with ThreadPoolExecutor(2) as both:
            cold = both.submit(ask_all, engine, PROMPTS)
            vllm_cold = both.submit(ask_all, beside, PROMPTS)
            check(cold.result(), expected)
            assert [answer.cached_tokens for answer in vllm_cold.result()] == [0] * len(PROMPTS)
            wait_stored(daemon, CHUNKS + VLLM_CHUNKS)
            push_out(engine)
            beside.reset()
            warm = both.submit(ask_all, engine, PROMPTS)
            vllm_warm = both.submit(ask_all, beside, PROMPTS)
            check(warm.result(), expected)
            check(vllm_warm.result(), vllm_cold.result())
        assert min(answer.cached_tokens for answer in warm.result()) >= findable()
        assert min(a.cached_tokens for a in vllm_warm.result()) >= findable(VLLM_CHUNK_TOKENS)
        assert len(daemon.status()["namespaces"]) == 2
    finally:
        beside.kill()
