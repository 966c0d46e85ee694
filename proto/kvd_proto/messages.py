"""Every message of the protocol, as frozen typed values, and the table of tags.

A client sends requests to the broker or to a lane. Each gets exactly one reply: of the type in
`REPLY_OF`, or an `Error`. Notices come from the broker on the same connection, in order with its
replies, and have no reply. Times are milliseconds unless a name says otherwise; sizes are bytes.

docs/protocol.md is generated from this module: from a docstring's first line (what the message is
for), lines of the form ``field, field: meaning``, and the comments of codes.
"""

from enum import IntEnum, StrEnum
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvd_proto.descriptions import MAX_DESCRIPTION_BYTES
from kvd_proto.jobs import EPOCH_WORDS, MAX_ARRAY_ITEMS, PROGRESS_WORDS, IntArray, JobBlocks
from kvd_proto.layout import MAX_STORAGES, RankLayout

PROTOCOL_VERSION = 4
"""Grows with every change that makes frames of the version before invalid or changes their meaning.
A daemon and a client of different versions do not talk."""
HOST = "host"  # the device that is host memory
MAX_KEYS = MAX_ARRAY_ITEMS
MAX_KEY_BYTES = 48
MAX_FINISHED = 1024  # requests in one Step
MAX_RANKS = 64
MAX_DESCRIPTORS = 253  # of one message: the kernel's own limit, SCM_MAX_FD
MAX_SEGMENTS = 4096  # of one storage
MAX_TEXT = 4096
MAX_TIERS = 4  # below one pool

Name: TypeAlias = Annotated[str, Meta(min_length=1, max_length=256)]
Text: TypeAlias = Annotated[str, Meta(max_length=MAX_TEXT)]
Key: TypeAlias = Annotated[bytes, Meta(min_length=1, max_length=MAX_KEY_BYTES)]
Keys: TypeAlias = Annotated[tuple[Key, ...], Meta(max_length=MAX_KEYS)]
Encoded: TypeAlias = Annotated[bytes, Meta(max_length=MAX_DESCRIPTION_BYTES)]
Count: TypeAlias = Annotated[int, Meta(ge=0, le=2**63 - 1)]
Offers: TypeAlias = Annotated[int, Meta(ge=0, le=2**32 - 1)]  # sums of many stay in 64 bits
JobIds: TypeAlias = Annotated[tuple[Count, ...], Meta(max_length=MAX_KEYS)]
Labels: TypeAlias = Annotated[bytes, Meta(max_length=MAX_KEYS)]
NamespaceId: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
LaneToken: TypeAlias = Annotated[bytes, Meta(min_length=16, max_length=16)]
NO_ITEMS = IntArray.of((), "u2")
NO_SLOTS = IntArray.of((), "u4")
NO_GENERATIONS = IntArray.of((), "u8")
Kind: TypeAlias = Literal["scheduler", "worker", "tool"]


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Base of every message; immutable, compared by value."""


class ErrorCode(StrEnum):
    """Why a request was not served; stable names that clients may switch on."""

    BAD_MESSAGE = "bad_message"  # the body cannot be decoded: a bug in the client
    BAD_VERSION = "bad_version"  # no common protocol version: update the older side
    BAD_SESSION = "bad_session"  # the lane does not know the worker; Join with LaneUp's token
    BAD_STATE = "bad_state"  # not allowed in this session's state or for its kind
    BAD_LAYOUT = "bad_layout"  # this memory can never be served: do not try again
    NOT_READY = "not_ready"  # ranks, pool or a registration's descriptors are missing yet: a miss
    LIMIT = "limit"  # a limit of the daemon would be exceeded: a miss
    DRAINING = "draining"  # the daemon accepts no new work: a miss
    BAD_CONFIG = "bad_config"  # the configuration is invalid; the settings before stay in force
    LANE_LOST = "lane_lost"  # the device's lane is being replaced: try again later
    FORBIDDEN = "forbidden"  # this user may not use this daemon, or not this engine's name
    INTERNAL = "internal"  # a bug in kvd; the log has the details: a miss


class JobStatus(StrEnum):
    """How a job ended. Everything but OK is a miss for the engine."""

    OK = "ok"  # every byte was copied, and the slots held the job's chunks until the end
    CANCELLED = "cancelled"  # stopped by Cancel or Join, or the worker or its engine has left
    STALE = "stale"  # a slot does not hold, or no longer holds, the job's chunk with its blocks
    VOID = "void"  # the worker voided the store by its epoch word
    TIMEOUT = "timeout"  # not completed within its deadline_ms
    REFUSED = "refused"  # invalid arrays, a repeated store or job number, no engine attached
    SHED = "shed"  # the engine's queue in the lane is full; stores go first
    FAILED = "failed"  # the device failed


MAX_SECONDS = 86_400
"""Longer times until the next request are cut to this."""
LABEL_ONLY = 0x80
"""Bit of a label's byte: the request was reported before, and only its label is new."""


