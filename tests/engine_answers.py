"""What tests with real engines ask, and how they compare answers."""

import random
from collections.abc import Iterable, Sequence

from kvd_tools.engine_server import Completion, EngineServer
from kvd_tools.models import COMMON

TEST_SECONDS = 900  # of a test that starts engines: on a busy machine each takes minutes
# Log-probabilities of the same request in another batch, or cut into other chunks; vLLM's
# test_coverage shows what damage does.
TOLERANCE = 2e-3


def random_prompts(count: int, seed: int = 0, *, tokens: int) -> list[list[int]]:
    """Prompts that share nothing."""
    source, vocabulary = random.Random(seed), range(2, COMMON["vocab_size"])
    return [source.choices(vocabulary, k=tokens) for _ in range(count)]


def ask_all(engine: EngineServer, asked: Iterable[Sequence[int]]) -> list[Completion]:
    """Answers one by one, so that the batch is the same as for the references."""
    return [engine.generate([prompt])[0] for prompt in asked]


def far_apart(one: Completion, other: Completion) -> float:
    """The largest difference of log-probabilities that both have; infinite if tokens differ."""
    if one.tokens != other.tokens:
        return float("inf")
    return max(
        abs(top[token] - other_top[token])
        for top, other_top in zip(one.logprobs, other.logprobs, strict=True)
        for token in top.keys() & other_top.keys()
    )


def check(answers: Sequence[Completion], expected: Iterable[Completion]) -> None:
    """The same tokens as the first of these, log-probabilities as near as the engine's own are."""
    apart = [far_apart(*pair) for pair in zip(answers, expected, strict=False)]
    assert len(apart) == len(answers)
    assert max(apart) <= TOLERANCE, apart


def check_equal(answers: Sequence[Completion], expected: Iterable[Completion]) -> None:
    """Tokens and log-probabilities are those of the first of these, to the last bit."""
    pairs = [*zip(answers, expected, strict=False)]
    assert len(pairs) == len(answers)
    for answer, reference in pairs:
        assert (answer.tokens, answer.logprobs) == (reference.tokens, reference.logprobs)
