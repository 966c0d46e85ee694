"""Whole-lane tests: what jobs move, and what they must not."""

import numpy as np

from kvd.wire.link import ShareDone, UnbindWorker
from kvd_proto.directory import SlotState
from kvd_proto.jobs import EPOCH_WORDS, PROGRESS_WORDS
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import ErrorCode, JobStatus, Load, Store
from tests.lane.support import (
    LAYOUT,
    NULL_BLOCK,
    SLOTS,
    Directory,
    FakeWorker,
    Lane,
)
from tests.raw_client import code_of


def test_a_store_writes_its_slots_and_no_other_byte(lane: Lane, directory: Directory) -> None:
    """Pool bytes outside the job's slots stay what they were, and inside lie tensor by tensor."""
    lane.pool.bytes[:] = 0xAB
    base = LAYOUT.slot_bytes // 2
    worker = lane.attach(FakeWorker(LAYOUT), directory, base)
    worker.fill(2)
    worker.job(Store, 1, [7, 8], [3])
    assert worker.done().status is JobStatus.OK
    size = worker.layout.slot_bytes
    slot = lane.pool.bytes[base + 3 * size : base + 4 * size]
    np.testing.assert_array_equal(slot, worker.pages([7, 8]).reshape(-1))
    slot[:] = 0xAB
    assert (lane.pool.bytes == 0xAB).all()


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
    share = lane.share()
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


def test_a_stale_generation_moves_nothing(
    lane: Lane, worker: FakeWorker, directory: Directory
) -> None:
    """A job for a slot that has been given to somebody else is refused before any byte moves."""
    lane.pool.bytes[:] = 0xAB
    worker.poison()
    assert worker.run(Store, 1, [1, 2], [3], generation=2) is JobStatus.STALE
    directory.set([3], SlotState.WRITING, owner=8)
    assert worker.run(Store, 2, [1, 2], [3]) is JobStatus.STALE
    assert lane.heard(ShareDone) == []
    assert worker.run(Load, 3, [1, 2], [3]) is JobStatus.STALE
    directory.set([3], SlotState.READY, count=2, generation=5)
    assert worker.run(Load, 4, [1, 2], [3], generation=4) is JobStatus.STALE
    assert (lane.pool.bytes == 0xAB).all()
    assert (worker.pages(range(32)) == 0xEE).all()


def test_a_store_leaves_out_the_chunks_whose_loans_ended(
    lane: Lane, worker: FakeWorker, directory: Directory
) -> None:
    """It goes on with the rest and reports those alone; where none is left it is STALE."""
    directory.set([3, 4], SlotState.READY, count=2, owner=8)  # in use again
    directory.set([5], SlotState.WRITING, owner=8, generation=2)
    directory.set([6], SlotState.WRITING, generation=2)
    lane.pool.bytes[:] = 0xAB
    worker.fill(1)
    blocks = [1, 2, 3, 4, 5, 6, 7, 8]
    assert worker.run(Store, 1, blocks, [3, 4, 5, 6], generation=2) is JobStatus.OK
    share = lane.share()
    assert (share.ok, share.slots.numpy().tolist()) == (True, [6])
    assert (share.first.numpy().tolist(), share.count.numpy().tolist()) == ([0], [2])
    size = worker.layout.slot_bytes
    slot = lane.pool.bytes[6 * size : 7 * size]
    np.testing.assert_array_equal(slot, worker.pages([7, 8]).reshape(-1))
    slot[:] = 0xAB
    assert (lane.pool.bytes == 0xAB).all()
    assert worker.run(Store, 2, blocks[:6], [3, 4, 5], generation=2) is JobStatus.STALE
    assert lane.heard(ShareDone) == []
    assert (lane.pool.bytes == 0xAB).all()