class Label(IntEnum):
    """When the next request that uses the same chunks is expected.

    A hint: the eviction policy learns for each label when chunks that carry it are used again. A
    label neither keeps a chunk nor removes one.
    """

    NONE = 0  # nothing is known
    DONE = 1  # no request will continue this one
    UNDER_10S = 2  # one will in less than 10 s
    UNDER_60S = 3  # one will in less than 60 s
    UNDER_600S = 4  # one will in less than 600 s
    LATER = 5  # one will in 600 s or more


def label_for(seconds: float) -> Label:
    """Return the label of a request that is continued after `seconds`; negative counts as 0."""
    if seconds < 10:
        return Label.UNDER_10S
    if seconds < 60:
        return Label.UNDER_60S
    return Label.UNDER_600S if seconds < 600 else Label.LATER


# ---------------------------------------------------------------- handshake


class Hello(Message, frozen=True):
    """First request of a session.

    kind: `scheduler` looks up and stores chunks, `worker` registers memory, `tool` belongs to no
    engine.
    engine: the engine's name, the same in all its sessions and in no other engine's; any name for a
    tool.
    pid: the client's process id in its own namespace; for people.
    protocol_min, protocol_max: range of versions that the client speaks.
    client: name and version of the client; for people.
    """

    kind: Kind
    engine: Name
    pid: Count
    protocol_min: Annotated[int, Meta(ge=0, le=65535)]
    protocol_max: Annotated[int, Meta(ge=0, le=65535)]
    client: Name


class Welcome(Message, frozen=True):
    """The daemon's side of the handshake.

    protocol: the version used from now on.
    daemon: its name and version; for people.
    pid: the daemon's process id in its own namespace.
    """

    protocol: int
    daemon: Name
    pid: Count


class Fingerprint(Message, frozen=True):
    """What must be equal for two engines to share chunks; its hash is part of the namespace id.

    Layout figures (groups, pages, world size, replication) come from the registration itself, so
    that no engine can claim others than it uses.

    Each field is opaque text that must hold at least what is said here. What it has in excess costs
    misses; what it lacks lets engines load each other's wrong bytes.

    model: its name; quotas and reports use it.
    revision: of the weights, and all else that changes their results, such as configuration,
        quantization and a draft model; the adapters give a digest.
    dtype: of the weights and of the KV cache.
    kv_layout: what decides the order of a block's bytes and the keys: engine and release, layout,
        hash algorithm.
    attention_backend: names of the attention backends.
    parallelism: how the model is divided among ranks; which rank it is, if each has chunks of its
        own.
    label: anything else; engines with different labels share nothing.
    """

    model: Name
    revision: Text = ""
    dtype: Text = ""
    kv_layout: Text = ""
    attention_backend: Text = ""
    parallelism: Text = ""
    label: Text = ""


class HostHandle(Message, frozen=True, tag="host"):
    """A storage in host memory, named by a descriptor.

    fd_index: number of the descriptor.
    offset: from the start of the descriptor's memory to the storage's, in bytes.
    """

    fd_index: Count
    offset: Count = 0


