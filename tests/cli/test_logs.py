"""Lines of the log: what they look like, what is left out, and that nobody waits for them."""

import fcntl
import json
import logging
import os
import threading
from collections.abc import Iterator
from io import FileIO
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.logs.limit import MOST_A_MINUTE, WINDOW_SECONDS, Limiter
from kvd.logs.render import formatter
from kvd.logs.setup import Handler
from kvd.logs.sink import MOST_LINES, Sink


def record(
    text: str, *args: object, level: int = logging.INFO, **extra: object
) -> logging.LogRecord:
    """A record as a module of kvd makes it."""
    made = logging.LogRecord("kvd.test", level, __file__, 7, text, args, None)
    made.__dict__.update(extra)
    return made


def traced() -> logging.LogRecord:
    """A record with a traceback."""
    try:
        raise ValueError("first\nsecond")
    except ValueError as error:
        made = record("it failed", level=logging.ERROR)
        made.exc_info = (type(error), error, error.__traceback__)
        return made


@pytest.fixture
def pipe() -> Iterator[tuple[FileIO, FileIO]]:
    """A pipe of one page: the ends to read from and to write to."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 4096)
    with FileIO(read, "r") as reader, FileIO(write, "w") as writer:
        yield reader, writer


# ------------------------------------------------------------------- form


@given(text=st.text(), name=st.text())
def test_json_is_one_object_a_line_whatever_is_said(text: str, name: str) -> None:
    """Any text and any engine's name come back from one line of JSON, with all fields."""
    line = formatter("json", "lane host#1", {"lane": "host"}).format(
        record("%s", text, engine=name, rank=3)
    )
    assert len(line.splitlines()) == 1
    told = json.loads(line)
    assert told["event"] == text
    assert (told["engine"], told["rank"], told["lane"]) == (name, 3, "host")
    assert (told["level"], told["logger"]) == ("info", "kvd.test")
    assert told["time"].endswith("Z")


@given(text=st.text(), style=st.sampled_from(["plain", "colour", "journal"]))
def test_a_text_for_people_is_one_line_without_control_characters(text: str, style: str) -> None:
    """Nobody who names an engine can write a line of the log, or to the terminal's controls."""
    line = formatter(style, "broker", {}).format(record("%s", text))
    assert len(line.splitlines()) == 1
    bare = line.replace("\x1b[2m", "").replace("\x1b[0m", "")
    assert bare.isprintable()


def test_a_traceback_follows_its_line() -> None:
    """People get the traceback below the event; JSON has it in the same object."""
    lines = formatter("plain", "broker", {}).format(traced()).splitlines()
    assert lines[0].endswith("ERROR   broker: it failed")
    assert lines[-1] == "second"
    told = json.loads(formatter("json", "broker", {}).format(traced()))
    assert told["event"] == "it failed"
    assert "ValueError: first" in told["exception"]


def test_the_journal_gets_a_priority_on_every_line_and_no_time() -> None:
    """Each line of a traceback has its level too, as sd-daemon(3) wants it."""
    lines = formatter("journal", "broker", {}).format(traced()).splitlines()
    assert len(lines) > 3
    assert all(line.startswith("<3>") for line in lines)
    line = formatter("journal", "lane host#1", {}).format(record("hello"))
    assert line == "<6>lane host#1: hello"


# ------------------------------------------------------------------ limit


@given(st.lists(st.floats(0, 20), max_size=800), st.integers(1, 3))
def test_at_most_so_many_lines_a_window_and_none_is_forgotten(
    gaps: list[float], kinds: int
) -> None:
    """Lines written and lines told of as left out are all lines there were."""
    limiter, now, written = Limiter(), 0.0, []
    for index, gap in enumerate(gaps):
        now += gap / 10
        written += [
            (now, line) for line in limiter.admits(record(f"kind {'abc'[index % kinds]}%s", 1), now)
        ]
    written += [(now, line) for line in limiter.rest()]
    told = [(at, line) for at, line in written if str(line.msg).startswith("left out")]
    plain = [(at, line) for at, line in written if not str(line.msg).startswith("left out")]
    left_out = sum(int(line.getMessage().split()[2]) for _, line in told)
    assert len(plain) + left_out == len(gaps)
    for kind in {line.msg for _, line in plain}:
        times = [at for at, line in plain if line.msg == kind]
        for begin in times:
            # A window may begin anywhere, so two of them may touch any minute.
            inside = [at for at in times if begin <= at < begin + WINDOW_SECONDS]
            assert len(inside) <= 2 * MOST_A_MINUTE


