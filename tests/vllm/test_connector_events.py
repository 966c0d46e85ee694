"""What the connector's half in the scheduler does for KV events, stepped as vLLM does it."""

from itertools import chain
from pathlib import Path

import pytest

from kvd_proto.descriptions import decode
from tests.vllm.configs import BLOCK
from tests.vllm.stepping import Lender, Stepping

PROMPT_BLOCKS = 3


@pytest.fixture
def lender() -> Lender:
    """A daemon that stores all it is offered."""
    return Lender(99)


def test_chunks_are_described_where_somebody_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lender: Lender
) -> None:
    """Each with its own description, or none at all where nobody would read them."""
    stepping = Stepping(tmp_path, monkeypatch, lender)
    stepping.add("silent", PROMPT_BLOCKS)
    stepping.step(silent=PROMPT_BLOCKS * BLOCK)
    assert lender.described == [None]
    lender.describes = True
    request = stepping.add("told", PROMPT_BLOCKS)
    stepping.step(told=PROMPT_BLOCKS * BLOCK)
    told = [decode(each) for each in lender.described[1] or []]
    assert [each.hashes[-1] + bytes(4) for each in told] == list(lender.offered[1])
    assert list(chain.from_iterable(each.hashes for each in told)) == list(request.block_hashes)
