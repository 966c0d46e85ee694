"""The table of conditions: what can be wrong with a daemon, and the remedies.

The broker checks it when it reports, over the last minute; `kvd status`, the page, `kvd top` and
`kvd doctor` show the conditions of the report. Levels: `error` costs engines their cache now,
`warning` will or may, `hint` could go better. Many conditions are also alerts, with thresholds of
their own: deploy/prometheus/kvd.rules.yml.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from kvd.metrics import schema
from kvd.metrics.counts import BREAKER_REASONS
from kvd.metrics.reading import Span, duration, latency, percent, several, shorten, size

Level = Literal["error", "warning", "hint"]
Match = Mapping[str, Any] | bool
Predicate = Callable[[Span], Match]

SILENT_SECONDS = 3.0  # lanes are pinged every half second
OLD_JOB_SECONDS = 2.0
WAITING_SECONDS = 30.0  # ranks of one engine do not start that far apart
LAG_SECONDS = 0.25
NEARLY_ALL = 0.9
REFUSED_SHARE = 0.05  # as the alert KvdStoresRefused
YOUNG_SECONDS = 60.0
LATE_SECONDS = 5.0  # an idle engine publishes once a second; as the alert KvdEventsLate
ASIDE_SECONDS = 5.0  # a breaker may open for a moment
FREQUENT = 3
MAX_NAMES = 3  # of the items beside the first for which a condition holds
_NAME_FIELDS = {"lanes": "device", "engines": "name", "namespaces": "model", "tiers": "name"}
UNKEPT_SHARE = 0.1  # with keep=asked, as the alert KvdTierLagging; with keep=all any chunk counts
BEHIND = (
    "Tier {name} falls behind: {times} an hour are not kept.",
    (
        "Stores are faster than the tier, and none waits for it: keep=asked, a larger queue, a"
        " faster medium, or a larger pool."
    ),
)


@dataclass(frozen=True, slots=True)
class ConditionRule:
    """One row of the table.

    predicate: returns whether the condition holds, or the values (beside the report's own fields)
        that fill `text` and `remedy` if it does.
    items: the list of the report whose items are checked one by one; empty for the whole report.
        Items for which it holds are one condition: texts of the first, names of the next few.
    """

    name: str
    predicate: Predicate
    text: str
    remedy: str
    items: Literal["", "lanes", "engines", "namespaces", "tiers"] = ""


def conditions(span: Span) -> list[schema.Condition]:
    """Return the conditions that hold now, the worst first."""
    result = []
    for level, rules in CONDITIONS.items():
        for rule in rules:
            parts = span.parts(rule.items) if rule.items else [span]
            matches = [(part, match) for part in parts if (match := rule.predicate(part))]
            if matches:
                part, match = matches[0]
                values = {**part.now, **(match if isinstance(match, Mapping) else {})}
                text = rule.text.format_map(values) + _others(rule, [p for p, _ in matches[1:]])
                remedy = rule.remedy.format_map(values)
                result.append(schema.Condition(rule.name, level, text, remedy))
    return result


def _others(rule: ConditionRule, parts: Sequence[Span]) -> str:
    """Return ` The same holds for 5 other lanes: a, b, c and 2 more.`; empty for no parts."""
    if not parts:
        return ""
    names = [shorten(part.now[_NAME_FIELDS[rule.items]]) for part in parts[:MAX_NAMES]]
    more = f" and {len(parts) - MAX_NAMES} more" if len(parts) > MAX_NAMES else ""
    others = several(len(parts), f"other {rule.items[:-1]}")
    return f" The same holds for {others}: {', '.join(names)}{more}."


# ------------------------------------------------------------------ predicates


def _pool(span: Span) -> Match:
    # Lanes and the drain have conditions of their own.
    failed = [check for check in span.now["checks"] if check["name"] == "pool" and not check["ok"]]
    return bool(failed) and {"why": failed[0]["text"].rstrip(".")}


def _error(part: Span) -> str:
    error = part.now["last_error"].rstrip(".")
    return f": {error}" if error else ""


def _in_state(state: str) -> Predicate:
    return lambda part: part.now["state"] == state and {"error": _error(part)}


def _restarted(lane: Span) -> Match:
    return lane.rise("counters", "restarts") > 0 and _in_state("up")(lane)


def _pinning(lane: Span) -> Match:
    usable, pool = size(lane.now["usable_bytes"]), size(lane.now["pool_bytes"])
    error = lane.now["pin_error"].rstrip(".")
    return bool(error) and {"error": error, "usable": usable, "pool": pool}


def _silent(lane: Span) -> Match:
    heard = lane.now["seconds_since_heard"] or 0.0
    silent = lane.now["state"] == "up" and heard > SILENT_SECONDS and not _stopped(lane)
    return silent and {"silence": duration(heard)}


def _stopped(part: Span) -> Match:
    return bool(part.now["stopped"])


def _old_jobs(lane: Span) -> Match:
    age, queued = lane.now["oldest_job_seconds"], several(lane.now["queued_jobs"], "job")
    return age > OLD_JOB_SECONDS and {"age": duration(age), "queued": queued}


def _missing_ranks(engine: Span) -> Match:
    ranks = [str(rank) for rank in engine.now["missing_ranks"]]
    longest = max((session["seconds"] for session in engine.now["sessions"]), default=0.0)
    if engine.now["attached"] or not ranks or longest <= WAITING_SECONDS:
        return False
    text = f"rank{'s' if len(ranks) > 1 else ''} {', '.join(ranks)}"
    return {"ranks": text, "waiting": duration(longest)}


def _failed(direction: str) -> Predicate:
    def predicate(lane: Span) -> Match:
        outcomes = ("failed", "refused", "shed", "timeout")
        rises = {name: lane.rise("counters", "jobs", f"{direction}_{name}") for name in outcomes}
        text = ", ".join(f"{times:.0f} {name}" for name, times in rises.items() if times)
        return bool(text) and {"jobs": several(sum(rises.values()), direction), "outcomes": text}

    return predicate


def _rises(*path: str, word: str, plural: str | None = None) -> Predicate:
    def predicate(span: Span) -> Match:
        times = span.rise(*path)
        return times > 0 and {"times": several(times, word, plural)}

    return predicate


def _lag(span: Span) -> Match:
    lag = span.now["broker"]["loop_lag_max_seconds"]
    return lag > LAG_SECONDS and {"lag": latency(lag)}


def _descriptors(span: Span) -> Match:
    broker: Mapping[str, Any] = span.now["broker"]
    return broker["open_fds"] > NEARLY_ALL * broker["max_fds"] > 0 and broker


def _sessions(span: Span) -> Match:
    sessions: Mapping[str, Any] = span.now["sessions"]
    return sessions["open"] > NEARLY_ALL * sessions["limit"] > 0 and sessions


def _late(engine: Span) -> Match:
    lag = engine.now["published"]["lag_max_seconds"]
    return lag > LATE_SECONDS and {"lag": latency(lag)}


def _set_aside(tier: Span) -> Match:
    seconds = tier.now["set_aside_seconds"]
    times = sum(tier.rise("counters", "opened", reason) for reason in BREAKER_REASONS)
    if tier.now["state"] != "up" or (seconds <= ASIDE_SECONDS and times < FREQUENT):
        return False
    if seconds > ASIDE_SECONDS:
        text = f"has been set aside for {duration(seconds)}"
    else:
        text = f"was set aside {several(times, 'time')} in the last minute"
    return {"how": text, "error": _error(tier)}


def _unopened(tier: Span) -> Match:
    seconds = tier.now["unopened_seconds"]
    late = tier.now["state"] == "up" and seconds > ASIDE_SECONDS
    return late and {"time": duration(seconds), "error": _error(tier)}


def _tier_failed(tier: Span) -> Match:
    times = tier.rise("counters", "puts", "failed") + tier.rise("counters", "gets", "failed")
    return times > 0 and {"times": several(times, "chunk"), "error": _error(tier)}


def _tier_full(tier: Span) -> Match:
    used, total = size(tier.now["used_bytes"]), size(tier.now["total_bytes"] or None)
    return bool(tier.now["full"]) and {"used": used, "total": total}


def _behind(*, keep: str) -> Predicate:
    def predicate(tier: Span) -> Match:
        num_unkept, num_put = tier.rise("counters", "unkept"), tier.rise("counters", "puts", "ok")
        threshold = 0.0 if keep == "all" else UNKEPT_SHARE * (num_unkept + num_put)
        if tier.now["keep"] != keep or num_unkept <= threshold:
            return False
        return {"times": several(num_unkept * 3600 / tier.seconds, "chunk")}

    return predicate


def _young(namespace: Span) -> Match:
    age = namespace.histogram("counters", "eviction_age").quantile(0.5)
    if age is None or age >= YOUNG_SECONDS:
        return False
    return {"age": duration(age) if age >= 1 else latency(age)}


def _refused(span: Span) -> Match:
    share = span.share("unstored", "accepted")
    return share is not None and share > REFUSED_SHARE and {"share": percent(share)}


def _few_hits(span: Span) -> Match:
    share = span.share("hit_chunks", "lookup_chunks")
    few = share is not None and share < 0.01 and span.rise("counters", "stored") > 0
    return few and {"share": percent(share)}


# -------------------------------------------------------------------- the table

ERRORS = (
    ConditionRule(
        "lane down",
        _in_state("down"),
        "Lane {device} is down{error}.",
        "kvd starts it again by itself. If it stays down, run kvd doctor and read the log:"
        " journalctl -u kvd.",
        "lanes",
    ),
    ConditionRule(
        "lane stopped",
        _stopped,
        "Lane {device} does nothing: {stopped}.",
        "Let its process go on with kill -CONT, or end it with kill -KILL: then kvd starts another,"
        " as it does by itself after lane_timeout_seconds.",
        "lanes",
    ),
)
WARNINGS = (
    ConditionRule(
        "not ready",
        _pool,
        "Pool: {why}.",
        "Wait while the figure grows; what is ready is served already. If it stands still,"
        " run kvd doctor.",
    ),
    ConditionRule(
        "lane starting",
        _in_state("starting"),
        "Lane {device} is starting{error}.",
        "Wait some seconds; until then engines on this device compute everything themselves.",
        "lanes",
    ),
    ConditionRule(
        "pinning",
        _pinning,
        "Lane {device} cannot pin the pool: {error}. It can use {usable} of {pool}.",
        "Where kernel memory is short (dmesg, MemAvailable): a smaller cpu_bytes. Linux 6.11 to"
        " 6.13: use another version. Movable zone: boot without movablecore=. The lane is replaced"
        " after lane_idle_seconds, at once by a restart of kvd.",
        "lanes",
    ),
    ConditionRule(
        "draining",
        lambda span: bool(span.now["draining"]),
        "The daemon is draining: it takes no new chunks, and is not ready.",
        "To take chunks again: kvd resume. If it is being stopped, there is nothing to do.",
    ),
    ConditionRule(
        "lane silent",
        _silent,
        "Lane {device} has not answered for {silence}.",
        "Its device or this machine may hang; when its time is up kvd ends the lane and starts"
        " another.",
        "lanes",
    ),
    ConditionRule(
        "lane restarted",
        _restarted,
        "Lane {device} was lost a moment ago and has been started again{error}.",
        "Nothing now. If it comes back, run kvd doctor and read the log: journalctl -u kvd.",
        "lanes",
    ),
    ConditionRule(
        "missing ranks",
        _missing_ranks,
        "Engine {name} has waited {waiting} for {ranks} of {world_size}; it has no cache till"
        " then.",
        "Look at the log of that rank: is it running, and does it use this runtime directory?",
        "engines",
    ),
    ConditionRule(
        "old jobs",
        _old_jobs,
        "The oldest job of lane {device} has waited {age}; {queued} in the queue.",
        "See the stages of its jobs: long in 'stream_wait' is an engine whose stream stands still,"
        " long in 'queued' or 'copied' is a device with too much to do.",
        "lanes",
    ),
    ConditionRule(
        "no room",
        _refused,
        "In the last minute {share} as many chunks found no room as were stored.",
        "Enlarge the pool (cpu_bytes), or let the engines serve fewer requests at a time.",
    ),
    ConditionRule(
        "failed loads",
        _failed("load"),
        "{jobs} of lane {device} came to nothing in the last minute ({outcomes}).",
        "The engine computes what it missed. If this goes on, read the log: journalctl -u kvd.",
        "lanes",
    ),
    ConditionRule(
        "failed stores",
        _failed("store"),
        "{jobs} of lane {device} came to nothing in the last minute ({outcomes}).",
        "These chunks will be computed again. If this goes on, read the log: journalctl -u kvd.",
        "lanes",
    ),
    ConditionRule(
        "loop lag",
        _lag,
        "The broker was held up for {lag} in the last minute.",
        "Look whether the machine is out of CPU or swaps; give kvd a core of its own.",
    ),
    ConditionRule(
        "descriptors",
        _descriptors,
        "{open_fds} of {max_fds} file descriptors are in use.",
        "Raise LimitNOFILE in the unit (ulimit -n), or end engines that are not needed.",
    ),
    ConditionRule(
        "sessions",
        _sessions,
        "{open} of {limit} sessions are open.",
        "Raise max_sessions in the configuration, or end engines that are not needed.",
    ),
    ConditionRule(
        "tier starting",
        _in_state("starting"),
        "Tier {name} is starting{error}.",
        "Wait some seconds; until then chunks that only it has are misses. If it stays so, run kvd"
        " doctor.",
        "tiers",
    ),
    ConditionRule(
        "tier down",
        _in_state("down"),
        "Tier {name} is down{error}.",
        "kvd starts it again by itself; until then chunks that only it has are misses. If it stays"
        " down, run kvd doctor and read the log: journalctl -u kvd.",
        "tiers",
    ),
    ConditionRule(
        "tier stopped",
        _stopped,
        "Tier {name} does nothing: {stopped}.",
        "Let its process go on with kill -CONT, or end it with kill -KILL: then kvd starts"
        " another, as it does by itself after some seconds.",
        "tiers",
    ),
    ConditionRule(
        "tier set aside",
        _set_aside,
        "Tier {name} {how}{error}.",
        "Chunks that only it has are misses; kvd tries it again by itself. Look at its medium:"
        " kvd doctor, iostat -x 1, dmesg; of a shared one at its master.",
        "tiers",
    ),
    ConditionRule(
        "tier unopened",
        _unopened,
        "Tier {name} has not begun a namespace that is in use for {time}{error}.",
        "None of its chunks are kept there. kvd tries again each second. Look at its medium: kvd"
        " doctor, iostat -x 1, dmesg; of a shared one at its master.",
        "tiers",
    ),
    ConditionRule(
        "tier corrupt",
        _rises("counters", "gets", "corrupt", word="chunk"),
        "{times} that came from tier {name} in the last minute were not what was put there;"
        " none of them was served.",
        "The medium, its controller or memory is broken, or another program writes there: look at"
        " dmesg and smartctl, and take it out of the setting tier if it goes on.",
        "tiers",
    ),
    ConditionRule(
        "tier failed",
        _tier_failed,
        "{times} of tier {name} failed in the last minute{error}.",
        "Look at its medium: dmesg, smartctl -a; an empty directory starts an empty tier.",
        "tiers",
    ),
    ConditionRule(
        "tier full",
        _tier_full,
        "Tier {name} has no room for more chunks; it takes {used} of {total}.",
        "Make room on its file system, or lower its size; what it has is served.",
        "tiers",
    ),
    ConditionRule("tier behind", _behind(keep="all"), *BEHIND, "tiers"),
    ConditionRule(
        "replies dropped",
        _rises("counters", "dropped_replies", word="reply", plural="replies"),
        "Lane {device} dropped {times} in the last minute, because an engine did not read them.",
        "Look for an engine that hangs: kvd engines names the processes.",
        "lanes",
    ),
    ConditionRule(
        "messages dropped",
        _rises("broker", "dropped_frames", word="message"),
        "{times} could not be read in the last minute.",
        "The log says which process sent them (grep 'cannot be read'); it may run another version"
        " of kvd's client, or be no client of kvd.",
    ),
    ConditionRule(
        "leases expired",
        _rises("counters", "leases_expired", word="lease"),
        "{times} ran out in the last minute: an engine did not report the end of its load.",
        "Look whether an engine hangs or was stopped; kvd engines names the processes.",
    ),
    ConditionRule(
        "stores given up",
        _rises("counters", "tickets_expired", word="chunk"),
        "{times} had room, but their bytes did not come in time.",
        "Look whether an engine hangs or was stopped; kvd engines names the processes.",
    ),
)
HINTS = (
    ConditionRule(
        "evicted young",
        _young,
        "Chunks of {model} are evicted when they are about {age} old: the pool is small for"
        " this load.",
        "A larger pool (cpu_bytes) keeps them longer.",
        "namespaces",
    ),
    ConditionRule("tier behind", _behind(keep="asked"), *BEHIND, "tiers"),
    ConditionRule(
        "engine's events late",
        _late,
        "Engine {name} published KV events up to {lag} late in the last minute; routers choose"
        " engines by what was cached that long ago.",
        "An idle engine publishes about once a second, one at work in each step. Look whether the"
        " engine hangs or is overloaded, and whether the machine is out of CPU or swaps.",
        "engines",
    ),
    ConditionRule(
        "engine's events overrun",
        _rises("published", "kv_event_overruns", word="time"),
        "The ring of changes overran engine {name} {times} in the last minute, so that it looked"
        " through the directory for its KV events.",
        "Raise change_ring, or look whether the engine hangs: kvd engines names the processes.",
        "engines",
    ),
    ConditionRule(
        "few hits",
        _few_hits,
        "Almost no chunk that engines look up is found ({share} in the last minute).",
        "Right after a start this passes. Else prompts share nothing, or are evicted before"
        " they come back: see the age at eviction.",
    ),
)
CONDITIONS: dict[Level, tuple[ConditionRule, ...]] = {
    "error": ERRORS,
    "warning": WARNINGS,
    "hint": HINTS,
}
