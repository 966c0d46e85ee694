"""How the HTTP process asks the broker: one question for all, and whether an answer is owed."""

import asyncio
from collections.abc import Iterator

import pytest

from kvd.errors import NotRunning
from tests.http.serving import Asked
from tests.waiting import PATIENCE


@pytest.fixture
def client() -> Iterator[Asked]:
    """A client of a broker that stands still."""
    made = Asked({"ready": True})
    yield made
    made.answers.set()  # or its thread would never end


def test_answers_in_one_turn_of_the_loop_leave_nothing_owed(client: Asked) -> None:
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


def test_many_clients_share_one_question(client: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty who ask at once cost the broker one report, and those soon after none."""
    monkeypatch.setattr("kvd.report.broker_client.FRESH_SECONDS", 3600.0)
    client.answers.set()

    async def ask() -> None:
        await asyncio.gather(*(client.report(PATIENCE) for _ in range(50)))
        await client.report(PATIENCE)

    asyncio.run(ask())
    assert len(client.asked) == 1


def test_a_silent_broker_is_not_buried_in_questions(client: Asked) -> None:
    """However many ask and give up meanwhile, it finds one request when it comes back."""

    async def ask() -> None:
        for _ in range(30):
            with pytest.raises(NotRunning, match="has not answered Ping"):
                await client.ping(0.002)
        client.answers.set()
        await client.ping(PATIENCE)

    asyncio.run(ask())
    assert len(client.asked) <= 2
