"""kvd behind a real SGLang engine: its answers are those of an engine without it."""

from pathlib import Path

import pytest

from kvd_tools.engine_server import Completion
from kvd_tools.sglang_engine import SglangServerOptions
from tests.conftest import Daemon
from tests.engine_demos import finds_known_prompts
from tests.sglang.conftest import StartEngine
from tests.sglang.support import (
    CHUNK_TOKENS,
    PROMPT_TOKENS,
    TEST_SECONDS,
    ask_all,
    check,
    findable,
    prompts,
    push_out,
    wait_served,
    wait_stored,
    with_kvd,
)
from tests.waiting import eventually

PROMPTS = prompts(4)
CHUNKS = len(PROMPTS) * (PROMPT_TOKENS // CHUNK_TOKENS)

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def test_the_answers_are_worth_comparing(expected: list[Completion]) -> None:
    """They differ from prompt to prompt, and the model is not sure of itself everywhere."""
    assert len({tuple(answer.tokens) for answer in expected}) == len(expected)
    assert min(min(top.values()) for answer in expected for top in answer.logprobs) < -1


@pytest.mark.parametrize(
    ("page_size", "layerwise"),
    [(1, False), (16, True), pytest.param(64, False, marks=pytest.mark.nightly)],
)
def test_what_was_pushed_out_comes_back(
    daemon: Daemon,
    model: Path,
    start_engine: StartEngine,
    expected: list[Completion],
    page_size: int,
    layerwise: bool,
) -> None:
    """Prompts that have left the engine's cache are found in kvd's, also together.

    And by the next engine, when this one has crashed.
    """
    plain = SglangServerOptions(model, page_size=page_size)
    chunk_tokens = max(page_size, CHUNK_TOKENS)
    options = with_kvd(plain, daemon.runtime_dir, layerwise=layerwise)
    engine = start_engine(options)
    engine.wait_ready()
    wait_served(daemon)
    check(ask_all(engine, PROMPTS), expected)
    wait_stored(daemon, len(PROMPTS) * (PROMPT_TOKENS // chunk_tokens))
    push_out(engine)
    answers = ask_all(engine, PROMPTS)
    check(answers, expected)
    assert min(answer.cached_tokens for answer in answers) >= findable(chunk_tokens)
    push_out(engine)
    together = engine.generate(PROMPTS)
    check(together, expected)
    assert min(answer.cached_tokens for answer in together) >= findable(chunk_tokens)
    if layerwise:
        return
    engine.kill()
    eventually(lambda: not daemon.status()["engines"])
    successor = start_engine(options)
    successor.wait_ready()
    wait_served(daemon)
    answers = ask_all(successor, PROMPTS)
    check(answers, expected)
    assert min(answer.cached_tokens for answer in answers) >= findable(chunk_tokens)


@pytest.mark.parametrize("layerwise", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_two_ranks_load_alike(
    daemon: Daemon,
    model: Path,
    start_engine: StartEngine,
    expected: list[Completion],
    layerwise: bool,
) -> None:
    """With tensor parallelism each rank has chunks of its own, and both find the same prefix."""
    plain = SglangServerOptions(model, tensor_parallel=2)
    engine = start_engine(with_kvd(plain, daemon.runtime_dir, layerwise=layerwise))
    engine.wait_ready()
    wait_served(daemon, pools=2)
    check(ask_all(engine, PROMPTS), expected)
    wait_stored(daemon, 2 * CHUNKS)
    push_out(engine)
    answers = ask_all(engine, PROMPTS)
    check(answers, expected)
    assert min(answer.cached_tokens for answer in answers) >= findable()


def test_the_demo_finds_known_prompts_also_after_a_restart() -> None:
    """`kvd demo-sglang`: warm and in a new engine every whole chunk, with the same answers."""
    finds_known_prompts("demo-sglang", TEST_SECONDS - 60)
