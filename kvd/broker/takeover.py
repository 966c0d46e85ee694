"""The new daemon's side of a handover: try everything, ask, wait for the lock.

The old daemon's side is `kvd.core.handover`. As long as it has not left, the end of the
connection to it, by whatever cause, has it serve on. That connection's end from the
other side says that it has ended or does nothing more but end; then only the lock counts.
"""

import logging
import os
import time
from pathlib import Path
from typing import Any

from kvd.broker.rehearsal import outlook, rehearse, rehearse_address
from kvd.broker.runtime_dir import RuntimeDir, Turn
from kvd.control import Control
from kvd.errors import (
    AlreadyRunning,
    HandoverFailed,
    HungUp,
    NotRunning,
    Refused,
    TurnedAway,
)
from kvd.settings import Settings
from kvd_proto.messages import (
    ConfigShown,
    ErrorCode,
    HandingOver,
    HandOver,
    Ping,
    Pong,
    ShowConfig,
)

log = logging.getLogger("kvd.broker")

ANSWER_SECONDS = 5.0
AGAIN_SECONDS = 0.1
PING_SECONDS = 1.0
MARGIN_SECONDS = 10.0  # beyond what the old daemon allows itself
LEAVE_SECONDS = 60.0  # from its last word to the end of its process: lanes may have to unpin
GRACE_SECONDS = 1.0
_ASKED_FOR = ("drain_seconds", "http_listen", "pool_dir")


def take_over(runtime: RuntimeDir, settings: Settings, *, cold: bool) -> None:
    """Have the runtime directory, from the daemon that serves there if there is one.

    Args:
        runtime: not locked yet; locked afterwards.
        settings: of this daemon.
        cold: it begins without what is kept.

    Raises:
        ConfigError, PoolError: this daemon could not serve; nothing was asked of the other one.
        HandoverFailed: the other one cannot be asked, refuses, or does not leave; names its pid.
    """
    if _free(runtime):
        log.info("no daemon serves %s: nothing to take over, starting as usual", runtime.path)
        return
    rehearse(settings, runtime.path)
    control = _reach(runtime)
    if control is None:
        log.info("the daemon that served %s has ended: starting as usual", runtime.path)
        return
    with control:
        Takeover(runtime, control).run(settings, cold=cold)


class Takeover:
    """One handover.

    Args:
        runtime: the directory.
        control: the connection to the daemon that serves there; closed where it does not leave.
    """

    def __init__(self, runtime: RuntimeDir, control: Control) -> None:
        self._runtime = runtime
        self._control = control
        self._pid = runtime.holder()

    def run(self, settings: Settings, *, cold: bool) -> None:
        """See `take_over`."""
        began = time.monotonic()
        theirs = self._settings()
        rehearse_address(settings, theirs)
        empty = outlook(settings, self._runtime.path, theirs, cold=cold)
        granted = self._ask(float(theirs["drain_seconds"]))
        if not granted.kept:
            empty = "the daemon that serves keeps nothing (its keep_pool)"
        if empty:
            log.warning("the cache will start empty: %s", empty)
        log.info("pid %s hands over; it has up to %g s for that", self._pid, granted.seconds)
        turn = Turn(self._runtime)
        self._wait(turn, granted.seconds)
        self._runtime.lock_after(turn)
        seconds = time.monotonic() - began
        log.info("taken over from pid %s after %.1f s", self._pid, seconds)

    def _settings(self) -> dict[str, Any]:
        """The settings of the daemon that serves, by key."""
        try:
            shown = self._control.ask(ShowConfig(), ConfigShown).config["settings"]
        except Refused as error:
            raise HandoverFailed(f"the daemon with pid {self._pid} refuses: {error}") from error
        except NotRunning as error:
            raise self._deaf(str(error)) from error
        theirs = {key: entry["value"] for key, entry in shown.items()}
        missing = [key for key in _ASKED_FOR if key not in theirs]
        if missing:
            raise self._other_version(f"it has no setting {missing[0]}")
        return theirs

    def _ask(self, drain_seconds: float) -> HandingOver:
        try:
            request = HandOver(boot_id=self._control.boot_id, pid=os.getpid())
            return self._control.ask(request, HandingOver)
        except TurnedAway as error:
            raise self._other_version(str(error)) from error
        except NotRunning as error:
            raise self._deaf(str(error)) from error
        except Refused as error:
            if error.code is ErrorCode.DRAINING:  # it leaves already, of its own accord
                return HandingOver(seconds=drain_seconds, kept=True)
            if error.code in (ErrorCode.BAD_MESSAGE, ErrorCode.BAD_VERSION):
                raise self._other_version(str(error)) from error
            raise HandoverFailed(
                f"the daemon with pid {self._pid} does not hand over: {error}"
            ) from error

    def _wait(self, turn: Turn, seconds: float) -> None:
        """Until the lock is there.

        Raises:
            HandoverFailed: the daemon does not leave.
        """
        end = time.monotonic() + seconds + MARGIN_SECONDS
        problem = f"it has not left within {seconds + MARGIN_SECONDS:g} s"
        try:
            while time.monotonic() < end:
                if self._control.wait(turn.done_fd, PING_SECONDS):
                    return
                self._control.ask(Ping(), Pong)  # frozen, or only slow?
        except HungUp:
            if turn.wait(LEAVE_SECONDS):
                return
            raise HandoverFailed(
                f"the daemon with pid {self._pid} has closed its sockets and has not ended within"
                f" {LEAVE_SECONDS:g} s; {_remedy(self._pid)}"
            ) from None
        except (NotRunning, Refused) as error:
            problem = str(error)
        self._control.close()  # it serves on, if it can
        if not turn.wait(GRACE_SECONDS):
            raise self._deaf(problem)

    def _deaf(self, problem: str) -> HandoverFailed:
        return HandoverFailed(_deaf_text(self._runtime.path, self._pid, problem))

    def _other_version(self, problem: str) -> HandoverFailed:
        return HandoverFailed(
            f"the daemon with pid {self._pid} is of a version that cannot hand over ({problem});"
            " it serves on. Upgrade by stop and start: kill it, then kvd serve; what is READY"
            " is kept"
        )


def _reach(runtime: RuntimeDir) -> Control | None:
    """A connection to the daemon that serves; None where it has ended and the lock is ours.

    One that is on its way up or out is met again in a moment.
    """
    end = time.monotonic() + ANSWER_SECONDS
    while True:
        try:
            return Control(runtime.path, timeout=ANSWER_SECONDS)
        except TurnedAway as error:
            raise HandoverFailed(
                f"the daemon with pid {runtime.holder()} cannot be asked to hand over: {error};"
                " it serves on. To upgrade all the same: kill it, then kvd serve; what is READY"
                " is kept"
            ) from error
        except NotRunning as error:
            problem = str(error)
        if _free(runtime):
            return None
        if time.monotonic() >= end:
            raise HandoverFailed(_deaf_text(runtime.path, runtime.holder(), problem))
        time.sleep(AGAIN_SECONDS)


def _free(runtime: RuntimeDir) -> bool:
    """Take the lock, if nobody has it."""
    try:
        runtime.lock()
    except AlreadyRunning:
        return False
    return True


def _deaf_text(path: Path, pid: str, problem: str) -> str:
    return (
        f"the daemon with pid {pid} holds {path} and does not hand over: {problem}; {_remedy(pid)}"
    )


def _remedy(pid: str) -> str:
    return f"if it hangs: kill -9 {pid}, then kvd serve; what is READY is kept"
