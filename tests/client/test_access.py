"""A process that may not connect to the daemon: it learns why, and what to do, at once."""

import grp
import logging
import os
import time
from collections.abc import Iterator

import pytest

from kvd_client import HostMemory, Scheduler, Unavailable, Worker
from tests.client.conftest import FINGERPRINT, LAYOUT
from tests.client.fake_daemon import FakeDaemon
from tests.daemon.users import OTHER_UID, as_stranger, needs_root
from tests.waiting import DEADLINE, PATIENCE, eventually

GROUP = next((group for group in grp.getgrall() if group.gr_gid not in {0, 65534}), None)

pytestmark = [needs_root, pytest.mark.skipif(GROUP is None, reason="there is no other group")]


@pytest.fixture
def denied(daemon: FakeDaemon) -> Iterator[str]:
    """What a stranger is told: the daemon's directory is its group's; all else on the way is open.

    Within the test this process is the stranger's.
    """
    assert GROUP is not None
    path = daemon.runtime_dir
    path.parent.chmod(0o711)
    os.chown(path, 0, GROUP.gr_gid)
    path.chmod(0o750)
    with as_stranger():
        yield (
            f"uid {OTHER_UID} may not enter {path} (mode 0750, group {GROUP.gr_name}):"
            f" usermod -aG {GROUP.gr_name} {OTHER_UID}, then log in again"
        )


def test_a_required_registration_that_is_denied_is_not_waited_for(
    daemon: FakeDaemon, memory: HostMemory, denied: str
) -> None:
    """The error is the reason with its remedy, long before the time is out."""
    began = time.monotonic()
    with Worker(daemon.runtime_dir, "engine", 0, 1, deadline=DEADLINE) as worker:
        with pytest.raises(Unavailable) as raised:
            worker.register([memory], LAYOUT, FINGERPRINT, required=True, timeout=PATIENCE)
        assert str(raised.value) == denied
    assert time.monotonic() - began < PATIENCE / 2


def test_the_log_says_once_why_it_is_denied_and_when_it_is_not_any_more(
    daemon: FakeDaemon, denied: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Both are warnings, `wait_attached` says the same at once, and no restart is needed."""
    caplog.set_level(logging.INFO)
    began = time.monotonic()
    with Scheduler(daemon.runtime_dir, "engine", deadline=DEADLINE) as scheduler:
        assert scheduler.wait_attached(PATIENCE).why == denied
        assert time.monotonic() - began < PATIENCE / 2
        os.seteuid(0)
        eventually(lambda: scheduler.connected)
    first, second = caplog.records
    assert first.getMessage() == f"kvd: not connected, every lookup misses: {denied}"
    assert second.getMessage().startswith("kvd: connected: ")
    assert [first.levelno, second.levelno] == [logging.WARNING, logging.WARNING]
