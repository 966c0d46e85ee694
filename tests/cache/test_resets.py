"""The table of resets, and what is left of its page when a write is cut short."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.recovery import MAX_RESETS, RESET_BYTES, SALT_BYTES, ResetTable
from kvd.errors import LedgerDamaged
from tests.cache.tables import PAGE, add, make_namespaces


def name(number: int) -> str:
    """A namespace's id in hex."""
    return f"{number:032x}"


def table_of(numbers: list[int]) -> ResetTable:
    """A table with resets of these namespaces."""
    table = ResetTable()
    for number in numbers:
        table.draw(name(number))
    return table


def loaded(page: bytes) -> ResetTable:
    """The table of a page."""
    table = ResetTable()
    table.load(page)
    return table


NUMBERS = st.lists(st.integers(0, 250), max_size=300)


@given(NUMBERS)
def test_each_reset_gives_a_salt_that_none_was_before(numbers: list[int]) -> None:
    """Also where the namespace has lost its place, and after the page was read again."""
    table, before = ResetTable(), dict[int, set[bytes]]()
    for number in numbers:
        before.setdefault(number, {b""}).add(table.salt_of(name(number)))
        table.draw(name(number))
    again = loaded(table.pack())
    for number in range(252):
        salt = again.salt_of(name(number))
        assert salt == table.salt_of(name(number))
        assert salt not in before.get(number, ())
        assert len(salt) == SALT_BYTES or number not in numbers
    assert again.salt_of(name(251)) == again.base


def test_the_namespace_whose_reset_is_longest_ago_loses_its_place() -> None:
    """It and all that have none get a salt that none had before."""
    table = table_of(list(range(MAX_RESETS)))
    salts = {number: table.salt_of(name(number)) for number in range(MAX_RESETS)}
    assert (len(table), table.base) == (MAX_RESETS, b"")
    table = loaded(table.pack())
    table.draw(name(0))
    table.draw(name(MAX_RESETS))
    assert (len(table), len(table.base)) == (MAX_RESETS, SALT_BYTES)
    assert table.salt_of(name(1)) == table.salt_of(name(999)) == table.base
    assert table.base not in salts.values()
    assert table.salt_of(name(2)) == salts[2]


@given(NUMBERS, st.integers(0, 250), st.integers(0, RESET_BYTES))
def test_a_write_that_is_cut_short_is_seen(numbers: list[int], number: int, cut: int) -> None:
    """At any byte: what is read is the table of before, the one of after, or damaged."""
    table = table_of(numbers)
    before = table.pack()
    table.draw(name(number))
    after = table.pack()
    for at in {cut, cut // 64, 24, 28, 32, 40}:
        page = after[:at] + before[at:]
        try:
            found = loaded(page).pack()
        except LedgerDamaged:
            assert page not in {before, after}
        else:
            assert found in {before, after}


@given(NUMBERS, st.integers(0, RESET_BYTES - 1), st.integers(1, 255))
def test_a_byte_that_somebody_has_changed_is_seen(numbers: list[int], at: int, flip: int) -> None:
    """Nothing of such a page is taken over."""
    page = bytearray(table_of(numbers).pack())
    page[at] ^= flip
    table = table_of([1])
    before = table.pack()
    with pytest.raises(LedgerDamaged):
        table.load(bytes(page))
    assert table.pack() == before


def test_a_namespace_that_was_closed_keeps_its_salt() -> None:
    """Closed and opened again, it begins with the salt of its last reset."""
    namespaces = make_namespaces(4 * PAGE)
    namespace = add(namespaces, 1, PAGE)
    assert namespace.salt == b""
    _, _, lack = namespaces.reset(namespace)
    salt = namespace.salt
    assert (len(salt), lack) == (SALT_BYTES, "")
    namespaces.detach_engine(namespace)
    namespaces.close(namespace)
    assert add(namespaces, 1, PAGE).salt == salt
    assert add(namespaces, 2, PAGE).salt == b""
