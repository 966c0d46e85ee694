"""torch tensors as a worker's memory, and torch streams as its timeline.

Tensors that the daemon maps: a CPU tensor's storage is moved in place into anonymous shared memory;
all its views follow, its address changes, its contents do not. A CUDA tensor's storage stays where
it is and has a handle. Tensors that are staged stay as they are. A storage is counted once, however
many tensors are views of it.
"""

import ctypes
import itertools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvd_client.accelerator import Accelerator, kind_of
from kvd_client.device_copier import DeviceCopier
from kvd_client.errors import UnsupportedMemory, UsageError, check_collection, check_int, shown
from kvd_client.memory import DeviceMemory, HostMemory, Memory, is_sealed, sealed_file
from kvd_client.routes import STAGING
from kvd_client.staging_memory import BlockCopier, HostCopier, KvTensors, StagingMemory
from kvd_client.timeline import ControlPage
from kvd_client.worker import Worker
from kvd_proto.layout import RankLayout, TensorSpec

_MAP_FIXED = 0x10  # linux/mman.h; not in Python's mmap
_mmap = ctypes.CDLL(None, use_errno=True).mmap
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *3 * (ctypes.c_int,), ctypes.c_long)


@dataclass(frozen=True, slots=True)
class BlockTensor:
    """A KV tensor, and which of its dimensions counts blocks.

    Attributes:
        tensor: a strided CPU or CUDA tensor.
        block_dim: the dimension whose stride leads from one block to the next.
        page_bytes: of one block; None: as the other dimensions say. Needed if pages are padded or
            interleaved.
        block_stride: bytes from one block to the next; None: the stride of `block_dim`. Needed if
            a block is several rows of that dimension.
    """

    tensor: torch.Tensor
    block_dim: int = 0
    page_bytes: int | None = None
    block_stride: int | None = None


@dataclass(frozen=True, slots=True)
class TorchTensors(KvTensors):
    """Tensors of one device, and where their pages lie; for `Worker.register`.

    Attributes:
        device: of all of them.
        untyped_storages: torch's, each distinct one once.
        storages: their sizes in bytes; for `RankLayout.storages`.
        tensors: for `RankLayout.tensors`.
        parts: parts[i] are the indices into `tensors` of the i-th described tensor: usually one,
            several if a block lies in several places (keys first, then values).
    """

    device: torch.device
    untyped_storages: tuple[Any, ...]
    storages: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    parts: tuple[tuple[int, ...], ...]

    @property
    def is_host(self) -> bool:
        """See KvTensors."""
        return self.device.type == "cpu"

    def share(self) -> list[Memory]:
        """Make the memory mappable; return it, one for each storage.

        CPU storages are moved in place: raw addresses from before are invalid.

        Raises:
            UnsupportedMemory: no other process can map this memory, or there is no room in shared
                memory.
            CudaError: the CUDA driver failed.
        """
        if kind_of(self.device) not in {"CPU", "CUDA"}:
            raise UnsupportedMemory(
                f"memory of {self.device} ({kind_of(self.device)}) cannot be mapped by the daemon,"
                " which maps memory of the CPU and of CUDA only"
            )
        share = _share_cpu if self.is_host else _share_cuda
        memory: list[Memory] = []
        try:
            memory.extend(share(storage) for storage in self.untyped_storages)
        except BaseException:
            for shared in memory:
                shared.close()
            raise
        return memory

    def open_copier(
        self, layout: RankLayout, staging: StagingMemory, page: ControlPage
    ) -> BlockCopier:
        """See KvTensors."""
        if self.is_host:
            addresses = [storage.data_ptr() for storage in self.untyped_storages]
            return HostCopier(addresses, layout, staging, self.untyped_storages)
        return DeviceCopier(Accelerator(self.device), self.untyped_storages, layout, staging, page)


