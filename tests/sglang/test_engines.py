"""kvd behind real SGLang engines: their answers are those of an engine without it.

Also of several engines on one daemon: SGLang twice, and SGLang beside vLLM. And what SGLang's own
tests expect of external caches holds.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import TestCase

import pytest
from sglang.test.kits.unified_radix_cache_kit import AccuracyTwoPassMixin, UnifiedRadixTreeTestMixin

from kvd_tools.engine_server import Completion
from kvd_tools.models import LLAMA, write_model
from kvd_tools.sglang_engine import SglangServer, SglangServerOptions
from kvd_tools.vllm_engine import VllmServer, VllmServerOptions, kvd_transfer
from tests.conftest import Daemon
from tests.daemon.serving import daemon_left_clean
from tests.engine_answers import TEST_SECONDS, ask_all, check
from tests.engine_demos import finds_known_prompts
from tests.processes import ROOT
from tests.sglang.conftest import StartEngine
from tests.sglang.support import (
    CHUNK_TOKENS,
    PROMPT_TOKENS,
    check_found,
    findable,
    prompts,
    push_out,
    wait_served,
    wait_stored,
    with_kvd,
)
from tests.waiting import DEADLINE, eventually

PROMPTS = prompts(4)
CHUNKS = len(PROMPTS) * (PROMPT_TOKENS // CHUNK_TOKENS)
VLLM = ROOT / ".venv-vllm" / "bin" / "python"
VLLM_CHUNK_TOKENS = 64
VLLM_CHUNKS = len(PROMPTS) * (PROMPT_TOKENS // VLLM_CHUNK_TOKENS)

pytestmark = pytest.mark.timeout(TEST_SECONDS)

Serve = Callable[..., SglangServer]


@pytest.fixture
def serve(daemon: Daemon, model: Path, start_engine: StartEngine) -> Serve:
    """Starts an engine, and waits until the daemon serves so many pools."""

    def started(
        pools: int = 1, layerwise: bool = False, transfer: str = "auto", **fields: Any
    ) -> SglangServer:
        options = SglangServerOptions(model, **fields)
        extra = {"layerwise": layerwise, "transfer": transfer}
        engine = start_engine(with_kvd(options, daemon.runtime_dir, **extra))
        engine.wait_ready()
        wait_served(daemon, pools)
        return engine

    return started


@pytest.mark.parametrize(
    ("page_size", "layerwise", "transfer"),
    [
        (1, False, "export"),
        (16, True, "export"),
        (16, True, "staging"),
        pytest.param(64, False, "staging", marks=pytest.mark.nightly),
    ],
)
def test_what_was_pushed_out_comes_back(
    daemon: Daemon,
    serve: Serve,
    expected: list[Completion],
    page_size: int,
    layerwise: bool,
    transfer: str,
) -> None:
    """Prompts that have left the engine's cache are found in kvd's, also together.

    And by the next engine, when this one has crashed, also if one exports and the other stages.
    """
    chunk_tokens = max(page_size, CHUNK_TOKENS)
    found_tokens = findable(chunk_tokens)
    engine = serve(page_size=page_size, layerwise=layerwise, transfer=transfer)
    check(ask_all(engine, PROMPTS), expected)
    wait_stored(daemon, len(PROMPTS) * (PROMPT_TOKENS // chunk_tokens))
    push_out(engine)
    check_found(ask_all(engine, PROMPTS), expected, found_tokens)
    push_out(engine)
    check_found(engine.generate(PROMPTS), expected, found_tokens)
    if not layerwise:
        engine.kill()
        eventually(lambda: not daemon.status()["engines"])
        other = "export" if transfer == "staging" else "staging"
        successor = serve(page_size=page_size, transfer=other)
        check_found(ask_all(successor, PROMPTS), expected, found_tokens)


@pytest.mark.parametrize("layerwise", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_two_ranks_load_alike(
    daemon: Daemon, serve: Serve, expected: list[Completion], layerwise: bool
) -> None:
    """With tensor parallelism each rank has chunks of its own, and both find the same prefix."""
    engine = serve(pools=2, tensor_parallel=2, layerwise=layerwise)
    check(ask_all(engine, PROMPTS), expected)
    wait_stored(daemon, 2 * CHUNKS)
    push_out(engine)
    check_found(ask_all(engine, PROMPTS), expected)


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
    answers = ask_all(one, PROMPTS[2:]) + ask_all(two, PROMPTS[:2])
    check_found(answers, expected[2:] + expected[:2])
    assert len(daemon.status()["namespaces"]) == 1


@pytest.mark.nightly
def test_replicas_of_one_server_share_what_either_has_stored(
    daemon: Daemon, serve: Serve, expected: list[Completion]
) -> None:
    """With data parallelism each replica is an engine of its own, in one namespace."""
    one_entry_a_replica = {"SGLANG_CPU_OMP_THREADS_BIND": "0|0"}
    engine = serve(pools=2, args=("--dp-size", "2"), env=one_entry_a_replica)
    check(engine.generate(PROMPTS[:1], routed_dp_rank=0), expected)
    wait_stored(daemon, CHUNKS // len(PROMPTS))
    check_found(engine.generate(PROMPTS[:1], routed_dp_rank=1), expected)
    assert len(daemon.status()["namespaces"]) == 1


@pytest.mark.skipif(not VLLM.exists(), reason="vLLM's environment is missing: make .venv-vllm")
def test_sglang_and_vllm_work_at_once(
    daemon: Daemon, model: Path, serve: Serve, expected: list[Completion], tmp_path: Path
) -> None:
    """Both find their own chunks and never each other's: bytes and hashes are not the same."""
    transfer = kvd_transfer(
        daemon.runtime_dir, blocks_per_chunk=2, deadline=DEADLINE, load_timeout=DEADLINE
    )
    options = VllmServerOptions(model, num_gpu_blocks=128, max_model_len=1024, kv_transfer=transfer)
    beside = VllmServer(options, tmp_path / "vllm.log", python=str(VLLM))
    try:
        engine = serve()
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
            check_found(warm.result(), expected)
            check_found(vllm_warm.result(), vllm_cold.result(), findable(VLLM_CHUNK_TOKENS))
        assert len(daemon.status()["namespaces"]) == 2
    finally:
        beside.kill()


