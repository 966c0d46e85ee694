"""Every message of the wire, as frozen typed values, and the tag table.

Requests go from a client to the broker or to a lane and get exactly one reply:
the reply type named in `REPLY_OF`, or `Error`. Notices come from the broker over the same
connection, in order with its replies, and are not answered.
Times are milliseconds unless a name says otherwise; sizes are bytes.

docs/protocol.md is generated from here: a docstring's first line says what a message is
for, lines of the form ``field, field: meaning`` what its fields are, comments what codes mean.
"""

from enum import IntEnum, StrEnum
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from msgspec import Meta

from kvd_proto.descriptions import MAX_DESCRIPTION_BYTES
from kvd_proto.jobs import EPOCH_WORDS, MAX_ARRAY_ITEMS, PROGRESS_WORDS, IntArray, JobBlocks
from kvd_proto.layout import MAX_STORAGES, RankLayout

PROTOCOL_VERSION = 4
"""Grows with every change after which a frame of the version before is refused, or says another
thing. A daemon and a client of different versions do not talk."""
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

    BAD_MESSAGE = "bad_message"  # could not be decoded beyond its header: a bug in the client
    BAD_VERSION = "bad_version"  # no common protocol version: update the older side
    BAD_SESSION = "bad_session"  # the lane does not know the worker; Join with LaneUp's token
    BAD_STATE = "bad_state"  # not allowed in this session's state or for its kind
    BAD_LAYOUT = "bad_layout"  # registration of memory that cannot be served: do not try again
    NOT_READY = "not_ready"  # ranks, pool or a registration's descriptors are not there yet: a miss
    LIMIT = "limit"  # a limit of the daemon would be exceeded: a miss
    DRAINING = "draining"  # the daemon takes no new work: a miss
    BAD_CONFIG = "bad_config"  # the configuration cannot be used; what held holds on
    LANE_LOST = "lane_lost"  # the device's lane is being replaced: try again later
    FORBIDDEN = "forbidden"  # this user may not use this daemon, or not this engine's name
    INTERNAL = "internal"  # a bug in kvd; the log has the details: a miss


class JobStatus(StrEnum):
    """How a job ended. Everything but OK is a miss for the engine."""

    OK = "ok"  # every byte was copied and the chunks were what was asked for to the end
    CANCELLED = "cancelled"  # by Cancel, before it was done
    STALE = "stale"  # a chunk is not, or not any more, what the job named: slot, generation, blocks
    VOID = "void"  # the worker gave the store up by its word of the control page
    TIMEOUT = "timeout"  # not done within its deadline_ms
    REFUSED = "refused"  # arrays that do not fit, a job number in use, or no engine attached
    SHED = "shed"  # the engine's queue in the lane is full; stores go first
    FAILED = "failed"  # the device failed


MAX_SECONDS = 86_400
"""Longer waits are cut to this."""
LABEL_ONLY = 0x80
"""Set in a label's byte: the request was reported before, and only its label is new."""


class Label(IntEnum):
    """When the next request that uses the same chunks is expected."""

    NONE = 0  # nothing is known
    DONE = 1  # no request will continue this one
    UNDER_10S = 2  # one will in less than 10 s
    UNDER_60S = 3  # one will in less than 60 s
    UNDER_600S = 4  # one will in less than 600 s
    LATER = 5  # one will in 600 s or more


def label_for(seconds: float) -> Label:
    """The label of a request that is continued after so many seconds; negative counts as 0."""
    if seconds < 10:
        return Label.UNDER_10S
    if seconds < 60:
        return Label.UNDER_60S
    return Label.UNDER_600S if seconds < 600 else Label.LATER


# ---------------------------------------------------------------- handshake


class Hello(Message, frozen=True):
    """First request of a session.

    kind: `scheduler` asks for chunks, `worker` registers memory, `tool` belongs to no engine.
    engine: the engine's name, the same in all its sessions and in no other engine's; of a tool any.
    pid: the client's process, as it sees itself; for people.
    protocol_min, protocol_max: versions that the client speaks; one of them must be the daemon's.
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

    protocol: the version that is spoken from now on.
    daemon: its name and version; for people.
    pid: the daemon's process, as it sees itself.
    """

    protocol: int
    daemon: Name
    pid: Count


