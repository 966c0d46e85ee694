from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd_tools.demo.errors import TraceError
from kvd_tools.demo.trace import read_trace
from kvd_tools.demo.workload import PIECE_TOKENS, conversations, distinct_pieces

GOOD = '{"timestamp": 5, "input_length": 600, "output_length": 3, "hash_ids": [0, 7]}\n'


@given(st.integers(0, 1000))
def test_generated_requests_are_well_formed(seed: int) -> None:
    """One id per started piece, arrivals in order, and an id always has the same prefix."""
    before: dict[int, int | None] = {}
    clock = 0
    for request in conversations(40, seed):
        assert len(request.hash_ids) == -(-request.input_tokens // PIECE_TOKENS)
        assert request.arrival_ms >= clock
        clock = request.arrival_ms
        previous = None
        for piece in request.hash_ids:
            assert before.setdefault(piece, previous) == previous
            previous = piece


def test_the_seed_decides_the_workload() -> None:
    """The same seed gives the same requests, another seed others."""
    assert list(conversations(30, 1)) == list(conversations(30, 1))
    assert list(conversations(30, 1)) != list(conversations(30, 2))


def test_conversations_share_prefixes() -> None:
    """Turns come back with what was said, so pieces repeat."""
    requests = list(conversations(200, 0))
    assert distinct_pieces(requests) < sum(len(r.full_pieces) for r in requests) / 2


def test_a_trace_is_read_up_to_the_limit(tmp_path: Path) -> None:
    """Lines become requests; only full pieces can be cached."""
    path = tmp_path / "trace.jsonl"
    path.write_text(GOOD * 3)
    requests = read_trace(path, 2)
    assert len(requests) == 2
    assert requests[0].hash_ids == (0, 7)
    assert requests[0].full_pieces == (0,)
    assert len(read_trace(path)) == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{oops", "malformed"),
        ('{"timestamp": 5, "input_length": 600, "output_length": 3}', "hash_ids"),
        (GOOD.replace("600", '"600"'), "input_length"),
        (GOOD.replace("5", "-5"), "timestamp"),
        (GOOD.replace("3", "3.5"), "output_length"),
        (GOOD.replace("[0, 7]", '[0, "7"]'), "hash_ids"),
        (GOOD.replace("[0, 7]", "[0]"), "`hash_ids` has 1 entries"),
        ("\xff", "trace.jsonl:2"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, said: str) -> None:
    """The error names the line and the field."""
    path = tmp_path / "trace.jsonl"
    path.write_bytes(GOOD.encode() + line.encode("latin-1") + b"\n")
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: ") as caught:
        read_trace(path)
    assert said in str(caught.value)


def test_a_trace_without_requests_is_refused(tmp_path: Path) -> None:
    """An empty or absent file is said to be that."""
    path = tmp_path / "empty.jsonl"
    with pytest.raises(TraceError, match="No such file"):
        read_trace(path)
    path.write_text("\n")
    with pytest.raises(TraceError, match="no requests"):
        read_trace(path)