class IpcHandle(Message, frozen=True, tag="ipc"):
    """A storage in a CUDA allocation of cudaMalloc, named by a legacy IPC handle.

    handle: what `cuIpcGetMemHandle` gives for the allocation's start.
    allocation: size of the allocation in bytes.
    offset: from the allocation's start to the storage's, in bytes.
    """

    handle: Annotated[bytes, Meta(min_length=64, max_length=64)]
    allocation: Count
    offset: Count = 0


class VmmSegment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A CUDA allocation of the virtual memory management, named by a descriptor.

    fd_index: number of the descriptor from `cuMemExportToShareableHandle`, of the kind POSIX file
    descriptor.
    nbytes: size of the allocation, all of which is mapped.
    """

    fd_index: Count
    nbytes: Annotated[int, Meta(ge=1, le=2**63 - 1)]


class VmmHandle(Message, frozen=True, tag="vmm"):
    """A storage in CUDA memory of the virtual memory management.

    segments: its allocations in the order of their addresses; each begins where the one before
    ends.
    offset: from the first segment's start to the storage's, in bytes.
    """

    segments: Annotated[tuple[VmmSegment, ...], Meta(min_length=1, max_length=MAX_SEGMENTS)]
    offset: Count = 0


Handle: TypeAlias = HostHandle | IpcHandle | VmmHandle


def fd_index(handle: Handle) -> int:
    """Return the highest descriptor number that a handle needs; 0, the control page, if none."""
    match handle:
        case HostHandle():
            return handle.fd_index
        case VmmHandle():
            return max(segment.fd_index for segment in handle.segments)
        case IpcHandle():
            return 0


class Register(Message, frozen=True, kw_only=True, omit_defaults=True):
    """Register a worker's KV memory; its descriptors come with the message.

    Descriptor number 0 is the control page. A worker whose handles need no descriptors may send
    none: without a control page its jobs have `after`, `word`, `epoch` and `progress` 0. Then it
    waits for its stream before it sends a job, and for the job's end before it uses the blocks.

    rank: this worker's index among those that hold shares of a chunk; below world_size.
    world_size: the number of these workers.
    stage: pipeline stage; ranks of one stage must have equal pages.
    device: `host`; or `cuda:` and the UUID's 32 hex digits, for a MIG instance with `MIG-` before
    them. It decides the kind of handles.
    fingerprint: the same for all ranks.
    layout: of the memory.
    handles: one for each of the layout's storages, in their order.
    temporary: chunks are shared with temporary engines only and dropped soon after the last of
    them has left; such an engine takes at most one column of the pool that is in use.
    """

    rank: Annotated[int, Meta(ge=0, lt=MAX_RANKS)]
    world_size: Annotated[int, Meta(ge=1, le=MAX_RANKS)]
    stage: Annotated[int, Meta(ge=0, lt=MAX_RANKS)] = 0
    device: Name
    fingerprint: Fingerprint
    layout: RankLayout
    handles: Annotated[tuple[Handle, ...], Meta(max_length=MAX_STORAGES)]
    temporary: bool = False


class Registered(Message, frozen=True):
    """The registration succeeded: the lane has mapped the memory.

    missing_ranks: ranks that have not registered yet; if empty, Attached follows.
    """

    missing_ranks: Annotated[tuple[int, ...], Meta(max_length=MAX_RANKS)]


class Unregister(Message, frozen=True):
    """Forget this session's memory; the reply comes when nothing touches it any more."""


