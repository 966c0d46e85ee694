"""Life cycles of sessions and jobs: only the table's arrows, and nothing changes on a wrong one."""

import pytest

from kvd_proto.errors import IllegalTransition
from kvd_proto.states import JOB, SESSION, JobEvent, JobState, Machine, SessionEvent, SessionState


def test_a_job_that_is_stopped_drains_before_it_ends() -> None:
    """Bytes that may be moving are waited for."""
    job = Machine(JOB, JobState.QUEUED)
    events = (JobEvent.START, JobEvent.STOP, JobEvent.DRAINED)
    assert list(map(job.fire, events)) == [JobState.COPYING, JobState.DRAINING, JobState.ENDED]


def test_an_illegal_event_changes_nothing_and_names_the_legal_ones() -> None:
    """The error names the event, the state and what is allowed there."""
    session = Machine(SESSION, SessionState.CONNECTED)
    with pytest.raises(
        IllegalTransition, match="register in state connected; allowed: hello, lost"
    ):
        session.fire(SessionEvent.REGISTER)
    assert session.state is SessionState.CONNECTED
    session.fire(SessionEvent.LOST)
    with pytest.raises(IllegalTransition, match="hello in state closed; allowed: nothing"):
        session.fire(SessionEvent.HELLO)
