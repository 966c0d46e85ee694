"""`kvd demo-vllm` and `kvd demo-sglang`: a real engine on a CPU with a private daemon.

The same prompts are served three times: cold, warm, and warm in a new engine. An engine that finds
the beginning of a prompt in kvd computes only the rest. For a cold prompt to compute that rest in a
step of its own too, and round in the same way, one step takes as many tokens as kvd can return.
"""

import os
import random
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Generic, TypeVar

import click
from rich.console import Console

from kvd_client.errors import KvdClientError
from kvd_proto.text import format_size
from kvd_tools.demo.processes import Daemon
from kvd_tools.engine_server import Completion, EngineServer
from kvd_tools.errors import DemoError, check_installed
from kvd_tools.models import ANSWER_TOKENS, HEAD_DIM, KV_HEADS, MODEL, VOCAB, write_model
from kvd_tools.sglang_engine import SglangServer, SglangServerOptions
from kvd_tools.vllm_engine import VllmServer, VllmServerOptions, kvd_transfer

POOL_MARGIN = 1.5  # up to a quarter of a full pool is on loan to engines
EXTRA_BYTES = 2**29  # for the model and the logs, beside the pool
MIN_PROMPTS = 4  # fewer may still be in the engine's own cache in the next round
HEAD = f"{'round':<22}{'median':>8}  {'hit tokens':>16}  each prompt"


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its prompts, from which the sizes of pool and engine follow.

    Attributes:
        layers: of the model.
        prompts: number of measured prompts. One more prompt warms the engine up.
        prompt_tokens: length of each prompt.
    """

    NUMBER_BYTES: ClassVar[int]
    """Size of the engine's numbers."""

    layers: int
    prompts: int
    prompt_tokens: int

    @property
    def token_bytes(self) -> int:
        """KV bytes of one token in all layers."""
        return self.layers * 2 * KV_HEADS * HEAD_DIM * self.NUMBER_BYTES

    @property
    def longest(self) -> int:
        """Tokens of a prompt with its answer."""
        return self.prompt_tokens + ANSWER_TOKENS

    @property
    def pool_bytes(self) -> int:
        """Size of a pool that holds every prompt."""
        return int(POOL_MARGIN * (self.prompts + 1) * self.longest * self.token_bytes)

    def make_prompts(self) -> list[list[int]]:
        """Return random prompts without common prefixes. The first one is for warming up."""
        source = random.Random(0)
        return [source.choices(range(VOCAB), k=self.prompt_tokens) for _ in range(self.prompts + 1)]

    def write_model(self, folder: Path) -> Path:
        """Write the model into a folder below `folder`; return its path."""
        return write_model(folder / "model", MODEL | {"num_hidden_layers": self.layers})


EngineT = TypeVar("EngineT", bound=EngineServer)


