"""A worker's registration: its `Register` message, and a state machine for sending it.

`register` and `unregister` set the goal (`want`, `drop`); the keeper makes the daemon hold that
memory and no other (`next_request`, `answered`, `released`). The next state, by state and event:

    state       the daemon holds   want     drop     next_request  answered              lost
    NONE        nothing            WAITING
    WAITING     nothing            error    NONE     ASKED
    ASKED       perhaps the memory error    LEAVING                REGISTERED, WAITING,  WAITING
                                                                   or REFUSED
    REFUSED     nothing            error    NONE
    LEAVING     perhaps other      LEAVING           LEAVING       LEAVING, or as        as released
                memory                                             released
    REGISTERED  the memory         error    LEAVING                                      WAITING
    ATTACHED    all ranks' memory  error    LEAVING                                      WAITING

`released` leads from LEAVING to WAITING if memory is wanted, else to NONE.
"""

from collections.abc import Sequence
from enum import IntEnum

from kvd_client.arguments import declared, shown
from kvd_client.errors import UnsupportedMemory, UsageError
from kvd_client.memory import LARGER_ALLOCATIONS, Descriptors, Memory
from kvd_proto.channel import duplicated
from kvd_proto.codec import WIRE
from kvd_proto.errors import LayoutError, ProtoError
from kvd_proto.layout import RankLayout, validate_layout
from kvd_proto.messages import (
    MAX_DESCRIPTORS,
    Error,
    ErrorCode,
    Fingerprint,
    Handle,
    Message,
    Register,
    Registered,
    Unregister,
)
from kvd_proto.text import unprintable

NOTHING = "nothing is registered yet"
TRANSIENT = (ErrorCode.LANE_LOST, ErrorCode.NOT_READY, ErrorCode.DRAINING)


class RegistrationState(IntEnum):
    """The state of a registration. From ASKED on the daemon may hold memory."""

    NONE = 0
    WAITING = 1  # `Register` is to be sent, perhaps again
    REFUSED = 2  # for good; `register` raises
    ASKED = 3
    LEAVING = 4
    REGISTERED = 5
    ATTACHED = 6


class Registration:
    """The memory that a worker wants the daemon to hold, and how far the daemon holds it.

    All but `state` and `message` is used under the worker's lock.

    Attributes:
        state: changed only by this object's methods.
        message: the registration that is wanted; None: none.
        memory: the message's descriptors, closed with their last reference.
        refusal: the daemon's latest refusal since `want`; None: it has not refused.
        raises: `register` waits for the first answer: a refusal that is not transient is final.
        lost: a session has ended in which the daemon may have held memory, and no later session
            has confirmed a release: a lane may still copy.
    """

    def __init__(self) -> None:
        self.state = RegistrationState.NONE
        self.message: Register | None = None
        self.memory = Descriptors(())
        self.refusal: Error | None = None
        self.raises = False
        self.lost = False

    @property
    def holds(self) -> bool:
        """Whether the daemon holds the memory that is wanted."""
        return self.state >= RegistrationState.REGISTERED

    @property
    def refused(self) -> bool:
        """Whether the daemon has refused the memory for good, and `register` has not raised yet."""
        return self.state is RegistrationState.REFUSED

    @property
    def lack(self) -> str:
        """Why the daemon does not hold the memory; empty if it has not refused."""
        if self.message is None:
            return NOTHING
        return self.refusal.text if self.refusal else ""

    def want(self, message: Register, memory: Descriptors) -> None:
        """Set the registration that is wanted; memory held before is released first."""
        self.message, self.memory, self.refusal, self.raises = message, memory, None, True
        if self.state is RegistrationState.NONE:
            self.state = RegistrationState.WAITING

    def drop(self) -> None:
        """Want no registration; memory that the daemon may hold is to be released."""
        self.message, self.memory = None, Descriptors(())
        held = self.state >= RegistrationState.ASKED
        self.state = RegistrationState.LEAVING if held else RegistrationState.NONE

    def next_request(self) -> tuple[Register | Unregister, Descriptors] | None:
        """Return the request to send now, and its descriptors; None: there is none."""
        if self.state is RegistrationState.LEAVING:
            return Unregister(), Descriptors(())
        if self.state is not RegistrationState.WAITING or self.message is None:
            return None
        self.state = RegistrationState.ASKED
        return self.message, self.memory

    def answered(self, reply: Message) -> bool:
        """Process the answer to a request; return whether to send `Register` again later."""
        if self.state is RegistrationState.ASKED and isinstance(reply, Registered):
            self.state, self.refusal = RegistrationState.REGISTERED, None
        elif self.state is RegistrationState.ASKED and isinstance(reply, Error):
            self.refusal = reply
            self._settle()
            if not self.raises or reply.code in TRANSIENT:
                return True
            self.drop()
            self.state = RegistrationState.REFUSED
        elif self.state is RegistrationState.LEAVING and isinstance(reply, Error):
            self._settle()
        return False

    def take_refusal(self) -> Error | None:
        """Return the final refusal, if any, and go from REFUSED to NONE."""
        if not self.refused:
            return None
        self.state = RegistrationState.NONE
        return self.refusal

    def released(self) -> None:
        """Record that the daemon has released all memory."""
        self.lost = False
        if self.state is RegistrationState.LEAVING:
            self._settle()

    def session_lost(self) -> None:
        """Record that the session has ended; the daemon releases its memory later by itself."""
        if self.state >= RegistrationState.ASKED:
            self.lost = True
            self._settle()

    def set_attached(self, *, attached: bool) -> None:
        """Record whether all ranks of the engine are registered; ignored unless this one is."""
        if self.holds:
            self.state = RegistrationState.ATTACHED if attached else RegistrationState.REGISTERED

    def _settle(self) -> None:
        wants = self.message is not None
        self.state = RegistrationState.WAITING if wants else RegistrationState.NONE


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
    """Return the `Register` message of one rank, and duplicates of its memory's descriptors.

    The caller sends the control page's descriptor first: the message numbers the returned ones
    from 1 on.

    Raises:
        UsageError: the memory does not fit the layout, or an argument is invalid.
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
    try:  # check it here: the keeper sends it later, when no caller is left to raise to
        WIRE.decode(WIRE.encode(message))
    except (ProtoError, TypeError, ValueError, OverflowError) as error:
        raise UsageError(
            f"rank {rank}, stage={shown(stage)}, temporary={shown(temporary)}: this cannot be"
            f" registered: {error}"
        ) from error
    try:
        return message, Descriptors(duplicated(fds))
    except OSError as error:
        raise UnsupportedMemory(
            f"{len(fds)} descriptors cannot be duplicated: {error}; raise the limit of open files"
        ) from error


def _handles(memory: Sequence[Memory], layout: RankLayout) -> tuple[list[Handle], list[int]]:
    """Return the handle of each storage, and the descriptors, which handles number from 1 on."""
    numbers: dict[object, int] = {}  # by file or allocation, so that each is sent once
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
