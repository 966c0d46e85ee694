"""Memory that another process can map: numpy, torch, the control page."""

import errno
import os

import msgspec
import pytest
import torch

from kvd_client import HostMemory, UnsupportedMemory, UsageError
from kvd_client.registration import register_message
from kvd_client.timeline import ControlPage
from kvd_client.torch_memory import BlockTensor, share_torch
from kvd_proto.layout import TensorSpec
from tests.client.conftest import FINGERPRINT, LAYOUT
from tests.descriptors import open_on


def test_memory_that_is_shared_cannot_be_shortened() -> None:
    """New memory, the control page, tensors of torch, gone ones too, and files made elsewhere.

    One that may not be sealed is refused with what to use.
    """
    memory, page = HostMemory.allocate(8192), ControlPage()
    shared = share_torch([torch.zeros(4, 8)])
    theirs = os.memfd_create("theirs", os.MFD_ALLOW_SEALING)
    os.ftruncate(theirs, 4096)
    sealed = HostMemory(theirs, 4096)
    for fd in (memory.fd, page.fd, *shared.memory[0].fds, sealed.fd):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, 0)
    fd = os.memfd_create("theirs")
    os.ftruncate(fd, 4096)
    with pytest.raises(UnsupportedMemory, match=r"could be shortened.*MFD_ALLOW_SEALING"):
        HostMemory(fd, 4096)
    os.close(fd)


def test_a_process_out_of_descriptors_registers_nothing_and_keeps_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The limit of open files is met at the second of two: the sentence names it."""
    memory = [HostMemory.allocate(LAYOUT.storages[0]) for _ in range(2)]
    layout = msgspec.structs.replace(LAYOUT, storages=LAYOUT.storages * 2)
    duplicate, held = os.dup, open_on(memory[0].fd)

    def dup(fd: int) -> int:
        if fd == memory[1].fd:
            raise OSError(errno.EMFILE, "Too many open files")
        return duplicate(fd)

    monkeypatch.setattr(os, "dup", dup)
    with pytest.raises(UnsupportedMemory, match=r"2 descriptors .* raise the limit of open files"):
        register_message(
            memory, layout, FINGERPRINT, rank=0, world_size=1, stage=0, temporary=False
        )
    assert open_on(memory[0].fd) == held


def test_tensors_that_torch_has_shared_before_are_refused() -> None:
    """Other processes may have them mapped, so that they cannot be moved, nor sealed."""
    tensor = torch.zeros(4, 8)
    tensor.untyped_storage().share_memory_()
    with pytest.raises(UnsupportedMemory, match="before share_memory_"):
        share_torch([tensor])


def test_torch_views_follow_in_place() -> None:
    """A storage moves once; the tensor and all its views, old ones too, see the shared bytes."""
    tensor = torch.arange(4 * 6 * 8, dtype=torch.int16).reshape(4, 6, 8)
    view = tensor[1:].view(-1)
    before = tensor.clone()
    other = tensor.view(torch.uint8)
    shared = share_torch([tensor[:, :3], tensor[:, 3:]])
    assert len(shared.memory) == 1
    assert shared.storages == (4 * 6 * 8 * 2,)
    assert torch.equal(tensor, before)
    view[0] = 0x0201
    (fd,) = shared.memory[0].fds
    assert os.pread(fd, 2, shared.memory[0].offset + 96) == b"\x01\x02"
    assert int(other[1, 0, 0]) == 1
    assert shared.tensors == (
        TensorSpec(storage=0, offset=0, page_bytes=48, block_stride=96),
        TensorSpec(storage=0, offset=48, page_bytes=48, block_stride=96),
    )
    assert shared.parts == ((0,), (1,))
    shared.close()
    view[0] = 7
    assert int(tensor[1, 0, 0]) == 7


@pytest.mark.parametrize(
    ("given", "offsets", "page", "stride"),
    [
        # Keys first, then values: each block is in two places, never one alias of the other's.
        (BlockTensor(torch.zeros(2, 5, 4, 8, dtype=torch.bfloat16), 1), (0, 320), 64, 64),
        # A page whose inner dimensions are permuted in memory is one run of bytes all the same.
        (torch.zeros(5, 2, 4, dtype=torch.int8).permute(0, 2, 1), (0,), 8, 8),
        # Padded pages and blocks of several rows are as the caller says, not as the shape says.
        (
            BlockTensor(torch.zeros(12, 16, dtype=torch.int8), page_bytes=30, block_stride=32),
            (0,),
            30,
            32,
        ),
    ],
    ids=["keys first", "permuted", "explicit"],
)
def test_where_a_tensors_blocks_are(
    given: torch.Tensor | BlockTensor, offsets: tuple[int, ...], page: int, stride: int
) -> None:
    """One part for each place that a block is in."""
    shared = share_torch([given])
    assert shared.parts == (tuple(range(len(offsets))),)
    assert shared.tensors == tuple(TensorSpec(0, offset, page, stride) for offset in offsets)
    shared.close()


def test_refused_tensors_are_not_moved() -> None:
    """Where one tensor cannot be shared, the others stay where they are."""
    good = torch.zeros(2, 2)
    with pytest.raises(UsageError, match="overlap"):
        share_torch([good, BlockTensor(torch.zeros(4, 8), page_bytes=64)])
    assert not good.untyped_storage().is_shared()


class CudaTensor(torch.Tensor):
    """The shape and device of a CUDA tensor, with which nothing is computed."""

    @classmethod
    def __torch_dispatch__(cls, *call: object) -> object:
        """Refuse."""
        raise NotImplementedError(call)


def cuda_tensor(index: int) -> torch.Tensor:
    """A tensor of bytes on CUDA device `index`."""
    device = torch.device("cuda", index)
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        CudaTensor, (2, 2), dtype=torch.uint8, device=device
    )
    return made


def test_tensors_of_one_worker_are_on_one_device() -> None:
    """The CPU and a GPU, or two GPUs, are refused before anything is shared."""
    good = torch.zeros(2, 2)
    with pytest.raises(UsageError, match=r"tensors\[1\] is on cuda:0, tensors\[0\] on cpu"):
        share_torch([good, cuda_tensor(0)])
    assert not good.untyped_storage().is_shared()
    with pytest.raises(UsageError, match="is on cuda:1"):
        share_torch([cuda_tensor(0), cuda_tensor(1)])
