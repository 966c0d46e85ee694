"""Whole-lane tests: what jobs move and must not, order, waiting, and how lanes and workers end."""

import contextlib
import itertools
import os
import select
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from kvd.lane.loop import REQUESTS_PER_TURN
from kvd.wire.link import Released, ReleaseWorker, ShareDone, UnbindWorker
from kvd_proto.codec import HEADER_BYTES, WIRE
from kvd_proto.directory import SlotState
from kvd_proto.jobs import EPOCH_WORDS, PROGRESS_WORDS
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import (
    Cancel,
    Done,
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
    NULL_BLOCK,
    SLOTS,
    TIMELINE,
    Directory,
    FakeWorker,
    Lane,
    Memory,
    make_job,
    token_of,
)
from tests.layouts import flat_layout
from tests.raw_client import RawConnection, code_of
from tests.waiting import PATIENCE, eventually


def test_groups_of_one_job_go_where_they_belong(lane: Lane) -> None:
    """A full group, an empty one, and a sliding window that starts with a chunk's last block."""
    page = 512
    both = (TensorRef(0, page), TensorRef(1, page))
    layout = RankLayout(
        num_blocks=16,
        blocks_per_chunk=4,
        hash_block_size=16,
        storages=(16 * page * 2,),
        tensors=(TensorSpec(0, 0, page, 2 * page), TensorSpec(0, page, page, 2 * page)),
        groups=(GroupSpec(both, 16), GroupSpec((TensorRef(1, page),), 16), GroupSpec(both[:1], 16)),
    )
    directory = Directory(SLOTS)
    directory.set(range(SLOTS), SlotState.WRITING)
    worker = lane.attach(FakeWorker(layout), directory)
    worker.fill(3)
    memory = worker.storages[0].bytes.reshape(16, 2, page)
    before = memory.copy()
    shape = {"group_sizes": [3, 0, 2], "block_indices": [0, 0, 7]}
    assert worker.run(Store, 1, [4, 5, 6, 8, 9], [2, 3, 9], **shape) is JobStatus.OK
    share = lane.hear(ShareDone)
    assert (share.ok, share.slots.numpy().tolist()) == (True, [2, 3, 9])
    assert share.first.numpy().tolist() == [0, 3, 0]
    assert share.count.numpy().tolist() == [3, 1, 1]
    assert share.groups.numpy().tolist() == [0, 2, 2]
    for slot, first, count, group in ((2, 0, 3, 0), (3, 3, 1, 2), (9, 0, 1, 2)):
        directory.set([slot], SlotState.READY, first=first, count=count, group=group)
    memory[:] = 0xEE
    assert worker.run(Load, 2, [10, 11, 12, 14, 15], [2, 3, 9], **shape) is JobStatus.OK
    np.testing.assert_array_equal(memory[[10, 11, 12]], before[[4, 5, 6]])
    np.testing.assert_array_equal(memory[[14, 15], 0], before[[8, 9], 0])
    assert (memory[[14, 15], 1] == 0xEE).all()
    assert (memory[:10] == 0xEE).all()


