"""What the parent and the engine's process say to each other: one JSON object a line.

The parent sends `Start`, then commands; the child answers `Ready` to the start
(number 0) and one reply with the same number to every command.
"""

import json
from dataclasses import dataclass
from typing import Any

import msgspec


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine says to one prompt.

    tokens: the generated token ids.
    logprobs: for every generated token the most likely ones and itself, by token id.
    prompt_tokens: the prompt's length.
    cached_tokens: of these, how many were not computed: found on the GPU or loaded.
    first_token_seconds, seconds: from submission, 0 where nothing was generated.
    error: why it is not a complete answer; "" if it is.
    """

    tokens: list[int]
    logprobs: list[dict[int, float]]
    prompt_tokens: int
    cached_tokens: int
    first_token_seconds: float
    seconds: float
    error: str = ""


@dataclass(frozen=True, slots=True)
class EngineProcesses:
    """Process ids of one engine.

    api: takes the requests.
    core: schedules.
    workers: own the KV memory, by rank.
    """

    api: int
    core: int
    workers: tuple[int, ...]


class _Base(msgspec.Struct, frozen=True, tag=True):
    """Base of all lines. number: says which command a reply belongs to."""

    number: int


class Start(_Base, frozen=True):
    """Build the engine. engine: keywords of its `AsyncEngineArgs`."""

    engine: dict[str, Any]
    kv_transfer: dict[str, Any] | None


class Generate(_Base, frozen=True):
    """Answer a prompt, greedily; replied with `Generated`."""

    prompt: list[int]
    max_tokens: int
    logprobs: int


class Abort(_Base, frozen=True):
    """End the running `Generate` of that number early; replied with `Done`."""

    request: int


class Reset(_Base, frozen=True):
    """Drop the GPU's prefix cache, and the connector's if asked; replied with `Done`."""

    connector: bool


class ReadMetrics(_Base, frozen=True):
    """Replied with `Metrics`."""


class ListProcesses(_Base, frozen=True):
    """Replied with `Processes`."""


class Ready(_Base, frozen=True):
    """The engine takes commands."""


class Generated(_Base, frozen=True):
    """A prompt's answer."""

    answer: Answer


class Done(_Base, frozen=True):
    """A command was carried out; `error` says why it could not be, "" if it was."""

    error: str = ""


class Metrics(_Base, frozen=True):
    """The engine's metrics: value by name{label="value"}."""

    values: dict[str, float]


class Processes(_Base, frozen=True):
    """The engine's processes."""

    processes: EngineProcesses


Command = Start | Generate | Abort | Reset | ReadMetrics | ListProcesses
Reply = Ready | Generated | Done | Metrics | Processes


def encode(message: Command | Reply) -> bytes:
    """One line. The standard library's JSON, because it knows infinities and NaN."""
    return json.dumps(msgspec.to_builtins(message, str_keys=True)).encode() + b"\n"


def decode_command(line: bytes) -> Command:
    """The command in a line; msgspec.ValidationError where it is none."""
    command: Command = msgspec.convert(json.loads(line), Command, str_keys=True)
    return command


def decode_reply(line: bytes) -> Reply:
    """The reply in a line; msgspec.ValidationError where it is none."""
    reply: Reply = msgspec.convert(json.loads(line), Reply, str_keys=True)
    return reply
