"""Prompts and engines for the tests with the real SGLang."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvd_tools.engine_server import Completion, EngineServer
from kvd_tools.models import COMMON
from kvd_tools.sglang_engine import SglangServer, SglangServerOptions
from tests.daemon.serving import Daemon
from tests.waiting import DEADLINE, eventually

TEST_SECONDS = 900  # of a test that starts engines: on a busy machine each takes minutes
TOLERANCE = 2e-3  # of log-probabilities: how a prompt is cut into chunks changes sums' order
PROMPT_TOKENS = 700
CHUNK_TOKENS = 16  # kvd's default, and a page of most engines here
DEVICE_TOKENS = 4096  # five prompts
# Of engines that take no daemon for dead that gets no processor time.
PATIENT = {
    "deadline": DEADLINE,
    "load_timeout": DEADLINE,
    "lease": 2 * DEADLINE,
    "loan_timeout": DEADLINE,
}


def prompts(count: int, seed: int = 0, tokens: int = PROMPT_TOKENS) -> list[list[int]]:
    """Random prompts that share nothing."""
    source, vocabulary = random.Random(seed), range(2, COMMON["vocab_size"])
    return [source.choices(vocabulary, k=tokens) for _ in range(count)]


def findable(chunk_tokens: int = CHUNK_TOKENS) -> int:
    """Tokens of a prompt that can be found again: whole chunks, but not its last token."""
    return (PROMPT_TOKENS - 1) // chunk_tokens * chunk_tokens


def with_kvd(options: SglangServerOptions, runtime_dir: Path, **extra: Any) -> SglangServerOptions:
    """The same engine with kvd behind it, and with patience where nothing else is said."""
    return replace(options, linker={"runtime_dir": str(runtime_dir), **PATIENT, **extra})


def ask_all(engine: EngineServer, asked: Sequence[Sequence[int]]) -> list[Completion]:
    """Answers to prompts that are sent one after another."""
    return [engine.generate([prompt])[0] for prompt in asked]


def push_out(engine: SglangServer) -> None:
    """Fill the engine's own cache with other prompts."""
    ask_all(engine, prompts(8, seed=1000))


def wait_served(daemon: Daemon, pools: int = 1) -> None:
    """Wait until so many pools of engines are attached and know it, and the pool is there.

    They have slots on loan then, except engines that were attached before the pool was there: these
    are lent some with their next step.
    """

    def served(report: dict[str, Any]) -> bool:
        lent = all(namespace["chunks"]["lent"] for namespace in report["namespaces"])
        asked = report["broker"]["requests"].get("Step", 0) >= pools
        attached = sum(engine["attached"] for engine in report["engines"])
        return bool(report["ready"] and (lent or asked) and attached >= pools)

    eventually(daemon.status, served)


def wait_stored(daemon: Daemon, at_least: int) -> None:
    """Wait until so many chunks are READY, in all namespaces together."""
    eventually(
        daemon.status,
        lambda report: sum(n["chunks"]["ready"] for n in report["namespaces"]) >= at_least,
    )


def far_apart(one: Completion, other: Completion) -> float:
    """The largest difference of log-probabilities that both tell; infinite where tokens differ."""
    if one.tokens != other.tokens:
        return float("inf")
    return max(
        abs(one_top[token] - other_top[token])
        for one_top, other_top in zip(one.logprobs, other.logprobs, strict=True)
        for token in one_top.keys() & other_top.keys()
    )


def check(answers: Sequence[Completion], expected: Sequence[Completion]) -> None:
    """The same tokens, and log-probabilities as near as the engine's own are."""
    apart = [far_apart(*pair) for pair in zip(answers, expected, strict=True)]
    assert max(apart) <= TOLERANCE, apart
