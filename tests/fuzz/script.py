"""Sessions as sequences of frames that can be kept, mutated, and played again.

What only a running daemon knows (lanes' tokens, slots) stands in the frames as a mark;
`Marks.resolve` puts the real thing there when a frame is sent. So a file of frames can be played
against any daemon, and a mutation that hits a mark makes a wrong token, a wrong slot.

A function that plays a script raises `Finding` on a fault.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from kvd_proto.codec import WIRE
from kvd_proto.errors import DecodeError
from kvd_proto.jobs import IntArray, JobBlocks
from kvd_proto.messages import (
    Attached,
    Clear,
    Job,
    Join,
    LaneUp,
    Message,
    Pin,
    Step,
    Stepped,
)

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
