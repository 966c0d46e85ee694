"""Messages between the broker and its lanes.

They travel over a pair of Unix stream sockets that the broker makes before it starts the lane, in
the wire's own frame format with tags of their own, descriptors attached where a docstring names
them. The link's end of file tells each side that the other process is gone.
"""

from typing import Any

import msgspec

from kvd_proto.codec import Codec
from kvd_proto.jobs import IntArray
from kvd_proto.layout import RankLayout
from kvd_proto.messages import Count, Handle, Message, Name, Text


def lane_socket(device: str, incarnation: int, boot_id: bytes) -> str:
    """Return the name of a lane's socket: another one for each lane, of each daemon.

    Names are short: a socket's path has 108 bytes at most, and the directory needs most of them.
    """
    return f"lane-{device.partition(':')[0]}-{incarnation}-{boot_id[:2].hex()}.sock"


class BeginLane(Message, frozen=True):
    """Broker → lane, first: what it is to serve. Carries the pool's file, then the pin lock.

    The pin lock is a memory file of the broker's. A lane holds its record lock (fcntl(2), F_SETLK)
    while it pins or unpins a piece of the pool: one lane of this daemon at a time. The kernel
    releases the lock when the lane's process ends.

    endpoint: where workers will send it jobs.
    log_level, log_style: of the settings by now; its process may be older.
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
    """Lane → broker, first: it serves. Carries the read end of its lifeline.

    pins: it can use the pool only where it has pinned it, and pins the arenas of bound workers.
    usable_bytes: see PoolUsable.
    """

    incarnation: Count
    pid: Count
    endpoint: Text
    usable_bytes: Count
    pins: bool = False


class PoolUsable(Message, frozen=True):
    """Lane → broker: how much of the pool it can copy now; sent whenever one of these has changed.

    usable_bytes: the longest prefix of the pool, in the order of `FillOrder`, in which every
        byte of the bound workers' arenas is pinned. The whole pool where no worker is bound.
        BindWorker may reduce it.
    bindings: BindWorker orders that this lane had received when it measured `usable_bytes`.
    error: why it will never be more; empty while there is hope.
    """

    usable_bytes: Count
    error: Text
    bindings: Count = 0


class LaneLog(Message, frozen=True):
    """Broker → lane: log from this level on."""

    level: Name


class LaneFailed(Message, frozen=True):
    """Lane → broker: why this process ends. Instead of LaneReady: the device cannot be served."""

    error: Text


class ImportWorker(Message, frozen=True):
    """Broker → lane: map this worker's memory. Carries control page, then the storages' memory.

    The attached descriptors are those that came with Register, in its numbering:
    number 0 is the control page, `handles[i].fd_index` is the memory of storage i. None: the worker
    has no control page.

    token: by which Join names this worker.
    uid: the user of the worker's process.
    attempt: comes back with the answer.
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
    """Lane → broker: the next call of the driver maps this session's memory; Imported follows.

    The end of a lane between the two is blamed on this session's memory.
    """

    session: Count


class Imported(Message, frozen=True):
    """Lane → broker: the answer to ImportWorker; `error` is empty where it worked.

    out_of_files: the lane's limit of open files is why, so a later registration may work.
    """

    session: Count
    error: Text
    attempt: Count = 0
    out_of_files: bool = False


class BindWorker(Message, frozen=True):
    """Broker → lane: this worker's chunks live here. Carries the directory, read-only.

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
    """Broker → lane: the engine is incomplete; end this worker's jobs, keep its memory mapped."""

    session: Count


class ReleaseWorker(Message, frozen=True):
    """Broker → lane: drain this worker's copies, then unmap its memory."""

    session: Count


class Released(Message, frozen=True):
    """Lane → broker: nothing touches this worker's memory any more."""

    session: Count


class Revoke(Message, frozen=True):
    """Broker → lane: start no more writes into these slots; answer when none is in flight."""

    namespace: bytes
    slots: IntArray
    generations: IntArray


class Revoked(Revoke, frozen=True):
    """Lane → broker: no write into these slots is in flight."""


class ShareDone(Message, frozen=True):
    """Lane → broker: this rank's share of these chunks is in the pool (or will never be).

    first, count: the blocks of each chunk that were written; groups: of which group they are.
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
    """Broker → lane: answer from the loop that moves bytes."""


class LanePong(Message, frozen=True):
    """Lane → broker: alive, with what it holds and has done.

    counters: what it has done since its start, by name.
    oldest_job_ns: how long ago the oldest job that has not started was accepted.
    pinned_bytes: of the pool, pinned by this lane now.
    """

    queued_jobs: Count = 0
    bytes_in_flight: Count = 0
    workers: Count = 0
    counters: dict[str, Any] = msgspec.field(default_factory=dict)
    oldest_job_ns: Count = 0
    pinned_bytes: Count = 0


class StopLane(Message, frozen=True):
    """Broker → lane: refuse new jobs, finish what is queued, unpin the pool piece by piece, exit 0.

    The lane answers orders and pings until then.
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
