"""Write the generated part of docs/protocol.md: messages and fields, codes, a directory, vectors.

Everything below the marker line comes from kvd_proto; run `make docs` after a
change there. A test compares the file with what this module would write.
"""

import inspect
import re
import types
from collections.abc import Iterable, Mapping
from enum import Enum, StrEnum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints
from zlib import crc32

import msgspec

from kvd.cache.directory import DirectoryWriter
from kvd_proto import messages as m
from kvd_proto import zmtp
from kvd_proto.changes import CHANGE_BYTES
from kvd_proto.codec import WIRE
from kvd_proto.descriptions import Description, encode, pack_header, pack_record
from kvd_proto.directory import DirectoryHeader, SlotState
from kvd_proto.jobs import IntArray, JobBlocks
from kvd_proto.layout import GroupSpec, Range, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import (
    REPLY_OF,
    TAGS,
    ChunkFate,
    ConfigChange,
    ErrorCode,
    Fingerprint,
    HostHandle,
    IpcHandle,
    JobStatus,
    KvEvents,
    Label,
    Lookups,
    Pin,
    TierInfo,
    VmmHandle,
    VmmSegment,
)
from kvd_proto.tier_table import ENTRY_BYTES, TierHealth

FILE = Path(__file__).parent / "protocol.md"
MARKER = "<!-- generated below this line by docs/generate_protocol.py -->"
PARTS = (
    *(RankLayout, TensorSpec, GroupSpec, TensorRef, Fingerprint),
    *(
        HostHandle,
        IpcHandle,
        VmmHandle,
        VmmSegment,
        JobBlocks,
        Pin,
        Lookups,
        KvEvents,
        ConfigChange,
        TierInfo,
        ChunkFate,
    ),
)
"""Maps inside messages, which have no tag."""
CODES = {
    ErrorCode: "see [error codes](#error-codes)",
    JobStatus: "see [job statuses](#job-statuses)",
}
SESSION = {
    "connected": {"hello": "welcomed", "lost": "closed"},
    "welcomed": {"register": "registered", "lost": "closed"},
    "registered": {"unregister": "welcomed", "lost": "closed"},
    "closed": {},
}
"""Life of a session, as the broker sees it."""
JOB = {
    "queued": {"start": "copying", "stop": "ended"},
    "copying": {"copied": "ended", "stop": "draining"},
    "draining": {"drained": "ended"},
    "ended": {},
}
"""Life of a job, in its lane."""
SLOT = {
    "free": {"begin": "writing", "promote": "writing"},
    "writing": {"all_shares": "ready", "promoted": "ready", "give_up": "draining"},
    "ready": {"evict": "free", "begin_another": "writing"},
    "draining": {"revoked": "free"},
}
"""Life of a slot: the states of a record in the directory."""
BOOT_ID = bytes(range(16))
TOKEN = bytes(range(16, 32))
REQUEST_ID = 7

DESCRIPTION = Description(
    parent=bytes(range(64, 96)),
    hashes=(bytes(range(96, 128)), bytes(range(128, 160))),
    tokens=b"".join(token.to_bytes(4, "little") for token in (101, 7, 65_536, 3, 9, 9, 1, 128_000)),
    block_size=4,
    kind="full_attention",
    lora="adapter",
    extra=(("adapter", ("image-hash", -2)), None),
)
DESCRIBED = (7, 2)
"""Slot and generation of the chunk that it describes."""

