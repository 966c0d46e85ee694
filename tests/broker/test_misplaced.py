"""Requests of a wrong session or at a wrong time, and settings smaller than a chunk."""

from collections.abc import Callable
from typing import Any

import pytest

from kvd.broker.broker import Broker
from kvd.broker.effects import LogEvent
from kvd.broker.sessions import Session
from kvd.client_names import Peer
from kvd_proto.messages import (
    Cancel,
    Drain,
    ErrorCode,
    Message,
    Reset,
    Step,
    Unregister,
)
from tests.broker.brokers import (
    PAGE,
    hello,
    join,
    lane_up,
    make_broker,
    mapped,
    refusal,
    register,
)
from tests.layouts import flat_layout

SessionOf = Callable[[Broker], Session]


def connected(broker: Broker) -> Session:
    """A session before HELLO."""
    return broker.connected(bytes(16), Peer(1, 0, 0))


def tool(broker: Broker) -> Session:
    """A tool's session."""
    return join(broker, "tool")


def scheduler(broker: Broker) -> Session:
    """A scheduler's session."""
    return join(broker, "scheduler")


def worker(broker: Broker) -> Session:
    """A worker's session that has registered nothing."""
    return join(broker)


def registering(broker: Broker) -> Session:
    """A worker's session whose registration is under way."""
    session = join(broker)
    broker.request(session, 2, register(), 0.0, 2)
    return session


def registered(broker: Broker) -> Session:
    """A worker's session with registered memory."""
    session = registering(broker)
    mapped(broker, session)
    return session


def unregistering(broker: Broker) -> Session:
    """A worker's session whose Unregister is under way."""
    session = registered(broker)
    broker.request(session, 3, Unregister(), 0.0)
    return session


AS_TOOL = "opened this one as tool; connect again as worker"
MISPLACED: list[tuple[SessionOf, Message, str]] = [
    (connected, register(), "Register came before HELLO; send that first"),
    (connected, Step(), "Step came before HELLO"),
    (worker, hello(), "HELLO has opened this session already, as worker; connect again"),
    (tool, register(), f"Register is for sessions of kind worker, and HELLO {AS_TOOL}"),
    (scheduler, register(), "Register is for sessions of kind worker"),
    (tool, Unregister(), f"Unregister is for sessions of kind worker, and HELLO {AS_TOOL}"),
    (worker, Unregister(), "has registered no memory; send Register first"),
    (registering, register(), "this session's Register is under way; wait for its reply"),
    (registered, register(), "send Unregister before another Register"),
    (unregistering, register(), "this session's Unregister is under way; wait for its reply"),
    (tool, Step(), "Step is for sessions of kind scheduler"),
    (worker, Step(), "opened this one as worker; connect again as scheduler for it"),
    (tool, Reset(), "belongs to no engine; connect again as scheduler"),
    (worker, Drain(), "Drain is for sessions of kind tool"),
    (
        registered,
        Cancel(jobs=(1,)),
        "Cancel is for a lane; connect to the endpoint of LaneUp",
    ),
]


@pytest.mark.parametrize(
    ("session_of", "message", "words"),
    MISPLACED,
    ids=[f"{of.__name__}-{type(message).__name__}" for of, message, _ in MISPLACED],
)
def test_a_misplaced_request_is_told_what_to_do(
    session_of: SessionOf, message: Message, words: str
) -> None:
    """The error names the request and what to send instead, and no state of the daemon."""
    broker = make_broker()
    lane_up(broker)
    session = session_of(broker)
    error = refusal(broker.request(session, 9, message, 0.0, 2))
    assert error.code is ErrorCode.BAD_STATE
    assert words in error.text
    assert "in state" not in error.text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({}, None),
        ({"max_queued_bytes": "64KiB"}, None),
        (
            {"max_queued_bytes": 1},
            "max_queued_bytes = 1 is less than a rank's share of a chunk, 8 KiB",
        ),
        ({"tier": ["memory:,queue=4KiB"]}, "queue=4 KiB, a chunk 8 KiB: it is given one at a time"),
        ({"tier": ["memory:,size=4KiB"]}, "size=4KiB, a chunk 8 KiB: it stores none; set a larger"),
    ],
)
def test_a_setting_below_a_chunk_is_warned_of_when_an_engine_attaches(
    settings: dict[str, Any], words: str | None
) -> None:
    """The engine is served, and one warning has both sizes and the remedy."""
    broker = make_broker(**settings)
    lane_up(broker)
    session = join(broker)
    broker.request(session, 2, register(layout=flat_layout(2 * PAGE)), 0.0, 2)
    effects = mapped(broker, session)
    assert session.engine is not None
    assert session.engine.attached
    warnings = [e.text for e in effects if isinstance(e, LogEvent) and e.level == "warning"]
    assert len(warnings) == (0 if words is None else 1)
    assert words is None or words in warnings[0]
