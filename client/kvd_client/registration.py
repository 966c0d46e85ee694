"""A worker's registration: its `Register` message, and a state machine for sending it.

`register` and `unregister` set the goal (`request`, `drop`); the keeper makes the daemon hold that
memory and no other (`next_request`, `on_answered`, `on_released`). The next state, by state and
event:

    state       the daemon holds   request  drop     next_request  on_answered           lost
    NONE        nothing            WAITING
    WAITING     nothing            error    NONE     REQUESTED
    REQUESTED   perhaps the memory error    LEAVING                REGISTERED, WAITING,  WAITING
                                                                   or REFUSED
    REFUSED     nothing            error    NONE
    LEAVING     perhaps other      LEAVING           LEAVING       LEAVING, or as        as released
                memory                                             released
    REGISTERED  the memory         error    LEAVING                                      WAITING
    ATTACHED    all ranks' memory  error    LEAVING                                      WAITING

`on_released` leads from LEAVING to WAITING if memory is requested, else to NONE. `replace` leads
from REQUESTED to WAITING: after a refusal other memory is requested.
"""

from collections.abc import Sequence
from enum import IntEnum
from typing import TypeVar

import msgspec

from kvd_client.errors import UnsupportedMemory, UsageError, shown
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

T = TypeVar("T", bound=msgspec.Struct)

NOTHING_REGISTERED = "nothing is registered yet"
TRANSIENT_CODES = (ErrorCode.LANE_LOST, ErrorCode.NOT_READY, ErrorCode.DRAINING)


class RegistrationState(IntEnum):
    """The state of a registration. From REQUESTED on the daemon may hold memory."""

    NONE = 0
    WAITING = 1  # `Register` is to be sent, perhaps again
    REFUSED = 2  # for good; `register` raises
    REQUESTED = 3
    LEAVING = 4
    REGISTERED = 5
    ATTACHED = 6


class WorkerRegistration:
    """The memory that a worker registers, and how far the daemon holds it.

    All but `state` and `message` is used under the worker's lock.

    Attributes:
        state: changed only by this object's methods.
        message: the requested registration; None: none.
        memory: the message's descriptors, closed with their last reference.
        refusal: the daemon's latest refusal since `request`; None: it has not refused.
        has_waiter: `register` waits for the first answer: a refusal that is not transient is final.
        was_lost: a session has ended in which the daemon may have held memory, and no later session
            has confirmed a release: a lane may still copy.
    """

    def __init__(self) -> None:
        self.state = RegistrationState.NONE
        self.message: Register | None = None
        self.memory = Descriptors(())
        self.refusal: Error | None = None
        self.has_waiter = False
        self.was_lost = False

    @property
    def is_registered(self) -> bool:
        """Whether the daemon holds the requested memory."""
        return self.state >= RegistrationState.REGISTERED

    @property
    def is_refused(self) -> bool:
        """Whether the daemon has refused the memory for good, and `register` has not raised yet."""
        return self.state is RegistrationState.REFUSED

    @property
    def obstacle(self) -> str:
        """Why the daemon does not hold the memory; empty if it has not refused."""
        if self.message is None:
            return NOTHING_REGISTERED
        return self.refusal.text if self.refusal else ""

    def request(self, message: Register, memory: Descriptors) -> None:
        """Set the registration to make; memory held before is released first."""
        self.message, self.memory, self.refusal, self.has_waiter = message, memory, None, True
        if self.state is RegistrationState.NONE:
            self.state = RegistrationState.WAITING

    def replace(self, message: Register, memory: Descriptors) -> None:
        """Request this registration instead of one that the daemon has just refused."""
        self.message, self.memory = message, memory
        self.state = RegistrationState.WAITING

    def drop(self) -> None:
        """Request no registration; memory that the daemon may hold is released."""
        self.message, self.memory = None, Descriptors(())
        may_be_held = self.state >= RegistrationState.REQUESTED
        self.state = RegistrationState.LEAVING if may_be_held else RegistrationState.NONE

    def next_request(self) -> tuple[Register | Unregister, Descriptors] | None:
        """Return the request to send now, and its descriptors; None: there is none."""
        if self.state is RegistrationState.LEAVING:
            return Unregister(), Descriptors(())
        if self.state is not RegistrationState.WAITING or self.message is None:
            return None
        self.state = RegistrationState.REQUESTED
        return self.message, self.memory

    def on_answered(self, reply: Message) -> bool:
        """Process the answer to a request; return whether to send `Register` again later."""
        if self.state is RegistrationState.REQUESTED and isinstance(reply, Registered):
            self.state, self.refusal = RegistrationState.REGISTERED, None
        elif self.state is RegistrationState.REQUESTED and isinstance(reply, Error):
            self.refusal = reply
            self._settle()
            if not self.has_waiter or reply.code in TRANSIENT_CODES:
                return True
            self.drop()
            self.state = RegistrationState.REFUSED
        elif self.state is RegistrationState.LEAVING and isinstance(reply, Error):
            self._settle()
        return False

    def take_refusal(self) -> Error | None:
        """Return the final refusal, if any, and go from REFUSED to NONE."""
        if not self.is_refused:
            return None
        self.state = RegistrationState.NONE
        return self.refusal

    def on_released(self) -> None:
        """Record that the daemon has released all memory."""
        self.was_lost = False
        if self.state is RegistrationState.LEAVING:
            self._settle()

    def on_session_lost(self) -> None:
        """Record that the session has ended; the daemon releases its memory later by itself."""
        if self.state >= RegistrationState.REQUESTED:
            self.was_lost = True
            self._settle()

    def set_attached(self, *, attached: bool) -> None:
        """Record whether all ranks of the engine are registered; ignored unless this one is."""
        if self.is_registered:
            self.state = RegistrationState.ATTACHED if attached else RegistrationState.REGISTERED

    def _settle(self) -> None:
        has_request = self.message is not None
        self.state = RegistrationState.WAITING if has_request else RegistrationState.NONE


