"""A rank whose KV memory are torch tensors on a GPU, shared as an engine shares them."""

import time
from collections.abc import Sequence

import torch

from kvd_client import DeviceMemory, Fingerprint, JobBlocks, Load, Store
from kvd_client.torch_memory import describe_torch, work_so_far
from tests.daemon.cuda_engine import Rank
from tests.waiting import PATIENCE

LATE_CYCLES = 200_000_000  # of the GPU's clock: about 0.1 s


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


class StagingRank(TorchRank):
    """See TorchRank. The memory is staged; its stream is busy when jobs are submitted."""

    def register(self) -> str:
        """Register with staging; the device's name."""
        self.worker.register(
            describe_torch(self._tensors),
            self._layout,
            Fingerprint(model="model"),
            required=True,
            timeout=0.8 * PATIENCE,
            transfer="staging",
        )
        assert self.worker.transfer == "staging"
        assert self.worker.device == "host"
        return "host"

    def submit(
        self,
        kind: str,
        job: int,
        blocks: Sequence[int],
        slots: Sequence[int],
        generations: Sequence[int],
    ) -> None:
        """A job on group 0 behind a kernel that writes late.

        A store's blocks are zero until then; a load's are overwritten then.
        """
        arrays = JobBlocks.of(blocks, [len(blocks), 0], [0, 0], slots, generations)
        chosen = torch.tensor(blocks, device=self._tensors[0].device)
        kept = [tensor[chosen].clone() for tensor in self._tensors]
        for tensor in self._tensors:
            tensor[chosen] = 0
        torch.cuda.synchronize()
        with torch.cuda.stream(self._torch_stream):
            torch.cuda._sleep(LATE_CYCLES)  # type: ignore[no-untyped-call]  # torch's
            for tensor, pages in zip(self._tensors, kept, strict=True):
                tensor[chosen] = pages
        after = work_so_far(self.worker, self._torch_stream)
        self.worker.submit(Store if kind == "store" else Load, job, arrays, after=after)

    def seconds(
        self,
        kind: str,
        job: int,
        blocks: Sequence[int],
        slots: Sequence[int],
        generations: Sequence[int],
    ) -> float:
        """How long a job takes, from its submission to its end."""
        arrays = JobBlocks.of(blocks, [len(blocks), 0], [0, 0], slots, generations)
        torch.cuda.synchronize()
        began = time.perf_counter()
        self.worker.submit(Store if kind == "store" else Load, job, arrays)
        assert not self.worker.wait([job], PATIENCE)
        seconds = time.perf_counter() - began
        assert self.result(job).success
        return seconds
