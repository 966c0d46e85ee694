"""`Worker`, the client of one rank of an engine: its KV memory, and the jobs that copy it.

`get_finished` reports every submitted job exactly once. A store that failed has stored nothing, or
with staging some whole chunks. A load that failed leaves its blocks undefined, and nothing writes
to them any more. Both are misses.
"""

import os
import time
from collections.abc import Iterable, Sequence
from functools import partial

from kvd_client.connection import Notice
from kvd_client.errors import (
    RegistrationError,
    Unavailable,
    UsageError,
    cause,
    check_collection,
    check_flag,
    check_int,
    check_seconds,
    get_logger,
    shown,
)
from kvd_client.job_router import JobRouter
from kvd_client.jobs import JobResult
from kvd_client.lane_link import LaneLink
from kvd_client.memory import Descriptors, Memory
from kvd_client.registration import (
    RegistrationState,
    WorkerRegistration,
    register_message,
)
from kvd_client.routes import AUTO, Route, Transfer, choose_route
from kvd_client.session import ClientSession
from kvd_client.staging import StagedJobs
from kvd_client.staging_layout import DEFAULT_STAGING_BYTES
from kvd_client.staging_memory import KvTensors
from kvd_client.tickets import ChunkBlocks, LoadTicket, StoreTicket, pack_chunks
from kvd_client.timeline import ControlPage
from kvd_proto.errors import JobShapeError
from kvd_proto.jobs import JobBlocks
from kvd_proto.layout import RankLayout
from kvd_proto.messages import (
    MAX_RANKS,
    Attached,
    Detached,
    Error,
    ErrorCode,
    Fingerprint,
    LaneUp,
    Load,
    Ok,
    Register,
    Store,
    Unregister,
)

REGISTER_SECONDS = 30.0
MAX_JOB_SECONDS = 600.0

log = get_logger()