def check_layout(layout: RankLayout) -> RankLayout:
    """Check a layout, its fields' types too; return an equal one.

    Raises:
        UsageError: it is invalid.
    """
    layout = check_fields("layout", layout, RankLayout)
    try:
        validate_layout(layout)
    except LayoutError as error:
        raise UsageError(f"the layout cannot be served: {error}") from error
    return layout


def register_message(
    memory: Sequence[Memory],
    layout: RankLayout,
    *,
    fingerprint: Fingerprint,
    rank: int,
    world_size: int,
    stage: int,
    temporary: bool,
) -> tuple[Register, Descriptors]:
    """Return the `Register` message of one rank, and duplicates of its memory's descriptors.

    Each file or allocation has one descriptor. The message numbers them from 1 on: number 0 is the
    control page's, which the caller puts before them.

    Raises:
        UsageError: the memory does not fit the layout, or an argument is invalid.
        UnsupportedMemory: the limit of open files leaves no room for the descriptors.
    """
    layout = check_layout(layout)
    fingerprint = check_fields("fingerprint", fingerprint, Fingerprint)
    for field in fingerprint.__struct_fields__:
        name = getattr(fingerprint, field)
        if character := unprintable(name):
            raise UsageError(
                f"fingerprint.{field}={shown(name)} has a character that cannot be shown,"
                f" {character}"
            )
    if len(memory) != len(layout.storages):
        raise UsageError(
            f"memory has {len(memory)} items, the layout {len(layout.storages)} storages;"
            " give one for each, in the layout's order"
        )
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
    """Return the handle of each storage, and the descriptors, numbered in handles from 1 on."""
    numbers: dict[object, int] = {}  # by file or allocation, so that each is sent once
    fds: list[int] = []
    handles: list[Handle] = []
    for index, (storage, nbytes) in enumerate(zip(memory, layout.storages, strict=True)):
        if not isinstance(storage, Memory) or storage.closed:
            raise UsageError(
                f"memory[{index}]={shown(storage)}: open HostMemory or DeviceMemory is needed"
            )
        if storage.device != memory[0].device:
            raise UsageError(
                f"memory[{index}] is on {storage.device}, memory[0] on {memory[0].device}: the"
                " memory of one worker is on one device"
            )
        if storage.nbytes < nbytes:
            raise UsageError(
                f"memory[{index}] has {storage.nbytes} bytes, the layout's storage {index} has"
                f" {nbytes}"
            )
        for fd, identity in zip(storage.fds, storage.identities, strict=True):
            if identity not in numbers:
                fds.append(fd)
                numbers[identity] = len(fds)
        handles.append(storage.handle([numbers[identity] for identity in storage.identities]))
    if len(fds) >= MAX_DESCRIPTORS:
        raise UsageError(
            f"the memory lies in {len(fds)} files or allocations, {MAX_DESCRIPTORS - 1} at most can"
            f" be registered; put tensors into fewer storages, or {LARGER_ALLOCATIONS}"
        )
    return handles, fds


def check_fields(name: str, value: object, kind: type[T]) -> T:
    """Check that all fields of a struct have the types that they are declared with."""
    if not isinstance(value, kind):
        raise UsageError(f"{name}={shown(value)}: a {kind.__name__} is needed")
    try:
        plain = msgspec.to_builtins(value, builtin_types=(bytes,))
        return msgspec.convert(plain, kind, builtin_types=(bytes,))
    except (msgspec.ValidationError, TypeError, ValueError, RecursionError) as error:
        raise UsageError(
            f"{name}: {error}; its numbers must be plain int, its names str"
        ) from error
