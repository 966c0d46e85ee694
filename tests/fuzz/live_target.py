"""A whole daemon with its host lane: scripts over its real sockets, a neighbour beside them."""

import contextlib
import json
import os
import re
import socket
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from pathlib import Path
from typing import Any, Self

from kvd_client.memory import sealed_file
from kvd_proto.codec import HEADER_BYTES, MAGIC, WIRE
from kvd_proto.errors import DecodeError
from kvd_proto.messages import (
    MAX_DESCRIPTORS,
    TAGS,
    Clear,
    Error,
    ErrorCode,
    Hello,
    LaneUp,
    Message,
    Ping,
    Pong,
    Register,
    Resume,
    Status,
    StatusReport,
    Step,
)
from tests.daemon.engines import Engine, keys_of
from tests.daemon.serving import left_over, started_daemons
from tests.fuzz.sessions import Act, Finding, Marks, Script
from tests.raw_client import RawClient, RawConnection
from tests.waiting import PATIENCE

PROMPT = (Hello, Ping, Status, Step)
"""Requests that are answered before the next one is served."""


class Line:
    """One connection, with what is owed on it; its end is explained if an Error comes before."""

    def __init__(self, connection: RawConnection, *, end_is_explained: bool) -> None:
        self.connection = connection
        self.ended = False
        self._end_is_explained = end_is_explained
        self._owed: list[tuple[int, bool]] = []  # request ids, and whether each is answered in turn
        self._counts = True
        self._times: Counter[int] = Counter()  # that a request id was used
        self._last: Message | None = None

    def send(self, frame: bytes, fds: list[int], *, bare: bool) -> None:
        """Send a message, or bytes."""
        try:
            if bare:
                self._counts = False  # who knows what was asked
                self.connection.send_bytes(frame, fds)
                return
            with contextlib.suppress(DecodeError):
                header = WIRE.decode_header(frame)
                if header.request_id:  # 0 is a notice's
                    self._owed.append((header.request_id, TAGS.get(header.tag) in PROMPT))
                    self._times[header.request_id] += 1
            self.connection.send(frame, fds)
        except EOFError:
            pass  # what was sent before is still received
        except TimeoutError as error:
            raise Finding("the daemon does not read") from error

    def receive(self, seconds: float) -> Message | None:
        """Return the next message, if one comes in time.

        Raises:
            Finding: it is no message, no request is open, one that came before is, it is an
                internal error; or the connection has ended without a word.
        """
        if self.ended:
            return None
        try:
            header, message, _ = self.connection.receive(seconds)
        except TimeoutError:
            return None
        except EOFError:
            self.ended = True
            if self._end_is_explained and not isinstance(self._last, Error):
                raise Finding(f"a session ends without an Error, after {self._last}") from None
            return None
        except DecodeError as error:
            raise Finding(f"an unreadable message: {error}") from error
        self._last = message
        if isinstance(message, Error) and message.code is ErrorCode.INTERNAL:
            raise Finding(f"an internal error: {message.text}")
        if header.request_id and self._counts:
            self._settle(header.request_id, message)
        return message

    def _settle(self, request_id: int, message: Message) -> None:
        place = next((i for i, owed in enumerate(self._owed) if owed[0] == request_id), None)
        if place is None:
            raise Finding(f"an answer too many: {request_id}, {message}")
        _, prompt = self._owed.pop(place)
        if prompt and self._times[request_id] == 1:
            for other, other_prompt in self._owed[:place]:
                if other_prompt and self._times[other] == 1:
                    raise Finding(f"request {request_id} is answered before {other}: {message}")


