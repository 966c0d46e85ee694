"""Whole-lane tests: order, waiting, stopping, and how lanes and workers end."""

import contextlib
import itertools
import os
import resource
import select
import signal
import sys
from pathlib import Path

from kvd.lane.loop import REQUESTS_PER_TURN
from kvd.wire.link import (
    Released,
    ReleaseWorker,
)
from kvd_proto.codec import HEADER_BYTES, WIRE
from kvd_proto.directory import SlotState
from kvd_proto.messages import (
    Cancel,
    Done,
    Error,
    ErrorCode,
    JobStatus,
    Join,
    Load,
    Ok,
    Ping,
    Pong,
    Status,
    Store,
    Wait,
)
from kvd_proto.zmtp import MORE
from tests.lane.support import (
    LAYOUT,
    TIMELINE,
    Directory,
    FakeWorker,
    Lane,
    Memory,
)
from tests.layouts import flat_layout
from tests.raw_client import RawConnection, code_of
from tests.waiting import PATIENCE, eventually


def test_cancelled_jobs_end_and_give_their_chunks_up(lane: Lane, worker: FakeWorker) -> None:
    """Cancel ends what is queued with its own Done, says how many, and leaves others alone."""
    worker.job(Store, 1, [1, 2], [3], after=1)
    worker.job(Store, 2, [3, 4], [4], after=1)
    request = worker.request(Cancel(jobs=(1, 99)))
    header, message = worker.reply()
    assert message == Ok()
    assert header.request_id == request
    assert (done := worker.done()).status is JobStatus.CANCELLED
    assert done.job == 1
    assert lane.share().slots.numpy().tolist() == [3]
    worker.words[TIMELINE] = 1
    assert worker.done().status is JobStatus.OK


def test_wait_is_answered_after_the_jobs_it_names(worker: FakeWorker) -> None:
    """Ok comes behind the Done of all jobs named, and at once where none is left."""
    worker.request(Wait(jobs=(5,)))
    assert isinstance(worker.reply()[1], Ok)
    worker.job(Store, 1, [1, 2], [3], after=1)
    worker.job(Store, 2, [3, 4], [4], after=1)
    worker.request(Wait(jobs=(1, 2, 2, 77)))
    assert worker.silent()
    worker.words[TIMELINE] = 1
    kinds = [type(worker.reply()[1]) for _ in range(3)]
    assert kinds == [Done, Done, Ok]


def test_a_ping_is_answered_while_a_long_job_runs(tmp_path: Path) -> None:
    """Copies come in slices: the loop answers, and a load gets through, before a store is done.

    Where the machine lets the store end first, another one is stored.
    """
    layout = flat_layout(16384, 16384, blocks=4096)
    with Lane(tmp_path, 4096 * layout.slot_bytes) as lane:
        directory = Directory(4096)
        directory.set(range(1, 4095), SlotState.WRITING)
        directory.set([0], SlotState.READY, count=1)
        worker = lane.attach(FakeWorker(layout), directory)
        # Every other slot and block, backwards: nothing coalesces.
        slots = list(range(4094, 0, -2))
        worker.poison()
        begun = lane.pool.bytes[slots[0] * layout.slot_bytes :][: layout.slot_bytes]
        numbers = itertools.count(1)

        def answers() -> list[int]:
            store, load = next(numbers), next(numbers)
            begun[:] = 0
            worker.job(Store, store, slots, slots)
            eventually(begun.any)
            worker.request(Ping())
            worker.job(Load, load, [4095], [0])
            replies = [worker.reply()[1] for _ in range(3)]
            lane.share()
            return [m.job - store if isinstance(m, Done) else -1 for m in replies]

        eventually(answers, lambda order: order == [-1, 1, 0])


def socket_path(lane: Lane) -> str:
    """Where workers connect."""
    return lane.ready.endpoint.removeprefix("ipc://")


def inode(fd: int) -> int:
    """Of the file that a descriptor is open on."""
    return os.fstat(fd).st_ino


