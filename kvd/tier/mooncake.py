"""The tier `mooncake`: chunks as objects of Mooncake Store.

An object is the length of the head, the head padded to a fixed size, and the shares, which are
transferred directly between pool and cluster. Its name is a hash over the space's id, sizes
and key: nodes find each other's chunks only if the bytes mean the same, and names reveal no key.
Objects are not replaced: the same name means the same chunk.

The salt of a namespace is an object of its own, which is never evicted; a node without a salt reads
it. So chunks from before a reset are not found again, even by a node that has forgotten the reset.
"""

import hashlib
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import ClassVar, Self

from kvd.errors import TierError
from kvd.tier.contract import BackendOptions, Capacity, Chunk, Outcome, Space, TierBackend
from kvd.tier.mooncake_client import (
    BAD_LENGTH,
    DONE,
    LEASE_EXPIRED,
    NO_ROOM,
    NOT_FOUND,
    NOT_READY,
    MooncakeClient,
    MooncakeOptions,
    address_of,
    aligned_bytes,
    check_installed,
    only_code,
    package_version,
)

_LENGTH = struct.Struct("<I")
_SALT_BYTES = 8
_PUT_OUTCOMES = {DONE: Outcome.OK, NO_ROOM: Outcome.FULL}
_GET_OUTCOMES = {
    NOT_FOUND: Outcome.ABSENT,
    NOT_READY: Outcome.ABSENT,
    BAD_LENGTH: Outcome.CORRUPT,
    LEASE_EXPIRED: Outcome.LATE,
}
_REWRITE_SECONDS = 10.0
_SALT_READS = 20  # of a salt that another node is writing
_SALT_READ_SECONDS = 0.05  # between two


