"""The connector's metrics. vLLM itself counts bytes, times and sizes."""

from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

from kvd_client.vllm.options import VllmOptions

ATTACHED = "vllm:kv_offload_kvd_attached"
LOAD_FAILURES = "vllm:kv_offload_kvd_load_failures"
STEP_LOADS = "vllm:kv_offload_kvd_step_loads"
STEP_LOADS_LATE = "vllm:kv_offload_kvd_step_loads_late"
STORE_FAILURES = "vllm:kv_offload_kvd_store_failures"
CHUNKS_REFUSED = "vllm:kv_offload_kvd_chunks_refused"
TIER_WAITS = "vllm:kv_offload_kvd_tier_waits"
TIER_WAITS_OVER = "vllm:kv_offload_kvd_tier_waits_over"

DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    ATTACHED: OffloadingGaugeMetadata(
        documentation="1 while the kvd daemon serves this engine, 0 while every lookup misses."
    ),
    LOAD_FAILURES: OffloadingCounterMetadata(
        documentation="Requests whose load failed and that were computed instead."
    ),
    STEP_LOADS: OffloadingCounterMetadata(
        documentation="Loads within the step that computes the rest of the prompt."
    ),
    STEP_LOADS_LATE: OffloadingCounterMetadata(
        documentation="Of these, loads that were not done in time; their requests started over."
    ),
    STORE_FAILURES: OffloadingCounterMetadata(
        documentation="Store jobs that failed; their chunks are not in the cache."
    ),
    CHUNKS_REFUSED: OffloadingCounterMetadata(
        documentation="Chunks that got no slot: no room in the pool, or too late an answer."
    ),
    TIER_WAITS: OffloadingCounterMetadata(
        documentation="Requests that waited for chunks from a tier below the daemon's memory."
    ),
    TIER_WAITS_OVER: OffloadingCounterMetadata(
        documentation="Of these, requests whose time was over before all of the chunks had come."
    ),
}

# Labels of `vllm:kv_offload_config_info`, a metric of vLLM 0.33: the engine's name at the daemon,
# the blocks of a chunk, and all settings.
CONFIG_LABELS = tuple(
    f"kvd_{name}" for name in ("engine_id", "blocks_per_chunk", *VllmOptions.__struct_fields__)
)


def config_info(
    engine_id: str, blocks_per_chunk: int, options: VllmOptions
) -> dict[str, str | float]:
    """Return the values of CONFIG_LABELS."""
    settings = (getattr(options, name) for name in VllmOptions.__struct_fields__)
    return dict(zip(CONFIG_LABELS, (engine_id, blocks_per_chunk, *settings), strict=True))