# ---------------------------------------------------------------- scheduler


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A lease: pins the chunks that a load reads until the load has ended.

    lease: its number, by which the scheduler gives it back; new in its session.
    lease_ms: duration of the lease, in ms; the daemon may shorten it.
    slots: u4, of the chunks, from the directory; a prompt's head first.
    generations: u8, of these slots; a chunk that is not READY with its generation is not pinned.
    """

    lease: Count
    lease_ms: Annotated[int, Meta(ge=1, le=600_000)]
    slots: IntArray
    generations: IntArray


class Step(Message, frozen=True, omit_defaults=True):
    """What a scheduler has decided since its last Step; carried out in the order of the fields.

    No item is refused by itself: a store whose slot is not available is lost, like a failed one,
    and a chunk that has gone is not pinned. The counts are for the daemon's figures.

    dropped: keys of stores that are given up.
    missed: keys of prompts that lookups did not find, sent once its request's lookup has ended; of
        one group if a token has a key in several.
    keys: of stores that have begun, a prompt's head first.
    slots: u4, for each key the slot, which was on loan to this scheduler.
    generations: u8, for each slot the generation under which it was lent, which it has from now on.
    first: u2, for each key the first block of its chunk that will be written; empty: all blocks of
        all chunks.
    count: u2, for each key the number of blocks from there on, 1 or more; as many items as `first`.
    descriptions: for each key its chunk's description, empty for none; or no items.
    pins: leases that begin.
    unpinned: numbers of leases that end.
    used: keys of the requests that have finished, all that their tokens fill, a prompt's head
        first; one request after the other, in the order in which they ended.
    used_counts: u4, for each request the number of its keys in `used`, 1 or more; 1,024 requests at
        most. Empty: all are of one request.
    prompt_counts: u4, for each request how many of its keys, from the first on, are of its prompt;
        empty: all.
    labels: for each request one byte, its `Label`; with bit 7 set the request was sent before, and
        only its label is new. Empty: no request has one.
    unstored: keys that were offered, got no slot, and are not offered again.
    wanted: the number of slots that the scheduler needs on loan, with those that it has.
    present: keys offered since the last Step that were READY.
    pending: keys offered since then that were being written.
    not_yet: keys offered since then, but fewer times than `reuse_threshold`.
    refused: keys offered since then that got no slot, since none was on loan.
    sought: keys to promote, a prompt's head first: those that a tier holds are promoted;
        where that is not known, shared tiers are asked.
    """

    dropped: Keys = ()
    missed: Keys = ()
    keys: Keys = ()
    slots: IntArray = NO_SLOTS
    generations: IntArray = NO_GENERATIONS
    first: IntArray = NO_ITEMS
    count: IntArray = NO_ITEMS
    descriptions: Annotated[tuple[Encoded, ...], Meta(max_length=MAX_KEYS)] = ()
    pins: Annotated[tuple[Pin, ...], Meta(max_length=MAX_KEYS)] = ()
    unpinned: JobIds = ()
    used: Keys = ()
    used_counts: IntArray = NO_SLOTS
    prompt_counts: IntArray = NO_SLOTS
    labels: Labels = b""
    unstored: Keys = ()
    wanted: Count = 0
    present: Offers = 0
    pending: Offers = 0
    not_yet: Offers = 0
    refused: Offers = 0
    sought: Keys = ()


class Stepped(Message, frozen=True):
    """Slots newly on loan to the scheduler: it may give them to keys from now on.

    slots: u4, lent now. Each is empty, or holds a chunk that lookups find until the slot is given
        to another key.
    generations: u8, of the slots once they are given to keys.
    """

    slots: IntArray
    generations: IntArray


class Reset(Message, frozen=True):
    """Drop every chunk of this engine's namespace."""


class ResetDone(Message, frozen=True):
    """Every chunk of the namespace was dropped: no lookup finds one, also after a restart.

    dropped: chunks whose slots are free, or will be soon.
    deferred: chunks whose slots become free when the leases that pin them have ended.
    """

    dropped: Count
    deferred: Count


# --------------------------------------------------------------------- jobs


class Join(Message, frozen=True):
    """First request on a connection to a lane: names the worker.

    It closes the worker's connection before this one, drops what was not read there, and stops that
    connection's jobs. The reply comes when they have ended; a job without a Done by then has
    failed.

    token: of the lane's LaneUp.
    """

    token: LaneToken


class Job(Message, frozen=True):
    """One rank's share of a store or a load.

    job: its number; free again after its Done.
    blocks: the blocks to copy, and their chunks.
    after: the timeline number that must be reached before the lane touches the memory.
    deadline_ms: from the job's arrival, in ms; afterwards it ends as `timeout`.
    """

    job: Count
    blocks: JobBlocks
    after: Count
    deadline_ms: Annotated[int, Meta(ge=1, le=600_000)]


