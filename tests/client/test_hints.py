"""What requests carry becomes a label."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_client import Label
from kvd_client.adapters import Hint, read_hint


def envelope(*actions: tuple[str, str, Any], version: str = "0.1") -> SimpleNamespace:
    """KV hints with these actions: type, version and payload."""
    return SimpleNamespace(
        protocol_version=version,
        message_id="m",
        actions=[
            SimpleNamespace(action_id="a", action_type=kind, action_version=number, payload=payload)
            for kind, number, payload in actions
        ],
    )


@pytest.mark.parametrize(
    ("fields", "label"),
    [
        ({}, Label.NONE),
        ({"continues": True}, Label.NONE),
        ({"continues": False}, Label.DONE),
        ({"one_shot": True}, Label.DONE),
        ({"one_shot": False}, Label.NONE),
        ({"session_final": True}, Label.DONE),
        ({"resume_in_s": 0}, Label.UNDER_10S),
        ({"resume_in_s": 9.9}, Label.UNDER_10S),
        ({"resume_in_s": 10}, Label.UNDER_60S),
        ({"resume_in_s": 599, "continues": True}, Label.UNDER_600S),
        ({"resume_in_s": 86_400}, Label.LATER),
        ({"cache_control": {"type": "ephemeral"}}, Label.UNDER_600S),
        ({"cache_control": {"type": "ephemeral", "ttl": "5m"}}, Label.UNDER_600S),
        ({"cache_control": {"ttl": "1h"}}, Label.LATER),
        ({"resume_in_s": 5, "one_shot": True}, Label.DONE),
        ({"cache_control": {"ttl": "1h"}, "resume_in_s": 5}, Label.UNDER_10S),
    ],
)
def test_fields_of_a_request_are_a_label(fields: dict[str, Any], label: Label) -> None:
    """Done before any time; nothing of a valid field is ignored or cut."""
    other = {"do_remote_prefill": False, "max_load_tokens": 0}
    assert read_hint({"kvd": fields} | other) == Hint(label, is_present=True)


@pytest.mark.parametrize(
    ("fields", "ignored"),
    [
        (["continues"], 1),
        ("done", 1),
        ({"continues": 0, "one_shot": "yes", "session_final": None}, 3),
        ({"resume_in_s": True}, 1),
        ({"resume_in_s": "12"}, 1),
        ({"resume_in_s": math.nan}, 1),
        ({"cache_control": "5m"}, 1),
        ({"cache_control": {"type": "ephemeral", "ttl": "2m"}}, 1),
        ({"cache_control": {"type": "ephemeral", "ttl": 300}}, 1),
        ({"cache_control": {"type": "eternal", "ttl": "5m"}}, 1),
        ({"priority": 9, "pin": True}, 2),
    ],
)
def test_what_is_not_known_is_ignored_and_counted(fields: Any, ignored: int) -> None:
    """Unknown fields and wrong types say nothing."""
    assert read_hint({"kvd": fields}) == Hint(Label.NONE, is_present=True, ignored=ignored)


def test_an_unknown_field_leaves_the_others_valid() -> None:
    """A newer client's request is labelled by what this release knows."""
    hint = read_hint({"kvd": {"resume_in_s": 30, "likelihood": 0.9}})
    assert hint == Hint(Label.UNDER_60S, is_present=True, ignored=1)


@pytest.mark.parametrize(
    ("seconds", "label"),
    [
        (-3, Label.UNDER_10S),
        (-math.inf, Label.UNDER_10S),
        (86_401, Label.LATER),
        (math.inf, Label.LATER),
        (10**400, Label.LATER),
    ],
)
def test_absurd_numbers_are_cut_and_counted(seconds: float, label: Label) -> None:
    """To 0 and to a day."""
    assert read_hint({"kvd": {"resume_in_s": seconds}}) == Hint(label, is_present=True, cut=1)


@pytest.mark.parametrize(
    ("action", "label"),
    [
        (("kv.retain", "1.0", {"ttl_seconds": 30, "priority": 50}), Label.UNDER_60S),
        (("kv.retain", "1.3", {"ttl_seconds": 3600}), Label.LATER),
        (
            (
                "kv.retain",
                "1.0",
                {
                    "scope": None,
                    "directives": [
                        {"start": 0, "end": 64, "priority": 9, "duration": 300.0},
                        {"covers_output": True, "priority": 5, "duration": 5},
                        {"start": 64, "priority": 1, "duration": None},
                    ],
                },
            ),
            Label.UNDER_600S,
        ),
        (("kv.deref", "1.0", {}), Label.DONE),
    ],
)
@pytest.mark.parametrize("version", ["0.1", "1.0"])
def test_actions_that_say_when_chunks_are_needed_are_a_label(
    action: tuple[str, str, Any], label: Label, version: str
) -> None:
    """Retention for a time, and its end."""
    assert read_hint(None, envelope(action, version=version)) == Hint(label, is_present=True)


@pytest.mark.parametrize(
    ("actions", "ignored"),
    [
        ([("kv.fetch", "1.0", {}), ("kv.deref", "2.0", {}), ("kv.deref", "", {})], 3),
        ([("kv.retain", "1.0", {"ttl_seconds": "long"})], 1),
        ([("kv.retain", "1.0", {"directives": 3})], 1),
        ([("kv.retain", "1.0", {"directives": [{"duration": "long"}, 4]})], 1),
        ([("kv.retain", "1.0", None)], 1),
    ],
)
def test_unknown_actions_and_versions_are_ignored_and_counted(
    actions: list[tuple[str, str, Any]], ignored: int
) -> None:
    """Each one; the known ones beside them count."""
    assert read_hint(None, envelope(*actions)) == Hint(is_present=True, ignored=ignored)
    beside = read_hint(None, envelope(*actions, ("kv.retain", "1.0", {"ttl_seconds": 1})))
    assert beside == Hint(Label.UNDER_10S, is_present=True, ignored=ignored)
    unknown = envelope(("kv.deref", "1.0", {}), version="7.0")
    assert read_hint(None, unknown) == Hint(is_present=True, ignored=1)


def test_kvds_own_fields_count_before_an_envelope() -> None:
    """The envelope counts where these say nothing."""
    hints = envelope(("kv.deref", "1.0", {}))
    assert read_hint({"kvd": {"resume_in_s": 5}}, hints).label is Label.UNDER_10S
    assert read_hint({"kvd": {"continues": True}}, hints).label is Label.DONE


@pytest.mark.parametrize("params", [None, {}, {"kvd": None}, {"max_load_tokens": 1}])
def test_a_request_without_hints_has_none(params: Any) -> None:
    """It is not counted."""
    assert read_hint(params) == Hint()


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["ttl", "type", "ttl_seconds", "directives", "duration", "x"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)
_NAMES = ["continues", "resume_in_s", "one_shot", "session_final", "cache_control", "x"]


@given(
    st.dictionaries(st.sampled_from(_NAMES), _VALUES) | _VALUES,
    st.lists(
        st.tuples(st.sampled_from(["kv.retain", "kv.deref", "x"]), st.just("1.0"), _VALUES),
        max_size=3,
    )
    | _VALUES,
)
def test_nothing_that_a_request_carries_raises(fields: Any, actions: Any) -> None:
    """Whatever it is, there is a label, and every number in range or cut."""
    hints: Any = actions
    if isinstance(actions, list):
        well_formed = all(isinstance(action, tuple) for action in actions)
        hints = envelope(*actions) if well_formed else SimpleNamespace(actions=actions)
    assert read_hint({"kvd": fields}, hints).label in Label
    assert read_hint(fields, hints).label in Label