class Fingerprint(Message, frozen=True):
    """What must be equal for two engines to share chunks; all of it is hashed.

    Layout figures (groups, pages, world size, replication) are taken from the
    registration itself, so that they cannot be claimed differently from what
    is stored.

    model: its name; quotas and reports go by it.
    revision: of the model's weights.
    dtype: of the KV cache.
    kv_layout: how a block's bytes are ordered.
    attention_backend: where its KV differs from that of others.
    parallelism: how the model is divided among ranks.
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
    """A storage in host memory that a descriptor names.

    fd_index: number of the descriptor.
    offset: where in the descriptor's memory the storage begins, in bytes.
    """

    fd_index: Count
    offset: Count = 0


class IpcHandle(Message, frozen=True, tag="ipc"):
    """A storage in a CUDA allocation of cudaMalloc, which its legacy IPC handle names.

    handle: what `cuIpcGetMemHandle` gives for the allocation's start.
    allocation: size of the allocation in bytes.
    offset: from the allocation's start to the storage's, in bytes.
    """

    handle: Annotated[bytes, Meta(min_length=64, max_length=64)]
    allocation: Count
    offset: Count = 0


class VmmSegment(msgspec.Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """A CUDA allocation of the virtual memory management, named by a descriptor.

    fd_index: number of the descriptor that `cuMemExportToShareableHandle` gave, of the kind
    POSIX file descriptor.
    nbytes: size of the allocation, all of which is mapped.
    """

    fd_index: Count
    nbytes: Annotated[int, Meta(ge=1, le=2**63 - 1)]


class VmmHandle(Message, frozen=True, tag="vmm"):
    """A storage in CUDA memory of the virtual memory management.

    segments: the allocations that it lies in, in the order of their addresses; each begins where
    the one before ends.
    offset: from the first segment's start to the storage's, in bytes.
    """

    segments: Annotated[tuple[VmmSegment, ...], Meta(min_length=1, max_length=MAX_SEGMENTS)]
    offset: Count = 0


Handle: TypeAlias = HostHandle | IpcHandle | VmmHandle


def fd_index(handle: Handle) -> int:
    """The highest descriptor number that a handle needs; 0, the control page, where none."""
    match handle:
        case HostHandle():
            return handle.fd_index
        case VmmHandle():
            return max(segment.fd_index for segment in handle.segments)
        case IpcHandle():
            return 0


class Register(Message, frozen=True, kw_only=True, omit_defaults=True):
    """A worker's KV memory; its descriptors come with it.

    Descriptor number 0 is the control page. A worker whose handles need no descriptors may send
    none: without a control page its jobs have `after`, `word`, `epoch` and `progress` 0. Then it
    waits for its stream before it sends a job, and for the job's end before it uses the blocks.

    rank: this worker's index among those that hold shares of a chunk; below world_size.
    world_size: how many workers these are.
    stage: pipeline stage; ranks of one stage must have equal pages.
    device: `host`; or `cuda:` and the UUID's 32 hex digits, with `MIG-` before them of a MIG
    instance. It decides the kind of handles.
    fingerprint: the same of all ranks.
    layout: what the memory looks like.
    handles: the memory of each of the layout's storages, in their order.
    temporary: chunks are shared with temporary engines only and dropped soon after the last of
    them has left; such an engine takes no room in use but one column of the pool's grid.
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
    """The registration holds: the lane has mapped the memory.

    missing_ranks: those that have not registered; where it is empty, Attached follows.
    """

    missing_ranks: Annotated[tuple[int, ...], Meta(max_length=MAX_RANKS)]


class Unregister(Message, frozen=True):
    """Forget this session's tensors; answered when nothing touches them any more."""


# ---------------------------------------------------------------- scheduler


