"""A staged job: its pieces, which of them run, and what becomes of it."""

from collections.abc import Iterator
from dataclasses import dataclass, field

from kvd_client.jobs import JobResult
from kvd_client.staging_layout import PageRun, Piece
from kvd_client.staging_memory import Copy
from kvd_proto.messages import JobStatus, Load, Store


@dataclass(slots=True, eq=False)
class StagedJob:
    """An unfinished job.

    Attributes:
        pieces: those that have not begun, but for the one that `peek` has returned.
        is_over: no further piece will begin.
        num_running: pieces that have begun and not ended.
        num_copying: of these, those that are gathered or scattered.
        failure: the job's result; None: nothing has gone wrong.
        results: of ended pieces.
    """

    job_id: int
    kind: type[Store] | type[Load]
    after: int
    expedited: bool
    deadline: float
    pieces: Iterator[Piece]
    is_over: bool = False
    num_running: int = 0
    num_copying: int = 0
    failure: JobResult | None = None
    results: list[JobResult] = field(default_factory=list)
    _peeked: Piece | None = None

    def peek(self) -> Piece | None:
        """Return the next piece to begin; None: there is none.

        Pieces without pages are left out: all their chunks are stored by other ranks.
        """
        while self._peeked is None and not self.is_over:
            piece = next(self.pieces, None)
            if piece is None:
                self.is_over = True
            elif piece.num_pages:
                self._peeked = piece
        return self._peeked

    def begin(self) -> None:
        """Count the next piece as running."""
        self._peeked = None
        self.num_running += 1
        self.peek()

    def stop(self, status: JobStatus, text: str) -> None:
        """Begin no further piece; the job's result is this one, unless it has failed before."""
        self._peeked, self.is_over = None, True
        if self.failure is None:
            self.failure = JobResult(self.job_id, status, text=text)

    @property
    def has_ended(self) -> bool:
        """Whether the engine may use its blocks again.

        Once a job has failed, only scatters matter: what a gather still reads goes nowhere, and the
        lane touches pages only.
        """
        if self.failure is not None:
            return self.kind is Store or not self.num_copying
        return self.is_over and not self.num_running

    def result(self) -> JobResult:
        """Return the result of an ended job.

        A store leaves out chunks that another engine stores: it is STALE only if all pieces are.
        """
        nbytes = sum(result.bytes for result in self.results)
        seconds = sum(result.seconds for result in self.results)
        failure = self.failure
        is_stale = [result.status is JobStatus.STALE for result in self.results]
        if failure is None and is_stale and all(is_stale):
            failure = self.results[0]
        if failure is None:
            return JobResult(self.job_id, JobStatus.OK, nbytes, seconds)
        return JobResult(self.job_id, failure.status, nbytes, seconds, failure.text)


@dataclass(slots=True, eq=False)
class RunningPiece:
    """A piece that has pages.

    Attributes:
        piece_id: number of its job at the lane.
        copy: the gather or scatter, once it was started.
        result: the lane's, of a load that is to be scattered.
    """

    job: StagedJob
    piece: Piece
    run: PageRun
    piece_id: int
    copy: Copy | None = None
    result: JobResult | None = None
