"""What an engine may be told about its daemon, and what is refused before it starts."""

import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvd_client.vllm import KvdConnector, OptionsError, VllmOptions
from kvd_client.vllm.options import (
    VLLM_KEYS,
    read_options,
    untested_warning,
)
from tests.vllm.configs import configured
from tests.vllm.support import ROOT

DOCUMENTS = (
    "docs/vllm.md",
    "docker/compose.yaml",
    "deploy/kubernetes/engine.yaml",
    "deploy/kubernetes/sidecar.yaml",
)


@pytest.fixture(autouse=True)
def logger() -> Iterator[logging.Logger]:
    """The logger of kvd; the connector changes it, which must not outlive a test."""
    ours = logging.getLogger("kvd_client")
    before = (list(ours.handlers), ours.level, ours.propagate)
    yield ours
    ours.handlers[:], ours.propagate = before[0], before[2]
    ours.setLevel(before[1])


def refusal(extra: dict[str, Any]) -> str:
    """The one sentence that these settings are refused with."""
    with pytest.raises(OptionsError) as refused:
        read_options(extra)
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_defaults() -> None:
    """Without settings the engine runs with a daemon at /run/kvd, or without one."""
    assert read_options({}, {}) == VllmOptions(
        runtime_dir="/run/kvd",
        required=False,
        deadline=1.0,
        load_timeout=3.0,
        store_timeout=30.0,
        preemption_timeout=2.0,
        pending_timeout=1.0,
        label="",
        kv_layout="auto",
        events=True,
    )


def test_the_environment_names_the_daemon_where_the_configuration_does_not() -> None:
    """KVD_RUNTIME_DIR is read as the daemon reads it: an empty one is not set."""
    named = {"KVD_RUNTIME_DIR": "/run/other"}
    assert read_options({}, named).runtime_dir == "/run/other"
    assert read_options({"runtime_dir": "/run/mine"}, named).runtime_dir == "/run/mine"
    assert read_options({}, {"KVD_RUNTIME_DIR": ""}).runtime_dir == "/run/kvd"


def test_every_key_of_either_side_is_taken() -> None:
    """Keys of kvd are read, whole numbers as seconds too; keys of vLLM's own logic are let pass."""
    given = {
        "runtime_dir": "/run/other",
        "required": True,
        "deadline": 2,
        "load_timeout": 600,
        "store_timeout": 600,
        "label": "blue",
        "events": False,
        **dict.fromkeys(VLLM_KEYS, "vLLM checks it"),
        "canonical_layout": False,
    }
    options = read_options(given)
    assert (options.runtime_dir, options.required, options.label) == ("/run/other", True, "blue")
    assert (options.deadline, options.load_timeout) == (2.0, 600.0)
    assert not options.events


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"runtime_dirs": "/run/kvd"}, ["runtime_dirs", "known keys", "runtime_dir,"]),
        ({"runtime_dir": 7}, ["runtime_dir", "`str`", "7"]),
        ({"required": "yes"}, ["required", "`bool`", "'yes'"]),
        ({"deadline": "1"}, ["deadline", "`float`", "'1'"]),
        ({"deadline": True}, ["deadline", "`float`", "True"]),
        ({"deadline": 0}, ["deadline", "> 0", "0"]),
        ({"load_timeout": -3}, ["load_timeout", "> 0", "-3"]),
        ({"load_timeout": 31}, ["load_timeout=31", "store_timeout=30", "raise store_timeout"]),
        ({"store_timeout": 601}, ["store_timeout", "<= 600", "601"]),
        ({"pending_timeout": float("nan")}, ["pending_timeout", "nan"]),
        ({"preemption_timeout": float("inf")}, ["preemption_timeout", "<= 600", "inf"]),
        ({"label": "x" * 257}, ["label", "<= 256"]),
        ({"label": None}, ["label", "`str`", "None"]),
        ({"events": "no"}, ["events", "`bool`", "'no'"]),
        ({"cpu_bytes_to_use": 1234}, ["cpu_bytes_to_use=1234", "kvd serve --cpu-bytes"]),
        ({"eviction_policy": "lru"}, ["eviction_policy", "kvd serve --policy"]),
        ({"store_threshold": 2}, ["store_threshold=2", "kvd serve --reuse-threshold"]),
    ],
)
def test_a_bad_setting_is_refused_in_one_sentence(extra: dict[str, Any], named: list[str]) -> None:
    """Unknown key, wrong type, value out of range: the sentence names it and what is possible."""
    text = refusal(extra)
    assert [part for part in named if part not in text] == []


