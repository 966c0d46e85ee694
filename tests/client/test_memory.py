"""From an engine's tensors and blocks to memory that others can map, and to the arrays of a job."""

import errno
import os
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvd_client import (
    ChunkBlocks,
    HostMemory,
    LoadTicket,
    StoreTicket,
    UnsupportedMemory,
    UsageError,
)
from kvd_client.registration import register_message
from kvd_client.tickets import pack_chunks
from kvd_client.timeline import ControlPage
from kvd_client.torch_memory import BlockTensor, describe_torch
from kvd_proto.jobs import chunks_per_group
from kvd_proto.layout import TensorSpec
from tests.client.conftest import FINGERPRINT, LAYOUT
from tests.descriptors import open_files, open_on
from tests.layouts import flat_layout


def test_memory_that_is_shared_cannot_be_shortened() -> None:
    """New memory, the control page, tensors of torch, gone ones too, and files made elsewhere.

    One that may not be sealed is refused with what to use.
    """
    memory, page = HostMemory.allocate(8192), ControlPage()
    (shared,) = describe_torch([torch.zeros(4, 8)]).share()
    theirs = os.memfd_create("theirs", os.MFD_ALLOW_SEALING)
    os.ftruncate(theirs, 4096)
    sealed = HostMemory(theirs, 4096)
    for fd in (memory.fd, page.fd, *shared.fds, sealed.fd):
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
    duplicate, before = os.dup, open_on(memory[0].fd)

    def dup(fd: int) -> int:
        if fd == memory[1].fd:
            raise OSError(errno.EMFILE, "Too many open files")
        return duplicate(fd)

    monkeypatch.setattr(os, "dup", dup)
    with pytest.raises(UnsupportedMemory, match=r"2 descriptors .* raise the limit of open files"):
        register_message(
            memory,
            layout,
            fingerprint=FINGERPRINT,
            rank=0,
            world_size=1,
            stage=0,
            temporary=False,
        )
    assert open_on(memory[0].fd) == before


def test_tensors_that_torch_has_shared_before_are_refused() -> None:
    """Other processes may have them mapped, so that they cannot be moved, nor sealed."""
    tensor = torch.zeros(4, 8)
    tensor.untyped_storage().share_memory_()
    with pytest.raises(UnsupportedMemory, match="before share_memory_"):
        describe_torch([tensor]).share()


def test_torch_views_follow_in_place() -> None:
    """A storage moves once; the tensor and all its views, old ones too, see the shared bytes."""
    tensor = torch.arange(4 * 6 * 8, dtype=torch.int16).reshape(4, 6, 8)
    view = tensor[1:].view(-1)
    before = tensor.clone()
    other = tensor.view(torch.uint8)
    tensors = describe_torch([tensor[:, :3], tensor[:, 3:]])
    (shared,) = tensors.share()
    assert tensors.storages == (4 * 6 * 8 * 2,)
    assert torch.equal(tensor, before)
    view[0] = 0x0201
    (fd,) = shared.fds
    assert os.pread(fd, 2, shared.offset + 96) == b"\x01\x02"
    assert int(other[1, 0, 0]) == 1
    assert tensors.tensors == (
        TensorSpec(storage=0, offset=0, page_bytes=48, block_stride=96),
        TensorSpec(storage=0, offset=48, page_bytes=48, block_stride=96),
    )
    assert tensors.parts == ((0,), (1,))
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
    tensors = describe_torch([given])
    assert tensors.parts == (tuple(range(len(offsets))),)
    assert tensors.tensors == tuple(TensorSpec(0, offset, page, stride) for offset in offsets)


def test_described_tensors_are_not_moved() -> None:
    """A storage moves when it is shared, not when it is described."""
    tensor = torch.zeros(2, 2)
    tensors = describe_torch([tensor])
    assert not tensor.untyped_storage().is_shared()
    (shared,) = tensors.share()
    assert tensor.untyped_storage().is_shared()
    shared.close()


def test_no_memory_stays_shared_if_one_storage_cannot_be() -> None:
    """The descriptor of the first storage is closed when the second one is refused."""
    good, bad = torch.zeros(2, 2), torch.zeros(2, 2)
    bad.untyped_storage().share_memory_()
    tensors = describe_torch([good, bad])
    before = open_files()
    with pytest.raises(UnsupportedMemory, match="before share_memory_"):
        tensors.share()
    moved = set(open_files()) - set(before)
    assert len(moved) == 1  # torch's own, of the storage that it has moved


class DeviceTensor(torch.Tensor):
    """The shape and device of a tensor, with which nothing is computed."""

    @classmethod
    def __torch_dispatch__(cls, *call: object) -> object:
        """Refuse."""
        raise NotImplementedError(call)


def tensor_on(device: str) -> torch.Tensor:
    """A tensor of bytes on a device."""
    made: torch.Tensor = torch.Tensor._make_wrapper_subclass(
        DeviceTensor, (2, 2), dtype=torch.uint8, device=torch.device(device)
    )
    return made


def test_tensors_of_one_worker_are_on_one_device() -> None:
    """The CPU and a GPU, or two GPUs, are refused."""
    with pytest.raises(UsageError, match=r"tensors\[1\] is on cuda:0, tensors\[0\] on cpu"):
        describe_torch([torch.zeros(2, 2), tensor_on("cuda:0")])
    with pytest.raises(UsageError, match="is on cuda:1"):
        describe_torch([tensor_on("cuda:0"), tensor_on("cuda:1")])


