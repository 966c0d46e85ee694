"""The states of a worker's registration: who asks, answers, leaves and is lost, in any order."""

from collections.abc import Callable

import pytest

from kvd_client.memory import Descriptors, HostMemory
from kvd_client.registration import RegistrationState, WorkerRegistration, register_message
from kvd_proto.messages import Error, ErrorCode, Registered, Unregister
from tests.client.conftest import FINGERPRINT, LAYOUT

Event = Callable[[WorkerRegistration], object]
State = RegistrationState


def answer(reply: Registered | Error) -> Event:
    """The daemon answers the registration."""
    return lambda held: held.on_answered(reply)


def nobody_waits(held: WorkerRegistration) -> None:
    """`register` has returned."""
    held.has_waiter = False


ask: Event = WorkerRegistration.next_request
drop: Event = WorkerRegistration.drop
lose: Event = WorkerRegistration.on_session_lost
release: Event = WorkerRegistration.on_released
GOOD, attach = answer(Registered(missing_ranks=())), lambda held: held.set_attached(attached=True)
BAD = answer(Error(code=ErrorCode.BAD_LAYOUT, text="never"))
LATER = answer(Error(code=ErrorCode.LANE_LOST, text="not yet"))


@pytest.mark.parametrize(
    ("events", "state", "lost"),
    [
        ([drop], State.NONE, False),
        ([lose], State.WAITING, False),
        ([ask], State.REQUESTED, False),
        ([ask, lose], State.WAITING, True),
        ([ask, LATER], State.WAITING, False),
        ([ask, BAD, lose], State.REFUSED, False),
        ([ask, BAD, WorkerRegistration.take_refusal], State.NONE, False),
        ([nobody_waits, ask, BAD], State.WAITING, False),
        ([ask, GOOD], State.REGISTERED, False),
        ([ask, GOOD, attach], State.ATTACHED, False),
        ([ask, GOOD, attach, lose, drop], State.NONE, True),
        ([attach], State.WAITING, False),
        ([ask, drop, GOOD], State.LEAVING, False),
        ([ask, drop, attach], State.LEAVING, False),
        ([ask, drop, BAD], State.NONE, False),
        ([ask, drop, lose], State.NONE, True),
        ([ask, GOOD, drop, ask], State.LEAVING, False),
        ([ask, lose, ask, GOOD, drop, release], State.NONE, False),
        ([lose, ask, LATER, ask, lose, release, GOOD], State.WAITING, False),
    ],
)
def test_events_lead_from_state_to_state(events: list[Event], state: State, lost: bool) -> None:
    """`lost` is what keeps `unregister` from saying that memory is free."""
    held = WorkerRegistration()
    memory = HostMemory.allocate(LAYOUT.storages[0])
    message, _ = register_message(
        [memory], LAYOUT, FINGERPRINT, rank=0, world_size=1, stage=0, temporary=False
    )
    held.request(message, Descriptors(()))
    for event in events:
        event(held)
    assert (held.state, held.was_lost) == (state, lost)
    if state is State.LEAVING:  # what is wanted next waits until the daemon has let go
        held.request(message, Descriptors(()))
        assert isinstance((held.next_request() or [None])[0], Unregister)
        held.on_released()
        assert (held.next_request() or [None])[0] is message
    memory.close()
