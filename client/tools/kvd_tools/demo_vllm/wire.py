"""What goes between the parent and the engine's process, pickled, through two pipes.

The first command is `start`. Every command gets one reply, with its number.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias


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


Method: TypeAlias = Literal["start", "generate", "reset", "metrics"]


class Command(NamedTuple):
    """A request to the engine.

    method: `start` builds the engine, `generate` answers a prompt greedily, `reset` drops the
        prefix cache, `metrics` reads the engine's metrics.
    """

    number: int
    method: Method
    arguments: dict[str, Any]


class Reply(NamedTuple):
    """A command's result. error: why it was not carried out; "" if it was."""

    number: int
    result: Any = None
    error: str = ""