@pytest.mark.parametrize("device", ["cuda:0", "xpu:0", "mtia:0"])
def test_tensors_of_any_device_are_described(device: str) -> None:
    """Staging needs no more than that; only memory of the CPU and of CUDA can be exported."""
    tensors = describe_torch([tensor_on(device)])
    assert (str(tensors.device), tensors.is_host) == (device, False)
    assert tensors.storages == (4,)
    assert tensors.tensors == (TensorSpec(0, 0, 2, 2),)
    if not device.startswith("cuda"):
        with pytest.raises(UnsupportedMemory, match=rf"memory of {device}.*CPU and of CUDA only"):
            tensors.share()


def test_memory_of_rocm_cannot_be_exported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch calls AMD's devices `cuda`, too; the daemon maps none of their memory."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    with pytest.raises(UnsupportedMemory, match=r"memory of cuda:0 \(ROCm\) cannot be mapped"):
        describe_torch([tensor_on("cuda:0")]).share()


def granted_store(keys: Sequence[bytes]) -> StoreTicket:
    """A ticket that grants these keys the slots from 0 and the generations from 100 on."""
    slots = np.arange(len(keys), dtype="<u4")
    return StoreTicket(keys=tuple(keys), slots=slots, generations=slots.astype("<u8") + 100)


@st.composite
def groups_and_grants(draw: st.DrawFn) -> tuple[int, list[ChunkBlocks], list[bytes]]:
    """Groups of an engine's blocks, and those keys that a daemon granted."""
    factor = draw(st.integers(1, 4))
    groups, granted, block = [], [], 1
    for number in range(draw(st.integers(1, 3))):
        length, first = draw(st.integers(0, 12)), draw(st.integers(0, 9))
        chunks = -(-(length + first % factor) // factor) if length else 0
        keys = [b"%d-%d" % (number, chunk) for chunk in range(chunks)]
        groups.append(ChunkBlocks(keys, list(range(block, block + length)), first))
        granted += draw(st.lists(st.sampled_from(keys), unique=True)) if keys else []
        block += length
    return factor, groups, granted


@given(groups_and_grants())
def test_a_job_has_exactly_the_granted_chunks(
    made: tuple[int, list[ChunkBlocks], list[bytes]],
) -> None:
    """Each granted chunk's blocks are where it holds them; those of others are left out."""
    factor, groups, granted = made
    job = pack_chunks(granted_store(granted), groups, flat_layout(1, factor=factor))
    assert sum(job.sizes) == len(job.block_ids)
    counts = chunks_per_group(job.sizes, job.indices, factor)
    block_ids, slots = job.block_ids.numpy().tolist(), job.slots.numpy().tolist()
    assert sum(counts) == len(slots) == len(granted)
    # Read the job as a lane does, and compare with what the engine said.
    expected = {}
    for group in groups:
        for position, block in enumerate(group.blocks):
            logical = group.first + position
            key = group.keys[(group.first % factor + position) // factor]
            expected[block] = (key, logical % factor)
    position = chunk = 0
    for size, index in zip(job.sizes, job.indices, strict=True):
        inside = index % factor
        for _ in range(size):
            key = granted[slots[chunk]]
            assert expected[block_ids[position]] == (key, inside)
            position, inside = position + 1, inside + 1
            if inside == factor:
                chunk, inside = chunk + 1, 0
        chunk += bool(inside)
    assert [granted[slot] for slot in slots] == [
        key for group in groups for key in group.keys if key in granted
    ]
    assert job.generations.numpy().tolist() == [slot + 100 for slot in slots]


NULL_BLOCK = 7
REFUSED: list[tuple[Any, list[Any], str]] = [  # keys that a store was granted, groups, words
    ([b"k"], [ChunkBlocks([b"k"], [1, 2, 3, 4, 5], first=3)], r"1 keys, its 5 blocks from 3 on"),
    # Also a block of a chunk that was not granted.
    ([], [ChunkBlocks([], []), ChunkBlocks([b"k"], [1, NULL_BLOCK])], r"groups\[1\].*null block"),
    ([b"k"], [ChunkBlocks([b"k"], np.ones((2, 2)))], "whole numbers"),  # type: ignore[arg-type]
    *(
        ([b"k"], [ChunkBlocks([key], [1])], r"keys\[0\] is .*: bytes are needed")  # type: ignore[list-item]
        for key in ("k", [1], bytearray(b"k"), None)
    ),
]


def test_blocks_and_tickets_that_do_not_fit_are_refused() -> None:
    """Numbers that contradict each other, other kinds of keys, and tickets that no daemon gave."""
    layout = flat_layout(1, factor=2, null_block=NULL_BLOCK)
    for keys, groups, words in REFUSED:
        with pytest.raises(UsageError, match=words):
            pack_chunks(granted_store(keys), groups, layout)
    for ticket in (StoreTicket(keys=(b"k",)), LoadTicket(slots=[3]), StoreTicket(keys=None)):  # type: ignore[arg-type]
        with pytest.raises(UsageError, match="ticket="):
            pack_chunks(ticket, [ChunkBlocks([b"k"], [1])], layout)
