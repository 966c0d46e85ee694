"""A worker's registration, checked before it is sent."""

from collections.abc import Sequence

from kvd_client.arguments import declared, shown
from kvd_client.errors import UsageError
from kvd_client.memory import Memory
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
) -> tuple[Register, list[Memory]]:
    """Return the registration of one rank, on the device of its memory.

    Descriptor 0 of the message is to be the control page's. The others are those of the memory
    that is returned: duplicates.

    Raises:
        UsageError: memory that does not fit the layout, or an invalid layout.
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
    numbers: dict[object, int] = {}
    kept: list[Memory] = []
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
        number = 0
        if part.fd >= 0:
            number = numbers.setdefault(part.identity, len(kept) + 1)
            if number > len(kept):  # parts of one file or allocation are mapped once
                kept.append(part.duplicate())
        handles.append(part.handle(number))
    if len(kept) >= MAX_DESCRIPTORS:
        raise UsageError(
            f"{len(kept) + 1} descriptors, {MAX_DESCRIPTORS} at most; put tensors into fewer"
            " storages"
        )
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
    return message, kept
