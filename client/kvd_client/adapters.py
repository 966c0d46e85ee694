"""What the adapters of all engines share: options, the model's identity, and a request's hints.

A request may carry hints in two places:

- `kvd` in its `kv_transfer_params`, an object with any of `continues`, `resume_in_s`, `one_shot`,
  `session_final` and `cache_control`;
- an envelope of KV hints, as vLLM and SGLang define it: `protocol_version`, `message_id` and
  `actions`, each with `action_type`, `action_version` and `payload`. Two types of action are known:
  `kv.retain` (how long to keep) and `kv.deref` (no longer needed).

The `kvd` object counts first, and "done" before any time. Unknown fields and values of a wrong type
are ignored and counted; numbers out of range are clamped and counted. Reading hints never raises.
"""

import hashlib
import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta

from kvd_client.routes import AUTO, MIN_STAGING_BYTES, Transfer
from kvd_client.staging_layout import DEFAULT_STAGING_BYTES
from kvd_proto.messages import MAX_SECONDS, Label, label_for

RUNTIME_DIR = "KVD_RUNTIME_DIR"  # the daemon and its tools read it as well

Seconds = Annotated[float, Meta(gt=0, le=600)]
LabelText = Annotated[str, Meta(max_length=256)]

_DAEMON_KEYS = {
    "cpu_bytes_to_use": "`kvd serve --cpu-bytes`",
    "eviction_policy": "`kvd serve --policy`",
    "store_threshold": "`kvd serve --reuse-threshold`",
}


class OptionsError(ValueError):
    """An invalid option; the engine prints the text and does not start."""


class EngineOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine's options for kvd.

    Attributes:
        runtime_dir: the daemon's runtime directory; default: that of KVD_RUNTIME_DIR.
        required: fail at start if there is no daemon, or it cannot serve this memory; otherwise
            the engine runs without offload until it can.
        deadline: seconds to wait for an answer of the daemon; then it counts as absent until it
            answers again.
        label: engines with different labels never share chunks.
        transfer: export: the daemon maps this engine's KV memory. staging: each rank copies its KV
            through host memory that the daemon maps. auto: export, or staging where the memory
            cannot be exported.
        staging_bytes: of host memory for staging, of each rank (of each of its pools in SGLang).
    """

    runtime_dir: str = "/run/kvd"
    required: bool = False
    deadline: Seconds = 1.0
    label: LabelText = ""
    transfer: Transfer = AUTO
    staging_bytes: Annotated[int, Meta(ge=MIN_STAGING_BYTES)] = DEFAULT_STAGING_BYTES


OptionsT = TypeVar("OptionsT", bound=EngineOptions)


def convert_options(
    kind: type[OptionsT],
    extra: Mapping[str, Any],
    section: str,
    foreign: Collection[str] = (),
    environment: Mapping[str, str] = os.environ,
) -> OptionsT:
    """Return the options in an engine's configuration.

    Args:
        kind: the type of options to return.
        extra: the configuration.
        section: its name, for messages.
        foreign: keys that the engine itself reads.
        environment: of the process, for options that are not configured.

    Raises:
        OptionsError: an invalid option; the text has the key, its value and what is possible.
    """
    for key, daemon_option in _DAEMON_KEYS.items():
        if key in extra:
            raise OptionsError(
                f"{section}: {key}={extra[key]!r} is the daemon's to decide;"
                f" give it to {daemon_option} and remove it here"
            )
    options = {key: value for key, value in extra.items() if key not in foreign}
    if environment.get(RUNTIME_DIR):  # empty is not set, as for the daemon
        options.setdefault("runtime_dir", environment[RUNTIME_DIR])
    try:
        return msgspec.convert(options, kind, strict=True)
    except msgspec.ValidationError as error:
        known = ", ".join(sorted({*kind.__struct_fields__, *foreign}))
        raise OptionsError(f"{section} {options!r}: {error}; known keys: {known}") from error


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
    """Return the commits of a hub's model in the caches from which its files were read."""
    from huggingface_hub.constants import HF_HUB_CACHE  # noqa: PLC0415  # engines have it

    caches = {HF_HUB_CACHE, download_dir or HF_HUB_CACHE}
    folder = "models--" + model.replace("/", "--")
    refs = [Path(cache, folder, "refs", revision or "main") for cache in sorted(caches)]
    return [ref.read_text() for ref in refs if ref.is_file()]


def digest(*parts: Any) -> str:
    """Return 32 hex digits, which are equal if all parts are equal."""
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


# ----------------------------------------------------------------------- hints

_TTL_SECONDS = {"5m": 300, "1h": 3600}  # Anthropic's and Dynamo's `cache_control`
_VERSIONS = ("0", "1")  # major numbers of envelopes


