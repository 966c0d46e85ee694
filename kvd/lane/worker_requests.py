"""What workers ask of a lane: jobs, to cancel them, to wait for them.

Whatever comes in, nothing but its sender is disturbed: a frame that is no request is dropped,
one that makes no sense is refused.
"""

import logging
import os
from functools import partial

from kvd.errors import LaneError, Refused
from kvd.lane.jobs import Reply, refused_chunks
from kvd.lane.reports import TEXT_LIMIT, Reports
from kvd.lane.workers import Worker, Workers
from kvd.wire.router import Received
from kvd_proto.codec import REQUESTS
from kvd_proto.errors import DecodeError, JobShapeError, VersionMismatch
from kvd_proto.messages import (
    Cancel,
    Error,
    ErrorCode,
    Job,
    JobStatus,
    Load,
    Message,
    Ok,
    Ping,
    Pong,
    Store,
    Wait,
)

_log = logging.getLogger(__name__)


class Requests:
    """Serves what comes over the workers' socket.

    Args:
        reports: where answers go; of the runner that takes the jobs.
        workers: who may ask.
    """

    def __init__(self, reports: Reports, workers: Workers) -> None:
        self._reports = reports
        self._runner = reports.runner
        self._workers = workers

    def serve(self, received: Received) -> None:
        """Serve one message, then report what ended by it."""
        try:
            header = REQUESTS.decode_header(received.frame)
        except DecodeError as error:
            self._reports.counts.dropped_frames += 1
            pid, uid = self._reports.router.peer(received.identity)
            _log.warning("a message of pid %d, uid %d, cannot be read: %s", pid, uid, error)
            return
        # The token proves that the sender means this boot of the daemon: it was made by it.
        worker = self._workers.by_token(header.session)
        if worker is not None and not worker.requests.is_new(header.request_id):
            self._reports.counts.dropped_frames += 1
            return
        reply = partial(self._reports.reply, received.identity, header)
        try:
            message = REQUESTS.decode_body(header, received.frame)
            if worker is None:
                raise Refused(ErrorCode.BAD_SESSION, "no worker of this lane has this token")
            self._reports.router.prove(received.identity)
            self._carry_out(worker, message, header.request_id, reply)
        except Refused as error:
            reply(Error(code=error.code, text=str(error)))
        except DecodeError as error:
            bad_version = isinstance(error, VersionMismatch)
            code = ErrorCode.BAD_VERSION if bad_version else ErrorCode.BAD_MESSAGE
            reply(Error(code=code, text=str(error)[:TEXT_LIMIT]))
        except Exception:  # noqa: BLE001  # one request must not end the other engines' lane
            _log.exception("request %d could not be served", header.request_id)
            text = "a bug in the lane; its log has the details"
            reply(Error(code=ErrorCode.INTERNAL, text=text))
        self._reports.report_ended()

    def _carry_out(self, worker: Worker, message: Message, number: int, reply: Reply) -> None:
        match message:
            case Store() | Load():
                self._job(worker, message, reply)
            case Ping():
                reply(Pong(pid=os.getpid()))
            case Cancel():
                for job in self._runner.find(worker, message.jobs):
                    self._runner.stop(job, JobStatus.CANCELLED, "cancelled")
                reply(Ok())
            case Wait():
                jobs = self._runner.find(worker, message.jobs)
                # Ended, or never came; these must not begin after the answer.
                if len(jobs) < len(set(message.jobs)):
                    worker.requests.close_before(number)
                for job in jobs:
                    self._runner.prioritize(job)
                self._runner.when_ended(jobs, lambda: reply(Ok()))
            case _:
                text = f"a lane serves jobs, not {type(message).__name__}"
                raise Refused(ErrorCode.BAD_STATE, text)

    def _job(self, worker: Worker, request: Job, reply: Reply) -> None:
        try:
            self._runner.submit(worker, request, reply)
        except (JobShapeError, LaneError) as error:
            self._reports.refuse_job(request, reply, str(error))
            shapeless = isinstance(error, JobShapeError) and isinstance(request, Store)
            if shapeless and worker.binding is not None:
                chunks, which = refused_chunks(worker, worker.binding, request)
                self._reports.shares.add(worker, worker.binding, chunks, which, ok=False)
