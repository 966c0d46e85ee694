"""Blocks, and the payloads that vLLM 0.32 makes of them; tests/vllm compares them with its own."""

from array import array

from kvd_proto.announcements import RemovedBlocks, StoredBlocks

TIME = 1764000000.25


def _hash(number: int) -> bytes:
    """A hash of 32 bytes that ends like this number."""
    return b"\xaa" * 24 + number.to_bytes(8, "big")


def _tokens(*tokens: int) -> bytes:
    return array("I", tokens).tobytes()


BLOCKS: dict[str, list[StoredBlocks | RemovedBlocks]] = {
    "stored": [
        StoredBlocks(
            hashes=(_hash(11), _hash(2**64 - 1)),
            parent=b"",
            tokens=_tokens(0, 127, 128, 70000),
            block_size=2,
            group=0,
            kind="full_attention",
            window=None,
            lora=None,
            extra=None,
        )
    ],
    "after a parent, with all that there is": [
        StoredBlocks(
            hashes=(_hash(12), _hash(13)),
            parent=_hash(2**63),
            tokens=_tokens(1, 2),
            block_size=1,
            group=3,
            kind="sliding_window",
            window=1024,
            lora="adapter",
            extra=(("adapter", ("image", 7), "salt"), None),
        )
    ],
    "without a description": [
        StoredBlocks((_hash(14),), b"", b"", 0, 1, "", None, None, None),
        RemovedBlocks((_hash(14), _hash(15)), 1),
    ],
    "in tiers": [
        StoredBlocks((_hash(16),), b"", _tokens(1), 1, 2, "full_attention", below=True),
        RemovedBlocks((_hash(16),), 2, below=True),
    ],
}

PAYLOADS: dict[str, str] = {
    "stored": (
        "93cb41da492040100000918ca474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920b"
        "cfffffffffffffffffb1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647394007fcc80ce"
        "00011170aa626c6f636b5f73697a6502a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e61"
        "6d65c0a967726f75705f69647800b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e"
        "74696f6ea86c6f63616c697479a54c4f43414ca96f776e657273686970a36b766400"
    ),
    "after a parent, with all that there is": (
        "93cb41da492040100000918ea474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573920c"
        "0db1706172656e745f626c6f636b5f68617368cf8000000000000000a9746f6b656e5f696473920102aa626c"
        "6f636b5f73697a6501a76c6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65a761646170"
        "746572aa65787472615f6b6579739293a76164617074657292a5696d61676507a473616c74c0a967726f7570"
        "5f69647803b26b765f63616368655f737065635f6b696e64ae736c6964696e675f77696e646f77bc6b765f63"
        "616368655f737065635f736c6964696e675f77696e646f77cd0400a86c6f63616c697479a54c4f43414ca96f"
        "776e657273686970a36b766400"
    ),
    "without a description": (
        "93cb41da492040100000928ba474797065ab426c6f636b53746f726564ac626c6f636b5f686173686573910e"
        "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f69647390aa626c6f636b5f73697a6500a76c"
        "6f72615f6964c0a66d656469756da3435055a96c6f72615f6e616d65c0a967726f75705f69647801a86c6f63"
        "616c697479a54c4f43414ca96f776e657273686970a36b766486a474797065ac426c6f636b52656d6f766564"
        "ac626c6f636b5f686173686573920e0fa66d656469756da3435055a967726f75705f69647801a86c6f63616c"
        "697479a54c4f43414ca96f776e657273686970a36b766400"
    ),
    "in tiers": (
        "93cb41da492040100000928ca474797065ab426c6f636b53746f726564ac626c6f636b5f6861736865739110"
        "b1706172656e745f626c6f636b5f68617368c0a9746f6b656e5f6964739101aa626c6f636b5f73697a6501a7"
        "6c6f72615f6964c0a66d656469756da753544f52414745a96c6f72615f6e616d65c0a967726f75705f696478"
        "02b26b765f63616368655f737065635f6b696e64ae66756c6c5f617474656e74696f6ea86c6f63616c697479"
        "a54c4f43414ca96f776e657273686970a36b766486a474797065ac426c6f636b52656d6f766564ac626c6f63"
        "6b5f6861736865739110a66d656469756da753544f52414745a967726f75705f69647802a86c6f63616c6974"
        "79a54c4f43414ca96f776e657273686970a36b766400"
    ),
    "cleared": ("93cb41da4920401000009181a474797065b0416c6c426c6f636b73436c656172656400"),
}
