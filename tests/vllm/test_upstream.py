"""What kvd's connector uses of vLLM beyond its interfaces works as the connector expects."""

import dis
import inspect
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import prometheus_client
import pytest
import vllm
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestGroupState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector

from kvd_client import UnsupportedVllm
from kvd_client.vllm import KvdConnector, metrics, upstream
from kvd_client.vllm.scheduler import KvdConnectorScheduler
from tests.vllm.configs import engine_config


def test_a_method_with_other_parameters_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sentence names the method, its parameters, the release, and what to do."""

    def changed(self: object, *, more: int) -> None:
        del self, more

    monkeypatch.setattr(OffloadingConnectorScheduler, "request_finished", changed)
    with pytest.raises(UnsupportedVllm) as refused:
        upstream.check()
    text = str(refused.value)
    assert "OffloadingConnectorScheduler.request_finished takes (more), not (request)" in text
    assert vllm.__version__ in text
    assert "vLLM 0.32 and 0.33: install one of these" in text
    assert "\n" not in text


def test_what_else_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A new abstract method, vanished private state, a record's field: no step fails for it."""

    class Unfinished(KvdConnectorScheduler):
        __abstractmethods__ = frozenset({"new_method"})

    with pytest.raises(UnsupportedVllm, match="it asks Unfinished for new_method as well"):
        upstream.check(Unfinished)
    with pytest.raises(UnsupportedVllm, match="its SimpleNamespace has no _req_status"):
        upstream.require(SimpleNamespace(_jobs={}), "_jobs", "_req_status")
    monkeypatch.delitem(RequestGroupState.__dataclass_fields__, "block_ids")
    with pytest.raises(UnsupportedVllm, match="its RequestGroupState has no block_ids"):
        upstream.check()


def test_the_constructor_that_is_left_out_assigns_nothing_else() -> None:
    """OffloadingConnector's attributes are the connector's own, but for one that is not read."""
    steps = dis.get_instructions(OffloadingConnector.__init__)
    names = {step.argval for step in steps if step.opname == "STORE_ATTR"}
    assert names == {"_canonical_layout", "connector_scheduler", "connector_worker"}
    assert inspect.getsource(OffloadingConnector).count("_canonical_layout") == 1


def test_vllm_finds_the_specs_metrics(tmp_path: Path) -> None:
    """With nothing in the extra configuration the metrics are vLLM's and kvd's."""
    vllm_config = engine_config(tmp_path)
    kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    types = {kind: partial(kind, registry=None) for kind in kinds}  # other tests make them, too
    made = KvdConnector.build_prom_metrics(vllm_config, types, ["model"], {0: ["m"]})
    assert metrics.DEFINITIONS.keys() <= made._offloading_metric_metadata.keys()
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    assert extra == {"spec_name": "KvdOffloadingSpec", "spec_module_path": "kvd_client.vllm"}
