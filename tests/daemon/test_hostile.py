"""What no honest client sends: one clear error each, and no other session is disturbed."""

import gc
import mmap
import os
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from kvd.wire.listener import MAX_STUCK, closes_at_once
from kvd_client import Store
from kvd_client.memory import sealed_file
from kvd_proto.channel import close_all
from kvd_proto.codec import HEADER_BYTES, MAX_MESSAGE_BYTES, WIRE
from kvd_proto.jobs import CONTROL_BYTES
from kvd_proto.messages import (
    PROTOCOL_VERSION,
    Attached,
    Error,
    ErrorCode,
    Ping,
    Pong,
    Reset,
    Status,
    Step,
    Welcome,
)
from kvd_proto.zmtp import frame_header
from tests.chaos.hostile import LAYOUT, LONG, SHORT, repeated_job
from tests.conftest import Daemon, StartDaemon
from tests.daemon.engines import POISON, engine_of, keys_of, make_layout, wait_hit
from tests.daemon.serving import wait_state
from tests.daemon.users import as_user, needs_root
from tests.descriptors import open_files
from tests.layouts import flat_layout
from tests.processes import frozen, python
from tests.raw_client import RawClient, RawConnection, code_of, registration, text_of
from tests.slowfs import SlowFilesystem, slow_filesystem
from tests.waiting import PATIENCE, eventually


@pytest.fixture
def client(shared_daemon: Daemon) -> Iterator[RawClient]:
    """A session that has not said HELLO."""
    with RawClient(shared_daemon.runtime_dir) as raw:
        yield raw


def test_a_body_that_is_no_message_is_answered_by_its_id(client: RawClient) -> None:
    """Any body behind a readable header gets exactly one ERROR with that id."""
    client.hello()
    head, step = WIRE.encode(Ping(), 55)[:HEADER_BYTES], WIRE.encode(Step())[:8]
    unknown = head[:6] + b"\xff\x7f" + head[8:] + b"\x80"
    bodies = (b"", b"\xc1", b"\x80\x80", b"\x81\xa4keys\x01", os.urandom(200))
    for frame in (*(step + head[8:] + body for body in bodies), unknown):
        client.send(frame)
        request_id, reply = client.reply()
        assert (request_id, code_of(reply)) == (55, ErrorCode.BAD_MESSAGE)
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
    shared_daemon.wait_log("a message of engine raw ")
    log = shared_daemon.wait_log("cannot be read: Step: ")
    assert log.count(f"(pid {os.getpid()}), uid {os.getuid()}, cannot be read: ") >= 6


def test_the_handshake_is_enforced(client: RawClient) -> None:
    """Nothing before HELLO, HELLO once; a scheduler whose engine is not served steps in vain."""
    assert code_of(client.ask(Step(used=(b"k",)))) is ErrorCode.BAD_STATE
    assert isinstance(client.hello(), Welcome)
    assert code_of(client.hello()) is ErrorCode.BAD_STATE
    assert code_of(client.ask(Step(used=(b"k",)))) is ErrorCode.NOT_READY
    assert code_of(client.ask(Reset())) is ErrorCode.NOT_READY
    assert code_of(client.ask(Pong(pid=1))) is ErrorCode.BAD_MESSAGE


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


@pytest.mark.parametrize("version", [PROTOCOL_VERSION - 1, PROTOCOL_VERSION + 1])
def test_both_sides_name_both_versions(
    client: RawClient, shared_daemon: Daemon, version: int
) -> None:
    """A Hello or a frame of another version gets `bad_version`; a client misses and says why."""
    reply = client.hello(protocol=version)
    assert code_of(reply) is ErrorCode.BAD_VERSION
    assert f"protocol {version}..{version}, this daemon {PROTOCOL_VERSION};" in text_of(reply)
    head = WIRE.encode(Ping(), 7)[:HEADER_BYTES]
    client.send(head[:4] + version.to_bytes(2, "little") + head[6:] + b"\x81\xa3new\x01")
    request_id, reply = client.reply()
    assert (request_id, code_of(reply)) == (7, ErrorCode.BAD_VERSION)
    assert text_of(reply) == (
        f"the other side speaks protocol version {version}, this side {PROTOCOL_VERSION}; install"
        " the same version of kvd on both"
    )
    assert isinstance(client.hello(), Welcome)
    ended = python("-c", CLIENT, str(shared_daemon.runtime_dir), str(version))
    assert not ended.returncode, ended.stderr
    why, result = ended.stdout.splitlines()
    text = f"the other side speaks protocol version {PROTOCOL_VERSION}, this side {version};"
    assert f"refuses: {text}" in why
    assert result == "MISS"


