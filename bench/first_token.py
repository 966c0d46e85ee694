"""Time to first token, one request at a time: of new prompts, and of prompts that came back.

In every round each variant in turn answers one new prompt (cold: it is computed, and stored) and
prompts of earlier rounds (warm). The GPU's prefix cache is emptied before the warm ones, so that
whatever is found comes from outside. All variants get the same prompts.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil
from harness import Figures, median
from variants import CHUNK_TOKENS, IN_PROCESS, NO_CACHE, Variant

from kvd_tools.demo_vllm.engine import Answer

PROMPT_TOKENS = 1900
HIT_TOKENS = (PROMPT_TOKENS - 1) // CHUNK_TOKENS * CHUNK_TOKENS  # the last token is computed
VOCABULARY = 2000
WARM = 2  # warm prompts of a variant in a round
SETTLE_SECONDS = 1.2  # stores end, and vLLM's processes stop polling after one second
LOOK_SECONDS = 0.2
MAX_TOKENS = 8


@dataclass(slots=True)
class Measured:
    """One variant's figures; seconds, one entry a round.

    cold_answer: until the last of MAX_TOKENS tokens.
    complete, asked: warm prompts whose hits were complete, and all.
    same: warm answers whose every number is the in-process copy's.
    """

    cold: list[float] = field(default_factory=list)
    cold_answer: list[float] = field(default_factory=list)
    warm: list[float] = field(default_factory=list)
    complete: int = 0
    asked: int = 0
    same: int = 0


class Rounds:
    """Interleaved rounds over variants.

    Args:
        variants: to be compared.
        seed: of the prompts.
    """

    def __init__(self, variants: Sequence[Variant], seed: int = 0) -> None:
        self._variants = variants
        self._rng = np.random.default_rng(seed)
        self._prompts: list[list[int]] = []
        self.measured = {variant.name: Measured() for variant in variants}
        self._others: list[float] = []

    def run(self, rounds: int) -> None:
        """Prime every variant with WARM prompts, then measure so many rounds."""
        for variant in self._variants:
            for prompt in map(self._prompt, range(WARM)):
                _ask(variant, prompt)
            time.sleep(SETTLE_SECONDS)
            variant.engine.reset()
            _ask(variant, self._prompt(0))  # the first load is not measured
        for number in range(rounds):
            turn = number % len(self._variants)
            warm: dict[str, list[Answer]] = {}
            for variant in (*self._variants[turn:], *self._variants[:turn]):
                warm[variant.name] = self._turn(variant, number)
            for name, answers in warm.items():
                self.measured[name].same += sum(
                    (answer.tokens, answer.logprobs) == (floor.tokens, floor.logprobs)
                    for answer, floor in zip(answers, warm[IN_PROCESS], strict=True)
                )

    def _turn(self, variant: Variant, number: int) -> list[Answer]:
        time.sleep(SETTLE_SECONDS)
        self._others.append(psutil.cpu_percent(LOOK_SECONDS))
        measured = self.measured[variant.name]
        variant.engine.reset()
        cold = _ask(variant, self._prompt(number + WARM))
        if cold.cached_tokens:
            raise RuntimeError(f"{variant.name}: {cold.cached_tokens} tokens of a new prompt hit")
        measured.cold.append(cold.first_token_seconds)
        measured.cold_answer.append(cold.seconds)
        time.sleep(SETTLE_SECONDS)
        variant.engine.reset()
        answers = [_ask(variant, self._prompt(number + i)) for i in range(WARM)]
        wanted = HIT_TOKENS if variant.caches else 0
        complete = [a.first_token_seconds for a in answers if a.cached_tokens == wanted]
        measured.warm.append(median(complete) if complete else float("nan"))
        measured.complete += len(complete)
        measured.asked += len(answers)
        return answers

    def _prompt(self, number: int) -> list[int]:
        while len(self._prompts) <= number:
            self._prompts.append(self._rng.integers(0, VOCABULARY, PROMPT_TOKENS).tolist())
        return self._prompts[number]

    @property
    def others_percent(self) -> float:
        """How busy the CPUs were when no engine was asked: what other programs took."""
        return float(np.mean(self._others))

    def figures(self) -> dict[str, Figures]:
        """Medians in ms; ratios to the in-process copy: medians of the rounds' own ratios."""
        floor, nothing = self.measured[IN_PROCESS], self.measured[NO_CACHE]
        return {
            name: {
                "cold_ttft_ms": 1e3 * median(m.cold),
                "cold_answer_ms": 1e3 * median(m.cold_answer),
                "warm_ttft_ms": 1e3 * _median(m.warm),
                "cold_ttft_ratio": _ratio(m.cold, floor.cold),
                "cold_answer_ratio": _ratio(m.cold_answer, floor.cold_answer),
                "cold_to_no_cache_ratio": _ratio(m.cold, nothing.cold),
                "warm_ttft_ratio": _ratio(m.warm, floor.warm),
                "warm_complete": m.complete,
                "warm_asked": m.asked,
                "warm_same_answers": m.same,
            }
            for name, m in self.measured.items()
        }


def _ask(variant: Variant, prompt: list[int]) -> Answer:
    (answer,) = variant.engine.generate([prompt], max_tokens=MAX_TOKENS)
    return answer


def _median(values: Sequence[float]) -> float:
    return median(value for value in values if value == value)  # noqa: PLR0124  # without NaN


def _ratio(ours: Sequence[float], floor: Sequence[float]) -> float:
    return _median([one / other for one, other in zip(ours, floor, strict=True)])
