"""Bytes that no honest client sends: one clear error each, and no other session is disturbed."""

import gc
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvd_client.memory import sealed_file
from kvd_proto.codec import HEADER_BYTES, MAX_MESSAGE_BYTES, WIRE
from kvd_proto.jobs import CONTROL_BYTES
from kvd_proto.messages import (
    Attached,
    Detached,
    Error,
    ErrorCode,
    Message,
    Ok,
    Ping,
    Pong,
    Registered,
    Reset,
    Status,
    Step,
    Unregister,
    Welcome,
)
from kvd_proto.zmtp import frame_header
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import POISON, Engine, keys_of, make_layout, wait_hit
from tests.daemon.serving import wait_state
from tests.descriptors import open_files
from tests.layouts import flat_layout
from tests.processes import frozen
from tests.raw_client import RawClient, code_of, registration, text_of
from tests.waiting import eventually


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[RawClient]:
    """A session that has not said HELLO."""
    with RawClient(shared_daemon.runtime_dir) as raw:
        yield raw


def test_a_body_that_is_no_message_is_answered_by_its_id(client: RawClient) -> None:
    """Any body behind a readable header gets exactly one ERROR with that id."""
    client.hello()
    head, step = WIRE.encode(Ping(), 55)[:HEADER_BYTES], WIRE.encode(Step())[:8]

    def refusal(frame: bytes) -> tuple[int, ErrorCode]:
        client.send(frame)
        request_id, reply = client.reply()
        return request_id, code_of(reply)

    for body in (b"", b"\xc1", b"\x80\x80", b"\x81\xa4keys\x01", os.urandom(200)):
        assert refusal(step + head[8:] + body) == (55, ErrorCode.BAD_MESSAGE)
    unknown, other_version = head[:6] + b"\xff\x7f" + head[8:], head[:4] + b"\x09\0" + head[6:]
    assert refusal(unknown + b"\x80") == (55, ErrorCode.BAD_MESSAGE)
    assert refusal(other_version + b"\x80") == (55, ErrorCode.BAD_VERSION)
    assert isinstance(client.ask(Ping()), Pong)


def test_frames_without_a_header_are_dropped(client: RawClient, shared_daemon: Daemon) -> None:
    """Junk and empty frames get no reply; the log says who sent them."""
    before = shared_daemon.status()["broker"]["dropped_frames"]
    for frame in (b"", b"junk", os.urandom(64), bytes(16), bytes(48)):
        client.send(frame)
    assert isinstance(client.ask(Ping()), Pong)  # the next reply
    assert shared_daemon.status()["broker"]["dropped_frames"] == before + 5
    client.hello()
    client.send(WIRE.encode(Step(), 7)[:HEADER_BYTES] + b"\xc1")
    client.reply()
    pid, uid = os.getpid(), os.getuid()
    shared_daemon.wait_log("a message of engine raw ")
    log = shared_daemon.wait_log("cannot be read: Step: ")
    assert log.count(f"(pid {pid}), uid {uid}, cannot be read: ") >= 6


def test_the_handshake_is_enforced(client: RawClient) -> None:
    """Nothing before HELLO, HELLO once, and only with a common version."""
    assert code_of(client.ask(Step(used=(b"k",)))) is ErrorCode.BAD_STATE
    assert code_of(client.hello(protocol=9)) is ErrorCode.BAD_VERSION
    assert isinstance(client.hello(), Welcome)
    assert code_of(client.hello()) is ErrorCode.BAD_STATE
    assert code_of(client.ask(Step(used=(b"k",)))) is ErrorCode.NOT_READY
    assert code_of(client.ask(Reset())) is ErrorCode.NOT_READY
    assert code_of(client.ask(Pong(pid=1))) is ErrorCode.BAD_MESSAGE


def test_a_tool_changes_nothing(client: RawClient) -> None:
    """A session of kind tool may ask for the status and cannot store or register."""
    client.hello(kind="tool")
    assert code_of(client.ask(Step(used=(b"k",)))) is ErrorCode.BAD_STATE
    assert not isinstance(client.ask(Status()), Error)


PART = b"\x01\x00"


@pytest.mark.parametrize("data", [PART, b"\x08\x00", frame_header(MAX_MESSAGE_BYTES + 1)])
def test_what_is_no_message_ends_that_session_only(
    client: RawClient, shared_daemon: Daemon, data: bytes
) -> None:
    """A part of a message, unknown flags and a size above the bound: it is told why."""
    with RawClient(shared_daemon.runtime_dir) as other:
        other.hello()
        client.hello()
        client.send_bytes(data)
        assert code_of(client.error_at_the_end()) in {ErrorCode.LIMIT, ErrorCode.BAD_MESSAGE}
        assert isinstance(other.ask(Ping()), Pong)