@pytest.mark.parametrize("where", ["broker", "lane-host-*"])
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\x01\x00", "several parts"),
        (b"\x08\x00", "flags"),
        (frame_header(MAX_MESSAGE_BYTES + 1), "the limit is"),
    ],
    ids=["part of a message", "unknown flags", "too large"],
)
def test_what_is_no_message_ends_that_session_only(
    client: RawClient, shared_daemon: Daemon, where: str, data: bytes, text: str
) -> None:
    """Its sender is told why by the broker as by a lane; others are served."""
    (path,) = shared_daemon.runtime_dir.glob(f"{where}.sock")
    with RawConnection(path) as hostile:
        hostile.send_bytes(data)
        assert text in text_of(hostile.error_at_the_end())
    assert isinstance(client.ask(Ping()), Pong)
    assert shared_daemon.wait_ready()["lanes"][0]["counters"]["restarts"] == 0


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


SIZES = (CONTROL_BYTES, *make_layout().storages)


@pytest.mark.parametrize("frame", [WIRE.encode(Ping(), 7), WIRE.encode(Step(), 7), b"junk"])
def test_descriptors_with_another_message_end_that_session(
    client: RawClient, shared_daemon: Daemon, frame: bytes
) -> None:
    """They are closed, and what came before is answered."""
    client.hello()
    fd = sealed_file("kvd-test-misplaced", CONTROL_BYTES)
    request_id = client.request(Ping())
    client.send(frame, [fd])
    os.close(fd)
    assert client.reply()[0] == request_id
    assert code_of(client.error_at_the_end()) is ErrorCode.BAD_MESSAGE
    broker = shared_daemon.process.pid
    eventually(lambda: "/memfd:kvd-test-misplaced (deleted)" not in open_files(broker).values())


@pytest.mark.parametrize("make", [loose, on_tmpfs])
@pytest.mark.parametrize("which", [0, 2])
def test_memory_that_could_be_shortened_is_refused(
    client: RawClient, make: Callable[[int], int], which: int
) -> None:
    """Be it the control page or a storage: the error says which one, and how to make it."""
    client.hello(kind="worker")
    fds = [make(n) if i == which else sealed_file("test", n) for i, n in enumerate(SIZES)]
    reply = client.register(registration(), fds)
    assert code_of(reply) is ErrorCode.BAD_LAYOUT
    for words in (f"descriptor {which}", "could be shortened", "F_ADD_SEALS, F_SEAL_SHRINK"):
        assert words in text_of(reply)


def test_a_connection_that_is_sent_through_itself_is_refused(client: RawClient) -> None:
    """A socket is no memory: the session ends, and its own descriptor does not keep it open."""
    client.hello()
    client.request(registration(), [client.fileno()])
    error = client.error_at_the_end()
    assert code_of(error) is ErrorCode.BAD_LAYOUT
    assert "descriptor 0" in text_of(error)


def test_a_worker_that_ends_while_it_registers_ends_nothing_else(
    client: RawClient, shared_daemon: Daemon
) -> None:
    """Its connection is closed before a lane is asked to map its memory, which is let go."""
    worker, broker = RawClient(shared_daemon.runtime_dir), shared_daemon.process.pid
    worker.hello(kind="worker")
    fds = [sealed_file("kvd-test-going", size) for size in SIZES]
    with frozen(broker):
        worker.request(registration(), fds)
        worker.close()
    for fd in fds:
        os.close(fd)
    assert isinstance(client.hello(), Welcome)
    eventually(lambda: "/memfd:kvd-test-going (deleted)" not in open_files(broker).values())


def test_questions_of_peers_that_have_gone_are_not_answered(start_daemon: StartDaemon) -> None:
    """Of 40,000 requests for a report next to none is served; an engine's session is the same."""
    daemon = start_daemon()
    with engine_of(daemon) as engine:
        before = daemon.status()
        with ExitStack() as stack:
            crowd = [stack.enter_context(RawClient(daemon.runtime_dir)) for _ in range(100)]
            for client in crowd:
                client.hello("tool")
            frame = WIRE.encode(Status(), 7)
            with frozen(daemon.process.pid):
                for client in crowd:
                    client.send_bytes((frame_header(len(frame)) + frame) * 400)
                stack.close()
        keys = engine.stored("meanwhile", 4)
        assert engine.load(keys) == (4, 0)
        report = eventually(
            daemon.status, lambda report: report["broker"]["dropped_replies"] >= 40_000
        )
        assert report["broker"]["requests"]["Status"] < 1000  # those of `eventually`
        registrations = [one["broker"]["requests"]["Register"] for one in (before, report)]
        assert registrations == [1, 1]  # its rank has stayed


