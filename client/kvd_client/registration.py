"""What a worker wants registered: checked here, before a daemon sees it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

from kvd_client.control import ControlPage
from kvd_client.door import MAX_FDS
from kvd_client.errors import UsageError
from kvd_client.memory import HostMemory
from kvd_proto.errors import LayoutError
from kvd_proto.layout import RankLayout, validate_layout
from kvd_proto.messages import Error, Fingerprint, HostHandle, Register


@dataclass(slots=True)
class Wanted:
    """A registration to be made with every daemon that is there, until the worker is closed.

    Attributes:
        control: descriptor number 0 of the message.
        memory: the descriptors from number 1 on, duplicates that live as long as this does.
        waited_for: a caller waits for the first answer and is told of a refusal.
        refusal: that answer.
    """

    message: Register
    control: ControlPage
    memory: tuple[HostMemory, ...]
    waited_for: bool = True
    refusal: Error | None = None

    @property
    def fds(self) -> list[int]:
        """Descriptors in the order of the message's numbers."""
        return [self.control.fd, *(part.fd for part in self.memory)]


def wanted_registration(
    control: ControlPage,
    memory: Sequence[HostMemory],
    layout: RankLayout,
    fingerprint: Fingerprint,
    *,
    rank: int,
    world_size: int,
    device: str,
    stage: int,
) -> Wanted:
    """The registration of one rank.

    Raises:
        UsageError: memory that is not that of the layout, or a layout that cannot be meant.
    """
    if not isinstance(layout, RankLayout):
        raise UsageError(f"layout={layout!r}: a RankLayout is needed")
    if not isinstance(fingerprint, Fingerprint):
        raise UsageError(f"fingerprint={fingerprint!r}: a Fingerprint is needed")
    if len(memory) != len(layout.storages):
        raise UsageError(
            f"{len(memory)} memories for {len(layout.storages)} storages of the layout;"
            " give one for each, in the layout's order"
        )
    try:
        validate_layout(layout)
    except LayoutError as error:
        raise UsageError(f"the layout cannot be served: {error}") from error
    numbers: dict[tuple[int, int], int] = {}
    kept: list[HostMemory] = []
    handles = []
    for index, (part, size) in enumerate(zip(memory, layout.storages, strict=True)):
        if not isinstance(part, HostMemory) or part.fd < 0:
            raise UsageError(f"memory[{index}]={part!r}: open HostMemory is needed")
        if part.nbytes < size:
            raise UsageError(
                f"memory[{index}] has {part.nbytes} bytes, the layout's storage {index} has {size}"
            )
        status = os.fstat(part.fd)
        file = (status.st_dev, status.st_ino)
        if file not in numbers:  # parts of one file are mapped once
            kept.append(part.part(0, part.nbytes))
            numbers[file] = len(kept)
        handles.append(HostHandle(fd_index=numbers[file], offset=part.offset))
    if len(kept) >= MAX_FDS:
        raise UsageError(
            f"{len(kept) + 1} descriptors, {MAX_FDS} at most; put tensors into fewer storages"
        )
    message = Register(
        rank=rank,
        world_size=world_size,
        stage=stage,
        device=device,
        fingerprint=fingerprint,
        layout=layout,
        handles=tuple(handles),
    )
    return Wanted(message, control, tuple(kept))
