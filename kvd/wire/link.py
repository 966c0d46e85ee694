"""Messages between the broker and its lanes.

They travel over a pair of Unix stream sockets that the broker creates before it starts the lane, in
the frame format of the protocol, with separate tags. Docstrings name attached descriptors. End of
file tells each side that the other process has exited.
"""

from typing import Any

import msgspec

from kvd_proto.codec import Codec
from kvd_proto.jobs import IntArray
from kvd_proto.layout import RankLayout
from kvd_proto.messages import Count, Handle, Message, Name, Text


def lane_socket(device: str, incarnation: int, boot_id: bytes) -> str:
    """Return the name of a lane's socket, unique for each lane of each daemon.

    Names are short because a socket's path has at most 108 bytes, directory included.
    """
    return f"lane-{device.partition(':')[0]}-{incarnation}-{boot_id[:2].hex()}.sock"


class BeginLane(Message, frozen=True):
    """Broker → lane, first message: what to serve. Carries the pool's file, then the pin lock.

    The pin lock is a memory file of the broker's. A lane holds its record lock (fcntl(2), F_SETLK)
    while it pins or unpins a piece of the pool: one lane of this daemon at a time. The kernel
    releases the lock when the lane's process ends.

    endpoint: where workers will send jobs.
    log_level, log_style: current settings; the process may have been started with older ones.
    """

    device: Name
    incarnation: Count
    endpoint: Text
    pool_bytes: Count
    max_queued_jobs: Count
    max_queued_bytes: Count
    log_level: Name
    log_style: Name


class LaneReady(Message, frozen=True):
    """Lane → broker, first message: it serves. Carries the read end of its lifeline.

    pins: the lane can use only pinned parts of the pool; it pins the arenas of bound workers.
    usable_bytes: see PoolUsable.
    """

    incarnation: Count
    pid: Count
    endpoint: Text
    usable_bytes: Count
    pins: bool = False


class PoolUsable(Message, frozen=True):
    """Lane → broker: how much of the pool it can copy now; sent after each change of a field.

    usable_bytes: length of the longest prefix of the pool, in `FillOrder`, in which every byte
        of the bound workers' arenas is pinned. The whole pool where no worker is bound.
        BindWorker may reduce it.
    bindings: BindWorker orders that this lane had received when it measured `usable_bytes`.
    error: why `usable_bytes` will not grow any more; empty otherwise.
    """

    usable_bytes: Count
    error: Text
    bindings: Count = 0


class LaneLog(Message, frozen=True):
    """Broker → lane: log from this level on."""

    level: Name


class LaneFailed(Message, frozen=True):
    """Lane → broker: why this process ends; instead of LaneReady: why it cannot serve."""

    error: Text


class ImportWorker(Message, frozen=True):
    """Broker → lane: map this worker's memory. Carries control page, then the storages' memory.

    The descriptors are those of Register, with the same numbers: 0 is the control page,
    `handles[i].fd_index` the memory of storage i. Without descriptors the worker has no control
    page.

    token: names this worker in Join.
    uid: the user of the worker's process.
    attempt: returned in Imported.
    """

    session: Count
    token: bytes
    engine: Name
    pid: Count
    uid: Count
    rank: Count
    world_size: Count
    layout: RankLayout
    handles: tuple[Handle, ...]
    attempt: Count = 0


class Importing(Message, frozen=True):
    """Lane → broker: the next driver call maps this session's memory; Imported follows.

    If the lane ends between the two, this session's memory is taken for the cause.
    """

    session: Count


class Imported(Message, frozen=True):
    """Lane → broker: the reply to ImportWorker; `error` is empty on success.

    out_of_files: the cause is the limit of open files, so a later registration may succeed.
    """

    session: Count
    error: Text
    attempt: Count = 0
    out_of_files: bool = False


class BindWorker(Message, frozen=True):
    """Broker → lane: where this worker's chunks lie. Carries the directory, read-only.

    Slot i of the rank's arena is pool bytes [arena_base + i * slot_bytes, + slot_bytes), with the
    slot bytes of the worker's layout.
    `owner` is the engine's number in the directory; `rank` of a replicated
    layout writes the slots with slot % world_size == rank.
    """

    session: Count
    namespace: bytes
    owner: Count
    arena_base: Count
    num_slots: Count


class UnbindWorker(Message, frozen=True):
    """Broker → lane: the engine is incomplete; end the worker's jobs, keep its memory mapped."""

    session: Count


class ReleaseWorker(Message, frozen=True):
    """Broker → lane: drain this worker's copies, then unmap its memory."""

    session: Count


class Released(Message, frozen=True):
    """Lane → broker: the reply to ReleaseWorker; the worker's memory is no longer used."""

    session: Count


class Revoke(Message, frozen=True):
    """Broker → lane: start no more writes to these slots; reply when none is in flight."""

    namespace: bytes
    slots: IntArray
    generations: IntArray


class Revoked(Revoke, frozen=True):
    """Lane → broker: no write to these slots is in flight."""


class ShareDone(Message, frozen=True):
    """Lane → broker: this rank's share of these chunks is in the pool, or failed if not `ok`.

    first, count: the blocks of each chunk that were written. groups: the group of each chunk.
    """

    session: Count
    rank: Count
    namespace: bytes
    slots: IntArray
    generations: IntArray
    first: IntArray
    count: IntArray
    groups: IntArray
    ok: bool


class LanePing(Message, frozen=True):
    """Broker → lane: liveness probe; the loop that starts copies answers."""


class LanePong(Message, frozen=True):
    """Lane → broker: the reply to LanePing, with the lane's state.

    counters: counts since the lane's start, by name.
    oldest_job_ns: age of the oldest job that has not started.
    pinned_bytes: bytes of the pool that this lane has pinned now.
    """

    queued_jobs: Count = 0
    bytes_in_flight: Count = 0
    workers: Count = 0
    counters: dict[str, Any] = msgspec.field(default_factory=dict)
    oldest_job_ns: Count = 0
    pinned_bytes: Count = 0


class StopLane(Message, frozen=True):
    """Broker → lane: refuse new jobs, finish queued ones, unpin the pool piece by piece, exit 0.

    The lane still answers orders and pings until it exits.
    """


LINK = Codec(
    {
        0x101: LaneReady,
        0x102: ImportWorker,
        0x103: Imported,
        0x104: BindWorker,
        0x105: UnbindWorker,
        0x106: ReleaseWorker,
        0x107: Released,
        0x108: Revoke,
        0x109: Revoked,
        0x10A: ShareDone,
        0x10B: LanePing,
        0x10C: LanePong,
        0x10D: StopLane,
        0x10E: LaneFailed,
        0x10F: PoolUsable,
        0x110: LaneLog,
        0x111: BeginLane,
        0x112: Importing,
    }
)
"""The codec of the link."""