def describe_torch(tensors: Sequence[torch.Tensor | BlockTensor]) -> TorchTensors:
    """Describe the pages of tensors of one device, of any kind. Nothing is moved or mapped.

    Shapes say how large a page is, but not how many blocks there are, which the engine configures.

    Args:
        tensors: plain ones count blocks in dimension 0.

    Raises:
        UsageError: not tensors, of several devices, or invalid dimensions.
        UnsupportedMemory: not strided, or a block's bytes are spread.
    """
    argument: object = tensors
    if isinstance(argument, torch.Tensor):  # which would be taken for a sequence of its rows
        raise UsageError(f"tensors has shape {tuple(argument.shape)}: pass a list of tensors")
    block_tensors = [
        item if isinstance(item, BlockTensor) else BlockTensor(item)
        for item in check_collection("tensors", argument, "tensors")
    ]
    if not block_tensors:
        raise UsageError("no tensors: pass the engine's KV-cache tensors")
    storage_indices: dict[int, int] = {}
    storages: list[Any] = []
    specs: list[TensorSpec] = []
    parts: list[tuple[int, ...]] = []
    for index, item in enumerate(block_tensors):
        _check(f"tensors[{index}]", item)
        if item.tensor.device != block_tensors[0].tensor.device:
            raise UsageError(
                f"tensors[{index}] is on {item.tensor.device}, tensors[0] on"
                f" {block_tensors[0].tensor.device}: the tensors of one worker are on one device"
            )
        storage = item.tensor.untyped_storage()
        storage_id = storage._cdata  # noqa: SLF001  # the same for all views
        storage_index = storage_indices.setdefault(storage_id, len(storages))
        if storage_index == len(storages):
            storages.append(storage)
        pages = _pages(f"tensors[{index}]", item, storage_index)
        parts.append(tuple(range(len(specs), len(specs) + len(pages))))
        specs.extend(pages)
    return TorchTensors(
        block_tensors[0].tensor.device,
        tuple(storages),
        tuple(int(storage.nbytes()) for storage in storages),
        tuple(specs),
        tuple(parts),
    )


def _check(name: str, item: BlockTensor) -> None:
    """Check that a tensor has pages, and that its storage has all of its bytes."""
    tensor = item.tensor
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{name} is a {type(tensor).__name__}: a torch.Tensor is needed")
    if tensor.device.type == "meta":
        raise UnsupportedMemory(f"{name} is on {tensor.device}: it has no memory")
    if tensor.layout is not torch.strided or tensor.is_quantized:
        raise UnsupportedMemory(
            f"{name} is {tensor.layout} {tensor.dtype}: plain strided tensors are needed"
        )
    if not tensor.numel():
        raise UsageError(f"{name} of shape {tuple(tensor.shape)} is empty")
    if not (isinstance(item.block_dim, int) and -tensor.dim() <= item.block_dim < tensor.dim()):
        raise UsageError(
            f"{name}: block_dim={shown(item.block_dim)} of a tensor of {tensor.dim()} dimensions"
        )

    for field, nbytes in (("page_bytes", item.page_bytes), ("block_stride", item.block_stride)):
        if nbytes is not None:
            check_int(f"{name}: {field}", nbytes, 1)
    end = tensor.storage_offset() + 1
    end += sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    storage_bytes = tensor.untyped_storage().nbytes()
    if end * tensor.element_size() > storage_bytes:
        raise UsageError(
            f"{name} of shape {tuple(tensor.shape)} has a storage of {storage_bytes} bytes only:"
            " its memory was freed or resized; share tensors while they are in use"
        )


