"""Requests of operators' tools: drain, resume, clear, evict, check, explain, reload.

File rights and the settings allow_users and allow_groups decide who may connect. Only sessions of
kind `tool` are served here, so that an engine cannot ask by mistake. Orders are logged with the
peer's uid and pid.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from kvd.broker.effects import Effect, LogEvent, Reply, ToLane
from kvd.broker.sessions import Request, check_kind
from kvd.broker.state import BackgroundTasks, BrokerState, OperatorDrain, Task
from kvd.broker.tiers.tiering import Tiering
from kvd.cache.chunks import EMPTY_PIECES, PIECE_SLOTS
from kvd.cache.namespaces import Namespace
from kvd.client_names import Peer
from kvd.config.settings import SETTINGS
from kvd.config.sources import LoadedSettings
from kvd.errors import ConfigError, IntegrityError, Refusal
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
from kvd_proto.text import format_duration, format_size

CHECK_PIECE = 1024  # slots, or places of a tier table, of one piece of a check; 5 µs a chunk
WHOLE_CHUNKS = 2048  # up to this number all is checked at once: some 20 ms

Handler = Callable[[Request[Any]], list[Effect]]


class Operations:
    """Decisions about operators' requests; `background` runs long ones in pieces."""

    def __init__(self, state: BrokerState, background: BackgroundTasks, tiering: Tiering) -> None:
        self._state = state
        self._tiering = tiering
        self._background = background

    def handlers(self) -> dict[type[Message], Handler]:
        """Return the handler of each request; it refuses sessions that are no tools."""
        return {
            Drain: for_tools(self._drain),
            Resume: for_tools(self._resume),
            Clear: for_tools(self._clear),
            Check: for_tools(self._check),
            Explain: for_tools(self._explain),
        }

    def _drain(self, request: Request[Drain]) -> list[Effect]:
        """Take no new stores; loads go on. All loans end."""
        state, session = self._state, request.session
        if state.stopping:
            raise Refusal(ErrorCode.DRAINING, "the daemon is stopping and takes no stores already")
        effects: list[Effect] = []
        if state.drain is None:
            state.drain = OperatorDrain(session.peer, request.now)
            text = f"drained by {peer_text(session.peer)}: no new stores until resumed"
            effects.append(session.event(text))
        stores, leases = in_flight(state, state.drain.since)
        for namespace in state.open_namespaces:
            namespace.table.lending.end_all_loans()
        return [request.reply(Drained(stores=stores, leases=leases)), *effects]

    def _resume(self, request: Request[Resume]) -> list[Effect]:
        state, session = self._state, request.session
        if state.stopping:
            raise Refusal(
                ErrorCode.DRAINING,
                "the daemon is stopping, which cannot be undone; start it again instead",
            )
        drain, state.drain = state.drain, None
        effects: list[Effect] = [request.reply(Resumed(was_draining=drain is not None))]
        if drain is not None:
            lasted = format_duration(request.now - drain.since)
            effects.append(
                session.event(f"resumed by {peer_text(session.peer)} after {lasted} of drain")
            )
        return effects

    # --------------------------------------------------------------- chunks

    def _clear(self, request: Request[Clear]) -> list[Effect]:
        """Drop all chunks at once, as a reset does, or piece by piece those unused for long."""
        namespaces, title = self._named(request.message.namespace)
        peer, seconds = peer_text(request.session.peer), request.message.unused_seconds
        if seconds is not None:
            for namespace in namespaces:
                namespace.table.uses.set_time(request.now)
            age = format_duration(seconds)
            text = f"{title} rid of what was not used for {age} by {peer}"
            self._background.start("sweeps", self._clear_unused(request, seconds, namespaces, text))
            return []
        num_chunks = nbytes = num_deferred = 0
        effects: list[Effect] = []
        problems = dict[str, None]()  # each once, in order
        for namespace in namespaces:
            reset_done, to_revoke, problem = self._state.reset(namespace, by_operator=True)
            problems.update({problem: None} if problem else {})
            num_chunks += reset_done.dropped
            nbytes += reset_done.dropped * namespace.geometry.bytes_per_chunk
            num_deferred += reset_done.deferred
            effects += self._state.revoke(namespace, to_revoke)
            effects += self._tiering.reset(namespace)
        if self._state.namespaces is not None:
            for namespace in self._state.namespaces.closable():
                if namespace in namespaces:
                    self._state.namespaces.close(namespace)
        text = f"{title} cleared by {peer}"
        reply, event = _cleared(request, text, num_chunks, nbytes, num_deferred)
        if problems:
            reply = request.reply(Error.of(ErrorCode.NOT_READY, "; ".join(problems)))
        return [*effects, reply, event]

    def _clear_unused(
        self, request: Request[Clear], seconds: float, namespaces: Sequence[Namespace], text: str
    ) -> Task:
        """Go once over all slots; skip a namespace that is closed meanwhile."""
        num_chunks = nbytes = 0
        for namespace in namespaces:
            for first in range(0, namespace.geometry.num_slots, PIECE_SLOTS):
                if not self._state.is_open(namespace):
                    break
                num_removed = namespace.table.remove(first, PIECE_SLOTS, seconds)
                num_chunks += num_removed
                nbytes += num_removed * namespace.geometry.bytes_per_chunk
                if num_removed or first % (PIECE_SLOTS * EMPTY_PIECES) == 0:
                    yield []
            else:
                namespace.table.release_empty_columns()
        yield list(_cleared(request, text, num_chunks, nbytes))

    # ---------------------------------------------------------------- check

    def _check(self, request: Request[Check]) -> list[Effect]:
        self._background.start("checks", self._check_all(request))
        return []

    def _check_all(self, request: Request[Check]) -> Task:
        """Check that the tables agree: pieces of each namespace's slots, then of its tier table.

        A piece is checked in one moment, so changes between two pieces do no harm. If few chunks
        are kept, a last piece checks everything, with what takes longer: the division of the pool,
        overlaps, the indexes of sessions.
        """
        num_chunks = num_in_tiers = 0
        try:
            for namespace in self._state.open_namespaces:
                for position in range(0, namespace.geometry.num_slots, CHECK_PIECE):
                    if self._state.is_open(namespace):
                        num_chunks += namespace.table.slots.check_slots(position, CHECK_PIECE)
                        yield []
                if (tiers := namespace.directory.tiers) is None:
                    continue
                for position in range(0, tiers.places, CHECK_PIECE):
                    if self._state.is_open(namespace):
                        num_in_tiers += tiers.check_places(position, position + CHECK_PIECE)
                        yield []
            whole = num_chunks + num_in_tiers <= WHOLE_CHUNKS
            if whole:
                self._state.check_integrity()
        except IntegrityError as error:
            text = f"the broker's tables contradict each other: {error}"
            violation = Checked(violation=str(error)[:1000], chunks=num_chunks, whole=False)
            yield [request.reply(violation), LogEvent(text, "error")]
        else:
            yield [request.reply(Checked(violation="", chunks=num_chunks, whole=whole))]

    # -------------------------------------------------------------- explain

    def _explain(self, request: Request[Explain]) -> list[Effect]:
        namespaces, _ = self._named(request.message.namespace)
        tiers = [tier.name for tier in self._state.tiers]
        key, now = request.message.key, request.now
        fates = (_fate(namespace, key, now, tiers) for namespace in namespaces)
        return [request.reply(Explained(chunks=tuple(fates)))]

    def _named(self, ns_id: bytes | None) -> tuple[Sequence[Namespace], str]:
        """Return the namespace of this id, or all for None, and their name in logs."""
        if ns_id is None:
            return self._state.open_namespaces, "all open namespaces"
        namespace = self._state.namespace(ns_id)
        if namespace is None:
            raise Refusal(
                ErrorCode.BAD_STATE,
                f"no namespace {ns_id.hex()} is open; `kvd namespaces` lists those that are",
            )
        return [namespace], f"namespace {ns_id.hex()[:8]} ({namespace.model})"


