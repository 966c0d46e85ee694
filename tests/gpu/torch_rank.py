"""A rank whose KV memory are torch tensors on a GPU, shared as an engine shares them."""

from collections.abc import Sequence

import torch

from kvd_client import DeviceMemory
from kvd_client.torch_memory import describe_torch
from tests.daemon.cuda_engine import Rank


class TorchRank(Rank):
    """See Rank. The storages are torch's, and so is the first stream."""

    def _make_storages(self, kind: str, device: int) -> list[int]:
        del kind
        self._torch_stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]  # torch's
        self._stream = self._torch_stream.cuda_stream
        self._tensors = [
            torch.empty(
                (self._layout.num_blocks, tensor.page_bytes),
                dtype=torch.uint8,
                device=f"cuda:{device}",
            )
            for tensor in self._layout.tensors
        ]
        return [tensor.data_ptr() for tensor in self._tensors]

    def _share(self) -> Sequence[DeviceMemory]:
        tensors = describe_torch(self._tensors)
        assert tensors.storages == self._layout.storages, tensors
        return [part for part in tensors.share() if isinstance(part, DeviceMemory)]