class Store(Job, frozen=True):
    """Copy the worker's blocks into the pool. Answered by Done.

    A chunk, that is a slot with a generation, is stored by one job of each rank: a lane refuses a
    second one, also after the first has ended. To store it again, offer its key again.

    word: the store's epoch word in the control page; 0: none, it cannot be voided.
    epoch: the word's value when the store was sent; the store is void once it differs.
    """

    word: Annotated[int, Meta(ge=0, lt=EPOCH_WORDS)] = 0
    epoch: Count = 0


class Load(Job, frozen=True):
    """Copy chunks into the worker's blocks. Answered by Done.

    progress: number of the load's progress word in the control page: layers are copied one after
    another, and the lane writes there how many have arrived. 0: none, layers in any order.
    """

    progress: Annotated[int, Meta(ge=0, le=PROGRESS_WORDS)] = 0


class Done(Message, frozen=True):
    """A job has ended: nothing touches its blocks any more.

    job: its number.
    status: how it ended.
    text: why it was not OK; for people.
    bytes: copied for this rank.
    copy_ns: time spent copying, in ns.
    """

    job: Count
    status: JobStatus
    text: Text
    bytes: Count
    copy_ns: Count


class Cancel(Message, frozen=True):
    """Stop jobs; each still ends with its own Done.

    jobs: their numbers; those of ended jobs are ignored.
    """

    jobs: JobIds


class Wait(Message, frozen=True):
    """Give these jobs priority; the reply comes when all of them have ended.

    Such loads come before all other jobs, which keep an eighth of the bytes; such stores take
    turns with all engines' other loads.

    jobs: their numbers; those of ended or unknown jobs are ignored.
    """

    jobs: JobIds


# ------------------------------------------------------------------- common


class Ok(Message, frozen=True):
    """The request is complete: memory is the worker's again, or jobs are stopping or have ended.

    The Done messages of a Wait's jobs were sent before this one; a job without a Done by then has
    failed, and will not begin.
    """


class Lookups(Message, frozen=True):
    """Totals of a scheduler's lookups since its session began; they never fall.

    chunks, hit_chunks: keys looked up in the directory, and those that were READY.
    tokens, hit_tokens: prompt tokens looked up and found; None: not counted.
    aborted_requests: requests that the engine gave up because a load had failed.
    detached_tokens: of `tokens`, those looked up while no daemon served the engine.
    hints: requests that came with a hint, or got one later.
    hints_ignored: fields and actions of hints that are not known, or of an unknown version.
    hints_cut: numbers in hints that were out of range and were clamped.
    """

    chunks: Count
    hit_chunks: Count
    tokens: Count | None = None
    hit_tokens: Count | None = None
    aborted_requests: Count = 0
    detached_tokens: Count = 0
    hints: Count = 0
    hints_ignored: Count = 0
    hints_cut: Count = 0


class KvEvents(Message, frozen=True):
    """Totals of a scheduler's published KV events since its session began.

    All but lag_us never fall.

    published: changes of chunks that were published, stored and removed.
    snapshots: scans of a whole directory.
    overruns: scans because the ring of changes had overrun the reader.
    lag_us: the longest time from a change to its publication since the last report, in us.
    """

    published: Count
    snapshots: Count
    overruns: Count
    lag_us: Count


class Ping(Message, frozen=True, omit_defaults=True):
    """Check that the loop that serves all requests is alive; carries a scheduler's figures.

    lookups: totals of the session, for the daemon's figures; nil: none.
    kv_events: the same of its published KV events; nil: none.
    prefill_ns: the engine's time to compute a token of a prompt, in ns; nil: not known.
    """

    lookups: Lookups | None = None
    kv_events: KvEvents | None = None
    prefill_ns: Count | None = None


class Pong(Message, frozen=True):
    """The loop is alive.

    pid: of the process that answers.
    """

    pid: Count


class Status(Message, frozen=True):
    """Ask for the daemon's state."""


