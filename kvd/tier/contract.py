"""The interface of a tier's backend, which stores chunks on a medium in batches.

`kvd.tier.threads` calls a backend from several threads at a time; calls may block. The rest is
common to all backends: `kvd.tier` finds the bytes in the pool, seals them with a checksum before a
put and verifies it after a get, checks that a slot still holds the chunk, and enforces deadlines.
``--tier NAME:…`` selects the entry point NAME of the group `kvd.tiers`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.metadata import entry_points
from typing import ClassVar, Self

from kvd.config.values import TierSetting
from kvd.errors import ConfigError
from kvd.outcomes import Outcome

__all__ = ["BackendOptions", "Capacity", "Chunk", "Outcome", "Space", "TierBackend"]

GROUP = "kvd.tiers"


@dataclass(frozen=True, slots=True)
class Space:
    """A namespace from one reset to the next, as backends know it.

    Attributes:
        id: 16 bytes, a hash over the namespace's id and the salt of its last reset; equal on two
            nodes only if their chunks may be shared.
        share_bytes: bytes of each share of a chunk, one for each arena.
        head_bytes: the largest length of `Chunk.head`.
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
        shares: its memory in the pool, which a put reads and a get writes.
        head: sealed bytes kept with the chunk, at most `space.head_bytes`; a get sets it. It
            identifies the chunk (`kvd.tier.batches.seal`), and is opaque to a backend.
        coverage: first block, count of blocks and group; `scan` returns it.
        checksum: xxh3-64 of the shares, for backends that have an index of their own.
    """

    space: Space
    key: bytes = field(repr=False)
    shares: tuple[memoryview, ...]
    head: bytes = field(default=b"", repr=False)
    coverage: tuple[int, int, int] = (0, 0, 0)
    checksum: int = 0


@dataclass(frozen=True, slots=True)
class Capacity:
    """Bytes in total and in use, and number of chunks. `total` is 0 if unknown."""

    total: int
    used: int
    chunks: int


@dataclass(frozen=True, slots=True)
class BackendOptions:
    """The operator's setting ``NAME:TARGET,key=value,…``, without the name."""

    target: str
    values: Mapping[str, str] = field(default_factory=dict)


class TierBackend(ABC):
    """A backend. All methods but `open` and `check` may be called from several threads at a time.

    `put`, `get` and `contains` return one item for each chunk or key, in order. Their deadline is
    in `time.monotonic` seconds; a backend that can stops then. The only exception that they raise
    is `TierError`: the whole batch has failed. Its text is logged and shown in the status, so it
    must not name a key.

    Attributes:
        shared: other nodes put and remove chunks too, so the broker asks `contains`. Otherwise the
            broker learns from `scan` and `take_dropped` which chunks are stored, and never asks.
        medium: the name for routers and engines: `disk`, `remote` or `memory`.
        threads: how many batches to process at a time.
        batch_bytes: the preferred size of a batch.
        described: how it works, for the log: e.g. ``preadv/pwritev, 4 threads, O_DIRECT``.
        damaged_records: number of records that `open` found damaged, and dropped.
    """

    shared: ClassVar[bool] = False
    medium: ClassVar[str] = "memory"
    threads: int = 4
    batch_bytes: int = 4 * 2**20
    described: str = ""
    damaged_records: int = 0

    @classmethod
    @abstractmethod
    def check(cls, options: BackendOptions) -> None:
        """Check the operator's options, without any I/O.

        Raises:
            ConfigError: an option is invalid; names key, value and remedy.
        """

    @classmethod
    @abstractmethod
    def open(cls, options: BackendOptions, pool: memoryview) -> Self:
        """Open the medium, with the chunks stored on it. `pool` is all of the pool, writable.

        Raises:
            TierError: it cannot be used now; names the remedy. The daemon retries.
        """

    @abstractmethod
    def put(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """Store chunks. A chunk that is stored already stays as it is, or is replaced whole.

        OK also for a chunk that a later one of this call evicts: `take_dropped` returns its key.
        """

    @abstractmethod
    def get(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """Fill the shares and the head of chunks. If not OK, shares may be partly overwritten."""

    @abstractmethod
    def contains(self, space: Space, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """Return for each key whether a get would find its chunk."""

    @abstractmethod
    def remove(self, space: Space, keys: Sequence[bytes]) -> None:
        """Drop these chunks, if they are stored."""

    def salt(self, namespace: bytes) -> bytes:
        """Return the salt noted for a namespace (16 bytes) by `note_salt`; empty if there is none.

        A shared backend returns the salt that its nodes share.
        """
        del namespace
        return b""

    def note_salt(self, namespace: bytes, salt: bytes, *, reset: bool = False) -> bytes:
        """Note the salt (8 bytes) of a namespace's last reset, durably before returning.

        A backend whose chunks outlive its process must implement it, or they are not found again.
        `reset`: the reset is not confirmed yet, so a shared backend replaces the salt of the other
        nodes; otherwise theirs may be of a later reset, and stays.

        Returns:
            The salt noted before, whose chunks are to be dropped; empty if there was none.
        """
        del namespace, salt, reset
        return b""

    def drop_space(self, space: Space) -> None:
        """Drop all chunks of a space after a reset; the default leaves them to eviction."""
        del space

    @abstractmethod
    def open_space(self, space: Space) -> None:
        """Start to use a space, with the chunks that are stored of it."""

    @abstractmethod
    def scan(self, space: Space) -> Iterator[list[tuple[bytes, tuple[int, int, int]]]]:
        """Yield keys and coverages of all chunks of a space, in lists; none if shared."""

    @abstractmethod
    def take_dropped(self) -> list[tuple[bytes, list[bytes]]]:
        """Return, by space id, the keys that the backend dropped by itself since the last call."""

    @abstractmethod
    def capacity(self) -> Capacity:
        """Return how full the medium is. Must not block."""

    @abstractmethod
    def close(self) -> None:
        """Close the medium; if it is persistent, acknowledged chunks stay."""


def backend_class(setting: TierSetting) -> type[TierBackend]:
    """Return the backend class of a tier.

    Raises:
        ConfigError: there is none of this name, or it cannot be imported; names the remedy.
    """
    points = {point.name: point for point in entry_points(group=GROUP)}
    if setting.kind not in points:
        raise ConfigError(
            f"{setting.name}: no tier is called {setting.kind}",
            f"known are {', '.join(sorted(points)) or 'none: install kvd again'}",
        )
    try:
        backend = points[setting.kind].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{setting.name}: {points[setting.kind].value} cannot be imported ({error})",
            "install what it needs, or remove the tier",
        ) from error
    if not (isinstance(backend, type) and issubclass(backend, TierBackend)):
        raise ConfigError(
            f"{setting.name}: {points[setting.kind].value} is no kvd.tier.contract.TierBackend",
            "install the package's newest version, or remove the tier",
        )
    return backend


def backend_options(setting: TierSetting) -> BackendOptions:
    """Return the options in a tier's setting."""
    return BackendOptions(setting.target, setting.options)


def tier_problems(settings: Sequence[TierSetting]) -> list[ConfigError]:
    """Return why tiers' backends cannot be had or refuse their options, without any I/O."""
    problems = []
    for setting in settings:
        try:
            backend_class(setting).check(backend_options(setting))
        except ConfigError as error:
            named = error.text.startswith(setting.kind)
            text = error.text if named else f"{setting.name}: {error.text}"
            problems.append(ConfigError(text, error.remedy))
    return problems
