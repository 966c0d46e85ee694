"""A worker's side: its KV memory, and the jobs that move it.

Every job that is submitted is reported by `get_finished` exactly once. A store
that has ended badly was not stored; a load that has ended badly left its blocks
undefined and nothing writes to them any more: both are misses.
"""

import os
from collections.abc import Iterable, Sequence

from kvd_client.arguments import collection, flag, seconds, shown, whole
from kvd_client.connection import Notice
from kvd_client.errors import RegistrationError, Unavailable, UsageError, get_logger
from kvd_client.jobs import JobResult, JobTable
from kvd_client.lane_link import LaneLink
from kvd_client.memory import ControlPage, Descriptors, DeviceMemory, Memory
from kvd_client.registration import Registration, RegistrationState, registration
from kvd_client.session import Session
from kvd_client.tickets import ChunkBlocks, LoadTicket, StoreTicket, pack_chunks
from kvd_client.timeline import StreamSignals, Timeline
from kvd_proto.errors import JobShapeError
from kvd_proto.jobs import JobBlocks
from kvd_proto.layout import RankLayout
from kvd_proto.messages import (
    MAX_RANKS,
    Attached,
    Detached,
    Error,
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


class Worker(Session):
    """One rank of an engine.

    All methods may be called from any thread. They raise `UsageError` for invalid arguments, and
    once it is closed.

    Args:
        runtime_dir: the daemon's runtime directory.
        engine: the engine's name, the same as its scheduler's.
        rank: this worker's index among those that hold shares of a chunk, from 0.
        world_size: how many there are.
        deadline: seconds that the daemon may take for an answer.
        job_timeout: seconds after which a store that has not ended is given up.

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
        whole("world_size", world_size, 1, MAX_RANKS)
        whole("rank", rank, 0, world_size - 1)
        self.job_timeout = seconds("job_timeout", job_timeout, MAX_JOB_SECONDS, positive=True)
        self.rank = rank
        self.world_size = world_size
        super().__init__(runtime_dir, engine, deadline)
        self._control = ControlPage()
        self.timeline = Timeline(self._control)
        self._jobs = JobTable(self._control, self.job_timeout + deadline)
        self._registration = Registration()
        self._start()

    # ----------------------------------------------------------- registration

    def register(
        self,
        memory: Sequence[Memory],
        layout: RankLayout,
        fingerprint: Fingerprint,
        *,
        stage: int = 0,
        temporary: bool = False,
        required: bool = False,
        timeout: float = REGISTER_SECONDS,
    ) -> bool:
        """Register this rank's KV memory with the daemon, and with every later one by itself.

        Args:
            memory: `memory[i]` is storage i of the layout, all of it on one device; descriptors
                may be closed afterwards.
            layout: this rank's tensors and groups.
            fingerprint: what must be equal for engines to share chunks.
            stage: the pipeline stage of this rank.
            temporary: chunks are shared with temporary engines only, and dropped when the last
                of them leaves.
            required: wait for a daemon that is not there, and raise where none comes.
            timeout: seconds to wait for the registration.

        Returns:
            Whether the registration holds now. Without a daemon that is false at once (but with
            `required`), and it is made as soon as one is there.

        Raises:
            UsageError: invalid memory or layout; a second registration; closed.
            RegistrationError: the daemon refuses; it is not tried again.
            Unavailable: `required`, and no registration within `timeout`; at once where this
                process may not connect to the daemon.
            UnsupportedMemory: CUDA memory of a device whose streams cannot write by themselves.
            CudaError: the CUDA driver refuses.
        """
        self._check_open()
        memory = collection("memory", memory, "memories")
        wanted, kept = registration(
            memory,
            layout,
            fingerprint,
            rank=self.rank,
            world_size=self.world_size,
            stage=stage,
            temporary=flag("temporary", temporary),
        )
        required = flag("required", required)
        patience = seconds("timeout", timeout)
        with self._changed:
            current = self._registration
            if current.message is not None or current.refused:
                raise UsageError("this worker is registered already; call unregister() first")
            device = memory[0].ordinal if isinstance(memory[0], DeviceMemory) else None
            if device != self.timeline.device:
                self.timeline.follow(None)
                if device is not None:
                    self.timeline.follow(StreamSignals(device, self._control))
            current.want(wanted, kept)
            self._wake()
            refusal: Error | None = None
            try:
                self._changed.wait_for(
                    lambda: (
                        self.registered
                        or current.refused
                        or self._closed
                        or not (self.connected or (required and not self._denied))
                    ),
                    patience,
                )
            finally:  # also where a signal's handler raises
                current.raises = False
                refusal = current.take_refusal()
            if refusal is not None:
                raise RegistrationError(refusal.code, refusal.text)
            if required and not self.registered:
                if self.connected:
                    why = current.lack or f"the daemon in {self.runtime_dir} has not answered"
                else:
                    why = self._unreachable
                current.drop()
                self._give_up(self._connection, "the registration was given up")
                if not self._denied:
                    why = f"no registration within {timeout:g} s; {why}"
                raise Unavailable(why)
            return self.registered

    def unregister(self, timeout: float = REGISTER_SECONDS) -> bool:
        """Take the memory back, to free it or to put other memory in its place.

        Jobs that have not ended are stopped, and reported as ever; new ones fail until `register`
        is called again. The engine's chunks stay.

        Args:
            timeout: seconds to wait for the daemon.

        Returns:
            Whether the memory is free: no copy touches it, nothing has it mapped. False where the
            daemon has not said so in time, or was lost since `register`: it lets go by itself
            then, as of a process that has died.

        Raises:
            UsageError: closed.
        """
        self._check_open()
        patience = seconds("timeout", timeout)
        with self._changed:
            connection, current = self._connection, self._registration
            current.drop()
            self._wake()
            leaving = RegistrationState.LEAVING
            self._changed.wait_for(lambda: current.state is not leaving or self._closed, patience)
            same = self._connection is connection
            return current.state is not leaving and same and not current.lost

    @property
    def registered(self) -> bool:
        """Whether the daemon holds this rank's memory and a lane serves it."""
        return self._registration.holds and self._jobs.has_lane

    @property
    def device(self) -> str | None:
        """The device of the memory that was given to `register`; None before."""
        wanted = self._registration.message
        return None if wanted is None else wanted.device

    @property
    def attached(self) -> bool:
        """Whether all ranks of the engine are registered, and lanes serve them."""
        return self._registration.state is RegistrationState.ATTACHED and self.registered

    def _why_not_attached(self) -> str:
        if (lack := self._registration.lack) and self.connected and not self._closed:
            return f"this rank is not registered: {lack}"
        return super()._why_not_attached()

    # ------------------------------------------------------------------- jobs

    def store(
        self,
        job_id: int,
        ticket: StoreTicket,
        groups: Sequence[ChunkBlocks],
        after: int | None = None,
    ) -> bool:
        """Copy the blocks of the ticket's chunks into the pool.

        Args:
            job_id: the caller's number, free again once it was reported.
            ticket: the answer of `prepare_store`, also where another process asked.
            groups: for each group of the layout its chunks and blocks; those of keys that the
                ticket has not are left out.
            after: see `submit`.

        Returns:
            Whether a lane has it; see `submit`.

        Raises:
            UsageError: as `submit`; keys and blocks that do not fit each other, the null block, or
                too many blocks for one job; not registered yet.
        """
        return self.submit(Store, job_id, self._blocks(ticket, groups), after)

    def load(
        self,
        job_id: int,
        ticket: LoadTicket,
        groups: Sequence[ChunkBlocks],
        after: int | None = None,
        *,
        layerwise: bool = False,
    ) -> bool:
        """Copy the ticket's chunks into their blocks; arguments, result and errors as `store`.

        With `layerwise` the layers come one after another, and `layers_loaded` counts them.
        """
        return self.submit(Load, job_id, self._blocks(ticket, groups), after, layerwise=layerwise)

    def submit(
        self,
        kind: type[Store] | type[Load],
        job_id: int,
        blocks: JobBlocks,
        after: int | None = None,
        *,
        layerwise: bool = False,
    ) -> bool:
        """Copy blocks into the pool, or chunks into blocks, as the arrays of a job name them.

        Args:
            kind: `Store` or `Load`.
            job_id: the caller's number, free again once it was reported.
            blocks: made by `JobBlocks.of`. The layout's null block stands for a place of a chunk
                that is left out, before its first or behind its last block.
            after: timeline number that must be reached before a block is touched, for CUDA memory
                from `timeline.signal_on`. None: the work on these blocks has finished, as is the
                case for CPU tensors.

            layerwise: of a load: in the order of layers, which `layers_loaded` counts.

        Returns:
            Whether a lane has it. Where not, `get_finished` reports it as failed: every
            submitted job is reported once, whatever is returned here.

        Raises:
            UsageError: arrays that do not fit each other, blocks that were not registered, the
                null block between blocks of a chunk or in all its places, a job id in use; or
                closed.
        """
        self._check_open()
        if (kind is not Store and kind is not Load) or not isinstance(blocks, JobBlocks):
            raise UsageError(
                f"kind={shown(kind)}, blocks={shown(blocks)}: a job and its blocks are needed"
            )
        whole("job_id", job_id, 0)
        if after is None:
            # What has been reached already is "now"; to signal a new number here would also
            # vouch for work that was reserved before and has not finished.
            after = self.timeline.reached
        elif whole("after", after, 0) > self.timeline.reserved:
            raise UsageError(
                f"after={after}: numbers up to {self.timeline.reserved} are reserved; take one from"
                " timeline.reserve(), or None"
            )
        wanted = self._registration.message
        if wanted is not None:
            try:
                blocks.check(wanted.layout)
            except JobShapeError as error:
                raise UsageError(str(error)) from error
        return self._jobs.submit(
            kind,
            usable=self._registration.holds,
            layerwise=flag("layerwise", layerwise) and kind is Load,
            job=job_id,
            blocks=blocks,
            after=after,
            deadline_ms=max(1, round(self.job_timeout * 1000)),
        )

    def _blocks(self, ticket: StoreTicket | LoadTicket, groups: Sequence[ChunkBlocks]) -> JobBlocks:
        self._check_open()
        wanted = self._registration.message
        if wanted is None:
            raise UsageError("nothing is registered yet; call register first")
        return pack_chunks(ticket, groups, wanted.layout)

    def layers_loaded(self, job_id: int) -> int:
        """Return how many layers of a layer-wise load have arrived, from shared memory.

        Layers are those of the layout's refs, and may be read as soon as they are counted. The
        load can still fail: what was read is void then. 0 for a job that is not under way: whether
        it has ended says `get_finished`.
        """
        return self._jobs.layers_loaded(job_id)

    def get_finished(self) -> list[JobResult]:
        """Return jobs that have ended since the last call. Never waits."""
        self._check_open()
        return self._jobs.finished()

    def fileno(self) -> int:
        """Return a descriptor for event loops that is readable when `get_finished` has results.

        Call `get_finished` whenever it is; it may return nothing yet. The descriptor is the
        same until `close`, before which the loop must forget it.
        """
        self._check_open()
        return self._jobs.readiness.fileno()

    def wait(self, job_ids: Iterable[int], timeout: float = 10.0) -> frozenset[int]:
        """Return when the blocks of these jobs may be overwritten; the lane does them first.

        When the time is out, these stores are voided (nothing of them will be found) and their
        blocks are free. A load cannot be voided while something may write: it stays unfinished.
        Jobs that are not named go on.

        Args:
            job_ids: unknown and finished ones count as ended.
            timeout: seconds.

        Returns:
            Loads that have not ended, whose blocks must not be touched yet; empty as a rule.
        """
        self._check_open()
        return self._jobs.wait(_jobs(job_ids), seconds("timeout", timeout))

    def cancel(self, job_ids: Iterable[int]) -> None:
        """Ask the lane to stop these jobs; each is still reported when it has ended."""
        self._check_open()
        self._jobs.cancel(_jobs(job_ids))

    def close(self) -> None:
        """Unregister the memory and end the session. May be called again.

        Jobs that have not ended are stopped and not reported any more.
        """
        if self._closed:
            return
        if self._registration.holds:
            self._ask(Unregister(), self.deadline)
        self._jobs.close()
        super().close()
        self._registration = Registration()
        self.timeline.follow(None)
        self._control.close()

    def __repr__(self) -> str:
        state = "registered" if self.registered else "not registered"
        return (
            f"<Worker rank {self.rank} of {self.world_size}, {state},"
            f" {len(self._jobs)} jobs, {super().__repr__()}>"
        )

    # ------------------------------------------------------- session's events

    def _work(self) -> bool:
        """Have the daemon hold what is wanted and nothing else; false where it does not."""
        while True:
            with self._changed:
                request = self._registration.next_request()
            if request is None:
                return True
            message, memory = request
            if isinstance(message, Unregister):
                done = self._release()
            else:
                done = self._offer(message, memory)
            if not done:
                return False

    def _release(self) -> bool:
        """Have the daemon hold nothing; false where it does not, and the session ends for that."""
        connection = self._connection
        if not isinstance(self._ask(Unregister(), REGISTER_SECONDS), Ok):
            self._give_up(connection, "it does not let go of the memory")
            return False
        with self._changed:
            self._registration.released()
            self._changed.notify_all()
        return True

    def _offer(self, message: Register, memory: Descriptors) -> bool:
        """Ask the daemon to register this; false where it is to be asked again, later."""
        current = self._registration
        reply = self._ask(message, REGISTER_SECONDS, [self._control.fd, *memory.fds])
        if reply is None:
            return False
        with self._changed:
            known = current.lack
            again = current.answered(reply)
            self._changed.notify_all()
        if isinstance(reply, Error):
            self._unreachable = (
                f"the daemon in {self.runtime_dir} refuses the registration: {reply.text}"
            )
            if again and reply.text != known:  # once for each reason: it is tried for ever
                log.warning("registration refused, tried again later: %s", reply.text)
            return not again
        if current.holds:
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

    def _on_lost(self) -> None:
        # Jobs go on until their lane is known to be dead.
        self._registration.session_lost()
        self._jobs.set_lane(None)

    def _on_fork(self) -> None:
        self._registration.memory.close()
        self._registration = Registration()
        self._jobs.abandon()
        self.timeline.abandon()
        self._control.close()


def _jobs(job_ids: Iterable[int]) -> frozenset[int]:
    numbers = collection("job_ids", job_ids, "job numbers")
    return frozenset(whole("job_ids", number, 0) for number in numbers)
