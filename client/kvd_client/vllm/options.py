"""The settings under `kv_connector_extra_config`, and the releases of vLLM that are tested.

Nothing of vLLM is imported here.
"""

import os
from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from kvd_client.adapters import EngineOptions, OptionsError, Seconds, convert_options
from kvd_client.errors import UnsupportedVllm

# Settings that vLLM's own scheduler logic reads and checks.
VLLM_KEYS = frozenset(
    {
        *("blocks_per_chunk", "block_size", "offload_prompt_only", "self_describing_kv_events"),
        *("canonical_layout", "spec_name", "spec_module_path"),
    }
)
# "auto", "none" and vLLM's names of layouts, outermost dimension first; see `layout.py`.
KV_LAYOUTS = ("auto", "none", "BLHNC", "BLNHC", "BHLNC", "LBHNC", "LBNHC", "LHBNC")
TESTED_RELEASES = ("0.32", "0.33")
_TESTED_NAMES = f"vLLM {' and '.join(TESTED_RELEASES)}"


class VllmOptions(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The connector's settings; `EngineOptions` has those of every engine.

    Attributes:
        load_timeout: seconds after which a load is cancelled and its request computed.
        store_timeout: seconds after which a store is given up; at least load_timeout.
        preemption_timeout: seconds that the engine waits for a store before it reuses the store's
            blocks. Then the store is void.
        sync_load_budget_bytes: of one step and rank: hits up to this size are loaded within the
            step; 0: none.
        sync_load_timeout: seconds that a step waits for these loads. Then their requests start
            over, and load beside the steps.
        pending_timeout: seconds that a request waits for chunks that are being stored or promoted
            from a tier.
        seek_timeout: seconds that a request waits for shared tiers to say whether they have its
            chunks.
        kv_layout: the physical layout of the KV cache to request from vLLM. auto: all layers of a
            block side by side, if no block has to be split. none: vLLM's own choice.
        events: publish the pool's changes among the engine's KV events, if vLLM publishes any.
        repeat_events: period in seconds in which the whole pool is published again, for routers
            that started late or lost events; 0: never.
    """

    load_timeout: Seconds = 3.0
    store_timeout: Seconds = 30.0
    preemption_timeout: Seconds = 2.0
    sync_load_budget_bytes: Annotated[int, Meta(ge=0)] = 0
    sync_load_timeout: Seconds = 0.02
    pending_timeout: Seconds = 1.0
    seek_timeout: Seconds = 0.05
    kv_layout: str = "auto"
    events: bool = True
    repeat_events: Annotated[float, Meta(ge=0, le=86400)] = 600.0


def read_options(
    extra: Mapping[str, Any], environment: Mapping[str, str] = os.environ
) -> VllmOptions:
    """Return the settings in `kv_connector_extra_config`.

    Args:
        extra: the configuration.
        environment: of the process, for settings that are not in the configuration.

    Raises:
        OptionsError: naming the key, its value and what is possible.
    """
    if extra.get("canonical_layout"):
        raise OptionsError(
            "kv_connector_extra_config: canonical_layout=true is not supported; remove it"
        )
    options = convert_options(
        VllmOptions, extra, "kv_connector_extra_config", VLLM_KEYS, environment
    )
    if options.kv_layout not in KV_LAYOUTS:
        raise OptionsError(
            f"kv_connector_extra_config: kv_layout={options.kv_layout!r} is no layout of vLLM's;"
            f" known are {', '.join(KV_LAYOUTS)}"
        )
    if options.load_timeout > options.store_timeout:  # the lane's limit for every job
        raise OptionsError(
            f"kv_connector_extra_config: load_timeout={options.load_timeout:g} is above"
            f" store_timeout={options.store_timeout:g}; raise store_timeout as well"
        )
    return options


def release(version: str) -> str:
    """Return major and minor number, on which interfaces and the bytes of KV depend."""
    return ".".join(version.split(".")[:2])


def untested_warning(version: str) -> str:
    """Return a warning if kvd's tests were not run with this release of vLLM; "" if they were."""
    if release(version) in TESTED_RELEASES:
        return ""
    return (
        f"kvd's connector was not tested with vLLM {version}, only with {_TESTED_NAMES};"
        " compare answers with and without it before you rely on it, or install a tested release"
    )


def unsupported_error(version: str, difference: str) -> UnsupportedVllm:
    """Return the error for a release of vLLM that differs from what the connector needs."""
    return UnsupportedVllm(
        f"kvd's connector cannot work with vLLM {version}: {difference}; it was tested with"
        f" {_TESTED_NAMES}: install one of these, or leave --kv-transfer-config out"
    )
