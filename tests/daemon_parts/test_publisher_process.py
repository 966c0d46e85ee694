"""The broker's side of the publisher's process: it waits for nothing, and replaces what hangs."""

import select
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from kvd.broker.effects import ToPublisher
from kvd.config.settings import Settings
from kvd.daemon.publisher_process import PublisherProcess
from kvd.errors import ConfigError
from kvd.wire.publishing import WithdrawEngine
from tests.waiting import DEADLINE

LONG_NAME = "x" * 256
MORE_THAN_A_SOCKET_TAKES = 12_000  # messages


class Core:
    """Notes what the publisher's process does."""

    def __init__(self) -> None:
        self.begun_times = 0
        self.reasons: list[str] = []

    def begun(self) -> list[Any]:
        """A process runs."""
        self.begun_times += 1
        return []

    def lost(self, reason: str) -> list[Any]:
        """It has ended."""
        self.reasons.append(reason)
        return []


@pytest.fixture
def deaf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    """A publisher whose process neither reads nor reports, and ends only when it is killed."""
    program = tmp_path / "deaf"
    program.write_text("#!/bin/sh\nexec sleep 600\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    core: Any = Core()
    poller = select.epoll()
    settings = Settings(events=f"ipc://{tmp_path}/events.sock")
    publisher = PublisherProcess(tmp_path, settings, core, poller, lambda _: None)

    def turn(now: float, wait: float = 0.0) -> None:
        publisher.turn(dict(poller.poll(wait)), now)

    turn(0.0)
    assert core.begun_times == 1
    yield SimpleNamespace(publisher=publisher, core=core, turn=turn)
    publisher._child.kill()
    publisher.close()
    assert not (tmp_path / "events.sock").exists()


def test_one_that_falls_silent_is_replaced(deaf: SimpleNamespace) -> None:
    """After a quarter of a minute; the next one is told everything anew."""
    deaf.turn(14.0)
    assert deaf.core.reasons == []
    deaf.turn(15.5)
    while not deaf.core.reasons:
        deaf.turn(15.5, DEADLINE)
    assert deaf.core.reasons == [f"killed by signal {signal.SIGKILL.value}"]
    deaf.turn(30.0)
    assert deaf.core.begun_times == 2


def test_one_that_does_not_read_is_replaced(deaf: SimpleNamespace) -> None:
    """The broker keeps a bounded amount for it, and never waits."""
    order = ToPublisher(WithdrawEngine(engine=LONG_NAME))
    for _ in range(MORE_THAN_A_SOCKET_TAKES):
        deaf.publisher.tell(order, [])
    while not deaf.core.reasons:
        deaf.turn(1.0, DEADLINE)
    assert deaf.core.reasons == [f"killed by signal {signal.SIGKILL.value}"]


def test_what_lies_at_a_unix_sockets_place_is_not_overwritten(tmp_path: Path) -> None:
    """A file stays; the error names the setting, the path and the remedy."""
    place = tmp_path / "events.sock"
    place.write_text("mine")
    for setting in ("events", "events_replay"):
        endpoints: Any = {"events": "tcp://127.0.0.1:0", setting: f"ipc://{place}"}
        core: Any = Core()
        with pytest.raises(ConfigError, match=f"{setting} = ipc://{place}: .*; choose another"):
            PublisherProcess(tmp_path, Settings(**endpoints), core, select.epoll(), lambda _: None)
    assert place.read_text() == "mine"


def test_where_nothing_is_published_nothing_is_started(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With `events` off; a replay address alone is warned of, and not bound."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        at = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        core: Any = Core()
        settings = Settings(events_replay=at)
        publisher = PublisherProcess(tmp_path, settings, core, select.epoll(), lambda _: None)
    publisher.turn({}, 0.0)
    publisher.stop()
    publisher.close()
    assert not publisher.address
    assert not core.begun_times
    assert "does nothing while events is off" in caplog.text
    assert not list(tmp_path.iterdir())