@pytest.mark.parametrize("message", [Ping(), Step(), Detached(reason="x"), b"junk"])
def test_descriptors_with_another_message_end_that_session(
    client: RawClient, shared_daemon: Daemon, message: Message | bytes
) -> None:
    """They are closed, and what came before is answered."""
    client.hello()
    fd = sealed_file("kvd-test-misplaced", 4096)
    request_id = client.request(Ping())
    client.send(message if isinstance(message, bytes) else WIRE.encode(message, 7), [fd])
    os.close(fd)
    assert client.reply()[0] == request_id
    assert code_of(client.error_at_the_end()) is ErrorCode.BAD_MESSAGE
    eventually(lambda: held_by(shared_daemon, "kvd-test-misplaced") == 0)


def test_descriptors_that_come_behind_their_message_end_that_session(
    client: RawClient, shared_daemon: Daemon
) -> None:
    """Those of a registration in two parts are closed, and its memory is not mapped."""
    client.hello(kind="worker")
    frame = WIRE.encode(registration(), 7)
    data = frame_header(len(frame)) + frame
    fd = sealed_file("kvd-test-late", CONTROL_BYTES)
    client.send_bytes(data[:20], [fd])
    client.send_bytes(data[20:40], [fd])
    os.close(fd)
    assert "send all with the first" in text_of(client.error_at_the_end())
    eventually(lambda: held_by(shared_daemon, "kvd-test-late") == 0)


def test_a_registration_without_descriptors_is_refused(client: RawClient) -> None:
    """With none, or with too few: an error that says how many are missing."""
    client.hello(kind="worker")
    few = [os.memfd_create("test"), os.memfd_create("test")]
    for count, reply in (0, client.ask(registration())), (2, client.register(registration(), few)):
        assert code_of(reply) is ErrorCode.BAD_LAYOUT
        assert f"{count} descriptors came with the registration" in text_of(reply)
        assert "name 3" in text_of(reply)
    client.send(WIRE.encode(registration(), 7)[:-9])
    request_id, reply = client.reply()
    assert (request_id, code_of(reply)) == (7, ErrorCode.BAD_MESSAGE)
    assert isinstance(client.ask(Ping()), Pong)


def held_by(daemon: Daemon, name: str) -> int:
    """How many descriptors of memory files of this name the broker has open."""
    return list(open_files(daemon.process.pid).values()).count(f"/memfd:{name} (deleted)")


def test_the_descriptors_of_a_second_registration_are_closed(
    client: RawClient, shared_daemon: Daemon
) -> None:
    """It is refused, those of the first one stay until Unregister, and then none is left."""
    client.hello(kind="worker")
    sizes = (CONTROL_BYTES, *make_layout().storages)
    for name, kind in (("kvd-test-first", Registered), ("kvd-test-second", Error)):
        fds = [sealed_file(name, size) for size in sizes]
        assert isinstance(client.register(registration(), fds), kind)
    assert held_by(shared_daemon, "kvd-test-first") == 3
    assert held_by(shared_daemon, "kvd-test-second") == 0
    assert isinstance(client.ask(Unregister()), Ok)
    eventually(lambda: held_by(shared_daemon, "kvd-test-first") == 0)


def test_a_connection_that_is_sent_through_itself_is_refused(client: RawClient) -> None:
    """A socket is no memory: the session ends, and its own descriptor does not keep it open."""
    client.hello()
    client.request(registration(), [client.fileno()])
    error = client.error_at_the_end()
    assert code_of(error) is ErrorCode.BAD_LAYOUT
    assert "descriptor 0" in text_of(error)


def loose(nbytes: int) -> int:
    """A memory file that may be shortened."""
    fd = os.memfd_create("test")
    os.ftruncate(fd, nbytes)
    return fd


def on_tmpfs(nbytes: int) -> int:
    """A file that cannot carry a seal."""
    with tempfile.TemporaryFile(dir="/dev/shm") as file:
        file.truncate(nbytes)
        return os.dup(file.fileno())


def test_a_worker_that_ends_while_it_registers_ends_nothing_else(shared_daemon: Daemon) -> None:
    """Its connection is closed before a lane is asked to map its memory, which is let go."""
    raw = RawClient(shared_daemon.runtime_dir)
    raw.hello(kind="worker")
    sizes = (CONTROL_BYTES, *make_layout().storages)
    fds = [sealed_file("kvd-test-going", size) for size in sizes]
    with frozen(shared_daemon.process.pid):
        raw.request(registration(), fds)
        raw.close()
    for fd in fds:
        os.close(fd)
    with RawClient(shared_daemon.runtime_dir) as other:
        assert isinstance(other.hello(), Welcome)
    eventually(lambda: held_by(shared_daemon, "kvd-test-going") == 0)


