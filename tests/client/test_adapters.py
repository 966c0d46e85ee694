"""Adapters without their engines: hints of requests, SGLang's options and pages, vLLM's plug-in."""

import math
import subprocess
import sys
from pathlib import Path
from textwrap import dedent
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_client import Label
from kvd_client.adapters import Hint, OptionsError, read_hint
from kvd_client.sglang.pages import (
    cached_pages,
    cached_prefix,
    split_into_chunks,
    window_ends,
)
from kvd_client.sglang.pool_cache import SglangOptions, read_options
from kvd_client.tickets import BlockRange


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


BAD_OPTIONS: list[tuple[dict[str, object], str]] = [
    (
        {"lod_timeout": 1},
        "lod_timeout.*known keys: chunk_tokens, deadline, label, layerwise, lease",
    ),
    ({"chunk_tokens": 0}, "chunk_tokens"),
    ({"lease": 10, "load_timeout": 6}, r"lease=10 is below twice load_timeout=6; raise lease"),
    ({"cpu_bytes_to_use": 1}, "cpu_bytes_to_use=1 is the daemon's to decide; give it to `kvd"),
]


def test_options_are_taken_or_named_by_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """An error is one sentence with the key, its value and the remedy.

    Options that are left out have their defaults; the directory is the environment's.
    """
    monkeypatch.setenv("KVD_RUNTIME_DIR", "/run/other")
    assert read_options({"load_timeout": 5}) == SglangOptions(
        runtime_dir="/run/other", load_timeout=5.0
    )
    assert read_options({"runtime_dir": "/run/this"}).runtime_dir == "/run/this"
    monkeypatch.delenv("KVD_RUNTIME_DIR")
    assert read_options(None) == SglangOptions()
    for extra, named in BAD_OPTIONS:
        with pytest.raises(OptionsError, match=named):
            read_options(extra)


PAGES = 40
KEYS = [bytes([page]) * 32 for page in range(PAGES)]


@given(
    pages_per_chunk=st.integers(1, 8),
    nodes=st.lists(st.tuples(st.integers(0, PAGES - 1), st.integers(1, PAGES)), max_size=8),
    at=st.integers(0, PAGES - 1),
)
def test_pages_are_found_where_a_node_with_them_was_stored(
    pages_per_chunk: int, nodes: list[tuple[int, int]], at: int
) -> None:
    """From wherever a lookup starts, its runs are all pages up to the first gap, in order."""
    blocks: dict[bytes, BlockRange] = {}  # of chunks, as the directory has them
    content: dict[tuple[bytes, int], int] = {}
    stored: set[int] = set()
    for first, count in nodes:
        end = min(first + count, PAGES)
        stored.update(range(first, end))
        for run in split_into_chunks(KEYS[first:end], pages_per_chunk):
            if blocks.get(run.key, (pages_per_chunk, 0))[0] > run.block:
                blocks[run.key] = run.blocks
                for i in range(run.num_pages):
                    content[run.key, run.block + i] = first + run.page + i
    is_cached = cached_pages(KEYS, pages_per_chunk, blocks.get)
    assert {page for page in range(PAGES) if is_cached[page]} == stored
    runs = cached_prefix(KEYS[at:], pages_per_chunk, blocks.get)
    gap = next((page for page in range(at, PAGES) if page not in stored), PAGES)
    read = [content[run.key, run.block + i] for run in runs for i in range(run.num_pages)]
    assert read == list(range(at, gap))
    assert [at + run.page for run in runs] == [content[run.key, run.block] for run in runs]


@given(st.lists(st.booleans(), max_size=30), st.integers(1, 8))
def test_windows_end_where_their_pages_are(is_cached: list[bool], size: int) -> None:
    """A length counts where its last pages are there, all of them where it is shorter."""
    expected = {n for n in range(1, len(is_cached) + 1) if all(is_cached[max(0, n - size) : n])}
    assert window_ends(is_cached, size) == expected


FACTORY = "vllm/distributed/kv_transfer/kv_connector/factory.py"
FACTORY_SOURCE = """
    class KVConnectorFactory:
        taken = []
        @classmethod
        def register_connector(cls, name, module_path, class_name):
            if cls.taken:
                raise ValueError(f"Connector '{name}' is already registered.")
            cls.taken.append((name, module_path, class_name))
    """


def run_with_vllm(folder: Path, program: str, factory: str = FACTORY_SOURCE) -> str:
    """What a process prints, with such a vLLM; it ends well."""
    root = folder / "vllm"
    file = folder / FACTORY
    file.parent.mkdir(parents=True)
    for package in [parent for parent in file.parents if root in (parent, *parent.parents)]:
        (package / "__init__.py").touch()
    (root / "__init__.py").write_text("__version__ = '0.11.2'\n")
    file.write_text(dedent(factory))
    ended = subprocess.run(
        [sys.executable, "-c", dedent(program)],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout + ended.stderr


def test_the_factory_learns_the_name_once(tmp_path: Path) -> None:
    """Each of vLLM's processes may run the plug-in again, which imports no client."""
    out = run_with_vllm(
        tmp_path,
        """
        import sys
        from kvd_vllm_plugin import register
        register()
        register()
        assert "kvd_client" not in sys.modules
        from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
        print(KVConnectorFactory.taken)
        """,
    )
    assert out.strip() == "[('KvdConnector', 'kvd_client.vllm', 'KvdConnector')]"


@pytest.mark.parametrize(
    "factory",
    ["", "class KVConnectorFactory:\n    register_connector = 1", "import no_such_module"],
)
def test_a_factory_of_another_kind_stops_nobody(tmp_path: Path, factory: str) -> None:
    """An engine that does not use kvd starts; one line says how the connector is named instead."""
    out = run_with_vllm(tmp_path, "from kvd_vllm_plugin import register; register()", factory)
    assert '"kv_connector_module_path": "kvd_client.vllm"' in out


def test_a_vllm_that_cannot_work_is_named_in_one_sentence(tmp_path: Path) -> None:
    """Not an ImportError: the release, what it lacks, the tested ones, and what to do."""
    out = run_with_vllm(
        tmp_path,
        """
        from kvd_client import UnsupportedVllm
        try:
            import kvd_client.vllm
        except UnsupportedVllm as error:
            assert error.__suppress_context__
            print(error)
        """,
    )
    (line,) = out.splitlines()
    assert line.startswith("kvd's connector cannot work with vLLM 0.11.2: ")
    assert "vllm." in line
    assert "it was tested with vLLM 0.32 and 0.33: install one of these, or leave --kv-tr" in line
