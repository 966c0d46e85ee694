"""The life cycles: only the table's arrows, and nothing changes on a wrong one."""

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_proto.errors import IllegalTransition
from kvd_proto.states import CHUNK, JOB, SESSION, Machine

Table = Mapping[Any, Mapping[Any, Any]]
TABLES: dict[str, Table] = {"session": SESSION, "job": JOB, "chunk": CHUNK}


def events_of(table: Table) -> list[Any]:
    """Every event that the table knows."""
    return sorted({event for arrows in table.values() for event in arrows})


@pytest.mark.parametrize("name", TABLES)
def test_tables_are_closed(name: str) -> None:
    """Every arrow ends in a state of the table, and every state can be reached."""
    table = TABLES[name]
    states = set(table)
    targets = {target for arrows in table.values() for target in arrows.values()}
    assert targets <= states
    assert states - targets <= {next(iter(table))}


@given(st.sampled_from(sorted(TABLES)), st.data())
def test_illegal_events_leave_the_state_unchanged(name: str, data: st.DataObject) -> None:
    """On a random walk, an event without an arrow raises and changes nothing."""
    table = TABLES[name]
    machine = Machine(table, next(iter(table)))
    for event in data.draw(st.lists(st.sampled_from(events_of(table)), max_size=12)):
        before = machine.state
        expected = table[before].get(event)
        if expected is None:
            with pytest.raises(IllegalTransition, match=str(event)):
                machine.fire(event)
            assert machine.state is before
        else:
            assert machine.fire(event) is expected


def test_the_error_says_what_is_allowed() -> None:
    """An illegal transition names the event, the state and the legal events."""
    machine = Machine(CHUNK, next(iter(CHUNK)))
    event = events_of(CHUNK)[0]
    with pytest.raises(
        IllegalTransition, match=r"all_shares in state free; allowed: prepare_store"
    ):
        machine.fire(event)
