"""What workers ask of a lane: jobs, to cancel them, to wait for them.

Whatever comes in, nothing but its sender is disturbed: a frame that is no request is dropped,
one that makes no sense is refused.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

from kvd.errors import LaneError
from kvd.lane.jobs import ReplyTo, refused_shares
from kvd.lane.reports import Reports
from kvd.lane.workers import Worker, Workers
from kvd.wire.router import Received
from kvd_proto.codec import REQUESTS, Header
from kvd_proto.errors import DecodeError, JobShapeError, VersionMismatch
from kvd_proto.messages import (
    Cancel,
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
        self._handlers: dict[type[Message], Callable[[Worker, Any, ReplyTo], None]] = {
            Store: self._job,
            Load: self._job,
            Cancel: self._cancel,
            Wait: self._wait,
        }

    def serve(self, received: Received) -> None:
        """Serve one message, then report what ended by it."""
        self._frame(received.identity, received.frame)
        self._reports.report_ended()

    def _frame(self, identity: bytes, frame: bytes) -> None:
        try:
            header = REQUESTS.decode_header(frame)
        except DecodeError:
            self._reports.counts.dropped_frames += 1
            return
        # The token proves that the sender means this boot of the daemon: it was made by it.
        reply = ReplyTo(identity, header.request_id, header.boot_id)
        worker = self._workers.by_token(header.session)
        if worker is not None and not worker.requests.is_new(header.request_id):
            self._reports.counts.dropped_frames += 1
            return
        try:
            self._request(worker, header, frame, reply)
        except VersionMismatch as error:
            self._reports.refuse(reply, ErrorCode.BAD_VERSION, str(error))
        except DecodeError as error:
            self._reports.refuse(reply, ErrorCode.BAD_MESSAGE, str(error))
        except Exception:  # noqa: BLE001  # one request must not end the other engines' lane
            _log.exception("request %d could not be served", header.request_id)
            self._reports.refuse(
                reply, ErrorCode.INTERNAL, "a bug in the lane; its log has the details"
            )

    def _request(self, worker: Worker | None, header: Header, frame: bytes, reply: ReplyTo) -> None:
        message = REQUESTS.decode_body(header, frame)
        handler = self._handlers.get(type(message))
        if worker is None:
            self._reports.refuse(
                reply, ErrorCode.BAD_SESSION, "no worker of this lane has this token"
            )
            return
        self._reports.router.prove(reply.identity)
        if isinstance(message, Ping):
            self._reports.reply(reply, Pong(pid=os.getpid()))
        elif handler is None:
            name = type(message).__name__
            self._reports.refuse(reply, ErrorCode.BAD_STATE, f"a lane serves jobs, not {name}")
        else:
            handler(worker, message, reply)

    def _job(self, worker: Worker, request: Job, reply: ReplyTo) -> None:
        try:
            self._runner.submit(worker, request, reply)
        except JobShapeError as error:
            self._reports.refuse_job(request, reply, str(error))
            if isinstance(request, Store) and worker.binding is not None:
                for share in refused_shares(worker, worker.binding, request):
                    self._reports.tell_broker(share)
        except LaneError as error:
            self._reports.refuse_job(request, reply, str(error))

    def _cancel(self, worker: Worker, request: Cancel, reply: ReplyTo) -> None:
        named = [self._runner.find(worker, number) for number in set(request.jobs)]
        for job in named:
            if job is not None:
                self._runner.stop(job, JobStatus.CANCELLED, "cancelled")
        self._reports.reply(reply, Ok())

    def _wait(self, worker: Worker, request: Wait, reply: ReplyTo) -> None:
        named = [self._runner.find(worker, number) for number in dict.fromkeys(request.jobs)]
        jobs = [job for job in named if job is not None]
        if len(jobs) < len(named):  # ended, or never came; these must not begin after the answer
            worker.requests.close_before(reply.request_id)
        for job in jobs:
            self._runner.prioritize(job)
        self._runner.when_ended(jobs, lambda: self._reports.reply(reply, Ok()))

    def __repr__(self) -> str:
        return f"<Requests of {self._workers!r}>"
