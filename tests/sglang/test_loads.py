"""Loads that a linker cannot do: its prompt is computed, or with layers its request is counted."""

import os
import signal

import pytest
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from kvd_client.sglang.linker import KvdLinker
from tests.conftest import StartDaemon
from tests.daemon.serving import Daemon
from tests.processes import has_memory
from tests.sglang.conftest import StartLinker
from tests.sglang.device_pools import FROM, KEYS, NODE, PAGE, TO, dense, fill, indices, store
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
