"""Every message of the wire, as frozen typed values, and the tag table.

Requests go from a client to the broker or to a lane and get exactly one reply:
the reply type named in `REPLY_OF`, or `Error`. Notices travel over the door
(the Unix socket that a session holds for life) and are not answered.
Times are milliseconds unless a name says otherwise; sizes are bytes.
"""

from enum import StrEnum
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvd_proto.arrays import IntArray
from kvd_proto.layout import RankLayout

PROTOCOL_VERSION = 1
MAX_KEYS = 65536
MAX_KEY_BYTES = 48
MAX_RANKS = 64
MAX_TEXT = 4096

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
Key: TypeAlias = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Keys: TypeAlias = Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
JobIds: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_KEYS)]
NamespaceId: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
Kind: TypeAlias = Literal["scheduler", "worker", "tool"]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every message; immutable, compared by value."""


class ErrorCode(StrEnum):
    """Why a request was not served; stable names that clients may switch on."""

    BAD_MESSAGE = "bad_message"  # could not be decoded beyond its request id
    BAD_VERSION = "bad_version"  # no common protocol version
    BAD_SESSION = "bad_session"  # unknown or foreign session token: reconnect
    STALE_BOOT = "stale_boot"  # the daemon has restarted: reconnect
    BAD_STATE = "bad_state"  # not allowed in this session's state or for its kind
    BAD_LAYOUT = "bad_layout"  # registration describes memory that cannot be served
    NOT_READY = "not_ready"  # not every rank of the engine has registered yet
    LIMIT = "limit"  # a limit of the daemon would be exceeded
    DRAINING = "draining"  # the daemon takes no new work
    BAD_CONFIG = "bad_config"  # the configuration cannot be used; what held holds on
    LANE_LOST = "lane_lost"  # the device's lane is being replaced: retry later
    FORBIDDEN = "forbidden"  # this user may not use this daemon, or not this engine's name
    INTERNAL = "internal"  # a bug in kvd; the log has the details


class JobStatus(StrEnum):
    """How a job ended. Everything but OK is a miss for the engine."""

    OK = "ok"
    CANCELLED = "cancelled"  # by CANCEL, before it was done
    STALE = "stale"  # a slot was evicted, given up or never this session's
    VOID = "void"  # the worker's epoch moved on while the job ran
    TIMEOUT = "timeout"  # the timeline did not reach the job's number in time
    REFUSED = "refused"  # malformed or out of bounds
    SHED = "shed"  # the engine's queue in the lane is full; stores go first
    FAILED = "failed"  # the device failed


# ---------------------------------------------------------------- handshake


class Hello(Message, frozen=True):
    """First request of a session, with the token from the door in its header."""

    kind: Kind
    engine: Name
    pid: Count
    protocol_min: Annotated[int, Meta(ge=0, le=65535)]
    protocol_max: Annotated[int, Meta(ge=0, le=65535)]
    client: Name


class Welcome(Message, frozen=True):
    """The daemon's side of the handshake."""

    protocol: int
    daemon: Name
    pid: Count
    max_message_bytes: Count
    max_keys: Count


class Fingerprint(Message, frozen=True):
    """What must be equal for two engines to share chunks; all of it is hashed.

    Layout figures (groups, pages, world size, replication) are taken from the
    registration itself, so that they cannot be claimed differently from what
    is stored.
    """

    model: Name
    revision: Text = ""
    dtype: Text = ""
    kv_layout: Text = ""
    attention_backend: Text = ""
    parallelism: Text = ""
    label: Text = ""


class HostHandle(Message, frozen=True, tag="host"):
    """A storage in host memory: descriptor number `fd_index` of those sent over the door."""

    fd_index: Count
    offset: Count = 0


class IpcHandle(Message, frozen=True, tag="ipc"):
    """A storage in a CUDA allocation that its legacy IPC handle names.

    The handle maps the whole allocation, `allocation` bytes; the storage starts at `offset`.
    """

    handle: Annotated[bytes, Meta(min_length=64, max_length=64)]
    allocation: Count
    offset: Count = 0


