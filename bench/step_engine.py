"""One vLLM engine in this process, and the time that its connector takes of each step.

`vllm_step.py` runs this as a program: `step_engine.py SETTINGS`, a `Settings` as JSON. It prints a
line of JSON when it is ready, one when a third of its passes is done, and at the end a `Measured`.

vLLM's scheduler, connector and worker run in one thread here, one after another. What vLLM's
scheduler calls of the connector is timed; inside of it, what the manager does (with what kvd's
connector does beside vLLM's own logic) is told apart from that logic, which is the same for all.
What the worker half takes, an in-process copy among it, is part of the step alone.
"""

import json
import os
import random
import resource
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import wraps
from inspect import isfunction
from typing import Any

import msgspec

AT_ONCE, REQUESTS = 16, 64  # in a pass
PROMPT_TOKENS, VOCABULARY = 400, 1000
MIN_TOKENS, MAX_TOKENS = 8, 40  # of an answer: requests come and go in most steps
STEP_TOKENS = 144  # a prompt takes several steps
BLOCK_TOKENS, BLOCKS_PER_CHUNK = 32, 1
GPU_BLOCKS = 256  # of which running requests hold 224: what came earlier is not found there
BACK = 2 * REQUESTS  # a prompt that comes back is one of the last so many
READY, MIDDLE, END = "ready", "middle", "end"
# What vLLM's scheduler calls of a connector.
CALLS = (
    *("on_new_request", "get_num_new_matched_tokens", "get_external_cache_hit_sources"),
    *("get_loaded_kv_cache_group_ids", "update_state_after_alloc", "build_connector_meta"),
    *("update_connector_output", "request_finished_all_groups", "register_finished_partial_tail"),
    *("take_events", "get_kv_connector_stats", "has_pending_push_work", "has_pending_block_frees"),
)
INTERRUPTED_SECONDS = 50e-6  # a call for one chunk that takes longer was interrupted
SHORT = ("lookup", "get_load_source", "on_schedule_end")
LAZY = "take_events"  # a generator: it works when it is read
REFUSED = "vllm:kv_offload_kvd_chunks_refused"


@dataclass(frozen=True, slots=True)
class Settings:
    """What an engine is started with.

    model: a folder that `write_model` made.
    transfer: vLLM's kv_transfer_config.
    passes: of 64 requests each; the first is not measured.
    """

    model: str
    transfer: dict[str, Any]
    passes: int


@dataclass(slots=True)
class Step:
    """One step of the engine; seconds.

    connector, manager: of it in the connector's scheduler half; of that not in vLLM's own logic.
    connector_cpu, manager_cpu: the same of the thread's processor time.
    waits, preempted: how often the thread gave up its processor in the connector, and how often
        it was taken away.
    tokens: that were computed.
    """

    seconds: float = 0.0
    connector: float = 0.0
    manager: float = 0.0
    connector_cpu: float = 0.0
    manager_cpu: float = 0.0
    waits: int = 0
    preempted: int = 0
    tokens: int = 0


@dataclass(slots=True)
class Counts:
    """What the connector did, the first pass included."""

    loads: int = 0
    stores: int = 0
    stored_chunks: int = 0
    hit_tokens: int = 0
    failed_loads: int = 0
    refused_chunks: int = 0


@dataclass(slots=True)
class Measured:
    """A run: its steps that computed something, the other steps' time, all answers' tokens.

    by_call: seconds in all of what vLLM called, by its name.
    """

    steps: list[Step] = field(default_factory=list)
    idle: Step = field(default_factory=Step)
    counts: Counts = field(default_factory=Counts)
    by_call: dict[str, float] = field(default_factory=dict)
    answers: list[list[int]] = field(default_factory=list)


