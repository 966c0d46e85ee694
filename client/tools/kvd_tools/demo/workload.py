"""What the demo's engine is asked to do: requests, as a trace has them.

A prompt is cut into pieces of `PIECE_TOKENS` tokens; `hash_ids[i]` names piece
i together with everything before it, as the Mooncake traces do. Only the last
piece may be partly filled, and only full pieces can be cached.

`conversations` generates a seeded workload of multi-turn conversations: a few
system prompts, users who come back with everything said so far, and a mix of
short and long turns.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

PIECE_TOKENS = 512
SYSTEM_PROMPT_PIECES = (1, 2, 2, 4)
MAX_TURNS = 8
MAX_PIECES = 64
NEW_CONVERSATION = 0.3  # the share of requests that open a conversation


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt. `hash_ids` has ceil(input_tokens / PIECE_TOKENS) entries."""

    arrival_ms: int
    input_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...]

    @property
    def full_pieces(self) -> tuple[int, ...]:
        """The hash ids of the pieces that are complete, hence can be cached."""
        return self.hash_ids[: self.input_tokens // PIECE_TOKENS]


def distinct_pieces(requests: list[Request]) -> int:
    """The working set: how many different full pieces the requests name."""
    return len({piece for request in requests for piece in request.full_pieces})


@dataclass(slots=True)
class _Conversation:
    pieces: list[int]  # ids of the full pieces so far
    tokens: int
    turns: int = field(default=0)


def conversations(count: int, seed: int) -> Iterator[Request]:
    """`count` requests of interleaved conversations; the same seed, the same requests."""
    rng = random.Random(seed)
    next_id = 0

    def fresh(n: int) -> list[int]:
        nonlocal next_id
        next_id += n
        return list(range(next_id - n, next_id))

    system_prompts = [fresh(n) for n in SYSTEM_PROMPT_PIECES]
    live: list[_Conversation] = []
    clock_ms = 0
    for _ in range(count):
        clock_ms += int(rng.expovariate(1 / 200))
        if not live or rng.random() < NEW_CONVERSATION:
            prompt = rng.choice(system_prompts)
            live.append(_Conversation(list(prompt), len(prompt) * PIECE_TOKENS))
        # Users who spoke lately are the likeliest to speak again.
        conversation = live.pop(-1 - min(int(rng.expovariate(1 / 6)), len(live) - 1))
        conversation.tokens += int(rng.lognormvariate(7.2, 0.9)) + 1
        whole = conversation.tokens // PIECE_TOKENS
        conversation.pieces += fresh(whole - len(conversation.pieces))
        partial = fresh(1) if conversation.tokens % PIECE_TOKENS else []
        output = int(rng.lognormvariate(5.5, 0.8)) + 1
        yield Request(clock_ms, conversation.tokens, output, (*conversation.pieces, *partial))
        # The answer becomes part of the next prompt.
        conversation.tokens += output
        conversation.turns += 1
        if conversation.turns < MAX_TURNS and whole < MAX_PIECES:
            live.append(conversation)