class EngineDemo(ABC, Generic[EngineT]):
    """The demo with one kind of engine.

    Args:
        workload: the prompts to serve.
        console: where the results are printed.

    Attributes:
        MODULE: the engine's Python module.
        COMMAND: name of the demo's command, and of its target in the Makefile.
        NUMBERS: type of the engine's numbers.
        CACHE: name of the engine's own KV cache.
    """

    MODULE: str
    COMMAND: str
    NUMBERS: str
    CACHE: str

    def __init__(self, workload: Workload, console: Console) -> None:
        self.workload = workload
        self.console = console

    @abstractmethod
    def describe(self) -> str:
        """Return a line about the engine and the size of its own cache."""

    @abstractmethod
    def prepare(self, folder: Path, runtime_dir: Path) -> Callable[[Path], EngineT]:
        """Write the model; return a function that starts an engine, given its log file."""

    @abstractmethod
    def warm_up(self, engine: EngineT, prompt: list[int]) -> None:
        """Serve the prompt until the daemon serves the engine."""

    @abstractmethod
    def hit_counter(self, engine: EngineT) -> Callable[[list[Completion]], int]:
        """Start a round; return the function from its completions to the number of hit tokens."""

    def show(self) -> None:
        """Run the demo. Exit with status 1 if a round had no hits or an answer changed."""
        try:
            remedy = f"`make {self.COMMAND}` makes an environment with it and runs the demo there"
            check_installed(self.MODULE, f"kvd {self.COMMAND}", remedy)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
            cold, *warm = self._run()
        except KvdClientError as error:
            raise click.ClickException(str(error)) from error
        if not _print_verdict(cold, warm, self.console):
            sys.exit(1)

    def _run(self) -> "list[Round]":
        workload, console = self.workload, self.console
        warm_up_prompt, *prompts = workload.make_prompts()
        rounds = []
        with Daemon(workload.pool_bytes, EXTRA_BYTES) as daemon:
            folder = daemon.folder
            num_tokens = workload.prompts * workload.prompt_tokens
            console.print(
                f"kvd:    a daemon with a pool of {format_size(workload.pool_bytes)}\n"
                f"model:  dense, {workload.layers} layers, random weights;"
                f" {format_size(workload.token_bytes)} of KV per token, {self.NUMBERS}\n"
                f"{self.describe()}\n"
                f"load:   {workload.prompts} prompts of {workload.prompt_tokens:,} tokens,"
                f" {num_tokens:,} in all: they push each other out of the\n"
                f"        {self.CACHE}, so that what is found when they come back comes from kvd\n"
            )
            with console.status("writing the model"):
                start = self.prepare(folder, daemon.runtime_dir)
            with self._engine("An", start, folder / "engine-1.log", warm_up_prompt) as engine:
                console.print(f"\nTime to first token, of prompts sent one after another:\n{HEAD}")
                rounds += [self._serve(name, engine, prompts) for name in ("cold", "warm")]
            console.print()
            with self._engine("A new", start, folder / "engine-2.log", warm_up_prompt) as engine:
                console.print(f"\n{HEAD}")
                rounds.append(self._serve("warm, in a new engine", engine, prompts))
            if not daemon.running:
                raise daemon.lost("the daemon is gone")
        console.print("\nEngine and daemon are stopped.")
        return rounds

    @contextmanager
    def _engine(
        self, article: str, start: Callable[[Path], EngineT], log: Path, warm_up_prompt: list[int]
    ) -> Iterator[EngineT]:
        """Start an engine and warm it up."""
        started = time.monotonic()
        with ExitStack() as stack:
            with self.console.status(f"{article} engine starts"):
                engine = start(log)
                stack.enter_context(engine)
            seconds = time.monotonic() - started
            self.console.print(f"{article} engine is ready after {seconds:.0f} s.")
            self.warm_up(engine, warm_up_prompt)
            yield engine

    def _serve(self, name: str, engine: EngineT, prompts: Sequence[Sequence[int]]) -> "Round":
        """Serve a round, and print its line under `HEAD`."""
        count_hits = self.hit_counter(engine)
        with self.console.status(name):
            completions = [engine.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts]
        served = Round(name, completions, count_hits(completions))
        times = " ".join(f"{completion.first_token_seconds:.2f}" for completion in completions)
        hits = f"{served.hits:,} of {sum(map(len, prompts)):,}"
        self.console.print(f"{name:<22}{served.seconds:>6.3f} s  {hits:>16}  {times}")
        return served


@dataclass(frozen=True, slots=True)
class Round:
    """Every prompt served once, one after another. `hits` is the number of tokens from kvd."""

    name: str
    completions: list[Completion]
    hits: int

    @property
    def seconds(self) -> float:
        """Median time to the first token."""
        return median(completion.first_token_seconds for completion in self.completions)


