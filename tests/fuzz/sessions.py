"""Sessions as sequences of frames that can be kept, mutated, and played again.

What only a running daemon knows (lanes' tokens, slots) stands in the frames as a mark;
`Marks.resolve` puts the real thing there when a frame is sent. So a file of frames can be played
against any daemon, and a mutation that hits a mark makes a wrong token, a wrong slot.

Valid sessions are made from a seed: an engine's whole life, and an operator's tool. A function that
plays a script raises `Finding` on a fault.
"""

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Literal, TypeVar

import msgspec
from msgspec.structs import fields, replace

from kvd_proto.codec import WIRE
from kvd_proto.errors import DecodeError
from kvd_proto.jobs import CONTROL_BYTES, IntArray, JobBlocks
from kvd_proto.layout import GroupSpec, RankLayout, TensorSpec
from kvd_proto.messages import (
    LABEL_ONLY,
    REPLY_OF,
    Attached,
    Cancel,
    Clear,
    Explain,
    Fingerprint,
    HostHandle,
    Job,
    Join,
    Kind,
    KvEvents,
    Label,
    LaneUp,
    Load,
    Lookups,
    Message,
    Pin,
    Ping,
    Reset,
    Resume,
    Status,
    Step,
    Stepped,
    Store,
    Unregister,
    Wait,
)
from tests.broker.brokers import hello, register
from tests.layouts import flat_layout

C = TypeVar("C", JobBlocks, Pin, Step)
Where = Literal["open", "close", "broker", "lane", "time"]

NAMESPACE = b"<its namespace>."
SLOT = 2**32 - 256  # + i: the i-th slot that was lent, to whomever
GENERATION = 2**63  # + i: its generation


def token_mark(actor: int) -> bytes:
    """Stands for the token that an actor got with LaneUp."""
    return b"<token mark %03d>" % actor


@dataclass(frozen=True, slots=True)
class Act:
    """One step of an actor, who has a session, and a connection to a lane once there is one."""

    actor: int
    where: Where  # "open" and "close" are the session's, "time" passes `actor` seconds
    frame: bytes = b""  # a message; empty for none
    fds: tuple[str, ...] = ()  # descriptors that go along, by what they are: "mem:4096", "pipe"
    bare: bool = False  # the frame's bytes are sent as they are, and are no message


Script = tuple[Act, ...]
Play = Callable[[Script], None]


class Finding(Exception):
    """A script has shown a fault: a crash, or a leak where `leak` is set."""

    def __init__(self, text: str, *, leak: bool = False) -> None:
        super().__init__(text)
        self.leak = leak


def request(
    actor: int, where: Where, message: Message, request_id: int, fds: tuple[str, ...] = ()
) -> Act:
    """A valid frame."""
    return Act(actor, where, WIRE.encode(message, request_id), fds)


@dataclass(slots=True)
class Marks:
    """What marks stand for in one play."""

    tokens: dict[bytes, bytes] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    namespace: bytes = bytes(16)

    def learn(self, actor: int, message: Message) -> None:
        """A reply or a notice to an actor has told something that marks stand for."""
        if isinstance(message, Stepped):
            self.slots += message.slots.numpy().tolist()
            self.generations += message.generations.numpy().tolist()
        elif isinstance(message, Attached):
            self.namespace = message.namespace
        elif isinstance(message, LaneUp):
            self.tokens[token_mark(actor)] = message.token

    def resolve(self, frame: bytes) -> bytes:
        """The frame as it is to be sent."""
        try:
            header, message = WIRE.decode(frame)
        except DecodeError:
            return frame
        real = self._real(message)
        return frame if real is message else WIRE.encode(real, header.request_id)

    def _real(self, message: Message) -> Message:
        match message:
            case Join(token=token) if token in self.tokens:
                return Join(token=self.tokens[token])
            case Job(blocks=blocks):
                return replace(message, blocks=self._chunks(blocks))
            case Step(pins=pins):
                real = self._chunks(message)
                return replace(real, pins=tuple([self._chunks(pin) for pin in pins]))
            case Clear(namespace=namespace) if namespace == NAMESPACE:
                return replace(message, namespace=self.namespace)
        return message

    def _chunks(self, part: C) -> C:
        """The same with the slots and generations that are meant."""
        slots = _real(part.slots, SLOT, self.slots)
        generations = _real(part.generations, GENERATION, self.generations)
        return replace(part, slots=slots, generations=generations)


