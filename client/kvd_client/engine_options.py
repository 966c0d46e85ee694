"""What every engine's adapter needs: its settings, and which weights the engine has loaded."""

import hashlib
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

RUNTIME_DIR = "KVD_RUNTIME_DIR"  # the daemon and its tools read it as well

Seconds = Annotated[float, Meta(gt=0, le=600)]
Label = Annotated[str, Meta(max_length=256)]

_DAEMON_KEYS = {
    "cpu_bytes_to_use": "`kvd serve --cpu-bytes`",
    "eviction_policy": "`kvd serve --policy`",
    "store_threshold": "`kvd serve --reuse-threshold`",
}


class OptionsError(ValueError):
    """An invalid setting; the engine prints the sentence and does not start."""


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine's settings about its daemon.

    Attributes:
        runtime_dir: the daemon's runtime directory; default: that of KVD_RUNTIME_DIR.
        required: fail at start where the daemon is not there or cannot serve this memory;
            otherwise the engine runs without offload until it can.
        deadline: seconds that the daemon may take for an answer; then it is treated as absent
            until it answers again.
        label: engines with different labels never share chunks.
    """

    runtime_dir: str = "/run/kvd"
    required: bool = False
    deadline: Seconds = 1.0
    label: Label = ""


OptionsT = TypeVar("OptionsT", bound=EngineOptions)


def convert_options(
    kind: type[OptionsT],
    extra: Mapping[str, Any],
    place: str,
    foreign: Collection[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> OptionsT:
    """Return the options of an engine's configuration.

    Args:
        kind: what the options are.
        extra: the configuration.
        place: its name, for messages.
        foreign: keys that are the engine's own to read.
        environment: of the process, for what is not configured.

    Raises:
        OptionsError: naming the key, its value and what is possible.
    """
    for key, where in _DAEMON_KEYS.items():
        if key in extra:
            raise OptionsError(
                f"{place}: {key}={extra[key]!r} is the daemon's to decide;"
                f" give it to {where} and remove it here"
            )
    own = {key: value for key, value in extra.items() if key not in foreign}
    if environment.get(RUNTIME_DIR):  # empty is not set, as for the daemon
        own.setdefault("runtime_dir", environment[RUNTIME_DIR])
    try:
        return msgspec.convert(own, kind, strict=True)
    except msgspec.ValidationError as error:
        known = ", ".join(sorted({*kind.__struct_fields__, *foreign}))
        raise OptionsError(f"{place} {own!r}: {error}; known keys: {known}") from error


# ------------------------------------------------------------------- identity

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