def test_the_demo_finds_known_prompts_also_after_a_restart() -> None:
    """`kvd demo-sglang`: warm and in a new engine every whole chunk, with the same answers."""
    finds_known_prompts("demo-sglang", TEST_SECONDS - 60)


# ------------------------------------------ SGLang's own test kit, kvd at its default settings
#
# Of SGLang's kits these tests need neither a tokenizer nor a trained model. The device cache is too
# small for them, so what they expect to be found comes back from the daemon.

KIT_VOCABULARY = 32768  # the kit's tokens are below 30,001
KIT_DEVICE_TOKENS = 3072  # of the 5,000 that four conversations have in the end


class Kit(AccuracyTwoPassMixin, UnifiedRadixTreeTestMixin, TestCase):  # type: ignore[misc]  # Any
    """The kit's tests, sized for a CPU."""

    __test__ = False
    model = "random weights"
    num_groups = branches_per_group = 2
    prefix_len = 256
    max_new_tokens = 8

    def __init__(self, base_url: str, page_size: int) -> None:
        super().__init__("test_l3_prefetch_full_prefix_hit_after_flush")
        self.base_url = base_url
        self.l3_prefetch_page_size = page_size
        self.l3_prefetch_prompt_pages = 320 // page_size
        self.input_ids = prompts(4, tokens=400)


@pytest.fixture(scope="module")
def kit(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kit]:
    """The kit, on an engine with pages of so many tokens."""
    place: Path = tmp_path_factory.mktemp("kit")
    model = write_model(place / "model", LLAMA | {"vocab_size": KIT_VOCABULARY})
    options = SglangServerOptions(model, KIT_DEVICE_TOKENS, page_size=request.param, threads=2)
    with daemon_left_clean() as daemon:
        engine = SglangServer(with_kvd(options, daemon.runtime_dir), place / "engine.log")
        try:
            engine.wait_ready()
            wait_served(daemon)
            yield Kit(engine.url, request.param)
        finally:
            engine.kill()


@pytest.mark.parametrize("kit", [16, pytest.param(32, marks=pytest.mark.nightly)], indirect=True)
def test_after_a_flush_all_pages_of_a_prompt_are_found(kit: Kit) -> None:
    """SGLang's kit expects all but the last page, which is never looked up."""
    kit.test_l3_prefetch_full_prefix_hit_after_flush()


@pytest.mark.parametrize("kit", [16], indirect=True)
@pytest.mark.parametrize(
    "name",
    [
        "test_multiturn_logprobs_match",
        "test_multiturn_prefill_cache_hit_branching",
        "test_multiturn_decode_cache_hit_branching",
    ],
)
def test_conversations_that_do_not_fit_the_device_are_found(kit: Kit, name: str) -> None:
    """SGLang's kit expects every page of earlier turns, and log-probabilities as computed."""
    getattr(kit, name)()
