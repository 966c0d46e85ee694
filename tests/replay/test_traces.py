"""Readers of traces: three forms, one numbering of chunks, one clear error."""

import json
from pathlib import Path
from typing import Any

import pytest

from kvd.errors import TraceError
from kvd.replay import Trace, read_trace


def lines(path: Path, *requests: dict[str, Any]) -> Path:
    """A file with a line of JSON a request."""
    path.write_text("".join(json.dumps(request) + "\n" for request in requests))
    return path


def ids(timestamp: float, tokens: int, *hash_ids: int) -> dict[str, Any]:
    """A request in Mooncake's form."""
    return {"timestamp": timestamp, "input_length": tokens, "hash_ids": hash_ids}


def conversation(path: Path, *requests: dict[str, Any], **fields: Any) -> Path:
    """A file of kv-cache-tester."""
    path.write_text(json.dumps({"block_size": 64, "requests": requests, **fields}))
    return path


def chunks(trace: Trace) -> list[list[int]]:
    """Of each request."""
    return [request.chunks.tolist() for request in trace.requests]


def test_mooncakes_lines_become_requests_in_order_of_time(tmp_path: Path) -> None:
    """Times are in seconds, and equal beginnings are equal chunks."""
    path = lines(
        tmp_path / "trace.jsonl",
        ids(2500, 1024, 7, 9),
        ids(1000, 1300, 7, 8, 5) | {"output_length": 3},
    )
    trace = read_trace(path)
    assert [request.time for request in trace.requests] == [1.0, 2.5]
    assert [request.tokens for request in trace.requests] == [1300, 1024]
    (head, second, _), (same, other) = chunks(trace)
    assert head == same
    assert second != other
    assert (trace.num_chunks, trace.tokens, trace.tokens_per_chunk) == (4, 2324, 512)


def test_several_ids_make_a_chunk_and_the_rest_none(tmp_path: Path) -> None:
    """Chunks that differ in one id differ."""
    path = lines(tmp_path / "trace.jsonl", ids(0, 2560, 1, 2, 3, 4, 5), ids(1, 2048, 1, 2, 3, 5))
    trace = read_trace(path, ids_per_chunk=2)
    assert chunks(trace) == [[0, 1], [0, 2]]
    assert trace.tokens_per_chunk == 1024


def test_prompts_as_text_are_cut_into_pieces(tmp_path: Path) -> None:
    """256 characters count as 64 tokens; times are in microseconds."""
    text = "x" * 256 + "y" * 256
    path = lines(
        tmp_path / "trace.jsonl",
        {"timestamp": 1_000_000, "input": text, "output": "", "session_id": "a"},
        {"timestamp": 2_500_000, "input": text + "z" * 300},
    )
    trace = read_trace(path)
    assert [(request.time, request.tokens) for request in trace.requests] == [(1, 128), (2.5, 203)]
    assert chunks(trace) == [[0, 1], [0, 1, 2]]
    assert trace.tokens_per_chunk == 64


def test_conversations_overlap_as_many_at_a_time_as_there_are_users(tmp_path: Path) -> None:
    """Their ids are their own, sub-agents are nested, and a user begins when the last has ended."""
    agent = {"t": 1, "type": "subagent", "requests": [{"t": 0.5, "in": 64, "hash_ids": [9]}]}
    for name in "abc":
        conversation(
            tmp_path / f"{name}.json",
            {"t": 0, "in": 64, "hash_ids": [1]},
            agent,
            {"t": 4, "in": 130, "hash_ids": [1, 2]},
        )
    trace = read_trace(tmp_path, users=2)
    assert [request.time for request in trace.requests] == [0, 0, 1.5, 1.5, 4, 4, 4, 5.5, 8]
    assert trace.num_chunks == 9
    assert trace.tokens_per_chunk == 64


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ('{"timestamp": 1, "input_length": 512, "hash_ids": [1]}\nx\n', "t.jsonl:2: JSON is mal"),
        (
            '{"timestamp": 1, "hash_ids": [1]}\n',
            "t.jsonl:1: Object missing required field `input_length`; a line is {",
        ),
        (
            '{"timestamp": -1, "input_length": 512, "hash_ids": [1]}\n',
            "t.jsonl:1: Expected `float` >= 0",
        ),
        (
            '\n{"timestamp": 1, "input_length": 512, "hash_ids": [1, 2, 3, 4]}\n',
            "t.jsonl:2: 4 hash_ids for input_length = 512, where --tokens-per-id 512 needs 1; 1",
        ),
        (
            '{"timestamp": 1, "input_length": 4096, "hash_ids": [1]}\n',
            "t.jsonl:1: 1 hash_ids for input_length = 4,096, where --tokens-per-id 512 needs 8; 4",
        ),
        ("", "t.jsonl: holds no request; a line is {"),
    ],
)
def test_a_bad_line_is_named_with_what_is_wrong_and_the_remedy(
    tmp_path: Path, text: str, error: str
) -> None:
    """One error: file, line, fault, what a line must be."""
    path = tmp_path / "t.jsonl"
    path.write_text(text)
    with pytest.raises(TraceError) as raised:
        read_trace(path)
    assert str(raised.value).startswith(f"{tmp_path}/{error}")


def test_what_is_no_trace_is_named(tmp_path: Path) -> None:
    """A file that is missing, a folder without traces, a document of another kind."""
    with pytest.raises(TraceError, match=r"absent\.jsonl: cannot be read \(No such file"):
        read_trace(tmp_path / "absent.jsonl")
    with pytest.raises(TraceError, match=r"no \*\.json or \*\.jsonl in it"):
        read_trace(tmp_path)
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(TraceError, match=r"a\.json: Expected `object`, got `array`; .*\*\.jsonl"):
        read_trace(tmp_path)


def test_files_of_one_folder_have_blocks_of_one_size(tmp_path: Path) -> None:
    """Chunks of different sizes are not played together."""
    conversation(tmp_path / "a.json", {"t": 0, "in": 64, "hash_ids": [1]})
    conversation(tmp_path / "b.json", {"t": 0, "in": 64, "hash_ids": [1]}, block_size=16)
    with pytest.raises(TraceError, match=r"b\.json: blocks of 16 tokens, .* of 64; keep them in"):
        read_trace(tmp_path)
