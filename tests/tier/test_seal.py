"""Heads of records: what is sealed is found again, and whatever else is there is found out."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.tier.batches import HEAD_BYTES, Damaged, SealedHead, checksum_of, seal, unseal
from kvd.tier.contract import Space

HALF = st.integers(0, 2**16 - 1)
SPACES = st.builds(
    Space,
    st.binary(min_size=16, max_size=16),
    st.lists(st.integers(1, 2**40), min_size=1, max_size=8).map(tuple),
    st.just(4096),
)
KEYS = st.binary(min_size=1, max_size=48)
SEALED = st.builds(
    SealedHead, st.tuples(HALF, HALF, HALF), st.integers(0, 2**64 - 1), st.binary(max_size=300)
)
SPACE = Space(b"n" * 16, (4096, 100), HEAD_BYTES + 40)


def sealed(space: Space, key: bytes, what: SealedHead) -> bytes:
    """The head that says this."""
    return seal(space, key, what.coverage, what.checksum, what.description)


@given(SPACES, KEYS, SEALED)
def test_round_trip(space: Space, key: bytes, what: SealedHead) -> None:
    """A head says what was sealed, in the bytes that a space counts for it."""
    head = sealed(space, key, what)
    assert len(head) == HEAD_BYTES + len(what.description)
    assert unseal(head, space, key) == what


@given(SPACES, KEYS, SEALED, SPACES, KEYS)
def test_it_is_good_for_one_chunk_only(
    space: Space, key: bytes, what: SealedHead, other: Space, another: bytes
) -> None:
    """The head of another key, space or size is damaged for this chunk."""
    head = sealed(space, key, what)
    if another != key:
        with pytest.raises(Damaged):
            unseal(head, space, another)
    for changed in (
        Space(other.id, space.share_bytes, 4096),
        Space(space.id, other.share_bytes, 4096),
    ):
        if (changed.id, changed.chunk_bytes) != (space.id, space.chunk_bytes):
            with pytest.raises(Damaged):
                unseal(head, changed, key)


def test_every_single_bit_of_a_head_counts() -> None:
    """A head with any one bit turned is damaged."""
    head = sealed(SPACE, b"key", SealedHead((1, 2, 3), 99, b"description"))
    for bit in range(8 * len(head)):
        turned = bytearray(head)
        turned[bit // 8] ^= 1 << bit % 8
        with pytest.raises(Damaged):
            unseal(bytes(turned), SPACE, b"key")


def test_every_single_bit_of_the_shares_counts() -> None:
    """The check word of shares with any one bit turned is another one."""
    whole = bytearray(range(256)) * 2
    shares = memoryview(whole)[:300], memoryview(whole)[300:]
    check = checksum_of(shares)
    for bit in range(8 * len(whole)):
        whole[bit // 8] ^= 1 << bit % 8
        assert checksum_of(shares) != check
        whole[bit // 8] ^= 1 << bit % 8
    assert checksum_of(shares) == check