@pytest.mark.parametrize("make", [loose, on_tmpfs])
@pytest.mark.parametrize("which", [0, 2])
def test_memory_that_could_be_shortened_is_refused(
    client: RawClient, make: Callable[[int], int], which: int
) -> None:
    """Be it the control page or a storage: the error says which one, and how to make it."""
    client.hello(kind="worker")
    sizes = (CONTROL_BYTES, *make_layout().storages)
    fds = [make(n) if i == which else sealed_file("test", n) for i, n in enumerate(sizes)]
    reply = client.register(registration(), fds)
    assert code_of(reply) is ErrorCode.BAD_LAYOUT
    assert f"descriptor {which}" in text_of(reply)
    assert "could be shortened" in text_of(reply)
    assert "F_ADD_SEALS, F_SEAL_SHRINK" in text_of(reply)


def test_a_forged_job_moves_nothing(daemon: Daemon) -> None:
    """Slots that were never granted, of another engine or of another generation are refused."""
    with (
        Engine(daemon.runtime_dir, name="owner", world_size=1).wait_attached() as owner,
        Engine(daemon.runtime_dir, name="forger", world_size=1).wait_attached() as forger,
    ):
        keys = keys_of("target", 2)
        owner.store(keys)
        wait_hit(owner, keys)
        open_keys = keys_of("open", 2)
        ticket = owner.begin(open_keys)
        owner.fill(open_keys, 1)
        forger.poison(range(1, 5))
        ready = owner.scheduler.prepare_load(keys)
        for slots, generations in (
            (ticket.slots, ticket.generations),  # writing, but another engine's
            (ready.slots, ready.generations),  # READY: may not be written
            (ticket.slots + 50, ticket.generations),  # free
            (ticket.slots + 10_000_000, ticket.generations),  # no slot at all
        ):
            results = forger.results(forger.submit("store", [0], [1, 2, 3, 4], slots, generations))
            assert not results[0].success
        for generations in (ready.generations + 1, ready.generations * 0):
            jobs = forger.submit("load", [0], [1, 2, 3, 4], ready.slots, generations)
            assert not forger.results(jobs)[0].success
        jobs = forger.submit("load", [0], [1, 2, 3, 4], ticket.slots, ticket.generations)
        assert not forger.results(jobs)[0].success
        assert (forger.page(0, 0, 1) == POISON).all()
        assert owner.load(keys) == (2, 0)
        owner.results(owner.submit("store", [0], [1, 2, 3, 4], ticket.slots, ticket.generations))
        wait_hit(owner, open_keys)
        assert owner.load(open_keys) == (2, 0)


def test_the_directory_cannot_be_written_by_clients(daemon: Daemon) -> None:
    """The descriptor is read-only, and so is every other way to the same memory."""
    gc.collect()  # tests before this one made directories in this process
    with Engine(daemon.runtime_dir, world_size=1).wait_attached() as engine:
        engine.store(keys_of("guarded", 1))
        names = [fd for fd, file in open_files().items() if "kvd-directory" in file]
        maps = Path("/proc/self/maps").read_text()
        lines = [line for line in maps.splitlines() if "kvd-directory" in line]
        assert lines
        assert all(line.split()[1] == "r--s" for line in lines)
        for name in names:
            with pytest.raises(OSError, match=r"not permitted|Bad file|Permission"):
                os.write(name, b"x")
        with RawClient(daemon.runtime_dir) as client:
            client.hello(engine="engine")
            _, (fd, *_) = client.notice(Attached)
            again = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)  # the kernel allows this much
        with pytest.raises(PermissionError):
            mmap.mmap(again, 4096)
        with pytest.raises(PermissionError):
            os.write(again, b"x")
        os.close(again)


def test_tens_of_thousands_of_open_stores_are_given_up_at_once(start_daemon: StartDaemon) -> None:
    """A scheduler that dies with 20,000 chunks in writing: all are freed, and the lane lives."""
    daemon = start_daemon(cpu_bytes="96MiB")
    layout = flat_layout(4096)
    with Engine(daemon.runtime_dir, world_size=1, layout=layout).wait_attached() as engine:
        assert len(engine.begin(keys_of("many", 20_000))) == 20_000
        wait_state(daemon, writing=20_000)
        engine.scheduler.close()
        assert wait_state(daemon, writing=0, draining=0)
        assert daemon.status()["lanes"][0]["counters"]["restarts"] == 0
