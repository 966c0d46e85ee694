"""What operators' tools ask for: drain and resume, clear and evict, check, explain, reload.

File rights and the settings allow_users and allow_groups decide who may connect at all; of
those that may, only sessions of kind `tool` are served here, so that an engine cannot ask by
mistake. Each becomes a line of the log with the peer's uid and pid.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kvd.broker.effects import Effect, LogEvent, ToLane
from kvd.broker.sessions import Request
from kvd.broker.state import BackgroundTasks, BrokerState, OperatorDrain, Task
from kvd.broker.tiers.tiering import Tiering
from kvd.cache.chunks import EMPTY_PIECES, PIECE_SLOTS
from kvd.cache.namespaces import Namespace
from kvd.client_names import Peer
from kvd.config.settings import KNOWN
from kvd.config.sources import Loaded
from kvd.errors import ConfigError, IntegrityError, Refused
from kvd.metrics.counts import MissReason
from kvd.wire.link import LaneLog
from kvd_proto.messages import (
    MAX_TEXT,
    Check,
    Checked,
    ChunkFate,
    Clear,
    Cleared,
    ConfigChange,
    ConfigReloaded,
    ConfigShown,
    Drain,
    Drained,
    Error,
    ErrorCode,
    Explain,
    Explained,
    Message,
    ReloadConfig,
    Resume,
    Resumed,
    ShowConfig,
)
from kvd_proto.sizes import format_duration, format_size

CHECK_SLOTS = 1024  # a piece of a check: about 5 µs for each chunk in them
WHOLE_CHUNKS = 2048  # at most so many are checked in one moment: some 20 ms

Handler = Callable[[Request[Any]], list[Effect]]


class Operations:
    """Decisions about operators' requests; `background` does what takes long."""

    def __init__(self, state: BrokerState, background: BackgroundTasks, tiering: Tiering) -> None:
        self._state = state
        self._tiering = tiering
        self._background = background

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which request; each refuses sessions that are no tools."""
        return {
            Drain: for_tools(self._drain),
            Resume: for_tools(self._resume),
            Clear: for_tools(self._clear),
            Check: for_tools(self._check),
            Explain: for_tools(self._explain),
        }

    def _drain(self, request: Request[Drain]) -> list[Effect]:
        """Take no new stores. Loads go on: the cache is of use until the daemon stops."""
        state, session = self._state, request.session
        if state.stopping:
            raise Refused(ErrorCode.DRAINING, "the daemon is stopping and takes no stores already")
        effects: list[Effect] = []
        if state.drain is None:
            state.drain = OperatorDrain(session.peer, request.now)
            text = f"drained by {by(session.peer)}: no new stores until resumed"
            effects.append(session.event(text))
        stores, leases = in_flight(state, state.drain.since)
        for namespace in state.open_namespaces:
            namespace.table.lending.end_all_loans()
        return [request.reply(Drained(stores=stores, leases=leases)), *effects]

    def _resume(self, request: Request[Resume]) -> list[Effect]:
        state, session = self._state, request.session
        if state.stopping:
            raise Refused(
                ErrorCode.DRAINING,
                "the daemon is stopping, which cannot be undone; start it again instead",
            )
        drain, state.drain = state.drain, None
        effects: list[Effect] = [request.reply(Resumed(was_draining=drain is not None))]
        if drain is not None:
            lasted = format_duration(request.now - drain.since)
            effects.append(session.event(f"resumed by {by(session.peer)} after {lasted} of drain"))
        return effects

    # --------------------------------------------------------------- chunks

    def _clear(self, request: Request[Clear]) -> list[Effect]:
        """Drop everything at once, as a reset does, or piece by piece what is of no use."""
        namespaces, which = self._named(request.message.namespace)
        who, seconds = by(request.session.peer), request.message.unused_seconds
        if seconds is not None:
            for namespace in namespaces:
                namespace.table.uses.set_time(request.now)
            age = format_duration(seconds)
            what = f"{which} rid of what was not used for {age} by {who}"
            self._background.start("sweeps", self._clear_old(request, seconds, namespaces, what))
            return []
        chunks = nbytes = deferred = 0
        effects: list[Effect] = []
        lacks = dict[str, None]()
        for namespace in namespaces:
            done, slots, lack = self._state.reset(namespace, by_operator=True)
            lacks.update({lack: None} if lack else {})
            chunks += done.dropped
            nbytes += done.dropped * namespace.geometry.bytes_per_chunk
            deferred += done.deferred
            effects += self._state.revoke(namespace, slots)
            effects += self._tiering.reset(namespace)
        if self._state.namespaces is not None:
            for namespace in self._state.namespaces.closable():
                if namespace in namespaces:
                    self._state.namespaces.close(namespace)
        cleared = _cleared(request, f"{which} cleared by {who}", chunks, nbytes, deferred)
        if lacks:
            error = Error.of(ErrorCode.NOT_READY, "; ".join(lacks))
            cleared[0] = request.reply(error)
        return effects + cleared

    def _clear_old(
        self, request: Request[Clear], seconds: float, namespaces: Sequence[Namespace], what: str
    ) -> Task:
        """Go once over all slots; a namespace that is closed meanwhile is passed over."""
        chunks = nbytes = 0
        for namespace in namespaces:
            for first in range(0, namespace.geometry.num_slots, PIECE_SLOTS):
                if not self._state.is_open(namespace):
                    break
                gone = namespace.table.remove(first, PIECE_SLOTS, seconds)
                chunks += gone
                nbytes += gone * namespace.geometry.bytes_per_chunk
                if gone or first % (PIECE_SLOTS * EMPTY_PIECES) == 0:
                    yield []
            else:
                namespace.table.give_back()
        yield _cleared(request, what, chunks, nbytes)

    # ---------------------------------------------------------------- check

    def _check(self, request: Request[Check]) -> list[Effect]:
        self._background.start("checks", self._check_all(request))
        return []

    def _check_all(self, request: Request[Check]) -> Task:
        """Check that the tables agree, slots of a namespace at a time, then what tiers hold of it.

        Each slot is looked at in one moment, so what changes between two pieces does no harm.
        Where few chunks are kept everything is checked once more in one moment, with what
        takes longer: the division of the pool, overlaps, the indexes of sessions.
        """
        chunks = below = 0
        try:
            for namespace in self._state.open_namespaces:
                for position in range(0, namespace.geometry.num_slots, CHECK_SLOTS):
                    if self._state.is_open(namespace):
                        chunks += namespace.table.slots.check_slots(position, CHECK_SLOTS)
                        yield []
                if (tiers := namespace.directory.tiers) is None:
                    continue
                for position in range(0, tiers.places, CHECK_SLOTS):
                    if self._state.is_open(namespace):
                        below += tiers.check_places(position, position + CHECK_SLOTS)
                        yield []
            whole = chunks + below <= WHOLE_CHUNKS
            if whole:
                self._state.check_integrity()
        except IntegrityError as error:
            text = f"what the broker believes contradicts itself: {error}"
            wrong = Checked(violation=str(error)[:1000], chunks=chunks, whole=False)
            yield [request.reply(wrong), LogEvent(text, "error")]
        else:
            yield [request.reply(Checked(violation="", chunks=chunks, whole=whole))]

    # -------------------------------------------------------------- explain

    def _explain(self, request: Request[Explain]) -> list[Effect]:
        namespaces, _ = self._named(request.message.namespace)
        tiers = [tier.name for tier in self._state.tiers]
        fates = (_fate(each, request.message.key, request.now, tiers) for each in namespaces)
        return [request.reply(Explained(chunks=tuple(fates)))]

    def _named(self, ns_id: bytes | None) -> tuple[Sequence[Namespace], str]:
        """Return the namespaces that are meant, and what logs call them."""
        if ns_id is None:
            return self._state.open_namespaces, "all namespaces"
        namespace = self._state.namespace(ns_id)
        if namespace is None:
            raise Refused(
                ErrorCode.BAD_STATE,
                f"no namespace {ns_id.hex()} is open; `kvd namespaces` lists those that are",
            )
        return [namespace], f"namespace {ns_id.hex()[:8]} ({namespace.label})"


def _cleared(
    request: Request[Clear], what: str, chunks: int, nbytes: int, deferred: int = 0
) -> list[Effect]:
    text = f"{what}: {chunks} chunks dropped, {format_size(nbytes)}"
    if deferred:
        text += f"; {deferred} more go when their leases end"
    reply = Cleared(chunks=chunks, bytes=nbytes, deferred=deferred)
    return [request.reply(reply), LogEvent(text)]


def _fate(namespace: Namespace, key: bytes, now: float, tier_names: Sequence[str]) -> ChunkFate:
    """What a namespace knows of a key, with the names of the tiers that are known to have it."""
    table, directory = namespace.table, namespace.directory
    reason, ghost = table.misses.reason(key)
    slot: int | None = None
    used_ms: int | None = None
    if reason in {MissReason.READY, MissReason.BEING_STORED}:
        slot = directory.find(key)
    if reason is MissReason.READY and slot is not None:
        table.uses.set_time(now)
        used_ms = int(1000 * table.uses.ages([slot])[0])
    place = None if directory.tiers is None else directory.tiers.find(key)
    mask = 0 if place is None else place.tiers
    return ChunkFate(
        namespace=namespace.id,
        model=namespace.label,
        reason=reason.value,
        slot=slot,
        used_ms=used_ms,
        gone_ms=None if ghost is None else int(1000 * max(0.0, now - ghost.gone)),
        requests=0 if ghost is None else ghost.seen,
        tiers=tuple(name for tier, name in enumerate(tier_names) if mask >> tier & 1),
    )


def by(peer: Peer) -> str:
    """Return how logs name whoever gave an order."""
    return f"uid {peer.uid} pid {peer.pid}"


def in_flight(state: BrokerState, since: float) -> tuple[int, int]:
    """Return what began before a drain and has not ended: chunks being written, and leases.

    Leases that were taken later do not count: loads go on in a drain, which would never end.
    """
    stores = leases = 0
    for namespace in state.open_namespaces:
        counts = namespace.table.slots.stats()
        stores += counts["writing"] + counts["draining"]
        leases += namespace.table.slots.leases.count_until(since)
    return stores, leases


def for_tools(handler: Handler) -> Handler:
    """Return the same handler, but refused to sessions that are no tools."""

    def guarded(request: Request[Any]) -> list[Effect]:
        if request.session.kind != "tool":
            raise Refused(
                ErrorCode.BAD_STATE,
                f"{type(request.message).__name__} by a {request.session.kind}: this is for"
                " operators' tools only, such as the kvd command",
            )
        return handler(request)

    return guarded


Asked = tuple[str, Request[ReloadConfig] | None]
"""Who wants the configuration read, and the request; a signal has none."""


class ConfigReload:
    """Decisions about the configuration; `loaded` is what holds, with its origins."""

    def __init__(self, state: BrokerState, loaded: Loaded) -> None:
        self._state = state
        self.loaded = loaded
        self._asked: list[Asked] = []
        self._served: list[Asked] = []  # by the reading that is under way

    def handlers(self) -> dict[type[Message], Handler]:
        """Return who serves which request."""
        return {ReloadConfig: for_tools(self._reload), ShowConfig: for_tools(self._show)}

    def sighup(self) -> None:
        """Have the configuration read again, as SIGHUP asks."""
        self._asked.append(("SIGHUP", None))

    @property
    def under_way(self) -> bool:
        """The configuration is being read."""
        return bool(self._served)

    def begin(self) -> bool:
        """Whether the configuration is to be read now; `read` must follow."""
        if self._served or not self._asked:
            return False
        self._served, self._asked = self._asked, []
        return True

    def finish(self, outcome: Loaded | ConfigError) -> list[Effect]:
        """The configuration as it is now, or why it cannot be used."""
        served, self._served = self._served, []
        who = ", ".join(who for who, _ in served)
        if isinstance(outcome, ConfigError):
            problems = "; ".join(str(outcome).splitlines())
            text = f"reload by {who} refused, the old settings hold: {problems}"
            answer: Message = Error.of(ErrorCode.BAD_CONFIG, str(outcome))
            effects: list[Effect] = [LogEvent(text, "error")]
        else:
            effects, answer = self._take_up(outcome, who)
        effects += [request.reply(answer) for _, request in served if request is not None]
        return effects

    # --------------------------------------------------------------- helpers

    def _reload(self, request: Request[ReloadConfig]) -> list[Effect]:
        self._asked.append((by(request.session.peer), request))
        return []

    def _show(self, request: Request[ShowConfig]) -> list[Effect]:
        return [request.reply(ConfigShown(config=self.loaded.as_json()))]

    def _take_up(self, read: Loaded, who: str) -> tuple[list[Effect], ConfigReloaded]:
        old, state = self.loaded.settings, self._state
        self.loaded, changes = apply_live_settings(self.loaded, read)
        settings = state.settings = self.loaded.settings
        state.registry.max_sessions = settings.max_sessions
        state.registry.max_sessions_per_user = settings.max_sessions_per_user
        if state.namespaces is not None:
            state.namespaces.take_up(settings)
        effects: list[Effect] = []
        if settings.log_level != old.log_level:
            level = LaneLog(level=settings.log_level)
            effects += [ToLane(device, level) for device in state.lanes]
        effects.append(LogEvent(f"configuration reloaded by {who}: {_words(changes)}"))
        effects += [LogEvent(text, "warning") for text in read.warnings]
        answer = ConfigReloaded(
            file=str(read.file or ""),
            changes=tuple(changes),
            warnings=read.warnings,
        )
        return effects, answer


def _words(changes: Iterable[ConfigChange]) -> str:
    parts = []
    for live, when in ((True, ""), (False, "at the next restart: ")):
        told = [f"{it.key} = {it.new} (was {it.old})" for it in changes if it.live is live]
        if told:
            parts.append(when + ", ".join(told))
    return "; ".join(parts) or "nothing changed"


def apply_live_settings(present: Loaded, read: Loaded) -> tuple[Loaded, list[ConfigChange]]:
    """Return what holds for a daemon with `present` after it read `read`, and the changes.

    Settings that cannot change live keep value and origin; they wait for a restart.
    """
    values, origins, waiting, changes = {}, dict(read.origins), {}, []
    for key, known in KNOWN.items():
        old, new = getattr(present.settings, key), getattr(read.settings, key)
        if old == new:
            continue
        live, origin = known.live, read.origins[key][:MAX_TEXT]
        changes.append(ConfigChange(key=key, old=str(old), new=str(new), origin=origin, live=live))
        if live:
            values[key] = new
        else:
            waiting[key] = (new, origins[key])
            origins[key] = present.origins[key]
    settings = msgspec.structs.replace(present.settings, **values)
    return replace(read, settings=settings, origins=origins, waiting=waiting), changes
