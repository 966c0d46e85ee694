"""Prompts, engines and traffic for the tests with the real engine."""

import itertools
from collections import Counter
from collections.abc import Iterable
from concurrent import futures
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, Self

from kvd_client.routes import MIN_STAGING_BYTES, STAGING, Transfer
from kvd_client.vllm.metrics import ATTACHED
from kvd_tools.engine_server import Completion
from kvd_tools.models import LLAMA, write_model
from kvd_tools.vllm_engine import VllmServer, VllmServerOptions, kvd_transfer
from tests.conftest import Daemon
from tests.engine_answers import ask_all, check, random_prompts
from tests.engine_models import DEEPSEEK, GEMMA
from tests.waiting import DEADLINE, PATIENCE, eventually

BLOCK = 32
PROMPT_TOKENS = 400  # twelve blocks and a half: 384 tokens can be cached, whole chunks of 1, 2 or 4
CACHED_TOKENS = 384
MAX_MODEL_LEN = 1024
SHORT = list(range(2, 10))  # with its answer less than a block
GPU_BLOCKS: dict[str, int] = {"dense": 64, "hybrid": 160, "mla": 128}
MODELS = {"dense": LLAMA, "hybrid": GEMMA, "mla": DEEPSEEK}
STAGING_BYTES = MIN_STAGING_BYTES  # so few that a prompt's chunks are copied in several pieces
# Of MLA: the backend of every CPU; the one for AMX computes in bfloat16 alone.
BACKEND = {"mla": ("--attention-backend", "CPU_MLA")}


