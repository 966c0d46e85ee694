"""Traces in the Mooncake JSONL format.

One JSON object a line, with `timestamp` (ms), `input_length` and
`output_length` (tokens) and `hash_ids` (one per started piece of 512 tokens).
"""

from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from kvd_tools.demo.errors import TraceError
from kvd_tools.demo.workload import PIECE_TOKENS, Request

_Tokens = Annotated[int, Meta(ge=0, le=2**31)]


class _Line(msgspec.Struct, frozen=True):
    timestamp: Annotated[int, Meta(ge=0)]
    input_length: _Tokens
    output_length: _Tokens
    hash_ids: tuple[Annotated[int, Meta(ge=0, le=2**63 - 1)], ...]


def parse_line(line: bytes | str, where: str) -> Request:
    """One line of a trace; `where` opens the error's sentence, e.g. ``trace.jsonl:7``.

    Raises:
        TraceError: no JSON, a field missing or of the wrong type or range, or a
            number of `hash_ids` that does not fit `input_length`.
    """
    try:
        parsed = msgspec.json.decode(line, type=_Line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise TraceError(f"{where}: {error}") from error
    pieces = -(-parsed.input_length // PIECE_TOKENS)
    if len(parsed.hash_ids) != pieces:
        raise TraceError(
            f"{where}: field `hash_ids` has {len(parsed.hash_ids)} entries, but"
            f" `input_length` {parsed.input_length} is {pieces} pieces of {PIECE_TOKENS} tokens"
        )
    return Request(parsed.timestamp, parsed.input_length, parsed.output_length, parsed.hash_ids)


def read_trace(path: Path, limit: int | None = None) -> list[Request]:
    """The first `limit` requests of a trace (all of them without a limit).

    Raises:
        TraceError: the file cannot be read, is empty, or has a bad line (named).
    """
    requests: list[Request] = []
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip():
                    requests.append(parse_line(line, f"{path}:{number}"))
    except OSError as error:
        raise TraceError(f"{path}: {error.strerror}") from error
    if not requests:
        raise TraceError(f"{path}: no requests in it")
    return requests
