"""Why an engine is not attached, for callers that wait for it."""

from dataclasses import dataclass

from kvd_client.session import Session
from kvd_proto.messages import Status, StatusReport


@dataclass(frozen=True, slots=True)
class AttachState:
    """How waiting ended: true where the engine is attached; else `why` is what is missing."""

    attached: bool
    why: str = ""

    def __bool__(self) -> bool:
        return self.attached

    def __str__(self) -> str:
        return self.why or "attached"


def why_not_attached(session: Session, refusal: str = "") -> AttachState:
    """Return why the engine is not attached; the daemon is asked if there is one.

    Args:
        session: of the engine.
        refusal: why this worker's registration was refused, if it was.
    """
    where = session.runtime_dir
    if session.closed:
        return AttachState(False, "this session was closed meanwhile")
    if session.refusal:
        return AttachState(False, f"the daemon in {where} refuses: {session.refusal}")
    if not session.connected:
        return AttachState(False, f"no daemon answers in {where}; is `kvd serve` running there?")
    if refusal:
        return AttachState(False, f"the registration is refused: {refusal}")
    reply = session.request(Status())
    if not isinstance(reply, StatusReport):
        return AttachState(False, f"the daemon in {where} did not answer in time")
    try:
        return AttachState(False, _missing(reply, session.engine))
    except (KeyError, TypeError):  # a daemon of another version
        return AttachState(False, f"engine {session.engine!r} is not complete yet")


def _missing(report: StatusReport, name: str) -> str:
    engine = next((e for e in report.status["engines"] if e["name"] == name), None)
    if engine is None or not engine["world_size"]:
        return f"no rank of engine {name!r} is registered; do its workers use this name?"
    if engine["missing_ranks"]:
        ranks = ", ".join(map(str, engine["missing_ranks"]))
        return f"engine {name!r} lacks rank {ranks} of {engine['world_size']}"
    devices = {session["device"] for session in engine["sessions"]}
    down = [
        f"lane {lane['device']} is {lane['state']}"
        for lane in report.status["lanes"]
        if lane["device"] in devices and not lane["up"]
    ]
    return "; ".join(down) or f"engine {name!r} is being attached; wait longer"
