"""What an engine may be told: options, layout, identity; what is refused before it starts."""

import json
import logging
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import torch
import vllm
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvd_client import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_client.vllm import KvdConnector, OptionsError, VllmOptions
from kvd_client.vllm.layout import layout_line
from kvd_client.vllm.options import KV_LAYOUTS, VLLM_KEYS, read_options
from kvd_client.vllm.spec import fingerprint
from tests.processes import ROOT
from tests.vllm.configs import configured, engine_config

HUB_MODEL = "org/name"
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


def test_keys_of_either_side_are_taken() -> None:
    """Keys of kvd are read, the directory also from the environment; vLLM's own are let pass."""
    named = {"KVD_RUNTIME_DIR": "/run/other"}
    given = {
        "runtime_dir": "/run/mine",
        "deadline": 2,
        "events": False,
        "transfer": "staging",
        "staging_bytes": 2**30,
        **dict.fromkeys(VLLM_KEYS, "vLLM checks it"),
        "canonical_layout": False,
    }
    taken = VllmOptions(
        runtime_dir="/run/mine",
        deadline=2.0,
        events=False,
        transfer="staging",
        staging_bytes=2**30,
    )
    assert read_options(given, named) == taken
    assert read_options({}, named) == VllmOptions(runtime_dir="/run/other")
    assert read_options({}, {"KVD_RUNTIME_DIR": ""}) == VllmOptions(runtime_dir="/run/kvd")


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"runtime_dirs": "/run/kvd"}, ["runtime_dirs", "known keys", "runtime_dir,"]),
        ({"load_timeout": -3}, ["load_timeout", "> 0", "-3"]),
        ({"load_timeout": 31}, ["load_timeout=31", "store_timeout=30", "raise store_timeout"]),
        ({"required": "yes"}, ["required", "`bool`", "'yes'"]),
        ({"pending_timeout": float("nan")}, ["pending_timeout", "nan"]),
        ({"preemption_timeout": float("inf")}, ["preemption_timeout", "<= 600", "inf"]),
        ({"label": "x" * 257}, ["label", "<= 256"]),
        ({"transfer": "copy"}, ["transfer", "'copy'"]),
        ({"staging_bytes": 4096}, ["staging_bytes", ">= 1048576"]),
        ({"kv_layout": "HND"}, ["kv_layout='HND' is no layout of vLLM's", *KV_LAYOUTS]),
        ({"cpu_bytes_to_use": 1234}, ["cpu_bytes_to_use=1234", "kvd serve --cpu-bytes"]),
        ({"eviction_policy": "lru"}, ["eviction_policy", "kvd serve --policy"]),
        ({"store_threshold": 2}, ["store_threshold=2", "kvd serve --reuse-threshold"]),
    ],
)
def test_a_bad_setting_is_refused_in_one_sentence(extra: dict[str, Any], named: list[str]) -> None:
    """Unknown key, wrong type, value out of range: the sentence names it and what is possible."""
    with pytest.raises(OptionsError) as refused:
        read_options(extra)
    text = str(refused.value)
    assert "\n" not in text
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
        ("sha256", None, "0.32.1.dev3+g0123456", []),
        ("sha256", None, "0.33.1", []),
        ("sha256", None, "0.34.0", ["not tested with vLLM 0.34.0, only with vLLM 0.32 and 0.33"]),
        ("sha256", None, "0.320.0", ["install a tested release"]),
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
    expected = [*warned, f"no daemon answers in {runtime_dir}"]
    assert all(line.startswith("kvd: ") for line in lines)
    assert all(words in line for words, line in zip(expected, lines, strict=True))


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


# ----------------------------------------------------- the layout that vLLM is asked for


def unresolved(folder: Path) -> VllmConfig:
    """An engine's configuration before vLLM has decided about the layout."""
    config = engine_config(folder)
    config.cache_config.kv_cache_layout = None
    config.cache_config.user_specified_block_size = False
    return config


