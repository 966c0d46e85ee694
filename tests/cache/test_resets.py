"""The table of resets, and what is left of its page when a write is cut short."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.cache.resets import MOST, PAGE_BYTES, Resets
from kvd.errors import IntegrityError, LedgerDamaged
from tests.cache.tables import PAGE, add, make_namespaces


def name(number: int) -> str:
    """A namespace's id in hex."""
    return f"{number:032x}"


def table_of(notes: list[tuple[int, int]]) -> Resets:
    """A table with these resets of namespaces by number."""
    table = Resets()
    for number, epoch in notes:
        table.note(name(number), epoch)
    return table


def loaded(page: bytes) -> Resets:
    """The table of a page."""
    table = Resets()
    table.load(page)
    return table


NOTES = st.lists(st.tuples(st.integers(0, 250), st.integers(1, 2**63 - 1)), max_size=300)


@given(NOTES)
def test_the_last_reset_of_each_namespace_is_known(notes: list[tuple[int, int]]) -> None:
    """Also after the page was read again; where it had no place, what is older is not used."""
    table = table_of(notes)
    table.check_integrity()
    again = loaded(table.pack())
    assert repr(again) == repr(table)
    for number, epoch in notes:
        assert again.oldest(name(number)) == table.oldest(name(number)) >= epoch
    assert again.oldest(name(251)) == again.floor


def test_the_namespace_whose_reset_is_longest_ago_loses_its_place() -> None:
    """Its epoch is the floor: what tiers keep of others counts from there on."""
    table = table_of([(number, 1000 + number) for number in range(MOST)])
    assert (len(table), table.floor, table.oldest(name(999))) == (MOST, 0, 0)
    table.note(name(0), 5000)
    table.note(name(MOST), 6000)
    assert (len(table), table.floor) == (MOST, 1001)
    assert (table.epoch(name(1)), table.oldest(name(1))) == (0, 1001)
    assert table.oldest(name(0)) == 5000
    assert table.oldest(name(999)) == 1001


@given(NOTES, st.integers(0, 250), st.integers(0, PAGE_BYTES))
def test_a_write_that_is_cut_short_is_seen(
    notes: list[tuple[int, int]], number: int, cut: int
) -> None:
    """At any byte: what is read is the table of before, the one of after, or damaged."""
    table = table_of(notes)
    before = table.pack()
    table.note(name(number), 2**63 - 1)
    after = table.pack()
    for at in {cut, cut // 64, 24, 28, 32, 40}:
        page = after[:at] + before[at:]
        try:
            found = loaded(page).pack()
        except LedgerDamaged:
            assert page not in {before, after}
        else:
            assert found in {before, after}


@given(NOTES, st.integers(0, PAGE_BYTES - 1), st.integers(1, 255))
def test_a_byte_that_somebody_has_changed_is_seen(
    notes: list[tuple[int, int]], at: int, flip: int
) -> None:
    """Nothing of such a page is taken over."""
    page = bytearray(table_of(notes).pack())
    page[at] ^= flip
    table = Resets(7, {name(1): 9})
    with pytest.raises(LedgerDamaged):
        table.load(bytes(page))
    assert (table.floor, table.epoch(name(1))) == (7, 9)


@pytest.mark.parametrize("page", [b"", bytes(PAGE_BYTES), bytes(PAGE_BYTES + 1), b"x" * PAGE_BYTES])
def test_what_is_no_page_is_refused(page: bytes) -> None:
    """Empty, zeros, too long, foreign."""
    with pytest.raises(LedgerDamaged):
        loaded(page)


@pytest.mark.parametrize(
    "table",
    [
        Resets(5, {name(1): 4}),
        Resets(0, {name(1): 0}),
        Resets(0, {name(1): 2**63}),
        Resets(0, {name(number): 1 for number in range(MOST + 1)}),
    ],
)
def test_a_table_that_contradicts_itself_is_found(table: Resets) -> None:
    """An entry below the floor, without an epoch, above what epochs can be, or too many."""
    with pytest.raises(IntegrityError):
        table.check_integrity()


def test_a_namespace_that_was_closed_keeps_its_epoch() -> None:
    """Closed and opened again, it begins with the epoch of its last reset."""
    namespaces = make_namespaces(4 * PAGE)
    namespace = add(namespaces, 1, PAGE)
    assert (namespace.epoch, namespace.inherited) == (0, False)
    _, _, lack = namespaces.reset(namespace)
    first = namespace.epoch
    assert (first > 0, lack) == (True, "")
    namespaces.detach_engine(namespace)
    namespaces.close(namespace)
    again = add(namespaces, 1, PAGE)
    assert (again.epoch, again.inherited) == (first, True)
    other = add(namespaces, 2, PAGE)
    assert (other.epoch, other.inherited) == (0, False)


def test_a_clock_that_was_set_back_makes_no_smaller_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each epoch is greater than the namespace's last one, also that of a namespace before it."""
    namespaces = make_namespaces(4 * PAGE)
    namespace = add(namespaces, 1, PAGE)
    namespaces.reset(namespace)
    first = namespace.epoch
    monkeypatch.setattr("kvd.cache.chunks.new_epoch", lambda: 5)
    namespaces.reset(namespace)
    assert namespace.epoch == first + 1
    namespaces.detach_engine(namespace)
    namespaces.close(namespace)
    again = add(namespaces, 1, PAGE)
    namespaces.reset(again)
    assert again.epoch == first + 2


def test_the_reset_of_a_temporary_namespace_is_not_noted() -> None:
    """No tier has any of it."""
    namespaces = make_namespaces(4 * PAGE)
    namespaces.reset(add(namespaces, 1, PAGE, temporary=True))
    assert add(namespaces, 2, PAGE).epoch == 0
    namespaces.close(next(each for each in namespaces if each.temporary))
    assert add(namespaces, 1, PAGE).inherited is False
