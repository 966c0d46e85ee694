"""A worker's registration: its message, and where it stands with the daemon.

`register` and `unregister` say what is wanted (`want`, `drop`); the keeper has the daemon hold that
and nothing else (`next_request`, `answered`, `released`). States, and what follows each event:

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

`released` leads from LEAVING to WAITING where memory is wanted, else to NONE.
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
from kvd_proto.printable import unprintable

NOTHING = "nothing is registered yet"
TRANSIENT = (ErrorCode.LANE_LOST, ErrorCode.NOT_READY, ErrorCode.DRAINING)


class RegistrationState(IntEnum):
    """Where a registration stands. From ASKED on the daemon may hold memory."""

    NONE = 0
    WAITING = 1  # to be sent, perhaps again
    REFUSED = 2  # for good; `register` raises
    ASKED = 3
    LEAVING = 4
    REGISTERED = 5
    ATTACHED = 6


class Registration:
    """The memory that a worker wants the daemon to hold, and what is known of it.

    All but `state` and `message` is used under the worker's lock.

    Attributes:
        state: changed by this object's methods alone.
        message: what is wanted; None: nothing.
        memory: its descriptors, closed when nobody sends them any more.
        refusal: the daemon's latest one since `want`; None: it has not refused.
        raises: `register` waits for the first answer: a refusal that is not transient is final.
        lost: a session has ended in which the daemon held memory, and no later one has released
            any: a lane may still copy.
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
        """Why the daemon does not hold the memory; empty where it has not said so."""
        if self.message is None:
            return NOTHING
        return self.refusal.text if self.refusal else ""

    def want(self, message: Register, memory: Descriptors) -> None:
        """Have this registered, after what there was is released; `register` waits for it."""
        self.message, self.memory, self.refusal, self.raises = message, memory, None, True
        if self.state is RegistrationState.NONE:
            self.state = RegistrationState.WAITING

    def drop(self) -> None:
        """Want nothing; what the daemon holds, or may hold, is to be released."""
        self.message, self.memory = None, Descriptors(())
        held = self.state >= RegistrationState.ASKED
        self.state = RegistrationState.LEAVING if held else RegistrationState.NONE

    def next_request(self) -> tuple[Register | Unregister, Descriptors] | None:
        """Return the request to send now, and the descriptors that go with it; None: nothing."""
        if self.state is RegistrationState.LEAVING:
            return Unregister(), Descriptors(())
        if self.state is not RegistrationState.WAITING or self.message is None:
            return None
        self.state = RegistrationState.ASKED
        return self.message, self.memory

    def answered(self, reply: Message) -> bool:
        """Process the answer to a `Register`; return whether it is to be sent again, later."""
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
        """Return the refusal that was final, if one was; memory may be wanted again."""
        if not self.refused:
            return None
        self.state = RegistrationState.NONE
        return self.refusal

    def released(self) -> None:
        """Note that the daemon has let go of all memory."""
        self.lost = False
        if self.state is RegistrationState.LEAVING:
            self._settle()

    def session_lost(self) -> None:
        """Note that the session has ended; what the daemon held it lets go of by itself, later."""
        if self.state >= RegistrationState.ASKED:
            self.lost = True
            self._settle()

    def set_attached(self, *, attached: bool) -> None:
        """Note whether all ranks of the engine are registered; nothing where this one is not."""
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
        return message, Descriptors(duplicated(fds))
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
