"""The demo's prompts, the blocks that they occupy, and the bytes in these blocks.

**Prompts** are turns of conversations that share system prompts, generated from a seed. A prompt is
a sequence of pieces of `PIECE_TOKENS` tokens. A piece is a number: equal numbers mean equal tokens
and equal tokens before them. Only full pieces are cached, each as one chunk of each group.

**Blocks** of the GPU are shared by two groups. `FULL` attends to the whole prompt and needs all of
its blocks. `WINDOW` is a sliding window and needs only the last `WINDOW_BLOCKS` blocks. A prompt is
computed in steps, and each step stores its window, so that another prompt can continue there: after
the first chunk (a shared system prompt), after every `STEP_CHUNKS` chunks, and at the end.

**Bytes** lie in four tensors in three storages: two plain tensors, and two that share the blocks of
one storage, the first of which has padded pages. Group `FULL` uses all four tensors, `WINDOW` the
first three, with common block ids. The content of a page follows from key, rank, tensor and block:
a fixed pseudo-random ramp, mixed with a 64-bit seed::

    seed    = blake2b(rank, tensor, block in chunk, key)
    word[i] = (ramp[i] ^ seed) * MULTIPLIER   (mod 2**64)

The multiplier is odd, so the mapping of words is one to one: pages with different seeds differ in
every word, and the words of one page differ because the ramp's do. So a page of another key, rank,
tensor or block, a page shifted by a word, and a single flipped bit are all detected.
"""

import random
import struct
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from kvd_client.tickets import ChunkBlocks
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec

PIECE_TOKENS = 512
SYSTEM_PROMPT_PIECES = (1, 2, 2, 4)
MAX_TURNS = 8
MAX_PIECES = 64
NEW_CONVERSATION = 0.3  # the share of prompts that begin a conversation

Prompt = tuple[int, ...]
"""The full pieces of a prompt."""


def distinct_pieces(prompts: list[Prompt]) -> int:
    """Return the working set: how many different pieces the prompts have."""
    return len({piece for prompt in prompts for piece in prompt})


@dataclass(slots=True)
class _DemoConversation:
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
    live: list[_DemoConversation] = []
    for _ in range(count):
        if not live or rng.random() < NEW_CONVERSATION:
            prompt = rng.choice(system_prompts)
            live.append(_DemoConversation(list(prompt), len(prompt) * PIECE_TOKENS))
        # The most recently active conversations are the likeliest to continue.
        conversation = live.pop(-1 - min(int(rng.expovariate(1 / 6)), len(live) - 1))
        conversation.tokens += int(rng.lognormvariate(7.2, 0.9)) + 1
        num_pieces = conversation.tokens // PIECE_TOKENS
        conversation.pieces += fresh(num_pieces - len(conversation.pieces))
        yield tuple(conversation.pieces)
        # The answer becomes part of the next prompt.
        conversation.tokens += int(rng.lognormvariate(5.5, 0.8)) + 1
        conversation.turns += 1
        if conversation.turns < MAX_TURNS and num_pieces < MAX_PIECES:
            live.append(conversation)


# --------------------------------------------------------------- the blocks

FULL, WINDOW = 0, 1
NULL_BLOCK = 0  # never allocated
BLOCKS_PER_CHUNK = 2  # a chunk is one piece of the prompt
BLOCK_TOKENS = PIECE_TOKENS // BLOCKS_PER_CHUNK
WINDOW_BLOCKS = 5  # odd, so that the window begins inside a chunk
STEP_CHUNKS = 4


def full_blocks(start: int, end: int) -> range:
    """Return the logical blocks of chunks [start, end)."""
    return range(start * BLOCKS_PER_CHUNK, end * BLOCKS_PER_CHUNK)


def window_blocks(end: int) -> range:
    """Return the logical blocks in the window after `end` chunks."""
    stop = end * BLOCKS_PER_CHUNK
    return range(max(0, stop - WINDOW_BLOCKS), stop)


def step_ends(start: int, end: int) -> list[int]:
    """Return the number of computed chunks after each step from `start` to `end` chunks."""
    ends = {1, end, *range(STEP_CHUNKS, end, STEP_CHUNKS)}
    return sorted(step_end for step_end in ends if start < step_end <= end)