def draw(passes: int) -> list[list[tuple[list[int], int]]]:
    """Prompts and their answers' lengths, by pass; from the second on every other one is old."""
    source = random.Random(0)
    drawn: list[list[tuple[list[int], int]]] = []
    before: list[list[int]] = []
    for _ in range(passes):
        requests, fresh = [], []
        for number in range(REQUESTS):
            if number % 2 and before:
                prompt = source.choice(before)
            else:
                prompt = source.choices(range(2, VOCABULARY), k=PROMPT_TOKENS)
                fresh.append(prompt)
            requests.append((prompt, source.randint(MIN_TOKENS, MAX_TOKENS)))
        before = (before + fresh)[-BACK:]
        drawn.append(requests)
    return drawn


class Meter:
    """Times what vLLM calls of a connector, and counts what it does."""

    def __init__(self, connector: Any) -> None:
        from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (  # noqa: PLC0415  # only engines need vLLM
            OffloadingConnectorScheduler,
        )

        self.counts = Counts()
        self.by_call: dict[str, float] = {}
        self._step = Step()
        self._ours: list[bool] = []  # of the calls that are running: whether it is the manager's
        self._since = (0.0, 0.0)
        self._clock = _clock_seconds()  # what reading the clock of processor time takes
        half = connector.connector_scheduler
        for owner in type(half).__mro__:
            if owner is OffloadingConnectorScheduler:
                break
            for name, method in list(vars(owner).items()):
                if isfunction(method) and not name.startswith("__"):
                    setattr(owner, name, self._inside(method, ours=True))
                    if theirs := getattr(OffloadingConnectorScheduler, name, None):
                        setattr(
                            OffloadingConnectorScheduler, name, self._inside(theirs, ours=False)
                        )
        for name in dir(half.manager):
            method = getattr(half.manager, name)
            shown = isfunction(getattr(type(half.manager), name, None)) and name[0] != "_"
            if shown and name != LAZY:
                setattr(half.manager, name, self._inside(method, ours=True))
        for name in CALLS:
            if hasattr(connector, name):
                setattr(connector, name, self._call(name, getattr(connector, name)))

    def take(self) -> Step:
        """The connector's time since the last call."""
        step, self._step = self._step, Step()
        return step

    def _turn(self) -> None:
        """Whose turn it is changes: what has passed since the last time was of who is running."""
        now, cpu = time.perf_counter(), time.thread_time()
        if self._ours and self._ours[-1]:
            self._step.manager += now - self._since[0]
            self._step.manager_cpu += cpu - self._since[1] - self._clock
        self._since = now, cpu

    def _inside(self, call: Callable[..., Any], *, ours: bool) -> Callable[..., Any]:
        if call.__name__ in SHORT:
            return self._short(call)

        @wraps(call)
        def timed(*args: Any, **keywords: Any) -> Any:
            self._turn()
            self._ours.append(ours)
            try:
                return call(*args, **keywords)
            finally:
                self._turn()
                self._ours.pop()

        return timed

    def _short(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that is made for each chunk: the clock of processor time takes longer than it."""

        @wraps(call)
        def timed(*args: Any, **keywords: Any) -> Any:
            started = time.perf_counter()
            found = call(*args, **keywords)
            took = time.perf_counter() - started
            if not (self._ours and self._ours[-1]):
                self._step.manager += took
                self._step.manager_cpu += min(took, INTERRUPTED_SECONDS)
            return found

        return timed

    def _call(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        count = getattr(self, f"_count_{name}", None)

        @wraps(call)
        def timed(*args: Any, **keywords: Any) -> Any:
            before = resource.getrusage(resource.RUSAGE_THREAD)
            cpu, started = time.thread_time(), time.perf_counter()
            try:
                result = call(*args, **keywords)
                if name == LAZY:
                    result = list(result)
            finally:
                took = time.perf_counter() - started
                step = self._step
                step.connector += took
                step.connector_cpu += time.thread_time() - cpu - self._clock
                after = resource.getrusage(resource.RUSAGE_THREAD)
                step.waits += after.ru_nvcsw - before.ru_nvcsw
                step.preempted += after.ru_nivcsw - before.ru_nivcsw
                self.by_call[name] = self.by_call.get(name, 0.0) + took
            if count is not None:
                count(result, *args, **keywords)
            return result

        return timed

    def _count_build_connector_meta(self, meta: Any, scheduler_output: Any) -> None:
        self._step.tokens += scheduler_output.total_num_scheduled_tokens
        self.counts.loads += len(meta.load_jobs)
        self.counts.stores += len(meta.store_jobs)
        self.counts.stored_chunks += sum(
            len(job.src_spec.block_ids) // BLOCKS_PER_CHUNK for job in meta.store_jobs.values()
        )

    def _count_update_state_after_alloc(
        self, result: None, request: Any, blocks: Any, num_external_tokens: int
    ) -> None:
        del result, request, blocks
        self.counts.hit_tokens += num_external_tokens

    def _count_update_connector_output(self, result: None, connector_output: Any) -> None:
        del result
        self.counts.failed_loads += len(connector_output.failed_recving or ())

    def _count_get_kv_connector_stats(self, stats: Any) -> None:
        if stats is not None:
            self.counts.refused_chunks += sum(stats.data["data"].get(REFUSED, {}).values())


def _clock_seconds() -> float:
    taken = [-time.thread_time() + time.thread_time() for _ in range(1000)]
    return sorted(taken)[len(taken) // 2]


def start(settings: Settings) -> Any:
    """An engine whose scheduler runs in this process."""
    from vllm.config import KVTransferConfig  # noqa: PLC0415  # only engines need vLLM
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415  # the same
    from vllm.v1.engine.llm_engine import LLMEngine  # noqa: PLC0415  # the same

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=settings.model,
            skip_tokenizer_init=True,
            enforce_eager=True,
            seed=0,
            dtype="float32",
            block_size=BLOCK_TOKENS,
            num_gpu_blocks_override=GPU_BLOCKS,
            max_model_len=PROMPT_TOKENS + MAX_TOKENS,
            max_num_seqs=AT_ONCE,
            max_num_batched_tokens=STEP_TOKENS,
            enable_prefix_caching=True,
            async_scheduling=False,
            kv_transfer_config=KVTransferConfig(**settings.transfer),
        )
    )


def run(settings: Settings) -> Measured:
    """Send an engine the passes, one after another."""
    from vllm import SamplingParams  # noqa: PLC0415  # only engines need vLLM

    engine = start(settings)
    meter = Meter(engine.engine_core.engine_core.scheduler.connector)
    measured = Measured(counts=meter.counts, by_call=meter.by_call)
    say(READY)
    for number, requests in enumerate(draw(settings.passes)):
        if number == settings.passes // 3:
            say(MIDDLE)
        for at, (prompt, tokens) in enumerate(requests):
            engine.add_request(
                f"{number}-{at}",
                {"prompt_token_ids": prompt},
                SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False),
            )
        if number == 1:
            meter.by_call.clear()  # the first pass warms up
        meter.take()
        answers: dict[str, list[int]] = {}
        while engine.has_unfinished_requests():
            started = time.perf_counter()
            ended = engine.step()
            seconds = time.perf_counter() - started
            step = meter.take()
            step.seconds = seconds
            for output in ended:
                answers[output.request_id] = list(output.outputs[0].token_ids)
            if number and step.tokens:
                measured.steps.append(step)
            elif number:
                measured.idle.seconds += seconds
                measured.idle.connector += step.connector
                measured.idle.manager += step.manager
        measured.answers += [answers[f"{number}-{at}"] for at in range(len(requests))]
    engine.engine_core.shutdown()
    return measured


def say(event: str, **more: Any) -> None:
    """Print a line for `vllm_step.py`."""
    print(json.dumps({"event": event, **more}), flush=True)


if __name__ == "__main__":
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    say(END, measured=asdict(run(msgspec.json.decode(sys.argv[1], type=Settings))))
