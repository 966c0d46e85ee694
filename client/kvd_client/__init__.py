"""The client library of kvd, for inference engines.

The scheduler's process makes a `Scheduler`, each worker process a `Worker`, both with the daemon's
runtime directory and the engine's name::

    worker.register(memory, layout, fingerprint)          # once
    with scheduler.prepare_store(keys) as ticket:         # slots for new chunks
        worker.store(1, ticket, [ChunkBlocks(keys, blocks)])
        worker.wait([1])                                  # or, later, get_finished()

    scheduler.lookup(key)                                 # microseconds, without a message
    with scheduler.prepare_load(keys) as ticket:          # pins the chunks found
        worker.load(2, ticket, [ChunkBlocks(keys, blocks)])
        worker.wait([2])

None of the scheduler's calls above blocks on the daemon: one that is absent, slow or restarting is
a cache that misses. Memory comes from `HostMemory.allocate`, from device pointers by
`DeviceMemory.at`, or from torch tensors of any device by `kvd_client.torch_memory.describe_torch`.
Jobs of an accelerator's memory are ordered by ``after=work_so_far(worker)``, of the same module.
"""

from kvd_client.decisions import NO_TIER, TIER_UNKNOWN
from kvd_client.errors import (
    CudaError,
    KvdClientError,
    RegistrationError,
    Unavailable,
    UnsupportedMemory,
    UnsupportedVllm,
    UsageError,
)
from kvd_client.jobs import JobResult
from kvd_client.memory import DeviceMemory, HostMemory
from kvd_client.scheduler import Scheduler
from kvd_client.session import AttachState
from kvd_client.tickets import ChunkBlocks, LoadTicket, StoreAnswer, StoreTicket
from kvd_client.timeline import Timeline
from kvd_client.worker import Worker
from kvd_proto.directory import LookupResult
from kvd_proto.jobs import JobBlocks
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import Fingerprint, JobStatus, Label, Load, Store, TierInfo
from kvd_proto.tier_table import TierHealth

__all__ = [
    "NO_TIER",
    "TIER_UNKNOWN",
    "AttachState",
    "ChunkBlocks",
    "CudaError",
    "DeviceMemory",
    "Fingerprint",
    "GroupSpec",
    "HostMemory",
    "JobBlocks",
    "JobResult",
    "JobStatus",
    "KvdClientError",
    "Label",
    "Load",
    "LoadTicket",
    "LookupResult",
    "RankLayout",
    "RegistrationError",
    "Scheduler",
    "Store",
    "StoreAnswer",
    "StoreTicket",
    "TensorRef",
    "TensorSpec",
    "TierHealth",
    "TierInfo",
    "Timeline",
    "Unavailable",
    "UnsupportedMemory",
    "UnsupportedVllm",
    "UsageError",
    "Worker",
]
