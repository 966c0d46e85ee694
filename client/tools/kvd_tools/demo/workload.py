"""A seeded workload, and which blocks the demo's engine holds for a prompt of it.

The workload is multi-turn conversations that share system prompts. A prompt is cut into pieces of
`PIECE_TOKENS` tokens, each named by a number; equal numbers mean equal tokens, and everything
before them is equal too. Only full pieces can be cached.

Two groups share the GPU's blocks. Group `FULL` attends to everything: all blocks of a prompt
are present. Group `WINDOW` is a sliding window: only the last `WINDOW_BLOCKS` blocks are
needed to go on from there. The prompt is computed in steps, and the window is stored at the
end of each, so that another prompt can go on from that point: after the first chunk (shared
system prompts), then every `STEP_CHUNKS` chunks, and at the end.
"""

import random
from collections.abc import Callable, Iterator
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


FULL, WINDOW = 0, 1
NULL_BLOCK = 0  # never given out
BLOCKS_PER_CHUNK = 2  # a chunk is one piece of the prompt
BLOCK_TOKENS = PIECE_TOKENS // BLOCKS_PER_CHUNK
WINDOW_BLOCKS = 5  # the window's edge lies inside a chunk, of which it leaves out blocks
STEP_CHUNKS = 4


def full_blocks(start: int, end: int) -> range:
    """Return the logical blocks of chunks [start, end)."""
    return range(start * BLOCKS_PER_CHUNK, end * BLOCKS_PER_CHUNK)


def window_blocks(end: int) -> range:
    """Return the logical blocks in the window after `end` chunks."""
    stop = end * BLOCKS_PER_CHUNK
    return range(max(0, stop - WINDOW_BLOCKS), stop)


def step_ends(start: int, end: int) -> list[int]:
    """Return after how many chunks each step ends, for `end` chunks of which `start` are there."""
    ends = {1, end, *range(STEP_CHUNKS, end, STEP_CHUNKS)}
    return sorted(e for e in ends if start < e <= end)


def longest_hit(prefix: int, there: Callable[[int, int], bool]) -> int:
    """Return how many leading chunks can be loaded.

    Args:
        prefix: leading chunks of the full group that are there.
        there: whether a chunk of the window group is there from its n-th block on.

    Returns:
        The largest n up to `prefix` for which the window after n chunks is there.
    """
    for end in range(prefix, 0, -1):
        edge = window_blocks(end).start
        first = dict.fromkeys(range(edge // BLOCKS_PER_CHUNK, end), 0)
        first[edge // BLOCKS_PER_CHUNK] = edge % BLOCKS_PER_CHUNK
        if all(there(chunk, block) for chunk, block in first.items()):
            return end
    return 0
