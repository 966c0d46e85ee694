"""A stream of requests: throughput and time to first token under load.

Requests arrive at random moments at a given rate, whether or not earlier ones were answered. Each
is one of several documents (the shared prefix, which is worth caching) with a question of its own.
The documents do not fit into the GPU's memory together. Moments, documents and questions are
drawn once for every segment; each variant gets the same, and every segment has new documents.
"""

import time
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field

import numpy as np
from first_token import SETTLE_SECONDS, VOCABULARY
from harness import Figures
from variants import Variant

from kvd_tools.demo_vllm.engine import Answer

DOCUMENTS, DOCUMENT_TOKENS, QUESTION_TOKENS, MAX_TOKENS = 12, 1024, 96, 8
REQUESTS_PER_SECOND = 3.0
ANSWER_SECONDS = 300.0


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt, and its moment in seconds from the segment's start."""

    at: float
    prompt: list[int]


@dataclass(slots=True)
class Streamed:
    """One variant's figures; seconds is what its segments took in all."""

    first_tokens: list[float] = field(default_factory=list)
    cached_tokens: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0


def draw(requests: int, seed: int) -> list[Request]:
    """The requests of a segment, in order of arrival."""
    rng = np.random.default_rng([seed, requests])
    documents = rng.integers(0, VOCABULARY, (DOCUMENTS, DOCUMENT_TOKENS))
    moments = rng.exponential(1 / REQUESTS_PER_SECOND, requests).cumsum()
    chosen = rng.integers(0, DOCUMENTS, requests)
    questions = rng.integers(0, VOCABULARY, (requests, QUESTION_TOKENS))
    return [
        Request(float(at), [*documents[document].tolist(), *question.tolist()])
        for at, document, question in zip(moments, chosen, questions, strict=True)
    ]


def measure(
    variants: Sequence[Variant], segments: int, requests: int, seed: int = 1
) -> dict[str, Figures]:
    """Figures by variant, over all segments; every segment begins with another variant."""
    streamed = {variant.name: Streamed() for variant in variants}
    for segment in range(segments):
        drawn = draw(requests, seed + segment)
        turn = segment % len(variants)
        for variant in (*variants[turn:], *variants[:turn]):
            time.sleep(SETTLE_SECONDS)
            variant.engine.reset()
            _run(variant, drawn, streamed[variant.name])
    return {name: _figures(s) for name, s in streamed.items()}


def _run(variant: Variant, requests: Sequence[Request], streamed: Streamed) -> None:
    sent: list[tuple[float, Request, Future[Answer]]] = []
    started = time.perf_counter()
    for request in requests:
        time.sleep(max(0.0, started + request.at - time.perf_counter()))
        moment = time.perf_counter() - started
        sent.append((moment, request, variant.engine.submit(request.prompt, MAX_TOKENS)))
    ended = 0.0
    for moment, request, future in sent:
        answer = future.result(ANSWER_SECONDS)
        streamed.first_tokens.append(answer.first_token_seconds)
        streamed.cached_tokens += answer.cached_tokens
        streamed.prompt_tokens += len(request.prompt)
        ended = max(ended, moment + answer.seconds)
    streamed.seconds += ended - requests[0].at


def _figures(s: Streamed) -> Figures:
    p50, p99 = np.percentile(s.first_tokens, [50, 99])
    rate = len(s.first_tokens) / s.seconds
    return {
        "requests_per_second": rate,
        "output_tokens_per_second": rate * MAX_TOKENS,
        "ttft_p50_ms": 1e3 * float(p50),
        "ttft_p99_ms": 1e3 * float(p99),
        "hit_share": s.cached_tokens / s.prompt_tokens,
        "requests": len(s.first_tokens),
    }
