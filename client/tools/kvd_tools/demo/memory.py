"""The KV memory of a rank: torch CPU tensors, and how they are described to the daemon.

Four tensors in three storages: two plain ones; then two that are packed, block
by block, in one storage, the first of which has padded pages. The full group
uses all four, the window group the first three, and they share the block ids.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvd_client.registration import Memory
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef


@dataclass(frozen=True, slots=True)
class Tensor:
    """Where a tensor's pages are: bytes, of which `page_bytes` are in use and the rest padding."""

    storage: int
    offset: int
    padded_bytes: int
    page_bytes: int


TENSORS = (
    Tensor(storage=0, offset=0, padded_bytes=16384, page_bytes=16384),
    Tensor(storage=1, offset=0, padded_bytes=16384, page_bytes=16384),
    Tensor(storage=2, offset=0, padded_bytes=12288, page_bytes=8192),
    Tensor(storage=2, offset=12288, padded_bytes=12288, page_bytes=12288),
)
STRIDES = (16384, 16384, 24576)
"""Bytes from block to block, by storage."""

GROUPS = ((0, 1, 2, 3), (0, 1, 2))
"""The tensors of the full and of the window group."""


class KvTensors:
    """The tensors of one rank, in memory that the daemon can map.

    Args:
        num_blocks: as the engine has configured it.
    """

    def __init__(self, num_blocks: int) -> None:
        # An engine has torch; the scheduler's side of the demo does not need it.
        import torch  # noqa: PLC0415

        from kvd_client.torch_memory import share_torch  # noqa: PLC0415

        self.num_blocks = num_blocks
        storages = [torch.empty((num_blocks, stride), dtype=torch.uint8) for stride in STRIDES]
        self._tensors = [
            storages[t.storage][:, t.offset : t.offset + t.padded_bytes] for t in TENSORS
        ]
        self._shared = share_torch(self._tensors)

    @property
    def memory(self) -> tuple[Memory, ...]:
        """One for every storage."""
        return self._shared.memory

    def pages(self) -> list[npt.NDArray[np.uint8]]:
        """u8[num_blocks, padded_bytes] of every tensor: views of the shared storages."""
        return [tensor.numpy() for tensor in self._tensors]

    def layout(self, blocks_per_chunk: int, block_tokens: int, window_tokens: int) -> RankLayout:
        """What the rank reports to the daemon."""
        return RankLayout(
            num_blocks=self.num_blocks,
            blocks_per_chunk=blocks_per_chunk,
            hash_block_size=block_tokens,
            storages=self._shared.storages,
            tensors=self._shared.tensors,
            groups=tuple(
                GroupSpec(
                    refs=tuple(TensorRef(tensor=i, page_bytes=TENSORS[i].page_bytes) for i in used),
                    block_size=block_tokens,
                    kind=kind,
                    sliding_window=window,
                )
                for used, kind, window in (
                    (GROUPS[0], "full", None),
                    (GROUPS[1], "sliding_window", window_tokens),
                )
            ),
        )

    def close(self) -> None:
        """Close the descriptors; the tensors stay what they are."""
        self._shared.close()

    def __repr__(self) -> str:
        return f"<KvTensors {self.num_blocks} blocks of {sum(STRIDES)} bytes>"
