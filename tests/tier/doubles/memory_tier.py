"""A test double: a tier in this process's memory that can be made slow, wrong or dead."""

import random
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar, Self, TypeAlias

from kvd.errors import ConfigError, TierError
from kvd.tier.contract import BackendOptions, Capacity, Chunk, Outcome, Space, TierBackend
from kvd_proto.errors import SizeError
from kvd_proto.text import parse_size

_RATES = ("corrupt", "fail")
_PAUSE = 0.002
_PIECE = 1024  # chunks of a piece of a scan
_Place: TypeAlias = tuple[bytes, bytes]  # id of the space, and key


@dataclass(frozen=True, slots=True)
class _Kept:
    coverage: tuple[int, int, int]
    head: bytes
    shares: tuple[bytes, ...]

    @property
    def nbytes(self) -> int:
        return len(self.head) + sum(map(len, self.shares))


class MemoryTier(TierBackend):
    """Keeps chunks in a dictionary, oldest out first; nothing outlives the process.

    ``memory:,size=64MiB`` and, of what can be done to it, ``delay=SECONDS`` before each batch,
    ``corrupt=RATE`` of the gets, which have a bit turned, ``fail=RATE`` of the batches, which
    raise, ``hang=FILE``: all that may block does while that file exists, past any deadline.
    """

    medium: ClassVar[str] = "memory"

    def __init__(self, options: BackendOptions) -> None:
        self._size = _size(options)
        rates = {name: _number(options, name, most=1.0) for name in _RATES}
        self._corrupt, self._fail = (rates[name] for name in _RATES)
        self._delay = _number(options, "delay", most=60.0)
        self._hang = Path(options.values["hang"]) if "hang" in options.values else None
        self._random = random.Random(0)  # what goes wrong is no secret
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Place, _Kept] = OrderedDict()
        self._used = 0
        self._begun: set[bytes] = set()
        self._gone: dict[bytes, list[bytes]] = {}
        self.described = f"a test double in memory, at most {self._size} bytes; keeps nothing"

    @classmethod
    def check(cls, options: BackendOptions) -> None:
        """See TierBackend."""
        known = {"size", "delay", "hang", *_RATES}
        if unknown := sorted(options.values.keys() - known):
            raise ConfigError(f"memory: {unknown[0]} is none of {', '.join(sorted(known))}")
        if options.target:
            raise ConfigError(f"memory:{options.target}: it has no target; give memory:,size=64MiB")
        cls(options)

    @classmethod
    def open(cls, options: BackendOptions, pool: memoryview) -> Self:  # noqa: ARG003  # shares come along
        """See TierBackend."""
        return cls(options)

    def put(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """See TierBackend."""
        if self._hold_up(deadline):
            return [Outcome.LATE] * len(chunks)
        return [self._put(chunk) for chunk in chunks]

    def _put(self, chunk: Chunk) -> Outcome:
        shares = tuple(bytes(share) for share in chunk.shares)
        kept = _Kept(chunk.coverage, chunk.head, shares)
        if kept.nbytes > self._size:
            return Outcome.FULL
        with self._lock:
            if chunk.space.id not in self._begun:
                return Outcome.FAILED
            place = chunk.space.id, chunk.key
            self._drop(place)
            while self._used + kept.nbytes > self._size:
                (space, key), _ = oldest = next(iter(self._kept.items()))
                self._drop(oldest[0])
                self._gone.setdefault(space, []).append(key)
            self._kept[place] = kept
            self._used += kept.nbytes
        return Outcome.OK

    def get(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """See TierBackend."""
        if self._hold_up(deadline):
            return [Outcome.LATE] * len(chunks)
        return [self._get(chunk) for chunk in chunks]

    def _get(self, chunk: Chunk) -> Outcome:
        with self._lock:
            kept = self._kept.get((chunk.space.id, chunk.key))
            turned = self._happens(self._corrupt)
        if kept is None:
            return Outcome.ABSENT
        for share, saved in zip(chunk.shares, kept.shares, strict=True):
            share[:] = saved
        chunk.head = kept.head
        if turned:
            chunk.shares[0][0] ^= 1
        return Outcome.OK

    def contains(self, space: Space, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See TierBackend."""
        late = self._hold_up(deadline)
        with self._lock:
            return [not late and (space.id, key) in self._kept for key in keys]

    def remove(self, space: Space, keys: Sequence[bytes]) -> None:
        """See TierBackend."""
        self._hang_while_asked()
        with self._lock:
            for key in keys:
                self._drop((space.id, key))

    def open_space(self, space: Space) -> None:
        """See TierBackend."""
        self._hang_while_asked()
        with self._lock:
            self._begun.add(space.id)

    def drop_space(self, space: Space) -> None:
        """See TierBackend."""
        with self._lock:
            self._begun.discard(space.id)
            for place in [place for place in self._kept if place[0] == space.id]:
                self._drop(place)

    def scan(self, space: Space) -> Iterator[list[tuple[bytes, tuple[int, int, int]]]]:
        """See TierBackend."""
        with self._lock:
            keys = [key for name, key in self._kept if name == space.id]
        for at in range(0, len(keys), _PIECE):
            self._hang_while_asked()
            with self._lock:
                found = [(key, self._kept.get((space.id, key))) for key in keys[at : at + _PIECE]]
            yield [(key, kept.coverage) for key, kept in found if kept is not None]

    def take_dropped(self) -> list[tuple[bytes, list[bytes]]]:
        """See TierBackend."""
        with self._lock:
            gone, self._gone = self._gone, {}
        return list(gone.items())

    def capacity(self) -> Capacity:
        """See TierBackend."""
        return Capacity(self._size, self._used, len(self._kept))

    def close(self) -> None:
        """See TierBackend."""

    def _hold_up(self, deadline: float) -> bool:
        """Wait and fail as was asked for; whether the deadline has passed."""
        time.sleep(self._delay)
        self._hang_while_asked()
        with self._lock:
            fails = self._happens(self._fail)
        if fails:
            raise TierError("this batch fails, as fail=RATE asks for")
        return time.monotonic() > deadline

    def _hang_while_asked(self) -> None:
        while self._hang is not None and self._hang.exists():
            time.sleep(_PAUSE)

    def _happens(self, rate: float) -> bool:
        return rate > 0 and self._random.random() < rate

    def _drop(self, place: _Place) -> None:
        if (kept := self._kept.pop(place, None)) is not None:
            self._used -= kept.nbytes


def _number(options: BackendOptions, name: str, most: float) -> float:
    text = options.values.get(name, "0")
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0.0 <= value <= most:
        raise ConfigError(f"memory: {name}={text} needs a number from 0 to {most:g}")
    return value


def _size(options: BackendOptions) -> int:
    text = options.values.get("size", "64MiB")
    try:
        return parse_size(text)
    except SizeError as error:
        raise ConfigError(f"memory: size={text}: {error}") from error