def test_a_forged_job_moves_nothing(daemon: Daemon) -> None:
    """Slots that were never granted, of another engine or of another generation are refused."""
    with engine_of(daemon, "owner") as owner, engine_of(daemon, "forger") as forger:
        keys, open_keys = owner.stored("target", 2), keys_of("open", 2)
        ticket = owner.begin(open_keys)
        owner.fill(open_keys, 1)
        forger.poison(range(1, 5))
        ready = owner.scheduler.prepare_load(keys)
        for kind, slots, generations in (
            ("store", ticket.slots, ticket.generations),  # writing, but another engine's
            ("store", ready.slots, ready.generations),  # READY: may not be written
            ("store", ticket.slots + 50, ticket.generations),  # free
            ("store", ticket.slots + 10_000_000, ticket.generations),  # no slot at all
            ("load", ready.slots, ready.generations + 1),
            ("load", ready.slots, ready.generations * 0),
            ("load", ticket.slots, ticket.generations),
        ):
            assert not forger.moves(kind, [1, 2, 3, 4], slots, generations)
        assert (forger.page(0, 0, 1) == POISON).all()
        assert owner.load(keys) == (2, 0)
        owner.results(owner.submit("store", [0], [1, 2, 3, 4], ticket.slots, ticket.generations))
        wait_hit(owner, open_keys)
        assert owner.load(open_keys) == (2, 0)


def test_the_directory_cannot_be_written_by_clients(daemon: Daemon) -> None:
    """The descriptor is read-only, and so is every other way to the same memory."""
    gc.collect()  # tests before this one made directories in this process
    with engine_of(daemon) as engine:
        engine.store(keys_of("guarded", 1))
        lines = Path("/proc/self/maps").read_text().splitlines()
        modes = {line.split()[1] for line in lines if "kvd-directory" in line}
        assert modes == {"r--s"}
        for name in [fd for fd, file in open_files().items() if "kvd-directory" in file]:
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
    with engine_of(daemon, layout=flat_layout(4096)) as engine:
        assert len(engine.begin(keys_of("many", 20_000))) == 20_000
        wait_state(daemon, writing=20_000)
        engine.scheduler.close()
        assert wait_state(daemon, writing=0, draining=0)
        assert daemon.status()["lanes"][0]["counters"]["restarts"] == 0


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[SlowFilesystem]:
    """A file system that answers this process only."""
    with slow_filesystem(tmp_path / "slow") as mounted:
        yield mounted


@pytest.fixture
def open_daemon(start_daemon: StartDaemon, runtime_dir: Path) -> Daemon:
    """A daemon that other users come as far as."""
    runtime_dir.parent.chmod(0o711)
    return start_daemon()


def other_user(daemon: Daemon) -> RawClient:
    """A session of another user."""
    with as_user():
        client = RawClient(daemon.runtime_dir)
    client.hello(kind="worker", engine="hostile")
    return client


def register(client: RawClient, slow: SlowFilesystem) -> None:
    """Send its file as control page and memory."""
    file = os.open(slow.file, os.O_RDWR)
    client.request(registration(), [file, file])
    os.close(file)


def leave_unread(client: RawClient, slow: SlowFilesystem) -> None:
    """Break the protocol, with such files behind."""
    client.send_bytes(b"\x01\0")
    register(client, slow)


def is_held(daemon: Daemon, slow: SlowFilesystem, times: int = 1) -> bool:
    """Whether so many threads of the daemon wait for the file system; never its main one."""
    pid = daemon.process.pid
    assert pid not in slow.asked
    return slow.waiting(pid) == times


@needs_root
@pytest.mark.parametrize("attack", [register, leave_unread])
def test_a_file_system_that_never_answers_delays_no_session(
    open_daemon: Daemon, slow: SlowFilesystem, attack: Callable[[RawClient, SlowFilesystem], None]
) -> None:
    """Only a thread that closes its file waits; all sessions are served, new ones too."""
    daemon = open_daemon
    with engine_of(daemon) as engine:
        keys = engine.stored("safe", 4)
        with other_user(daemon) as client:
            with frozen(daemon.process.pid):
                attack(client, slow)
            error = client.error_at_the_end()
            assert attack is leave_unread or "descriptor 0 of the message" in text_of(error)
            eventually(lambda: is_held(daemon, slow))
            assert engine.load(keys) == (4, 0)
            with engine_of(daemon, "late") as late:
                assert late.load(keys) == (4, 0)
        report = daemon.status()
        assert report["lanes"][0]["counters"]["restarts"] == 0


