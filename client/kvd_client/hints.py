"""Labels from what requests carry. Pure: nothing here raises, whatever a request has.

A request may carry two things:

- `kvd` in its `kv_transfer_params`, an object with any of `continues`, `resume_in_s`, `one_shot`,
  `session_final` and `cache_control`;
- an envelope of KV hints, as vLLM and SGLang define it: `protocol_version`, `message_id` and
  `actions`, each with `action_type`, `action_version` and `payload`. Two types of action are known:
  `kv.retain` (how long to keep) and `kv.deref` (no longer needed).

What is not known or has the wrong type is ignored and counted; a number out of range is cut and
counted. Of both the `kvd` object counts first, and "done" before any time.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from kvd_proto.messages import MAX_SECONDS, Label, label_for

_TTL_SECONDS = {"5m": 300, "1h": 3600}  # Anthropic's and Dynamo's `cache_control`
_VERSIONS = ("0", "1")  # major numbers of envelopes


@dataclass(slots=True)
class Hint:
    """What a request's hints say.

    Attributes:
        label: of the request.
        given: whether the request has a hint, valid or not.
        ignored: fields and actions that are not known, of an unknown version, or of a wrong type.
        cut: numbers that were out of range.
    """

    label: Label = Label.NONE
    given: bool = False
    ignored: int = 0
    cut: int = 0


def read_hint(transfer_params: object, envelope: object = None) -> Hint:
    """Return the hint of a request.

    Args:
        transfer_params: its `kv_transfer_params`; other keys than `kvd` are others' business.
        envelope: its KV hints, an object with the attributes above; None: none.
    """
    hint = Hint()
    params = transfer_params.get("kvd") if isinstance(transfer_params, dict) else None
    labels = []
    if params is not None:
        hint.given = True
        labels.append(_read_fields(params, hint))
    if envelope is not None:
        hint.given = True
        labels.append(_read_envelope(envelope, hint))
    hint.label = next((label for label in labels if label is not Label.NONE), Label.NONE)
    return hint


def _read_fields(params: object, hint: Hint) -> Label:
    """Return the label that the fields of a `kvd` object say."""
    if not isinstance(params, dict):
        hint.ignored += 1
        return Label.NONE
    hint.ignored += len(params.keys() - _FIELDS.keys())
    return _strongest(
        [read(params[name], hint) for name, read in _FIELDS.items() if name in params]
    )


def _read_envelope(envelope: object, hint: Hint) -> Label:
    """Return the label that the envelope's actions say."""
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
    """Of several labels DONE counts, else the first that says anything."""
    if Label.DONE in labels:
        return Label.DONE
    return next((label for label in labels if label is not Label.NONE), Label.NONE)


# ------------------------------------------------------------------- fields


def _unknown(value: object, hint: Hint) -> Label:
    del value
    hint.ignored += 1
    return Label.NONE


def _done_if(wanted: bool) -> Callable[[object, Hint], Label]:
    """Return the reader of a flag that means DONE where it has this value."""

    def read(value: object, hint: Hint) -> Label:
        if not isinstance(value, bool):
            return _unknown(value, hint)
        return Label.DONE if value is wanted else Label.NONE

    return read


def _seconds(value: object, hint: Hint) -> Label:
    """Return the label of a number of seconds."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return _unknown(value, hint)
    if isinstance(value, float) and math.isnan(value):
        return _unknown(value, hint)
    inside = min(max(value, 0), MAX_SECONDS)
    hint.cut += inside != value
    return label_for(inside)


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


def _deref(payload: object, hint: Hint) -> Label:
    del payload, hint
    return Label.DONE


_ACTIONS: dict[str, Callable[[object, Hint], Label]] = {"kv.retain": _retain, "kv.deref": _deref}
