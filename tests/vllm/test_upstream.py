"""What kvd's connector uses of vLLM beyond its interfaces works as the connector expects."""

import dis
import inspect
import itertools
from functools import partial
from inspect import Parameter, Signature
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import vllm
from hypothesis import given
from hypothesis import strategies as st
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestGroupState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.v1.kv_offload.base import OffloadingManager, OffloadingWorker

from kvd_client import UnsupportedVllm
from kvd_client.vllm import (
    KvdConnector,
    KvdOffloadingManager,
    KvdOffloadingSpec,
    KvdOffloadingWorker,
    VllmOptions,
    metrics,
    upstream,
)
from kvd_client.vllm.scheduler import KvdConnectorScheduler
from tests.vllm.configs import engine_config
from tests.vllm.stepping import Lender, Stepping

KINDS = (Parameter.POSITIONAL_OR_KEYWORD, Parameter.KEYWORD_ONLY)


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


def test_an_interface_that_passes_more_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each class, by method and parameter: no step fails with a TypeError."""

    def submit_load(
        self: object, job_id: int, src_spec: Any, dst_spec: Any, urgent: int = 0
    ) -> bool:
        raise NotImplementedError

    monkeypatch.setattr(OffloadingWorker, "submit_load", submit_load)
    with pytest.raises(UnsupportedVllm) as refused:
        upstream.check(KvdOffloadingWorker)
    assert (
        "OffloadingWorker.submit_load allows calls that KvdOffloadingWorker.submit_load does not"
        " take, because of the parameter urgent; it was tested with vLLM 0.3" in str(refused.value)
    )
    monkeypatch.setattr(OffloadingManager, "get_stats", property(lambda _: None))
    with pytest.raises(UnsupportedVllm, match="get_stats is a property, unlike"):
        upstream.check(KvdOffloadingManager)
    monkeypatch.setattr(OffloadingConnector, "get_transfer_results", lambda self: self)
    with pytest.raises(UnsupportedVllm, match="because of the parameter finished_req_ids"):
        upstream.check(KvdConnector)


def test_the_installed_release_passes() -> None:
    """All that kvd implements takes what vLLM passes, also where it has methods of its own."""
    upstream.check(KvdConnector, KvdOffloadingSpec, KvdOffloadingManager, KvdOffloadingWorker)


@st.composite
def signatures(draw: st.DrawFn, rest: tuple[str, ...] = ()) -> Signature:
    """A signature of at most three parameters, in the language's order, and some of `rest`."""
    names = draw(st.lists(st.sampled_from("abc"), unique=True))
    count = draw(st.integers(0, len(names)))
    num_required = draw(st.integers(0, count))
    positional = [
        Parameter(name, KINDS[0], default=Parameter.empty if place < num_required else None)
        for place, name in enumerate(names[:count])
    ]
    keywords = [
        Parameter(name, KINDS[1], default=draw(st.sampled_from([Parameter.empty, None])))
        for name in names[count:]
    ]
    args = [Parameter("args", Parameter.VAR_POSITIONAL)] if "args" in rest else []
    kwargs = [Parameter("kwargs", Parameter.VAR_KEYWORD)] if "kwargs" in rest else []
    return Signature([*positional, *args, *keywords, *kwargs])


def accepted(signature: Signature, *args: str, **kwargs: str) -> dict[str, Any] | None:
    """The values by parameter, if a call is accepted."""
    try:
        return dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return None


def takes_every_call(interface: Signature, own: Signature) -> bool:
    """Whether each call that the interface accepts gives the same values to the same names."""
    names = "abcd"
    for count, named in itertools.product(range(4), itertools.product((0, 1), repeat=len(names))):
        args = [f"value {place}" for place in range(count)]
        kwargs = {name: name for name in itertools.compress(names, named)}
        values = accepted(interface, *args, **kwargs)
        if values is None:
            continue
        own_values = accepted(own, *args, **kwargs)
        if own_values is None:
            return False
        shared = {*names} & values.keys() & own_values.keys()
        if any(values[name] != own_values[name] for name in shared):
            return False
    return True


@given(signatures(), signatures())
def test_a_method_takes_the_calls_of_an_interface_or_a_parameter_is_named(
    interface: Signature, own: Signature
) -> None:
    """What is accepted was tried with every call; a refusal names a parameter of one of both."""
    refused = upstream.refused_parameter(interface, own)
    assert (refused is None) == takes_every_call(interface, own)
    assert refused is None or refused in {*interface.parameters, *own.parameters}


@given(
    st.one_of(signatures(), signatures(("kwargs",))),
    st.one_of(*map(signatures, [("args",), ("kwargs",), ("args", "kwargs")])),
)
def test_a_method_that_takes_the_rest_takes_every_call(
    interface: Signature, own: Signature
) -> None:
    """`*args` and `**kwargs` of a method stand for parameters that it lacks."""
    if upstream.refused_parameter(interface, own) is None:
        assert takes_every_call(interface, own)
    everything = inspect.signature(lambda *args, **kwargs: (args, kwargs))
    assert upstream.refused_parameter(interface, everything) is None


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


@pytest.mark.skipif(
    not hasattr(OffloadingManager, "config_info"), reason="this vLLM publishes no configuration"
)
def test_an_engines_settings_are_on_its_metrics_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One series of `vllm:kv_offload_config_info`, filled through vLLM's own statistics."""
    extra = {"runtime_dir": "/run/other", "label": "blue", "blocks_per_chunk": 2}
    half = Stepping(tmp_path, monkeypatch, Lender(0), extra=extra).half
    registry = prometheus_client.CollectorRegistry()
    kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    types = {kind: partial(kind, registry=registry) for kind in kinds}
    vllm_config = engine_config(tmp_path, extra=extra)
    made = KvdConnector.build_prom_metrics(vllm_config, types, ["model"], {0: ["m"]})
    made.observe(half.get_stats().to_dict(), 0)
    (info,) = (
        sample
        for family in registry.collect()
        for sample in family.samples
        if sample.name == "vllm:kv_offload_config_info"
    )
    assert info.value == 1
    expected = {
        "kvd_engine_id": "engine",
        "kvd_runtime_dir": "/run/other",
        "kvd_label": "blue",
        "kvd_blocks_per_chunk": "2",
        "kvd_load_timeout": "3.0",
        "kvd_required": "False",
    }
    assert expected.items() <= info.labels.items()
    settings = {f"kvd_{name}" for name in VllmOptions.__struct_fields__}
    assert info.labels.keys() == settings | {"model", "kvd_engine_id", "kvd_blocks_per_chunk"}