def mapped(pid: int) -> set[int]:
    """The inodes of the tests' memory files that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "memfd:kvd-test" in line}


def test_a_released_worker_is_unmapped_and_unknown(lane: Lane, worker: FakeWorker) -> None:
    """Its jobs end first, then its memory is let go, and its token is worth nothing."""
    worker.job(Store, 1, [1, 2], [3], after=1)
    worker.request(Ping())
    worker.reply()
    memory = set(map(inode, worker.fds))
    assert memory <= mapped(lane.process.pid)
    lane.tell(ReleaseWorker(session=worker.session))
    assert lane.hear(Released).session == worker.session
    assert worker.done().status is JobStatus.CANCELLED
    assert not memory & mapped(lane.process.pid)
    worker.job(Store, 2, [1, 2], [3])
    error = worker.reply()[1]
    assert isinstance(error, Error)
    assert error.code is ErrorCode.BAD_SESSION
    assert code_of(worker.lane.ask(Join(token=worker.token))) is ErrorCode.BAD_SESSION
    lane.tell(ReleaseWorker(session=99))
    assert lane.hear(Released).session == 99
    assert not lane.import_worker(worker).error
    assert worker.lane.ask(Join(token=worker.token)) == Ok()  # the connection may join again


def test_memory_that_is_not_as_described_is_refused(lane: Lane) -> None:
    """Too small a file and a short control page are import errors."""
    layout = LAYOUT
    worker = FakeWorker(layout)
    small = Memory(layout.storages[0] - 1)
    assert "bytes" in lane.import_worker(worker, fds=[*worker.fds[:2], small.fd]).error
    page = Memory(8)
    assert "control page" in lane.import_worker(worker, fds=[page.fd, *worker.fds[1:]]).error
    assert not lane.import_worker(worker).error
    assert "already" in lane.import_worker(worker).error
    for memory in (small, page):
        memory.close()
    worker.close()


def test_a_lane_without_room_for_descriptors_takes_the_next_order(lane: Lane) -> None:
    """One of three arrived: the import is refused as such, and succeeds once there is room."""
    worker = FakeWorker(LAYOUT)
    lane.workers.append(worker)
    used = {int(end.name) for end in Path(f"/proc/{lane.process.pid}/fd").iterdir()}
    one_more = next(number for number in itertools.count() if number not in used) + 1
    before = resource.prlimit(lane.process.pid, resource.RLIMIT_NOFILE)
    resource.prlimit(lane.process.pid, resource.RLIMIT_NOFILE, (one_more, before[1]))
    refused = lane.import_worker(worker)
    assert (refused.out_of_files, "descriptor" in refused.error) == (True, True)
    resource.prlimit(lane.process.pid, resource.RLIMIT_NOFILE, before)
    assert not lane.import_worker(worker).error


def test_malformed_and_foreign_requests_get_their_error(lane: Lane, worker: FakeWorker) -> None:
    """Each request with a readable header is answered by its id; noise is dropped and counted."""
    good = [WIRE.encode(Ping(), 41 + number) for number in range(3)]
    near = bytes([*worker.token[:-1], worker.token[-1] ^ 1])
    stranger = RawConnection(socket_path(lane))
    cases = [
        (worker.lane, good[0][:HEADER_BYTES] + b"\xc1", ErrorCode.BAD_MESSAGE),
        (worker.lane, good[1][:4] + b"\x09\x00" + good[1][6:], ErrorCode.BAD_VERSION),
        (worker.lane, good[2][:6] + b"\xff\x7f" + good[2][8:], ErrorCode.BAD_MESSAGE),
        (worker.lane, WIRE.encode(Status(), 44), ErrorCode.BAD_STATE),
        (worker.lane, WIRE.encode(Join(token=worker.token), 45), ErrorCode.BAD_STATE),
        (stranger, WIRE.encode(Ping(), 46), ErrorCode.BAD_SESSION),
        (stranger, WIRE.encode(Join(token=near), 47), ErrorCode.BAD_SESSION),
    ]
    for number, (connection, frame, code) in enumerate(cases):
        connection.send(frame)
        request_id, message = connection.reply()
        assert (request_id, code_of(message)) == (41 + number, code)
    stranger.send(b"noise")
    stranger.send_bytes(bytes([MORE, 1, 0]))  # a message of parts ends its connection
    assert code_of(stranger.error_at_the_end()) is ErrorCode.LIMIT
    stranger.close()
    worker.request(Ping())
    assert isinstance(worker.reply()[1], Pong)
    counters = lane.ping().counters
    assert (counters["dropped_frames"], counters["limits"]["message_parts"]) == (1, 1)


def test_a_join_displaces_the_connection_before_with_what_was_not_read_there(
    lane: Lane, worker: FakeWorker, directory: Directory
) -> None:
    """Jobs under way are stopped before Join is answered; the others never begin."""
    directory.set([3], SlotState.READY, count=2)
    before, sent = worker.lane, 20 * REQUESTS_PER_TURN
    lane.process.send_signal(signal.SIGSTOP)
    for number in range(sent):
        worker.job(Load, number, [5, 6], [3], after=1)
    worker.connections.append(RawConnection(socket_path(lane)))
    worker.request(Join(token=worker.token))
    lane.process.send_signal(signal.SIGCONT)
    stopped: list[int] = []
    while isinstance(reply := worker.reply()[1], Done):
        assert reply.status is JobStatus.CANCELLED
        stopped.append(reply.job)
    assert reply == Ok()
    assert before.hung_up()
    assert stopped == list(range(len(stopped)))
    assert 0 < len(stopped) <= 10 * REQUESTS_PER_TURN
    assert lane.ping().queued_jobs == 0
    assert worker.run(Load, sent, [7, 8], [3]) is JobStatus.OK
    assert worker.silent()


def test_a_job_number_in_use_is_refused(worker: FakeWorker) -> None:
    """The second job of the same number is refused and the first goes on."""
    worker.job(Store, 1, [1, 2], [3], after=1)
    assert worker.run(Store, 1, [5, 6], [4]) is JobStatus.REFUSED
    worker.words[TIMELINE] = 1
    assert worker.done().status is JobStatus.OK


def test_signals_for_the_group_do_not_end_a_lane(lane: Lane, worker: FakeWorker) -> None:
    """SIGTERM and SIGINT are the broker's to act on."""
    lane.process.send_signal(signal.SIGTERM)
    lane.process.send_signal(signal.SIGINT)
    assert worker.run(Store, 1, [1, 2], [3]) is JobStatus.OK


def test_a_lane_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Killing the parent kills the lane, even while somebody else holds the link open."""
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:], close_fds=False).wait()"
    with Lane(tmp_path, 4096, within=[sys.executable, "-c", code]) as lane:
        pidfd = os.pidfd_open(lane.ready.pid)
        lane.process.kill()
        assert select.select([pidfd], [], [], PATIENCE)[0]
        os.close(pidfd)


def test_the_lifeline_is_the_last_to_go(lane: Lane) -> None:
    """A dying lane closes it after all that it had opened, whose numbers are higher."""
    pipe = inode(lane.lifeline)
    folder = Path(f"/proc/{lane.process.pid}/fd")
    lane.ping()
    ends = {}
    for end in folder.iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            ends[int(end.name)] = str(end.readlink())
    (mine,) = (number for number, name in ends.items() if name == f"pipe:[{pipe}]")
    given = {0, 1, 2, lane.link_number}
    assert mine < min(set(ends) - given - {mine})
    assert select.select([lane.lifeline], [], [], 0)[0] == []
    lane.process.kill()
    assert select.select([lane.lifeline], [], [], PATIENCE)[0]
    assert os.read(lane.lifeline, 1) == b""
