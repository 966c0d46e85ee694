"""One example of every message: the test vectors of docs/protocol.md.

A client in another language is right when it encodes and decodes these to the
same bytes. Map keys are written in the order of the fields; a decoder must
accept any order.
"""

from kvd_proto.arrays import IntArray
from kvd_proto.blocks import JobBlocks
from kvd_proto.codec import NO_ID, WIRE
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import (
    Attached,
    Cancel,
    CancelDone,
    Check,
    Checked,
    Clear,
    Cleared,
    CompleteLoad,
    CompleteStore,
    ConfigChange,
    ConfigReloaded,
    ConfigShown,
    Detached,
    Done,
    Drain,
    Drained,
    Error,
    ErrorCode,
    EvictOlderThan,
    Fingerprint,
    Greeting,
    Hello,
    HostHandle,
    JobStatus,
    LaneUp,
    Load,
    LoadCompleted,
    LoadPrepared,
    Lookups,
    Message,
    OlderEvicted,
    Ping,
    Pong,
    PrepareLoad,
    PrepareStore,
    Register,
    Registered,
    ReloadConfig,
    RequestFinished,
    RequestNoted,
    Reset,
    ResetDone,
    Resume,
    Resumed,
    ShowConfig,
    Status,
    StatusReport,
    Store,
    StoreCompleted,
    StorePrepared,
    Unregister,
    Unregistered,
    Wait,
    WaitDone,
    Welcome,
)

BOOT_ID = bytes(range(16))
SESSION = bytes(range(16, 32))
REQUEST_ID = 7

_KEYS = (bytes(32) + b"\0\0\0\0", bytes(32) + b"\0\0\0\1")
_LAYOUT = RankLayout(
    num_blocks=8,
    blocks_per_chunk=2,
    hash_block_size=16,
    storages=(65536,),
    tensors=(TensorSpec(storage=0, offset=0, page_bytes=4096, block_stride=8192),),
    groups=(GroupSpec(refs=(TensorRef(tensor=0, page_bytes=4096),), block_size=16),),
)
_BLOCKS = JobBlocks.of((3, 4, 5), (3,), (1,), (0, 9), (1, 4))

EXAMPLES: tuple[Message, ...] = (
    Hello(
        kind="worker", engine="llama-70b", pid=4242, protocol_min=1, protocol_max=1, client="docs 1"
    ),
    Welcome(protocol=1, daemon="kvd 0.1.0", pid=99, max_message_bytes=16777216, max_keys=65536),
    Register(
        rank=0,
        world_size=2,
        device="host",
        fingerprint=Fingerprint(model="llama-70b", dtype="bfloat16"),
        layout=_LAYOUT,
        handles=(HostHandle(fd_index=1),),
    ),
    Registered(missing_ranks=(1,), lane="ipc:///run/kvd/lane-host-1.sock", incarnation=1),
    Unregister(),
    Unregistered(),
    PrepareStore(keys=_KEYS),
    StorePrepared(
        answers=IntArray.of((1, 2), "u1"),
        slots=IntArray.of((0,), "u4"),
        generations=IntArray.of((1,), "u8"),
        evicted=(),
    ),
    CompleteStore(keys=_KEYS, success=True),
    StoreCompleted(ready=1, pending=1, dropped=0),
    PrepareLoad(keys=_KEYS, lease_ms=60000),
    LoadPrepared(
        lease=5,
        lease_ms=60000,
        found=IntArray.of((1, 0), "u1"),
        slots=IntArray.of((0,), "u4"),
        generations=IntArray.of((1,), "u8"),
    ),
    CompleteLoad(lease=5),
    LoadCompleted(released=True),
    RequestFinished(keys=_KEYS),
    RequestNoted(found=1),
    Reset(),
    ResetDone(dropped=1, deferred=0),
    Store(job=11, blocks=_BLOCKS, after=3, word=1, epoch=0, deadline_ms=30000),
    Load(job=12, blocks=_BLOCKS, after=4, deadline_ms=30000),
    Done(job=11, status=JobStatus.OK, text="", bytes=12288, queued_ns=80000, copy_ns=9000),
    Cancel(jobs=(11, 12)),
    CancelDone(stopped=1),
    Wait(jobs=(11,)),
    WaitDone(),
    Ping(lookups=Lookups(chunks=12, hit_chunks=8, tokens=400, hit_tokens=256)),
    Pong(pid=99),
    Status(),
    StatusReport(status={"ready": True}),
    Error(code=ErrorCode.NOT_READY, text="engine 'llama-70b': ranks [1] have not registered yet"),
    Greeting(pid=99),
    Attached(namespace=bytes(range(32, 48)), world_size=2, bytes_per_chunk=16384, num_chunks=4096),
    Detached(reason="rank 1 is gone"),
    LaneUp(device="host", incarnation=1, endpoint="ipc:///run/kvd/lane-host-1.sock"),
    Drain(),
    Drained(stores=2, leases=1),
    Resume(),
    Resumed(was_draining=True),
    Clear(namespace=bytes(range(32, 48))),
    Cleared(chunks=412, bytes=6750208, deferred=3),
    EvictOlderThan(seconds=3600.0),
    OlderEvicted(chunks=7, bytes=114688),
    Check(),
    Checked(violation="", chunks=412, whole=True),
    ReloadConfig(),
    ConfigReloaded(
        file="/etc/kvd/kvd.toml",
        changes=(
            ConfigChange(
                key="lease_seconds",
                old="60.0",
                new="30.0",
                origin="/etc/kvd/kvd.toml:3",
                live=True,
            ),
        ),
        warnings=(),
    ),
    ShowConfig(),
    ConfigShown(config={"file": None}),
)


def vector(message: Message) -> bytes:
    """The frame of an example, with the ids above (HELLO carries no boot id)."""
    boot_id = NO_ID if isinstance(message, Hello) else BOOT_ID
    return WIRE.encode(message, REQUEST_ID, boot_id, SESSION)
