"""Loads and stores that a linker cannot do: nothing raises, and prompts are computed."""

import os
import signal
from types import SimpleNamespace
from typing import NoReturn

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from kvd_client import CudaError
from kvd_client.errors import cause
from kvd_client.sglang import pool_cache
from kvd_client.sglang.linker import KvdLinker
from kvd_client.sglang.pages import PagePool, chunk_keys
from tests.conftest import StartDaemon
from tests.daemon.serving import Daemon
from tests.processes import has_memory
from tests.sglang.conftest import StartLinker
from tests.sglang.device_pools import (
    ARGUMENTS,
    FROM,
    KEYS,
    NODE,
    PAGE,
    TO,
    dense,
    fill,
    indices,
    parameters,
    store,
)
from tests.waiting import eventually

KEEP = ("--keep-pool", "yes")


def ready(start_linker: StartLinker, daemon: Daemon, **options: object) -> KvdLinker:
    """A linker that has stored a node, and looked it up for a request."""
    kind = dense()
    fill(kind.kv, 1)
    linker = start_linker(daemon, kind, **options)
    node = PoolTransfer(PoolName.KV, device_indices=indices(FROM, PAGE), keys=KEYS[:NODE])
    assert eventually(lambda: store(linker, [node]))
    asked = [PoolTransfer(PoolName.KV, keys=KEYS[:NODE])]
    eventually(lambda: linker.lookup("request", asked) == list(range(1, NODE + 1)))
    return linker


def load(linker: KvdLinker) -> bool:
    """Load what was looked up."""
    return linker.load(
        "request",
        [PoolTransfer(PoolName.KV, device_indices=indices(TO, PAGE), keys=KEYS[:NODE])],
    )


def test_a_load_ends_its_lease(daemon: Daemon, start_linker: StartLinker) -> None:
    """The chunks of a load are pinned until it has ended, and no lease is left to expire."""
    linker = ready(start_linker, daemon)
    asked = [PoolTransfer(PoolName.KV, keys=KEYS[:NODE])]
    for _ in range(3):
        assert linker.lookup("request", asked) == list(range(1, NODE + 1))
        assert load(linker)
    (cache,) = linker._caches.values()
    cache.scheduler.end_step()  # sends the ends of pins
    report = eventually(daemon.status, lambda report: not report["leases"])
    assert not report["counters"]["leases_expired"]


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_daemon_that_has_gone_is_a_load_that_is_refused(
    start_daemon: StartDaemon, start_linker: StartLinker, layerwise: bool
) -> None:
    """Killed after the lookup: SGLang is told before it takes the load for done."""
    daemon = start_daemon(*KEEP)
    linker = ready(start_linker, daemon, layerwise=layerwise)
    daemon.stop(signal.SIGKILL)
    (cache,) = linker._caches.values()
    eventually(lambda: not cache.scheduler.attached)
    assert not load(linker)
    assert linker.start_layer_wise_loading() == -1
    assert linker.lookup("request", [PoolTransfer(PoolName.KV, keys=KEYS[:NODE])]) == []


def test_a_frozen_lane_holds_a_request_until_it_is_killed(
    start_daemon: StartDaemon, start_linker: StartLinker
) -> None:
    """Its pages may still be written, so they are not given back before; then it is computed."""
    daemon = start_daemon(*KEEP, "--lane-timeout-seconds", "2")
    linker = ready(start_linker, daemon, load_timeout=0.5)
    (lane,) = daemon.status()["lanes"]
    os.kill(lane["pid"], signal.SIGSTOP)
    assert not load(linker)
    assert not has_memory(lane["pid"])
    eventually(
        lambda: (
            linker.lookup("request", [PoolTransfer(PoolName.KV, keys=KEYS[:NODE])])
            == list(range(1, NODE + 1))
        )
    )
    assert eventually(lambda: load(linker))


