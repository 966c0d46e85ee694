"""A worker's registration, checked before it is sent."""

from collections.abc import Sequence

from kvd_client.arguments import declared, shown
from kvd_client.errors import UnsupportedMemory, UsageError
from kvd_client.memory import LARGER_ALLOCATIONS, Descriptors, Memory
from kvd_proto.codec import WIRE
from kvd_proto.errors import LayoutError, ProtoError
from kvd_proto.layout import RankLayout, validate_layout
from kvd_proto.messages import MAX_DESCRIPTORS, Fingerprint, Handle, Register
from kvd_proto.printable import unprintable


def registration(
    memory: Sequence[Memory],
    layout: RankLayout,
    fingerprint: Fingerprint,
    *,
    rank: int,
    world_size: int,
    stage: int,
    temporary: bool,
) -> tuple[Register, Descriptors]:
    """Return the registration of one rank, on the device of its memory.

    Descriptor 0 of the message is to be the control page's. The others are those that are
    returned: duplicates.

    Raises:
        UsageError: memory that does not fit the layout, or an invalid layout.
        UnsupportedMemory: the limit of open files leaves no room for the descriptors.
    """
    layout = declared("layout", layout, RankLayout)
    fingerprint = declared("fingerprint", fingerprint, Fingerprint)
    for field in fingerprint.__struct_fields__:
        name = getattr(fingerprint, field)
        if found := unprintable(name):
            raise UsageError(
                f"fingerprint.{field}={shown(name)} has a character that cannot be shown, {found}"
            )
    if len(memory) != len(layout.storages):
        raise UsageError(
            f"memory has {len(memory)} items, the layout {len(layout.storages)} storages;"
            " give one for each, in the layout's order"
        )
    try:
        validate_layout(layout)
    except LayoutError as error:
        raise UsageError(f"the layout cannot be served: {error}") from error
    handles, fds = _handles(memory, layout)
    message = Register(
        rank=rank,
        world_size=world_size,
        stage=stage,
        device=memory[0].device,
        fingerprint=fingerprint,
        layout=layout,
        handles=tuple(handles),
        temporary=temporary,
    )
    try:  # the keeper sends it, later and more than once, and has nobody to tell
        WIRE.decode(WIRE.encode(message))
    except (ProtoError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"rank {rank}, stage={shown(stage)}, temporary={shown(temporary)}: this cannot be"
            f" registered: {error}"
        ) from error
    try:
        return message, Descriptors.duplicated(fds)
    except OSError as error:
        raise UnsupportedMemory(
            f"{len(fds)} descriptors cannot be duplicated: {error}; raise the limit of open files"
        ) from error


def _handles(memory: Sequence[Memory], layout: RankLayout) -> tuple[list[Handle], list[int]]:
    """Return the handle of each storage, and the descriptors that they number from 1 on."""
    numbers: dict[object, int] = {}  # parts of one file or allocation are mapped once
    fds: list[int] = []
    handles: list[Handle] = []
    for index, (part, size) in enumerate(zip(memory, layout.storages, strict=True)):
        if not isinstance(part, Memory) or part.closed:
            raise UsageError(
                f"memory[{index}]={shown(part)}: open HostMemory or DeviceMemory is needed"
            )
        if part.device != memory[0].device:
            raise UsageError(
                f"memory[{index}] is on {part.device}, memory[0] on {memory[0].device}: the memory"
                " of one worker is on one device"
            )
        if part.nbytes < size:
            raise UsageError(
                f"memory[{index}] has {part.nbytes} bytes, the layout's storage {index} has {size}"
            )
        for fd, identity in zip(part.fds, part.identities, strict=True):
            if identity not in numbers:
                fds.append(fd)
                numbers[identity] = len(fds)
        handles.append(part.handle([numbers[identity] for identity in part.identities]))
    if len(fds) >= MAX_DESCRIPTORS:
        raise UsageError(
            f"the memory lies in {len(fds)} files or allocations, {MAX_DESCRIPTORS - 1} at most can"
            f" be registered; put tensors into fewer storages, or {LARGER_ALLOCATIONS}"
        )
    return handles, fds
