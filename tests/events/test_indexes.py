"""The rules of llm-d's index, on bytes that vLLM encoded."""

from tests.events.llmd import LlmdIndex
from tests.events.vectors import take

PROMPT = list(range(1, 13))  # blocks 11, 12 and 13


def llmd() -> LlmdIndex:
    """An index of blocks of four tokens."""
    return LlmdIndex(block_tokens=4)


def prefix(index: LlmdIndex) -> int:
    """How many of the prompt's blocks the pod holds."""
    held = {key for key, *_ in index.held("pod")}
    return len(held.intersection(index.chain("model", PROMPT)))


def tiers(index: LlmdIndex) -> set[str]:
    """Where the pod holds blocks."""
    return {tier for _, tier, _ in index.held("pod")}


def test_llmd_drops_a_store_with_an_unknown_parent() -> None:
    """What comes before its parent is lost, until it comes once more."""
    index = llmd()
    take(index, "stored 13 after 12", "stored 11 12")
    assert prefix(index) == len(index.held("pod")) == 2
    take(index, "removed 13", "stored 13 after 12")
    assert prefix(index) == 3


def test_llmd_takes_a_store_without_tokens_as_another_tier() -> None:
    """A known block gets an entry more; an unknown one is dropped."""
    index = llmd()
    take(index, "stored 11 without tokens")
    assert not index.held("pod")
    take(index, "stored 11 on the device", "stored 11 without tokens")
    assert tiers(index) == {"gpu", "cpu"}
    take(index, "removed 11")
    assert tiers(index) == {"gpu"}


def test_llmd_forgets_a_hash_with_the_last_entry_of_any_pod() -> None:
    """As long as one pod holds a parent, another one's blocks after it are taken."""
    index = llmd()
    take(index, "stored 11 12")
    take(index, "stored 11 12", topic="kv@other@model")
    take(index, "removed 12", "stored 13 after 12")
    assert prefix(index) == 2
    take(index, "removed 12", topic="kv@other@model")
    take(index, "removed 13", "stored 13 after 12")
    assert prefix(index) == 1
