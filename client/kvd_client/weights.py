"""Which weights an engine has loaded, as far as files can say."""

import hashlib
import json
from pathlib import Path
from typing import Any

_WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def weight_files(model: str) -> list[Any]:
    """Return names, sizes and times of a local model's weight files."""
    folder = Path(model)
    if not folder.is_dir():
        return []
    files = sorted(file for pattern in _WEIGHTS for file in folder.glob(pattern))
    return [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]


def hub_commits(model: str, revision: str | None, download_dir: str | None) -> list[str]:
    """Return the commits of a hub's model in the caches that its files were read from."""
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415  # engines have it

    caches = {HF_HUB_CACHE, download_dir or HF_HUB_CACHE}
    folder = "models--" + model.replace("/", "--")
    refs = [Path(cache, folder, "refs", revision or "main") for cache in sorted(caches)]
    return [ref.read_text() for ref in refs if ref.is_file()]


def digest(*parts: Any) -> str:
    """Return 32 hex digits that are equal where all parts are."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