class MooncakeTier(TierBackend):
    """The backend ``mooncake:master=HOST:PORT,…``; for its other options see `MooncakeOptions`."""

    shared: ClassVar[bool] = True
    medium: ClassVar[str] = "remote"
    threads = 2
    batch_bytes = 16 * 2**20

    def __init__(self, client: MooncakeClient, described: str) -> None:
        self._client = client
        self.described = described
        self._lock = threading.Lock()
        self._salts: dict[bytes, bytes] = {}  # of namespaces in use
        self._last_rewrite = time.monotonic()

    @classmethod
    def check(cls, options: BackendOptions) -> None:
        """See TierBackend."""
        MooncakeOptions.parse(options)
        check_installed()

    @classmethod
    def open(cls, options: BackendOptions, pool: memoryview) -> Self:
        """See TierBackend."""
        parsed = MooncakeOptions.parse(options)
        client = MooncakeClient(parsed, pool)
        return cls(
            client,
            f"Mooncake Store at {parsed.master_text} ({package_version()}), {parsed.protocol},"
            f" as {client.host}, contributing {parsed.segment_bytes} bytes",
        )

    def put(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """See TierBackend."""
        if not chunks or time.monotonic() > deadline:
            return [Outcome.LATE] * len(chunks)
        self._rewrite_salts()
        with self._head_buffer(chunks) as (memory, address, offsets):
            for chunk, offset in zip(chunks, offsets, strict=True):
                _LENGTH.pack_into(memory, offset, len(chunk.head))
                begin = offset + _LENGTH.size
                memory[begin : begin + len(chunk.head)] = chunk.head
            codes = self._client.put(*_objects(chunks, address, offsets))
        self._raise_if_all_failed(codes, _PUT_OUTCOMES)
        return [_PUT_OUTCOMES.get(code, Outcome.FAILED) for code in codes]

    def get(self, chunks: Sequence[Chunk], deadline: float) -> list[Outcome]:
        """See TierBackend."""
        if not chunks or time.monotonic() > deadline:
            return [Outcome.LATE] * len(chunks)
        outcomes = []
        with self._head_buffer(chunks) as (memory, address, offsets):
            codes = self._client.get(*_objects(chunks, address, offsets))
            self._raise_if_all_failed(codes, _GET_OUTCOMES)
            for chunk, offset, code in zip(chunks, offsets, codes, strict=True):
                outcome = _GET_OUTCOMES.get(code, Outcome.FAILED if code < 0 else Outcome.OK)
                if outcome is Outcome.OK:
                    (length,) = _LENGTH.unpack_from(memory, offset)
                    begin = offset + _LENGTH.size
                    if length > chunk.space.head_bytes:
                        outcome = Outcome.CORRUPT
                    else:
                        chunk.head = bytes(memory[begin : begin + length])
                outcomes.append(outcome)
        corrupt_names = [
            name_of(chunk.space, chunk.key)
            for chunk, outcome in zip(chunks, outcomes, strict=True)
            if outcome is Outcome.CORRUPT
        ]
        if corrupt_names:
            self._client.remove(corrupt_names)
        return outcomes

    def contains(self, space: Space, keys: Sequence[bytes], deadline: float) -> list[bool]:
        """See TierBackend."""
        if not keys or time.monotonic() > deadline:
            return [False] * len(keys)
        return self._client.exist([name_of(space, key) for key in keys])

    def remove(self, space: Space, keys: Sequence[bytes]) -> None:
        """See TierBackend."""
        if keys:
            self._client.remove([name_of(space, key) for key in keys])

    def salt(self, namespace: bytes) -> bytes:
        """Return the salt in use here, else the cluster's; if there is none, create it."""
        with self._lock:
            salt = self._salts.get(namespace)
        if salt is not None:
            return salt
        name, new_salt = _salt_name(namespace), b""
        for _ in range(_SALT_READS):
            if (word := self._client.read_word(name)) is not None:
                return word
            new_salt = new_salt or secrets.token_bytes(_SALT_BYTES)
            self._client.write_word(name, new_salt, replace=False)
            time.sleep(_SALT_READ_SECONDS)  # another node may have been first: read what it wrote
        raise TierError("the salt of a namespace cannot be read: another node is still writing it")

    def note_salt(self, namespace: bytes, salt: bytes, *, reset: bool = False) -> bytes:
        """See TierBackend. The cluster evicts chunks of other salts in time."""
        with self._lock:
            previous = self._salts.get(namespace)
        if previous != salt:
            self._client.write_word(_salt_name(namespace), salt, replace=reset)
        with self._lock:
            self._salts[namespace] = salt
        return b""

    def open_space(self, space: Space) -> None:
        """See TierBackend."""

    def _rewrite_salts(self) -> None:
        """Rewrite salts that were lost with a store, at most every `_REWRITE_SECONDS`."""
        now = time.monotonic()
        with self._lock:
            if now < self._last_rewrite + _REWRITE_SECONDS:
                return
            self._last_rewrite = now
            salts = self._salts.copy()
        for namespace, salt in salts.items():
            self._client.write_word(_salt_name(namespace), salt, replace=False)

    def scan(self, space: Space) -> Iterator[list[tuple[bytes, tuple[int, int, int]]]]:  # noqa: ARG002  # a cluster has no list
        """See TierBackend."""
        return iter(())

    def take_dropped(self) -> list[tuple[bytes, list[bytes]]]:
        """See TierBackend."""
        return []

    def capacity(self) -> Capacity:
        """See TierBackend. Unknown: asking the master would block."""
        return Capacity(0, 0, 0)

    def close(self) -> None:
        """See TierBackend."""
        self._client.close()

    @contextmanager
    def _head_buffer(self, chunks: Sequence[Chunk]) -> Iterator[tuple[memoryview, int, list[int]]]:
        """Yield a buffer for the heads of a batch, its address, and the offset of each head."""
        offsets, size = [], 0
        for chunk in chunks:
            offsets.append(size)
            size += aligned_bytes(_LENGTH.size + chunk.space.head_bytes)
        with self._client.buffer(size) as (memory, address):
            yield memory, address, offsets

    def _raise_if_all_failed(self, codes: Sequence[int], outcomes: Mapping[int, Outcome]) -> None:
        code = only_code(codes)
        if code is not None and code not in outcomes:
            raise TierError(
                f"{self._client.master_text}, or its stores: all chunks failed (code {code})"
            )


def name_of(space: Space, key: bytes) -> str:
    """Return the name of a chunk's object: 64 hexadecimal digits."""
    sizes = (space.head_bytes, *space.share_bytes)
    identity = struct.pack(f"<16sQ{len(sizes)}Q", space.id, len(sizes), *sizes) + key
    return hashlib.blake2b(identity, digest_size=32, person=b"kvd chunk").hexdigest()


def _salt_name(namespace: bytes) -> str:
    return hashlib.blake2b(namespace, digest_size=32, person=b"kvd salt").hexdigest()


def _objects(
    chunks: Sequence[Chunk], address: int, offsets: Sequence[int]
) -> tuple[list[str], list[list[int]], list[list[int]]]:
    """Return names, and for each object the addresses and sizes of its pieces: head, shares."""
    names, addresses, sizes = [], [], []
    for chunk, offset in zip(chunks, offsets, strict=True):
        names.append(name_of(chunk.space, chunk.key))
        addresses.append([address + offset, *map(address_of, chunk.shares)])
        sizes.append([_LENGTH.size + chunk.space.head_bytes, *chunk.space.share_bytes])
    return names, addresses, sizes