@dataclass(slots=True)
class Hint:
    """The hints of one request.

    Attributes:
        label: of the request.
        is_present: whether the request has a hint, valid or not.
        ignored: number of fields and actions of an unknown name or version, or of a wrong type.
        cut: number of values that were clamped.
    """

    label: Label = Label.NONE
    is_present: bool = False
    ignored: int = 0
    cut: int = 0


def read_hint(transfer_params: object, envelope: object = None) -> Hint:
    """Return the hint of a request.

    Args:
        transfer_params: its `kv_transfer_params`; only the key `kvd` is read.
        envelope: its KV hints, an object with the attributes above; None: none.
    """
    hint = Hint()
    params = transfer_params.get("kvd") if isinstance(transfer_params, dict) else None
    labels = []
    if params is not None:
        hint.is_present = True
        labels.append(_read_fields(params, hint))
    if envelope is not None:
        hint.is_present = True
        labels.append(_read_envelope(envelope, hint))
    hint.label = next((label for label in labels if label is not Label.NONE), Label.NONE)
    return hint


def _read_fields(params: object, hint: Hint) -> Label:
    """Return the label of the fields of a `kvd` object."""
    if not isinstance(params, dict):
        hint.ignored += 1
        return Label.NONE
    hint.ignored += len(params.keys() - _FIELDS.keys())
    return _strongest(
        [read(params[name], hint) for name, read in _FIELDS.items() if name in params]
    )


def _read_envelope(envelope: object, hint: Hint) -> Label:
    """Return the label of the envelope's actions."""
    actions = getattr(envelope, "actions", None)
    if not _known_version(getattr(envelope, "protocol_version", None), _VERSIONS):
        hint.ignored += 1
        return Label.NONE
    if not isinstance(actions, (list, tuple)):
        hint.ignored += 1
        return Label.NONE
    labels = []
    for action in actions:
        kind = getattr(action, "action_type", None)
        read = _ACTIONS.get(kind) if isinstance(kind, str) else None
        if read is None or not _known_version(getattr(action, "action_version", None), ("1",)):
            hint.ignored += 1
            continue
        labels.append(read(getattr(action, "payload", None), hint))
    return _strongest(labels)


def _known_version(version: object, majors: tuple[str, ...]) -> bool:
    return isinstance(version, str) and version.partition(".")[0] in majors


def _strongest(labels: list[Label]) -> Label:
    """Return DONE if it is among the labels, else the first that is not NONE."""
    if Label.DONE in labels:
        return Label.DONE
    return next((label for label in labels if label is not Label.NONE), Label.NONE)


# ------------------------------------------------------------------- fields


def _unknown(_: object, hint: Hint) -> Label:
    hint.ignored += 1
    return Label.NONE


def _done_if(expected: bool) -> Callable[[object, Hint], Label]:
    """Return the reader of a flag that means DONE if it has this value."""

    def read(value: object, hint: Hint) -> Label:
        if not isinstance(value, bool):
            return _unknown(value, hint)
        return Label.DONE if value is expected else Label.NONE

    return read


def _seconds(value: object, hint: Hint) -> Label:
    """Return the label of a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _unknown(value, hint)
    if isinstance(value, float) and math.isnan(value):
        return _unknown(value, hint)
    clamped = min(max(value, 0), MAX_SECONDS)
    hint.cut += clamped != value
    return label_for(clamped)


def _cache_control(value: object, hint: Hint) -> Label:
    """Return the label of `{"type": "ephemeral", "ttl": "5m"}`; the default of `ttl` is 5m."""
    if not isinstance(value, dict) or value.get("type", "ephemeral") != "ephemeral":
        return _unknown(value, hint)
    ttl = value.get("ttl", "5m")
    seconds = _TTL_SECONDS.get(ttl) if isinstance(ttl, str) else None
    return _unknown(value, hint) if seconds is None else label_for(seconds)


_FIELDS: dict[str, Callable[[object, Hint], Label]] = {
    "continues": _done_if(False),
    "one_shot": _done_if(True),
    "session_final": _done_if(True),
    "resume_in_s": _seconds,
    "cache_control": _cache_control,
}


# ------------------------------------------------------------------ actions


def _retain(payload: object, hint: Hint) -> Label:
    """Return the label of `ttl_seconds`, or of the longest `duration` of its `directives`."""
    if not isinstance(payload, dict):
        return _unknown(payload, hint)
    if "ttl_seconds" in payload:
        return _seconds(payload["ttl_seconds"], hint)
    directives = payload.get("directives")
    if not isinstance(directives, (list, tuple)):
        return _unknown(payload, hint)
    durations = [item.get("duration") for item in directives if isinstance(item, dict)]
    labels = [_seconds(duration, hint) for duration in durations if duration is not None]
    return max(labels, default=Label.NONE)


def _deref(*_: object) -> Label:
    return Label.DONE


_ACTIONS: dict[str, Callable[[object, Hint], Label]] = {"kv.retain": _retain, "kv.deref": _deref}
