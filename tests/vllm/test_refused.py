"""Chunks that find no slot at hand are offered again, also after their request's end."""

import random
from pathlib import Path

import pytest

from kvd_client.vllm import metrics
from tests.vllm.configs import BLOCK, window
from tests.vllm.stepping import Lender, Stepping


@pytest.fixture
def lender() -> Lender:
    """A daemon whose loans are used up, and whose answer is under way."""
    return Lender(None)


@pytest.fixture
def stepping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender) -> Stepping:
    """A scheduler of one group; a chunk is a block."""
    return Stepping(tmp_path, monkeypatch, lender)


def blocks_of(stepping: Stepping, jobs: dict[int, object]) -> list[int]:
    """The blocks that these stores read, in order."""
    return [int(block) for number in jobs for block in stepping.jobs[number].src_spec.block_ids]


def counted(stepping: Stepping) -> dict[str, float]:
    """The manager's statistics since the last time."""
    figures: dict[str, float] = stepping.manager.get_stats().reduce()
    return figures


def test_a_pool_that_stays_full_is_not_asked_for_ever(stepping: Stepping, lender: Lender) -> None:
    """Where the daemon has lent nothing the chunks are given up, and counted."""
    stepping.add("a", 3)
    stepping.add("b", 2)
    stepping.step(a=3 * BLOCK, b=2 * BLOCK)
    stepping.finish("a")
    stepping.step(b=1)
    lender.loans = 0
    for _ in range(3):
        assert not stepping.step(b=1)
    assert len(lender.offered) == 2
    assert not stepping.half.has_pending_push_work()
    assert counted(stepping)[metrics.CHUNKS_REFUSED] == 5


def test_chunks_whose_blocks_others_have_are_given_up(stepping: Stepping, lender: Lender) -> None:
    """Of a request that has ended; what is given away in the step itself is stored before."""
    stepping.add("a", 5)
    stepping.step(a=5 * BLOCK)
    stepping.finish("a")
    stepping.add("b", 2, first=2)
    stepping.step(b=1)
    lender.loans = 9
    stepping.add("c", 1, first=5)
    jobs = stepping.step(c=1)
    assert blocks_of(stepping, jobs) == [1, 4, 5]
    assert stepping.flushed == set(jobs)
    assert counted(stepping)[metrics.CHUNKS_REFUSED] == 2


def test_a_chunk_of_several_blocks_is_given_up_as_a_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender
) -> None:
    """One of its blocks is another request's: none of the others is stored in a wrong place."""
    stepping = Stepping(tmp_path, monkeypatch, lender, extra={"blocks_per_chunk": 2})
    stepping.add("a", 6)
    stepping.step(a=6 * BLOCK)
    stepping.finish("a")
    stepping.add("b", 1, first=3)
    stepping.step(b=1)
    lender.loans = 9
    assert blocks_of(stepping, stepping.step(b=1)) == [1, 2, 5, 6]


def test_what_a_window_has_passed_is_given_up(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender
) -> None:
    """Its block may be another request's while the request still runs; a full group's is not."""
    stepping = Stepping(tmp_path, monkeypatch, lender, window(["c", "d"]))
    stepping.add("a", 5)
    stepping.step(a=5 * BLOCK)
    stepping.add("b", 1, first=6)
    lender.loans = 99
    # The window's last chunk, of block 10, is not offered: a load ends before the last token.
    assert blocks_of(stepping, stepping.step(a=1, b=1)) == [1, 2, 3, 4, 5, 8, 9]


@pytest.mark.parametrize("seed", range(20))
def test_every_chunk_is_stored_in_the_end(stepping: Stepping, lender: Lender, seed: int) -> None:
    """Whatever loans come when, as long as some come: from its own block, and once."""
    source = random.Random(seed)
    going: dict[str, int] = {}
    own: dict[bytes, int] = {}
    begun: dict[int, int] = {}
    names = iter(f"r{number}" for number in range(30))
    for _ in range(400):
        if (name := next(names, None)) is not None:
            blocks = source.randint(1, 6)
            going[name] = blocks * BLOCK
            first = stepping._blocks
            stepping.add(name, blocks)
            own[name.encode()] = first
        tokens = {
            name: min(left, source.randint(1, 3 * BLOCK))
            for name, left in going.items()
            if left and source.random() < 0.7
        }
        for name in stepping._new:
            tokens.setdefault(name.req_id, 1)
        lender.loans = source.choice([None, None, 1, 2, 5])
        for number, job in stepping.step(**tokens).items():
            begun[number] = len(job.src_spec.block_ids)
        for name, count in tokens.items():
            going[name] -= count
            if not going[name]:
                del going[name]
                stepping.finish(name)
        ended = [number for number in list(begun) if source.random() < 0.5]
        stepping.report(ended)
        for number in ended:
            del begun[number]
        if not going and not stepping.half.has_pending_push_work() and not stepping.ended:
            break
    stored = sorted(blocks_of(stepping, stepping.jobs))
    assert stored == list(range(1, stepping._blocks))
    assert metrics.CHUNKS_REFUSED not in counted(stepping)
    assert not stepping.half._req_status
