"""What the demo's scheduler and its ranks say to each other, as msgpack frames.

The scheduler sends `Setup`, then commands; a rank answers `Ready` to the setup
and one `Finished` to every `Save` and `Fetch`, and `Farewell` to `Stop`.
"""

from collections.abc import Iterator
from multiprocessing.connection import Connection

import msgspec

from kvd_tools.demo.errors import ProcessLost


class _Base(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all frames."""


class Span(msgspec.Struct, frozen=True, array_like=True):
    """Consecutive blocks of one group.

    first: logical index of the first block.
    block_ids: where they are on the GPU.
    keys: of the chunks that they lie in, as if whole: these decide the content.
    """

    group: int
    first: int
    block_ids: list[int]
    keys: list[bytes]

    def places(self, blocks_per_chunk: int) -> Iterator[tuple[bytes, int, int]]:
        """For every block: its chunk's key, its index in the chunk, its id."""
        skipped = self.first % blocks_per_chunk
        for at, block_id in enumerate(self.block_ids, skipped):
            yield self.keys[at // blocks_per_chunk], at % blocks_per_chunk, block_id


class Setup(_Base, frozen=True):
    """Who the rank is, and what it owns."""

    runtime_dir: str
    engine: str
    rank: int
    world_size: int
    num_blocks: int
    blocks_per_chunk: int
    block_tokens: int
    window_tokens: int
    corrupt: bool


class Fill(_Base, frozen=True):
    """Compute: write the content of these blocks."""

    spans: list[Span]


class Save(_Base, frozen=True):
    """Store; one span a group, in group order, empty where the job has none of it."""

    job: int
    spans: list[Span]
    slots: list[int]
    generations: list[int]


class Fetch(_Base, frozen=True):
    """Poison these blocks, load, and verify every byte; spans as in `Save`."""

    job: int
    spans: list[Span]
    slots: list[int]
    generations: list[int]


class Stop(_Base, frozen=True):
    """End."""


class Ready(_Base, frozen=True):
    """The rank's memory is registered."""

    device: str


class Finished(_Base, frozen=True):
    """A job's end on one rank. `took_ns` is from submission to seen finished."""

    job: int
    ok: bool
    text: str
    bytes: int
    copy_ns: int
    took_ns: int
    verified: int
    mismatched: int


class Farewell(_Base, frozen=True):
    """Last words: bytes that were changed where nothing may ever be written."""

    strayed: int


Command = Setup | Fill | Save | Fetch | Stop
Reply = Ready | Finished | Farewell

_ENCODER = msgspec.msgpack.Encoder()
_COMMANDS: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
_REPLIES: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)

Pipe = Connection  # only its framing is used: send_bytes and recv_bytes


def send(pipe: Pipe, message: Command | Reply) -> None:
    """Send one frame.

    Raises:
        ProcessLost: the other side is gone.
    """
    try:
        pipe.send_bytes(_ENCODER.encode(message))
    except OSError as error:
        raise ProcessLost(f"the other end of the pipe is gone ({error})") from error


def next_command(pipe: Pipe) -> Command:
    """The next command; EOFError when the scheduler is gone."""
    return _COMMANDS.decode(pipe.recv_bytes())


def next_reply(pipe: Pipe) -> Reply:
    """The next reply; EOFError when the rank is gone."""
    return _REPLIES.decode(pipe.recv_bytes())
