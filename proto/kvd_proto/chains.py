"""Blocks that are told to routers: what follows what, and of which the chain is there.

`level` of a block is what routers can have made of it when it was told last:

- WHOLE: its chain was there, from the prompt's first block on, in the block's own group;
- MIXED: the chain was there with blocks of several groups, which is enough for a router that does
  not tell groups apart;
- APART: neither, or nothing is known of the block but its hash.

Levels of what follows a block fall when it goes. When it comes again, what follows it is due to be
told again, with which its level rises.
"""

from collections import deque
from collections.abc import Iterator
from typing import Final, TypeAlias, TypeVar

from kvd_proto.errors import ReaderFault

APART: Final = 0
MIXED: Final = 1
WHOLE: Final = 2

T = TypeVar("T")
OneOrMore: TypeAlias = T | dict[T, None] | None
"""Nothing, one, or the keys of a dict: nearly always one, for which a dict would be large."""


class Block:
    """A block of a group: what comes before it, who holds it, and what was told of it.

    parent: hash of the block before it; empty: it is a prompt's first; None: it is not described.
    holders: keys of the chunks that have it.
    """

    __slots__ = ("group", "hash", "holders", "level", "parent")

    def __init__(self, group: int, block_hash: bytes, parent: bytes | None) -> None:
        self.group, self.hash, self.parent = group, block_hash, parent
        self.holders: OneOrMore[bytes] = None
        self.level = APART


class Chains:
    """All blocks that are told.

    Attributes:
        groups: blocks by their hashes, by group; none is empty.
        due: blocks that may have to be told again, because what they follow is there.
    """

    def __init__(self) -> None:
        self.groups: dict[int, dict[bytes, Block]] = {}
        self.due: deque[Block] = deque()
        self._children: dict[bytes, OneOrMore[Block]] = {}  # of described blocks, by parent

    def __iter__(self) -> Iterator[Block]:
        return (block for blocks in self.groups.values() for block in blocks.values())

    def get(self, group: int, block_hash: bytes) -> Block | None:
        """The block, if it is told."""
        blocks = self.groups.get(group)
        return None if blocks is None else blocks.get(block_hash)

    def add(self, group: int, block_hash: bytes, parent: bytes | None) -> Block:
        """A block that is told now for the first time; somebody is to hold it."""
        block = Block(group, block_hash, parent)
        blocks = self.groups.get(group)
        if blocks is None:
            blocks = self.groups[group] = {}
        blocks[block_hash] = block
        if parent is not None:
            self._join(block)
        return block

    def describe(self, block: Block, parent: bytes) -> None:
        """Of a block of which only the hash was known more is told now."""
        block.parent = parent
        self._join(block)

    def hold(self, block: Block, key: bytes) -> None:
        """A chunk has this block."""
        block.holders = _with(block.holders, key)

    def let_go(self, block: Block, key: bytes) -> bool:
        """A chunk has this block no more. Whether none has, so that it is gone."""
        block.holders = _without(block.holders, key)
        if block.holders is not None:
            return False
        blocks = self.groups[block.group]
        del blocks[block.hash]
        if not blocks:
            del self.groups[block.group]
        if block.parent:
            siblings = _without(self._children.pop(block.parent), block)
            if siblings is not None:
                self._children[block.parent] = siblings
        block.level = APART
        fallen = [block]
        while fallen:
            for child in each(self._children.get(fallen.pop().hash)):
                if child.level and (level := self.level(child)) < child.level:
                    child.level = level
                    fallen.append(child)
        return True

    def level(self, block: Block) -> int:
        """What routers make of a block that is told now."""
        parent = block.parent
        if not parent:
            return APART if parent is None else WHOLE
        before = self.groups[block.group].get(parent)
        if before is not None and before.level:
            return before.level
        if len(self.groups) > 1:
            for blocks in self.groups.values():
                before = blocks.get(parent)
                if before is not None and before.level:
                    return MIXED
        return APART

    def rise(self, block: Block) -> bool:
        """Whether a block that is told again is more to routers than before."""
        level = self.level(block)
        if level <= block.level:
            return False
        block.level = level
        children = self._children.get(block.hash)
        if children is not None:
            self.due.extend(each(children))
        return True

    def _join(self, block: Block) -> None:
        if parent := block.parent:
            self._children[parent] = _with(self._children.get(parent), block)
        self.rise(block)

    def check_integrity(self) -> None:
        """Raise ReaderFault where what is held contradicts itself."""
        blocks = list(self)
        if any(block.holders is None for block in blocks) or not all(self.groups.values()):
            raise ReaderFault(f"a block that no chunk has, or an empty group: {self!r}")
        children = {(parent, b) for parent, some in self._children.items() for b in each(some)}
        if children != {(block.parent, block) for block in blocks if block.parent}:
            raise ReaderFault(f"blocks and their parents do not agree: {self!r}")
        for block in blocks:
            if block.level > self.level(block):
                raise ReaderFault(
                    f"{block.hash.hex()} is told as if its chain were there: {self!r}"
                )

    def __repr__(self) -> str:
        blocks = sum(map(len, self.groups.values()))
        return f"<Chains of {blocks} blocks, {len(self.due)} due>"


def each(some: OneOrMore[T]) -> Iterator[T]:
    """All of them."""
    if isinstance(some, dict):
        return iter(some)
    return iter(() if some is None else (some,))


def _with(some: OneOrMore[T], one: T) -> OneOrMore[T]:
    if some is None or some == one:
        return one
    if not isinstance(some, dict):
        some = {some: None}
    some[one] = None
    return some


def _without(some: OneOrMore[T], one: T) -> OneOrMore[T]:
    if isinstance(some, dict):
        some.pop(one, None)
        return some if len(some) > 1 else next(iter(some))
    return None if some == one else some