def _cleared(
    request: Request[Clear], text: str, num_chunks: int, nbytes: int, num_deferred: int = 0
) -> tuple[Reply, LogEvent]:
    text = f"{text}: {num_chunks} chunks dropped, {format_size(nbytes)}"
    if num_deferred:
        text += f"; {num_deferred} more go when their leases end"
    reply = Cleared(chunks=num_chunks, bytes=nbytes, deferred=num_deferred)
    return request.reply(reply), LogEvent(text)


def _fate(namespace: Namespace, key: bytes, now: float, tier_names: Sequence[str]) -> ChunkFate:
    """Return what a namespace knows of a key, with the names of the tiers that have it."""
    table, directory = namespace.table, namespace.directory
    reason, ghost = table.misses.reason(key)
    slot: int | None = None
    used_ms: int | None = None
    if reason in {MissReason.READY, MissReason.BEING_STORED}:
        slot = directory.find(key)
    if reason is MissReason.READY and slot is not None:
        table.uses.set_time(now)
        used_ms = int(1000 * table.uses.ages([slot])[0])
    entry = None if directory.tiers is None else directory.tiers.find(key)
    mask = 0 if entry is None else entry.tiers
    return ChunkFate(
        namespace=namespace.id,
        model=namespace.model,
        reason=reason.value,
        slot=slot,
        used_ms=used_ms,
        gone_ms=None if ghost is None else int(1000 * max(0.0, now - ghost.left_at)),
        requests=0 if ghost is None else ghost.seen,
        tiers=tuple(name for tier, name in enumerate(tier_names) if mask >> tier & 1),
    )


def peer_text(peer: Peer) -> str:
    """Return how logs name the process that gave an order."""
    return f"uid {peer.uid} pid {peer.pid}"


def in_flight(state: BrokerState, since: float) -> tuple[int, int]:
    """Return the numbers of chunks being written and of leases that began before `since`.

    Later leases do not count: loads go on during a drain, which would never end.
    """
    num_stores = num_leases = 0
    for namespace in state.open_namespaces:
        counts = namespace.table.slots.stats()
        num_stores += counts["writing"] + counts["draining"]
        num_leases += namespace.table.slots.leases.count_until(since)
    return num_stores, num_leases