def _real(marks: IntArray, first: int, values: Sequence[int]) -> IntArray:
    real = [
        values[mark - first] if 0 <= mark - first < len(values) else mark
        for mark in marks.numpy().tolist()
    ]
    return IntArray.of(real, marks.dtype)


@dataclass(frozen=True, slots=True)
class Case:
    """A script that a target did not take well, and what was seen."""

    target: str
    seed: int
    problem: str
    script: Script

    def save(self, path: Path) -> None:
        """Write it as JSON, frames in base64."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(self), indent=1))

    @classmethod
    def load(cls, path: Path) -> "Case":
        """Read what `save` wrote."""
        return msgspec.json.decode(path.read_bytes(), type=cls)


NAMES = 4  # engines, and models, that one run knows


class _Session:
    """Steps of actors whose numbers begin at `base`; request ids count up."""

    def __init__(self, rng: random.Random, base: int) -> None:
        self.rng = rng
        self.base = base
        self.steps: list[Act] = []
        self._ids = count(1)

    def ask(
        self, actor: int, message: Message, where: Where = "broker", fds: tuple[str, ...] = ()
    ) -> None:
        self.steps.append(request(self.base + actor, where, message, next(self._ids), fds))

    def enter(self, actor: int, kind: Kind, engine: str) -> None:
        self.steps.append(Act(self.base + actor, "open"))
        self.ask(actor, hello(kind, engine))


class _Engine(_Session):
    """A scheduler, actor 0, and its ranks, from actor 1 on."""

    def __init__(self, rng: random.Random, base: int) -> None:
        super().__init__(rng, base)
        self.name, self.model = f"fuzz-{rng.randrange(NAMES)}", f"model-{rng.randrange(NAMES)}"
        self.ranks, self.layout = range(rng.choice([1, 1, 2])), random_layout(rng)
        self.lent = 0  # slots that the chunks so far have taken

    def register(self, rank: int) -> None:
        self.enter(1 + rank, "worker", self.name)
        storages = self.layout.storages
        message = register(
            rank=rank,
            world_size=len(self.ranks),
            fingerprint=Fingerprint(model=self.model, dtype="bfloat16"),
            layout=self.layout,
            handles=tuple(HostHandle(fd_index=i + 1) for i in range(len(storages))),
            temporary=self.rng.random() < 0.05,
        )
        fds = (f"mem:{CONTROL_BYTES}", *(f"mem:{size}" for size in storages))
        self.ask(1 + rank, message, fds=fds)
        self.ask(1 + rank, Join(token=token_mark(self.base + 1 + rank)), "lane")

    def job(self, kind: type[Store | Load], number: int, chunks: int) -> None:
        """On every rank."""
        blocks = range(1, 1 + chunks * self.layout.blocks_per_chunk)  # block 0 is the null block
        others = [0] * (len(self.layout.groups) - 1)
        arrays = JobBlocks.of(blocks, [len(blocks), *others], [0, *others], *self.given(chunks))
        word = {"word": 1} if kind is Store else {}
        message = kind(job=number, blocks=arrays, after=0, deadline_ms=5000, **word)
        for rank in self.ranks:
            self.ask(1 + rank, message, "lane")

    def given(self, chunks: int) -> tuple[range, range]:
        """Slots and generations of this turn's chunks."""
        first, last = self.lent, self.lent + chunks
        return range(SLOT + first, SLOT + last), range(GENERATION + first, GENERATION + last)

    def store(self, keys: tuple[bytes, ...], number: int) -> None:
        self.ask(0, Step(wanted=2 * len(keys)))
        begun = Step(keys=keys, present=1, **arrays(*self.given(len(keys))))
        early = self.rng.random() < 0.3  # the lane's request comes first, and waits for the broker
        if not early:
            self.ask(0, begun)
        self.job(Store, number, len(keys))
        if early:
            self.ask(0, begun)
        if self.rng.random() < 0.3:
            self.ask(1, Cancel(jobs=(number,)), "lane")
        self.ask(1, Wait(jobs=(number,)), "lane")
        if self.rng.random() < 0.1:
            self.ask(0, Step(dropped=keys))

    def load(self, keys: tuple[bytes, ...], number: int) -> None:
        pin = Pin(lease=number, lease_ms=5000, **arrays(*self.given(len(keys))))
        self.ask(0, Step(pins=(pin,)))
        self.job(Load, number, len(keys))
        self.ask(1, Ping(), "lane")
        if self.rng.random() < 0.8:
            label = self.rng.choice([*Label, LABEL_ONLY | Label.DONE])
            self.ask(0, Step(unpinned=(number,), used=keys, labels=bytes((label,))))
        self.lent += len(keys)


