"""Requests that begin alike and come at once: one load for all that can use it, and no queue."""

from pathlib import Path

import pytest

from kvd_client.vllm import metrics
from tests.vllm.configs import window
from tests.vllm.stepping import WAITS, Lender, Stepping, hits

PREFIX, WINDOW = 6, 4  # blocks; a chunk is a block
OTHERS = [f"other-{number}" for number in range(15)]


@pytest.fixture
def lender() -> Lender:
    """A daemon that has what the test says."""
    return Lender(None)


@pytest.fixture
def dense(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender) -> Stepping:
    """A scheduler of one group, that attends to everything."""
    return Stepping(tmp_path, monkeypatch, lender)


@pytest.fixture
def windowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender) -> Stepping:
    """A scheduler of such a group, and one with a window."""
    return Stepping(tmp_path, monkeypatch, lender, window(["c", "d"]))


@pytest.fixture(params=["dense", "windowed"])
def either(request: pytest.FixtureRequest) -> Stepping:
    """One of them."""
    scheduler: Stepping = request.getfixturevalue(request.param)
    return scheduler


def come(stepping: Stepping, cached: int, *names: str) -> None:
    """Requests with the same prefix have come; the pool has so many blocks' chunks of each."""
    for name in names:
        first = next(iter(stepping.requests), None)
        stepping.come(name, cached + 1, begins_as=(first, PREFIX) if first else ("", 0))
        for group in range(2):
            stepping.lender.present.update(stepping.keys(name, group)[:cached])


def load(stepping: Stepping, name: str, first_block: int) -> int:
    """Admit a request, which loads all that the pool has of it; the number of its job."""
    count = len(stepping.requests[name].block_hashes)
    attended = range(first_block, first_block + count)
    window_blocks = [0] * (count - 1 - WINDOW) + [*range(attended.stop, attended.stop + WINDOW + 1)]
    assert stepping.admit(name, 0, attended, window_blocks) == hits(count - 1)[0]
    before = {*stepping.jobs}
    stepping.step()
    (job,) = stepping.jobs.keys() - before
    return job


def waiting(stepping: Stepping, *names: str) -> set[str]:
    """Which of these requests are not admitted yet."""
    return {name for name in names if stepping.ask(name) == WAITS}


def test_one_load_serves_all_requests_with_its_prefix(dense: Stepping) -> None:
    """They wait for its end, and for nothing else: the next step has the prefix for all of them."""
    come(dense, PREFIX, "first", *OTHERS)
    job = load(dense, "first", 1)
    assert waiting(dense, *OTHERS) == {*OTHERS}
    dense.report([job])
    assert [dense.ask(name, 16 * PREFIX) for name in OTHERS] == [hits(0)] * len(OTHERS)


def test_what_follows_a_shared_prefix_is_loaded_side_by_side(dense: Stepping) -> None:
    """After the one load of the prefix no request waits for another one's chunks."""
    come(dense, PREFIX + 2, "first", *OTHERS)
    dense.report([load(dense, "first", 1)])
    for number, name in enumerate(OTHERS):
        assert dense.ask(name, 16 * PREFIX) == hits(2)
        blocks = [*range(1, PREFIX + 1), *range(100 + 3 * number, 103 + 3 * number)]
        assert dense.admit(name, 16 * PREFIX, blocks) == 32
    assert len(dense.step()) == 0
    assert len(dense.jobs) == 1 + len(OTHERS)


def test_windows_of_different_ends_are_loaded_side_by_side(windowed: Stepping) -> None:
    """A load brings the blocks before its own end; requests that end elsewhere cannot use them."""
    come(windowed, PREFIX + 2, "first", *OTHERS)
    jobs = [load(windowed, "first", 1)]
    for number, name in enumerate(OTHERS):
        assert not waiting(windowed, name)
        jobs.append(load(windowed, name, 100 * (1 + number)))
    windowed.report(jobs)
    assert len(windowed.lender.unpinned) == len(jobs)


def test_windows_of_the_same_end_are_loaded_once(windowed: Stepping) -> None:
    """A request with all tokens of a load waits for it, also beside a longer one that goes on."""
    come(windowed, PREFIX + 2, "long")
    load(windowed, "long", 1)
    come(windowed, PREFIX, "first", *OTHERS)
    job = load(windowed, "first", 100)
    assert waiting(windowed, *OTHERS) == {*OTHERS}
    windowed.report([job])
    assert [windowed.ask(name, 16 * PREFIX) for name in OTHERS] == [hits(0)] * len(OTHERS)


def test_a_failed_load_fails_no_other_request(either: Stepping) -> None:
    """Of those that waited the next one loads, the others wait for it; its pins end as well."""
    come(either, PREFIX, "first", *OTHERS)
    job = load(either, "first", 1)
    assert waiting(either, *OTHERS) == {*OTHERS}
    either.report([job], failed=True, failed_loads=["first"])
    assert either.ask("first") == hits(0)
    again = load(either, OTHERS[0], 100)
    assert waiting(either, *OTHERS[1:]) == {*OTHERS[1:]}
    either.report([again])
    assert not waiting(either, *OTHERS[1:])
    assert len(either.lender.unpinned) == 2
    assert either.statistics()[metrics.LOAD_FAILURES] == 1


def test_an_aborted_request_is_waited_for_no_longer_than_its_load(either: Stepping) -> None:
    """Its blocks are not in the engine's cache afterwards, so the next request loads."""
    come(either, PREFIX, "first", *OTHERS)
    job = load(either, "first", 1)
    either.finish("first")
    either.step()
    assert waiting(either, *OTHERS) == {*OTHERS}
    either.report([job])
    load(either, OTHERS[0], 100)
    assert len(either.lender.unpinned) == 1
    either.half.reset_cache()
    assert not either.half._chunks_being_loaded
    assert [either.ask(name) for name in OTHERS[1:]] == [hits(0)] * (len(OTHERS) - 1)
