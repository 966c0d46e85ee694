"""What the benchmarks of SGLang share: its engines with and without a cache behind them.

All have the same model, device memory and threads; one is alive at a time. Numbers are float32:
processors without bfloat16 instructions take seven times as long for a layer's products in
bfloat16, beside which no cache would be seen.
"""

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from harness import Daemon, median
from sglang_hicache import ARGUMENTS

from kvd_tools.engine_server import Completion
from kvd_tools.models import HEAD_DIM, KV_HEADS, MODEL, VOCAB, write_model
from kvd_tools.sglang_engine import SglangServer, SglangServerOptions

PAGE_TOKENS = 16
LAYERS, NUMBER_BYTES = 18, 4
TOKEN_BYTES = LAYERS * 2 * KV_HEADS * HEAD_DIM * NUMBER_BYTES
MAX_TOKENS = 8
SETTLE_SECONDS = 0.8  # stores end
LOOK_SECONDS = 0.1
PLUGINS = "kvd_bench_plugins"

Spread = dict[str, float]


class Way(StrEnum):
    """What an engine has behind its device's memory."""

    NOTHING = "no cache"
    HICACHE = "HiCache"
    KVD = "kvd"
    LAYERWISE = "kvd, layer by layer"


@dataclass(frozen=True, slots=True)
class Setup:
    """What the engines of a run have in common.

    model: its folder.
    device_tokens: that the engine keeps itself.
    cache_bytes: of the cache behind it.
    threads: that compute.
    chunked_prefill: tokens of a prompt that one step computes at the most.
    lean: attention is computed for new tokens only, see `sglang_attention.py`.
    page_tokens: tokens of a page.
    """

    model: Path
    device_tokens: int
    cache_bytes: int
    threads: int
    chunked_prefill: int
    lean: bool = False
    page_tokens: int = PAGE_TOKENS

    @contextmanager
    def started(self, way: Way, place: Path, **extra: Any) -> Iterator[SglangServer]:
        """Start an engine, and a daemon of its own; both are ended with the context.

        Args:
            way: what is behind it.
            place: a folder for its log, which is made.
            extra: settings of kvd's linker.
        """
        place.mkdir()
        args, linker = [], None
        plugins = ["sglang_attention"] if self.lean else []
        with ExitStack() as stack:
            if way is Way.HICACHE:
                plugins.append("sglang_hicache")
                args = [*ARGUMENTS, "--hicache-size", str(math.ceil(self.cache_bytes / 1e9))]
            elif way is not Way.NOTHING:
                daemon = stack.enter_context(Daemon(self.cache_bytes))
                linker = {
                    "runtime_dir": str(daemon.runtime_dir),
                    "required": True,
                    "layerwise": way is Way.LAYERWISE,
                    **extra,
                }
            options = SglangServerOptions(
                model=self.model,
                max_tokens=self.device_tokens,
                page_size=self.page_tokens,
                dtype="float32",
                chunked_prefill=self.chunked_prefill,
                threads=self.threads,
                linker=linker,
                env={"PYTHONPATH": plugin_path(place / "plugins", plugins)},
                args=args,
            )
            yield stack.enter_context(SglangServer(options, place / "engine.log"))


@dataclass(slots=True)
class Asking:
    """Asks one engine, a prompt at a time.

    others: how busy the CPUs were when nothing was asked, percent.
    """

    engine: SglangServer
    others: list[float] = field(default_factory=list)

    def ask(self, prompt: Sequence[int], *, forget: bool = False) -> Completion:
        """Ask when the machine has come to rest.

        Args:
            prompt: token ids.
            forget: first drop what the engine keeps itself.
        """
        time.sleep(SETTLE_SECONDS)
        if forget:
            self.engine.reset()
        self.others.append(psutil.cpu_percent(LOOK_SECONDS))
        (answer,) = self.engine.generate([prompt], max_tokens=MAX_TOKENS)
        return answer


def plugin_path(folder: Path, modules: Sequence[str]) -> str:
    """Describe modules of this folder as plugins of SGLang; return the PYTHONPATH that has them.

    SGLang calls `install` of each in all of its processes.

    Args:
        folder: for the description, which is what an installed package leaves.
        modules: none, or some.
    """
    described = folder / f"{PLUGINS}-0.dist-info"
    described.mkdir(parents=True)
    (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PLUGINS}\nVersion: 0\n")
    points = "".join(f"{module} = {module}:install\n" for module in modules)
    (described / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{points}")
    return f"{folder}:{Path(__file__).parent}"


def write_bench_model(place: Path) -> Path:
    """Write the model's folder, below `place`."""
    return write_model(place / "model", MODEL | {"num_hidden_layers": LAYERS})


def make_tokens(count: int, *seed: int) -> list[int]:
    """Random tokens; the same for the same seed."""
    tokens: list[int] = np.random.default_rng(seed).integers(0, VOCAB, count).tolist()
    return tokens


def findable(tokens: int) -> int:
    """Of a prompt that comes back: whole pages, but not its last token."""
    return (tokens - 1) // PAGE_TOKENS * PAGE_TOKENS


def in_turn(number: int, ways: Sequence[Way]) -> list[Way]:
    """The order of a round: every second one is the other way round."""
    return list(ways if number % 2 == 0 else ways[::-1])


def spread(values: Sequence[float]) -> Spread:
    """The middle and the ends of some measurements."""
    return {"median": median(values), "lowest": min(values), "highest": max(values)}


def as_text(values: Spread, digits: int) -> str:
    """A spread, as tables have it."""
    low, high = values["lowest"], values["highest"]
    return f"{values['median']:,.{digits}f} ({low:,.{digits}f}..{high:,.{digits}f})"
