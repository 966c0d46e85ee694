"""What workers are told: answers, refusals, and the Done of every job that has ended."""

from kvd.lane.devices.device import Direction
from kvd.lane.jobs import ReplyTo
from kvd.lane.outbox import Outbox
from kvd.lane.runner import Runner
from kvd.lane.sockets import Sockets
from kvd.lane.tally import Tally
from kvd_proto.codec import WIRE
from kvd_proto.messages import Done, Error, ErrorCode, Job, JobStatus, Load, Message

TEXT_LIMIT = 1000


class Reports:
    """Replies over the workers' socket, counted.

    Args:
        sockets: to workers.
        runner: whose jobs are reported.
        outbox: the broker hears of shares too.
        tally: counts.
    """

    def __init__(self, sockets: Sockets, runner: Runner, outbox: Outbox, tally: Tally) -> None:
        self._sockets = sockets
        self._runner = runner
        self._outbox = outbox
        self._tally = tally

    def tell_ended(self) -> None:
        """Tell of every job that has ended, then do what waited for it."""
        for job in self._runner.take_ended():
            status, text = job.outcome
            self._tally.ended(job, status)
            started = job.started_ns or self._runner.now
            self.send(
                job.reply,
                Done(
                    job=job.request.job,
                    status=status,
                    text=text[:TEXT_LIMIT],
                    bytes=job.moved_bytes,
                    queued_ns=started - job.accepted_ns,
                    copy_ns=job.copy_ns,
                ),
            )
            if status is JobStatus.OK:
                self._tally.reported(job, self._runner.now)
            # After the reply: the worker is what waits, the broker makes chunks READY meanwhile.
            if job.direction is Direction.STORE:
                self._outbox.add(job.shares(ok=status is JobStatus.OK))
            for action in job.on_end:
                action()

    def refuse_job(self, request: Job, reply: ReplyTo, text: str) -> None:
        """A job is not taken, and why."""
        self._tally.refused(Direction.LOAD if isinstance(request, Load) else Direction.STORE)
        self.send(
            reply,
            Done(
                job=request.job,
                status=JobStatus.REFUSED,
                text=text[:TEXT_LIMIT],
                bytes=0,
                queued_ns=0,
                copy_ns=0,
            ),
        )

    def refuse(self, reply: ReplyTo, code: ErrorCode, text: str) -> None:
        """A request is not served, and why."""
        self.send(reply, Error(code=code, text=text[:TEXT_LIMIT]))

    def send(self, reply: ReplyTo, message: Message) -> None:
        """Answer a request; never waits, see `Sockets.send`."""
        frame = WIRE.encode(message, reply.request_id, reply.boot_id)
        self._sockets.send(reply.identity, frame)

    def __repr__(self) -> str:
        return f"<Reports of {self._runner!r}>"
