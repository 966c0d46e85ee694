"""Requests that only ask: one answer for all who ask, none for peers that have gone."""

from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvd.broker.status_report import status_report
from kvd.server import sessions
from kvd.server.sessions import QUESTION_SECONDS
from kvd_proto.codec import WIRE
from kvd_proto.messages import (
    Check,
    Checked,
    Drain,
    Drained,
    ErrorCode,
    Explain,
    Explained,
    Kind,
    Message,
    Ping,
    Pong,
    ShowConfig,
    Status,
    StatusReport,
)
from kvd_proto.zmtp import frame_header
from tests.raw_client import RawClient, code_of
from tests.server.rig import Rig

EXPLAIN = Explain(key=b"key")


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    """A broker that is ready."""
    with Rig(tmp_path) as made:
        yield made


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Every report that is built."""
    built: list[dict[str, Any]] = []

    def noted(*arguments: Any) -> dict[str, Any]:
        built.append(status_report(*arguments))
        return built[-1]

    monkeypatch.setattr("kvd.broker.broker.status_report", noted)
    return built


def tools(rig: Rig, stack: ExitStack, count: int, kind: Kind = "tool") -> list[RawClient]:
    """Sessions that have said Hello."""
    clients = [stack.enter_context(RawClient(rig.runtime_dir)) for _ in range(count)]
    for client in clients:
        rig.hello(client, kind)
    return clients


def send(client: RawClient, *messages: Message) -> None:
    """Send requests at once, numbered from 1."""
    frames = [WIRE.encode(message, number) for number, message in enumerate(messages, 1)]
    client.send_bytes(b"".join(frame_header(len(frame)) + frame for frame in frames))


def test_a_crowd_that_asks_all_the_time_gets_one_report_at_a_time(
    rig: Rig, reports: list[dict[str, Any]]
) -> None:
    """Each gets an answer to each request; in an interval one report is built for all of them."""
    with ExitStack() as stack:
        crowd = tools(rig, stack, 20)
        for client in crowd:
            send(client, *[Status()] * 5)
        rig.settle()
        assert len(reports) == 1
        while rig.core.state.counts.requests["Status"] < 100:
            rig.now += QUESTION_SECONDS
            rig.settle()
        assert len(reports) <= 6  # the first may answer the sessions alone that were read by then
        for client in crowd:
            answers = [client.reply() for _ in range(5)]
            assert [number for number, _ in answers] == [1, 2, 3, 4, 5]
            assert all(isinstance(answer, StatusReport) for _, answer in answers)


def test_a_report_shows_what_was_changed_before_it_was_asked_for(rig: Rig) -> None:
    """By the same session or by another, however soon after the last report."""
    with ExitStack() as stack:
        asking, other = tools(rig, stack, 2)
        assert rig.report(asking)["drain"] is None
        send(asking, Drain(), Status(), Ping())
        rig.settle()
        assert isinstance(asking.reply()[1], Drained)
        assert not rig.sessions.due() <= rig.now  # the question waits for its time
        rig.now += QUESTION_SECONDS
        rig.settle()
        report, pong = asking.reply()[1], asking.reply()[1]
        assert isinstance(report, StatusReport)
        assert report.status["drain"] is not None
        assert isinstance(pong, Pong)  # what is sent behind a question comes behind its answer
        rig.now += QUESTION_SECONDS
        assert rig.report(other)["drain"] is not None


def test_of_a_peer_that_has_gone_only_what_changes_state_is_served(
    rig: Rig, reports: list[dict[str, Any]]
) -> None:
    """Its questions build no report; what it did besides counts."""
    with ExitStack() as stack:
        questions = [Status(), Check(), EXPLAIN, ShowConfig()] * 20
        for client in tools(rig, stack, 10):
            send(client, *questions, Drain(), *questions)
            client.close()
        before = dict(rig.core.state.counts.requests)
        rig.settle()
        assert not reports
        assert rig.core.state.draining
        assert rig.core.state.counts.requests == before | {"Drain": 10}
        assert rig.core.state.counts.dropped_replies == 10 * (2 * len(questions) + 1)
        assert len(rig.sessions) == 0


def test_a_peer_that_goes_while_its_question_waits_gets_no_report(
    rig: Rig, reports: list[dict[str, Any]]
) -> None:
    """Its session ends at once, and nothing is built when the question's time has come."""
    with ExitStack() as stack:
        (client,) = tools(rig, stack, 1)
        rig.report(client)
        send(client, Status(), Status())
        rig.settle()
        client.close()
        rig.settle()
        assert len(rig.sessions) == 0
        rig.now += QUESTION_SECONDS
        rig.settle()
        assert len(reports) == 1


def test_a_check_is_answered_to_all_who_asked_though_the_first_has_left(rig: Rig) -> None:
    """One check runs for all of them; later ones get the next."""
    with ExitStack() as stack:
        first, *others = tools(rig, stack, 3)
        for client in (first, *others):
            send(client, Check())
        rig.turn()
        while not rig.core.background.busy:
            rig.turn()
        first.close()
        rig.settle()
        rig.now += QUESTION_SECONDS
        rig.settle()
        rig.work()
        assert all(isinstance(client.reply()[1], Checked) for client in others)
        assert rig.core.state.counts.requests["Check"] == 3


def test_one_that_may_not_ask_spoils_no_answer(rig: Rig) -> None:
    """A scheduler's question is refused, a tool's of the same words is answered."""
    with ExitStack() as stack:
        (scheduler,) = tools(rig, stack, 1, "scheduler")
        (tool,) = tools(rig, stack, 1)
        for client in (scheduler, tool):
            send(client, EXPLAIN)
        rig.settle()
        assert code_of(scheduler.reply()[1]) is ErrorCode.BAD_STATE
        assert isinstance(tool.reply()[1], Explained)


def test_a_turn_ends_when_its_time_is_up(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    """However many requests wait; they are served in the next turns."""
    monkeypatch.setattr(sessions, "TURN_SECONDS", 0.0)
    with ExitStack() as stack:
        (client,) = tools(rig, stack, 1)
        send(client, *[Ping()] * 10)
        served = []
        while rig.core.state.counts.requests["Ping"] < 10:
            rig.turn()
            served.append(rig.core.state.counts.requests["Ping"])
        assert served == [*range(1, 11)]
