"""The rules of llm-d's index and of a plain set, on bytes that vLLM encoded."""

import msgspec
import pytest

from tests.events.blocks import Block, BlockSet
from tests.events.llmd import LlmdIndex, pod_and_model
from tests.events.vectors import PAYLOADS, message, take
from tests.events.wire import BlockStored, decode, low64

TOPIC = "kv@pod@model"
PROMPT = list(range(1, 13))  # blocks 11, 12 and 13


def llmd() -> LlmdIndex:
    """An index of blocks of four tokens."""
    return LlmdIndex(block_tokens=4)


def prefix(index: LlmdIndex) -> int:
    """How much of the prompt the pod holds."""
    return index.prefix("pod", "model", PROMPT)


# ----------------------------------------------------------------------- bytes


def test_a_message_has_a_topic_a_sequence_number_and_events() -> None:
    """What vLLM encoded is read field by field."""
    topic, sequence, batch = message("stored 11 12", sequence=2**40 + 1)
    assert (topic, sequence) == (TOPIC, 2**40 + 1)
    assert (batch.ts, batch.data_parallel_rank) == (1764000000.0, 0)
    (event,) = batch.events
    assert isinstance(event, BlockStored)
    assert (event.block_hashes, event.token_ids) == ([11, 12], PROMPT[:8])
    assert (event.medium, event.locality, event.ownership) == ("CPU", "LOCAL", None)


@pytest.mark.parametrize("name", PAYLOADS)
def test_what_is_read_is_encoded_alike(name: str) -> None:
    """The schema has all that vLLM's has: nothing is lost in reading a payload."""
    batch = message(name).batch
    filled = msgspec.msgpack.decode(msgspec.msgpack.encode(batch))
    sent = msgspec.msgpack.decode(bytes.fromhex(PAYLOADS[name]))
    for ours, theirs in zip(filled[1], sent[1], strict=True):
        assert ours == ours | theirs
        assert not any(value for key, value in ours.items() if key not in theirs)


def test_frames_of_another_form_are_refused() -> None:
    """Two frames, or a short sequence number, are no message."""
    with pytest.raises(ValueError, match="frames of"):
        decode((b"kv@", bytes(8)))
    with pytest.raises(ValueError, match="frames of"):
        decode((b"kv@", bytes(4), bytes.fromhex(PAYLOADS["cleared"])))


def test_a_hash_of_bytes_is_its_last_eight() -> None:
    """Routers know blocks by 64 bits, whichever form they came in."""
    assert low64(bytes(24) + bytes.fromhex("ff00000000000001")) == 0xFF00000000000001
    assert low64(-1) == 2**64 - 1


# ------------------------------------------------------------------- plain set


def test_the_set_holds_what_was_stored_and_not_removed() -> None:
    """A removal takes its block and no other; a clear takes all of its topic."""
    index = BlockSet()
    take(index, "stored 11 12", "stored 13 after 12", "removed 12")
    assert index.held(TOPIC) == {Block("CPU", 0, 11), Block("CPU", 0, 13)}
    take(index, "stored 11 12", topic="kv@other@model")
    take(index, "cleared")
    assert not index.held(TOPIC)
    assert len(index.held("kv@other@model")) == 2
    assert (index.repeated, index.unknown) == (0, 0)


def test_the_set_counts_what_is_said_twice() -> None:
    """Blocks stored again and removals of unknown blocks are counted."""
    index = BlockSet()
    take(index, "stored 11 12", "stored 12 after 11", "removed 13")
    assert (index.repeated, index.unknown) == (1, 1)


# ----------------------------------------------------------------------- llm-d


def test_llmd_knows_pod_and_model_by_the_topic() -> None:
    """Three parts are a pod and a model; another topic is a pod itself."""
    assert pod_and_model("kv@engine@org/model") == ("engine", "org/model")
    assert pod_and_model("kv@engine@a@b") == ("kv@engine@a@b", "")


