"""The states of a worker's registration, against the table in its module."""

from collections.abc import Callable

import pytest

from kvd_client.memory import Descriptors, HostMemory
from kvd_client.registration import RegistrationState, WorkerRegistration, register_message
from kvd_proto.messages import Error, ErrorCode, Register, Registered, Unregister
from tests.client.conftest import FINGERPRINT, LAYOUT

Event = Callable[[WorkerRegistration], object]
State = RegistrationState
BAD = Error(code=ErrorCode.BAD_LAYOUT, text="never")
LATER = Error(code=ErrorCode.LANE_LOST, text="not yet")


@pytest.fixture
def message() -> Register:
    """One rank's registration."""
    memory = [HostMemory.allocate(LAYOUT.storages[0])]
    return register_message(
        memory, LAYOUT, FINGERPRINT, rank=0, world_size=1, stage=0, temporary=False
    )[0]


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


@pytest.mark.parametrize(
    ("events", "state", "lost"),
    [
        ([], State.WAITING, False),
        ([drop], State.NONE, False),
        ([lose], State.WAITING, False),
        ([ask], State.REQUESTED, False),
        ([ask, lose], State.WAITING, True),
        ([ask, answer(LATER)], State.WAITING, False),
        ([ask, answer(BAD)], State.REFUSED, False),
        ([ask, answer(BAD), lose], State.REFUSED, False),
        ([ask, answer(BAD), WorkerRegistration.take_refusal], State.NONE, False),
        ([nobody_waits, ask, answer(BAD)], State.WAITING, False),
        ([ask, GOOD], State.REGISTERED, False),
        ([ask, GOOD, lose], State.WAITING, True),
        ([ask, GOOD, attach], State.ATTACHED, False),
        ([ask, GOOD, attach, lose, drop], State.NONE, True),
        (
            [ask, GOOD, attach, lambda held: held.set_attached(attached=False)],
            State.REGISTERED,
            False,
        ),
        ([attach], State.WAITING, False),
        ([ask, drop], State.LEAVING, False),
        ([ask, drop, GOOD], State.LEAVING, False),
        ([ask, drop, attach], State.LEAVING, False),
        ([ask, drop, answer(BAD)], State.NONE, False),
        ([ask, drop, lose], State.NONE, True),
        ([ask, GOOD, drop, ask], State.LEAVING, False),
        ([ask, GOOD, drop, release], State.NONE, False),
        ([ask, lose, ask, GOOD, drop, release], State.NONE, False),
        ([lose, ask, answer(LATER), ask, lose, release, GOOD], State.WAITING, False),
    ],
)
def test_events_lead_from_state_to_state(
    message: Register, events: list[Event], state: State, lost: bool
) -> None:
    """As the table says; `lost` is what keeps `unregister` from saying that memory is free."""
    held = WorkerRegistration()
    held.request(message, Descriptors(()))
    for event in events:
        event(held)
    assert (held.state, held.was_lost) == (state, lost)
    assert held.is_registered is (state in {State.REGISTERED, State.ATTACHED})


def test_what_is_wanted_next_waits_until_the_daemon_has_let_go(message: Register) -> None:
    """The keeper releases before it registers."""
    held = WorkerRegistration()
    held.request(message, Descriptors(()))
    for event in (ask, GOOD, drop):
        event(held)
    held.request(message, Descriptors(()))
    request = held.next_request()
    assert request is not None
    assert isinstance(request[0], Unregister)
    held.on_released()
    request = held.next_request()
    assert request is not None
    assert request[0] is message
    assert held.next_request() is None