class Pin(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Chunks that a load reads and that are to stay until it has ended: a lease on them.

    lease: its number, by which the scheduler gives it back; new in its session.
    lease_ms: how long the chunks are to stay, in ms; the daemon may give less.
    slots: u4, of the chunks, as the directory has them; a prompt's head first.
    generations: u8, of these slots; a chunk that is not READY with its generation is not pinned.
    """

    lease: Count
    lease_ms: Annotated[int, Meta(ge=1, le=600_000)]
    slots: IntArray
    generations: IntArray


class Step(Message, frozen=True, omit_defaults=True):
    """What a scheduler has decided by itself since its last one; carried out in the fields' order.

    Nothing of it is refused one by one: a store that cannot be had is lost, as a failed one, and
    a chunk that has gone is not pinned. The counts are for the daemon's figures.

    dropped: keys of stores that are given up.
    missed: keys of prompts that lookups did not find, each when its request's lookup has ended;
        of one group where a token has a key in several.
    keys: of stores that have begun, a prompt's head first.
    slots: u4, the slot of each, which was lent to this scheduler.
    generations: u8, under which it was lent, and which the slot has from now on.
    first: u2, for each key the first block of its chunk that will be written; empty: all blocks
        of all chunks will be.
    count: u2, how many blocks from there on, 1 or more; as many items as `first`.
    descriptions: for each key its chunk's description, empty for none; or no items at all.
    pins: chunks that are to stay.
    unpinned: numbers of leases that are given back.
    used: keys of the requests that have finished, all that their tokens fill, a prompt's head
        first; one request after the other, in the order in which they ended.
    used_counts: u4, how many of `used` each request has, at least 1; 1,024 requests at most. Empty:
        all are of one request.
    prompt_counts: u4, how many of each request's keys, from the first on, are of its prompt;
        empty: all are.
    labels: one byte for each request, its `Label`; with bit 7 set the request was named before, and
        only its label is new. Empty: no request has one.
    unstored: keys that were offered, got no slot, and are not offered again.
    wanted: slots that the scheduler would like to have on loan, in all.
    present: keys that were offered since the last Step and found READY.
    pending: keys that were offered since then and found being written.
    not_yet: keys that were offered since then and not often enough to be worth a slot.
    refused: keys that were offered since then, for which no slot was at hand.
    sought: keys that are wanted in memory, a prompt's head first: those that a tier holds are
        brought up; where nobody knows, shared tiers are asked.
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
    """Slots that the scheduler may give to keys from now on, besides those that it has.

    slots: u4, lent now. Each holds nothing, or a chunk that is found as before until the slot is
        given to another key.
    generations: u8, which the slots have once they are given to keys.
    """

    slots: IntArray
    generations: IntArray


class Reset(Message, frozen=True):
    """Drop every chunk of this engine's namespace."""


class ResetDone(Message, frozen=True):
    """Nothing that was in the namespace is found any more, by nobody and after no restart.

    dropped: chunks whose slots are free, or will be soon.
    deferred: chunks whose slots are free when the leases that pin them have ended.
    """

    dropped: Count
    deferred: Count


# --------------------------------------------------------------------- jobs


class Join(Message, frozen=True):
    """First request on a connection to a lane: which worker sends on it.

    It ends the worker's connection before this one, with what was not read there, and stops the
    jobs that came there. Answered when these have ended; one without a Done by then has failed.

    token: of the LaneUp that named the lane.
    """

    token: LaneToken


class Job(Message, frozen=True):
    """One rank's share of a store or a load.

    job: its number; free again when its Done has come.
    blocks: what it moves.
    after: the timeline number that must be reached before memory is touched.
    deadline_ms: from the job's arrival, in ms; one that has not ended by then ends as `timeout`.
    """

    job: Count
    blocks: JobBlocks
    after: Count
    deadline_ms: Annotated[int, Meta(ge=1, le=600_000)]


class Store(Job, frozen=True):
    """Copy the worker's blocks into the pool. Answered by Done.

    word: the word of the control page that is this store's while it is under way; 0: none, and it
    cannot be voided.
    epoch: the number that stood there when the store was sent; with another one it is void.
    """

    word: Annotated[int, Meta(ge=0, lt=EPOCH_WORDS)] = 0
    epoch: Count = 0


class Load(Job, frozen=True):
    """Copy chunks into the worker's blocks. Answered by Done.

    progress: number of the control page's word where the lane says how many layers have arrived;
    they are moved one after another then. 0: in any order, and nothing is said.
    """

    progress: Annotated[int, Meta(ge=0, le=PROGRESS_WORDS)] = 0


class Done(Message, frozen=True):
    """The job's end: nothing touches its blocks any more.

    job: its number.
    status: how it ended.
    text: why it ended badly, for people.
    bytes: moved by this rank.
    copy_ns: time spent in copying, in ns.
    """

    job: Count
    status: JobStatus
    text: Text
    bytes: Count
    copy_ns: Count


class Cancel(Message, frozen=True):
    """Stop these jobs; each still ends with its own Done.

    jobs: their numbers; those that have ended are passed over.
    """

    jobs: JobIds


class Wait(Message, frozen=True):
    """Do these jobs first; answered when all of them have ended.

    jobs: their numbers; those that have ended, or never came, are passed over.
    """

    jobs: JobIds


# ------------------------------------------------------------------- common


class Ok(Message, frozen=True):
    """It is done: memory is the worker's own again, jobs stop or have ended.

    Done messages of the jobs that a Wait names were sent before this one; a job without a Done by
    then has failed, and does not begin any more.
    """


class Lookups(Message, frozen=True):
    """What a scheduler's session has looked up since it began, and what came of it.

    Figures never fall.

    chunks, hit_chunks: keys looked up in the directory, and those that were READY.
    tokens, hit_tokens: prompt tokens asked for and found; None: not counted.
    aborted_requests: that the engine gave up because a load had failed.
    detached_tokens: of `tokens`, those asked for while no daemon served the engine.
    hints: requests that came with a hint, or got one later.
    hints_ignored: fields and actions of hints that are not known, or of no known version.
    hints_cut: numbers of hints that were out of range and were cut.
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
    """What a scheduler's engine has published as KV events since the session began.

    Figures but the lag never fall.

    published: changes of chunks that were published, stored and removed ones.
    snapshots: how often it looked through a whole directory.
    overruns: how often that was so because the ring of changes had overrun it.
    lag_us: the longest time from a change to its publication since the last report, in us.
    """

    published: Count
    snapshots: Count
    overruns: Count
    lag_us: Count


class Ping(Message, frozen=True, omit_defaults=True):
    """Answered by the loop that serves every other request; carries figures from a scheduler.

    lookups: totals of a scheduler's session, for the daemon's figures; nil: none to tell.
    kv_events: what it has published, if it publishes KV events; nil: none to tell.
    prefill_ns: nanoseconds in which the engine computes a token of a prompt; nil: not known.
    """

    lookups: Lookups | None = None
    kv_events: KvEvents | None = None
    prefill_ns: Count | None = None


class Pong(Message, frozen=True):
    """Alive.

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
    """A request that was not served; with request id 0, why the daemon ends the connection.

    code: for programs.
    text: for people; its wording may change.
    """

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
    """Stores are refused. So many chunks of earlier stores, and leases, are still in flight.

    stores: chunks that are still being written.
    leases: leases that are still held.
    """

    stores: Count
    leases: Count


class Resume(Message, frozen=True):
    """Take new stores again; a daemon that stops stays as it is."""


class Resumed(Message, frozen=True):
    """Stores are taken.

    was_draining: false where nothing had to change.
    """

    was_draining: bool


class Clear(Message, frozen=True):
    """Drop the chunks of a namespace, or of all: every one, or those that were of no use for long.

    namespace: its id; nil: all.
    unused_seconds: since a chunk was last of use; pinned ones are in use and stay. nil: every
    chunk; pinned ones go when their leases end.
    """

    namespace: NamespaceId | None = None
    unused_seconds: Annotated[float, Meta(ge=0, le=1e9)] | None = None


class Cleared(Message, frozen=True):
    """What a Clear dropped.

    chunks: dropped now.
    bytes: of the pool that they had.
    deferred: chunks that nobody finds any more and that go when their leases end.
    """

    chunks: Count
    bytes: Count
    deferred: Count


class Check(Message, frozen=True):
    """Look whether all that the broker believes fits together; nothing is changed."""


class Checked(Message, frozen=True):
    """What was found.

    violation: the first contradiction; empty: none.
    chunks: that were looked at.
    whole: whether all of it was looked at in one moment.
    """

    violation: Text
    chunks: Count
    whole: bool


class Explain(Message, frozen=True):
    """Ask what became of a chunk; nothing is changed.

    key: the chunk's.
    namespace: where it is looked for; nil: everywhere.
    """

    key: Key
    namespace: NamespaceId | None = None


class ChunkFate(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a namespace knows of a chunk.

    namespace: its id.
    model: its model's name.
    reason: why the chunk would be missed, as in `counters.missed` of docs/status.md; `ready`: it
        would be found.
    slot: where it is; nil: not in memory.
    used_ms: since it was last used; nil: not in memory, or not READY.
    gone_ms: since it left memory, or was not stored; nil: not known.
    requests: finished ones that had it when it left, 3 for more.
    tiers: that are known to have it.
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

    chunks: one for each namespace that was asked.
    """

    chunks: Annotated[tuple[ChunkFate, ...], Meta(max_length=MAX_ARRAY_ITEMS)]


# ------------------------------------------------------------ configuration


class ReloadConfig(Message, frozen=True):
    """Read the configuration again. Of sessions of kind `tool` only, as ShowConfig."""


class ConfigChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A setting that differs from what held.

    key: the setting's name.
    old, new: its values, as text.
    origin: where the new value comes from.
    live: false where it waits for a restart.
    """

    key: Name
    old: Text
    new: Text
    origin: Text
    live: bool


class ConfigReloaded(Message, frozen=True):
    """The configuration was read.

    file: that was read; empty: none.
    changes: settings that differ from what held.
    warnings: for people.
    """

    file: Text
    changes: Annotated[tuple[ConfigChange, ...], Meta(max_length=MAX_ARRAY_ITEMS)]
    warnings: Annotated[tuple[Text, ...], Meta(max_length=MAX_ARRAY_ITEMS)]


class ShowConfig(Message, frozen=True):
    """Ask for the settings that the daemon runs with."""


class ConfigShown(Message, frozen=True):
    """The settings as `kvd config show --json` prints them.

    config: see `kvd config show --json`.
    """

    config: dict[str, Any]


# ------------------------------------------------------------------ notices


class TierInfo(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A tier below the pool.

    name: as the operator calls it, such as `disk`.
    medium: `disk`, `remote` or `memory`.
    shared: others put there, too, so that what it holds is known only by asking.
    """

    name: Name
    medium: Name
    shared: bool


class Attached(Message, frozen=True):
    """Broker to every session of an engine whose ranks are all registered and served by lanes.

    Carries one to three descriptors. The first one of every session reads the namespace's
    directory. A scheduler gets two more: where `description_bytes` is above 0 one that reads the
    namespace's descriptions; then the read end of a pipe, non-blocking, where a byte comes each
    time that chunks which this engine stored became READY. A daemon that has no descriptor left
    sends no pipe.

    namespace: its id, 16 bytes.
    world_size: as registered.
    bytes_per_chunk: that a chunk takes in the pool, all ranks' shares together.
    num_chunks: that the namespace can hold at most; slots are numbered below it.
    reuse_threshold: a scheduler gives a key a slot when it is offered for the n-th time.
    description_bytes: that a description may have to be kept; 0: none is.
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
    """A rank has left, or a lane is gone: nothing can be loaded or stored until the next Attached.

    reason: for people.
    """

    reason: Text


class LaneUp(Message, frozen=True):
    """A lane has mapped the worker's memory; carries its lifeline (EOF there = it is dead).

    device: as it was registered.
    incarnation: one more with every new lane process of the device.
    endpoint: where jobs go, `ipc://` and a path.
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