class StatusReport(Message, frozen=True):
    """The daemon's state as documented in docs/status.md.

    status: see docs/status.md.
    """

    status: dict[str, Any]


class Error(Message, frozen=True):
    """The request was not served; with request id 0: why the daemon closes the connection.

    code: for programs.
    text: for people; its wording may change.
    """

    code: ErrorCode
    text: Text

    @classmethod
    def of(cls, code: ErrorCode, text: str) -> "Error":
        """Return an error with `text` cut to the length that a message allows."""
        return cls(code=code, text=text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}...")


# --------------------------------------------------------------- operations


class Drain(Message, frozen=True):
    """Refuse new stores until Resume. For sessions of kind `tool`, as all operations."""


class Drained(Message, frozen=True):
    """The daemon refuses stores from now on.

    stores: chunks of earlier stores that are still being written.
    leases: leases that have not ended.
    """

    stores: Count
    leases: Count


class Resume(Message, frozen=True):
    """Accept new stores again; no effect on a daemon that is stopping."""


class Resumed(Message, frozen=True):
    """The daemon accepts stores.

    was_draining: false: it accepted them before.
    """

    was_draining: bool


class Clear(Message, frozen=True):
    """Drop the chunks of one namespace or of all: every chunk, or those not used for some time.

    namespace: its id; nil: all.
    unused_seconds: drop chunks not used for so long; pinned ones stay. nil: drop every chunk;
    pinned ones go when their leases end.
    """

    namespace: NamespaceId | None = None
    unused_seconds: Annotated[float, Meta(ge=0, le=1e9)] | None = None


class Cleared(Message, frozen=True):
    """What a Clear dropped.

    chunks: dropped now.
    bytes: of the pool that these chunks had.
    deferred: chunks that lookups miss from now on and that go when their leases end.
    """

    chunks: Count
    bytes: Count
    deferred: Count


class Check(Message, frozen=True):
    """Check that the broker's tables are consistent; changes nothing."""


class Checked(Message, frozen=True):
    """The result of a Check.

    violation: the first contradiction; empty: none.
    chunks: the number that was checked.
    whole: all tables were checked at one moment.
    """

    violation: Text
    chunks: Count
    whole: bool


class Explain(Message, frozen=True):
    """Ask what became of a chunk; changes nothing.

    key: the chunk's.
    namespace: the id of the namespace to search; nil: all.
    """

    key: Key
    namespace: NamespaceId | None = None


class ChunkFate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a namespace knows of a chunk.

    namespace: its id.
    model: its model's name.
    reason: why a lookup would miss the chunk, as in `counters.missed` of docs/status.md; `ready`:
        it would find it.
    slot: the chunk's; nil: not in memory.
    used_ms: since its last use; nil: not in memory, or not READY.
    gone_ms: since it left memory, or was not stored; nil: not known.
    requests: the number of finished requests that had used it when it left, 3 for more.
    tiers: that are known to hold it.
    """

    namespace: NamespaceId
    model: Text
    reason: Name
    slot: Count | None = None
    used_ms: Count | None = None
    gone_ms: Count | None = None
    requests: Count = 0
    tiers: Annotated[tuple[Name, ...], Meta(max_length=MAX_TIERS)] = ()


class Explained(Message, frozen=True):
    """What became of the chunk.

    chunks: one item for each namespace that was searched.
    """

    chunks: Annotated[tuple[ChunkFate, ...], Meta(max_length=MAX_ARRAY_ITEMS)]


# ------------------------------------------------------------ configuration


class ReloadConfig(Message, frozen=True):
    """Read the configuration again. For sessions of kind `tool`, as ShowConfig."""


class ConfigChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A setting whose value has changed.

    key: the setting's name.
    old, new: its values, as text.
    origin: where the new value comes from.
    live: false: it takes effect with the next restart.
    """

    key: Name
    old: Text
    new: Text
    origin: Text
    live: bool


