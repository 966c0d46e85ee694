"""A daemon and a client of another protocol version: each names both, and the client misses."""

from collections.abc import Iterator

import pytest

from kvd_proto.codec import HEADER_BYTES, WIRE
from kvd_proto.messages import PROTOCOL_VERSION, ErrorCode, Ping, Pong, Welcome
from tests.conftest import Daemon
from tests.processes import python
from tests.raw_client import RawClient, code_of, text_of

OTHERS = pytest.mark.parametrize(
    "version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1], ids=["older", "newer"]
)
CLIENT = """
import sys
import kvd_proto.messages
kvd_proto.messages.PROTOCOL_VERSION = int(sys.argv[2])
from kvd_client import Scheduler
from tests.waiting import eventually

with Scheduler(sys.argv[1], "another version") as scheduler:
    print(eventually(lambda: scheduler.wait_attached(0.1).why, lambda why: "version" in why))
    print(scheduler.lookup(b"key").name)
"""


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[RawClient]:
    """A session that has not said HELLO."""
    with RawClient(shared_daemon.runtime_dir) as raw:
        yield raw


@OTHERS
def test_a_frame_of_another_version_is_refused_with_both_versions(
    client: RawClient, version: int
) -> None:
    """A request whose header has another version gets `bad_version`; the session goes on."""
    head = WIRE.encode(Ping(), 7)[:HEADER_BYTES]
    client.send(head[:4] + version.to_bytes(2, "little") + head[6:] + b"\x81\xa3new\x01")
    number, reply = client.reply()
    assert (number, code_of(reply)) == (7, ErrorCode.BAD_VERSION)
    assert text_of(reply) == (
        f"the other side speaks protocol version {version}, this side {PROTOCOL_VERSION}; install"
        " the same version of kvd on both"
    )
    assert isinstance(client.hello(), Welcome)


@OTHERS
def test_a_hello_without_the_daemons_version_is_refused_with_both(
    client: RawClient, version: int
) -> None:
    """A Hello that names only other versions gets `bad_version`; the daemon goes on."""
    reply = client.hello(protocol=version)
    assert code_of(reply) is ErrorCode.BAD_VERSION
    assert f"protocol {version}..{version}, this daemon {PROTOCOL_VERSION};" in text_of(reply)
    assert isinstance(client.ask(Ping()), Pong)


@OTHERS
def test_a_client_of_another_version_misses_and_says_why(
    shared_daemon: Daemon, version: int
) -> None:
    """It names the daemon's version and its own, and every lookup is a miss."""
    ended = python("-c", CLIENT, str(shared_daemon.runtime_dir), str(version))
    assert not ended.returncode, ended.stderr
    why, found = ended.stdout.splitlines()
    said = f"the other side speaks protocol version {PROTOCOL_VERSION}, this side {version};"
    assert f"refuses: {said}" in why
    assert found == "MISS"
