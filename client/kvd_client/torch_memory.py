"""torch tensors as memory that the daemon can map, and torch streams as a worker's timeline.

A CPU tensor's storage is moved in place into anonymous shared memory: every view
of it follows, its address changes, its contents do not. A CUDA tensor's storage
stays where it is and is named by a handle. A storage is shared and counted once,
however many tensors are views of it.
"""

import ctypes
import itertools
import mmap
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kvd_client.errors import UnsupportedMemory, UsageError, check_collection, check_int, shown
from kvd_client.memory import DeviceMemory, HostMemory, Memory, is_sealed, sealed_file
from kvd_client.worker import Worker
from kvd_proto.layout import TensorSpec
from kvd_proto.messages import HOST

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
        page_bytes: of one block; None where the other dimensions say it, which they do unless
            pages are padded or interleaved.
        block_stride: bytes from one block to the next; None where `block_dim` says it, which it
            does unless the engine's blocks are several rows of that dimension.
    """

    tensor: torch.Tensor
    block_dim: int = 0
    page_bytes: int | None = None
    block_stride: int | None = None


@dataclass(frozen=True, slots=True)
class SharedTensors:
    """Tensors whose memory the daemon can map.

    Attributes:
        device: where all of them are: "host", or "cuda:" and the device's UUID.
        memory: one per distinct storage; for `Worker.register`.
        storages: their sizes in bytes; for `RankLayout.storages`.
        tensors: for `RankLayout.tensors`.
        parts: parts[i] are the indices into `tensors` of the i-th given tensor: one as a rule,
            several where a block is in several places (keys first, then values).
    """

    device: str
    memory: tuple[Memory, ...]
    storages: tuple[int, ...]
    tensors: tuple[TensorSpec, ...]
    parts: tuple[tuple[int, ...], ...]

    def close(self) -> None:
        """Close the descriptors; the tensors stay what they are."""
        for memory in self.memory:
            memory.close()


def share_torch(tensors: Sequence[torch.Tensor | BlockTensor]) -> SharedTensors:
    """Share tensors' storages, CPU ones by moving them in place, and describe their pages.

    Shapes say how large a page is and never how many blocks there are: that is
    the engine's configured number. Nothing may hold a raw address of the tensors.

    Args:
        tensors: on one device, the CPU or a GPU; plain ones count blocks in dimension 0.

    Raises:
        UsageError: not tensors, of several devices, or invalid dimensions. Nothing
            was moved.
        UnsupportedMemory: on another kind of device, not strided, without room in shared memory,
            or CUDA memory that no other process can map.
        CudaError: the CUDA driver refuses.
    """
    passed: object = tensors
    if isinstance(passed, torch.Tensor):  # which would be taken for a sequence of its rows
        raise UsageError(f"tensors has shape {tuple(passed.shape)}: give a list of tensors")
    several = check_collection("tensors", passed, "tensors")
    given = [t if isinstance(t, BlockTensor) else BlockTensor(t) for t in several]
    if not given:
        raise UsageError("no tensors: give the engine's KV-cache tensors")
    numbers: dict[int, int] = {}
    storages: list[Any] = []
    specs: list[TensorSpec] = []
    parts: list[tuple[int, ...]] = []
    for index, item in enumerate(given):
        _check(f"tensors[{index}]", item)
        if item.tensor.device != given[0].tensor.device:
            raise UsageError(
                f"tensors[{index}] is on {item.tensor.device}, tensors[0] on"
                f" {given[0].tensor.device}: the tensors of one worker are on one device"
            )
        storage = item.tensor.untyped_storage()
        number = numbers.setdefault(storage._cdata, len(storages))  # noqa: SLF001  # what views share
        if number == len(storages):
            storages.append(storage)
        pages = _pages(f"tensors[{index}]", item, number)
        parts.append(tuple(range(len(specs), len(specs) + len(pages))))
        specs.extend(pages)
    memory: list[Memory] = []
    share = _share_cpu if given[0].tensor.device.type == "cpu" else _share_cuda
    try:
        memory.extend(share(storage) for storage in storages)
    except BaseException:
        for done in memory:
            done.close()
        raise
    return SharedTensors(
        memory[0].device,
        tuple(memory),
        tuple(part.nbytes for part in memory),
        tuple(specs),
        tuple(parts),
    )


def _check(name: str, item: BlockTensor) -> None:
    tensor = item.tensor
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(f"{name} is a {type(tensor).__name__}: a torch.Tensor is needed")
    if tensor.device.type not in {"cpu", "cuda"}:
        raise UnsupportedMemory(
            f"{name} is on {tensor.device}: only tensors of the CPU and of CUDA can be shared"
        )
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

    for what, number in (("page_bytes", item.page_bytes), ("block_stride", item.block_stride)):
        if number is not None:
            check_int(f"{name}: {what}", number, 1)
    ends = tensor.storage_offset() + 1
    ends += sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    have = tensor.untyped_storage().nbytes()
    if ends * tensor.element_size() > have:
        raise UsageError(
            f"{name} of shape {tuple(tensor.shape)} has a storage of {have} bytes only: its memory"
            " was freed or resized; share tensors while they are in use"
        )


def _pages(name: str, item: BlockTensor, storage: int) -> list[TensorSpec]:
    """The regularly repeated byte ranges that make up the tensor's blocks.

    Dimensions with a larger stride than the blocks' lead to other places of
    the same block (KV-first layouts): each of them is a range of its own.
    """
    tensor, width = item.tensor, item.tensor.element_size()
    dim = item.block_dim % tensor.dim()
    stride = tensor.stride(dim) * width if item.block_stride is None else item.block_stride
    others = [
        (size, step * width)
        for d, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True))
        if d != dim and size > 1
    ]
    outer = [(size, step) for size, step in others if step >= stride]
    inner = [(size, step) for size, step in others if step < stride]
    page = width + sum((size - 1) * step for size, step in inner)
    dense = width
    for size, _ in inner:
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
            offset=start + sum(i * step for i, (_, step) in zip(place, outer, strict=True)),
            page_bytes=page,
            block_stride=stride,
        )
        for place in itertools.product(*(range(size) for size, _ in outer))
    ]


def _share_cuda(storage: Any) -> DeviceMemory:
    return DeviceMemory.at(storage.data_ptr(), storage.nbytes())


def _share_cpu(storage: Any) -> HostMemory:
    """Move a storage into a memory file that keeps its size; one that is there already stays.

    torch moves it into a file on /dev/shm, at an address of its own, and such a file cannot be
    sealed. So a memory file with the same bytes takes the file's place, under the storage's
    address and under its descriptor: it is as if torch had used it from the start.
    """
    shared_before = storage.is_shared()
    try:
        fd, size = storage._share_fd_cpu_()
    except RuntimeError as error:
        raise UnsupportedMemory(
            f"{storage.nbytes()} bytes cannot be moved to shared memory: {error}; is /dev/shm"
            " large enough?"
        ) from error
    if not is_sealed(fd):
        if shared_before:
            raise UnsupportedMemory(
                f"{size} bytes are in shared memory of torch already, in a file that could be"
                " shortened: share tensors with kvd before share_memory_() is called"
            )
        _into_sealed_file(storage.data_ptr(), size, fd)
    # The descriptor is the storage's own and goes with it.
    return HostMemory(os.dup(fd), size)


def _into_sealed_file(address: int, nbytes: int, fd: int) -> None:
    """Put a memory file where another file is mapped, and under its descriptor."""
    try:
        file = sealed_file("kvd-tensor", nbytes)
    except OSError as error:
        raise UnsupportedMemory(f"{nbytes} bytes of shared memory: {error}") from error
    try:
        with mmap.mmap(file, nbytes) as copy:
            copy[:] = (ctypes.c_char * nbytes).from_address(address)
        # All pages are there: mapped now, they are not one by one when a model computes.
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED | mmap.MAP_POPULATE | _MAP_FIXED
        if _mmap(address, nbytes, protection, flags, file, 0) != address:
            reason = os.strerror(ctypes.get_errno())
            raise UnsupportedMemory(f"{nbytes} bytes cannot be mapped anew: {reason}")
        os.dup2(file, fd, inheritable=False)
    finally:
        os.close(file)


# -------------------------------------------------------------------- timeline


def work_so_far(worker: Worker, stream: Any = None) -> int | None:
    """Return the timeline's number for all work that the engine has put on a stream until now.

    None for host memory, where it has finished. On CUDA a store must read after the kernels that
    write its blocks, a load write after those that read them.

    Args:
        worker: whose memory it is.
        stream: a torch stream; None: the current one.
    """
    if worker.device in {None, HOST}:
        return None
    used = torch.cuda.current_stream() if stream is None else stream
    return worker.timeline.signal_on(used.cuda_stream)
