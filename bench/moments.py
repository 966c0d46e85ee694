"""Where the time to a first token goes: what `stamped.py` wrote while one prompt was answered."""

from pathlib import Path

MOMENTS_FILE = "KVD_BENCH_MOMENTS"  # an environment variable of the engine
# In the order in which a request with a hit passes them; each is the end of a stage.
PASSED = {
    "asked": "HTTP, queue, vLLM's scheduler",
    "prepared": "look up, pin",
    "received": "step to the worker",
    "submitted": "submit the job",
    "seen": "job, until the worker sees its end",
    "told": "the worker's answer to the scheduler",
    "scheduled": "until the scheduler's next step",
    "begun": "step to the worker, again",
    "computed": "compute the tokens that are left",
}
REST = "sample, send the token"
JOB = PASSED["seen"]

Stages = dict[str, float]


class Moments:
    """The file of one engine, read answer by answer.

    Args:
        path: of the file; it need not exist yet.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._read = 0

    def stages(self, asked: int, answered: int) -> tuple[Stages, int]:
        """Milliseconds of each stage of the one prompt since the last call, and polls for its job.

        Args:
            asked: when it was sent, nanoseconds.
            answered: when its first token came.

        Raises:
            RuntimeError: it has not passed all of them: nothing was loaded.
        """
        lines = self.take()
        stages: Stages = {}
        polls, last = 0, asked
        for what, stage in PASSED.items():
            moment = next(((at, n) for name, at, n in lines if name == what and at >= last), None)
            if moment is None:
                raise RuntimeError(f"{self.path}: the prompt has not passed {what!r}")
            stages[stage] = (moment[0] - last) / 1e6
            last = moment[0]
            if what == "seen":
                polls = moment[1]
        stages[REST] = (answered - last) / 1e6
        return stages, polls

    def skip(self) -> None:
        """Forget what was written until now."""
        self.take()

    def take(self) -> list[tuple[str, int, int]]:
        """What was written since the last call: which moment, nanoseconds, a number."""
        if not self.path.exists():
            return []
        with self.path.open() as file:
            file.seek(self._read)
            read = file.read()
            self._read = file.tell()
        lines = (line.split() for line in read.splitlines())
        return [(name, int(at), int(number)) for name, at, number in lines]
