"""Where a worker's jobs go: to the lane that has mapped its memory, or through staging."""

from collections.abc import Callable
from dataclasses import replace

from kvd_client.jobs import JobResult, JobTable
from kvd_client.readiness import Readiness
from kvd_client.routes import Route, Transfer
from kvd_client.staging import PIECE_IDS, StagedJobs
from kvd_client.timeline import ControlPage, StreamSignals, Timeline
from kvd_proto.messages import Register


class JobRouter:
    """The way that a worker's registration has chosen, and its jobs.

    All methods but `close` and those of `jobs` are called under the worker's lock.

    Args:
        control: the worker's control page.
        timeout: seconds after which a store that has not ended is voided.
        grace: seconds more that the lane's answer may take.

    Attributes:
        timeline: of the worker.
        lane_jobs: jobs of the lane.
        readiness: readable when `jobs.take_finished` has work to do, whatever the way.
        route: the way; None: nothing is registered.
    """

    def __init__(self, control: ControlPage, timeout: float, grace: float) -> None:
        self.timeline = Timeline(control)
        self.lane_jobs = JobTable(control, timeout + grace)
        self.readiness = Readiness()
        self.readiness.watch(self.lane_jobs.readiness.fileno())
        self.route: Route | None = None
        self._control = control
        self._timeout = timeout
        self._staged: StagedJobs | None = None

    @property
    def jobs(self) -> JobTable | StagedJobs:
        """What takes jobs now."""
        return self.lane_jobs if self._staged is None else self._staged

    @property
    def staged(self) -> StagedJobs | None:
        """The staged jobs; None: the memory is exported, or nothing is registered."""
        return self._staged

    @property
    def transfer(self) -> Transfer | None:
        """The way; None: nothing is registered."""
        return None if self.route is None else self.route.transfer

    def take(
        self, route: Route, is_registered: Callable[[], bool], writer: tuple[int, int]
    ) -> None:
        """Let jobs go this way from now on. If this raises, the way is still the one before.

        Args:
            route: the way. An earlier one has been left, unless it was export and was refused.
            is_registered: whether the daemon holds the memory.
            writer: rank and world size.

        Raises:
            CudaError, UnsupportedMemory: streams of this device cannot write to host memory.
            OSError, RuntimeError: no descriptor or thread is free.
        """
        if route.staging is not None and route.copier is not None:
            staged = StagedJobs(
                route.staging,
                route.copier,
                self.lane_jobs,
                self.timeline,
                self.readiness,
                is_registered=is_registered,
                writer=writer,
                store_seconds=self._timeout,
            )
            self.readiness.unwatch(self.lane_jobs.readiness.fileno())
            self.timeline.set_signals(route.copier.signals)
            self._staged = staged
        elif route.ordinal != self.timeline.device:
            self.timeline.set_signals(None)
            if route.ordinal is not None:
                self.timeline.set_signals(StreamSignals(route.ordinal, self._control))
        self.route = route

    def leave(self) -> StagedJobs | None:
        """Leave the way; return staged jobs, if there are any, for `close`."""
        self.route = None
        staged, self._staged = self._staged, None
        if staged is not None:
            self.timeline.set_signals(None)
            self.readiness.watch(self.lane_jobs.readiness.fileno())
        return staged

    def close_staged(self, staged: StagedJobs | None, timeout: float) -> bool:
        """End staged jobs that were left; return whether no copy touches the engine's memory.

        `lane_jobs` reports their results.

        Called without the worker's lock: it waits for copies.
        """
        if staged is None:
            return True
        return staged.close(timeout)

    def fallback(self, refused: Register) -> Callable[[str], Route] | None:
        """Return what prepares another way than this registration's; None: there is none."""
        if self.route is None or self.route.message is not refused:
            return None
        return self.route.fallback

    def drop_fallback(self, refused: Register) -> None:
        """Prepare no other way for this registration: it has failed."""
        if self.route is not None and self.route.message is refused:
            self.route = replace(self.route, fallback=None)

    def take_finished(self) -> list[JobResult]:
        """Return results of jobs. While a way is left, the lane's may be of pieces: not those."""
        results = self.jobs.take_finished()
        return [result for result in results if result.job_id < PIECE_IDS]

    def check_integrity(self) -> None:
        """Raise InternalError if jobs disagree with lanes, pages or the control page."""
        self.lane_jobs.check_integrity()
        if self._staged is not None:
            self._staged.check_integrity()

    def close(self) -> None:
        """Drop all jobs; staged ones have been left and closed."""
        self.readiness.close()
        self.lane_jobs.close()
        self.timeline.set_signals(None)

    def abandon(self) -> None:
        """In a forked child: drop everything without the parent's locks."""
        if self._staged is not None:
            self._staged.abandon()
        self.readiness.close()  # before the lanes' descriptors: a fork shares the parent's epoll
        self.lane_jobs.abandon()
        self.timeline.abandon()
