"""How long this engine takes to compute a prompt, measured from its own steps.

A step's time goes from when it was scheduled, or the step before it had ended, whichever is later,
to its own end. So neither idle time nor that of other steps counts, also where vLLM schedules the
next step while one is running.
"""

import time
from collections import deque
from statistics import median

from vllm.v1.core.sched.output import SchedulerOutput

SAMPLES = 9  # of each size, of which the median counts: one slow step changes nothing
MOST_OPEN = 32  # steps under way; more than vLLM has, so that a lost one cannot stay


class PrefillSpeed:
    """Measured times of steps, by the number of prompt tokens in them.

    A step has a fixed cost, so small ones say little about large ones: sizes are kept apart by
    powers of two.
    """

    def __init__(self) -> None:
        self._open: deque[tuple[int, float]] = deque()  # prompt tokens of a step, and when it began
        self._ended = 0.0  # the latest step
        self._sizes: dict[int, deque[float]] = {}  # by bits of the size: seconds a token

    def scheduled(self, output: SchedulerOutput) -> None:
        """A step is scheduled.

        Of one without tokens vLLM reports the end only where it has something to report: whose the
        next end is cannot be told then, so what is under way is not measured.
        """
        if not output.total_num_scheduled_tokens or len(self._open) >= MOST_OPEN:
            self._open.clear()
        if output.total_num_scheduled_tokens:
            self._open.append((prompt_tokens(output), time.monotonic()))

    def ended(self) -> None:
        """The oldest step under way has ended."""
        if not self._open:
            return
        now = time.monotonic()
        tokens, began = self._open.popleft()
        if tokens:
            size = self._sizes.setdefault(tokens.bit_length(), deque(maxlen=SAMPLES))
            size.append((now - max(began, self._ended)) / tokens)
        self._ended = now

    def seconds(self, tokens: int) -> float | None:
        """Return how long it takes to compute so many tokens of a prompt; None: not measured yet.

        By the steps of the same size, or else by smaller ones, as large as there are: a long prompt
        is computed in several steps. Where all were larger, by the smallest.
        """
        if not self._sizes:
            return None
        bits = tokens.bit_length()
        size = max((known for known in self._sizes if known <= bits), default=min(self._sizes))
        return tokens * median(self._sizes[size])

    @property
    def seconds_per_token(self) -> float | None:
        """How long a token of a long prompt takes; None: not measured yet.

        By the largest steps: a long prompt fills them.
        """
        return median(self._sizes[max(self._sizes)]) if self._sizes else None

    def __repr__(self) -> str:
        sizes = (
            f"{1 << bits - 1}+: {median(self._sizes[bits]) * 1e6:.0f}"
            for bits in sorted(self._sizes)
        )
        return f"<PrefillSpeed us a token by tokens a step: {', '.join(sizes)}>"


def prompt_tokens(output: SchedulerOutput) -> int:
    """Return how many tokens of prompts are computed in a step."""
    scheduled = output.num_scheduled_tokens
    tokens: int = sum(scheduled.get(new.req_id, 0) for new in output.scheduled_new_reqs)
    cached = output.scheduled_cached_reqs
    for req_id, answered in zip(cached.req_ids, cached.num_output_tokens, strict=True):
        if not answered:
            tokens += scheduled.get(req_id, 0)
    return tokens
