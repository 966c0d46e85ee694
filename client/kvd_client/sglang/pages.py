"""Where the pages of a device pool lie: from tensors to the layout that a daemon serves."""

import hashlib
import json
from dataclasses import dataclass

import torch

from kvd_client import GroupSpec, RankLayout, TensorRef, UnsupportedMemory
from kvd_client.torch_memory import BlockTensor, SharedTensors, share_torch

NO_PAGE = 0  # where all of SGLang's allocators let padded tokens write; never handed out


@dataclass(frozen=True, slots=True)
class LayerPages:
    """The pages of one layer in one tensor.

    layer: number in the order of the forward pass.
    tensor: rows first; a page is `rows` of them.
    rows: of a page.
    """

    layer: int
    tensor: torch.Tensor
    rows: int

    @property
    def row_bytes(self) -> int:
        """Of one row, without what may lie between rows."""
        return int(self.tensor.nbytes // self.tensor.shape[0])

    @property
    def stride(self) -> int:
        """Bytes from one page to the next."""
        return int(self.tensor.stride(0)) * self.tensor.element_size() * self.rows

    def check(self) -> None:
        """Check that a page is one run of bytes.

        Raises:
            UnsupportedMemory: it is not.
        """
        row = self.tensor[0]
        apart = self.rows > 1 and self.stride != self.row_bytes * self.rows
        if not row.is_contiguous() or apart:
            raise UnsupportedMemory(
                f"layer {self.layer}: a page of a tensor of shape {tuple(self.tensor.shape)} and"
                f" strides {self.tensor.stride()} is not one run of bytes; kvd cannot offload this"
                " KV-cache layout"
            )


@dataclass(frozen=True, slots=True)
class PagePool:
    """A device pool of pages that are numbered together.

    Attributes:
        name: SGLang's, which transfers name.
        page_tokens: what SGLang counts in its indices, for each page.
        layers: all that a page consists of, in the order of layers.
    """

    name: str
    page_tokens: int
    layers: tuple[LayerPages, ...]

    @property
    def num_pages(self) -> int:
        """How many there are."""
        return min(int(part.tensor.shape[0]) // part.rows for part in self.layers)

    @property
    def device(self) -> torch.device:
        """Where it is."""
        return self.layers[0].tensor.device

    @property
    def contents(self) -> str:
        """Digest of what a page's bytes are, in their order."""
        parts = [
            (part.layer, part.rows, tuple(part.tensor.shape[1:]), str(part.tensor.dtype))
            for part in self.layers
        ]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    def share(self, blocks_per_chunk: int) -> tuple[SharedTensors, RankLayout]:
        """Make the memory mappable, host memory by moving it in place, and describe it.

        Raises:
            UnsupportedMemory: another process cannot map it, or pages are not in one piece.
        """
        for part in self.layers:
            part.check()
        shared = share_torch(
            [
                BlockTensor(
                    part.tensor, page_bytes=part.row_bytes * part.rows, block_stride=part.stride
                )
                for part in self.layers
            ]
        )
        refs = tuple(
            TensorRef(tensor, part.row_bytes * part.rows, layer=part.layer)
            for part, (tensor,) in zip(self.layers, shared.parts, strict=True)
        )
        group = GroupSpec(
            refs=refs, block_size=self.page_tokens, kind=self.name, contents=self.contents
        )
        layout = RankLayout(
            num_blocks=self.num_pages,
            blocks_per_chunk=blocks_per_chunk,
            hash_block_size=self.page_tokens,
            storages=shared.storages,
            tensors=shared.tensors,
            groups=(group,),
            null_block=NO_PAGE,
        )
        return shared, layout
