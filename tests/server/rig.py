"""The broker's sessions in the test's own process, turn by turn."""

import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

from kvd.broker.effects import Effect, Reply
from kvd.server.runtime_dir import AllowList
from kvd.server.sessions import SessionServer
from kvd_proto.messages import Kind, Message, Status, StatusReport, Welcome
from tests.broker.brokers import hello, make_broker
from tests.raw_client import RawClient


class Rig:
    """Sessions of a broker without lanes; replies are sent. `now` is the loop's time."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.core = make_broker(devices=[], max_sessions=100)
        self.epoll = select.epoll()
        self.now = 0.0
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
        self.sessions.serve(self.now)

    def settle(self) -> None:
        """Serve until nothing is left to do."""
        while self.sessions.due() <= self.now or self.epoll.poll(0):
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

    def hello(self, client: RawClient, kind: Kind = "tool") -> None:
        """Open a client's session."""
        assert isinstance(self.ask(client, hello(kind)), Welcome)

    def report(self, client: RawClient) -> dict[str, Any]:
        """Return the report that a client gets."""
        reply = self.ask(client, Status())
        assert isinstance(reply, StatusReport)
        return reply.status

    def work(self) -> None:
        """Do all of the broker's tasks, and send their replies."""
        while self.core.background.busy:
            self._execute(self.core.background.work())
        self.settle()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.sessions.close()
        self.epoll.close()