def test_engines_with_ever_new_names_are_one_kind() -> None:
    """Texts of the core are complete already: numbers and the engine's name do not count."""
    limiter = Limiter()
    lines = [
        line
        for index in range(MOST_A_MINUTE + 70)
        for line in limiter.admits(
            record(f"engine evil-{index} rank {index} is here", engine=f"evil-{index}"), 1.0
        )
    ]
    assert len(lines) == MOST_A_MINUTE
    (last,) = limiter.due(1.0 + WINDOW_SECONDS)
    assert last.getMessage() == "left out 70 more lines like: engine evil-0 rank 0 is here"


def test_different_events_do_not_silence_each_other() -> None:
    """A flood of one event leaves the first line of another."""
    limiter = Limiter()
    for _ in range(1000):
        limiter.admits(record("flood %d", 1), 1.0)
    assert len(limiter.admits(record("other %d", 1), 1.0)) == 1


# ------------------------------------------------------------------- sink


def quiet() -> list[bytes]:
    """Nothing more to write."""
    return []


def test_lines_arrive_whole_and_in_order(tmp_path: Path) -> None:
    """What is queued before the end is written by the end."""
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    sink = Sink(fd, lambda count: b"lost %d\n" % count, quiet)
    for number in range(1000):
        sink.put(b"%d\n" % number)
    sink.close(20)
    os.close(fd)
    assert path.read_text().split() == [str(number) for number in range(1000)]


def test_a_full_pipe_makes_nobody_wait_and_what_is_lost_is_counted(
    pipe: tuple[FileIO, FileIO],
) -> None:
    """With nobody reading, lines are dropped; the next reader learns how many."""
    read, write = pipe
    sink = Sink(write.fileno(), lambda count: b"lost %d\n" % count, quiet)
    total = 3 * MOST_LINES
    for number in range(total):
        sink.put(b"line %05d\n" % number)
    assert sink.dropped > 0
    text = bytearray()

    def drain() -> None:
        while data := read.read(65536):
            text.extend(data)

    reader = threading.Thread(target=drain)
    reader.start()
    sink.put(b"the end\n")
    sink.close(20)
    write.close()
    reader.join(20)
    lines = text.decode().splitlines()
    lost = sum(int(line.split()[1]) for line in lines if line.startswith("lost"))
    kept = [line for line in lines if line.startswith("line")]
    assert lost > 0
    assert lost + len(kept) + ("the end" in lines) == total + 1
    assert kept == sorted(kept)


def test_a_reader_that_is_gone_hurts_nobody(pipe: tuple[FileIO, FileIO]) -> None:
    """A closed pipe or descriptor is no error for whoever logs."""
    read, write = pipe
    read.close()
    sink = Sink(write.fileno(), lambda count: b"lost %d\n" % count, quiet)
    sink.put(b"one\n")
    sink.put(b"two\n")
    sink.close(20)
    assert sink.dropped == 2


def test_a_line_that_cannot_be_formatted_is_still_a_line(tmp_path: Path) -> None:
    """A mistake in a call of the log shows up as text, not as an exception."""
    path = tmp_path / "log"
    fd = os.open(path, os.O_WRONLY | os.O_CREAT)
    handler = Handler(fd)
    handler.setFormatter(formatter("plain", "broker", {}))
    handler.handle(record("%d chunks", "many"))
    handler.handle(record("surrogate \ud800"))
    handler.close()
    os.close(fd)
    lines = path.read_text().splitlines()
    assert len(lines) == 2
    assert "%d chunks" in lines[0]
    assert "ud800" in lines[1]