class VmmHandle(Message, frozen=True, tag="vmm"):
    """A storage in CUDA memory of the virtual memory management: a descriptor sent over the door.

    The descriptor maps the whole allocation, `allocation` bytes; the storage starts at `offset`.
    """

    fd_index: Count
    allocation: Count
    offset: Count = 0


Handle: TypeAlias = HostHandle | IpcHandle | VmmHandle


def fd_index(handle: Handle) -> int:
    """The highest descriptor number that a handle needs; 0, the control page, where none."""
    return 0 if isinstance(handle, IpcHandle) else handle.fd_index


class Register(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's KV memory. Handles' descriptors were sent over the door before.

    `device` is "host", or "cuda:" and the device's UUID in hex; it decides the kind of handles.

    `handles[i]` is the memory of `layout.storages[i]`; descriptor 0 is the
    worker's control page (timeline word, epoch word). A `temporary` engine's chunks
    are shared with no other kind of engine and dropped when the last such engine
    leaves; it takes no room that is in use but one column of the pool's grid.
    """

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    stage: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] = 0
    device: Name
    fingerprint: Fingerprint
    layout: RankLayout
    handles: Annotated[tuple[Handle, ...], Meta(max_length=4096)]
    temporary: bool = False


class Registered(Message, frozen=True):
    """The registration holds. `missing_ranks` have not registered yet."""

    missing_ranks: tuple[int, ...]
    lane: Name
    incarnation: Count


class Unregister(Message, frozen=True):
    """Forget this session's tensors; answered when nothing touches them any more."""


class Unregistered(Message, frozen=True):
    """The memory is the worker's own again."""


# ---------------------------------------------------------------- scheduler


class PrepareStore(Message, frozen=True):
    """Ask for slots for these keys."""

    keys: Keys


class StorePrepared(Message, frozen=True):
    """`answers[i]` for key i (see StoreAnswer); slots and generations of the accepted, in order."""

    answers: IntArray
    slots: IntArray
    generations: IntArray
    evicted: tuple[bytes, ...]


class CompleteStore(Message, frozen=True):
    """The engine is done with these stores; without success what is unfinished is dropped."""

    keys: Keys
    success: bool


class StoreCompleted(Message, frozen=True):
    """How many of the keys are ready, still being written by a lane, and dropped."""

    ready: Count
    pending: Count
    dropped: Count


class PrepareLoad(Message, frozen=True):
    """Pin these chunks under a lease."""

    keys: Keys
    lease_ms: Annotated[int, Meta(ge=1, le=600_000)]


class LoadPrepared(Message, frozen=True):
    """`found[i]` is 1 where key i is pinned; slots and generations of the found, in order."""

    lease: Count
    lease_ms: Count
    found: IntArray
    slots: IntArray
    generations: IntArray


class CompleteLoad(Message, frozen=True):
    """Give a lease back."""

    lease: Count


class LoadCompleted(Message, frozen=True):
    """`released` is false where the lease had run out before."""

    released: bool


class Touch(Message, frozen=True):
    """These chunks were useful just now, prefix first."""

    keys: Keys


class Touched(Message, frozen=True):
    """How many of them are here."""

    found: Count


class Reset(Message, frozen=True):
    """Drop every chunk of this engine's namespace."""


class ResetDone(Message, frozen=True):
    """Chunks dropped now, and those that go when their leases end."""

    dropped: Count
    deferred: Count


# --------------------------------------------------------------------- jobs


class Job(Message, frozen=True):
    """One rank's share of a store or a load.

    block_ids: flat, group by group; sum(group_sizes) == len(block_ids).
    block_indices: logical index of each group's first block.
    slots, generations: the chunks, group by group,
    cdiv(group_size + block_index % blocks_per_chunk, blocks_per_chunk) each.
    after: the timeline number that must be reached before memory is touched.
    epoch: the worker's epoch word at submission.
    """

    job: Count
    block_ids: IntArray
    group_sizes: IntArray
    block_indices: IntArray
    slots: IntArray
    generations: IntArray
    after: Count
    epoch: Count
    deadline_ms: Annotated[int, Meta(ge=1, le=600_000)]


class Store(Job, frozen=True):
    """Copy the worker's blocks into the pool. Answered by Done."""


class Load(Job, frozen=True):
    """Copy chunks into the worker's blocks. Answered by Done."""


class Done(Message, frozen=True):
    """The job's end: nothing touches its blocks any more."""

    job: Count
    status: JobStatus
    text: Text
    bytes: Count
    queued_ns: Count
    copy_ns: Count


class Cancel(Message, frozen=True):
    """Stop these jobs; each still ends with its own Done."""

    jobs: JobIds


class CancelDone(Message, frozen=True):
    """How many of them were still unfinished."""

    stopped: Count


class Wait(Message, frozen=True):
    """Do these jobs first; answered when all of them have ended."""

    jobs: JobIds


class WaitDone(Message, frozen=True):
    """All of them have ended; their Done messages were sent before this one.

    One that never reached the lane will not begin any more. So a worker that has not got a Done
    by then takes the job as failed: a connection that broke has taken the message along.
    """


# ------------------------------------------------------------------- common


class Lookups(Message, frozen=True):
    """What a scheduler's session has looked up since it began; figures never fall.

    chunks, hit_chunks: keys looked up in the directory, and those that were READY.
    tokens, hit_tokens: prompt tokens asked for and found; None: not counted, the daemon takes
    the chunks' size.
    """

    chunks: Count
    hit_chunks: Count
    tokens: Count | None = None
    hit_tokens: Count | None = None


class Ping(Message, frozen=True):
    """Answered by the loop that serves every other request; carries lookups from a scheduler."""

    lookups: Lookups | None = None


class Pong(Message, frozen=True):
    """Alive."""

    pid: Count


class Status(Message, frozen=True):
    """Ask for the daemon's state."""


class StatusReport(Message, frozen=True):
    """The daemon's state as documented in docs/status.md."""

    status: dict[str, Any]


class Error(Message, frozen=True):
    """A request that was not served: a code for programs, a sentence for people."""

    code: ErrorCode
    text: Text

    @classmethod
    def of(cls, code: ErrorCode, text: str) -> "Error":
        """With a text that may quote what it was given: it is cut to what a message may hold."""
        return cls(code=code, text=text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}...")


# --------------------------------------------------------------- operations


class Drain(Message, frozen=True):
    """No new stores from now on, until Resume. Of sessions of kind `tool` only, as all these."""


class Drained(Message, frozen=True):
    """Stores are refused. So many chunks of earlier stores, and leases, are still in flight."""

    stores: Count
    leases: Count


class Resume(Message, frozen=True):
    """Take new stores again; a daemon that stops stays as it is."""


class Resumed(Message, frozen=True):
    """Stores are taken. `was_draining` is false where nothing had to change."""

    was_draining: bool


class Clear(Message, frozen=True):
    """Drop every chunk of a namespace, or of all. Pinned ones go when their leases end."""

    namespace: NamespaceId | None = None


class Cleared(Message, frozen=True):
    """Chunks dropped now, their bytes, and those that go when their leases end."""

    chunks: Count
    bytes: Count
    deferred: Count


class EvictOlderThan(Message, frozen=True):
    """Drop the chunks of a namespace, or of all, that were of no use for so many seconds."""

    seconds: Annotated[float, Meta(ge=0, le=1e9)]
    namespace: NamespaceId | None = None


class OlderEvicted(Message, frozen=True):
    """Chunks dropped, and their bytes. Pinned chunks are in use and stay."""

    chunks: Count
    bytes: Count


class HandOver(Message, frozen=True):
    """Leave to the daemon that asks; its door connection's end undoes that until it is done.

    boot_id: of the daemon that is to leave, which no other can be by mistake.
    pid: of the new one, as it sees itself.
    """

    boot_id: Annotated[bytes, Meta(min_length=16, max_length=16)]
    pid: Count


class HandingOver(Message, frozen=True):
    """The daemon leaves within `seconds`; `kept` says whether its chunks stay for the new one."""

    seconds: Annotated[float, Meta(ge=0, le=1e9)]
    kept: bool


class Check(Message, frozen=True):
    """Look whether all that the broker believes fits together; nothing is changed."""


class Checked(Message, frozen=True):
    """The first contradiction, or nothing; chunks looked at, and whether all in one moment."""

    violation: Text
    chunks: Count
    whole: bool


# ------------------------------------------------------------ configuration


class ReloadConfig(Message, frozen=True):
    """Read the configuration again. Of sessions of kind `tool` only, as ShowConfig."""


class ConfigChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A setting that differs from what held; `live` is false where it waits for a restart."""

    key: Name
    old: Text
    new: Text
    origin: Text
    live: bool


class ConfigReloaded(Message, frozen=True):
    """The configuration was read; `changes` is empty where it says what held already."""

    file: Text
    changes: tuple[ConfigChange, ...]
    warnings: tuple[Text, ...]


class ShowConfig(Message, frozen=True):
    """Ask for the settings that the daemon runs with."""


class ConfigShown(Message, frozen=True):
    """The settings as `kvd config show --json` prints them."""

    config: dict[str, Any]


# ---------------------------------------------------- notices over the door


class Greeting(Message, frozen=True):
    """Broker's first word on the door; the session token and boot id are in the header."""

    pid: Count


class Handles(Message, frozen=True):
    """Client to broker: descriptors `first`..`first + count - 1` are attached."""

    first: Count
    count: Annotated[int, Meta(ge=1, le=64)]


class Attached(Message, frozen=True):
    """Broker to every session of an engine whose ranks are all registered.

    Carries a read-only descriptor of the namespace's directory.
    """

    namespace: bytes
    world_size: int
    bytes_per_chunk: Count
    num_chunks: Count


class Detached(Message, frozen=True):
    """The engine is no longer complete: loads and stores answer NOT_READY until it is."""

    reason: Text


class LaneUp(Message, frozen=True):
    """A lane process serves `device`; carries its lifeline (EOF there = that process is dead)."""

    device: Name
    incarnation: Count
    endpoint: Text


TAGS: dict[int, type[Message]] = {
    0x01: Hello,
    0x02: Welcome,
    0x03: Register,
    0x04: Registered,
    0x05: Unregister,
    0x06: Unregistered,
    0x10: PrepareStore,
    0x11: StorePrepared,
    0x12: CompleteStore,
    0x13: StoreCompleted,
    0x14: PrepareLoad,
    0x15: LoadPrepared,
    0x16: CompleteLoad,
    0x17: LoadCompleted,
    0x18: Touch,
    0x19: Touched,
    0x1A: Reset,
    0x1B: ResetDone,
    0x20: Store,
    0x21: Load,
    0x22: Done,
    0x23: Cancel,
    0x24: CancelDone,
    0x25: Wait,
    0x26: WaitDone,
    0x30: Ping,
    0x31: Pong,
    0x32: Status,
    0x33: StatusReport,
    0x3F: Error,
    0x40: Greeting,
    0x41: Handles,
    0x42: Attached,
    0x43: Detached,
    0x44: LaneUp,
    0x50: Drain,
    0x51: Drained,
    0x52: Resume,
    0x53: Resumed,
    0x54: Clear,
    0x55: Cleared,
    0x56: EvictOlderThan,
    0x57: OlderEvicted,
    0x58: HandOver,
    0x59: HandingOver,
    0x5A: Check,
    0x5B: Checked,
    0x60: ReloadConfig,
    0x61: ConfigReloaded,
    0x62: ShowConfig,
    0x63: ConfigShown,
}
"""Tag → type; tags are never reused."""

REPLY_OF: dict[type[Message], type[Message]] = {
    Hello: Welcome,
    Register: Registered,
    Unregister: Unregistered,
    PrepareStore: StorePrepared,
    CompleteStore: StoreCompleted,
    PrepareLoad: LoadPrepared,
    CompleteLoad: LoadCompleted,
    Touch: Touched,
    Reset: ResetDone,
    Store: Done,
    Load: Done,
    Cancel: CancelDone,
    Wait: WaitDone,
    Ping: Pong,
    Status: StatusReport,
    Drain: Drained,
    Resume: Resumed,
    Clear: Cleared,
    EvictOlderThan: OlderEvicted,
    HandOver: HandingOver,
    Check: Checked,
    ReloadConfig: ConfigReloaded,
    ShowConfig: ConfigShown,
}
"""Request type → the type of its one reply (or `Error`)."""