def _pages(name: str, item: BlockTensor, storage: int) -> list[TensorSpec]:
    """Return the pages that make up a block of the tensor.

    Dimensions with a larger stride than the blocks' lead to other pages of the same block
    (KV-first layouts).
    """
    tensor, width = item.tensor, item.tensor.element_size()
    dim = item.block_dim % tensor.dim()
    stride = tensor.stride(dim) * width if item.block_stride is None else item.block_stride
    other_dims = [
        (size, step * width)
        for d, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if d != dim and size > 1
    ]
    dims_across_pages = [(size, step) for size, step in other_dims if step >= stride]
    dims_in_page = [(size, step) for size, step in other_dims if step < stride]
    page = width + sum((size - 1) * step for size, step in dims_in_page)
    dense = width
    for size, _ in dims_in_page:
        dense *= size
    if item.page_bytes is not None:
        page = item.page_bytes
    elif page != dense:
        raise UnsupportedMemory(
            f"{name}: shape {tuple(tensor.shape)}, strides {tensor.stride()}: a block's {dense}"
            f" bytes are spread over {page}; say what to move with BlockTensor(page_bytes=...)"
        )
    if not 0 < page <= stride:
        raise UsageError(
            f"{name}: a page of {page} bytes with a block stride of {stride} bytes: blocks would"
            f" overlap; is block_dim={item.block_dim} the dimension that counts blocks?"
        )
    start = int(tensor.storage_offset()) * width
    return [
        TensorSpec(
            storage=storage,
            offset=start
            + sum(i * step for i, (_, step) in zip(indices, dims_across_pages, strict=True)),
            page_bytes=page,
            block_stride=stride,
        )
        for indices in itertools.product(*(range(size) for size, _ in dims_across_pages))
    ]


def _share_cuda(storage: Any) -> DeviceMemory:
    return DeviceMemory.at(storage.data_ptr(), storage.nbytes())


def _share_cpu(storage: Any) -> HostMemory:
    """Move a storage into a sealed memory file, unless it lies in one already.

    torch moves a storage into a file on /dev/shm, at a new address, but such a file cannot be
    sealed. So a memory file with the same bytes replaces it at this address and under its
    descriptor, as if torch had used the memory file from the start.
    """
    was_shared = storage.is_shared()
    try:
        fd, nbytes = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise UnsupportedMemory(
            f"{storage.nbytes()} bytes cannot be moved to shared memory: {error}; is /dev/shm"
            " large enough?"
        ) from error
    if not is_sealed(fd):
        if was_shared:
            raise UnsupportedMemory(
                f"{nbytes} bytes are in shared memory of torch already, in a file that could be"
                " shortened: share tensors with kvd before share_memory_() is called"
            )
        _replace_by_sealed_file(storage.data_ptr(), nbytes, fd)
    # Duplicate the descriptor, because torch closes its own with the storage.
    return HostMemory(os.dup(fd), nbytes)


def _replace_by_sealed_file(address: int, nbytes: int, fd: int) -> None:
    """Replace a mapped file by a sealed memory file, at the same address and descriptor."""
    try:
        sealed_fd = sealed_file("kvd-tensor", nbytes)
    except OSError as error:
        raise UnsupportedMemory(f"{nbytes} bytes of shared memory: {error}") from error
    try:
        with mmap.mmap(sealed_fd, nbytes) as copy:
            copy[:] = (ctypes.c_char * nbytes).from_address(address)
        # All pages exist: map them now, to spare the model a page fault for each.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
        if _mmap(address, nbytes, protection, flags, sealed_fd, 0) != address:
            reason = os.strerror(ctypes.get_errno())
            raise UnsupportedMemory(f"{nbytes} bytes cannot be mapped anew: {reason}")
        os.dup2(sealed_fd, fd, inheritable=False)
    finally:
        os.close(sealed_fd)


# -------------------------------------------------------------------- timeline


def work_so_far(worker: Worker, stream: Any = None) -> int | None:
    """Return the timeline number of all work that is on a stream now, on any device.

    None with host memory, whose work has finished. On a GPU a store must read after the kernels
    that write its blocks, and a load must write after the kernels that read them.

    Args:
        worker: of the memory.
        stream: a torch stream; None: the current one.
    """
    device = worker.timeline.device
    if device is None:
        return None
    if worker.transfer == STAGING:
        stream = torch.accelerator.current_stream(device) if stream is None else stream
        return worker.timeline.signal_on(stream)
    stream = torch.cuda.current_stream() if stream is None else stream
    return worker.timeline.signal_on(stream.cuda_stream)