@needs_root
def test_a_user_whose_file_systems_hold_threads_is_refused_until_they_answer(
    open_daemon: Daemon, slow: SlowFilesystem
) -> None:
    """Others are served; the refusal says why."""
    daemon = open_daemon
    for times in range(1, MAX_STUCK + 1):
        with other_user(daemon) as client:
            register(client, slow)
            assert client.hung_up()
        eventually(lambda times=times: is_held(daemon, slow, times))  # type: ignore[misc]

    def refusal() -> Error | None:
        with as_user():
            client = RawClient(daemon.runtime_dir)
        with client:
            return client.error_at_the_end() if client.hung_up(0.1) else None

    error = eventually(refusal)
    assert code_of(error) is ErrorCode.LIMIT
    assert "threads wait to close files that processes of uid" in text_of(error)
    with RawClient(daemon.runtime_dir) as another:
        assert isinstance(another.hello(), Welcome)
    slow.give_up()
    eventually(lambda: refusal() is None)
    with other_user(daemon) as client:
        assert isinstance(client.ask(Ping()), Pong)


@needs_root
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=["ended", "killed"])
def test_a_daemon_ends_when_the_file_system_answers_and_another_follows(
    start_daemon: StartDaemon, open_daemon: Daemon, slow: SlowFilesystem, number: int
) -> None:
    """Its end may wait for that; nothing else does, and nothing of it is in the next one's way."""
    daemon = open_daemon
    with other_user(daemon) as client:
        register(client, slow)
        assert "neither a memory file" in text_of(client.error_at_the_end())
        eventually(lambda: is_held(daemon, slow))
        daemon.process.send_signal(number)
        slow.give_up()
        daemon.process.wait(PATIENCE)
        following = start_daemon()
        with engine_of(following) as engine:
            assert engine.store(keys_of("again", 2))


def test_only_files_of_the_kernel_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose a descriptor is gets known without attributes, of which a file system would hear."""
    with tempfile.TemporaryFile(dir="/dev/shm") as shared:
        memory = [sealed_file("m", 1), os.memfd_create("loose"), os.dup(shared.fileno())]
    harmless = [*memory, os.open("/dev/null", os.O_RDONLY), os.eventfd(0)]
    foreign = [*os.pipe(), socket.socket(socket.AF_UNIX).detach()]
    foreign += [os.open(path, os.O_RDONLY) for path in (__file__, "/proc/self/maps", "/")]

    def ask(*_: object, **__: object) -> None:
        raise AssertionError("a file system is asked")

    with monkeypatch.context() as patch:
        for name in ("stat", "fstat", "lstat", "fstatvfs"):
            patch.setattr(os, name, ask)
        assert not any(map(closes_at_once, foreign))
    assert all(map(closes_at_once, harmless))
    close_all([*harmless, *foreign])


def test_a_chunk_that_is_stored_twice_costs_others_no_byte(start_daemon: StartDaemon) -> None:
    """A worker waits for the short one of two stores, its slots are freed, another model's follow.

    The long store, which would still write, is the only one that the lane accepts; the chunks are
    not READY before it has ended.
    """
    daemon = start_daemon(cpu_bytes="16MiB")
    with (
        engine_of(daemon, "honest", model="honest") as honest,
        engine_of(daemon, "hostile", model="hostile", layout=LAYOUT) as hostile,
    ):
        worker, keys = hostile.workers[0], keys_of("honest", 300)
        ticket = hostile.begin(keys_of("hostile", 1000))
        for number, blocks in enumerate((LONG, SHORT)):
            worker.submit(Store, number, repeated_job(ticket, blocks))
        hostile.scheduler.end_step()
        assert not worker.wait([1], PATIENCE)
        hostile.scheduler.reset()
        honest.store(keys)
        assert not worker.wait([0], PATIENCE)
        wait_hit(honest, keys)
        assert honest.load(keys) == (300, 0)
        results = {result.job_id: result for result in worker.get_finished()}
        assert "has had its store" in results[1].text
