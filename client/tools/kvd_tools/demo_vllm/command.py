"""`kvd demo-vllm`: vLLM on a CPU with a private daemon, cold, warm, and warm after a restart."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
from rich.console import Console

from kvd_client.errors import KvdClientError
from kvd_proto.sizes import format_size
from kvd_tools.demo.processes import Daemon
from kvd_tools.demo_vllm.engine import EngineProcess
from kvd_tools.demo_vllm.options import EngineOptions
from kvd_tools.demo_vllm.scenario import ANSWER_TOKENS, BLOCK_TOKENS, Scenario
from kvd_tools.engine_server import Answer
from kvd_tools.errors import DemoError, check_installed

ROOM_BYTES = 2**29  # for the model and the logs, beside the pool
# Fewer prompts might still be in the GPU cache when they come back.
MIN_PROMPTS = 4
ATTACH_SECONDS = 30.0
ATTACHED = "vllm:kv_offload_kvd_attached"
HITS = "vllm:external_prefix_cache_hits"
HEAD = f"{'round':<22}{'median':>8}  {'hit tokens':>16}  each prompt"


@dataclass(frozen=True, slots=True)
class Round:
    """Every prompt once, one after another: the answers, and how many tokens came from kvd."""

    name: str
    answers: list[Answer]
    hits: int

    @property
    def seconds(self) -> float:
        """Median of the times to the first token."""
        return median(answer.first_token_seconds for answer in self.answers)


@click.command("demo-vllm")
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
def demo_vllm(*, prompts: int, prompt_tokens: int, layers: int) -> None:
    """Show what kvd does for vLLM: time to first token of new prompts and of known ones.

    Starts a private daemon and vLLM on the CPU with a generated model and a GPU cache too
    small for the prompts. Serves them, serves them again, starts vLLM anew, and again.
    Exit status 1 if nothing was found or an answer changed.

    \b
    Examples:
      kvd demo-vllm
      kvd demo-vllm --prompts 10 --prompt-tokens 1000
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    console = Console(highlight=False, soft_wrap=True)
    try:
        remedy = "`make demo-vllm` makes an environment with it and runs the demo there"
        check_installed("vllm", "kvd demo-vllm", remedy)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        cold, *warm = _run(Scenario(layers, prompts, prompt_tokens), console)
    except KvdClientError as error:
        raise click.ClickException(str(error)) from error
    good = True
    for served in warm:
        pairs = zip(served.answers, cold.answers, strict=True)
        changed = sum(one.tokens != other.tokens for one, other in pairs)
        if changed or not served.hits:
            good = False
            console.print(
                f"[bold red]{served.name}: {served.hits:,} tokens found in kvd, {changed} of"
                f" {prompts} answers have other tokens than in the cold round.[/]"
            )
    if not good:
        sys.exit(1)
    again, restarted = (cold.seconds / served.seconds for served in warm)
    console.print(
        f"[bold green]First token: cold takes {again:.1f} times as long as warm,"
        f" {restarted:.1f} times as long as after the restart."
        f" Every answer has the same {ANSWER_TOKENS} tokens in all rounds.[/]"
    )


def _run(scenario: Scenario, console: Console) -> list[Round]:
    pool = scenario.pool_bytes
    first, *prompts = scenario.make_prompts()
    rounds = []
    with Daemon(pool, ROOM_BYTES) as daemon:
        place = daemon.place
        needed = scenario.prompts * scenario.prompt_tokens
        console.print(
            f"kvd:    a daemon with a pool of {format_size(pool)}\n"
            f"model:  dense, {scenario.layers} layers, random weights;"
            f" {format_size(scenario.token_bytes)} of KV per token, bfloat16\n"
            f"vLLM:   on the CPU; its own KV cache (the GPU cache) has {scenario.gpu_blocks} blocks"
            f" of {BLOCK_TOKENS} tokens\n"
            f"load:   {scenario.prompts} prompts of {scenario.prompt_tokens:,} tokens,"
            f" {needed:,} in all: they push each other out of the\n"
            "        GPU cache, so that what is found when they come back comes from kvd\n"
        )
        with console.status("writing the model"):
            options = scenario.write_options(place, daemon.runtime_dir)
        with _engine("An", options, place / "engine-1.log", first, console) as engine:
            console.print(f"\nTime to first token, of prompts sent one after another:\n{HEAD}")
            rounds += [_serve(name, engine, prompts, console) for name in ("cold", "warm")]
        console.print()
        with _engine("A new", options, place / "engine-2.log", first, console) as engine:
            console.print(f"\n{HEAD}")
            rounds.append(_serve("warm, in a new engine", engine, prompts, console))
        if not daemon.running:
            raise daemon.lost("the daemon is gone")
    console.print("\nEngine and daemon are stopped.")
    return rounds


@contextmanager
def _engine(
    article: str, options: EngineOptions, log: Path, first: list[int], console: Console
) -> Iterator[EngineProcess]:
    """An engine that has done everything once and has the daemon behind it."""
    started = time.monotonic()
    with ExitStack() as stack:
        with console.status(f"{article} engine starts"):
            engine = stack.enter_context(EngineProcess(options, log))
        seconds = time.monotonic() - started
        console.print(f"{article} engine is ready after {seconds:.0f} s.")
        end = time.monotonic() + ATTACH_SECONDS
        engine.generate([first], ANSWER_TOKENS)
        while not engine.metric(ATTACHED):  # vLLM renews it with every step
            if time.monotonic() > end:
                raise DemoError(f"the daemon does not serve the engine after {ATTACH_SECONDS:g} s")
            engine.generate([first], ANSWER_TOKENS)
        yield engine


def _serve(name: str, engine: EngineProcess, prompts: list[list[int]], console: Console) -> Round:
    """Serve a round, and print its line under `HEAD`."""
    before = engine.metric(HITS)
    with console.status(name):
        answers = [engine.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts]
    served = Round(name, answers, int(engine.metric(HITS) - before))
    each = " ".join(f"{answer.first_token_seconds:.2f}" for answer in answers)
    hits = f"{served.hits:,} of {sum(map(len, prompts)):,}"
    console.print(f"{name:<22}{served.seconds:>6.3f} s  {hits:>16}  {each}")
    return served