class Actor:
    """A session, and a connection to a lane once there is one; it may send whatever it likes.

    Raises:
        OSError, EOFError: the daemon lets nobody in now.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self._endpoint = ""
        self._lines = {"broker": Line(RawClient(runtime_dir), end_is_explained=True)}

    def send(self, step: Act, frame: bytes) -> bool:
        """Send what a step says, with descriptors of these kinds; return whether it could."""
        line = self._line(step.where)
        if line is None:
            return False
        with ExitStack() as stack:
            fds = [_open(kind, line.connection.fileno(), stack) for kind in step.fds]
            with contextlib.suppress(OSError):  # too many are under way
                line.send(frame, fds[:MAX_DESCRIPTORS], bare=step.bare)
        return True

    def _line(self, where: str) -> Line | None:
        """The connection, which is made anew to a lane; None where it has ended."""
        line = self._lines.get(where)
        if where == "lane" and self._endpoint and (line is None or line.ended):
            if line is not None:
                line.connection.close()
            with contextlib.suppress(OSError, EOFError):
                # An earlier connection ends without a word where a later one joins.
                line = Line(RawConnection(self._endpoint), end_is_explained=False)
                self._lines[where] = line
        return None if line is None or line.ended else line

    def receive(self, where: str, seconds: float) -> Message | None:
        """Return the next message from there; see `Line.receive`."""
        line = self._lines.get(where)
        message = None if line is None else line.receive(seconds)
        if isinstance(message, LaneUp):
            self._endpoint = message.endpoint.removeprefix("ipc://")
        return message

    def close(self) -> None:
        """Leave."""
        for line in self._lines.values():
            line.connection.close()


def _open(kind: str, own: int, stack: ExitStack) -> int:
    """One descriptor; what belongs to it is closed with the stack."""
    name, _, size = kind.partition(":")
    match name:
        case "own connection":
            return own
        case "socket":
            pair = socket.socketpair()
            for end in pair:
                stack.enter_context(end)
            return pair[0].fileno()
        case "write-only":
            fd = os.open(tempfile.gettempdir(), os.O_TMPFILE | os.O_WRONLY)
            os.ftruncate(fd, 65536)
        case "pipe":
            fd, other = os.pipe()
            stack.callback(os.close, other)
        case "event":
            fd = os.eventfd(0)
        case "mem":
            fd = sealed_file("fuzz", int(size))
        case "loose":
            fd = os.memfd_create("fuzz")
            os.ftruncate(fd, int(size))
        case _:
            path = {"null": os.devnull, "zero": "/dev/zero", "folder": "/"}[kind]
            fd = os.open(path, os.O_RDONLY)
    stack.callback(os.close, fd)
    return fd


REPLY_SECONDS = 0.03
REGISTER_SECONDS = 0.3
QUIET_SECONDS = 30.0
POLL_SECONDS = 0.1
MOMENT_SECONDS = 0.005
NEWS_SECONDS = 1.2  # the lane's figures in the report are half a second old
POOL = "32MiB"
RSS_SLACK_BYTES = 128 * 2**20
REGISTER = next(tag for tag, kind in TAGS.items() if kind is Register).to_bytes(2, "little")
KEYS, BATCH = 48, 6  # of the neighbour


class Neighbour:
    """An honest engine that stores and loads all the while, and looks at every byte.

    What others do may cost it hits, never a wrong byte. While somebody has `turn` it holds nothing
    in the daemon: no lease, no job.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self.verified_bytes = 0
        self.wrong = 0
        self.error = ""
        self.turn = threading.Lock()
        self._engine = Engine(runtime_dir, name="neighbour", world_size=1, model="neighbour")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="neighbour")

    def __enter__(self) -> Self:
        self._engine.wait_attached()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(PATIENCE)
        self._engine.close()

    def _run(self) -> None:
        keys = keys_of("neighbour", KEYS)
        try:
            for first in count(0, BATCH):
                if self._stop.wait(MOMENT_SECONDS):
                    return
                batch = keys[first % KEYS :][:BATCH]
                with self.turn:
                    self._engine.store(batch, must=False)
                    loaded, wrong = self._engine.load(batch)
                self.wrong += wrong
                self.verified_bytes += loaded * 2 * 2 * 4096
        except Exception as error:  # noqa: BLE001  # told by whoever looks
            self.error = repr(error)