def longest_hit(num_full: int, has_window: Callable[[int, int], bool]) -> int:
    """Return how many leading chunks can be loaded.

    Args:
        num_full: leading chunks of the full group that are cached.
        has_window: whether a chunk of the window group is cached from its n-th block on.

    Returns:
        The largest n up to `num_full` for which the whole window after n chunks is cached.
    """
    for end in range(num_full, 0, -1):
        edge = window_blocks(end).start
        first_blocks = dict.fromkeys(range(edge // BLOCKS_PER_CHUNK, end), 0)
        first_blocks[edge // BLOCKS_PER_CHUNK] = edge % BLOCKS_PER_CHUNK
        if all(has_window(chunk, block) for chunk, block in first_blocks.items()):
            return end
    return 0


# ---------------------------------------------------------------- the bytes

Page = npt.NDArray[np.uint8]

MULTIPLIER = np.uint64(0x9E37_79B9_7F4A_7C15)
POISON = 0xA5  # in blocks before a load, so that no byte is right by chance
_COORDINATES = struct.Struct("<III")


def page_seed(key: bytes, rank: int, tensor: int, block: int) -> int:
    """Return the 64-bit seed of one page; `block` is its index within the chunk."""
    digest = blake2b(_COORDINATES.pack(rank, tensor, block) + key, digest_size=8).digest()
    return int.from_bytes(digest, "little")


def page_content(seed: int, page_bytes: int) -> Page:
    """Return the content of a page, u8[page_bytes]. `page_bytes` is a multiple of 8."""
    return ((_ramp(page_bytes // 8) ^ np.uint64(seed)) * MULTIPLIER).view(np.uint8)


@cache
def _ramp(words: int) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(8 * words).integers(0, 2**64, words, np.uint64)


def chunk_key(piece: int, group: int) -> bytes:
    """Return the key of one group's chunk, 34 bytes. A piece implies the pieces before it."""
    return piece.to_bytes(32, "little") + group.to_bytes(2, "little")


STRIDES = (16384, 16384, 24576)
"""Distance between blocks in bytes, by storage."""

TENSORS = (
    TensorSpec(storage=0, offset=0, page_bytes=16384, block_stride=STRIDES[0]),
    TensorSpec(storage=1, offset=0, page_bytes=16384, block_stride=STRIDES[1]),
    TensorSpec(storage=2, offset=0, page_bytes=12288, block_stride=STRIDES[2]),
    TensorSpec(storage=2, offset=12288, page_bytes=12288, block_stride=STRIDES[2]),
)
USED_BYTES = (16384, 16384, 8192, 12288)
"""Bytes of a page in use, by tensor. The rest is padding."""

GROUPS = ((0, 1, 2, 3), (0, 1, 2))
"""Numbers of the tensors of group FULL and of group WINDOW."""


def rank_layout(num_blocks: int) -> RankLayout:
    """Return the layout that a rank with so many blocks registers."""

    def group(tensors: Sequence[int], kind: str, window: int | None) -> GroupSpec:
        refs = tuple(TensorRef(i, USED_BYTES[i]) for i in tensors)
        return GroupSpec(refs, BLOCK_TOKENS, kind, window)

    return RankLayout(
        num_blocks=num_blocks,
        blocks_per_chunk=BLOCKS_PER_CHUNK,
        hash_block_size=BLOCK_TOKENS,
        storages=tuple(num_blocks * stride for stride in STRIDES),
        tensors=TENSORS,
        groups=(
            group(GROUPS[0], "full", None),
            group(GROUPS[1], "sliding_window", WINDOW_BLOCKS * BLOCK_TOKENS),
        ),
        null_block=NULL_BLOCK,
    )


class KvMemory:
    """The KV memory of one rank, filled with poison at first.

    `groups` are blocks of group FULL and blocks of group WINDOW.

    Args:
        rank: part of the seed of every page.
        storages: u8[num_blocks, stride] for each of `STRIDES`.
    """

    def __init__(self, rank: int, storages: Sequence[npt.NDArray[np.uint8]]) -> None:
        self.rank = rank
        self.pages = [storages[t.storage][:, t.offset : t.offset + t.page_bytes] for t in TENSORS]
        for storage in storages:
            storage[:] = POISON

    def fill(self, groups: Sequence[ChunkBlocks]) -> None:
        """Write the content of these blocks, as computing them would."""
        for page, seed in self._seeded(groups):
            page[:] = page_content(seed, len(page))

    def poison(self, groups: Sequence[ChunkBlocks]) -> None:
        """Overwrite these blocks, padding included."""
        for tensors, group in zip(GROUPS, groups, strict=True):
            for tensor in tensors:
                self.pages[tensor][list(group.blocks)] = POISON

    def corrupt(self, groups: Sequence[ChunkBlocks]) -> None:
        """Flip one bit of the first block."""
        page, _ = next(self._seeded(groups))
        page[len(page) // 2] ^= 1

    def verify(self, groups: Sequence[ChunkBlocks]) -> tuple[int, int]:
        """Compare these blocks; return how many bytes were compared, and how many are wrong."""
        verified = mismatched = 0
        for page, seed in self._seeded(groups):
            verified += len(page)
            mismatched += int(np.count_nonzero(page != page_content(seed, len(page))))
        return verified, mismatched

    def count_stray_bytes(self) -> int:
        """Return how many bytes changed where nothing may be written: null block and padding."""
        changed = 0
        for used, pages in zip(USED_BYTES, self.pages, strict=True):
            changed += int(np.count_nonzero(pages[NULL_BLOCK] != POISON))
            changed += int(np.count_nonzero(pages[:, used:] != POISON))
        return changed

    def _seeded(self, groups: Sequence[ChunkBlocks]) -> Iterator[tuple[Page, int]]:
        """Yield each page of these blocks, without padding, and the seed of its content."""
        for tensors, group in zip(GROUPS, groups, strict=True):
            for position, block in enumerate(group.blocks, group.first % BLOCKS_PER_CHUNK):
                key = group.keys[position // BLOCKS_PER_CHUNK]
                for tensor in tensors:
                    page = self.pages[tensor][block, : USED_BYTES[tensor]]
                    yield page, page_seed(key, self.rank, tensor, position % BLOCKS_PER_CHUNK)