class Worker(ClientSession):
    """One rank of an engine.

    All methods may be called from any thread. They raise `UsageError` for invalid arguments, and
    after `close`.

    Args:
        runtime_dir: the daemon's runtime directory.
        engine: the engine's name, the same as its scheduler's.
        rank: this worker's index among those that hold shares of a chunk, from 0.
        world_size: how many there are.
        deadline: seconds to wait for an answer of the daemon before the session is given up.
        job_timeout: seconds after which a store that has not ended is voided.

    Raises:
        UsageError: an invalid argument. An absent daemon is no error.
    """

    _kind = "worker"

    def __init__(
        self,
        runtime_dir: str | os.PathLike[str],
        engine: str,
        rank: int,
        world_size: int,
        *,
        deadline: float = 1.0,
        job_timeout: float = 30.0,
    ) -> None:
        check_int("world_size", world_size, 1, MAX_RANKS)
        check_int("rank", rank, 0, world_size - 1)
        self.job_timeout = check_seconds("job_timeout", job_timeout, MAX_JOB_SECONDS, positive=True)
        self.rank = rank
        self.world_size = world_size
        super().__init__(runtime_dir, engine, deadline)
        self._control = ControlPage()
        self._router = JobRouter(self._control, self.job_timeout, deadline)
        self.timeline = self._router.timeline
        self._jobs = self._router.lane_jobs
        self._registration = WorkerRegistration()
        self._start()

    # ----------------------------------------------------------- registration

    def register(
        self,
        memory: Sequence[Memory] | KvTensors,
        layout: RankLayout,
        fingerprint: Fingerprint,
        *,
        stage: int = 0,
        temporary: bool = False,
        required: bool = False,
        timeout: float = REGISTER_SECONDS,
        transfer: Transfer = AUTO,
        staging_bytes: int = DEFAULT_STAGING_BYTES,
    ) -> bool:
        """Register this rank's KV memory with the daemon, and with each later daemon automatically.

        Args:
            memory: tensors of any device, as `kvd_client.torch_memory.describe_torch` returns them;
                or memory to export: `memory[i]` is storage i of the layout, all of it on one
                device, and descriptors may be closed afterwards.
            layout: this rank's tensors and groups.
            fingerprint: engines share chunks only if theirs are equal.
            stage: the pipeline stage of this rank.
            temporary: chunks are shared with temporary engines only, and dropped when the last
                of them leaves.
            required: wait for a daemon if there is none, and raise if the memory is not registered
                in time.
            timeout: seconds to wait for the registration.
            transfer: of tensors: "export": the daemon maps their memory; "staging": this worker
                copies them through host memory that the daemon maps; "auto": export, or staging if
                the memory cannot be exported or the daemon refuses memory of this device. One log
                line says so.
            staging_bytes: of host memory for staging, at most.

        Returns:
            Whether the memory is registered now. Without a daemon, and without `required`, this is
            false at once, and the memory is registered as soon as there is a daemon.

        Raises:
            UsageError: invalid memory or layout; a second registration.
            RegistrationError: the daemon refuses for good.
            Unavailable: `required`, and no registration within `timeout`; at once if this process
                may not connect to the daemon.
            UnsupportedMemory: memory that cannot be exported and must be; CUDA memory of a device
                whose streams cannot write to host memory; `staging_bytes` are too few.
            CudaError: the CUDA driver failed.
        """
        self._check_open()
        message_of = partial(
            register_message,
            fingerprint=fingerprint,
            rank=self.rank,
            world_size=self.world_size,
            stage=stage,
            temporary=check_flag("temporary", temporary),
        )
        required = check_flag("required", required)
        timeout_s = check_seconds("timeout", timeout)
        with self._changed:
            self._check_unregistered()
        route = choose_route(
            memory,
            layout,
            message_of,
            self._control,
            transfer=transfer,
            staging_bytes=staging_bytes,
        )
        with self._changed:
            try:
                self._check_unregistered()  # again: another thread may have been faster
                self._request_registration(route)
            except BaseException:
                route.close()
                raise
        try:
            with self._changed:
                return self._finish_register(timeout_s, required=required)
        except BaseException:
            with self._changed:
                # A registration of staging pages must not outlive the way: the lane would take
                # the numbers of blocks for those of pages.
                self._registration.drop()
                self._wake()
                staged = self._router.leave()
            self._router.close_staged(staged, self.deadline)
            raise

    def _check_unregistered(self) -> None:
        if self._registration.message is not None or self._registration.is_refused:
            raise UsageError("this worker is registered already; call unregister() first")

    def _request_registration(self, route: Route, *, in_place: bool = False) -> None:
        """Let jobs go this way, and request its registration. Called under `_changed`.

        With `in_place` it replaces a registration that the daemon has just refused.
        """
        registration = self._registration
        self._router.take(route, lambda: registration.is_registered, (self.rank, self.world_size))
        if in_place:
            registration.replace(route.message, route.descriptors)
        else:
            registration.request(route.message, route.descriptors)
            self._wake()

    def _finish_register(self, timeout: float, *, required: bool) -> bool:
        """Wait for a requested registration; result and errors as `register`."""
        registration = self._registration
        refusal = self._wait_registered(registration, timeout, required=required)
        if refusal is not None:
            raise RegistrationError(refusal.code, refusal.text)
        if required and not self.registered:
            no_answer = f"the daemon in {self.runtime_dir} has not answered"
            reason = registration.obstacle or no_answer
            if not self.connected:
                reason = self._why_unreachable
            registration.drop()
            self._give_up(self._connection, "the registration was given up")
            if not self._is_access_denied:
                reason = f"no registration within {timeout:g} s; {reason}"
            raise Unavailable(reason)
        return self.registered

    def _take_fallback(self, message: Register, reply: Error) -> bool:
        """Request staging in place of memory that the daemon can never map.

        Return whether there is something new to request. Called by the keeper.
        """
        with self._changed:
            prepare = self._router.fallback(message)
        if prepare is None or reply.code is not ErrorCode.BAD_LAYOUT:
            return False
        route: Route | None = None
        try:
            route = prepare(f"the daemon refuses this memory: {reply.text}")
            with self._changed:
                is_wanted = self._router.fallback(message) is prepare  # not left meanwhile
                if is_wanted:
                    self._request_registration(route, in_place=True)
                    return True
        except Exception as error:  # noqa: BLE001  # the refusal stands
            log.warning("staging is not possible either: %s", cause(error))
            with self._changed:
                self._router.drop_fallback(message)
        if route is not None:
            route.close()
        return False

    def _wait_registered(
        self, registration: WorkerRegistration, timeout: float, *, required: bool
    ) -> Error | None:
        """Wait until this rank is registered, refused or closed; without a daemon if `required`.

        Called under `_changed`. Return the daemon's final refusal; None also after `timeout`.
        """
        try:
            self._changed.wait_for(
                lambda: (
                    self.registered
                    or registration.is_refused
                    or self._closed_reason
                    or not (self.connected or (required and not self._is_access_denied))
                ),
                timeout,
            )
        finally:  # also if a signal handler raises
            registration.has_waiter = False
            refusal = registration.take_refusal()
        return refusal

    def unregister(self, timeout: float = REGISTER_SECONDS) -> bool:
        """Take the memory back, to free it or to put other memory in its place.

        Unfinished jobs are stopped, and `get_finished` reports them; new ones fail until `register`
        is called again. The engine's chunks stay.

        Args:
            timeout: seconds to wait for the daemon.

        Returns:
            Whether the memory is free: no copy touches it, nothing has it mapped. False if the
            daemon has not confirmed that in time, or was lost since `register`: it then releases
            the memory by itself, as for a process that has died.
        """
        self._check_open()
        timeout_s = check_seconds("timeout", timeout)
        end = time.monotonic() + timeout_s
        with self._changed:
            connection, registration = self._connection, self._registration
            registration.drop()
            staged = self._router.leave()
            self._wake()
        if staged is not None:  # the daemon has other memory mapped
            return self._router.close_staged(staged, timeout_s)
        with self._changed:
            leaving = RegistrationState.LEAVING
            self._changed.wait_for(
                lambda: registration.state is not leaving or self._closed_reason,
                max(0.0, end - time.monotonic()),
            )
            has_left = registration.state is not leaving and self._connection is connection
            return has_left and not registration.was_lost

    @property
    def registered(self) -> bool:
        """Whether the daemon holds this rank's memory and a lane serves it."""
        return self._registration.is_registered and self._jobs.has_lane

    @property
    def device(self) -> str | None:
        """The device of the memory that was passed to `register`; None before."""
        message = self._registration.message
        return None if message is None else message.device

    @property
    def transfer(self) -> Transfer | None:
        """Which way bytes go: "export" or "staging"; None: nothing is registered."""
        return self._router.transfer

    @property
    def transfer_reason(self) -> str:
        """Why staging was chosen in place of export; empty if it was not."""
        route = self._router.route
        return "" if route is None else route.reason

    def suspend(self, timeout: float = REGISTER_SECONDS) -> bool:
        """With staging: let no job touch the engine's memory until `resume`; it may be freed.

        Unfinished jobs are stopped, new ones fail. The registration stays, so `resume` needs none.

        Returns:
            Whether no copy touches the memory. False: one of the device has not ended in time.

        Raises:
            UsageError: the memory is exported; call `unregister`.
        """
        return self._staged_jobs("suspend").suspend(check_seconds("timeout", timeout))

    def resume(self) -> None:
        """Undo `suspend`, when the memory is back at the same addresses."""
        self._staged_jobs("resume").resume()

    def _staged_jobs(self, call: str) -> StagedJobs:
        self._check_open()
        if (staged := self._router.staged) is None:
            raise UsageError(f"{call}: the memory of this worker is not staged; use unregister()")
        return staged

    @property
    def attached(self) -> bool:
        """Whether all ranks of the engine are registered, and lanes serve them."""
        return self._registration.state is RegistrationState.ATTACHED and self.registered

    def _why_not_attached(self) -> str:
        if (reason := self._registration.obstacle) and self.connected and not self._closed_reason:
            return f"this rank is not registered: {reason}"
        return super()._why_not_attached()

    # ------------------------------------------------------------------- jobs

    def store(
        self,
        job_id: int,
        ticket: StoreTicket,
        groups: Sequence[ChunkBlocks],
        after: int | None = None,
    ) -> bool:
        """Submit a copy of the ticket's blocks into the pool; result and errors as `submit`.

        Args:
            job_id: the caller's number, free again once it was reported.
            ticket: what `prepare_store` returned, in this process or another one.
            groups: for each group of the layout its chunks and blocks; those of keys that are not
                in the ticket are left out.
            after: see `submit`.

        Raises:
            UsageError: as `submit`; also for keys and blocks that do not fit each other, a null
                block anywhere, too many blocks for one job, or if nothing is registered yet.
        """
        return self.submit(Store, job_id, self._pack(ticket, groups), after)

    def load(
        self,
        job_id: int,
        ticket: LoadTicket,
        groups: Sequence[ChunkBlocks],
        after: int | None = None,
        *,
        layerwise: bool = False,
        expedited: bool = False,
    ) -> bool:
        """Submit a copy of the ticket's chunks into their blocks; all else as `store`.

        With `layerwise` the layers are copied one after another, and `layers_loaded` counts them.
        With `expedited` the lane does the load before all others: `wait` for it.
        """
        blocks = self._pack(ticket, groups)
        return self.submit(Load, job_id, blocks, after, layerwise=layerwise, expedited=expedited)

    def submit(
        self,
        kind: type[Store] | type[Load],
        job_id: int,
        blocks: JobBlocks,
        after: int | None = None,
        *,
        layerwise: bool = False,
        expedited: bool = False,
    ) -> bool:
        """Submit a job: copy blocks into the pool, or chunks into blocks.

        Args:
            kind: `Store` or `Load`.
            job_id: the caller's number, free again once it was reported.
            blocks: made by `JobBlocks.of`. The layout's null block stands for a block of a chunk
                that is left out, before the first or after the last block that is copied.
            after: timeline number that must be reached before a block is touched, for CUDA memory
                from `timeline.signal_on`. None: the work on these blocks has finished, as is the
                case for CPU tensors.
            layerwise: for a load: copy layer by layer; `layers_loaded` counts the layers.
            expedited: the lane does this job first, a load before all other jobs. For what the
                engine stands still for.

        Returns:
            Whether a lane has the job. If not, `get_finished` reports it as failed: every
            submitted job is reported once, whatever is returned here.

        Raises:
            UsageError: arrays that do not fit each other, blocks that were not registered, the
                null block between two blocks of a chunk or in place of all of them, a job id in
                use.
        """
        self._check_open()
        if (kind is not Store and kind is not Load) or not isinstance(blocks, JobBlocks):
            raise UsageError(
                f"kind={shown(kind)}, blocks={shown(blocks)}: a job and its blocks are needed"
            )
        check_int("job_id", job_id, 0)
        if after is None:
            # A number that is reached already means "now". To signal a new number would also signal
            # the numbers reserved before it, whose work may not have finished.
            after = self.timeline.reached
        elif check_int("after", after, 0) > self.timeline.reserved:
            raise UsageError(
                f"after={after}: numbers up to {self.timeline.reserved} are reserved; take one from"
                " timeline.reserve(), or None"
            )
        message = self._registration.message
        if message is not None:
            try:
                blocks.check(message.layout)
            except JobShapeError as error:
                raise UsageError(str(error)) from error
        jobs = self._router.jobs
        is_registered = self._registration.is_registered
        return jobs.submit(
            kind,
            # The keeper may have changed the way meanwhile, and registered for that one.
            is_registered=is_registered and jobs is self._router.jobs,
            layerwise=check_flag("layerwise", layerwise) and kind is Load,
            expedited=check_flag("expedited", expedited),
            job=job_id,
            blocks=blocks,
            after=after,
            deadline_ms=max(1, round(self.job_timeout * 1000)),
        )

    def _pack(self, ticket: StoreTicket | LoadTicket, groups: Sequence[ChunkBlocks]) -> JobBlocks:
        self._check_open()
        message = self._registration.message
        if message is None:
            raise UsageError("nothing is registered yet; call register first")
        return pack_chunks(ticket, groups, message.layout)

    def layers_loaded(self, job_id: int) -> int:
        """Return how many layers of a layer-wise load have arrived, from shared memory.

        Layers are those of the layout's refs, and may be read as soon as they are counted. The
        load can still fail; then what was read is void. 0 for a job that is not running, whether
        or not it has ended.
        """
        return self._router.jobs.layers_loaded(job_id)

    def get_finished(self) -> list[JobResult]:
        """Return the results of jobs that have ended since the last call. Never blocks."""
        self._check_open()
        return self._router.take_finished()

    def fileno(self) -> int:
        """Return a descriptor for event loops that is readable when `get_finished` has results.

        Call `get_finished` whenever it is readable; it may return nothing yet. The descriptor stays
        the same until `close`; remove it from the event loop before that.
        """
        self._check_open()
        return self._router.readiness.fileno()

    def wait(self, job_ids: Iterable[int], timeout: float = 10.0) -> frozenset[int]:
        """Wait until the blocks of these jobs may be overwritten; the lane does these jobs first.

        At the timeout these stores are voided: their chunks will not be found, and their blocks are
        free. A load cannot be voided, because a lane may still write: it stays unfinished. Other
        jobs go on.

        Args:
            job_ids: unknown and finished ones count as ended.
            timeout: seconds.

        Returns:
            Loads that have not ended, whose blocks must not be touched yet; usually empty.
        """
        self._check_open()
        return self._router.jobs.wait(_job_ids(job_ids), check_seconds("timeout", timeout))

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Request the lane to stop these jobs; each is still reported when it has ended."""
        self._check_open()
        self._router.jobs.cancel(_job_ids(job_ids))

    def check_integrity(self) -> None:
        """Raise InternalError if the jobs disagree with the lanes or the control page."""
        self._router.check_integrity()

    def close(self) -> None:
        """Request the release of the memory, drop unfinished jobs unreported, and end the session.

        Waits up to `deadline` for the release, but does not say whether it succeeded: to reuse the
        memory, call `unregister` first. May be called again.
        """
        if self._closed_reason:
            return
        with self._changed:
            staged = self._router.leave()
        self._router.close_staged(staged, self.deadline)
        if self._registration.is_registered:
            self._request(Unregister(), self.deadline)
        self._router.close()
        super().close()
        self._registration = WorkerRegistration()
        self._control.close()

    # ------------------------------------------------------- session's events

    def _send_requests(self) -> bool:
        """Make the daemon hold the requested memory and no other; return False if that fails."""
        while True:
            with self._changed:
                request = self._registration.next_request()
            if request is None:
                return True
            message, memory = request
            if isinstance(message, Unregister):
                succeeded = self._release_memory()
            else:
                succeeded = self._register_memory(message, memory)
            if not succeeded:
                return False

    def _release_memory(self) -> bool:
        """Make the daemon release all memory; if it does not, give the session up, return False."""
        connection = self._connection
        if not isinstance(self._request(Unregister(), REGISTER_SECONDS), Ok):
            self._give_up(connection, "the daemon did not release the memory")
            return False
        self._jobs.set_lane(None)  # no job, and no Join, goes to the lane that had the memory
        with self._changed:
            self._registration.on_released()
            self._changed.notify_all()
        return True

    def _register_memory(self, message: Register, memory: Descriptors) -> bool:
        """Send a registration; return False if it must be sent again later."""
        registration = self._registration
        reply = self._request(message, REGISTER_SECONDS, [self._control.fd, *memory.fds])
        if reply is None:
            return False
        if isinstance(reply, Error) and self._take_fallback(message, reply):
            return True
        with self._changed:
            obstacle_before = registration.obstacle
            sends_again = registration.on_answered(reply)
            self._changed.notify_all()
        if isinstance(reply, Error):
            self._why_unreachable = (
                f"the daemon in {self.runtime_dir} refuses the registration: {reply.text}"
            )
            if sends_again and reply.text != obstacle_before:  # log each reason once, not each try
                log.warning("registration refused, tried again later: %s", reply.text)
            return not sends_again
        if registration.is_registered:
            log.info("rank %d of %d is registered", self.rank, self.world_size)
        return True

    def _on_notice(self, notice: Notice) -> None:
        message = notice.message
        if isinstance(message, LaneUp):
            if message.device == self.device and len(notice.fds) == 1:
                lane = LaneLink(message, notice.fds[0], self._jobs.readiness)
                notice.fds.clear()  # owned by the link
                self._jobs.set_lane(lane)
        elif isinstance(message, (Attached, Detached)):
            with self._changed:
                self._registration.set_attached(attached=isinstance(message, Attached))
        with self._changed:
            self._changed.notify_all()

    def _on_disconnected(self) -> None:
        # Jobs go on until their lane is known to be dead.
        self._registration.on_session_lost()
        self._jobs.set_lane(None)

    def _on_fork(self) -> None:
        self._registration.memory.close()
        self._registration = WorkerRegistration()
        self._router.abandon()
        self._control.close()


def _job_ids(job_ids: Iterable[int]) -> frozenset[int]:
    numbers = check_collection("job_ids", job_ids, "job numbers")
    return frozenset(check_int("job_ids", number, 0) for number in numbers)
