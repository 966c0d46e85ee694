"""`kvd demo-vllm`: vLLM on a CPU with a private daemon, cold, warm, and warm after a restart."""

import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import click
from rich.console import Console

from kvd_client.errors import KvdClientError
from kvd_proto.sizes import format_size
from kvd_tools.demo.processes import Daemon
from kvd_tools.demo_vllm.engine import EngineProcess
from kvd_tools.demo_vllm.models import Kind, write_model
from kvd_tools.demo_vllm.options import EngineOptions
from kvd_tools.demo_vllm.rounds import HEAD, Round, ask, warm_up
from kvd_tools.demo_vllm.scenario import ANSWER_TOKENS, BLOCK_TOKENS, KINDS, Scenario
from kvd_tools.errors import check_installed

ROOM_BYTES = 2**29  # for the model and the logs, beside the pool
# Fewer prompts might still be in the GPU cache when they come back.
MIN_PROMPTS = 4


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
    "--model",
    "kind",
    type=click.Choice(KINDS),
    default="dense",
    show_default=True,
    help="Kind of the generated model: all layers full, or two of three with a sliding window.",
)
@click.option(
    "--layers",
    type=click.IntRange(2, 32),
    default=18,
    show_default=True,
    help="Of the model; fewer are faster.",
)
def demo_vllm(*, prompts: int, prompt_tokens: int, kind: Kind, layers: int) -> None:
    """Show what kvd does for vLLM: time to first token of new prompts and of known ones.

    Starts a private daemon and vLLM on the CPU with a generated model and a GPU cache too
    small for the prompts. Serves them, serves them again, starts vLLM anew, and again.
    Exit status 1 if nothing was found or an answer changed.

    \b
    Examples:
      kvd demo-vllm
      kvd demo-vllm --model hybrid --prompts 10 --prompt-tokens 1000
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    try:
        remedy = "`make demo-vllm` makes an environment with it and runs the demo there"
        check_installed("vllm", "kvd demo-vllm", remedy)
        scenario = Scenario(kind, layers, prompts, prompt_tokens)
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
        console = Console(highlight=False, soft_wrap=True)
        rounds = _run(scenario, console)
    except KvdClientError as error:
        raise click.ClickException(str(error)) from error
    if faults := _faults(*rounds):
        for fault in faults:
            console.print(f"[bold red]{fault}[/]")
        sys.exit(1)
    console.print(f"[bold green]{_summary(*rounds)}[/]")


def _run(scenario: Scenario, console: Console) -> tuple[Round, Round, Round]:
    pool = scenario.pool_bytes
    first, *prompts = scenario.make_prompts()
    with Daemon(pool, ROOM_BYTES) as daemon:
        _introduce(scenario, console)
        with console.status("writing the model"):
            model = write_model(daemon.place / "model", scenario.kind, **scenario.shape)
        options = scenario.options(model, daemon.runtime_dir)
        with _engine(options, daemon.place / "engine-1.log", "an", console) as engine:
            warm_up(engine, first)
            console.print(f"\nTime to first token, of prompts sent one after another:\n{HEAD}")
            cold = _serve("cold", engine, prompts, console)
            warm = _serve("warm", engine, prompts, console)
        console.print()
        with _engine(options, daemon.place / "engine-2.log", "a new", console) as engine:
            warm_up(engine, first)
            console.print(f"\n{HEAD}")
            again = _serve("warm, in a new engine", engine, prompts, console)
        if not daemon.running:
            raise daemon.lost("the daemon is gone")
    console.print("\nEngine and daemon are stopped.")
    return cold, warm, again


def _introduce(scenario: Scenario, console: Console) -> None:
    needed = scenario.prompts * scenario.prompt_tokens
    console.print(
        f"kvd:    a daemon with a pool of {format_size(scenario.pool_bytes)}\n"
        f"model:  {scenario.kind}, {scenario.layers} layers, random weights;"
        f" {format_size(scenario.token_bytes)} of KV per token, bfloat16\n"
        f"vLLM:   on the CPU; its own KV cache (the GPU cache) has {scenario.gpu_blocks} blocks"
        f" of {BLOCK_TOKENS} tokens\n"
        f"load:   {scenario.prompts} prompts of {scenario.prompt_tokens:,} tokens,"
        f" {needed:,} in all: they push each other out of the\n"
        "        GPU cache, so that what is found when they come back comes from kvd\n"
    )


@contextmanager
def _engine(
    options: EngineOptions, log: Path, article: str, console: Console
) -> Iterator[EngineProcess]:
    """An engine that is ready, ended with the context."""
    started = time.monotonic()
    with ExitStack() as stack:
        with console.status(f"starting {article} engine"):
            engine = stack.enter_context(EngineProcess(options, log))
        seconds = time.monotonic() - started
        console.print(f"{article.capitalize()} engine is ready after {seconds:.0f} s.")
        yield engine


def _serve(name: str, engine: EngineProcess, prompts: list[list[int]], console: Console) -> Round:
    with console.status(name):
        served = ask(name, engine, prompts)
    console.print(served.line())
    return served


def _faults(cold: Round, *warm: Round) -> list[str]:
    """What must not be, one sentence each."""
    faults = []
    for served in warm:
        if served.hits <= 0:
            faults.append(f"{served.name}: nothing was found in kvd.")
        if changed := len(cold.answers) - served.same_answers(cold):
            faults.append(
                f"{served.name}: {changed} of {len(cold.answers)} answers have other tokens"
                " than in the cold round."
            )
    return faults


def _summary(cold: Round, warm: Round, again: Round) -> str:
    return (
        f"First token: cold takes {cold.seconds / warm.seconds:.1f} times as long as warm,"
        f" {cold.seconds / again.seconds:.1f} times as long as after the restart."
        f" Every answer has the same {ANSWER_TOKENS} tokens in all rounds."
    )
