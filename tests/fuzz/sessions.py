"""Valid sessions, made from a seed: an engine's whole life, and an operator's tool."""

import random
from collections.abc import Iterable
from itertools import count
from typing import Any

from msgspec.structs import fields, replace

from kvd_proto.jobs import CONTROL_BYTES, IntArray, JobBlocks
from kvd_proto.layout import GroupSpec, RankLayout, TensorSpec
from kvd_proto.messages import (
    LABEL_ONLY,
    PROTOCOL_VERSION,
    REPLY_OF,
    Cancel,
    Clear,
    Explain,
    Fingerprint,
    Hello,
    HostHandle,
    Join,
    Kind,
    KvEvents,
    Label,
    Load,
    Lookups,
    Message,
    Pin,
    Ping,
    Register,
    Reset,
    Resume,
    Status,
    Step,
    Store,
    Unregister,
    Wait,
)
from tests.fuzz.script import GENERATION, NAMESPACE, SLOT, Act, Script, Where, request, token_mark
from tests.layouts import flat_layout

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
        hello = Hello(
            kind=kind,
            engine=engine,
            pid=4242,
            protocol_min=PROTOCOL_VERSION,
            protocol_max=PROTOCOL_VERSION,
            client="fuzz",
        )
        self.ask(actor, hello)


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
        message = Register(
            rank=rank,
            world_size=len(self.ranks),
            device="host",
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
