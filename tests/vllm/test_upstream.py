"""What kvd's connector uses of vLLM beyond its interfaces: all of it, and that it is as it was."""

import ast
import dis
import importlib
import inspect
import pkgutil
from collections.abc import Collection
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import prometheus_client
import pytest
import vllm
from vllm import SamplingParams
from vllm.config import set_current_vllm_config
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.common import (
    OffloadingConnectorMetadata,
    OffloadingWorkerMetadata,
    TransferJob,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import (
    get_connector_metric_definitions,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
    OffloadingConnectorScheduler,
    RequestGroupState,
)
from vllm.distributed.kv_transfer.kv_connector.v1.offloading.worker import OffloadingConnectorWorker
from vllm.distributed.kv_transfer.kv_connector.v1.offloading_connector import OffloadingConnector
from vllm.model_executor.layers.attention import Attention
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.kv_offload.base import (
    GPULoadStoreSpec,
    LookupResult,
    OffloadKey,
    PrepareStoreOutput,
    RequestOffloadingContext,
    get_offload_group_idx,
)
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request

import kvd_client.vllm
from kvd_client import UnsupportedVllm
from kvd_client.vllm import KvdConnector, KvdOffloadingSpec, metrics, upstream
from kvd_client.vllm.slots import ChunkSlots
from tests.vllm.configs import BLOCK, engine_config, full, offloading_config, sized, window

PROMPT_BLOCKS = 3


# ------------------------------------------------------------- all of it


def private_names(module: ModuleType) -> set[str]:
    """Names with one leading underscore that a module uses, and does not define itself.

    A name that a class of the module has from a class of vLLM's is not its own.
    """
    used, own = set(), set()
    for node in ast.walk(ast.parse(inspect.getsource(module))):
        match node:
            case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                own.add(name)
                used.add(name)
            case ast.Attribute(attr=name):
                used.add(name)
            case ast.ImportFrom(module=str(origin)) if origin.split(".")[0] != "kvd_client":
                used |= {alias.name for alias in node.names}
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                own.add(name)
    kinds = [kind for kind in vars(module).values() if inspect.isclass(kind)]
    ours = [kind for kind in kinds if kind.__module__ == module.__name__]
    names = (used - own) | (used & set().union(*map(names_of, ours)))
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def assigned(function: Any) -> set[str]:
    """Attributes that a function assigns."""
    return {step.argval for step in dis.get_instructions(function) if step.opname == "STORE_ATTR"}


def names_of(kind: type) -> set[str]:
    """All that a class and its bases in vLLM define or assign."""
    kinds = [base for base in kind.__mro__ if base.__module__.startswith("vllm")]
    return {
        name
        for base in kinds
        for key, value in vars(base).items()
        for name in (key, *(assigned(value) if inspect.isfunction(value) else ()))
    }


def modules() -> dict[str, ModuleType]:
    """The connector's, by name."""
    names = [module.name for module in pkgutil.iter_modules(kvd_client.vllm.__path__)]
    return {name: importlib.import_module(f"kvd_client.vllm.{name}") for name in names}


def test_private_state_of_vllm_is_touched_in_one_place() -> None:
    """Outside upstream.py no module of the connector uses an underscored name of vLLM's."""
    found = {name: private_names(module) for name, module in modules().items()}
    assert found.pop("upstream") == {
        "_ConnectorMetricName",
        "_connector_worker_meta",
        "_jobs",
        "_load_jobs",
        "_lookup_complete_chunks",
        "_req_status",
    }
    assert {name: names for name, names in found.items() if names} == {}


def test_every_private_name_is_listed_with_its_reason() -> None:
    """The module's own docstring names each class, method and attribute that it uses."""
    listed = upstream.__doc__ or ""
    for name in private_names(upstream):
        assert name in listed
    for record, fields in upstream.FIELDS:
        if record.__module__.endswith(("offloading.scheduler", "offloading.common")):
            assert [field for field in fields if f"`{field}`" not in listed] == []


# ------------------------------------------------- methods, records, names


def test_the_installed_vllm_is_as_it_was() -> None:
    """Every listed method has its parameters, every record its fields, every interface is whole."""
    upstream.check(
        KvdConnector,
        KvdOffloadingSpec,
        kvd_client.vllm.KvdOffloadingManager,
        kvd_client.vllm.KvdOffloadingWorker,
    )


@pytest.mark.parametrize(("owner", "name"), [(owner, name) for owner, name, _ in upstream.METHODS])
def test_a_method_with_other_parameters_is_refused(
    owner: type, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sentence names the method, its parameters, the release, and what to do."""

    def changed(self: object, *, more: int) -> None:
        del self, more

    monkeypatch.setattr(owner, name, changed)
    with pytest.raises(UnsupportedVllm) as refused:
        upstream.check()
    text = str(refused.value)
    assert f"{owner.__name__}.{name} takes (more)" in text
    assert vllm.__version__ in text
    assert "vLLM 0.32: install that" in text
    assert "\n" not in text


@pytest.mark.parametrize("record", [record for record, _ in upstream.FIELDS])
def test_a_record_without_its_fields_is_refused(
    record: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sentence names the record and the field."""
    renamed = dict.fromkeys(("other",))
    fields = dict(upstream.FIELDS)[record]
    monkeypatch.setattr(record, "__dataclass_fields__", renamed)
    for field in fields:
        monkeypatch.delattr(record, field, raising=False)
    with pytest.raises(UnsupportedVllm, match=f"its {record.__name__} has no {min(fields)}"):
        upstream.check()


def test_an_interface_that_asks_for_more_is_refused() -> None:
    """A new abstract method of vLLM's is named, and not met in a step."""

    class Unfinished(upstream.SchedulerSide):
        __abstractmethods__ = frozenset({"new_method"})

    with pytest.raises(UnsupportedVllm, match="it asks Unfinished for new_method as well"):
        upstream.check(Unfinished)


def test_an_attribute_that_is_gone_is_refused_at_the_start() -> None:
    """Vanished private state ends the start in one sentence, and no step later."""
    side = SimpleNamespace(_jobs={})
    with pytest.raises(UnsupportedVllm, match="its SimpleNamespace has no _req_status"):
        upstream.require(side, "_jobs", "_req_status")


def test_the_constructor_that_is_left_out_assigns_nothing_else() -> None:
    """OffloadingConnector's attributes are the connector's own, but for one that nobody reads."""
    names = assigned(OffloadingConnector.__init__)
    assert names == {"_canonical_layout", "connector_scheduler", "connector_worker"}
    assert assigned(upstream.ConnectorSide.__init__) == names - {"_canonical_layout"}
    readers = inspect.getsource(OffloadingConnector).count("_canonical_layout")
    assert readers == 1  # the assignment


def test_the_metric_of_vllms_own_is_one_that_it_defines() -> None:
    """A manager's allocation failures are counted under a name that vLLM's metrics know."""
    assert metrics.ALLOCATION_FAILURE in get_connector_metric_definitions()


def test_vllm_finds_the_specs_metrics(tmp_path: Path) -> None:
    """With nothing in the extra configuration the metrics are vLLM's and kvd's."""
    vllm_config = engine_config(tmp_path)
    kinds = (prometheus_client.Counter, prometheus_client.Gauge, prometheus_client.Histogram)
    types = {kind: type(kind.__name__, (Unregistered,), {"kind": kind}) for kind in kinds}
    made = KvdConnector.build_prom_metrics(vllm_config, types, ["model"], {0: ["m"]})
    assert metrics.DEFINITIONS.keys() <= made._offloading_metric_metadata.keys()
    extra = vllm_config.kv_transfer_config.kv_connector_extra_config
    assert extra == {"spec_name": "KvdOffloadingSpec", "spec_module_path": "kvd_client.vllm"}


class Unregistered:
    """A metric of prometheus_client in no registry, so that other tests may make it too."""

    kind: Any

    def __new__(cls, **options: Any) -> Any:
        """The metric itself."""
        return cls.kind(**options, registry=None)


def test_layers_say_which_kernels_they_use(tmp_path: Path) -> None:
    """An attention layer enters itself into the configuration, with its backend's name."""
    vllm_config = engine_config(tmp_path)
    assert upstream.attention_backends(vllm_config) == []
    with set_current_vllm_config(vllm_config):
        Attention(num_heads=2, head_size=32, scale=1.0, num_kv_heads=2, prefix="layers.0.attn")
    assert upstream.attention_backends(vllm_config) == ["CPU_ATTN"]


# ------------------------------------------------------------ in a rank


def test_a_load_is_known_by_its_request_until_it_is_taken() -> None:
    """Loads that vLLM's half submits are found by number, once; stores are not."""
    worker = SimpleNamespace(
        submit_load=lambda *_: True, submit_store=lambda *_: True, get_finished=list
    )
    side = upstream.RankSide(rank_spec(), None, None)
    side.worker = worker
    blocks = GPULoadStoreSpec([1], (1,), (0,))
    side.start_kv_transfers(
        OffloadingConnectorMetadata({7: TransferJob("request", ChunkSlots(), blocks)}, {})
    )
    side.prepare_store_kv(
        OffloadingConnectorMetadata({}, {8: TransferJob("request", blocks, ChunkSlots())})
    )
    side.start_kv_transfers(OffloadingConnectorMetadata({}, {}))
    assert [side.take_load(job) for job in (8, 7, 7)] == [None, "request", None]


def test_vllm_reports_the_stores_that_a_rank_leaves_to_another() -> None:
    """Where all ranks hold the same, vLLM enters them into the report that kvd gives it."""
    side = upstream.RankSide(rank_spec(replicated=True, rank=1), None, None)
    report = side.report = OffloadingWorkerMetadata()
    job = TransferJob("request", GPULoadStoreSpec([1], (1,), (0,)), ChunkSlots())
    side.prepare_store_kv(OffloadingConnectorMetadata({}, {5: job}))
    assert side.report is report
    assert report.completed_jobs == {5: 1}
    assert side.build_connector_worker_meta() is report
    assert side.report is not report


@pytest.mark.parametrize("half", [OffloadingConnectorWorker, upstream.RankSide])
def test_vllm_takes_a_refused_job_for_a_bug(half: type[OffloadingConnectorWorker]) -> None:
    """So `submit_load` and `submit_store` of kvd's worker are always true."""
    side = half(rank_spec(), None, None)
    side.worker = SimpleNamespace(submit_load=lambda *_: False)
    job = TransferJob("request", ChunkSlots(), GPULoadStoreSpec([1], (1,), (0,)))
    with pytest.raises(AssertionError):
        side.start_kv_transfers(OffloadingConnectorMetadata({7: job}, {}))


def rank_spec(*, replicated: bool = False, rank: int = 0) -> Any:
    """What vLLM's half in a rank asks its spec."""
    config = SimpleNamespace(canonical_layout=False, parallel=SimpleNamespace(rank=rank))
    return SimpleNamespace(replicated_layout=replicated, config=config)


# ----------------------------------------------------- in the scheduler


class Pool:
    """A manager that stores all it is offered, and finds nothing."""

    def __init__(self) -> None:
        self.offered: list[tuple[OffloadKey, ...]] = []

    def prepare_store(self, keys: Collection[OffloadKey], _context: object) -> PrepareStoreOutput:
        """Take note, and take all."""
        self.offered.append(tuple(keys))
        return PrepareStoreOutput(list(keys), ChunkSlots(), [])

    def lookup(self, _key: OffloadKey, _context: object) -> LookupResult:
        """Nothing is there."""
        return LookupResult.MISS

    def on_new_request(self, _context: object) -> RequestOffloadingContext:
        """See KvdOffloadingManager."""
        return RequestOffloadingContext()

    def ignore(self, *_: object) -> None:
        """See KvdOffloadingManager."""

    touch = complete_store = complete_load = on_request_finished = on_schedule_end = ignore
    reset_cache = ignore


class Stepping:
    """vLLM's half in the scheduler with one request, stepped as vLLM's scheduler does it."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, *windows: KVCacheGroupSpec
    ) -> None:
        vllm_config = engine_config(folder)
        kv_cache_config = sized(vllm_config, full(["a", "b"]), *windows)
        self.pool = Pool()
        config = offloading_config(vllm_config, kv_cache_config)
        spec = KvdOffloadingSpec(config, vllm_config, kv_cache_config)
        monkeypatch.setattr(spec, "get_manager", lambda: self.pool)
        self.side = upstream.SchedulerSide(spec, vllm_config, kv_cache_config)
        init_none_hash(sha256)
        self.request = Request(
            "request",
            list(range(PROMPT_BLOCKS * BLOCK)),
            SamplingParams(max_tokens=4),
            None,
            block_hasher=get_request_block_hasher(BLOCK, sha256),
        )
        self.side.on_new_request(self.request)
        assert self.side.get_num_new_matched_tokens(self.request, 0) == (0, False)
        blocks = [
            list(range(group * PROMPT_BLOCKS + 1, (group + 1) * PROMPT_BLOCKS + 1))
            for group in range(1 + len(windows))
        ]
        self._new = [NewRequestData.from_request(self.request, tuple(blocks))]

    def step(self, tokens: int) -> tuple[int, ...]:
        """Schedule so many tokens of the request; numbers of the stores that begin with it."""
        output = SchedulerOutput(
            scheduled_new_reqs=self._new,
            scheduled_cached_reqs=CachedRequestData.make_empty(),
            num_scheduled_tokens={"request": tokens},
            total_num_scheduled_tokens=tokens,
            scheduled_spec_decode_tokens={},
            scheduled_encoder_inputs={},
            num_common_prefix_blocks=[],
            finished_req_ids=set(),
            free_encoder_mm_hashes=[],
        )
        self._new = []
        stores = tuple(self.side.build_connector_meta(output).store_jobs)
        self.request.num_computed_tokens += tokens
        return stores

    def end(self, job_id: int) -> None:
        """All ranks have reported this job."""
        report = OffloadingWorkerMetadata(completed_jobs={job_id: 1})
        self.side.update_connector_output(KVConnectorOutput(kv_connector_worker_meta=report))


def test_a_store_is_known_by_its_keys_until_it_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A store that vLLM's half begins is found by number with what the manager was offered."""
    stepping = Stepping(tmp_path, monkeypatch)
    (job,) = stepping.step(PROMPT_BLOCKS * BLOCK)
    (offered,) = stepping.pool.offered
    assert len(offered) == PROMPT_BLOCKS
    assert set(stepping.side.store_keys(job)) == set(offered)
    stepping.end(job)
    assert not stepping.side.store_keys(job)


def test_a_request_whose_load_failed_is_offered_from_its_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is stored is not offered twice, until kvd has it stored again; then all of it is."""
    stepping = Stepping(tmp_path, monkeypatch)
    (job,) = stepping.step(PROMPT_BLOCKS * BLOCK)
    stepping.end(job)
    assert not stepping.step(1)
    assert stepping.side.store_again("request")
    assert stepping.step(1)
    first, again = stepping.pool.offered
    assert again == first
    assert not stepping.side.store_again("another")


def test_a_reset_does_not_store_again_what_a_window_has_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a window has been the blocks may be another request's; the other groups' are stored."""
    stepping = Stepping(tmp_path, monkeypatch, window(["c", "d"]))
    (job,) = stepping.step(PROMPT_BLOCKS * BLOCK)
    stepping.end(job)
    stepping.side.reset_cache()
    assert stepping.step(1)
    first, again = stepping.pool.offered
    assert set(map(get_offload_group_idx, first)) == {0, 1}
    assert again == tuple(key for key in first if get_offload_group_idx(key) == 0)


def test_both_halves_are_vllms_own(tmp_path: Path, runtime_dir: Path) -> None:
    """The connector's halves are vLLM's classes, which its methods hand everything to."""
    vllm_config = engine_config(tmp_path, {"runtime_dir": str(runtime_dir)})
    kv_cache_config = sized(vllm_config, full(["a", "b"]))
    scheduler = KvdConnector(vllm_config, KVConnectorRole.SCHEDULER, kv_cache_config)
    rank = KvdConnector(vllm_config, KVConnectorRole.WORKER, kv_cache_config)
    assert isinstance(scheduler.connector_scheduler, OffloadingConnectorScheduler)
    assert scheduler.connector_worker is None
    assert isinstance(rank.connector_worker, OffloadingConnectorWorker)
    assert rank.connector_scheduler is None
    scheduler.shutdown()
    rank.shutdown()


def test_chunks_are_counted_from_a_requests_first() -> None:
    """Zero is where vLLM itself begins to store a request."""
    assert RequestGroupState().next_stored_chunk_idx == 0