_KEYS = (bytes(32) + b"\0\0\0\0", bytes(32) + b"\0\0\0\1")
_LAYOUT = RankLayout(
    num_blocks=8,
    blocks_per_chunk=2,
    hash_block_size=16,
    storages=(65536,),
    tensors=(TensorSpec(storage=0, offset=0, page_bytes=4096, block_stride=8192),),
    groups=(GroupSpec(refs=(TensorRef(tensor=0, page_bytes=4096),), block_size=16),),
    null_block=0,
)
_PIN = m.Pin(
    lease=5, lease_ms=60000, slots=IntArray.of((7,), "u4"), generations=IntArray.of((2,), "u8")
)
_BLOCKS = JobBlocks.of((3, 4, 5), (3,), (1,), (0, 9), (1, 4))
EXAMPLES: tuple[m.Message, ...] = (
    m.Hello(
        kind="worker",
        engine="llama-70b",
        pid=4242,
        protocol_min=m.PROTOCOL_VERSION,
        protocol_max=m.PROTOCOL_VERSION,
        client="docs 1",
    ),
    m.Welcome(protocol=m.PROTOCOL_VERSION, daemon="kvd 0.1.0", pid=99),
    m.Register(
        rank=0,
        world_size=2,
        device="host",
        fingerprint=m.Fingerprint(model="llama-70b", dtype="bfloat16"),
        layout=_LAYOUT,
        handles=(m.HostHandle(fd_index=1),),
    ),
    m.Registered(missing_ranks=(1,)),
    m.Unregister(),
    m.Step(
        keys=_KEYS,
        slots=IntArray.of((0, 1), "u4"),
        generations=IntArray.of((1, 2), "u8"),
        descriptions=(encode(DESCRIPTION), b""),
        pins=(_PIN,),
        unpinned=(4,),
        used=_KEYS,
        labels=bytes((Label.UNDER_60S,)),
        wanted=64,
        present=1,
    ),
    m.Stepped(
        slots=IntArray.of((2, 3), "u4"),
        generations=IntArray.of((3, 4), "u8"),
    ),
    m.Reset(),
    m.ResetDone(dropped=1, deferred=0),
    m.Join(token=TOKEN),
    m.Store(job=11, blocks=_BLOCKS, after=3, word=1, epoch=0, deadline_ms=500),
    m.Load(job=12, blocks=_BLOCKS, after=4, deadline_ms=500),
    m.Done(job=11, status=m.JobStatus.OK, text="", bytes=12288, copy_ns=9000),
    m.Cancel(jobs=(11, 12)),
    m.Wait(jobs=(11,)),
    m.Ok(),
    m.Ping(
        lookups=m.Lookups(chunks=12, hit_chunks=8, tokens=400, hit_tokens=256),
        kv_events=m.KvEvents(published=7, snapshots=1, overruns=0, lag_us=900),
    ),
    m.Pong(pid=99),
    m.Status(),
    m.StatusReport(status={"ready": True}),
    m.Error(code=m.ErrorCode.NOT_READY, text="engine 'llama-70b': ranks [1] are missing"),
    m.Attached(
        namespace=bytes(range(32, 48)),
        world_size=2,
        bytes_per_chunk=16384,
        num_chunks=4096,
        reuse_threshold=1,
        description_bytes=752,
        tiers=(TierInfo(name="disk", medium="disk", shared=False),),
    ),
    m.Detached(reason="rank 1 is gone"),
    m.LaneUp(device="host", incarnation=1, endpoint="ipc:///run/kvd/lane-host-1.sock", token=TOKEN),
    m.Drain(),
    m.Drained(stores=2, leases=1),
    m.Resume(),
    m.Resumed(was_draining=True),
    m.Clear(namespace=bytes(range(32, 48))),
    m.Cleared(chunks=412, bytes=6750208, deferred=3),
    m.Check(),
    m.Checked(violation="", chunks=412, whole=True),
    m.Explain(key=b"0123456789abcdef"),
    m.Explained(
        chunks=(
            m.ChunkFate(
                namespace=bytes(range(32, 48)),
                model="llama-70b",
                reason="evicted",
                gone_ms=9000,
                requests=2,
            ),
        )
    ),
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
"""One of every message."""
Struct = type[msgspec.Struct]
M = TypeVar("M", bound=m.Message)


def _first_line(text: str | None) -> str:
    return (text or "").strip().splitlines()[0]


def _anchor(name: str) -> str:
    return f"[{name}](#{name.lower()})"


# -------------------------------------------------------------------- fields


def _meanings(kind: Struct) -> dict[str, str]:
    """What the docstring says of each field, in lines `field, field: meaning` and those after.

    Raises:
        ValueError: it says nothing of a field.
    """
    names = [field.name for field in msgspec.structs.fields(kind)]
    found: dict[str, str] = {}
    current: list[str] = []
    for line in inspect.cleandoc("\n\n".join(_docs(kind))).splitlines():
        start = re.match(r"(\w+(?:, \w+)*): (.+)", line)
        if start and set(listed := start[1].split(", ")) <= set(names):
            current = listed
            found |= dict.fromkeys(current, start[2])
        elif not line.strip():
            current = []
        else:
            found |= {name: f"{found[name]} {line.strip()}" for name in current}
    missing = [name for name in names if name not in found]
    if missing:
        raise ValueError(f"the docstring of {kind.__name__} says nothing of {missing}")
    return found


def _docs(kind: Struct) -> Iterable[str]:
    """Its own docstring, and those of the messages that it inherits fields from."""
    bases = [one for one in kind.__mro__ if issubclass(one, msgspec.Struct)]
    return (inspect.cleandoc(one.__doc__) for one in bases if one.__doc__)


def _type(hint: Any) -> tuple[str, list[str]]:
    """How a field's type is called on the wire, and the bounds of its values."""
    origin, arguments = get_origin(hint), get_args(hint)
    if origin is Annotated:
        text, bounds = _type(arguments[0])
        return text, bounds + [b for meta in arguments[1:] for b in _bounds(meta, text)]
    if origin in (Union, types.UnionType):
        parts = [_type(argument) for argument in arguments]
        return " or ".join(text for text, _ in parts), [b for _, bounds in parts for b in bounds]
    if origin is tuple:
        text, bounds = _type(arguments[0])
        return f"array of {text}", [f"each {bound}" for bound in bounds]
    if origin is Literal:
        return "str", [", ".join(f"`{argument}`" for argument in arguments)]
    if origin is dict:
        return "map", []
    if hint in CODES:
        return "str", [CODES[hint]]
    if hint is IntArray:
        return "ints", []
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        return _anchor(hint.__name__), []
    return {bytes: "bin", type(None): "nil"}.get(hint, hint.__name__), []


def _bounds(meta: Any, text: str) -> list[str]:
    unit = {"str": " characters", "bin": " bytes"}.get(text, " items")
    if isinstance(meta, Range):
        return [_span(meta.low, meta.high) + (" items" if text.startswith("array") else "")]
    if meta.max_length is not None:
        low, high = meta.min_length or 0, meta.max_length
        return [_span(low, high) + unit if low != high else f"{low}{unit}"]
    high = meta.le if meta.le is not None else meta.lt - 1
    return [_span(meta.ge, high)] + ([f"`{meta.pattern}`"] if meta.pattern else [])


def _span(low: float, high: float) -> str:
    return f"{_number(low)} to {_number(high)}"


def _number(value: float) -> str:
    for power in (31, 48, 63):
        if value in (2**power, 2**power - 1):
            return f"2^{power}" + (" - 1" if value % 2 else "")
    return f"{value:,.0f}"


def _default(field: msgspec.structs.FieldInfo) -> str:
    if field.required:
        return "required"
    value = field.default
    if value is None:
        return "nil"
    if isinstance(value, (str, IntArray)) and not len(value):
        return "empty"
    return f"`{str(value).lower()}`"


def _fields(kind: Struct) -> list[str]:
    fields = msgspec.structs.fields(kind)
    config = kind.__struct_config__
    rows = []
    if config.tag is not None:
        kinds = "says which kind it is."
        rows.append(f"| `{config.tag_field}` | str | `{config.tag}` | required | {kinds} |")
    if fields:
        hints = get_type_hints(kind, include_extras=True)
        meanings = _meanings(kind)
    for field in fields:
        text, bounds = _type(hints[field.name])
        rows.append(
            f"| `{field.encode_name}` | {text} | {'; '.join(bounds)} | {_default(field)} |"
            f" {meanings[field.name]} |"
        )
    if not rows:
        return ["No fields: an empty map."]
    return ["| field | type | values | default | meaning |", "|---|---|---|---|---|", *rows]


def _messages() -> list[str]:
    lines = ["## Messages", "", "| tag | message | reply | meaning |", "|---|---|---|---|"]
    for tag, kind in sorted(TAGS.items()):
        reply = _anchor(REPLY_OF[kind].__name__) if kind in REPLY_OF else ""
        name = _anchor(kind.__name__)
        lines.append(f"| 0x{tag:02X} | {name} | {reply} | {_first_line(kind.__doc__)} |")
    return lines


def _all_fields() -> list[str]:
    lines = ["## Fields", ""]
    for tag, kind in sorted(TAGS.items()):
        lines += [f"### {kind.__name__}", "", f"Tag 0x{tag:02X}.", "", *_fields(kind), ""]
    for part in PARTS:
        lines += [f"### {part.__name__}", "", _first_line(part.__doc__), "", *_fields(part), ""]
    return lines


# --------------------------------------------------------------------- codes


def _codes(title: str, codes: type[Enum]) -> list[str]:
    """The members of an enumeration, with the comments behind them.

    Raises:
        ValueError: a member has none.
    """
    source = inspect.getsource(codes)
    comments = dict(re.findall(r"^ +([A-Z0-9_]+) = .*?  # (.+)$", source, re.MULTILINE))
    lines = [f"## {title}", "", "| value | name | meaning |", "|---|---|---|"]
    if issubclass(codes, StrEnum):
        lines = [f"## {title}", "", "| value | meaning |", "|---|---|"]
    for code in codes:
        if code.name not in comments:
            raise ValueError(f"{codes.__name__}.{code.name} has no comment that says what it means")
        name = "" if isinstance(code, StrEnum) else f" {code.name} |"
        lines.append(f"| `{code.value}` |{name} {comments[code.name]} |")
    return lines


def _diagram(title: str, table: Mapping[Any, Mapping[Any, str]]) -> list[str]:
    lines = [f"### {title}", "", "```mermaid", "stateDiagram-v2"]
    lines.append(f"    [*] --> {next(iter(table))}")
    for state, arrows in table.items():
        lines += [f"    {state} --> {target}: {event}" for event, target in arrows.items()]
        if not arrows:
            lines.append(f"    {state} --> [*]")
    return [*lines, "```", ""]


# ----------------------------------------------------------------- directory


def _example_directory() -> tuple[DirectoryWriter, list[bytes]]:
    """A directory of five slots for chunks of four blocks above two tiers, and keys to look up.

    All are at one home, the last one is not there. The first key is there twice: what was there
    before a reset does not count. The third has half of its blocks. The last two lie in tiers.
    """
    header = DirectoryHeader.plan(
        5, bytes(range(32, 48)), BOOT_ID, blocks_per_chunk=4, tier_capacity=8, num_tiers=2
    )
    writer = DirectoryWriter(bytearray(header.total_bytes), header)
    mask = writer.header.index_capacity - 1
    names = (b"chunk-%d" % number for number in range(1000))
    keys = [key for key in names if crc32(key) & mask == mask][:4]
    _begin(writer, keys[:1], [4])
    writer.add_share(4, 0, 0, 4, 1)
    writer.make_ready(4)
    writer.forget()
    _begin(writer, keys[:3], [2, 0, 1])
    writer.add_share(2, 0, 0, 4, 1)
    writer.make_ready(2)
    writer.add_share(1, 0, 2, 2, 1)
    writer.make_ready(1)
    if (tiers := writer.tiers) is not None:
        tiers.hold(keys[2], 0, 0, 4, 1)
        tiers.hold(keys[3], 1, 1, 3, 1)
        tiers.set_health(0, TierHealth(True, 900, 2_300_000_000, 4_194_304))
    _set_times(writer)
    return writer, keys


def _set_times(writer: DirectoryWriter) -> None:
    """The n-th change came n ms after the host's clock began, so that every run shows the same."""
    words = memoryview(writer._memory).cast("Q")  # noqa: SLF001  # its bytes are shown
    for number in range(1, writer.changes.head + 1):
        at = writer.header.changes_offset + (number - 1) * CHANGE_BYTES
        words[at // 8 + 1] = number * 1_000_000


def _begin(writer: DirectoryWriter, keys: list[bytes], slots: list[int]) -> None:
    """Chunks that are being written by engine 1."""
    for key, slot in zip(keys, slots, strict=True):
        writer.place(key, slot, 1)


def _lookup(writer: DirectoryWriter, key: bytes) -> str:
    """A row of the table: the walk that finds a key, or not."""
    head, whole = writer.header, memoryview(writer._memory)  # noqa: SLF001  # its bytes are shown
    hash32, home = crc32(key), crc32(key) % head.index_capacity
    walk = []
    at = home
    while entry := int.from_bytes(whole[head.index_offset + 8 * at :][:8], "little"):
        slot = (entry & 0xFFFF_FFFF) - 1
        same = "same hash" if entry >> 32 == hash32 else "another hash"
        walk.append(f"{at}: 0x{entry:016x}, slot {slot}, {same}")
        if writer.key(slot) == key:
            if writer.generation(slot) > writer.floor:
                break
            walk[-1] += ", not above the floor"
        at = (at + 1) % head.index_capacity
    else:
        walk.append(f"{at}: zero, not there")
    result = writer.lookup(key)
    state = ""
    if (slot := writer.find(key)) >= 0:
        record, (first, count) = SlotState(writer.state(slot)), writer.blocks(slot)
        state = f"slot {slot} is {record.name}"
        if record is SlotState.READY:
            state += f" with blocks {first} to {first + count - 1}"
    steps = "; ".join(walk)
    return f"| `{key.decode()}` | 0x{hash32:08x} | {home} | {steps} | {state} | {result.name} |"


def _below(writer: DirectoryWriter, key: bytes) -> str:
    """A row of the table: the walk through the tier table that finds a key, or not."""
    head, whole = writer.header, memoryview(writer._memory)  # noqa: SLF001  # its bytes are shown
    hash32, home = crc32(key), crc32(key) % head.tier_capacity
    place, walk = home, []
    while word := int.from_bytes(whole[head.tiers_offset + ENTRY_BYTES * place :][:8], "little"):
        same = "same hash" if word >> 32 == hash32 else "another hash"
        walk.append(f"{place}: 0x{word:016x}, {same}")
        if word >> 32 == hash32:
            break
        place += 1
    else:
        walk.append(f"{place}: zero, not there")
    found = writer.tiers.find(key) if writer.tiers is not None else None
    where = ""
    if found is not None:
        where = f"tiers {found.tiers:#04b}, blocks {found.first} to {found.first + found.count - 1}"
    return f"| `{key.decode()}` | {home} | {'; '.join(walk)} | {where} |"


def _directory() -> list[str]:
    writer, keys = _example_directory()
    head, whole = writer.header, bytes(writer._memory)  # noqa: SLF001  # its bytes are shown
    rows = [(at, whole[at : at + 16]) for at in range(0, len(whole), 16)]
    dump = [f"{at:6}  {row.hex(' ', 4)}" for at, row in rows if any(row)]
    intro = (
        f"{head.num_slots} slots, {head.index_capacity} index entries from byte"
        f" {head.index_offset} on, a ring of {head.change_capacity} changes from byte"
        f" {head.changes_offset} on, a tier table of {head.tier_capacity} homes from byte"
        f" {head.tiers_offset} on, {head.total_bytes} bytes in all. Rows of 16 bytes that are not"
        " all zero, in hex:"
    )
    return [
        *("## A directory, byte by byte", "", intro, "", "```", *dump, "```", ""),
        f"A chunk has {head.blocks_per_chunk} blocks, all of which are needed:",
        "",
        "| key | crc32 | home | index entries | record | result |",
        "|---|---|---|---|---|---|",
        *(_lookup(writer, key) for key in keys),
        "",
        "Below the pool:",
        "",
        "| key | home | entries of the tier table | where |",
        "|---|---|---|---|",
        *(_below(writer, key) for key in keys),
    ]


# ------------------------------------------------------------------- vectors


def _description() -> list[str]:
    slot, generation = DESCRIBED
    record = pack_record(slot, generation, encode(DESCRIPTION))
    as_json = msgspec.json.encode(
        [
            DESCRIPTION.parent.hex(),
            [each.hex() for each in DESCRIPTION.hashes],
            DESCRIPTION.tokens.hex(),
            *msgspec.to_builtins(DESCRIPTION)[3:-1],  # it has no lookahead
        ]
    )
    rows = [f"{at:6}  {record[at : at + 16].hex(' ', 4)}" for at in range(0, len(record), 16)]
    return [
        *("## A description, byte by byte", ""),
        "As JSON, with the bytes of parent, hashes and tokens in hex:",
        *("", "```json", as_json.decode(), "```", ""),
        f"The record of a chunk in slot {slot}, of generation {generation}, that is described so:",
        *("", "```", *rows, "```", ""),
        "The header of a file with records of 768 bytes:",
        *("", "```", pack_header(768).hex(" ", 4), "```"),
    ]


def vector(message: m.Message, request_id: int = REQUEST_ID) -> bytes:
    """The frame of an example."""
    return WIRE.encode(message, request_id)


def _vectors() -> list[str]:
    intro = (
        "Request id 7; hex of the whole frame. A client decodes these, and what it encodes decodes"
        " to the same fields: msgpack has several encodings of one value."
    )
    lines = ["## Test vectors", "", intro, ""]
    for example in EXAMPLES:
        lines += [f"**{type(example).__name__}**", "", "```", vector(example).hex(), "```", ""]
    return lines


def _session_bytes() -> list[tuple[str, str, bytes]]:
    """What each end sends on a worker's connection to the daemon, in that order."""
    register = msgspec.structs.replace(_example(m.Register), world_size=1)
    client, daemon = zmtp.opening(b"DEALER"), zmtp.opening(b"ROUTER")
    return [
        ("client", "greeting", client[: zmtp.GREETING_BYTES]),
        ("client", "READY, a command", client[zmtp.GREETING_BYTES :]),
        ("client", "Hello", _framed(_example(m.Hello), 1)),
        ("daemon", "greeting", daemon[: zmtp.GREETING_BYTES]),
        ("daemon", "READY", daemon[zmtp.GREETING_BYTES :]),
        ("daemon", "Welcome", _framed(_example(m.Welcome), 1)),
        ("client", "Register; two descriptors: control page, memory", _framed(register, 2)),
        ("daemon", "LaneUp, a notice; a descriptor: lifeline", _framed(_example(m.LaneUp), 0)),
        ("daemon", "Registered", _framed(m.Registered(missing_ranks=()), 2)),
        ("daemon", "Attached, a notice; a descriptor: directory", _framed(_example(m.Attached), 0)),
        ("client", "PING, a command", zmtp.command(b"PING", bytes(2) + b"kvd")),
        ("daemon", "PONG", zmtp.command(b"PONG", b"kvd")),
    ]


def _jobs_bytes() -> list[tuple[str, str, bytes]]:
    """The same of its connection to the lane, behind the openings."""
    return [
        ("client", "Join", _framed(_example(m.Join), 1)),
        ("lane", "Ok", _framed(m.Ok(), 1)),
        ("client", "Store", _framed(_example(m.Store), 2)),
        ("lane", "Done", _framed(_example(m.Done), 2)),
    ]


def _example(kind: type[M]) -> M:
    return next(example for example in EXAMPLES if isinstance(example, kind))


def _framed(message: m.Message, request_id: int) -> bytes:
    """A message as it travels: one ZMTP frame."""
    frame = vector(message, request_id)
    return zmtp.frame_header(len(frame)) + frame


def _connection() -> list[str]:
    intro = (
        "A worker's session in hex, the only one of its engine, from its first byte to Attached. A"
        " message is one ZMTP frame: flags, size, and kvd's frame. The size is one byte, or eight"
        " (big-endian) with flag 2. Neither end waits for the other's greeting and READY before it"
        " sends. PING may come at any time after READY."
    )
    heading = ["| from | what | bytes |", "|---|---|---|"]
    return [
        *("## A connection, byte by byte", "", intro, ""),
        *heading,
        *_rows(_session_bytes()),
        *("", "Its connection to LaneUp's endpoint, behind the same greetings and READY:", ""),
        *heading,
        *_rows(_jobs_bytes()),
    ]


def _rows(sent: list[tuple[str, str, bytes]]) -> list[str]:
    return [f"| {side} | {what} | `{data.hex()}` |" for side, what, data in sent]


def generated() -> str:
    """The part below the marker."""
    parts = [
        _messages(),
        _all_fields(),
        _codes("Error codes", ErrorCode),
        _codes("Job statuses", JobStatus),
        _codes("Labels", Label),
        _directory(),
        _description(),
        ["## Life cycles"],
        _diagram("Session", SESSION),
        _diagram("Job, in its lane", JOB),
        _diagram("Slot of a chunk", SLOT),
        _connection(),
        _vectors(),
    ]
    return "\n\n".join("\n".join(part).rstrip() for part in parts) + "\n"


def main() -> None:
    """Rewrite the file below its marker."""
    head = FILE.read_text(encoding="utf-8").split(MARKER)[0]
    FILE.write_text(f"{head}{MARKER}\n\n{generated()}", encoding="utf-8")


if __name__ == "__main__":
    main()
