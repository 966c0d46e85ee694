"""Subscribers to the daemon's KV events: real sockets, and the blocks that they were told of."""

import hashlib
from array import array
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

import zmq

from kvd_client import LookupResult
from kvd_proto.descriptions import Description, encode
from tests.daemon.engines import FACTOR, Engine
from tests.routers.blocks import Block, BlockSet
from tests.routers.wire import Message, decode, low64
from tests.waiting import PATIENCE

TOKENS = 16  # of a block
END = b"\xff" * 8


def hashes_of(key: bytes) -> tuple[bytes, ...]:
    """The hashes of a chunk's blocks."""
    return tuple(hashlib.sha256(key + bytes((at,))).digest() for at in range(FACTOR))


def described(key: bytes) -> bytes:
    """The description of a chunk."""
    tokens = array("I", range(TOKENS * FACTOR)).tobytes()
    return encode(Description(b"", hashes_of(key), tokens, TOKENS, kind="full_attention"))


def blocks_of(keys: Sequence[bytes]) -> set[Block]:
    """What a router is to believe of chunks that are there."""
    return {Block("CPU", 0, low64(each)) for key in keys for each in hashes_of(key)}


def found(engine: Engine, keys: Sequence[bytes]) -> set[Block]:
    """The blocks of those of the keys that the engine finds."""
    return blocks_of([key for key in keys if engine.scheduler.lookup(key) is LookupResult.HIT])


class Subscriber:
    """A SUB socket, and all that it was told.

    Args:
        endpoint: of the publisher; or, with `binds`, where to listen.
        prefix: of topics.
        replay: where to ask for what was missed.
    """

    def __init__(
        self, endpoint: str, prefix: str = "kv@", *, binds: bool = False, replay: str = ""
    ) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(zmq.SUB)
        self.socket.subscribe(prefix)
        self.endpoint = endpoint
        if binds:
            self.socket.bind(endpoint)
            self.endpoint = self.socket.getsockopt_string(zmq.LAST_ENDPOINT)
        else:
            self.socket.connect(endpoint)
        self._replay = replay
        self.told = BlockSet()
        self.messages: list[Message] = []
        self.last: dict[str, int] = {}
        self.gaps = 0

    def take(self, timeout: float = PATIENCE) -> Message | None:
        """The next message, its events taken; None where none comes in time."""
        if not self.socket.poll(int(timeout * 1000)):
            return None
        message = decode(self.socket.recv_multipart())
        last = self.last.get(message.topic)
        assert last is None or message.sequence > last, "numbers go up"
        self.gaps += last is not None and message.sequence != last + 1
        self.last[message.topic] = message.sequence
        self.messages.append(message)
        self.told.take(message.topic, message.batch)
        return message

    def until(self, is_so: Callable[[], object]) -> None:
        """Take messages until something is so."""
        while not is_so():
            assert self.take() is not None, f"nothing comes any more; told of {self.told}"

    def until_held(self, topic: str, blocks: set[Block]) -> None:
        """Take messages until it believes this of a topic."""
        self.until(lambda: self.told.held(topic) == blocks)

    def missed(self, sequence: int, *more: bytes) -> list[Message]:
        """Ask for messages from a number on; the answer, to its end."""
        asking = self._context.socket(zmq.DEALER)
        asking.connect(self._replay)
        asking.send_multipart([b"", sequence.to_bytes(8, "big"), *more])
        answer: list[Message] = []
        while True:
            assert asking.poll(int(PATIENCE * 1000)), answer
            empty, *frames = asking.recv_multipart()
            assert empty == b""
            if frames[1] == END:
                assert frames == [b"", END, b""]
                asking.close(0)
                return answer
            answer.append(decode(frames))

    def close(self) -> None:
        """Leave."""
        self._context.destroy(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
