"""What a tier's backend is: a medium that keeps chunks, in batches.

`kvd.tier.service` calls it, from as many threads at a time as the backend asks for, and does for
every backend what they have in common: it finds the bytes in the pool, seals them with a check
word before a put and compares it after a get, looks whether a slot still holds the chunk, bounds
what waits, and keeps deadlines. A backend may block. It is found by the entry point
(`kvd.tiers`) whose name stands before the colon of ``--tier NAME:…``.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

from kvd.outcomes import Outcome

__all__ = ["Capacity", "Chunk", "Options", "Outcome", "Space", "Tier"]


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace from one reset to the next, as far as its bytes are concerned.

    Attributes:
        id: 16 bytes, a hash over all that decides what the bytes mean, and over the salt that each
            reset draws anew; equal on two nodes only where chunks may be shared.
        share_bytes: bytes of each share of a chunk, one for each arena.
        head_bytes: room for what is kept beside the shares, see `Chunk.head`.
    """

    id: bytes
    share_bytes: tuple[int, ...]
    head_bytes: int

    @property
    def chunk_bytes(self) -> int:
        """Bytes of all shares."""
        return sum(self.share_bytes)


@dataclass(slots=True)
class Chunk:
    """One chunk of a batch.

    Attributes:
        space: its namespace.
        key: 1 to 48 bytes.
        shares: its memory in the pool: read by a put, written by a get.
        head: sealed bytes that are kept with it, at most `space.head_bytes`: given by a put, set
            by a get. They say what the chunk is (`kvd.tier.seal`), and are opaque to a backend.
        coverage: first block, count of blocks and group, which `scan` gives back.
        check: xxh3-64 of the shares, for backends that keep it in an index of their own.
    """

    space: Space
    key: bytes = field(repr=False)
    shares: tuple[memoryview, ...]
    head: bytes = field(default=b"", repr=False)
    coverage: tuple[int, int, int] = (0, 0, 0)
    check: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """How full a tier is. `total` bytes are 0 where nobody knows."""

    total: int
    used: int
    chunks: int


@dataclass(frozen=True, slots=True)
class Options:
    """What an operator wrote: ``NAME:TARGET,key=value,…``."""

    target: str
    values: Mapping[str, str] = field(default_factory=dict)


class Tier(ABC):
    """A backend. All methods but `open` and `check` may be called from several threads at a time.

    `put`, `get` and `contains` are given a deadline in `time.monotonic` seconds, after which a
    backend that can stops. Each returns one item for each chunk or key, in order, and raises
    nothing but `TierError`: the whole batch has failed then. Its text is logged and shown in the
    status, so it names no key.

    Attributes:
        shared: others put and remove here, too: only `contains` knows what is there. Otherwise the
            broker is told by `scan` and `take_gone`, and `contains` is not asked.
        medium: what routers and engines call it: `disk`, `remote` or `memory`.
        threads: how many batches at a time are worth it.
        batch_bytes: how many bytes make a good batch.
        described: how it works, for the log: e.g. ``preadv/pwritev, 4 threads, O_DIRECT``.
        damaged_records: those that `open` found damaged, and dropped.
    """

    shared: ClassVar[bool] = False
    medium: ClassVar[str] = "memory"
    threads: int = 4
    batch_bytes: int = 4 * 2**20
    described: str = ""
    damaged_records: int = 0

    @classmethod
    @abstractmethod
    def check(cls, options: Options) -> None:
        """Look at what the operator wrote, without any I/O.

        Raises:
            ConfigError: it names key, value and remedy.
        """

    @classmethod
    @abstractmethod
    def open(cls, options: Options, pool: memoryview) -> Self:
        """Begin, with what is there from before. `pool` is all of the pool, writable.

        Raises:
            TierError: it cannot be used now; names the remedy. It is tried again.
        """

    @abstractmethod
    def put(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """Keep chunks. One that is there already is kept as it is, or replaced whole."""

    @abstractmethod
    def get(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """Fill the shares and the head of chunks. What is not OK may have overwritten shares."""

    @abstractmethod
    def contains(self, space: Space, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Whether a get of these would find them."""

    @abstractmethod
    def remove(self, space: Space, keys: Sequence[bytes]) -> None:
        """Drop these; those that are not there are no error."""

    def salt(self, namespace: bytes) -> bytes:
        """The salt that `note_salt` has noted for a namespace (16 bytes); empty where none is.

        A shared backend answers what all that share it have agreed on.
        """
        del namespace
        return b""

    def note_salt(self, namespace: bytes, salt: bytes, *, reset: bool = False) -> bytes:
        """Keep the salt (8 bytes) of a namespace's last reset, durably before it returns.

        A backend whose chunks outlive its process notes it, or they are not found again. `reset`:
        the broker has drawn it and not heard yet that it is noted, so a shared backend puts it in
        the place of the others' salt; otherwise theirs may be of a later reset, and stays.

        Returns:
            The salt noted before, whose chunks are to be dropped; empty where none was.
        """
        del namespace, salt, reset
        return b""

    def drop_space(self, space: Space) -> None:
        """Drop all chunks of a space, which was reset; without it they go as others do."""
        del space

    @abstractmethod
    def begin(self, space: Space) -> None:
        """A space is used from now on, with the chunks that are kept of it."""

    @abstractmethod
    def scan(self, space: Space) -> Iterator[list[tuple[bytes, tuple[int, int, int]]]]:
        """Every chunk of a space, piece by piece: keys and coverages. Nothing where shared."""

    @abstractmethod
    def take_gone(self) -> list[tuple[bytes, list[bytes]]]:
        """Ids of spaces and keys of what the backend dropped by itself since the last call."""

    @abstractmethod
    def capacity(self) -> Capacity:
        """How full it is. Must not block."""

    @abstractmethod
    def close(self) -> None:
        """End; what was acknowledged stays where the medium keeps it."""