@pytest.mark.parametrize(
    ("model", "cache", "requested"),
    [
        ({}, {}, "BLHNC"),
        # Blocks that may have to be split into kernel blocks, which vLLM cannot cut from a row.
        ({}, {"block_size": 128, "user_specified_block_size": True}, None),
        ({}, {"block_size": 64, "user_specified_block_size": True}, "BLHNC"),
        ({}, {"block_size": 128}, "BLHNC"),
        # Recurrent states, latents, layers of several types.
        ({"is_hybrid": True}, {}, None),
        ({"use_mla": True}, {}, None),
        ({}, {"kv_cache_dtype_skip_layers": ["0"]}, None),
    ],
)
def test_a_block_of_all_layers_is_requested_where_vllm_can_make_it(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    model: dict[str, Any],
    cache: dict[str, Any],
    requested: str | None,
) -> None:
    """An explicit wish is passed on in any case, also that for none."""
    config = unresolved(tmp_path)
    for name, value in model.items():
        monkeypatch.setattr(type(config.model_config), name, value)
    for name, value in cache.items():
        setattr(config.cache_config, name, value)
    extra = config.kv_transfer_config.kv_connector_extra_config
    assert KvdConnector.get_required_kvcache_layout(config) == requested
    for wish, passed_on in (("auto", requested), ("LBNHC", "LBNHC"), ("none", None)):
        extra["kv_layout"] = wish
        assert KvdConnector.get_required_kvcache_layout(config) == passed_on


@pytest.mark.parametrize(
    ("taken", "requested", "backends", "remedy"),
    [
        ("LBNHC", None, [], "slow: set kv_layout=BLHNC in kv_connector_extra_config"),
        ("LBHNC", "BLHNC", ["X"], "backend X cannot use it; .*slow: choose one that can"),
        ("LBHNC", "BHLNC", [], "vLLM cannot use it for this model; .*slow: raise --block-size"),
        ("BLHNC", "BLHNC", [], "slow: raise --block-size"),
    ],
)
def test_small_fragments_come_with_a_remedy(
    taken: str, requested: str | None, backends: list[str], remedy: str
) -> None:
    """Which option to set, which backend, or larger blocks; none in host memory."""
    page = 8 * 1024
    tensors = tuple(TensorSpec(0, 2 * layer * page, page, page) for layer in range(4))
    group = GroupSpec(tuple(TensorRef(layer, page) for layer in range(4)), 16)
    layout = RankLayout(2, 1, 16, (8 * page,), tensors, (group,))
    line = layout_line(layout, taken, requested, backends, host=False)
    assert line.startswith(f"KV cache layout {taken}: fragments of 8 KiB, 4 a block")
    assert re.search(remedy, line)
    assert "slow" not in layout_line(layout, taken, requested, backends, host=True)


# ------------------------------------------------------------ which engines share chunks


def move(place: Path, commit: str, revision: str) -> None:
    """The hub's model is now at this commit, and was fetched to this place."""
    ref = place / "models--org--name" / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)


@pytest.mark.parametrize(
    ("revision", "place", "moved", "changes"),
    [
        (None, "hub", "main", True),
        ("refs/pr/7", "hub", "refs/pr/7", True),
        ("refs/pr/7", "hub", "main", False),
        (None, "weights", "main", True),  # the weights' folder, download_dir
    ],
)
def test_another_commit_of_a_hubs_model_is_another_model(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    revision: str | None,
    place: str,
    moved: str,
    changes: bool,
) -> None:
    """The same name at a later commit has other weights; other names' commits change nothing."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    for folder in ("hub", "weights"):
        for name in ("main", "refs/pr/7"):
            move(tmp_path / folder, "a" * 40, name)
    vllm_config, _, config = configured(tmp_path)
    vllm_config.model_config.model = HUB_MODEL
    vllm_config.model_config.revision = revision
    vllm_config.load_config.download_dir = str(tmp_path / "weights")
    before = fingerprint(config, vllm_config, "")
    move(tmp_path / place, "b" * 40, moved)
    assert (fingerprint(config, vllm_config, "") != before) is changes
    move(tmp_path / place, "a" * 40, moved)
    assert fingerprint(config, vllm_config, "") == before


@pytest.mark.parametrize(
    ("place", "value"),
    [
        ("model_config.hf_config.rope_theta", 7.0),
        ("model_config.quantization", "fp8"),
        ("model_config.dtype", torch.float32),
        ("cache_config.prefix_caching_hash_algo", "sha256_cbor"),
        ("load_config.load_format", "dummy"),  # random weights
    ],
)
def test_engines_that_compute_otherwise_share_nothing(
    tmp_path: Path, place: str, value: object
) -> None:
    """Whatever the KV's bytes or the keys depend on is in the identity; so is the label."""
    vllm_config, _, config = configured(tmp_path)
    before = fingerprint(config, vllm_config, "")
    assert fingerprint(config, vllm_config, "label") != before
    holder, _, name = place.rpartition(".")
    setattr(attrgetter(holder)(vllm_config), name, value)
    assert fingerprint(config, vllm_config, "") != before
