"""The settings under `kv_connector_extra_config`, checked before the engine starts."""

import os
from collections.abc import Mapping
from typing import Annotated, Any

import msgspec
from msgspec import Meta

RUNTIME_DIR = "KVD_RUNTIME_DIR"  # the daemon and its tools read it as well

Seconds = Annotated[float, Meta(gt=0, le=600)]

# Settings of vLLM's own scheduler logic, which it reads and checks itself.
VLLM_KEYS = frozenset(
    {
        *("blocks_per_chunk", "block_size", "offload_prompt_only", "self_describing_kv_events"),
        *("canonical_layout", "spec_name", "spec_module_path"),
    }
)
# vLLM's names of layouts, by what is outermost; `wish.py` says what they mean.
KV_LAYOUTS = ("auto", "none", "BLHNC", "BLNHC", "BHLNC", "LBHNC", "LBNHC", "LHBNC")
_DAEMON_KEYS = {
    "cpu_bytes_to_use": "`kvd serve --cpu-bytes`",
    "eviction_policy": "`kvd serve --policy`",
    "store_threshold": "`kvd serve --reuse-threshold`",
}


class OptionsError(ValueError):
    """An invalid setting; vLLM prints the sentence and does not start."""


class Options(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine's settings about its daemon.

    Attributes:
        runtime_dir: the daemon's runtime directory; default: that of KVD_RUNTIME_DIR.
        required: fail at start where the daemon is not there or cannot serve this memory;
            otherwise the engine runs without offload until it can.
        deadline: seconds that the daemon may take for an answer; then it is treated as absent
            until it answers again.
        load_timeout: seconds after which a load is stopped and its request computed instead.
        store_timeout: seconds after which a store is given up; at least load_timeout.
        preemption_timeout: seconds that the engine waits for a store whose blocks it reuses;
            then the store is void.
        pending_timeout: seconds that a request waits for chunks that are just being stored, or come
            from a tier below the daemon's memory.
        seek_timeout: seconds that a request waits for shared tiers to say whether they have chunks
            of which nobody knows.
        label: engines with different labels never share chunks.
        kv_layout: the physical layout of the KV cache that vLLM is asked for: one of its names;
            auto: with all layers of a block side by side, where no block has to be split; none:
            vLLM's own choice.
        events: publish what is in the pool among the engine's KV events, where vLLM publishes such;
            false: the daemon does it for this engine.
    """

    runtime_dir: str = "/run/kvd"
    required: bool = False
    deadline: Seconds = 1.0
    load_timeout: Seconds = 3.0
    store_timeout: Seconds = 30.0
    preemption_timeout: Seconds = 2.0
    pending_timeout: Seconds = 1.0
    seek_timeout: Seconds = 0.05
    label: Annotated[str, Meta(max_length=256)] = ""
    kv_layout: str = "auto"
    events: bool = True


def read_options(extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Options:
    """Return the options in `kv_connector_extra_config`.

    Args:
        extra: the configuration.
        environment: of the process, for what is not configured.

    Raises:
        OptionsError: naming the key, its value and what is possible.
    """
    for key, place in _DAEMON_KEYS.items():
        if key in extra:
            raise OptionsError(
                f"kv_connector_extra_config: {key}={extra[key]!r} is the daemon's to decide;"
                f" give it to {place} and remove it here"
            )
    if extra.get("canonical_layout"):
        raise OptionsError(
            "kv_connector_extra_config: canonical_layout=true is not supported; remove it"
        )
    own = {key: value for key, value in extra.items() if key not in VLLM_KEYS}
    if environment.get(RUNTIME_DIR):  # empty is not set, as for the daemon
        own.setdefault("runtime_dir", environment[RUNTIME_DIR])
    try:
        options = msgspec.convert(own, Options, strict=True)
    except msgspec.ValidationError as error:
        known = ", ".join(sorted({*Options.__struct_fields__, *VLLM_KEYS}))
        raise OptionsError(
            f"kv_connector_extra_config {own!r}: {error}; known keys: {known}"
        ) from error
    if options.kv_layout not in KV_LAYOUTS:
        raise OptionsError(
            f"kv_connector_extra_config: kv_layout={options.kv_layout!r} is no layout of vLLM's;"
            f" known are {', '.join(KV_LAYOUTS)}"
        )
    if options.load_timeout > options.store_timeout:  # which is the lane's limit for every job
        raise OptionsError(
            f"kv_connector_extra_config: load_timeout={options.load_timeout:g} is above"
            f" store_timeout={options.store_timeout:g}; raise store_timeout as well"
        )
    return options
