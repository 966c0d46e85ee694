"""The ways to keep a KV cache that `vllm_ttft.py` compares, each with an engine of its own.

All engines have the same model, memory and settings. One is alive at a time, its scheduler and
worker are one process, as they are with one GPU, and it computes with one thread less than there
are cores. Otherwise vLLM's processes wait for each other in loops that take the processor from
what is measured: from threads that compute, and from the lane.
"""

import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from harness import Daemon
from lmcache_server import LmcacheServer, lmcache_python
from moments import MOMENTS_FILE, Moments

import kvd_client
import kvd_proto
import kvd_tools
from kvd_tools.models import LLAMA
from kvd_tools.vllm_engine import VllmServer, VllmServerOptions, kvd_transfer

MODEL = LLAMA | {
    "num_hidden_layers": 16,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 2048,
}
KV_BYTES_PER_TOKEN = 2 * 16 * 8 * 128 * 2  # keys and values, layers, heads, numbers, bfloat16
CPU_BYTES = 2**30  # of each cache: all prompts of a start
BLOCK_TOKENS = 32
# The measured prompts of a start, which the floor finds there; few enough that each block was used
# before it is measured.
GPU_BLOCKS = 208
MAX_MODEL_LEN = 2048
STEP_TOKENS = 512  # a prompt takes several steps, so that storing it begins while it is computed
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # or vLLM on a CPU refuses "uni"


class Way(StrEnum):
    """Where KV is found again."""

    GPU = "GPU cache"  # of the engine itself: nothing is loaded, which is the floor
    IN_PROCESS = "in-process"
    KVD = "kvd"
    STAGED = "kvd, staged"  # copied by the engine to host memory that the daemon maps
    LMCACHE = "LMCache"


@dataclass(frozen=True, slots=True)
class Variant:
    """One way with chunks of so many blocks; the GPU cache has blocks only.

    With `side_by_side` a request loads chunks that another one is loading, too; only kvd's does.
    """

    way: Way
    blocks_per_chunk: int
    side_by_side: bool = False

    @property
    def chunk_tokens(self) -> int:
        """Hits end at multiples of it."""
        return self.blocks_per_chunk * BLOCK_TOKENS

    @property
    def stamped(self) -> bool:
        """Whether the engine writes down its moments."""
        return self.way in {Way.IN_PROCESS, Way.KVD, Way.STAGED}

    def __str__(self) -> str:
        chunks = "" if self.way is Way.GPU else f", chunks of {self.chunk_tokens}"
        return f"{self.way}{chunks}{', loads side by side' if self.side_by_side else ''}"


@dataclass(frozen=True, slots=True)
class Started:
    """A variant's engine, ready to be asked; the daemon where there is one."""

    variant: Variant
    engine: VllmServer
    moments: Moments
    daemon: Daemon | None = None


@contextmanager
def started(
    variant: Variant, model: Path, place: Path, gpu_blocks: int = GPU_BLOCKS
) -> Iterator[Started]:
    """Start it; everything is ended with the context.

    Args:
        variant: which.
        model: its folder.
        place: an existing folder for logs.
        gpu_blocks: size of the engine's KV memory.
    """
    moments = Moments(place / "moments")
    python, transfer, daemon = sys.executable, None, None
    with ExitStack() as stack:
        if variant.way is Way.IN_PROCESS:
            extra = {
                "spec_name": "InProcessSpec",
                "spec_module_path": "in_process",
                "blocks_per_chunk": variant.blocks_per_chunk,
                "bytes": CPU_BYTES,
            }
            transfer = {
                "kv_connector": "StampedOffloading",
                "kv_connector_module_path": "stamped",
                "kv_role": "kv_both",
                "kv_connector_extra_config": extra,
            }
        elif variant.way in {Way.KVD, Way.STAGED}:
            daemon = stack.enter_context(Daemon(CPU_BYTES))
            transfer = kvd_transfer(
                daemon.runtime_dir,
                blocks_per_chunk=variant.blocks_per_chunk,
                required=True,
                transfer="staging" if variant.way is Way.STAGED else "export",
            ) | {
                "kv_connector": "StampedSideBySide" if variant.side_by_side else "StampedKvd",
                "kv_connector_module_path": "stamped",
            }
        elif variant.way is Way.LMCACHE:
            python = lmcache_python()
            log = place / "lmcache-server.log"
            server = LmcacheServer(python, variant.chunk_tokens, CPU_BYTES, log)
            transfer = stack.enter_context(server).transfer()
        options = engine_options(model, transfer, {MOMENTS_FILE: str(moments.path)})
        options = replace(options, num_gpu_blocks=gpu_blocks)
        engine = stack.enter_context(VllmServer(options, place / "engine.log", python))
        yield Started(variant, engine, moments, daemon)


def engine_options(
    model: Path, transfer: Mapping[str, Any] | None, env: Mapping[str, str] | None = None
) -> VllmServerOptions:
    """An engine of `MODEL` with this connector, and more of an environment."""
    packages = (kvd_client, kvd_proto, kvd_tools)
    roots = (Path(__file__).parent, *(Path(package.__path__[0]).parent for package in packages))
    return VllmServerOptions(
        model=model,
        num_gpu_blocks=GPU_BLOCKS,
        max_model_len=MAX_MODEL_LEN,
        block_size=BLOCK_TOKENS,
        dtype="bfloat16",
        kv_transfer=transfer,
        env={**ONE_PROCESS, "PYTHONPATH": ":".join(map(str, roots)), **(env or {})},
        threads=max(1, len(os.sched_getaffinity(0)) - 1),
        args=[
            "--max-num-batched-tokens",
            str(STEP_TOKENS),
            "--distributed-executor-backend",
            "uni",
        ],
    )
