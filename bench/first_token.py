"""Time to first token of one engine, one request at a time: cold prompts, and prompts found again.

A warm prompt is a beginning that was answered before, up to where a hit ends, and a tail that was
not. With all variants the same tokens are found and the same are left to compute. Before it the
GPU's prefix cache is emptied, so that what is found was loaded; where that cache itself is the
variant, it is not, and nothing has to be loaded: the floor.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import psutil
from moments import Stages
from variants import Started, Way

from kvd_tools.engine_server import Completion

PROMPT_TOKENS = 1900
PROMPTS = 2  # of each start
VOCABULARY = 2000
SETTLE_SECONDS = 1.2  # stores end, and the lane tells the broker its counters once a second
LOOK_SECONDS = 0.2
MAX_TOKENS = 8
LANE = ("lane: queued", "lane: copied", "lane: reported")
TAILS = 1000  # number of the first one


def found_tokens(chunk_tokens: int) -> int:
    """Of a prompt that comes back, how many are found: whole chunks, not the last token."""
    return (PROMPT_TOKENS - 1) // chunk_tokens * chunk_tokens


@dataclass(slots=True)
class Measured:
    """One start of one variant; seconds, but stages in ms.

    cold, cold_answer: until the first and the last of MAX_TOKENS tokens of new prompts.
    warm: by tokens found, one for each prompt whose hit was complete.
    answers: what was generated, by tokens found and number; for equal ones equal everywhere.
    stages: of each warm prompt, where it was seen.
    polls: how often the worker looked for the end of the load, and the steps this took.
    others: how busy the CPUs were when no engine was asked, percent.
    """

    cold: list[float] = field(default_factory=list)
    cold_answer: list[float] = field(default_factory=list)
    warm: dict[int, list[float]] = field(default_factory=dict)
    asked: int = 0
    answers: dict[tuple[int, int], Completion] = field(default_factory=dict)
    stages: list[Stages] = field(default_factory=list)
    polls: list[int] = field(default_factory=list)
    others: list[float] = field(default_factory=list)

    @property
    def complete(self) -> int:
        """Warm prompts whose hits were complete."""
        return sum(map(len, self.warm.values()))


class Asking:
    """The prompts of one start, asked.

    Args:
        started: the engine.
        found: how many tokens of warm prompts are to be found, one after another.
        seed: of the prompts; the same for all variants.
    """

    def __init__(self, started: Started, found: Sequence[int], seed: int) -> None:
        self._started = started
        self._found = found
        self._seed = seed
        self.measured = Measured(warm={n: [] for n in found})

    def run(self, warm: int) -> Measured:
        """Ask PROMPTS new prompts, then so many warm ones for each number of found tokens."""
        untimed, *prompts = (self._tokens(n, PROMPT_TOKENS) for n in range(PROMPTS + 1))
        self._ask(untimed)  # the engine's first prompt, which compiles, and its first hit
        self._ask_warm(self._warm_prompt(untimed, self._found[0], warm))
        for prompt in prompts:
            self._settle()
            answer = self._ask(prompt)
            if answer.cached_tokens:
                raise RuntimeError(f"{answer.cached_tokens} tokens of a new prompt were found")
            self.measured.cold.append(answer.first_token_seconds)
            self.measured.cold_answer.append(answer.seconds)
        for number in range(warm):
            for found in self._found:
                prompt = self._warm_prompt(prompts[number % PROMPTS], found, number)
                self._measure_warm(number, found, prompt)
        return self.measured

    def _measure_warm(self, number: int, found: int, prompt: list[int]) -> None:
        measured, lane = self.measured, self._lane_ms()
        begin, answer = self._ask_warm(prompt)
        measured.asked += 1
        measured.answers[found, number] = answer
        if answer.cached_tokens != found:
            return
        measured.warm[found].append(answer.first_token_seconds)
        if self._started.variant.stamped:
            end = begin + round(1e9 * answer.first_token_seconds)
            stages, polls = self._started.moments.stages(begin, end)
            self._settle()  # then the broker knows the lane's counters
            stages |= {name: ms - lane[name] for name, ms in self._lane_ms().items()}
            measured.stages.append(stages)
            measured.polls.append(polls)

    def _ask_warm(self, prompt: list[int]) -> tuple[int, Completion]:
        """The moment in nanoseconds at which it was asked, and the answer."""
        self._settle()
        if self._started.variant.way is not Way.GPU:
            self._started.engine.reset()
        self.measured.others.append(psutil.cpu_percent(LOOK_SECONDS))
        self._started.moments.skip()
        return time.perf_counter_ns(), self._ask(prompt)

    def _ask(self, prompt: list[int]) -> Completion:
        (answer,) = self._started.engine.generate([prompt], max_tokens=MAX_TOKENS)
        return answer

    def _settle(self) -> None:
        time.sleep(SETTLE_SECONDS)

    def _warm_prompt(self, prompt: list[int], found: int, number: int) -> list[int]:
        return prompt[:found] + self._tokens(TAILS + number, PROMPT_TOKENS - found)

    def _tokens(self, number: int, count: int) -> list[int]:
        rng = np.random.default_rng([self._seed, number])
        tokens: list[int] = rng.integers(0, VOCABULARY, count).tolist()
        return tokens

    def _lane_ms(self) -> Stages:
        """What all loads until now spent in each of the lane's stages; none without a daemon.

        None with staging either: the lane counts a load's pieces, which overlap.
        """
        if self._started.daemon is None or self._started.variant.way is Way.STAGED:
            return {}
        (lane,) = self._started.daemon.status()["lanes"]
        stages = lane["counters"]["stages"]
        return {name: 1e3 * stages[name.replace("lane: ", "load_")]["sum"] for name in LANE}
