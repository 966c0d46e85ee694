"""Sleep mode: the daemon lets go of a KV cache that vLLM frees, and gets the one after it.

Memory that the daemon has mapped is not freed when vLLM frees it, and the memory that it
makes at the same addresses when it wakes up is other memory. vLLM tells connectors neither.
What frees the memory and brings it back is a backend, which a rank makes by its name when it
first needs one (`SleepModeBackendFactory`); in a rank's process the one of that name is
replaced by one that does the same and tells kvd.
"""

import weakref
from collections.abc import Callable
from typing import Protocol

from vllm.config import ModelConfig
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory

KV_CACHE = "kv_cache"  # what vLLM calls the memory of KV caches


class Rank(Protocol):
    """A rank whose KV cache the daemon has."""

    def let_go(self) -> None:
        """The memory is about to be freed. Raises nothing."""

    def take_up(self) -> None:
        """There is memory again. Raises nothing."""


_RANKS: "weakref.WeakSet[Rank]" = weakref.WeakSet()


class _Told(SleepModeBackend):
    """Tells the ranks of this process; the class after it does the work."""

    def suspend(self, level: int = 1) -> None:
        """Free the memory of weights and KV caches."""
        for rank in tuple(_RANKS):
            rank.let_go()
        super().suspend(level)

    def resume(self, tags: list[str] | None = None) -> None:
        """Bring back the memory with these tags; None: all of it."""
        super().resume(tags)
        if tags is None or KV_CACHE in tags:
            for rank in tuple(_RANKS):
                rank.take_up()

    def discard(self, tags: tuple[str, ...]) -> None:
        """Free the memory with these tags."""
        if KV_CACHE in tags:
            for rank in tuple(_RANKS):
                rank.let_go()
        super().discard(tags)


def tell(rank: Rank, model_config: ModelConfig) -> None:
    """Tell this rank from now on, where its engine can free its KV cache."""
    if not (model_config.enable_sleep_mode or model_config.enable_cumem_allocator):
        return
    _RANKS.add(rank)
    name = model_config.sleep_mode_backend
    found = SleepModeBackendFactory.get_backend_class(name)
    if not issubclass(found, _Told):
        told = type(found.__name__, (_Told, found), {"__module__": found.__module__})
        backends: dict[str, Callable[[], type]] = SleepModeBackendFactory._registry  # noqa: SLF001  # what the factory looks up
        backends[name] = lambda: told