def test_a_store_leaves_out_the_chunks_whose_loans_ended(lane: Lane, directory: Directory) -> None:
    """It goes on with the rest and reports those alone; where none is left it is STALE.

    No byte of the pool outside the slots that it still has changes.
    """
    directory.set([3, 4], SlotState.READY, count=2, owner=8)  # in use again
    directory.set([5], SlotState.WRITING, owner=8, generation=2)
    directory.set([6], SlotState.WRITING, generation=2)
    lane.pool.bytes[:] = 0xAB
    size = LAYOUT.slot_bytes
    worker = lane.attach(FakeWorker(LAYOUT), directory, arena_base=size // 2)
    worker.fill(1)
    blocks = [1, 2, 3, 4, 5, 6, 7, 8]
    assert worker.run(Store, 1, blocks, [3, 4, 5, 6], generation=2) is JobStatus.OK
    share = lane.hear(ShareDone)
    assert (share.ok, share.slots.numpy().tolist()) == (True, [6])
    assert (share.first.numpy().tolist(), share.count.numpy().tolist()) == ([0], [2])
    slot = lane.pool.bytes[size // 2 :][6 * size : 7 * size]
    np.testing.assert_array_equal(slot, worker.pages([7, 8]).reshape(-1))
    slot[:] = 0xAB
    assert worker.run(Store, 2, blocks[:6], [3, 4, 5], generation=3) is JobStatus.STALE
    assert lane.heard(ShareDone) == []
    assert (lane.pool.bytes == 0xAB).all()


@pytest.mark.parametrize(
    ("blocks", "slots", "words"),
    [
        ([NULL_BLOCK, NULL_BLOCK], [3], "only null blocks"),
        ([1, 32], [3], "block_ids"),
        ([1, 2], [SLOTS], "slots"),
        ([1, 2, 3], [3, 3], "twice"),
    ],
)
def test_a_job_that_does_not_fit_the_layout_is_refused(
    lane: Lane, worker: FakeWorker, blocks: list[int], slots: list[int], words: str
) -> None:
    """Wrong blocks or slots are REFUSED with the figures; no byte changes.

    The broker learns at once which chunks will never be there.
    """
    lane.pool.bytes[:] = 0xAB
    worker.poison()
    worker.job(Store, 1, blocks, slots)
    done = worker.done()
    assert done.status is JobStatus.REFUSED
    assert words in done.text
    given_up = [share.slots.numpy().tolist() for share in lane.heard(ShareDone) if not share.ok]
    assert given_up == ([slots] if max(slots) < SLOTS else [])
    assert worker.run(Load, 2, blocks, slots) in {JobStatus.REFUSED, JobStatus.STALE}
    assert (lane.pool.bytes == 0xAB).all()
    assert (worker.pages(range(32)) == 0xEE).all()


def test_jobs_are_refused_while_a_worker_is_unbound_or_their_number_is_in_use(
    lane: Lane, worker: FakeWorker, directory: Directory
) -> None:
    """After UnbindWorker they end as REFUSED; bound again they run, memory having stayed mapped."""
    lane.tell(UnbindWorker(session=worker.session))
    lane.ping()
    assert worker.run(Store, 1, [1, 2], [3]) is JobStatus.REFUSED
    lane.bind(worker, directory)
    worker.job(Store, 1, [1, 2], [3], after=1)
    assert worker.run(Store, 1, [5, 6], [4]) is JobStatus.REFUSED
    worker.words[TIMELINE] = 1
    assert worker.done().status is JobStatus.OK


def test_cancelled_jobs_end_and_give_their_chunks_up(lane: Lane, worker: FakeWorker) -> None:
    """Cancel ends what is queued with its own Done, and leaves others alone."""
    worker.job(Store, 1, [1, 2], [3], after=1)
    worker.job(Store, 2, [3, 4], [4], after=1)
    assert worker.connection.ask(Cancel(jobs=(1, 99))) == Ok()
    done = worker.done()
    assert (done.job, done.status) == (1, JobStatus.CANCELLED)
    assert lane.hear(ShareDone).slots.numpy().tolist() == [3]
    worker.words[TIMELINE] = 1
    assert worker.done().status is JobStatus.OK


def test_wait_is_answered_after_the_jobs_it_names(worker: FakeWorker) -> None:
    """Ok comes behind the Done of all jobs named, and at once where none is left."""
    assert worker.connection.ask(Wait(jobs=(5,))) == Ok()
    worker.job(Store, 1, [1, 2], [3], after=1)
    worker.job(Store, 2, [3, 4], [4], after=1)
    worker.connection.request(Wait(jobs=(1, 2, 2, 77)))
    assert_silent(worker)
    worker.words[TIMELINE] = 1
    assert [type(worker.reply()) for _ in range(3)] == [Done, Done, Ok]


def assert_silent(worker: FakeWorker) -> None:
    """Nothing arrives for a while."""
    with pytest.raises(TimeoutError):
        worker.connection.receive(0.05)


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
        first_slot = lane.pool.bytes[slots[0] * layout.slot_bytes :][: layout.slot_bytes]
        numbers = itertools.count(1)

        def answers() -> list[int]:
            store, load = next(numbers), next(numbers)
            first_slot[:] = 0
            worker.job(Store, store, slots, slots)
            eventually(first_slot.any)
            worker.connection.request(Ping())
            worker.job(Load, load, [4095], [0])
            replies = [worker.reply() for _ in range(3)]
            return [m.job - store if isinstance(m, Done) else -1 for m in replies]

        eventually(answers, lambda order: order == [-1, 1, 0])


def inode(fd: int) -> int:
    """Of the file that a descriptor is open on."""
    return os.fstat(fd).st_ino


def mapped(pid: int) -> set[int]:
    """The inodes of the tests' memory files that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {int(line.split()[4]) for line in lines if "memfd:kvd-test" in line}


def test_a_released_worker_is_unmapped_and_unknown(lane: Lane, worker: FakeWorker) -> None:
    """Its jobs end first, then its memory is let go, and its token is worth nothing."""
    join = Join(token=token_of(worker.session))
    worker.job(Store, 1, [1, 2], [3], after=1)
    assert isinstance(worker.connection.ask(Ping()), Pong)
    memory = set(map(inode, worker.fds))
    assert memory <= mapped(lane.process.pid)
    lane.tell(ReleaseWorker(session=worker.session))
    assert lane.hear(Released).session == worker.session
    assert worker.done().status is JobStatus.CANCELLED
    assert not memory & mapped(lane.process.pid)
    worker.job(Store, 2, [1, 2], [3])
    assert code_of(worker.reply()) is ErrorCode.BAD_SESSION
    assert code_of(worker.connection.ask(join)) is ErrorCode.BAD_SESSION
    lane.tell(ReleaseWorker(session=99))
    assert lane.hear(Released).session == 99
    assert not lane.import_worker(worker).error
    assert worker.connection.ask(join) == Ok()  # the connection may join again


def test_memory_that_is_not_as_described_is_refused(lane: Lane) -> None:
    """Too small a file, a short control page, and memory that is mapped already are errors."""
    worker = FakeWorker(LAYOUT)
    lane.workers.append(worker)
    small, page = Memory(LAYOUT.storages[0] - 1), Memory(8)
    assert "bytes" in lane.import_worker(worker, fds=[*worker.fds[:2], small.fd]).error
    assert "control page" in lane.import_worker(worker, fds=[page.fd, *worker.fds[1:]]).error
    assert not lane.import_worker(worker).error
    assert "already" in lane.import_worker(worker).error
    for memory in (small, page):
        memory.close()


def test_malformed_and_foreign_requests_get_their_error(lane: Lane, worker: FakeWorker) -> None:
    """Each request with a readable header is answered by its id; noise is dropped and counted.

    No word outside the control page is read or written.
    """
    good = [WIRE.encode(Ping(), 41 + number) for number in range(3)]
    token = token_of(worker.session)
    near = bytes([*token[:-1], token[-1] ^ 1])
    stranger, own = RawConnection(lane.socket), worker.connection
    behind_words = make_job(Store, 1, [1, 2], [3], word=EPOCH_WORDS)
    behind_page = make_job(Load, 2, [1, 2], [3], progress=PROGRESS_WORDS + 1)
    cases = [
        (own, good[0][:HEADER_BYTES] + b"\xc1", ErrorCode.BAD_MESSAGE),
        (own, good[1][:4] + b"\x09\x00" + good[1][6:], ErrorCode.BAD_VERSION),
        (own, good[2][:6] + b"\xff\x7f" + good[2][8:], ErrorCode.BAD_MESSAGE),
        (own, WIRE.encode(Status(), 44), ErrorCode.BAD_STATE),
        (own, WIRE.encode(Join(token=token), 45), ErrorCode.BAD_STATE),
        (own, WIRE.encode(behind_words, 46), ErrorCode.BAD_MESSAGE),
        (own, WIRE.encode(behind_page, 47), ErrorCode.BAD_MESSAGE),
        (stranger, WIRE.encode(Ping(), 48), ErrorCode.BAD_SESSION),
        (stranger, WIRE.encode(Join(token=near), 49), ErrorCode.BAD_SESSION),
    ]
    for number, (connection, frame, code) in enumerate(cases):
        connection.send(frame)
        request_id, message = connection.reply()
        assert (request_id, code_of(message)) == (41 + number, code)
    stranger.send(b"noise")
    stranger.send_bytes(bytes([MORE, 1, 0]))  # a message of parts ends its connection
    assert code_of(stranger.error_at_the_end()) is ErrorCode.LIMIT
    stranger.close()
    assert isinstance(own.ask(Ping()), Pong)
    counters = lane.ping().counters
    assert (counters["dropped_frames"], counters["limits"]["message_parts"]) == (1, 1)


def test_a_join_displaces_the_connection_before_with_what_was_not_read_there(
    lane: Lane, worker: FakeWorker, directory: Directory
) -> None:
    """Jobs under way are stopped before Join is answered; the others never begin."""
    directory.set([3], SlotState.READY, count=2)
    before, sent = worker.connection, 20 * REQUESTS_PER_TURN
    lane.process.send_signal(signal.SIGSTOP)
    for number in range(sent):
        worker.job(Load, number, [5, 6], [3], after=1)
    worker.connection = RawConnection(lane.socket)
    worker.connection.request(Join(token=token_of(worker.session)))
    lane.process.send_signal(signal.SIGCONT)
    stopped: list[int] = []
    while isinstance(reply := worker.reply(), Done):
        assert reply.status is JobStatus.CANCELLED
        stopped.append(reply.job)
    assert reply == Ok()
    assert before.hung_up()
    before.close()
    assert stopped == list(range(len(stopped)))
    assert 0 < len(stopped) <= 10 * REQUESTS_PER_TURN
    assert lane.ping().queued_jobs == 0
    assert worker.run(Load, sent, [7, 8], [3]) is JobStatus.OK
    assert_silent(worker)


def test_signals_for_the_group_do_not_end_a_lane(lane: Lane, worker: FakeWorker) -> None:
    """SIGTERM and SIGINT are the broker's to act on."""
    lane.process.send_signal(signal.SIGTERM)
    lane.process.send_signal(signal.SIGINT)
    assert worker.run(Store, 1, [1, 2], [3]) is JobStatus.OK


def test_a_lane_dies_with_the_process_that_started_it(tmp_path: Path) -> None:
    """Killing the parent kills the lane, even while somebody else holds the link open."""
    code = "import subprocess, sys; subprocess.Popen(sys.argv[1:], close_fds=False).wait()"
    with Lane(tmp_path, 4096, within=[sys.executable, "-c", code]) as lane:
        pidfd = os.pidfd_open(lane.pid)
        lane.process.kill()
        assert select.select([pidfd], [], [], PATIENCE)[0]
        os.close(pidfd)


def test_the_lifeline_is_the_last_to_go(lane: Lane) -> None:
    """A dying lane closes it after all that it had opened, whose numbers are higher."""
    pipe = inode(lane.lifeline)
    lane.ping()
    names = {}
    for end in Path(f"/proc/{lane.process.pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # closed meanwhile
            names[int(end.name)] = str(end.readlink())
    (lifeline,) = (number for number, name in names.items() if name == f"pipe:[{pipe}]")
    assert lifeline < min(set(names) - {0, 1, 2, lane.link_number, lifeline})
    assert select.select([lane.lifeline], [], [], 0)[0] == []
    lane.process.kill()
    assert select.select([lane.lifeline], [], [], PATIENCE)[0]
    assert os.read(lane.lifeline, 1) == b""