def for_tools(handler: Handler) -> Handler:
    """Return the same handler; it refuses sessions that are no tools."""

    def guarded(request: Request[Any]) -> list[Effect]:
        check_kind(request, "tool")
        return handler(request)

    return guarded


ReloadRequest = tuple[str, Request[ReloadConfig] | None]
"""Who asked to reload the configuration, and the request; SIGHUP has none."""


class ConfigReload:
    """Reloads the configuration of the running daemon for tools and SIGHUP, and shows it.

    `kvd.server` reads the file in a thread, because a disk may take its time. A request that comes
    meanwhile is answered from the next reading, which sees what was written before the request.

    Args:
        state: of the broker.
        loaded: the configuration in effect, with origins.
    """

    def __init__(self, state: BrokerState, loaded: LoadedSettings) -> None:
        self._state = state
        self.loaded = loaded
        self._next_requests: list[ReloadRequest] = []
        self._current_requests: list[ReloadRequest] = []  # answered by the reading under way

    def handlers(self) -> dict[type[Message], Handler]:
        """Return the handler of each request."""
        return {ReloadConfig: for_tools(self._reload), ShowConfig: for_tools(self._show)}

    def sighup(self) -> None:
        """Request a reload for SIGHUP."""
        self._next_requests.append(("SIGHUP", None))

    @property
    def under_way(self) -> bool:
        """Whether the configuration is being read."""
        return bool(self._current_requests)

    def begin(self) -> bool:
        """Return whether to read the configuration now; if so, `finish` must follow."""
        if self._current_requests or not self._next_requests:
            return False
        self._current_requests, self._next_requests = self._next_requests, []
        return True

    def finish(self, outcome: LoadedSettings | ConfigError) -> list[Effect]:
        """Apply the configuration that was read, or report why it cannot be used.

        Requests get a reply, SIGHUP none.
        """
        requests, self._current_requests = self._current_requests, []
        origin = ", ".join(name for name, _ in requests)
        if isinstance(outcome, ConfigError):
            problems = "; ".join(str(outcome).splitlines())
            text = f"reload by {origin} refused, the old settings hold: {problems}"
            answer: Message = Error.of(ErrorCode.BAD_CONFIG, str(outcome))
            effects: list[Effect] = [LogEvent(text, "error")]
        else:
            effects, answer = self._apply(outcome, origin)
        effects += [request.reply(answer) for _, request in requests if request is not None]
        return effects

    def _reload(self, request: Request[ReloadConfig]) -> list[Effect]:
        self._next_requests.append((peer_text(request.session.peer), request))
        return []

    def _show(self, request: Request[ShowConfig]) -> list[Effect]:
        return [request.reply(ConfigShown(config=self.loaded.as_json()))]

    def _apply(self, loaded: LoadedSettings, origin: str) -> tuple[list[Effect], ConfigReloaded]:
        """Apply the settings that are live; return effects and the reply."""
        old, state = self.loaded.settings, self._state
        self.loaded, changes = apply_live_settings(self.loaded, loaded)
        settings = state.settings = self.loaded.settings
        state.registry.max_sessions = settings.max_sessions
        state.registry.max_sessions_per_user = settings.max_sessions_per_user
        if state.namespaces is not None:
            state.namespaces.apply_settings(settings)
        effects: list[Effect] = []
        if settings.log_level != old.log_level:
            level = LaneLog(level=settings.log_level)
            effects += [ToLane(device, level) for device in state.lanes]
        effects.append(LogEvent(f"configuration reloaded by {origin}: {_changes_text(changes)}"))
        effects += [LogEvent(text, "warning") for text in loaded.warnings]
        answer = ConfigReloaded(
            file=str(loaded.file or ""),
            changes=tuple(changes),
            warnings=loaded.warnings,
        )
        return effects, answer


def _changes_text(changes: Iterable[ConfigChange]) -> str:
    parts = []
    for live, prefix in ((True, ""), (False, "at the next restart: ")):
        texts = [f"{c.key} = {c.new} (was {c.old})" for c in changes if c.live is live]
        if texts:
            parts.append(prefix + ", ".join(texts))
    return "; ".join(parts) or "nothing changed"


def apply_live_settings(
    current: LoadedSettings, loaded: LoadedSettings
) -> tuple[LoadedSettings, list[ConfigChange]]:
    """Return the configuration in effect after `loaded` was read, and the changes.

    Settings that cannot change live keep their value and origin until a restart.
    """
    values, origins, waiting, changes = {}, dict(loaded.origins), {}, []
    for key, known in SETTINGS.items():
        old, new = getattr(current.settings, key), getattr(loaded.settings, key)
        if old == new:
            continue
        live, origin = known.live, loaded.origins[key][:MAX_TEXT]
        changes.append(ConfigChange(key=key, old=str(old), new=str(new), origin=origin, live=live))
        if live:
            values[key] = new
        else:
            waiting[key] = (new, origins[key])
            origins[key] = current.origins[key]
    settings = msgspec.structs.replace(current.settings, **values)
    return replace(loaded, settings=settings, origins=origins, pending_restart=waiting), changes
