"""Who came through the door and goes at a bad moment."""

import socket
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq

from kvd.broker.door import Door
from kvd.broker.visitors import Visitors
from kvd.core.broker import Broker
from kvd.core.effects import Notify
from kvd.settings import Settings
from kvd.state.namespaces import Namespaces
from kvd_proto.messages import Detached

MORE_THAN_A_SOCKET_TAKES = 6000  # notices; twice as many are too much to keep


def test_a_visitor_who_has_gone_with_notices_unread_is_shown_out(tmp_path: Path) -> None:
    """Whoever leaves between two looks of the loop ends nothing but his own session."""
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
    visitors = Visitors(door, core, zmq.Poller(), lambda _: None, receiver)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as visitor:
        visitor.connect(str(tmp_path / "door.sock"))
        visitors.accept(lambda _: False, lambda _: False)
        (number,) = visitors.open
        for _ in range(MORE_THAN_A_SOCKET_TAKES):
            visitors.notify(Notify(number, Detached(reason="test")), lambda _: [])
        visitors.flush()
        assert visitors.open
    visitors.flush()
    assert not visitors.open
    assert not core.state.registry.sessions
    door.close()