def _print_verdict(cold: Round, warm: Sequence[Round], console: Console) -> bool:
    """Print how the warm rounds (same engine, then new engine) compare with the cold one.

    Returns whether all warm rounds had hits and the same tokens.
    """
    ok = True
    for served in warm:
        pairs = zip(served.completions, cold.completions, strict=True)
        changed = sum(warm_one.tokens != cold_one.tokens for warm_one, cold_one in pairs)
        if changed or not served.hits:
            ok = False
            console.print(
                f"[bold red]{served.name}: {served.hits:,} tokens found in kvd, {changed} of"
                f" {len(served.completions)} answers have other tokens than in the cold round.[/]"
            )
    if ok:
        same_engine, new_engine = (cold.seconds / served.seconds for served in warm)
        console.print(
            f"[bold green]First token: cold takes {same_engine:.1f} times as long as warm,"
            f" {new_engine:.1f} times as long as after the restart."
            f" Every answer has the same {ANSWER_TOKENS} tokens in all rounds.[/]"
        )
    return ok


# --------------------------------------------------------------------- vLLM

BLOCK_TOKENS = 32
BLOCKS_PER_CHUNK = 2
CHUNK_TOKENS = BLOCK_TOKENS * BLOCKS_PER_CHUNK
MAX_SEQUENCES = 4  # prompts come one by one, but a step must not be smaller than this
ATTACH_SECONDS = 30.0
ATTACHED = "vllm:kv_offload_kvd_attached"
HITS = "vllm:external_prefix_cache_hits"


