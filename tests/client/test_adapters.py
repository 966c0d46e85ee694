"""What adapters of engines read: the hints of a request, and SGLang's options.

Those of vLLM are in tests/vllm.
"""

import math
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_client import Label
from kvd_client.adapters import Hint, OptionsError, read_hint
from kvd_client.sglang.pool_cache import SglangOptions, read_options


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


FIELDS: list[tuple[Any, Label, int, int]] = [  # of `kvd`, the label, ignored, cut
    ({}, Label.NONE, 0, 0),
    ({"continues": True}, Label.NONE, 0, 0),
    ({"continues": False}, Label.DONE, 0, 0),
    ({"one_shot": True}, Label.DONE, 0, 0),
    ({"session_final": True}, Label.DONE, 0, 0),
    ({"resume_in_s": 9.9}, Label.UNDER_10S, 0, 0),
    ({"resume_in_s": 10}, Label.UNDER_60S, 0, 0),
    ({"resume_in_s": 599, "continues": True}, Label.UNDER_600S, 0, 0),
    ({"resume_in_s": 86_400}, Label.LATER, 0, 0),
    ({"cache_control": {"type": "ephemeral"}}, Label.UNDER_600S, 0, 0),
    ({"cache_control": {"ttl": "1h"}}, Label.LATER, 0, 0),
    ({"resume_in_s": 5, "one_shot": True}, Label.DONE, 0, 0),
    ({"cache_control": {"ttl": "1h"}, "resume_in_s": 5}, Label.UNDER_10S, 0, 0),
    ({"resume_in_s": -3}, Label.UNDER_10S, 0, 1),
    ({"resume_in_s": math.inf}, Label.LATER, 0, 1),
    ({"resume_in_s": 10**400}, Label.LATER, 0, 1),
    ({"resume_in_s": 30, "likelihood": 0.9}, Label.UNDER_60S, 1, 0),  # of a newer client
    ("done", Label.NONE, 1, 0),
    ({"continues": 0, "one_shot": "yes", "session_final": None}, Label.NONE, 3, 0),
    ({"resume_in_s": True}, Label.NONE, 1, 0),
    ({"resume_in_s": math.nan}, Label.NONE, 1, 0),
    ({"cache_control": "5m"}, Label.NONE, 1, 0),
    ({"cache_control": {"type": "ephemeral", "ttl": "2m"}}, Label.NONE, 1, 0),
    ({"cache_control": {"type": "eternal", "ttl": "5m"}}, Label.NONE, 1, 0),
]


def test_fields_of_a_request_are_a_label() -> None:
    """Done before any time; what is unknown or of a wrong type is ignored, absurd times are cut."""
    for fields, label, ignored, cut in FIELDS:
        hint = read_hint({"kvd": fields, "do_remote_prefill": False})
        assert hint == Hint(label, is_present=True, ignored=ignored, cut=cut), fields
    for params in (None, {}, {"kvd": None}, {"max_load_tokens": 1}):
        assert read_hint(params) == Hint()


DIRECTIVES = [
    {"start": 0, "end": 64, "priority": 9, "duration": 300.0},
    {"covers_output": True, "priority": 5, "duration": 5},
    {"start": 64, "priority": 1, "duration": None},
]
ACTIONS: list[tuple[tuple[str, str, Any], Label]] = [
    (("kv.retain", "1.0", {"ttl_seconds": 30, "priority": 50}), Label.UNDER_60S),
    (("kv.retain", "1.3", {"ttl_seconds": 3600}), Label.LATER),
    (("kv.retain", "1.0", {"scope": None, "directives": DIRECTIVES}), Label.UNDER_600S),
    (("kv.deref", "1.0", {}), Label.DONE),
]
UNKNOWN_ACTIONS: list[tuple[str, str, Any]] = [
    ("kv.fetch", "1.0", {}),
    ("kv.deref", "2.0", {}),
    ("kv.deref", "", {}),
    ("kv.retain", "1.0", {"ttl_seconds": "long"}),
    ("kv.retain", "1.0", {"directives": 3}),
    ("kv.retain", "1.0", {"directives": [{"duration": "long"}, 4]}),
    ("kv.retain", "1.0", None),
]


def test_actions_of_an_envelope_are_a_label() -> None:
    """Unknown ones are ignored and counted; the request's own fields count before all of them."""
    for action, label in ACTIONS:
        for version in ("0.1", "1.0"):
            hint = read_hint(None, envelope(action, version=version))
            assert hint == Hint(label, is_present=True), action
    for action in UNKNOWN_ACTIONS:
        assert read_hint(None, envelope(action)) == Hint(is_present=True, ignored=1), action
    some = envelope(*UNKNOWN_ACTIONS[:3], ACTIONS[0][0])
    assert read_hint(None, some) == Hint(Label.UNDER_60S, is_present=True, ignored=3)
    done = envelope(("kv.deref", "1.0", {}), version="7.0")
    assert read_hint(None, done) == Hint(is_present=True, ignored=1)
    done.protocol_version = "1.0"
    assert read_hint({"kvd": {"resume_in_s": 5}}, done).label is Label.UNDER_10S
    assert read_hint({"kvd": {"continues": True}}, done).label is Label.DONE


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


def test_options_that_are_given_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rest is as it is by default, and the directory as the environment says."""
    monkeypatch.setenv("KVD_RUNTIME_DIR", "/run/other")
    assert read_options({"load_timeout": 5}) == SglangOptions(
        runtime_dir="/run/other", load_timeout=5.0
    )
    assert read_options({"runtime_dir": "/run/this"}).runtime_dir == "/run/this"
    monkeypatch.delenv("KVD_RUNTIME_DIR")
    assert read_options(None) == SglangOptions()


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        (
            {"lod_timeout": 1},
            "lod_timeout.*known keys: chunk_tokens, deadline, label, layerwise, lease",
        ),
        ({"chunk_tokens": 0}, "chunk_tokens"),
        ({"lease": 10, "load_timeout": 6}, r"lease=10 is below twice load_timeout=6; raise lease"),
        ({"cpu_bytes_to_use": 1}, "cpu_bytes_to_use=1 is the daemon's to decide; give it to `kvd"),
    ],
)
def test_wrong_options_are_named(extra: dict[str, object], named: str) -> None:
    """One sentence with the key, its value and the remedy."""
    with pytest.raises(OptionsError, match=named):
        read_options(extra)