class ConfigReloaded(Message, frozen=True):
    """The configuration was read.

    file: its path; empty: none.
    changes: settings whose values have changed.
    warnings: for people.
    """

    file: Text
    changes: Annotated[tuple[ConfigChange, ...], Meta(max_length=MAX_ARRAY_ITEMS)]
    warnings: Annotated[tuple[Text, ...], Meta(max_length=MAX_ARRAY_ITEMS)]


class ShowConfig(Message, frozen=True):
    """Ask for the daemon's settings."""


class ConfigShown(Message, frozen=True):
    """The settings as `kvd config show --json` prints them.

    config: see `kvd config show --json`.
    """

    config: dict[str, Any]


# ------------------------------------------------------------------ notices


class TierInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tier below the pool.

    name: from the settings, such as `disk`.
    medium: `disk`, `remote` or `memory`.
    shared: other daemons put chunks there, too, so only the tier itself knows what it holds.
    """

    name: Name
    medium: Name
    shared: bool


class Attached(Message, frozen=True):
    """To each session of an engine when all its ranks are registered and served by lanes.

    Carries one to three descriptors. The first, for every session, reads the namespace's
    directory. A scheduler gets two more: if `description_bytes` is above 0, one that reads the
    namespace's descriptions; then the read end of a non-blocking pipe, where a byte arrives each
    time that chunks of this engine have become READY. A daemon at its limit of open files sends no
    pipe.

    namespace: its id, 16 bytes.
    world_size: as registered.
    bytes_per_chunk: of a chunk in the pool, all ranks' shares together.
    num_chunks: the most that the namespace can hold; slots are numbered below it.
    reuse_threshold: a scheduler gives a key a slot when it is offered for the n-th time.
    description_bytes: the longest description that is kept; 0: none is.
    tiers: in the order in which they are asked: tier i is bit i and status i in the directory.
        Empty in a temporary namespace.
    """

    namespace: bytes
    world_size: int
    bytes_per_chunk: Count
    num_chunks: Count
    reuse_threshold: Annotated[int, Meta(ge=1, le=1000)]
    description_bytes: Count
    tiers: Annotated[tuple[TierInfo, ...], Meta(max_length=MAX_TIERS)] = ()


class Detached(Message, frozen=True):
    """A rank has left, or a lane has ended: no loads or stores until the next Attached.

    reason: for people.
    """

    reason: Text


class LaneUp(Message, frozen=True):
    """A lane has mapped the worker's memory; carries its lifeline, whose EOF means that it is dead.

    device: as registered.
    incarnation: one more for every new lane process of the device.
    endpoint: where to connect for jobs, `ipc://` and a path.
    token: for Join.
    """

    device: Name
    incarnation: Count
    endpoint: Text
    token: LaneToken


_REQUESTS: dict[int, tuple[type[Message], type[Message]]] = {
    0x01: (Hello, Welcome),
    0x03: (Register, Registered),
    0x05: (Unregister, Ok),
    0x10: (Step, Stepped),
    0x12: (Reset, ResetDone),
    0x20: (Store, Done),
    0x21: (Load, Done),
    0x23: (Cancel, Ok),
    0x25: (Wait, Ok),
    0x27: (Join, Ok),
    0x30: (Ping, Pong),
    0x32: (Status, StatusReport),
    0x50: (Drain, Drained),
    0x52: (Resume, Resumed),
    0x54: (Clear, Cleared),
    0x58: (Check, Checked),
    0x5A: (Explain, Explained),
    0x60: (ReloadConfig, ConfigReloaded),
    0x62: (ShowConfig, ConfigShown),
}
TAGS: dict[int, type[Message]] = {
    **{
        tag: kind
        for request, exchange in _REQUESTS.items()
        for tag, kind in enumerate(exchange, request)
        if kind not in (Done, Ok)  # the reply to several
    },
    0x22: Done,
    0x3E: Ok,
    0x3F: Error,
    0x41: Attached,
    0x42: Detached,
    0x43: LaneUp,
}
"""Tag → type. A reply has its request's tag plus one, where it is the reply to that one alone."""

REPLY_OF: dict[type[Message], type[Message]] = dict(_REQUESTS.values())
"""Request type → the type of its one reply (or `Error`)."""
