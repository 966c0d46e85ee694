"""Sessions as sequences of frames that can be kept, mutated, and played again.

What only a running daemon knows (boot id, tokens, slots) stands in the
frames as a mark; `Marks.resolve` puts the real thing there when a frame is sent. So
a file of frames can be played against any daemon, and a mutation that hits a mark
makes a wrong token, a wrong slot.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, TypeVar

import msgspec
from msgspec.structs import replace

from kvd_proto.arrays import IntArray
from kvd_proto.blocks import JobBlocks
from kvd_proto.codec import HEADER_BYTES, NO_ID, WIRE
from kvd_proto.errors import DecodeError
from kvd_proto.messages import (
    Attached,
    Clear,
    Hello,
    Job,
    Message,
    Pin,
    Step,
    Stepped,
)

C = TypeVar("C", JobBlocks, Pin, Step)
Where = Literal["open", "close", "control socket", "broker", "lane", "time"]

BOOT = b"<boot id mark>.."
NAMESPACE = b"<its namespace>."
SLOT = 2**32 - 256  # + i: the i-th slot that was lent, to whomever
GENERATION = 2**63  # + i: its generation


def token_mark(actor: int) -> bytes:
    """Stands for the token of an actor's session."""
    return b"<token mark %03d>" % actor


@dataclass(frozen=True, slots=True)
class Act:
    """One thing that somebody does.

    Attributes:
        actor: who; each has a control socket connection and sockets of its own.
        where: the socket; "open" and "close" the control socket, "time" passes `actor` seconds.
        parts: of one multipart message; one part is what the protocol knows.
        fds: descriptors that go along, by what they are: "mem:4096", "pipe", ...
    """

    actor: int
    where: Where
    parts: tuple[bytes, ...] = ()
    fds: tuple[str, ...] = ()


Script = tuple[Act, ...]


def request(actor: int, where: Where, message: Message, request_id: int) -> Act:
    """A valid frame, with marks in its header."""
    boot = NO_ID if isinstance(message, Hello) else BOOT
    return Act(actor, where, (WIRE.encode(message, request_id, boot, token_mark(actor)),))


@dataclass(slots=True)
class Marks:
    """What marks stand for in one play."""

    boot_id: bytes
    tokens: dict[bytes, bytes] = field(default_factory=dict)
    slots: list[int] = field(default_factory=list)
    generations: list[int] = field(default_factory=list)
    namespace: bytes = NO_ID

    def came(self, actor: int, token: bytes) -> None:
        """An actor was greeted."""
        self.tokens[token_mark(actor)] = token

    def learn(self, message: Message) -> None:
        """A reply or a notice has told something that marks stand for."""
        if isinstance(message, Stepped):
            self.slots += message.slots.numpy().tolist()
            self.generations += message.generations.numpy().tolist()
        elif isinstance(message, Attached):
            self.namespace = message.namespace

    def resolve(self, frame: bytes) -> bytes:
        """The frame as it is to be sent."""
        if len(frame) < HEADER_BYTES:
            return frame
        boot, token = frame[16:32], frame[32:48]
        boot = self.boot_id if boot == BOOT else boot
        frame = frame[:16] + boot + self.tokens.get(token, token) + frame[48:]
        try:
            header, message = WIRE.decode(frame)
        except DecodeError:
            return frame
        real = self._body(message)
        if real is message:
            return frame
        return WIRE.encode(real, header.request_id, header.boot_id, header.session)

    def _body(self, message: Message) -> Message:
        match message:
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