def test_a_requests_first_lookup_is_reported(
    daemon: Daemon, start_linker: StartLinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it asks for is used once, and what it does not find is missed once."""
    linker = ready(start_linker, daemon)
    (cache,) = linker._caches.values()
    told: list[tuple[str, list[bytes]]] = []
    for name in ("request_finished", "report_missed"):

        def record(keys: list[bytes], name: str = name) -> None:
            told.append((name, keys))

        monkeypatch.setattr(cache.scheduler, name, record)
    asked = [PoolTransfer(PoolName.KV, keys=KEYS[: NODE + 3])]
    for _ in range(2):  # as for a request that waits
        assert linker.lookup("longer", asked) == list(range(1, NODE + 1))
    keys = chunk_keys(KEYS[: NODE + 3])
    assert told == [("report_missed", keys[NODE:]), ("request_finished", keys)]
    assert load(linker)
    assert len(told) == 2


def test_requests_that_are_aborted_are_counted(
    start_daemon: StartDaemon, start_linker: StartLinker, caplog: pytest.LogCaptureFixture
) -> None:
    """With layers a load whose chunks are lost fails after SGLang has taken it for begun."""
    daemon = start_daemon(*KEEP)
    linker = ready(start_linker, daemon, layerwise=True, load_timeout=120, lease=240)
    assert load(linker)
    daemon.stop(signal.SIGKILL)
    (cache,) = linker._caches.values()
    eventually(lambda: not cache.scheduler.attached)
    number = linker.start_layer_wise_loading()
    after = start_daemon("--keep-pool", "no")
    assert not linker.finish_layer_wise_loading(number)
    assert "the chunks are not in the cache any more" in caplog.text  # and no time was over
    eventually(
        lambda: [engine["counters"]["aborted_requests"] for engine in after.status()["engines"]],
        lambda counts: sum(counts) == 1,
    )


LOST = (
    CudaError(700, "CUDA_ERROR_ILLEGAL_ADDRESS", "write a number from a stream"),
    RuntimeError("CUDA error: an illegal memory access was encountered"),
    ValueError("12345 is not a valid CUresult"),
)
each_loss = pytest.mark.parametrize("lost", LOST, ids=lambda error: type(error).__name__)


def raising(error: Exception) -> NoReturn:
    """What a call to torch or to the driver does when the device is lost."""
    raise error


@each_loss
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_lost_device_is_a_load_and_a_store_that_fail(
    daemon: Daemon,
    start_linker: StartLinker,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lost: Exception,
    layerwise: bool,
) -> None:
    """Where torch or the driver raises in a step, a line names the cause, and SGLang goes on."""
    linker = ready(start_linker, daemon, layerwise=layerwise, load_timeout=0.2)
    monkeypatch.setattr(pool_cache, "work_so_far", lambda *_: raising(lost))
    if layerwise:
        assert load(linker)
        assert not linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    else:
        assert not load(linker)
    node = PoolTransfer(PoolName.KV, device_indices=indices(TO, PAGE), keys=KEYS[NODE : 2 * NODE])
    assert not store(linker, [node])
    assert "chunks is not submitted" in caplog.text
    monkeypatch.setattr(PagePool, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(linker, "record_offload_ready", lambda: raising(lost))
    assert not store(linker, [node])
    assert f"a node cannot be stored: {cause(lost)}" in caplog.text
    linker.reset()


@each_loss
def test_a_device_that_is_lost_at_the_start_leaves_an_engine_without_offload(
    daemon: Daemon,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lost: Exception,
) -> None:
    """One line names the cause; lookups, loads and stores come to nothing. `required` raises it."""
    monkeypatch.setattr(PagePool, "share", lambda *_: raising(lost))

    def start(*, required: bool) -> KvdLinker:
        kind = dense()
        extra = {"runtime_dir": str(daemon.runtime_dir), "required": required}
        return KvdLinker(
            ARGUMENTS, parameters(kind), components=kind.components, extra_config=extra
        )

    linker = start(required=False)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert str(lost) in line
    assert line.endswith("; the engine runs without offload")
    asked = [PoolTransfer(PoolName.KV, device_indices=indices(TO, PAGE), keys=KEYS[:NODE])]
    assert linker.lookup("request", asked) == []
    assert not load(linker)
    assert not store(linker, asked)
    linker.close()
    with pytest.raises(type(lost), match=str(lost)[:9]):
        start(required=True)
