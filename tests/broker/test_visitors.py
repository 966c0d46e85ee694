"""Who came through the door and goes at a bad moment."""

import socket
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from kvd.broker.door import Door
from kvd.broker.visitors import AT_ONCE, Visitors
from kvd.core.broker import Broker
from kvd.core.effects import Notify
from kvd.settings import Settings
from kvd.state.namespaces import Namespaces
from kvd_proto.messages import Detached

MORE_THAN_A_SOCKET_TAKES = 6000  # notices; twice as many are too much to keep


@pytest.fixture
def visitors(tmp_path: Path) -> Iterator[Visitors]:
    """Nobody is there yet."""
    core = Broker(
        Settings(runtime_dir=str(tmp_path), cpu_bytes=2**20),
        boot_id=bytes(16),
        version="test",
        pid=1,
        devices=[],
        open_namespaces=lambda n: Namespaces(n, make_buffer=lambda _, size: bytearray(size)),
        available_bytes=lambda: 2**30,
    )
    door = Door(tmp_path / "door.sock")
    receiver: Any = SimpleNamespace(drop=lambda connection: connection.close())
    yield Visitors(door, core, zmq.Poller(), lambda _: None, receiver)
    door.close()


def knock(tmp_path: Path) -> socket.socket:
    """A connection to the door."""
    visitor = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    visitor.connect(str(tmp_path / "door.sock"))
    return visitor


def test_a_visitor_who_has_gone_with_notices_unread_is_shown_out(
    visitors: Visitors, tmp_path: Path
) -> None:
    """Whoever leaves between two looks of the loop ends nothing but his own session."""
    with knock(tmp_path):
        visitors.accept(lambda _: False, lambda _: False)
        (number,) = visitors.open
        for _ in range(MORE_THAN_A_SOCKET_TAKES):
            visitors.notify(Notify(number, Detached(reason="test")), lambda _: [])
        visitors.flush()
        assert visitors.open
    visitors.flush()
    assert not visitors.open


def test_a_crowd_at_the_door_takes_a_bounded_turn(visitors: Visitors, tmp_path: Path) -> None:
    """Some are let in at a time, all in the end."""
    with ExitStack() as crowd:
        for _ in range(2 * AT_ONCE):
            crowd.enter_context(knock(tmp_path))
        visitors.accept(lambda _: False, lambda _: False)
        assert len(visitors.open) == AT_ONCE
        visitors.accept(lambda _: False, lambda _: False)
        assert len(visitors.open) == 2 * AT_ONCE
        visitors.close()