class LiveTarget:
    """A daemon, which ends with the stack."""

    def __init__(self, runtime_dir: Path, stack: ExitStack) -> None:
        self._runtime_dir = runtime_dir
        self._log_read = 0
        start = stack.enter_context(started_daemons(runtime_dir))
        self._daemon = start("--log-level", "warning", cpu_bytes=POOL)
        self._tool = stack.enter_context(RawClient(runtime_dir))
        self._tool.hello("tool", "fuzz")
        self.neighbour = stack.enter_context(Neighbour(runtime_dir))
        self._lane = self._status()["lanes"][0]["pid"]
        self._before: dict[str, int] | None = None
        with self.neighbour.turn:
            self._before = self._resources(self._quiet())

    # ------------------------------------------------------------------ play

    def play(self, script: Script) -> None:
        """Play a script; afterwards the daemon must be as it was, but for leaks: see `look`."""
        marks = Marks()
        actors: dict[int, Actor] = {}
        try:
            for step in script:
                self._do(step, actors, marks)
        finally:
            for actor in actors.values():
                actor.close()
        self._check_alive()

    def _do(self, step: Act, actors: dict[int, Actor], marks: Marks) -> None:
        actor = actors.get(step.actor)
        if step.where == "time":
            time.sleep(MOMENT_SECONDS)
        elif step.where in ("open", "close"):
            if actor is not None:
                actors.pop(step.actor).close()
            if step.where == "open":
                with contextlib.suppress(OSError, EOFError):
                    actors[step.actor] = Actor(self._runtime_dir)
        elif actor is not None:
            frame = step.frame if step.bare else marks.resolve(step.frame)
            if actor.send(step, frame):
                _learn(step, frame, actor, marks)

    # ------------------------------------------------------------------ look

    def _check_alive(self) -> None:
        """The broker answers, in the process that it was, and the neighbour does not fail."""
        status = self._daemon.process.poll()
        if status is not None:
            raise Finding(f"the daemon has ended: {status}")
        if not isinstance(self._ask(Ping()), Pong):
            raise Finding("a PING is not answered by a PONG")
        if self.neighbour.wrong:
            raise Finding(f"{self.neighbour.wrong} wrong bytes were loaded")
        if self.neighbour.error:
            raise Finding(f"the neighbour fails: {self.neighbour.error}")
        log = self._daemon.log.read_text(encoding="utf-8", errors="replace")
        new, self._log_read = log[self._log_read :], len(log)
        if "Traceback" in new:
            raise Finding(f"the log has a traceback: {new[-4000:]}")

    def look(self) -> None:
        """All is quiet; the lane is the one that it was, and nothing is left of anybody."""
        with self.neighbour.turn:
            self._ask(Resume())
            self._ask(Clear())
            status = self._quiet()
        lane = status["lanes"][0]
        if len(status["lanes"]) != 1 or lane["counters"]["restarts"] or lane["pid"] != self._lane:
            raise Finding(f"the lane is not what it was: {lane}")
        self._check_alive()

    def _quiet(self) -> dict[str, Any]:
        """The status once nobody but this tool and the neighbour is there and holds anything."""
        since = time.monotonic()
        end = since + QUIET_SECONDS
        while True:
            status = self._status()
            left = self._left(status)
            now = time.monotonic()
            if left:
                since = now
            elif now - since > NEWS_SECONDS:
                return status
            if now > end:
                raise Finding(f"left over: {json.dumps(left)}", leak=True)
            time.sleep(POLL_SECONDS)

    def _left(self, status: dict[str, Any]) -> dict[str, Any]:
        """What is more than there should be when all is quiet."""
        spaces = [space for space in status["namespaces"] if space["model"] != "neighbour"]
        figures = {
            **left_over(status),
            "sessions": status["sessions"]["open"] - 3,
            "engines": len(status["engines"]) - 1,
            "workers": status["lanes"][0]["workers"] - 1,
            "lent": sum(space["chunks"]["lent"] for space in spaces),
        }
        if self._before is not None:
            resources = self._resources(status)
            figures |= {name: max(0, resources[name] - self._before[name]) for name in resources}
        return {name: value for name, value in figures.items() if value}

    def _resources(self, status: dict[str, Any]) -> dict[str, int]:
        """Descriptors, mappings and memory of both processes, less what namespaces account for."""
        broker = Path(f"/proc/{self._daemon.process.pid}")
        lane = Path(f"/proc/{status['lanes'][0]['pid']}")
        slack = 0 if self._before is None else RSS_SLACK_BYTES
        return {
            # A directory is a descriptor and the broker's mapping's own.
            "descriptors": _descriptors(broker) - 2 * len(status["namespaces"]),
            "lane's descriptors": _descriptors(lane),
            "lane's mappings": (lane / "maps").read_text().count("memfd:fuzz"),
            "memory": max(0, _memory(broker) - slack),
            "lane's memory": max(0, _memory(lane) - slack),
        }

    def _status(self) -> dict[str, Any]:
        report = self._ask(Status())
        if not isinstance(report, StatusReport):
            raise Finding(f"no status: {report!r}")
        return report.status

    def _ask(self, message: Message) -> Message:
        """A request of the tool's, with its reply."""
        try:
            reply = self._tool.ask(message)
        except (AssertionError, OSError, EOFError, DecodeError) as error:
            raise Finding(f"{type(message).__name__} is not answered: {error}") from error
        if isinstance(reply, Error) and reply.code is ErrorCode.INTERNAL:
            raise Finding(f"an internal error of the broker: {reply.text}")
        return reply


@contextmanager
def live_target() -> Iterator[LiveTarget]:
    """A daemon in a folder of its own."""
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp"))
        yield LiveTarget(Path(folder) / "run", stack)


def play_live(script: Script) -> None:
    """A daemon of its own for a script, for the replay of what was found; leaks too."""
    with live_target() as live:
        live.play(script)
        live.look()


def _learn(step: Act, frame: bytes, actor: Actor, marks: Marks) -> None:
    """Wait a moment for what the daemon says to a step, if it must; some comes much later."""
    seconds = REGISTER_SECONDS if frame[6:8] == REGISTER else REPLY_SECONDS
    wait = not step.bare and len(frame) >= HEADER_BYTES and frame.startswith(MAGIC)
    message = actor.receive(step.where, seconds if wait else 0.0)
    while message is not None:
        marks.learn(step.actor, message)
        message = actor.receive(step.where, 0.0)


def _descriptors(process: Path) -> int:
    return len(list((process / "fd").iterdir()))


def _memory(process: Path) -> int:
    """Resident memory of its own, without what it shares."""
    match = re.search(r"^RssAnon:\s+(\d+) kB", (process / "status").read_text(), re.MULTILINE)
    return int(match[1]) * 1024 if match else 0
