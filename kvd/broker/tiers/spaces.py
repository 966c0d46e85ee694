"""Which namespaces tiers' processes have, and under which epoch: openings, resets, closings."""

from collections.abc import Iterable

from kvd.broker.effects import Effect, NamespaceFds, ToTier
from kvd.broker.state import BrokerState
from kvd.broker.tiers.tier import Opening, Tier
from kvd.cache.namespaces import Namespace
from kvd.wire.tiering import CloseSpace, NewEpoch, OpenSpace, SpaceOpened


class TierSpaces:
    """Decisions about what tiers are told of namespaces."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._adopted: set[Namespace] = set()  # their epoch is not of this daemon's own

    def prune(self) -> None:
        """Forget namespaces that are closed."""
        self._adopted = set(filter(self._state.is_open, self._adopted))

    def tell(self, tier: Tier, now: float) -> list[Effect]:
        """Tell a process of namespaces that are in use, and of those that are closed."""
        effects: list[Effect] = []
        for namespace in [each for each in tier.spaces if not self._state.is_open(each)]:
            del tier.spaces[namespace]
            effects.append(ToTier(tier.index, CloseSpace(namespace=namespace.id)))
        for namespace in self._state.open_namespaces:
            tiers = namespace.directory.tiers
            # Before an engine is attached nobody knows how long descriptions are.
            if namespace in tier.spaces or tiers is None or not namespace.engines:
                continue
            if not tiers.is_leaving(tier.index):
                effects.append(_open(tier, namespace, now))
        return effects

    def opened(self, tier: Tier, message: SpaceOpened) -> list[Effect]:
        """A process serves a namespace, and may remember a reset that the daemon does not.

        The daemon's own epoch holds; where it has none, the latest that a tier remembers, and none
        older than the last reset that daemons remember.
        """
        namespace = self._state.namespace(message.namespace)
        opening = tier.spaces.get(namespace) if namespace is not None else None
        if namespace is None or opening is None or opening.answered:
            return []
        effects: list[Effect] = []
        opening.answered = True
        if namespace.inherited:
            namespace.inherited = False
            self._adopted.add(namespace)
        ours, theirs = namespace.epoch, message.epoch
        if theirs > ours and (not ours or namespace in self._adopted):
            if ours and namespace.directory.tiers is not None:
                namespace.directory.tiers.forget()
            namespace.take_epoch(theirs)
            self._adopted.add(namespace)
            # Those that have not answered yet are told when they have.
            others = [each for each in self._answered(namespace) if each is not tier]
            effects = _new_epoch(namespace, others)
        elif theirs != ours:
            effects = _new_epoch(namespace, [tier])
        self._settle(namespace)
        return effects

    def _settle(self, namespace: Namespace) -> None:
        """Begin to use tiers that have answered.

        A shared one waits for the others where the daemon has no epoch of its own: it would find
        what was there before a reset that they remember.
        """
        answered = self._answered(namespace)
        known = all(tier in answered for tier in self._state.tiers if not tier.info.shared)
        known = known or (namespace.epoch > 0 and namespace not in self._adopted)
        for tier in self._state.tiers:
            if (opening := tier.spaces.get(namespace)) is not None:
                opening.used = opening.answered and (known or not tier.info.shared)

    def reset(self, namespace: Namespace) -> list[Effect]:
        """A namespace was reset, and has another epoch."""
        self._adopted.discard(namespace)
        namespace.inherited = False
        told = [tier for tier in self._state.tiers if namespace in tier.spaces]
        deaf = [tier for tier in self._state.tiers if not tier.in_use and not tier.info.shared]
        text = (
            f"has not noted the reset of namespace {namespace.id.hex()[:8]}, and will when it"
            " serves again; if the machine is restarted before, empty the tier first"
        )
        warnings: list[Effect] = [
            tier.event(text, "warning") for tier in deaf if not namespace.temporary
        ]
        return _new_epoch(namespace, told) + warnings

    def _answered(self, namespace: Namespace) -> list[Tier]:
        openings = ((tier, tier.spaces.get(namespace)) for tier in self._state.tiers)
        return [tier for tier, opening in openings if opening is not None and opening.answered]

    def __repr__(self) -> str:
        return f"<TierSpaces of {len(self._state.tiers)} tiers>"


def _open(tier: Tier, namespace: Namespace, now: float) -> Effect:
    geometry, epoch = namespace.geometry, 0 if namespace.inherited else namespace.epoch
    tier.spaces[namespace] = Opening(epoch, now)
    order = OpenSpace(
        namespace=namespace.id,
        epoch=epoch,
        slot_bytes=geometry.slot_bytes,
        arena_bases=tuple(map(geometry.arena_base, range(len(geometry.slot_bytes)))),
        num_slots=geometry.num_slots,
        description_bytes=namespace.table.descriptions.room,
    )
    return ToTier(tier.index, order, NamespaceFds(namespace.id))


def _new_epoch(namespace: Namespace, tiers: Iterable[Tier]) -> list[Effect]:
    order = NewEpoch(namespace=namespace.id, epoch=namespace.epoch)
    return [ToTier(tier.index, order) for tier in tiers]
