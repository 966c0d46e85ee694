"""Loads that say which layers have arrived."""

import pytest

from kvd_proto.directory import SlotState
from kvd_proto.jobs import EPOCH_WORDS, PROGRESS_WORDS
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef, TensorSpec
from kvd_proto.messages import Error, ErrorCode, JobStatus, Load, Store
from tests.lane.support import Directory, FakeWorker, Lane

LAYERS, BLOCKS, PAGE = 4, 8, 4096


@pytest.fixture
def worker(lane: Lane, directory: Directory) -> FakeWorker:
    """Keys and values of four layers, each in a storage of its own, last layer first."""
    count = 2 * LAYERS
    layout = RankLayout(
        BLOCKS,
        1,
        16,
        (PAGE * BLOCKS,) * count,
        tuple(TensorSpec(i, 0, PAGE, PAGE) for i in range(count)),
        (GroupSpec(tuple(TensorRef(i, PAGE, LAYERS - 1 - i // 2) for i in range(count)), 16),),
    )
    return lane.attach(FakeWorker(layout), directory)


@pytest.mark.parametrize("word", [1, PROGRESS_WORDS])
def test_a_load_tells_of_its_layers(worker: FakeWorker, directory: Directory, word: int) -> None:
    """When it has ended the word has the number of layers, and the bytes are there."""
    worker.fill(1)
    assert worker.run(Store, 1, [1, 2], [3, 4]) is JobStatus.OK
    directory.set([3, 4], SlotState.READY, count=1)
    before = worker.pages([1, 2])
    worker.poison()
    assert worker.run(Load, 2, [5, 6], [3, 4], progress=word) is JobStatus.OK
    assert worker.words[EPOCH_WORDS + word - 1] == LAYERS
    assert (worker.pages([5, 6]) == before).all()


def test_a_load_that_is_stale_tells_of_no_layer(worker: FakeWorker) -> None:
    """What is not in the slot is not reported."""
    assert worker.run(Load, 2, [5], [3], generation=99, progress=1) is JobStatus.STALE
    assert worker.words[EPOCH_WORDS] == 0


def test_a_load_that_asks_for_nothing_writes_no_word(
    worker: FakeWorker, directory: Directory
) -> None:
    """Without a progress word the page stays as the worker wrote it."""
    directory.set([3], SlotState.READY, count=1)
    words = worker.words.copy()
    assert worker.run(Load, 2, [5], [3]) is JobStatus.OK
    assert (worker.words == words).all()


def test_a_word_behind_the_page_is_refused(worker: FakeWorker) -> None:
    """Before anything is written there."""
    worker.job(Load, 1, [1], [3], progress=PROGRESS_WORDS + 1)
    error = worker.reply()[1]
    assert isinstance(error, Error)
    assert error.code is ErrorCode.BAD_MESSAGE
