"""What the daemon's publisher of KV events is told: which engines there are.

An engine is published from when it is attached until it is detached. The loss of a lane is neither:
its chunks are there, and are loaded again once another lane serves.
"""

from kvd.broker.effects import Effect, Event, NamespaceFds, ToPublisher
from kvd.broker.state import BrokerState
from kvd.cache.namespaces import Namespace
from kvd.wire.publishing import PublishEngine, PublisherReport, WithdrawEngine


class Publishing:
    """Decisions about the publisher's process, where there is one."""

    def __init__(self, state: BrokerState) -> None:
        self._state = state
        self._told: dict[str, Namespace] | None = None  # by engine; None: no process runs

    def begun(self) -> list[Effect]:
        """A process runs, and knows of nothing."""
        self._told = {}
        return self.tick()

    def received(self, report: PublisherReport, pid: int, now: float) -> list[Effect]:
        """The process has reported; with its first report it serves."""
        publisher, effects = self._state.publisher, list[Effect]()
        if publisher is None:
            return []
        if publisher.pid != pid:
            publisher.started(pid)
            effects.append(Event(f"KV events are published on {publisher.address}, pid {pid}"))
        publisher.subscriptions, publisher.topics = report.subscriptions, report.topics
        publisher.report(report.totals, now)
        return effects

    def lost(self, reason: str) -> list[Effect]:
        """The process has ended."""
        self._told = None
        publisher = self._state.publisher
        if publisher is None:
            return []
        publisher.lost(reason)
        text = f"the publisher of KV events is lost: {reason}; it is started again"
        return [Event(text, "error")]

    def tick(self) -> list[Effect]:
        """Tell what has changed since it was last told."""
        told = self._told
        if told is None:
            return []
        wanted = {
            engine.name: engine.namespace
            for engine in self._state.registry.engines.values()
            if engine.namespace is not None and not engine.namespace.temporary
        }
        effects: list[Effect] = []
        for name in [name for name, namespace in told.items() if wanted.get(name) is not namespace]:
            del told[name]
            effects.append(ToPublisher(WithdrawEngine(engine=name)))
        for name, namespace in wanted.items():
            if name not in told:
                told[name] = namespace
                order = PublishEngine(engine=name, model=namespace.label, namespace=namespace.id)
                effects.append(ToPublisher(order, NamespaceFds(namespace.id)))
        return effects

    def __repr__(self) -> str:
        return f"<Publishing of {'nobody' if self._told is None else list(self._told)}>"