def test_llmd_finds_a_prompt_by_its_tokens() -> None:
    """Blocks that were stored in two events are one prefix; a removal cuts it."""
    index = llmd()
    take(index, "stored 11 12", "stored 13 after 12")
    assert prefix(index) == 3
    assert {(tier, group) for _, tier, group in index.held("pod")} == {("cpu", 0)}
    assert index.prefix("pod", "another model", PROMPT) == 0
    take(index, "removed 12")
    assert prefix(index) == 1
    take(index, "stored 12 after 11")
    assert prefix(index) == 3


def test_llmd_drops_a_store_with_an_unknown_parent() -> None:
    """What comes before its parent is lost, until it comes once more."""
    index = llmd()
    take(index, "stored 13 after 12", "stored 11 12")
    assert prefix(index) == 2
    assert index.dropped == {"unknown parent": 1}
    take(index, "removed 13", "stored 13 after 12")
    assert prefix(index) == 3


def test_llmd_takes_a_store_without_tokens_as_another_tier() -> None:
    """A known block gets an entry more; an unknown one is dropped."""
    index = llmd()
    take(index, "stored 11 without tokens")
    assert not index.held("pod")
    take(index, "stored 11 on the device", "stored 11 without tokens")
    assert {(tier, group) for _, tier, group in index.held("pod")} == {("gpu", 0), ("cpu", 0)}
    take(index, "removed 11")
    assert {(tier, group) for _, tier, group in index.held("pod")} == {("gpu", 0)}


def test_llmd_keeps_groups_apart() -> None:
    """The same block of two groups is two entries, removed one by one."""
    index = llmd()
    take(index, "stored 11 12", "stored 11 of a window", "removed 11")
    key = index.chain("model", PROMPT)[0]
    assert (key, "cpu", 1) in index.held("pod")
    assert (key, "cpu", 0) not in index.held("pod")
    take(index, "removed 11 of a window")
    assert prefix(index) == 0


def test_llmd_forgets_a_hash_with_the_last_entry_of_any_pod() -> None:
    """As long as one pod holds a parent, another one's blocks after it are taken."""
    index = llmd()
    take(index, "stored 11 12")
    take(index, "stored 11 12", topic="kv@other@model")
    take(index, "removed 12", "stored 13 after 12")
    assert index.dropped == {}
    take(index, "removed 12", topic="kv@other@model")
    take(index, "removed 13", "stored 13 after 12")
    assert index.dropped == {"unknown parent": 1}


def test_llmd_clears_a_pod_in_all_tiers() -> None:
    """AllBlocksCleared takes what the engine said of its device, too."""
    index = llmd()
    take(index, "stored 11 12", "stored 11 on the device")
    take(index, "stored 11 12", topic="kv@other@model")
    take(index, "cleared")
    assert not index.held("pod")
    assert len(index.held("other")) == 2


def test_llmd_tells_prompts_apart_by_salt_picture_and_adapter() -> None:
    """Who asks for the bare tokens is promised none of these blocks."""
    index = llmd()
    take(index, "stored 21 with a salt", "stored 31 with a picture", "stored 41 of an adapter")
    tokens = PROMPT[:4]
    assert index.prefix("pod", "model", tokens) == 0
    assert index.prefix("pod", "model", tokens, [("salt",)]) == 1
    assert index.prefix("pod", "model", tokens, [("ab" * 32,)]) == 1
    assert index.prefix("pod", "adapter", tokens, [("adapter",)]) == 1


def test_llmd_blocks_of_another_size_are_mapped() -> None:
    """Two blocks of an engine are one of the index, or one is two."""
    coarse, fine = LlmdIndex(block_tokens=8), LlmdIndex(block_tokens=2)
    for index in (coarse, fine):
        take(index, "stored 11 12")
    assert coarse.prefix("pod", "model", PROMPT) == 1
    assert fine.prefix("pod", "model", PROMPT) == 4
    take(fine, "removed 12")
    assert fine.prefix("pod", "model", PROMPT) == 2
