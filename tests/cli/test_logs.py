"""Lines of the log: what they look like, what is left out, and that nobody waits for them."""

import fcntl
import json
import logging
import os
import re
from concurrent.futures import ThreadPoolExecutor
from io import FileIO

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.logs import (
    MAX_PER_MINUTE,
    MAX_QUEUED_LINES,
    WINDOW_SECONDS,
    LineFormatter,
    QueuedHandler,
    RateLimiter,
    safe_repr,
    safe_traceback,
)
from tests.waiting import PATIENCE, eventually


def record(
    text: str, *args: object, level: int = logging.INFO, **extra: object
) -> logging.LogRecord:
    """A record as a module of kvd makes it."""
    made = logging.LogRecord("kvd.test", level, __file__, 7, text, args, None)
    made.__dict__.update(extra)
    return made


@given(text=st.text(), name=st.text())
def test_json_is_one_object_a_line_whatever_is_said(text: str, name: str) -> None:
    """Any text and any engine's name come back from one line of JSON, with all fields."""
    line = LineFormatter("json", "lane host#1", {"lane": "host"}).format(
        record("%s", text, engine=name, rank=3)
    )
    assert len(line.splitlines()) == 1
    fields = json.loads(line)
    assert fields["event"] == text
    assert (fields["engine"], fields["rank"], fields["lane"]) == (name, 3, "host")
    assert (fields["level"], fields["logger"]) == ("info", "kvd.test")
    assert fields["time"].endswith("Z")


@given(text=st.text(), style=st.sampled_from(["plain", "colour", "journal"]))
def test_a_text_for_people_is_one_line_without_control_characters(text: str, style: str) -> None:
    """Nobody who names an engine can write a line of the log, or to the terminal's controls."""
    line = LineFormatter(style, "broker", {}).format(record("%s", text))
    assert len(line.splitlines()) == 1
    assert re.sub(r"\x1b\[[0-9;]*m", "", line).isprintable()


@given(st.binary(), st.binary())
def test_bytes_that_an_exception_holds_are_left_out(one: bytes, other: bytes) -> None:
    """A KeyError would show the key of a chunk."""
    assert safe_repr(KeyError(one)) == "KeyError(b'…')"
    trace = safe_traceback(LookupError(one, "of", other))
    assert trace == "LookupError: (b'…', 'of', b'…')\n"


@given(st.lists(st.floats(0, 20), max_size=800), st.integers(1, 3))
def test_at_most_so_many_lines_a_window_and_none_is_forgotten(
    gaps: list[float], kinds: int
) -> None:
    """Lines written and lines told of as left out are all lines there were."""
    limiter, now, written = RateLimiter(), 0.0, []
    for index, gap in enumerate(gaps):
        now += gap / 10
        written += [
            (now, line)
            for line in limiter.records_to_write(record(f"kind {'abc'[index % kinds]}%s", 1), now)
        ]
    written += [(now, line) for line in limiter.expire(float("inf"))]
    notices = [(at, line) for at, line in written if str(line.msg).startswith("left out")]
    plain = [(at, line) for at, line in written if not str(line.msg).startswith("left out")]
    left_out = sum(int(line.getMessage().split()[2]) for _, line in notices)
    assert len(plain) + left_out == len(gaps)
    for kind in {line.msg for _, line in plain}:
        times = [at for at, line in plain if line.msg == kind]
        for begin in times:
            # A window may begin anywhere, so two of them may touch any minute.
            inside = [at for at in times if begin <= at < begin + WINDOW_SECONDS]
            assert len(inside) <= 2 * MAX_PER_MINUTE


def test_a_full_pipe_blocks_no_caller_and_lost_lines_are_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With nobody reading, lines are dropped; the next reader learns how many."""
    monkeypatch.setattr("kvd.logs._CLOSE_SECONDS", PATIENCE)
    monkeypatch.setattr("kvd.logs.MAX_PER_MINUTE", 10 * MAX_QUEUED_LINES)
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    handler = QueuedHandler(write)
    handler.setFormatter(logging.Formatter())  # texts alone
    total = 3 * MAX_QUEUED_LINES
    for number in range(total):
        handler.handle(record("line %05d", number))
    with ThreadPoolExecutor(1) as threads, FileIO(read) as pipe:
        reading = threads.submit(pipe.readall)
        eventually(handler._lines.empty)
        handler.handle(record("the end"))
        handler.close()
        os.close(write)
        lines = reading.result(PATIENCE).decode().splitlines()
    lost = sum(int(line.split()[0]) for line in lines if line.endswith("in time"))
    numbered = [line for line in lines if line.startswith("line")]
    assert lost > 0
    assert lost + len(numbered) == total
    assert lines[-1] == "the end"
    assert numbered == sorted(numbered)
