"""The steps of the self-test, as a table, and the run over it.

A step acts, and then proves that it acted. A proof never takes a step's word: it
looks at the memory past the daemon, at the directory of chunks, or at the
daemon's status, so that a step, or what it calls, can be replaced by nothing and
is found out, by its own proof or by a later one.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kvd_client.errors import KvdClientError
from kvd_proto.answers import LookupResult
from kvd_tools.errors import StepFailed
from kvd_tools.selftest.bench import Bench

ROUNDS = 5


@dataclass(frozen=True, slots=True)
class Step:
    """`act` does it; `prove` says in a few words what was seen, or raises StepFailed."""

    name: str
    act: Callable[[Bench], object]
    prove: Callable[[Bench], str]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a step: its proof, or what was wrong."""

    name: str
    ok: bool
    text: str
    seconds: float


def run(bench: Bench, steps: Sequence[Step] | None = None) -> list[Outcome]:
    """The steps in order, up to the first that fails; that one is the last of the list."""
    outcomes: list[Outcome] = []
    for step in STEPS if steps is None else steps:
        started = time.perf_counter()
        try:
            step.act(bench)
            text, ok = step.prove(bench), True
            if not text:
                text, ok = "it has proved nothing", False
        except KvdClientError as error:
            text, ok = str(error), False
        outcomes.append(Outcome(step.name, ok, text, time.perf_counter() - started))
        if not ok:
            break
    return outcomes


# ------------------------------------------------------------------------ memory


def _memory_is_there(bench: Bench) -> str:
    memory = bench.memory
    for block in (0, memory.count - 1):
        bench.write([block], [bench.content[block % len(bench.content)]])
    if (memory.read(0) != bench.content[0]).any():
        raise StepFailed("what was written into the memory cannot be read back")
    return f"{memory.count} blocks of {memory.size} bytes"


def _is_alone(bench: Bench) -> str:
    if not (bench.scheduler.attached and bench.worker.registered and bench.namespace_id):
        raise StepFailed(f"no lane has mapped the memory within {bench.timeout:g} s")
    own = bench.own_namespace()
    if own is None or own["engines"] != 1 or any(own["chunks"].values()):
        raise StepFailed(f"not in an empty namespace of its own: {own}")
    return f"namespace {bench.namespace_id[:8]}, used by nobody else"


# ------------------------------------------------------------------------ copies


def _is_filled(bench: Bench) -> str:
    if wrong := bench.differences(bench.source):
        raise StepFailed(f"{wrong} bytes of the source are not what was to be written")
    return f"{len(bench.source)} blocks hold random bytes"


def _is_stored(bench: Bench) -> str:
    if not bench.stored:
        raise StepFailed("nothing was stored")
    if not bench.wait_until(bench.ready):
        ready = bench.count(LookupResult.HIT)
        raise StepFailed(f"{ready} of {len(bench.stored)} stored chunks can be loaded")
    return f"{len(bench.stored)} chunks of {bench.chunk_bytes} bytes"


def _poison(bench: Bench) -> None:
    bench.poison(bench.used_source)  # nothing but the pool has the bytes now
    bench.poison(bench.used_destination)


def _is_poisoned(bench: Bench) -> str:
    blocks = [*bench.used_source, *bench.used_destination]
    if not blocks or set(bench.source) & set(bench.destination):
        raise StepFailed("source and destination are not different blocks")
    if left := sum(bench.unpoisoned(blocks)):
        raise StepFailed(f"{left} bytes of source and destination are not overwritten")
    return f"{len(blocks)} blocks of source and destination overwritten"


def _is_loaded(bench: Bench) -> str:
    if bench.loaded is None:
        raise StepFailed("nothing was loaded")
    if same := bench.unpoisoned(bench.used_destination).count(0):
        raise StepFailed(f"nothing was copied into {same} of the blocks")
    if strayed := sum(bench.unpoisoned(bench.used_source)):
        raise StepFailed(f"{strayed} bytes went into blocks that were not to be loaded")
    return f"{len(bench.loaded.keys)} chunks into other blocks"


def _compare(bench: Bench) -> None:
    bench.wrong = bench.differences(bench.used_destination)


def _is_compared(bench: Bench) -> str:
    """The comparison has to find a difference that is planted before its word counts."""
    total = len(bench.used_destination) * bench.memory.size
    if bench.wrong is None:
        raise StepFailed("nothing was compared")
    if bench.wrong:
        raise StepFailed(f"{bench.wrong} of {total} loaded bytes are not what was stored")
    block = bench.used_destination[-1]
    right = bench.memory.read(block)
    spoilt = right.copy()
    spoilt[-1] ^= 1
    bench.write([block], [spoilt])
    found = bench.differences(bench.used_destination)
    bench.write([block], [right])
    if found != 1:
        raise StepFailed(f"a wrong byte was planted, and {found} were found")
    return f"{total} bytes are right, and one planted wrong byte was found"


def _measure(bench: Bench) -> None:
    for samples in bench.samples.values():
        samples.clear()
    for _ in range(ROUNDS):
        bench.scheduler.reset()
        bench.store()
        bench.wait_until(bench.ready)
        bench.load()


def _is_measured(bench: Bench) -> str:
    for kind, samples in bench.samples.items():
        if len(samples) != ROUNDS or not all(job.bytes for job, _ in samples):
            raise StepFailed(f"{len(samples)} of {ROUNDS} {kind}s were measured")
    return f"{ROUNDS} more stores and loads"


# -------------------------------------------------------------------------- ends


def _is_evicted(bench: Bench) -> str:
    if found := bench.count(LookupResult.HIT, LookupResult.HIT_PENDING):
        raise StepFailed(f"{found} chunks can still be found")
    ticket = bench.scheduler.prepare_load(bench.keys)
    bench.scheduler.complete_load(ticket)
    if ticket.keys or not len(ticket.found):
        raise StepFailed(f"{len(ticket.keys)} chunks can still be loaded")
    own = bench.own_namespace()
    if own is None or own["chunks"]["ready"]:
        raise StepFailed(f"the daemon still counts chunks: {own}")
    return f"none of {len(bench.keys)} keys is found"


def _is_gone(bench: Bench) -> str:
    if not bench.wait_until(lambda: bench.own_namespace() is None):
        raise StepFailed(f"the daemon keeps namespace {bench.namespace_id[:8]}")
    return "the namespace is gone, its space is given back"


STEPS = (
    Step("memory", Bench.allocate, _memory_is_there),
    Step("register", Bench.register, _is_alone),
    Step("fill", lambda bench: bench.write(bench.source, bench.content), _is_filled),
    Step("store", Bench.store, _is_stored),
    Step("poison", _poison, _is_poisoned),
    Step("load", Bench.load, _is_loaded),
    Step("compare", _compare, _is_compared),
    Step("measure", _measure, _is_measured),
    Step("evict", lambda bench: bench.scheduler.reset(), _is_evicted),
    Step("leave", Bench.leave, _is_gone),
)
