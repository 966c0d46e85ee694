"""Prompts and engines for the tests with the real SGLang."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from kvd_tools.engine_server import Completion
from kvd_tools.sglang_engine import SglangServer, SglangServerOptions
from tests.daemon.serving import Daemon
from tests.engine_answers import ask_all, check, random_prompts
from tests.waiting import DEADLINE, eventually

PROMPT_TOKENS = 700
CHUNK_TOKENS = 16  # kvd's default, and a page of most engines here
prompts = partial(random_prompts, tokens=PROMPT_TOKENS)
# Of engines that take no daemon for dead that gets no processor time.
PATIENT = {
    "deadline": DEADLINE,
    "load_timeout": DEADLINE,
    "lease": 2 * DEADLINE,
    "loan_timeout": DEADLINE,
}


def findable(chunk_tokens: int = CHUNK_TOKENS) -> int:
    """Tokens of a prompt that can be found again: whole chunks, but not its last token."""
    return (PROMPT_TOKENS - 1) // chunk_tokens * chunk_tokens


def with_kvd(options: SglangServerOptions, runtime_dir: Path, **extra: Any) -> SglangServerOptions:
    """The same engine with kvd behind it, and with patience where nothing else is said."""
    return replace(options, linker={"runtime_dir": str(runtime_dir), **PATIENT, **extra})


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


def check_worth(answers: Sequence[Completion]) -> None:
    """They differ from prompt to prompt, and the model is not sure of itself everywhere."""
    assert len({tuple(answer.tokens) for answer in answers}) == len(answers)
    assert min(min(top.values()) for answer in answers for top in answer.logprobs) < -1


def check_found(
    answers: Sequence[Completion], expected: Sequence[Completion], tokens: int | None = None
) -> None:
    """They are as expected, and so many tokens of each prompt, by default all, were found."""
    check(answers, expected)
    at_least = findable() if tokens is None else tokens
    assert min(answer.cached_tokens for answer in answers) >= at_least
