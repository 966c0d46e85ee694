"""The settings under `kv_connector_extra_config`, checked before the engine starts."""

import os
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from kvd_client.engine_options import EngineOptions, OptionsError, Seconds, convert_options
from kvd_client.errors import UnsupportedVllm

# Settings of vLLM's own scheduler logic, which it reads and checks itself.
VLLM_KEYS = frozenset(
    {
        *("blocks_per_chunk", "block_size", "offload_prompt_only", "self_describing_kv_events"),
        *("canonical_layout", "spec_name", "spec_module_path"),
    }
)
# vLLM's names of layouts, by what is outermost; `wish.py` says what they mean.
KV_LAYOUTS = ("auto", "none", "BLHNC", "BLNHC", "BHLNC", "LBHNC", "LBNHC", "LHBNC")


class Options(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine's settings about its daemon; those of every engine are in `EngineOptions`.

    Attributes:
        load_timeout: seconds after which a load is stopped and its request computed instead.
        store_timeout: seconds after which a store is given up; at least load_timeout.
        preemption_timeout: seconds that the engine waits for a store whose blocks it reuses;
            then the store is void.
        pending_timeout: seconds that a request waits for chunks that are just being stored, or come
            from a tier below the daemon's memory.
        seek_timeout: seconds that a request waits for shared tiers to say whether they have chunks
            of which nobody knows.
        kv_layout: the physical layout of the KV cache that vLLM is asked for: one of its names;
            auto: with all layers of a block side by side, where no block has to be split; none:
            vLLM's own choice.
        events: publish what is in the pool among the engine's KV events, if vLLM publishes any.
        repeat_events: seconds in which everything in the pool is published once more, for routers
            that came late or have lost events; 0: never.
    """

    load_timeout: Seconds = 3.0
    store_timeout: Seconds = 30.0
    preemption_timeout: Seconds = 2.0
    pending_timeout: Seconds = 1.0
    seek_timeout: Seconds = 0.05
    kv_layout: str = "auto"
    events: bool = True
    repeat_events: Annotated[float, Meta(ge=0, le=86400)] = 600.0


def read_options(extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ) -> Options:
    """Return the options in `kv_connector_extra_config`.

    Args:
        extra: the configuration.
        environment: of the process, for what is not configured.

    Raises:
        OptionsError: naming the key, its value and what is possible.
    """
    if extra.get("canonical_layout"):
        raise OptionsError(
            "kv_connector_extra_config: canonical_layout=true is not supported; remove it"
        )
    options = convert_options(Options, extra, "kv_connector_extra_config", VLLM_KEYS, environment)
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


# TODO versions.py
# """Which releases of vLLM the connector works with; vLLM is not imported here."""

TESTED = ("0.32",)
_NAMES = ", ".join(f"vLLM {name}" for name in TESTED)


def release(version: str) -> str:
    """Return major and minor number, which decide about interfaces and the KV's bytes."""
    return ".".join(version.split(".")[:2])


def untested(version: str) -> str:
    """Return a warning where kvd's tests were not run with this release, else ""."""
    if release(version) in TESTED:
        return ""
    return (
        f"kvd's connector was not tested with vLLM {version}, only with {_NAMES};"
        " compare answers with and without it before you rely on it, or install a tested release"
    )


def unsupported(version: str, lacks: str) -> UnsupportedVllm:
    """Return the error for a release that the connector cannot work with.

    Args:
        version: of the installed vLLM.
        lacks: what the connector needs and does not find there.
    """
    return UnsupportedVllm(
        f"kvd's connector cannot work with vLLM {version}: {lacks}; it was tested with"
        f" {_NAMES}: install that, or leave --kv-transfer-config out"
    )
