"""The plug-in by which vLLM knows `"kv_connector": "KvdConnector"`: `vllm.general_plugins`.

Every process of every vLLM in this environment runs `register`, with kvd or without. So this is a
module of its own that imports neither kvd's client nor vLLM: vLLM's factory of connectors is the
import of some hundred modules, which a process without a connector never needs. The name is given
to it when it is imported. Nothing here raises.
"""

import importlib.util
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

FACTORY = "vllm.distributed.kv_transfer.kv_connector.factory"
NAME, MODULE = "KvdConnector", "kvd_client.vllm"

log = logging.getLogger("vllm.kvd")  # below vLLM's own, whose handlers print it


def register() -> None:
    """Make `KvdConnector` a name that vLLM knows, now or when its factory is there.

    May be called again.
    """
    factory = sys.modules.get(FACTORY)
    if factory is not None:
        _register(factory)
    elif not any(isinstance(finder, _WhenImported) for finder in sys.meta_path):
        sys.meta_path.insert(0, _WhenImported())


def _register(factory: ModuleType) -> None:
    try:
        factory.KVConnectorFactory.register_connector(NAME, MODULE, NAME)
    except ValueError:
        log.debug("%s is registered already", NAME)
    except Exception:  # whatever vLLM's factory has become, an engine without kvd must start
        log.exception(
            "this vLLM does not take kvd's connector by its name alone; add"
            ' "kv_connector_module_path": "%s" to --kv-transfer-config',
            MODULE,
        )


class _WhenImported(MetaPathFinder):
    """Sees the factory being imported, once, and leaves finding it to the others."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        """The factory's spec with a loader that registers afterwards; None for anything else."""
        del path, target
        if fullname != FACTORY:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _ThenRegister(spec.loader)
        return spec


class _ThenRegister(Loader):
    """Loads a module as its own loader does, then registers the connector there."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """As the module's own loader does."""
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """The same, and what is to follow it."""
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        _register(module)
