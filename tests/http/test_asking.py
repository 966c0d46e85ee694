"""How the HTTP process asks the broker: one question for all, and whether an answer is owed."""

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvd.errors import NotRunning
from kvd.report.broker_client import BrokerClient
from kvd_proto.messages import Message, Ping, Pong, StatusReport
from tests.waiting import PATIENCE


class Client(BrokerClient):
    """Asks a broker that answers while `answers` is set."""

    def __init__(self) -> None:
        super().__init__(Path("/run/kvd"))
        self.answers = threading.Event()
        self.asked: list[Message] = []

    def _talk(self, message: Message, kind: type[Message]) -> Message:
        del kind
        self.asked.append(message)
        assert self.answers.wait(PATIENCE)
        return Pong(pid=1) if isinstance(message, Ping) else StatusReport(status={"ready": True})


@pytest.fixture
def client() -> Iterator[Client]:
    """A client of a broker that stands still."""
    made = Client()
    yield made
    made.answers.set()  # or its thread would never end


def test_answers_in_one_turn_of_the_loop_leave_nothing_owed(client: Client) -> None:
    """A loop that hears of two answers at once takes neither for one that is still to come."""

    async def ask() -> float | None:
        questions = asyncio.gather(client.ping(PATIENCE), client.report(PATIENCE))
        for _ in range(2):  # they ask, and their questions go to the thread
            await asyncio.sleep(0)
        assert client.silent_since is not None
        client.answers.set()
        client._thread.submit(lambda: None).result(PATIENCE)  # after both; the loop stands still
        await questions
        return client.silent_since

    assert asyncio.run(ask()) is None


def test_many_clients_share_one_question(client: Client) -> None:
    """Fifty who ask at once cost the broker one report, and those soon after none."""
    client.answers.set()

    async def ask() -> None:
        await asyncio.gather(*(client.report(PATIENCE) for _ in range(50)))
        await client.report(PATIENCE)

    asyncio.run(ask())
    assert len(client.asked) == 1


def test_a_silent_broker_is_not_buried_in_questions(client: Client) -> None:
    """However many ask and give up meanwhile, it finds one request when it comes back."""

    async def ask() -> None:
        for _ in range(30):
            with pytest.raises(NotRunning, match="has not answered Ping"):
                await client.ping(0.002)
        client.answers.set()
        await client.ping(PATIENCE)

    asyncio.run(ask())
    assert len(client.asked) <= 2
