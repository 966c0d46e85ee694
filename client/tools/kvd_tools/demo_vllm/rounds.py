"""One round of `kvd demo-vllm`: every prompt once, one after another, and what came of it."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

from kvd_tools.demo_vllm.engine import EngineProcess
from kvd_tools.demo_vllm.scenario import ANSWER_TOKENS
from kvd_tools.demo_vllm.wire import Answer
from kvd_tools.errors import DemoError

ATTACH_SECONDS = 30.0
ATTACHED = "vllm:kv_offload_kvd_attached"
GPU_HITS = "vllm:prefix_cache_hits_total"
HEAD = f"{'round':<22}{'median':>8}  {'hit tokens':>16}  each prompt"


@dataclass(frozen=True, slots=True)
class Round:
    """The answers to all prompts, in their order.

    gpu_hits: tokens that were still in the GPU cache.
    """

    name: str
    answers: list[Answer]
    gpu_hits: int

    @property
    def seconds(self) -> float:
        """Median of the times to the first token."""
        return median(answer.first_token_seconds for answer in self.answers)

    @property
    def hits(self) -> int:
        """Tokens of these that came from kvd."""
        return sum(answer.cached_tokens for answer in self.answers) - self.gpu_hits

    def same_answers(self, other: "Round") -> int:
        """How many prompts got the same tokens in both rounds."""
        pairs = zip(self.answers, other.answers, strict=True)
        return sum(one.tokens == another.tokens for one, another in pairs)

    def line(self) -> str:
        """For people, under `HEAD`."""
        each = " ".join(f"{answer.first_token_seconds:.2f}" for answer in self.answers)
        tokens = sum(answer.prompt_tokens for answer in self.answers)
        hits = f"{self.hits:,} of {tokens:,}"
        return f"{self.name:<22}{self.seconds:>6.3f} s  {hits:>16}  {each}"


def ask(name: str, engine: EngineProcess, prompts: Sequence[list[int]]) -> Round:
    """Serve a round.

    Raises:
        DemoError: a prompt got no complete answer.
    """
    before = _metric(engine, GPU_HITS)
    answers = [_ask(engine, prompt) for prompt in prompts]
    return Round(name, answers, int(_metric(engine, GPU_HITS) - before))


def warm_up(engine: EngineProcess, prompt: list[int]) -> None:
    """Let the engine do everything once, until it also has the daemon behind it.

    Raises:
        DemoError: the prompt got no complete answer, or the engine is not attached in time.
    """
    end = time.monotonic() + ATTACH_SECONDS
    _ask(engine, prompt)
    while not _metric(engine, ATTACHED):  # vLLM renews it with every step
        if time.monotonic() > end:
            raise DemoError(f"the daemon does not serve the engine after {ATTACH_SECONDS:g} s")
        _ask(engine, prompt)


def _ask(engine: EngineProcess, prompt: list[int]) -> Answer:
    (answer,) = engine.generate([prompt], max_tokens=ANSWER_TOKENS, logprobs=0)
    if answer.error:
        raise DemoError(f"the engine gave no complete answer: {answer.error}")
    return answer


def _metric(engine: EngineProcess, name: str) -> float:
    values = engine.metrics().items()
    return sum(value for key, value in values if key.partition("{")[0] == name)