@dataclass(frozen=True, slots=True)
class VllmWorkload(Workload):
    """A workload for vLLM with bfloat16."""

    NUMBER_BYTES: ClassVar[int] = 2

    @property
    def gpu_blocks(self) -> int:
        """Blocks of the GPU cache: one prompt served, one still being stored, and a null block."""
        return 1 + 2 * -(-self.longest // BLOCK_TOKENS)

    def write_options(self, folder: Path, runtime_dir: Path) -> VllmServerOptions:
        """Write the model; return options of an engine on the daemon at `runtime_dir`."""
        # vLLM always computes a prompt's last token, so its chunk is not loaded.
        loadable_tokens = (self.prompt_tokens - 1) // CHUNK_TOKENS * CHUNK_TOKENS
        return VllmServerOptions(
            model=self.write_model(folder),
            num_gpu_blocks=self.gpu_blocks,
            max_model_len=self.longest,
            block_size=BLOCK_TOKENS,
            dtype="bfloat16",
            threads=len(os.sched_getaffinity(0)),
            kv_transfer=kvd_transfer(runtime_dir, blocks_per_chunk=BLOCKS_PER_CHUNK, required=True),
            args=(
                f"--max-num-batched-tokens {loadable_tokens} --max-num-seqs {MAX_SEQUENCES}"
            ).split(),
        )


class VllmDemo(EngineDemo[VllmServer]):
    """The demo with vLLM."""

    MODULE, COMMAND, NUMBERS, CACHE = "vllm", "demo-vllm", "bfloat16", "GPU cache"
    workload: VllmWorkload

    def describe(self) -> str:
        """Return the size of the GPU cache, in vLLM's blocks."""
        return (
            "vLLM:   on the CPU; its own KV cache (the GPU cache) has"
            f" {self.workload.gpu_blocks} blocks of {BLOCK_TOKENS} tokens"
        )

    def prepare(self, folder: Path, runtime_dir: Path) -> Callable[[Path], VllmServer]:
        """See `EngineDemo`."""
        options = self.workload.write_options(folder, runtime_dir)
        return lambda log: VllmServer(options, log)

    def warm_up(self, engine: VllmServer, prompt: list[int]) -> None:
        """Serve the prompt until the engine's metric says so; vLLM renews it with every step."""
        end = time.monotonic() + ATTACH_SECONDS
        engine.generate([prompt], ANSWER_TOKENS)
        while not engine.metric(ATTACHED):
            if time.monotonic() > end:
                raise DemoError(f"the daemon does not serve the engine after {ATTACH_SECONDS:g} s")
            engine.generate([prompt], ANSWER_TOKENS)

    def hit_counter(self, engine: VllmServer) -> Callable[[list[Completion]], int]:
        """Count with vLLM's metric."""
        before = engine.metric(HITS)
        return lambda _: int(engine.metric(HITS) - before)


# ------------------------------------------------------------------- SGLang

PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class SglangWorkload(Workload):
    """A workload for SGLang with float32.

    Without SGLang's kernels many CPUs are several times slower with bfloat16.
    """

    NUMBER_BYTES: ClassVar[int] = 4

    @property
    def device_tokens(self) -> int:
        """Tokens of the device cache: one prompt served, one still being stored, a page each."""
        return 2 * (self.longest + PAGE_TOKENS)

    def write_options(self, folder: Path, runtime_dir: Path) -> SglangServerOptions:
        """Write the model; return options of an engine on the daemon at `runtime_dir`."""
        return SglangServerOptions(
            model=self.write_model(folder),
            max_tokens=self.device_tokens,
            page_size=PAGE_TOKENS,
            dtype="float32",
            # What can be loaded: whole pages, without the last token.
            chunked_prefill=(self.prompt_tokens - 1) // PAGE_TOKENS * PAGE_TOKENS,
            threads=len(os.sched_getaffinity(0)),
            linker={"runtime_dir": str(runtime_dir), "required": True},
        )


class SglangDemo(EngineDemo[SglangServer]):
    """The demo with SGLang."""

    MODULE, COMMAND, NUMBERS, CACHE = "sglang", "demo-sglang", "float32", "device cache"
    workload: SglangWorkload

    def describe(self) -> str:
        """Return the size of the device cache, in tokens."""
        return (
            "SGLang: on the CPU; its own KV cache (the device cache) has"
            f" {self.workload.device_tokens:,} tokens in pages of {PAGE_TOKENS}"
        )

    def prepare(self, folder: Path, runtime_dir: Path) -> Callable[[Path], SglangServer]:
        """See `EngineDemo`."""
        options = self.workload.write_options(folder, runtime_dir)
        return lambda log: SglangServer(options, log)

    def warm_up(self, engine: SglangServer, prompt: list[int]) -> None:
        """Serve the prompt once: with `required` the daemon serves the engine from its start."""
        engine.generate([prompt], ANSWER_TOKENS)

    def hit_counter(self, engine: SglangServer) -> Callable[[list[Completion]], int]:
        """Count what completions report: the engine's own cache has none of the prompts."""
        del engine
        return lambda completions: sum(completion.cached_tokens for completion in completions)


# ----------------------------------------------------------------- commands

# \b is click's mark for text that is not rewrapped.
HELP = """Show what kvd does for {engine}: time to first token of new prompts and of known ones.

Starts a private daemon and {engine} on the CPU with a generated model and a {cache}
too small for the prompts. Serves them, serves them again, starts {engine} anew, and again.
Exit status 1 if nothing was found or an answer changed.

\b
Examples:
  kvd {command}
  kvd {command} --prompts 10 --prompt-tokens 1000
"""


def _command(
    engine: str, demo_class: type[EngineDemo[Any]], workload_class: type[Workload]
) -> click.Command:
    """Return the command of a demo."""

    @click.command(
        demo_class.COMMAND,
        help=HELP.format(engine=engine, cache=demo_class.CACHE, command=demo_class.COMMAND),
    )
    @click.option(
        "--prompts",
        type=click.IntRange(MIN_PROMPTS, 32),
        default=6,
        show_default=True,
        help="How many prompts are served in each round.",
    )
    @click.option(
        "--prompt-tokens",
        type=click.IntRange(128, 4096),
        default=2000,
        show_default=True,
        help="Length of a prompt.",
    )
    @click.option(
        "--layers",
        type=click.IntRange(2, 32),
        default=18,
        show_default=True,
        help="Of the model; fewer are faster.",
    )
    def command(*, prompts: int, prompt_tokens: int, layers: int) -> None:
        workload = workload_class(layers, prompts, prompt_tokens)
        demo_class(workload, Console(highlight=False, soft_wrap=True)).show()

    return command


demo_vllm = _command("vLLM", VllmDemo, VllmWorkload)
demo_sglang = _command("SGLang", SglangDemo, SglangWorkload)
