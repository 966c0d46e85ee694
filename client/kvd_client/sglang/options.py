"""The settings under `linker_extra_config`, checked before the engine starts."""

from collections.abc import Mapping
from typing import Annotated, Any

from msgspec import Meta

from kvd_client.adapters import EngineOptions, OptionsError, Seconds, convert_options

PLACE = "--unified-cache-external-linker-config: linker_extra_config"


class Options(EngineOptions, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """An engine's settings about its daemon; those of every engine are in `EngineOptions`.

    Attributes:
        chunk_tokens: tokens of a chunk where SGLang's pages have fewer; larger pages are a chunk
            each. Engines that are to share chunks need the same.
        lease: seconds for which what a lookup has found stays pinned for its request.
        layerwise: false: a request's forward pass begins when all of its load is in, and a load
            that fails is computed instead. true: it begins with the first layer, and SGLang aborts
            the requests of a load that fails.
        load_timeout: seconds in which a load must be in; the engine's scheduler waits so long for
            it, or with `layerwise` its forward pass, also while the daemon is restarted.
        store_timeout: seconds after which a store is given up; until then the tree keeps its pages.
        loan_timeout: seconds that a store waits for room in the pool.
    """

    chunk_tokens: Annotated[int, Meta(ge=1, le=4096)] = 16
    lease: Seconds = 60.0
    layerwise: bool = False
    load_timeout: Seconds = 10.0
    store_timeout: Seconds = 30.0
    loan_timeout: Seconds = 0.5


def read_options(extra: Mapping[str, Any] | None) -> Options:
    """Return the options of an engine.

    Raises:
        OptionsError: naming the key, its value and what is possible.
    """
    options = convert_options(Options, extra or {}, PLACE)
    if options.lease < 2 * options.load_timeout:  # a pin must outlast its load
        raise OptionsError(
            f"{PLACE}: lease={options.lease:g} is below twice load_timeout="
            f"{options.load_timeout:g}; raise lease, or lower load_timeout"
        )
    return options
