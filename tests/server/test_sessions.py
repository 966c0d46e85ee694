"""Sessions: how they end, and what becomes of descriptors."""

import os
import select
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest

from kvd.broker.effects import Effect, Reply
from kvd.server.runtime_dir import AllowList
from kvd.server.sessions import SessionServer
from kvd_proto.channel import close_all
from kvd_proto.messages import (
    MAX_TEXT,
    Detached,
    Error,
    Message,
    Ping,
    Pong,
    Unregister,
    Welcome,
)
from tests.broker.brokers import hello, make_broker
from tests.raw_client import RawClient, registration


class Rig:
    """Sessions of a broker without lanes; replies are sent."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.core = make_broker(devices=[], max_sessions=100)
        self.epoll = select.epoll()
        self.sessions = SessionServer(
            runtime_dir / "broker.sock",
            self.core,
            self.epoll,
            self._execute,
            allowed=AllowList("", ""),
            is_own_process=lambda _: False,
        )

    def turn(self) -> None:
        """Look and serve once, as the loop does."""
        self.sessions.handle_events(dict(self.epoll.poll(0)))
        self.sessions.serve(0.0)

    def settle(self) -> None:
        """Serve until nothing is left to do."""
        while self.sessions.pending or self.epoll.poll(0):
            self.turn()

    def _execute(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, Reply):
                self.sessions.reply(effect)

    def ask(self, client: RawClient, message: Message, fds: Sequence[int] = ()) -> Message:
        """Return the reply to a request."""
        client.request(message, fds)
        self.settle()
        return client.reply()[1]


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """Without any session."""
    made = Rig(tmp_path)
    yield made
    made.sessions.close()
    made.epoll.close()


def test_a_process_that_has_ended_ends_its_session_though_a_child_has_its_socket(
    rig: Rig,
) -> None:
    """The end of the process is enough; what it sent before is served."""
    held, holding = os.pipe()
    if not (process := os.fork()):  # it connects, and leaves the connection to a child
        client = RawClient(rig.runtime_dir)
        client.ask(hello())
        client.request(Unregister())
        if not os.fork():
            os.close(holding)
            os.read(held, 1)
        os._exit(0)
    while not os.waitpid(process, os.WNOHANG)[0]:
        rig.turn()
    rig.settle()
    assert rig.core.state.counts.requests["Unregister"] == 1
    assert len(rig.sessions) == 0
    close_all((held, holding))


def test_a_peer_that_does_not_take_its_notices_is_disconnected(rig: Rig) -> None:
    """What waits for it is bounded; its session ends in the next turn, not among the effects."""
    with RawClient(rig.runtime_dir):
        rig.turn()
        (number,) = rig.core.state.registry.sessions
        while not rig.sessions.pending:
            rig.sessions.notify(number, Detached(reason="x" * MAX_TEXT), ())
        assert len(rig.sessions) == 1
        rig.turn()
        assert len(rig.sessions) == 0
        assert not rig.core.state.registry.sessions


def test_descriptors_of_a_refused_registration_are_closed(rig: Rig) -> None:
    """The session goes on."""
    with RawClient(rig.runtime_dir) as client:
        assert isinstance(rig.ask(client, hello()), Welcome)
        before = psutil.Process().num_fds()
        memory = [os.memfd_create("m") for _ in range(3)]
        refused = rig.ask(client, registration(), memory)
        close_all(memory)
        assert isinstance(refused, Error)  # no lane is there for its device
        assert psutil.Process().num_fds() == before
        assert isinstance(rig.ask(client, Ping()), Pong)
