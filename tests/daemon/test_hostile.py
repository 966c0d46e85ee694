"""Bytes that no honest client sends: one clear error each, and no other session is disturbed."""

import gc
import mmap
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from docs.generate_protocol import EXAMPLES, vector
from kvd_client.memory import sealed_file
from kvd_proto.codec import HEADER_BYTES, WIRE
from kvd_proto.control import CONTROL_BYTES
from kvd_proto.messages import (
    Detached,
    Error,
    ErrorCode,
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
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import POISON, Engine, keys_of, make_layout, wait_hit
from tests.daemon.raw_client import RawClient, code_of, registration, said_at_the_end, text_of
from tests.daemon.serving import wait_state
from tests.descriptors import open_files
from tests.layouts import flat_layout
from tests.processes import frozen
from tests.waiting import eventually


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[RawClient]:
    """A session that has not said HELLO."""
    raw = RawClient(shared_daemon.runtime_dir)
    yield raw
    raw.close()


def test_a_body_that_is_no_message_is_answered_by_its_id(client: RawClient) -> None:
    """Any body behind a readable header gets exactly one ERROR with that id."""
    client.hello()
    head = WIRE.encode(Ping(), 55, client.boot_id, client.token)[:HEADER_BYTES]
    step = WIRE.encode(Step())
    for body in (b"", b"\xc1", b"\x80\x80", b"\x81\xa4keys\x01", os.urandom(200)):
        request_id, reply = client.raw(step[:8] + head[8:] + body)
        assert request_id == 55
        assert code_of(reply) is ErrorCode.BAD_MESSAGE
    request_id, reply = client.raw(head[:6] + b"\xff\x7f" + head[8:] + b"\x80")
    assert (request_id, code_of(reply)) == (55, ErrorCode.BAD_MESSAGE)
    request_id, reply = client.raw(head[:4] + b"\x09\x00" + head[6:] + b"\x80")
    assert (request_id, code_of(reply)) == (55, ErrorCode.BAD_VERSION)
    assert isinstance(client.ask(Ping()), Pong)


def test_frames_without_a_header_are_dropped(client: RawClient, shared_daemon: Daemon) -> None:
    """Junk, empty frames and multipart messages get no reply; the log says who sent them."""
    before = shared_daemon.status()["broker"]["dropped_frames"]
    for parts in ([b""], [b"junk"], [b"a", b"b", b"c"], [os.urandom(64)], [bytes(48)]):
        client.socket.send_multipart(parts)
    assert isinstance(client.ask(Ping()), Pong)
    assert not client.socket.poll(0)
    assert shared_daemon.status()["broker"]["dropped_frames"] == before + 5
    client.hello()
    client.raw(WIRE.encode(Step(), 7, client.boot_id, client.token)[:HEADER_BYTES] + b"\xc1")
    pid, uid = os.getpid(), os.getuid()
    shared_daemon.wait_log(f"a message of pid {pid}, uid {uid}, cannot be read: it has several")
    shared_daemon.wait_log("a message of engine raw ")
    log = shared_daemon.wait_log(f"(pid {pid}), uid {uid}, cannot be read: ")
    assert log.count(f"a message of pid {pid}, uid {uid}, cannot be read: ") >= 5


def test_tokens_and_boot_ids_are_checked(client: RawClient, shared_daemon: Daemon) -> None:
    """A wrong token, a stale boot id and another session's token are refused."""
    client.hello()
    assert code_of(client.ask(Ping(), token=bytes(15) + b"x")) is ErrorCode.BAD_SESSION
    assert code_of(client.ask(Ping(), boot_id=bytes(15) + b"x")) is ErrorCode.STALE_BOOT
    thief = RawClient(shared_daemon.runtime_dir)
    assert code_of(thief.ask(Ping(), token=client.token)) is ErrorCode.BAD_SESSION
    thief.close()
    assert isinstance(client.ask(Ping()), Pong)


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


@pytest.mark.parametrize("junk", [b"junk", vector(EXAMPLES[0]), WIRE.encode(Detached(reason="x"))])
def test_junk_at_the_control_socket_ends_that_session_only(
    client: RawClient, shared_daemon: Daemon, junk: bytes
) -> None:
    """A session that sends no message there is ended; others stay."""
    other = RawClient(shared_daemon.runtime_dir)
    other.hello()
    client.control_socket.send(junk)
    said_at_the_end(client)
    assert code_of(client.ask(Ping())) is ErrorCode.BAD_SESSION
    assert isinstance(other.ask(Ping()), Pong)
    other.close()


def test_a_registration_without_descriptors_is_refused(client: RawClient) -> None:
    """On the request socket, or with too few: an error that says how many are missing."""
    client.hello(kind="worker")
    few = [os.memfd_create("test"), os.memfd_create("test")]
    for count, reply in (0, client.ask(registration())), (2, client.register(registration(), few)):
        assert code_of(reply) is ErrorCode.BAD_LAYOUT
        assert f"{count} descriptors came with the registration" in text_of(reply)
        assert "name 3; send it over the control socket" in text_of(reply)
    body = WIRE.encode(registration(), 7, client.boot_id, client.token)[:-9]
    client.control_socket.send(body)
    request_id, reply = client.answer()
    assert (request_id, code_of(reply)) == (7, ErrorCode.BAD_MESSAGE)
    assert isinstance(client.ask(Ping()), Pong)


def test_the_descriptors_of_a_second_registration_are_closed(
    client: RawClient, shared_daemon: Daemon
) -> None:
    """It is refused, those of the first one stay until Unregister, and then none is left."""
    client.hello(kind="worker")
    sizes = (CONTROL_BYTES, *make_layout().storages)

    def held(name: str) -> int:
        return list(open_files(shared_daemon.process.pid).values()).count(
            f"/memfd:{name} (deleted)"
        )

    for name, kind in (("kvd-test-first", Registered), ("kvd-test-second", Error)):
        fds = [sealed_file(name, size) for size in sizes]
        assert isinstance(client.register(registration(), fds), kind)
    assert (held("kvd-test-first"), held("kvd-test-second")) == (3, 0)
    assert isinstance(client.ask(Unregister()), Ok)
    eventually(lambda: held("kvd-test-first") == 0)


def test_a_control_socket_that_is_sent_through_itself_is_refused(client: RawClient) -> None:
    """A socket is no memory: the session ends, and its own descriptor does not keep it open."""
    client.hello()
    client.send_with(registration(), [client.control_socket.fileno()])
    assert "descriptor 0" in said_at_the_end(client)
    assert code_of(client.ask(Ping())) is ErrorCode.BAD_SESSION


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
    """Its control socket is closed before a lane is asked to map its memory, which is let go."""
    raw = RawClient(shared_daemon.runtime_dir)
    raw.hello(kind="worker")
    sizes = (CONTROL_BYTES, *make_layout().storages)
    fds = [sealed_file("kvd-test-going", size) for size in sizes]
    with frozen(shared_daemon.process.pid):
        raw.send_with(registration(), fds)
        raw.close()
    for fd in fds:
        os.close(fd)
    other = RawClient(shared_daemon.runtime_dir)
    assert isinstance(other.hello(), Welcome)
    other.close()
    going = "/memfd:kvd-test-going (deleted)"
    eventually(lambda: going not in open_files(shared_daemon.process.pid).values())


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
        client = RawClient(daemon.runtime_dir)
        client.hello(engine="engine")
        frame, fds, _, _ = socket.recv_fds(client.control_socket, 65536, 4)
        assert frame
        again = os.open(f"/proc/self/fd/{fds[0]}", os.O_RDWR)  # the kernel allows this much
        with pytest.raises(PermissionError):
            mmap.mmap(again, 4096)
        with pytest.raises(PermissionError):
            os.write(again, b"x")
        for fd in (again, *fds):
            os.close(fd)
        client.close()


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
