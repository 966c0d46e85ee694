"""What is wrong with a daemon and what to do: one table of conditions, found in its reports.

The broker looks for them when it reports, over the last minute; `kvd status`, the page,
`kvd top` and `kvd doctor` show what they find in the report. Levels: `error` costs engines their
cache now, `warning` will or may, `hint` could go better. Many of them are also alerts, with
thresholds of their own: deploy/prometheus/kvd.rules.yml.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from kvd.metrics import schema
from kvd.metrics.history import Span, quantile
from kvd.metrics.words import duration, latency, percent, several, size

Level = Literal["error", "warning", "hint"]
Case = Mapping[str, Any]

SILENT_SECONDS = 3.0  # a lane is asked once a second
OLD_JOB_SECONDS = 2.0
WAITING_SECONDS = 30.0  # ranks of one engine start apart, but not that far
LAG_SECONDS = 0.25
NEARLY_ALL = 0.9
YOUNG_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Kind:
    """One row of the table: `find` gives the cases that fill `text` and `remedy`."""

    name: str
    level: Level
    find: Callable[[Span], Iterable[Case]]
    text: str
    remedy: str


def conditions(span: Span) -> list[schema.Condition]:
    """Return all that is wrong now, the worst first."""
    return [
        schema.Condition(
            kind.name, kind.level, kind.text.format(**case), kind.remedy.format(**case)
        )
        for kind in CONDITIONS
        for case in kind.find(span)
    ]


# ---------------------------------------------------------------------- finding


def _draining(span: Span) -> Iterator[Case]:
    if span.now["draining"]:
        yield {}


def _pool(span: Span) -> Iterator[Case]:
    for check in span.now["checks"]:  # those of lanes and of the drain have conditions of their own
        if check["name"] == "pool" and not check["ok"]:
            yield {"text": check["text"].rstrip(".")}


def _lanes(state: str) -> Callable[[Span], Iterator[Case]]:
    def find(span: Span) -> Iterator[Case]:
        for lane in span.now["lanes"]:
            if lane["state"] == state:
                error = lane["last_error"].rstrip(".")
                yield {"device": lane["device"], "error": f": {error}" if error else ""}

    return find


def _pinning(span: Span) -> Iterator[Case]:
    for lane in span.now["lanes"]:
        if lane["pin_error"]:
            yield {
                "device": lane["device"],
                "error": lane["pin_error"].rstrip("."),
                "usable": size(lane["usable_bytes"]),
                "pool": size(lane["pool_bytes"]),
            }


def _silent(span: Span) -> Iterator[Case]:
    for lane in span.now["lanes"]:
        heard = lane["seconds_since_heard"]
        if lane["state"] == "up" and heard is not None and heard > SILENT_SECONDS:
            yield {"device": lane["device"], "silence": duration(heard)}


def _restarted(span: Span) -> Iterator[Case]:
    for lane in span.now["lanes"]:
        times = span.lane(lane["device"]).rise("counters", "restarts")
        if times and lane["state"] == "up":
            error = lane["last_error"].rstrip(".")
            yield {"device": lane["device"], "error": f": {error}" if error else ""}


def _old_jobs(span: Span) -> Iterator[Case]:
    for lane in span.now["lanes"]:
        if lane["oldest_job_seconds"] > OLD_JOB_SECONDS:
            yield {
                "device": lane["device"],
                "age": duration(lane["oldest_job_seconds"]),
                "queued": several(lane["queued_jobs"], "job"),
            }


def _missing_ranks(span: Span) -> Iterator[Case]:
    for engine in span.now["engines"]:
        ranks = [str(rank) for rank in engine["missing_ranks"]]
        longest = max((session["seconds"] for session in engine["sessions"]), default=0.0)
        if not engine["attached"] and ranks and longest > WAITING_SECONDS:
            yield {
                "engine": engine["name"],
                "ranks": f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}",
                "size": engine["world_size"],
                "waiting": duration(longest),
            }


def _jobs(direction: str, outcomes: tuple[str, ...]) -> Callable[[Span], Iterator[Case]]:
    def find(span: Span) -> Iterator[Case]:
        for lane in span.now["lanes"]:
            part = span.lane(lane["device"])
            rises = {
                outcome: times
                for outcome in outcomes
                if (times := part.rise("counters", "jobs", f"{direction}_{outcome}"))
            }
            if rises:
                yield {
                    "device": lane["device"],
                    "jobs": several(sum(rises.values()), direction),
                    "outcomes": ", ".join(f"{times:.0f} {name}" for name, times in rises.items()),
                }

    return find


def _rises(
    *path: str, word: str, plural: str | None = None, least: float = 1
) -> Callable[[Span], Iterator[Case]]:
    def find(span: Span) -> Iterator[Case]:
        times = span.rise(*path)
        if times >= least:
            yield {"times": several(times, word, plural)}

    return find


def _dropped_replies(span: Span) -> Iterator[Case]:
    for lane in span.now["lanes"]:
        times = span.lane(lane["device"]).rise("counters", "dropped_replies")
        if times:
            yield {"device": lane["device"], "times": several(times, "reply", "replies")}


def _lag(span: Span) -> Iterator[Case]:
    lag = span.now["broker"]["loop_lag_max_seconds"]
    if lag > LAG_SECONDS:
        yield {"lag": latency(lag)}


def _descriptors(span: Span) -> Iterator[Case]:
    broker = span.now["broker"]
    if broker["open_fds"] > NEARLY_ALL * broker["max_fds"] > 0:
        yield {"open": broker["open_fds"], "most": broker["max_fds"]}


def _sessions(span: Span) -> Iterator[Case]:
    sessions = span.now["sessions"]
    if sessions["open"] > NEARLY_ALL * sessions["limit"] > 0:
        yield sessions


def _young(span: Span) -> Iterator[Case]:
    for namespace in span.now["namespaces"]:
        age = quantile(span.namespace(namespace["id"]).histogram("counters", "eviction_age"), 0.5)
        if age is not None and age < YOUNG_SECONDS:
            yield {"model": namespace["model"], "age": duration(age) if age >= 1 else latency(age)}


def _few_hits(span: Span) -> Iterator[Case]:
    share = span.share("hit_chunks", "lookup_chunks")
    if share is not None and share < 0.01 and span.rise("counters", "stored") > 0:
        yield {"share": percent(share)}


# -------------------------------------------------------------------- the table

CONDITIONS: tuple[Kind, ...] = (
    Kind(
        "lane down",
        "error",
        _lanes("down"),
        "Lane {device} is down{error}.",
        "kvd starts it again by itself. If it stays down, run kvd doctor and read the log:"
        " journalctl -u kvd.",
    ),
    Kind(
        "not ready",
        "warning",
        _pool,
        "Pool: {text}.",
        "Wait while the figure grows; what is ready is served already. If it stands still,"
        " run kvd doctor.",
    ),
    Kind(
        "lane starting",
        "warning",
        _lanes("starting"),
        "Lane {device} is starting{error}.",
        "Wait some seconds; until then engines on this device compute everything themselves.",
    ),
    Kind(
        "pinning",
        "warning",
        _pinning,
        "Lane {device} cannot pin the pool: {error}. It can use {usable} of {pool}.",
        "Raise the memlock limit (LimitMEMLOCK=infinity in the unit, ulimits.memlock in the"
        " container), restart kvd, and see kvd doctor.",
    ),
    Kind(
        "draining",
        "warning",
        _draining,
        "The daemon is draining: it takes no new chunks, and is not ready.",
        "To take chunks again: kvd resume. If it is being stopped, there is nothing to do.",
    ),
    Kind(
        "lane silent",
        "warning",
        _silent,
        "Lane {device} has not answered for {silence}.",
        "Its device or this machine may hang; when its time is up kvd ends the lane and starts"
        " another.",
    ),
    Kind(
        "lane restarted",
        "warning",
        _restarted,
        "Lane {device} was lost a moment ago and has been started again{error}.",
        "Nothing now. If it comes back, run kvd doctor and read the log: journalctl -u kvd.",
    ),
    Kind(
        "missing ranks",
        "warning",
        _missing_ranks,
        "Engine {engine} has waited {waiting} for {ranks} of {size}; it has no cache till then.",
        "Look at the log of that rank: is it running, and does it use this runtime directory?",
    ),
    Kind(
        "old jobs",
        "warning",
        _old_jobs,
        "The oldest job of lane {device} has waited {age}; {queued} in the queue.",
        "See the stages of its jobs: long in 'stream_wait' is an engine whose stream stands still,"
        " long in 'queued' or 'copied' is a device with too much to do.",
    ),
    Kind(
        "no room",
        "warning",
        _rises("counters", "full", word="chunk"),
        "{times} got no room in the last minute: everything in the pool is in use.",
        "Enlarge the pool (cpu_bytes), or let the engines serve fewer requests at a time.",
    ),
    Kind(
        "failed loads",
        "warning",
        _jobs("load", ("failed", "refused", "shed", "timeout")),
        "{jobs} of lane {device} came to nothing in the last minute ({outcomes}).",
        "The engine computes what it missed. If this goes on, read the log: journalctl -u kvd.",
    ),
    Kind(
        "failed stores",
        "warning",
        _jobs("store", ("failed", "refused", "shed", "timeout")),
        "{jobs} of lane {device} came to nothing in the last minute ({outcomes}).",
        "These chunks will be computed again. If this goes on, read the log: journalctl -u kvd.",
    ),
    Kind(
        "loop lag",
        "warning",
        _lag,
        "The broker was held up for {lag} in the last minute.",
        "Look whether the machine is out of CPU or swaps; give kvd a core of its own.",
    ),
    Kind(
        "descriptors",
        "warning",
        _descriptors,
        "{open} of {most} file descriptors are in use.",
        "Raise LimitNOFILE in the unit (ulimit -n), or end engines that nobody needs.",
    ),
    Kind(
        "sessions",
        "warning",
        _sessions,
        "{open} of {limit} sessions are open.",
        "Raise max_sessions in the configuration, or end engines that nobody needs.",
    ),
    Kind(
        "replies dropped",
        "warning",
        _dropped_replies,
        "Lane {device} dropped {times} in the last minute, because an engine did not read them.",
        "Look for an engine that hangs: kvd engines names the processes.",
    ),
    Kind(
        "messages dropped",
        "warning",
        _rises("broker", "dropped_frames", word="message"),
        "{times} could not be understood in the last minute.",
        "Look in the log for who sent them; an engine may run another version of kvd's client.",
    ),
    Kind(
        "bad keys",
        "warning",
        _rises("counters", "bad_key", word="chunk"),
        "{times} with a key that kvd cannot hold came in the last minute.",
        "Look at the engine's connector; docs/protocol.md says what a key may be.",
    ),
    Kind(
        "leases expired",
        "warning",
        _rises("counters", "leases_expired", word="lease"),
        "{times} ran out in the last minute: an engine did not report the end of its load.",
        "Look whether an engine hangs or was stopped; kvd engines names the processes.",
    ),
    Kind(
        "stores given up",
        "warning",
        _rises("counters", "tickets_expired", word="chunk"),
        "{times} had room, but their bytes did not come in time.",
        "Look whether an engine hangs or was stopped; kvd engines names the processes.",
    ),
    Kind(
        "evicted young",
        "hint",
        _young,
        "Chunks of {model} are evicted when they are about {age} old: the pool is small for"
        " this load.",
        "A larger pool (cpu_bytes) keeps them longer; reuse_threshold = 2 stores only what"
        " is asked for twice.",
    ),
    Kind(
        "few hits",
        "hint",
        _few_hits,
        "Almost no chunk that engines look for is there ({share} in the last minute).",
        "Right after a start this passes. Else prompts share nothing, or are evicted before"
        " they come back: see the age at eviction.",
    ),
)
