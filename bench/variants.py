"""The four ways to keep a KV cache that `vllm_ttft.py` compares, each with an engine of its own.

All engines have the same model, memory and settings, and stay up: an engine that is not asked
costs no CPU (vLLM's processes stop polling a second after the last request).
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Daemon, end

import kvd_client
import kvd_proto
import kvd_tools
from kvd_tools.demo_vllm.engine import EngineProcess
from kvd_tools.demo_vllm.models import LLAMA, write_model
from kvd_tools.demo_vllm.options import EngineOptions, kvd_transfer

NO_CACHE, IN_PROCESS, KVD, LMCACHE = "no cache", "in-process", "kvd", "LMCache"
MODEL = LLAMA | {
    "num_hidden_layers": 16,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 2048,
}
KV_BYTES_PER_TOKEN = 2 * 16 * 8 * 128 * 2  # keys and values, layers, heads, numbers, bfloat16
BLOCK_TOKENS, BLOCKS_PER_CHUNK, GPU_BLOCKS = 32, 2, 160
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
GPU_TOKENS = GPU_BLOCKS * BLOCK_TOKENS
MAX_MODEL_LEN = 2048
STEP_TOKENS = 512  # a prompt takes several steps, so that storing it begins while it is computed
LMCACHE_MODE = "lmcache_driven"  # the server copies, as kvd does; the other is slower here
SERVER_SECONDS = 120.0
POLL_SECONDS = 0.05


@dataclass(frozen=True, slots=True)
class Variant:
    """One way, ready to be asked."""

    name: str
    engine: EngineProcess

    @property
    def caches(self) -> bool:
        """Whether anything is kept outside the engine's own memory."""
        return self.name != NO_CACHE


@contextmanager
def running(place: Path, cpu_bytes: int, lmcache_python: str | None) -> Iterator[list[Variant]]:
    """All variants, started one after another; everything is ended with the context.

    Args:
        place: an existing folder for the model and the logs.
        cpu_bytes: of every cache.
        lmcache_python: of an environment with vLLM and LMCache, or None to leave LMCache out.
    """
    model = write_model(place / "model", MODEL)
    with ExitStack() as stack:
        variants: list[Variant] = []

        def start(name: str, transfer: Mapping[str, Any] | None, python: str) -> None:
            log = place / f"{name.replace(' ', '-')}.log"
            engine = EngineProcess(_options(model, transfer), log, python)
            variants.append(Variant(name, stack.enter_context(engine)))

        start(NO_CACHE, None, sys.executable)
        in_process = {
            "spec_name": "InProcessSpec",
            "spec_module_path": "in_process",
            "blocks_per_chunk": BLOCKS_PER_CHUNK,
            "bytes": cpu_bytes,
        }
        start(IN_PROCESS, _transfer("OffloadingConnector", in_process), sys.executable)
        daemon = stack.enter_context(Daemon(cpu_bytes))
        transfer = kvd_transfer(
            daemon.runtime_dir, blocks_per_chunk=BLOCKS_PER_CHUNK, required=True
        )
        start(KVD, transfer, sys.executable)
        if lmcache_python is not None:
            port = stack.enter_context(
                lmcache_server(lmcache_python, cpu_bytes, place / "lmcache-server.log")
            )
            at = {"host": "tcp://localhost", "port": port, "mp_transfer_mode": LMCACHE_MODE}
            extra = {f"lmcache.mp.{name}": value for name, value in at.items()}
            start(LMCACHE, _transfer("LMCacheMPConnector", extra), lmcache_python)
        yield variants


def _options(model: Path, transfer: Mapping[str, Any] | None) -> EngineOptions:
    packages = (kvd_client, kvd_proto, kvd_tools)
    roots = (Path(__file__).parent, *(Path(package.__path__[0]).parent for package in packages))
    return EngineOptions(
        model=model,
        num_gpu_blocks=GPU_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_TOKENS,
        dtype="bfloat16",
        kv_transfer=transfer,
        env={"PYTHONPATH": ":".join(map(str, roots))},
        threads=len(os.sched_getaffinity(0)),
        args=["--max-num-batched-tokens", str(STEP_TOKENS)],
    )


def _transfer(connector: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    return {"kv_connector": connector, "kv_role": "kv_both", "kv_connector_extra_config": extra}


@contextmanager
def lmcache_server(python: str, cpu_bytes: int, log: Path) -> Iterator[int]:
    """LMCache's multiprocess server with the same chunks and room: its port."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port: int = probe.getsockname()[1]
    command = [python, "-m", "lmcache.v1.multiprocess.server", "--port", str(port)]
    command += ["--chunk-size", str(CHUNK_TOKENS), "--eviction-policy", "LRU"]
    command += ["--l1-size-gb", f"{cpu_bytes / 2**30:g}", "--no-l1-use-lazy"]
    # The server's own default is not the engine's on CPU: the engine would wait for ever.
    command += ["--supported-transfer-mode", LMCACHE_MODE, "--disable-observability"]
    with log.open("w") as sink:
        server = subprocess.Popen(command, stdout=sink, stderr=sink)
        try:
            _wait_listening(server, port, log)
            yield port
        finally:
            end(server)


def _wait_listening(server: "subprocess.Popen[bytes]", port: int, log: Path) -> None:
    end_of_patience = time.monotonic() + SERVER_SECONDS
    while server.poll() is None and time.monotonic() < end_of_patience:
        with suppress(OSError):
            socket.create_connection(("localhost", port), 1).close()
            return
        time.sleep(POLL_SECONDS)
    raise RuntimeError(f"LMCache's server does not listen: {log.read_text()[-2000:]}")
