"""Where KV events are published: what an operator may write, and what is said of the rest."""

from pathlib import Path

import pytest

from kvd.config.endpoints import Endpoint, parse_events, parse_replay
from kvd.config.settings import KNOWN
from kvd.config.values import Listen
from kvd.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("off", None),
        ("tcp://127.0.0.1:5557", Endpoint(Listen("127.0.0.1", 5557))),
        ("tcp://[::1]:0", Endpoint(Listen("::1", 0))),
        ("tcp://*:5557", Endpoint(Listen("0.0.0.0", 5557))),  # noqa: S104  # what is tested
        ("ipc:///run/kvd/events.sock", Endpoint(Path("/run/kvd/events.sock"))),
        ("connect:tcp://indexer:5557", Endpoint(Listen("indexer", 5557), connects=True)),
        ("connect:ipc:///a", Endpoint(Path("/a"), connects=True)),
    ],
)
def test_endpoints_are_what_zeromq_takes(text: str, meant: Endpoint | None) -> None:
    """Both schemes, every interface as ZeroMQ writes it, and indexers that listen themselves."""
    assert parse_events(text) == meant
    if meant is not None and "*" not in text:
        assert str(meant) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "127.0.0.1:5557", "tcp://127.0.0.1", "tcp://", "tcp://off", "udp://127.0.0.1:1"),
        *("tcp://h:65536", "ipc://relative", "ipc://", "ipc://@abstract", f"ipc:///{'a' * 107}"),
        *("connect:off", "connect:", "connect:connect:tcp://h:1"),
        *("connect:tcp://*:5557", "connect:tcp://127.0.0.1:0"),
    ],
)
def test_what_is_no_endpoint_is_told_what_one_is(text: str) -> None:
    """The refusal gives an example."""
    with pytest.raises(ConfigError, match=r"such as (connect:)?(tcp|ipc)://"):
        KNOWN["events"].convert(text, typed=False)


def test_a_replay_socket_only_listens() -> None:
    """Subscribers ask there, so kvd has nobody to connect to."""
    assert parse_replay("tcp://127.0.0.1:5558") == Endpoint(Listen("127.0.0.1", 5558))
    assert parse_replay("off") is None
    with pytest.raises(ConfigError, match="such as tcp://"):
        parse_replay("connect:tcp://indexer:5558")
