"""Messages between the parent and the engine's process: one JSON object a line.

The first command is `start`. Every command gets one reply, with its number.
"""

import json
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypeVar

import msgspec


@dataclass(frozen=True, slots=True)
class Answer:
    """The engine's answer to one prompt.

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


def comparable(a: Answer, b: Answer) -> str:
    """Say where two answers differ first, in one sentence; "" if every number is the same."""
    for name, answer in (("first", a), ("second", b)):
        if answer.error:
            return f"the {name} answer is incomplete: {answer.error}"
    for what, one, other in (
        ("tokens", a.tokens, b.tokens),
        ("log-probabilities", a.logprobs, b.logprobs),
    ):
        if len(one) != len(other):
            return f"one answer has {len(one)} {what}, the other {len(other)}"
        for at, (mine, its) in enumerate(zip(one, other, strict=True)):
            if mine != its:
                return f"{what} differ at token {at}: {mine} in one answer and {its} in the other"
    return ""


Method: TypeAlias = Literal["start", "generate", "reset", "metrics"]


class Command(msgspec.Struct, frozen=True):
    """A request to the engine.

    method: `start` builds the engine, `generate` answers a prompt greedily, `reset` drops the
        prefix cache, `metrics` reads the engine's metrics.
    """

    number: int
    method: Method
    arguments: dict[str, Any]


class Reply(msgspec.Struct, frozen=True):
    """A command's result. error: why it was not carried out; "" if it was."""

    number: int
    result: Any = None
    error: str = ""


M = TypeVar("M", Command, Reply)


def encode(message: Command | Reply) -> bytes:
    """Return one line. The standard library's JSON, because it knows infinities and NaN."""
    return json.dumps(msgspec.to_builtins(message, str_keys=True)).encode() + b"\n"


def decode(line: bytes, kind: type[M]) -> M:
    """Return the message in a line; raises msgspec.ValidationError."""
    return msgspec.convert(json.loads(line), kind)
