"""One example of every message: the test vectors of docs/protocol.md.

A client in another language is right when it encodes and decodes these to the
same bytes. Map keys are written in the order of the fields; a decoder must
accept any order.
"""

from kvd_proto import messages as m
from kvd_proto.arrays import IntArray
from kvd_proto.blocks import JobBlocks
from kvd_proto.codec import NO_ID, WIRE
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec

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

EXAMPLES: tuple[m.Message, ...] = (
    m.Hello(
        kind="worker", engine="llama-70b", pid=4242, protocol_min=1, protocol_max=1, client="docs 1"
    ),
    m.Welcome(protocol=1, daemon="kvd 0.1.0", pid=99),
    m.Register(
        rank=0,
        world_size=2,
        device="host",
        fingerprint=m.Fingerprint(model="llama-70b", dtype="bfloat16"),
        layout=_LAYOUT,
        handles=(m.HostHandle(fd_index=1),),
    ),
    m.Registered(missing_ranks=(1,), lane="ipc:///run/kvd/lane-host-1.sock", incarnation=1),
    m.Unregister(),
    m.Unregistered(),
    m.PrepareStore(keys=_KEYS),
    m.StorePrepared(
        answers=IntArray.of((1, 2), "u1"),
        slots=IntArray.of((0,), "u4"),
        generations=IntArray.of((1,), "u8"),
        evicted=(),
    ),
    m.CompleteStore(keys=_KEYS, success=True),
    m.StoreCompleted(ready=1, pending=1, dropped=0),
    m.PrepareLoad(keys=_KEYS, lease_ms=60000),
    m.LoadPrepared(
        lease=5,
        lease_ms=60000,
        found=IntArray.of((1, 0), "u1"),
        slots=IntArray.of((0,), "u4"),
        generations=IntArray.of((1,), "u8"),
    ),
    m.CompleteLoad(lease=5),
    m.LoadCompleted(released=True),
    m.RequestFinished(keys=_KEYS),
    m.RequestNoted(found=1),
    m.Reset(),
    m.ResetDone(dropped=1, deferred=0),
    m.Store(job=11, blocks=_BLOCKS, after=3, word=1, epoch=0, deadline_ms=30000),
    m.Load(job=12, blocks=_BLOCKS, after=4, deadline_ms=30000),
    m.Done(job=11, status=m.JobStatus.OK, text="", bytes=12288, copy_ns=9000),
    m.Cancel(jobs=(11, 12)),
    m.CancelDone(),
    m.Wait(jobs=(11,)),
    m.WaitDone(),
    m.Ping(lookups=m.Lookups(chunks=12, hit_chunks=8, tokens=400, hit_tokens=256)),
    m.Pong(pid=99),
    m.Status(),
    m.StatusReport(status={"ready": True}),
    m.Error(code=m.ErrorCode.NOT_READY, text="engine 'llama-70b': ranks [1] are missing"),
    m.Greeting(pid=99),
    m.Attached(
        namespace=bytes(range(32, 48)), world_size=2, bytes_per_chunk=16384, num_chunks=4096
    ),
    m.Detached(reason="rank 1 is gone"),
    m.LaneUp(device="host", incarnation=1, endpoint="ipc:///run/kvd/lane-host-1.sock"),
    m.Drain(),
    m.Drained(stores=2, leases=1),
    m.Resume(),
    m.Resumed(was_draining=True),
    m.Clear(namespace=bytes(range(32, 48))),
    m.Cleared(chunks=412, bytes=6750208, deferred=3),
    m.EvictOlderThan(seconds=3600.0),
    m.OlderEvicted(chunks=7, bytes=114688),
    m.Check(),
    m.Checked(violation="", chunks=412, whole=True),
    m.ReloadConfig(),
    m.ConfigReloaded(
        file="/etc/kvd/kvd.toml",
        changes=(
            m.ConfigChange(
                key="lease_seconds",
                old="60.0",
                new="30.0",
                origin="/etc/kvd/kvd.toml:3",
                live=True,
            ),
        ),
        warnings=(),
    ),
    m.ShowConfig(),
    m.ConfigShown(config={"file": None}),
)


def vector(message: m.Message) -> bytes:
    """The frame of an example, with the ids above (HELLO carries no boot id)."""
    boot_id = NO_ID if isinstance(message, m.Hello) else BOOT_ID
    return WIRE.encode(message, REQUEST_ID, boot_id, SESSION)
