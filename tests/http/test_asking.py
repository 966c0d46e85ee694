"""Whether the broker owes an answer, as the HTTP process knows it."""

import asyncio
import threading
from pathlib import Path

import pytest

from kvd.report.broker_client import BrokerClient
from kvd_proto.messages import Message, Ping, Pong, StatusReport
from tests.waiting import PATIENCE


def test_answers_in_one_turn_of_the_loop_leave_nothing_owed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that hears of two answers at once takes neither for one that is still to come."""
    may_answer = threading.Event()

    def talk(_: BrokerClient, message: Message, __: type[Message]) -> Message:
        assert may_answer.wait(PATIENCE)
        return Pong(pid=1) if isinstance(message, Ping) else StatusReport(status={"ready": True})

    monkeypatch.setattr(BrokerClient, "_talk", talk)

    async def ask() -> float | None:
        client = BrokerClient(tmp_path)
        questions = asyncio.gather(client.ping(PATIENCE), client.report(PATIENCE))
        for _ in range(2):  # they ask, and their questions go to the thread
            await asyncio.sleep(0)
        assert client.silent_since is not None
        may_answer.set()
        client._thread.submit(lambda: None).result(PATIENCE)  # after both; the loop stands still
        await questions
        return client.silent_since

    assert asyncio.run(ask()) is None