def connector(
    folder: Path, role: KVConnectorRole = KVConnectorRole.SCHEDULER, **engine: Any
) -> KvdConnector:
    """A connector as vLLM makes it, of such an engine."""
    vllm_config, kv_cache_config, _ = configured(folder, **engine)
    return KvdConnector(vllm_config, role, kv_cache_config)


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
@pytest.mark.parametrize(
    ("engine", "named"),
    [
        ({"extra": {"deadlines": 1.0}}, "deadlines"),
        # A cache miss would be a failed request.
        ({"failure_policy": "fail"}, 'set kv_load_failure_policy="recompute"'),
        # A layout of the pool's bytes that kvd does not write is not silently ignored.
        ({"extra": {"canonical_layout": True}}, "canonical_layout=true"),
    ],
)
def test_what_kvd_cannot_do_stops_the_engine_in_every_process(
    tmp_path: Path, role: KVConnectorRole, engine: dict[str, Any], named: str
) -> None:
    """Scheduler and ranks both refuse it."""
    with pytest.raises(OptionsError, match=named):
        connector(tmp_path, role, **engine)


def test_vllms_own_connector_is_refused(tmp_path: Path) -> None:
    """OffloadingConnector makes the spec without vllm_config, and would stop at a failed job."""
    spec = {"spec_name": "KvdOffloadingSpec", "spec_module_path": "kvd_client.vllm"}
    vllm_config, kv_cache_config, _ = configured(tmp_path, extra=spec)
    with pytest.raises(OptionsError, match="OffloadingConnector") as refused:
        OffloadingConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
    assert 'kv_connector="KvdConnector"' in str(refused.value)


@pytest.mark.parametrize(
    ("algorithm", "seed", "version", "warned"),
    [
        ("sha256", None, vllm.__version__, []),
        ("xxhash", None, vllm.__version__, ["prefix_caching_hash_algo=xxhash is seeded anew"]),
        ("xxhash_cbor", "0", vllm.__version__, []),
        ("sha256", None, "0.33.1", ["not tested with vLLM 0.33.1, only with vLLM 0.32"]),
    ],
)
def test_the_scheduler_starts_with_a_line_for_each_thing_that_is_not_as_it_should_be(
    tmp_path: Path,
    runtime_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    algorithm: str,
    seed: str | None,
    version: str,
    warned: list[str],
) -> None:
    """An absent daemon, hashes without a seed, an untested vLLM; the ranks do not repeat it."""
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    if seed is not None:
        monkeypatch.setenv("PYTHONHASHSEED", seed)
    monkeypatch.setattr("kvd_client.vllm.connector._log_as_vllm_does", lambda: None)
    monkeypatch.setattr(vllm, "__version__", version)
    extra = {"runtime_dir": str(runtime_dir), "blocks_per_chunk": 4}
    for role in KVConnectorRole:
        connector(tmp_path, role, extra=extra, hash_algorithm=algorithm).shutdown()
    lines = [record.getMessage() for record in caplog.records if "kvd" in record.name]
    wanted = [*warned, f"no daemon answers in {runtime_dir}"]
    assert len(lines) == len(wanted)
    assert all(line.startswith("kvd: ") for line in lines)
    assert all(words in line for words, line in zip(wanted, lines, strict=True))


@pytest.mark.parametrize("version", ["0.31.0", "0.33.1", "1.32.0", "dev", "0.320.0"])
def test_an_untested_release_is_named(version: str) -> None:
    """One sentence: which it is, which are tested, what to do."""
    text = untested_warning(version)
    assert f"not tested with vLLM {version}, only with vLLM 0.32;" in text
    assert "install a tested release" in text


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_the_documents_give_is_three_keys_and_options_that_exist(document: str) -> None:
    """Every configuration that a reader can copy is one that the connector takes."""
    text = (ROOT / document).read_text()
    given = re.findall(
        r"""--kv-transfer-config[\s'>-]*(\{.*?\})(?:'|\n *[a-z#-])""", text, re.DOTALL
    )
    assert given
    for config in map(json.loads, given):
        extra = config.pop("kv_connector_extra_config", {})
        assert config == {
            "kv_connector": "KvdConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
        read_options(extra, {})