REFUSED: list[tuple[list[int], list[int], dict[str, list[int]], str]] = [
    ([NULL_BLOCK, NULL_BLOCK], [3], {}, "left out"),
    ([1, 32], [3], {}, "block_ids"),
    ([1, 2], [SLOTS], {}, "slots"),
    ([1, 2], [3, 4], {}, "slots"),
    ([1, 2, 3], [3, 3], {}, "twice"),
    ([1, 2], [3], {"group_sizes": [3]}, "group_sizes"),
    ([1, 2], [3], {"group_sizes": [1, 1], "block_indices": [0, 0]}, "group_sizes"),
    ([1, 2], [3], {"group_sizes": [2**32 - 1]}, "group_sizes"),
]


def test_a_job_that_does_not_fit_the_layout_is_refused(
    lane: Lane, worker: FakeWorker, directory: Directory
) -> None:
    """Wrong blocks, slots or sizes are REFUSED with the figures; no byte changes.

    The broker learns at once which chunks will never be there.
    """
    directory.set(range(SLOTS), SlotState.WRITING)
    lane.pool.bytes[:] = 0xAB
    worker.poison()
    for number, (blocks, slots, changes, words) in enumerate(REFUSED):
        worker.job(Store, 2 * number, blocks, slots, **changes)
        done = worker.done()
        assert done.status is JobStatus.REFUSED
        assert words in done.text
        given_up = [share.slots.numpy().tolist() for share in lane.heard(ShareDone) if not share.ok]
        assert given_up == ([slots] if max(slots) < SLOTS else [])
        worker.job(Load, 2 * number + 1, blocks, slots, **changes)
        assert worker.done().status in {JobStatus.REFUSED, JobStatus.STALE}
    assert (lane.pool.bytes == 0xAB).all()
    assert (worker.pages(range(32)) == 0xEE).all()


def test_a_word_outside_the_control_page_is_refused(worker: FakeWorker) -> None:
    """Before anything is read or written there; a store cannot name a word of loads either."""
    worker.job(Store, 1, [1, 2], [3], word=EPOCH_WORDS)
    worker.job(Load, 2, [1, 2], [3], progress=PROGRESS_WORDS + 1)
    for _ in range(2):
        assert code_of(worker.reply()[1]) is ErrorCode.BAD_MESSAGE
    assert worker.run(Store, 3, [1, 2], [3]) is JobStatus.OK


def test_a_job_leaves_out_the_layouts_null_block_and_no_other(
    lane: Lane, worker: FakeWorker, directory: Directory
) -> None:
    """Places of block 31 are not stored, and not loaded; block 0 holds KV as any other."""
    directory.set([3, 4], SlotState.WRITING)
    worker.fill(1)
    assert worker.run(Store, 1, [0, NULL_BLOCK, NULL_BLOCK, 5], [3, 4]) is JobStatus.OK
    share = lane.share()
    assert (share.first.numpy().tolist(), share.count.numpy().tolist()) == ([0, 1], [1, 1])
    directory.set([3], SlotState.READY, first=0, count=1)
    directory.set([4], SlotState.READY, first=1, count=1)
    stored = worker.pages([5, 0])
    worker.poison()
    assert worker.run(Load, 2, [8, NULL_BLOCK, NULL_BLOCK, 0], [3, 4]) is JobStatus.OK
    assert (worker.pages([0, 8]) == stored).all()
    others = [block for block in range(32) if block not in (0, 8)]
    assert (worker.pages(others) == 0xEE).all()


def test_an_unbound_worker_is_refused(lane: Lane, worker: FakeWorker, directory: Directory) -> None:
    """After UnbindWorker jobs end as REFUSED; bound again they run, memory having stayed mapped."""
    lane.tell(UnbindWorker(session=worker.session))
    lane.ping()
    assert worker.run(Store, 1, [1, 2], [3]) is JobStatus.REFUSED
    lane.bind(worker, directory)
    lane.ping()
    assert worker.run(Store, 2, [1, 2], [3]) is JobStatus.OK
