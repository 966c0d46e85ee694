"""Metrics of the connector, beside those that vLLM counts itself (bytes, times, sizes)."""

from vllm.v1.kv_offload.base import (
    OffloadingCounterMetadata,
    OffloadingGaugeMetadata,
    OffloadingMetricMetadata,
)

ATTACHED = "vllm:kv_offload_kvd_attached"
LOAD_FAILURES = "vllm:kv_offload_kvd_load_failures"
STORE_FAILURES = "vllm:kv_offload_kvd_store_failures"
CHUNKS_REFUSED = "vllm:kv_offload_kvd_chunks_refused"

DEFINITIONS: dict[str, OffloadingMetricMetadata] = {
    ATTACHED: OffloadingGaugeMetadata(
        documentation="1 while the kvd daemon serves this engine, 0 while every lookup misses."
    ),
    LOAD_FAILURES: OffloadingCounterMetadata(
        documentation="Requests whose load failed and that were computed instead."
    ),
    STORE_FAILURES: OffloadingCounterMetadata(
        documentation="Store jobs that failed; their chunks are not in the cache."
    ),
    CHUNKS_REFUSED: OffloadingCounterMetadata(
        documentation="Chunks that got no slot: no room in the pool, or too late an answer."
    ),
}