def arrays(slots: Iterable[int], generations: Iterable[int]) -> dict[str, Any]:
    """As messages have them."""
    return {
        "slots": IntArray.of(tuple(slots), "u4"),
        "generations": IntArray.of(tuple(generations), "u8"),
    }


def random_layout(rng: random.Random) -> RankLayout:
    """One of the kinds of memory that engines have, small."""
    blocks, factor = rng.choice([17, 32]), rng.choice([1, 1, 2, 4])
    page, tensors = rng.choice([512, 4096, 8192]), rng.choice([1, 2, 3])
    layout = flat_layout(*[page] * tensors, blocks=blocks, factor=factor)
    if rng.random() < 0.3:
        specs = tuple(TensorSpec(0, i * blocks * page, page, page) for i in range(tensors))
        layout = replace(layout, storages=(sum(layout.storages),), tensors=specs)
    if rng.random() < 0.4:
        window = GroupSpec(layout.groups[0].refs[-1:], 16, "window", 64)
        layout = replace(layout, groups=(*layout.groups, window))
    replicated, null_block = rng.random() < 0.2, rng.choice([None, 0, blocks - 1])
    return replace(layout, replicated=replicated, null_block=null_block)


def engine_session(rng: random.Random, base: int = 0) -> Script:
    """A scheduler and its ranks: come, register, store, load, and mostly leave properly."""
    engine = _Engine(rng, base)
    engine.enter(0, "scheduler", engine.name)
    for rank in engine.ranks:
        engine.register(rank)
    for turn in range(rng.randint(1, 3)):
        bits = rng.choice([32, 32, 2])  # of few keys some are there already, or being written
        some = tuple(b"key-%08x" % rng.getrandbits(bits) for _ in range(rng.randint(1, 4)))
        engine.store(some, 10 * turn)
        engine.steps.append(Act(1, "time"))  # until the lane has told the broker
        engine.load(some, 10 * turn + 5)
        engine.ask(0, rng.choice(_ASIDE))
    if rng.random() < 0.5:
        for rank in engine.ranks:
            engine.ask(1 + rank, Unregister())
    return tuple(engine.steps)


def tool_session(rng: random.Random, base: int = 0) -> Script:
    """An operator's tool: looks, drains and resumes, clears."""
    tool = _Session(rng, base)
    tool.enter(9, "tool", "fuzz tool")
    for message in (*rng.sample(_ORDERS, rng.randint(1, 4)), Resume()):
        tool.ask(9, message)
    return tuple(tool.steps)


def session(rng: random.Random, base: int = 0) -> Script:
    """Any of them."""
    return tool_session(rng, base) if rng.random() < 0.1 else engine_session(rng, base)


_ASIDE: list[Message] = [
    Ping(),
    Ping(lookups=Lookups(chunks=9, hit_chunks=3, tokens=100, hit_tokens=50)),
    Ping(kv_events=KvEvents(published=9, snapshots=2, overruns=1, lag_us=2**40)),
    Status(),
    Step(used=(b"key-model-0-00", b"nobody's")),
    Reset(),
]
_ORDERS: list[Message] = [
    # All that need no field, whoever may send them.
    *(kind() for kind in REPLY_OF if not any(field.required for field in fields(kind))),
    Explain(key=b"key-model-0-00"),
    Clear(namespace=NAMESPACE),
    Clear(unused_seconds=3600.0),
    Clear(unused_seconds=0.0, namespace=NAMESPACE),
]
