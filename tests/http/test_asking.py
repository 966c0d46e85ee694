"""How the HTTP process asks the broker: one question for all, and whether an answer is owed."""

import asyncio
from collections.abc import Iterator

import pytest

from kvd.errors import NotRunning
from kvd.report.broker_client import FIELDS, KEEP_SECONDS, MAX_REPORTS, PERIOD_SECONDS, Samples
from tests.http.serving import Asked
from tests.report.reports import loaded_report
from tests.waiting import PATIENCE


@pytest.fixture
def client() -> Iterator[Asked]:
    """A client of a broker that stands still."""
    made = Asked({"ready": True})
    yield made
    made.answers.set()  # or its thread would never end


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


def test_history_is_of_ten_minutes_and_no_more() -> None:
    """Counters of the last ten minutes and a report of a minute ago are kept, older ones go."""
    samples = Samples()
    for second in range(0, 3600, int(PERIOD_SECONDS)):
        samples.add(loaded_report(float(second)))
    told = samples.history()
    last = loaded_report(3595.0)
    assert len(told["samples"]) == KEEP_SECONDS / PERIOD_SECONDS
    assert told["samples"][-1] == (last["time"], *(last["counters"][name] for name in FIELDS))
    assert last["time"] - told["samples"][0][0] == KEEP_SECONDS - PERIOD_SECONDS
    assert 45 <= last["time"] - told["report"]["time"] <= 60
    assert len(samples._reports) == MAX_REPORTS


def test_a_silent_broker_leaves_a_hole_in_the_history(
    client: Asked, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samples are taken while it answers, and again when it is back."""
    monkeypatch.setattr("kvd.report.broker_client.PERIOD_SECONDS", 0.01)
    monkeypatch.setattr("kvd.report.broker_client._ANSWER_SECONDS", 0.01)
    monkeypatch.setattr("kvd.report.broker_client.FRESH_SECONDS", 0.0)
    client.status = loaded_report()
    samples = Samples()

    async def silent_then_back() -> None:
        recording = asyncio.create_task(samples.record(client))
        with pytest.raises(NotRunning):
            await client.report(0.1)
        assert samples.history() == {"fields": FIELDS, "samples": [], "report": None}
        client.answers.set()
        while not samples.history()["samples"]:
            await client.report(PATIENCE)
        recording.cancel()

    asyncio.run(asyncio.wait_for(silent_then_back(), PATIENCE))
