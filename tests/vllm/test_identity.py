"""Which engines share chunks: what makes their identities differ."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from kvd_client import Fingerprint
from kvd_client.vllm.spec import fingerprint
from tests.vllm.configs import configured

HUB_MODEL = "org/name"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache on this machine, empty."""
    folder = tmp_path / "hub"
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(folder))
    return folder


def move(cache: Path, commit: str, revision: str = "main") -> None:
    """The hub's model is now at this commit, and was fetched."""
    ref = cache / "models--org--name" / "refs" / revision
    ref.parent.mkdir(parents=True, exist_ok=True)
    ref.write_text(commit)


def of_hub_model(
    folder: Path, revision: str | None = None, download_dir: Path | None = None
) -> Fingerprint:
    """The identity of an engine with a model of the hub's."""
    vllm_config, _, config = configured(folder)
    vllm_config.model_config.model = HUB_MODEL
    vllm_config.model_config.revision = revision
    vllm_config.load_config.download_dir = download_dir and str(download_dir)
    return fingerprint(config, vllm_config, "")


@pytest.mark.parametrize(
    ("revision", "moved", "changes"),
    [
        (None, ("hub", "main"), True),
        ("refs/pr/7", ("hub", "refs/pr/7"), True),
        ("refs/pr/7", ("hub", "main"), False),
        (None, ("weights", "main"), True),  # the weights' folder, download_dir
    ],
)
def test_another_commit_of_a_hubs_model_is_another_model(
    tmp_path: Path, cache: Path, revision: str | None, moved: tuple[str, str], changes: bool
) -> None:
    """The same name at a later commit has other weights; other names' commits change nothing."""
    weights = tmp_path / "weights"
    for folder in (cache, weights):
        for name in ("main", "refs/pr/7"):
            move(folder, "a" * 40, name)
    before = of_hub_model(tmp_path, revision, weights)
    place, name = moved
    move(tmp_path / place, "b" * 40, name)
    assert (of_hub_model(tmp_path, revision, weights) != before) is changes
    move(tmp_path / place, "a" * 40, name)
    assert of_hub_model(tmp_path, revision, weights) == before


@pytest.mark.parametrize(
    "change",
    [
        lambda config: setattr(config.model_config.hf_config, "rope_theta", 7.0),
        lambda config: setattr(config.model_config, "quantization", "fp8"),
        lambda config: setattr(config.model_config, "dtype", torch.float32),
        lambda config: setattr(config.cache_config, "prefix_caching_hash_algo", "sha256_cbor"),
        lambda config: setattr(config.load_config, "load_format", "dummy"),
    ],
    ids=["architecture", "quantization", "dtype", "hashes", "random weights"],
)
def test_engines_that_compute_otherwise_share_nothing(
    tmp_path: Path, change: Callable[[Any], None]
) -> None:
    """Whatever the KV's bytes or the keys depend on is in the identity; so is the label."""
    vllm_config, _, config = configured(tmp_path)
    before = fingerprint(config, vllm_config, "")
    assert fingerprint(config, vllm_config, "label") != before
    change(vllm_config)
    assert fingerprint(config, vllm_config, "") != before
