"""Settings of SGLang's adapter; those of vLLM's are in tests/vllm."""

import pytest

from kvd_client.adapters import OptionsError
from kvd_client.sglang.pool_cache import SglangOptions, read_options


def test_what_is_given_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
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
def test_what_is_wrong_is_named(extra: dict[str, object], named: str) -> None:
    """One sentence with the key, its value and the remedy."""
    with pytest.raises(OptionsError, match=named):
        read_options(extra)