def prompts(count: int, seed: int = 0, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Random prompts that share nothing."""
    return random_prompts(count, seed, tokens=tokens)


@dataclass(frozen=True)
class Setting:
    """What decides an engine's answers."""

    kind: Literal["dense", "hybrid", "mla"] = "dense"
    tensor_parallel: int = 1

    @property
    def own_cache(self) -> bool:
        """Whether vLLM has a prefix cache of its own: on a CPU it turns it off for MLA."""
        return self.kind != "mla"

    def options(self, models: Path, kv_transfer: dict[str, Any] | None = None) -> VllmServerOptions:
        """An engine of this setting, with or without a cache behind it."""
        return VllmServerOptions(
            model=write_model(
                models / self.kind,
                MODELS[self.kind],
                norm=0.0 if self.kind == "hybrid" else 1.0,  # Gemma's multiply by one plus it
            ),
            num_gpu_blocks=GPU_BLOCKS[self.kind],
            max_model_len=MAX_MODEL_LEN,
            block_size=BLOCK,
            tensor_parallel=self.tensor_parallel,
            kv_transfer=kv_transfer,
            args=BACKEND.get(self.kind, ()),
        )


@dataclass(frozen=True)
class References:
    """Answers of an engine without kvd: computed, and with the prompt in its own cache if any."""

    prompts: list[list[int]]
    cold: list[Completion]
    warm: list[Completion]


def compute_references(engine: VllmServer, count: int, *, own_cache: bool = True) -> References:
    """Ask an engine that no daemon serves, prompt by prompt, each twice."""
    asked = prompts(count)
    answers = ask_all(engine, [prompt for prompt in asked for _ in ("cold", "warm")])
    cold, warm = answers[::2], answers[1::2]
    assert [answer.cached_tokens for answer in cold] == [0] * count
    assert {answer.cached_tokens for answer in warm} == {CACHED_TOKENS if own_cache else 0}
    engine.reset()
    return References(asked, cold, warm)


def with_kvd(options: VllmServerOptions, runtime_dir: Path, **extra: Any) -> VllmServerOptions:
    """The same engine with kvd behind it, with patience and few staging bytes by default."""
    timeouts = ("deadline", "load_timeout", "preemption_timeout")
    defaults = dict.fromkeys(timeouts, DEADLINE) | {"staging_bytes": STAGING_BYTES}
    return replace(options, kv_transfer=kvd_transfer(runtime_dir, **(defaults | extra)))


def check_transfer(engine: VllmServer, transfer: Transfer) -> None:
    """Fail unless the ranks' log lines say that their bytes take this way."""
    log = engine.log.read_text(errors="replace")
    line = "the KV cache is staged: this process copies each byte to or from"
    assert (line in log) == (transfer == STAGING)


def chunks_of(daemon: Daemon) -> Counter[str]:
    """Chunks by state, over all namespaces."""
    total = Counter[str]()
    for namespace in daemon.status()["namespaces"]:
        total.update(namespace["chunks"])
    return total


def wait_served(daemon: Daemon, *engines: VllmServer) -> None:
    """Until these engines are attached, and their schedulers know it.

    After an outage each of an engine's processes finds the daemon by itself. The daemon says so to
    the engine after it has said so in its status: what is asked in between is neither found nor
    stored. The prompts are too short for a chunk.
    """

    def attached() -> int:
        return sum(
            engine["attached"] and "scheduler" in [s["kind"] for s in engine["sessions"]]
            for engine in daemon.status()["engines"]
        )

    eventually(attached, len(engines).__le__)
    for engine in engines:

        def knows(engine: VllmServer = engine) -> bool:
            engine.generate([SHORT])  # vLLM renews the metric with every step
            return engine.metric(ATTACHED) > 0

        eventually(knows)


def wait_stored(daemon: Daemon, at_least: int = 1) -> int:
    """Until nothing is being written of what was decided before; how many chunks are there."""
    daemon.status()  # the answer may come before an older message of an engine; the next does not

    def settled(chunks: Counter[str]) -> bool:
        return not chunks["writing"] + chunks["draining"] and chunks["ready"] >= at_least

    return eventually(lambda: chunks_of(daemon), settled)["ready"]


class Traffic:
    """Prompts sent all the while, a few at a time; every answer is kept."""

    def __init__(self, engine: VllmServer, references: References, at_once: int = 3) -> None:
        self._engine = engine
        self._references = references
        self._at_once = at_once
        self._numbers = itertools.count()
        self._going = True
        self._sent: dict[int, Future[Completion]] = {}

    def __enter__(self) -> Self:
        for _ in range(self._at_once):
            self._send()
        return self

    def __exit__(self, *_: object) -> None:
        self._going = False
        assert not futures.wait(self._sent.values(), 2 * PATIENCE).not_done

    def _send(self, ended: Future[Completion] | None = None) -> None:
        """Send the next prompt, when one is answered."""
        if self._going and (ended is None or not ended.exception()):
            number = next(self._numbers)
            asked = self._references.prompts
            self._sent[number] = self._engine.submit(asked[number % len(asked)])
            self._sent[number].add_done_callback(self._send)

    def _answered(self) -> int:
        ended = [answer for answer in list(self._sent.values()) if answer.done()]
        return sum(bool(answer.result()) for answer in ended)

    def wait_answers(self, more: int) -> None:
        """Until so many more answers have come; fails with a prompt that got none."""
        answered = self._answered()
        target = answered + more
        while answered < target:
            answered = eventually(self._answered, answered.__lt__)

    def check(self) -> str:
        """A line about what was answered; fails where one answer is not as it should be."""
        answers = [answer.result() for _, answer in sorted(self._sent.items())]
        check(answers, itertools.cycle(self._references.cold))
        hits = sum(answer.cached_tokens > 0 for answer in answers)
        slowest = max(answer.seconds for answer in answers)
        return f"{len(answers)} answers, {hits} with hits, the slowest took {slowest:.1f} s"


def ask_found(
    engine: VllmServer, asked: Iterable[list[int]], tokens: int = CACHED_TOKENS
) -> list[Completion]:
    """Answers one by one, so many tokens of each from kvd.

    What is not there yet, or is loaded too late, is computed and stored; then it is asked again.
    """

    def ask(prompt: list[int]) -> Completion:
        engine.reset()
        return engine.generate([prompt])[0]

    return [
        eventually(partial(ask, prompt), lambda answer: answer.cached_tokens == tokens)
        for prompt in asked
    ]


def stored_chunks(daemon: Daemon) -> int:
    """How many chunks of the only namespace have become READY, one that came again twice."""
    (namespace,) = daemon.status()["namespaces"]
    return int(namespace["counters"]["stored"])


def results(sent: Iterable[Future[Completion]]) -> list[Completion]:
    """Answers that were asked for; they come, or fail, by themselves."""
    return [answer.result() for answer in sent]
