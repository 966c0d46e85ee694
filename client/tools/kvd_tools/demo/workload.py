"""A seeded workload: multi-turn conversations that share system prompts.

A prompt is cut into pieces of `PIECE_TOKENS` tokens, each named by a number; equal numbers
mean equal tokens, and everything before them is equal too. Only full pieces can be cached.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

PIECE_TOKENS = 512
SYSTEM_PROMPT_PIECES = (1, 2, 2, 4)
MAX_TURNS = 8
MAX_PIECES = 64
NEW_CONVERSATION = 0.3  # the share of requests that open a conversation

Prompt = tuple[int, ...]
"""The full pieces of a prompt."""


def distinct_pieces(prompts: list[Prompt]) -> int:
    """Return how many different pieces the prompts have: the working set."""
    return len({piece for prompt in prompts for piece in prompt})


@dataclass(slots=True)
class _Conversation:
    pieces: list[int]
    tokens: int
    turns: int = 0


def conversations(count: int, seed: int) -> Iterator[Prompt]:
    """Yield `count` prompts of interleaved conversations; the same seed, the same prompts."""
    rng = random.Random(seed)
    next_piece = 0

    def fresh(n: int) -> list[int]:
        nonlocal next_piece
        next_piece += n
        return list(range(next_piece - n, next_piece))

    system_prompts = [fresh(n) for n in SYSTEM_PROMPT_PIECES]
    live: list[_Conversation] = []
    for _ in range(count):
        if not live or rng.random() < NEW_CONVERSATION:
            prompt = rng.choice(system_prompts)
            live.append(_Conversation(list(prompt), len(prompt) * PIECE_TOKENS))
        # Users who spoke lately are the likeliest to speak again.
        conversation = live.pop(-1 - min(int(rng.expovariate(1 / 6)), len(live) - 1))
        conversation.tokens += int(rng.lognormvariate(7.2, 0.9)) + 1
        whole = conversation.tokens // PIECE_TOKENS
        conversation.pieces += fresh(whole - len(conversation.pieces))
        yield tuple(conversation.pieces)
        # The answer becomes part of the next prompt.
        conversation.tokens += int(rng.lognormvariate(5.5, 0.8)) + 1
        conversation.turns += 1
        if conversation.turns < MAX_TURNS and whole < MAX_PIECES:
            live.append(conversation)
