"""Sessions as sequences of frames that can be kept, mutated, and played again.

What only a running daemon knows (lanes' tokens, slots) stands in the frames as a mark;
`Marks.resolve` puts the real thing there when a frame is sent. So a file of frames can be played
against any daemon, and a mutation that hits a mark makes a wrong token, a wrong slot.
"""

from collections.abc import Sequence
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
    """One thing that somebody does.

    Attributes:
        actor: who; each has a session, and a connection to a lane once there is one.
        where: the connection; "open" and "close" are the session's, "time" passes `actor` seconds.
        frame: a message; empty for none.
        fds: descriptors that go along, by what they are: "mem:4096", "pipe", ...
        bare: the frame's bytes are sent as they are, and are no message.
    """

    actor: int
    where: Where
    frame: bytes = b""
    fds: tuple[str, ...] = ()
    bare: bool = False


Script = tuple[Act, ...]


def request(actor: int, where: Where, message: Message, request_id: int) -> Act:
    """A valid frame."""
    return Act(actor, where, WIRE.encode(message, request_id))


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
        real = self._body(message)
        if real is message:
            return frame
        return WIRE.encode(real, header.request_id)

    def _body(self, message: Message) -> Message:
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
    found = marks.numpy().tolist()
    real = [values[v - first] if 0 <= v - first < len(values) else v for v in found]
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
