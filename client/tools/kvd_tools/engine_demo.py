"""What `kvd demo-vllm` and `kvd demo-sglang` have in common: the rounds, and how they are told."""

import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Generic, TypeVar

import click
from rich.console import Console

from kvd_client.errors import KvdClientError
from kvd_proto.text import format_size
from kvd_tools.demo.processes import Daemon
from kvd_tools.engine_server import Answer, EngineServer
from kvd_tools.errors import check_installed
from kvd_tools.models import ANSWER_TOKENS, Workload

ROOM_BYTES = 2**29  # for the model and the logs, beside the pool
# Fewer prompts might still be in the engine's own cache when they come back.
MIN_PROMPTS = 4
HEAD = f"{'round':<22}{'median':>8}  {'hit tokens':>16}  each prompt"

EngineT = TypeVar("EngineT", bound=EngineServer)
Command = TypeVar("Command", bound=Callable[..., Any])


def workload_options(command: Command) -> Command:
    """The options of a demo's command: `prompts`, `prompt_tokens`, `layers`."""
    for option in (
        click.option(
            "--layers",
            type=click.IntRange(2, 32),
            default=18,
            show_default=True,
            help="Of the model; fewer are faster.",
        ),
        click.option(
            "--prompt-tokens",
            type=click.IntRange(128, 4096),
            default=2000,
            show_default=True,
            help="Length of a prompt.",
        ),
        click.option(
            "--prompts",
            type=click.IntRange(MIN_PROMPTS, 32),
            default=6,
            show_default=True,
            help="How many prompts are served in each round.",
        ),
    ):
        command = option(command)
    return command


class EngineDemo(ABC, Generic[EngineT]):
    """A demo with one kind of engine.

    Args:
        workload: what is asked.
        console: where all of it is told.

    Attributes:
        MODULE: that an environment with the engine has.
        COMMAND: the demo's, of `kvd` and of make.
        NUMBERS: the type of the engine's numbers.
        CACHE: what the engine's own cache is called.
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
        """The line that tells of the engine and of its own cache."""

    @abstractmethod
    def prepare(self, place: Path, runtime_dir: Path) -> Callable[[Path], EngineT]:
        """Write the model; return what starts an engine, given a file for its log."""

    @abstractmethod
    def settle(self, engine: EngineT, first: list[int]) -> None:
        """Ask for a first prompt, until the daemon serves the engine."""

    @abstractmethod
    def hits(self, engine: EngineT) -> Callable[[list[Answer]], int]:
        """Called before a round; what is returned says after it how many tokens were found."""

    def show(self) -> None:
        """Run it; end this process where nothing was found or an answer has changed."""
        try:
            remedy = f"`make {self.COMMAND}` makes an environment with it and runs the demo there"
            check_installed(self.MODULE, f"kvd {self.COMMAND}", remedy)
            signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
            cold, *warm = self._run()
        except KvdClientError as error:
            raise click.ClickException(str(error)) from error
        if not _judge(cold, warm, self.console):
            sys.exit(1)

    def _run(self) -> "list[Round]":
        workload, console = self.workload, self.console
        first, *prompts = workload.make_prompts()
        rounds = []
        with Daemon(workload.pool_bytes, ROOM_BYTES) as daemon:
            place = daemon.place
            needed = workload.prompts * workload.prompt_tokens
            console.print(
                f"kvd:    a daemon with a pool of {format_size(workload.pool_bytes)}\n"
                f"model:  dense, {workload.layers} layers, random weights;"
                f" {format_size(workload.token_bytes)} of KV per token, {self.NUMBERS}\n"
                f"{self.describe()}\n"
                f"load:   {workload.prompts} prompts of {workload.prompt_tokens:,} tokens,"
                f" {needed:,} in all: they push each other out of the\n"
                f"        {self.CACHE}, so that what is found when they come back comes from kvd\n"
            )
            with console.status("writing the model"):
                start = self.prepare(place, daemon.runtime_dir)
            with self._engine("An", lambda: start(place / "engine-1.log"), first) as engine:
                console.print(f"\nTime to first token, of prompts sent one after another:\n{HEAD}")
                rounds += [self._serve(name, engine, prompts) for name in ("cold", "warm")]
            console.print()
            with self._engine("A new", lambda: start(place / "engine-2.log"), first) as engine:
                console.print(f"\n{HEAD}")
                rounds.append(self._serve("warm, in a new engine", engine, prompts))
            if not daemon.running:
                raise daemon.lost("the daemon is gone")
        console.print("\nEngine and daemon are stopped.")
        return rounds

    @contextmanager
    def _engine(
        self, article: str, start: Callable[[], EngineT], first: list[int]
    ) -> Iterator[EngineT]:
        """An engine that has done everything once and has the daemon behind it."""
        started = time.monotonic()
        with ExitStack() as stack:
            with self.console.status(f"{article} engine starts"):
                engine = start()
                stack.enter_context(engine)
            seconds = time.monotonic() - started
            self.console.print(f"{article} engine is ready after {seconds:.0f} s.")
            self.settle(engine, first)
            yield engine

    def _serve(self, name: str, engine: EngineT, prompts: Sequence[Sequence[int]]) -> "Round":
        """Serve a round, and print its line under `HEAD`."""
        hits = self.hits(engine)
        with self.console.status(name):
            answers = [engine.generate([prompt], ANSWER_TOKENS)[0] for prompt in prompts]
        served = Round(name, answers, hits(answers))
        each = " ".join(f"{answer.first_token_seconds:.2f}" for answer in answers)
        found = f"{served.hits:,} of {sum(map(len, prompts)):,}"
        self.console.print(f"{name:<22}{served.seconds:>6.3f} s  {found:>16}  {each}")
        return served


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


def _judge(cold: Round, warm: Sequence[Round], console: Console) -> bool:
    """Print how the warm rounds compare: whether all found something and have the same tokens.

    Args:
        cold: in which nothing was there.
        warm: one in the same engine, one in a new engine.
        console: where it is printed.
    """
    good = True
    for served in warm:
        pairs = zip(served.answers, cold.answers, strict=True)
        changed = sum(one.tokens != other.tokens for one, other in pairs)
        if changed or not served.hits:
            good = False
            console.print(
                f"[bold red]{served.name}: {served.hits:,} tokens found in kvd, {changed} of"
                f" {len(served.answers)} answers have other tokens than in the cold round.[/]"
            )
    if good:
        again, restarted = (cold.seconds / served.seconds for served in warm)
        console.print(
            f"[bold green]First token: cold takes {again:.1f} times as long as warm,"
            f" {restarted:.1f} times as long as after the restart."
            f" Every answer has the same {ANSWER_TOKENS} tokens in all rounds.[/]"
        )
    return good
