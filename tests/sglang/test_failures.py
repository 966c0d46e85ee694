"""Whatever fails, an engine serves on, and prompts are computed: a real one, then linkers."""

import os
import signal
import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import pytest
import torch
from sglang.srt.mem_cache.hicache_storage import PoolName, PoolTransfer

from kvd_client import CudaError, Worker
from kvd_client.errors import cause
from kvd_client.sglang import pool_cache, transfers
from kvd_client.sglang.linker import KvdLinker
from kvd_client.sglang.pages import PagePool, chunk_keys
from kvd_tools.engine_server import Completion
from kvd_tools.errors import DemoError
from kvd_tools.sglang_engine import SglangServerOptions
from tests.conftest import StartDaemon
from tests.daemon.serving import Daemon
from tests.engine_answers import TEST_SECONDS, ask_all, check
from tests.processes import has_memory
from tests.sglang.conftest import StartEngine, StartLinker
from tests.sglang.device_pools import (
    FROM,
    KEYS,
    NODE,
    PAGE,
    TO,
    dense,
    indices,
    make_linker,
    scheduler_of,
    store,
)
from tests.sglang.support import CHUNK_TOKENS, findable, prompts, push_out, wait_served, with_kvd
from tests.waiting import PATIENCE, eventually

PROMPTS = prompts(4)
KEEP = ("--keep-pool", "yes")
ROUNDS = 5
ENGINE_DEADLINE, FROZEN_SECONDS = 15.0, 20.0

pytestmark = pytest.mark.timeout(TEST_SECONDS)


def test_absent_killed_and_frozen_it_costs_misses(
    start_daemon: StartDaemon,
    runtime_dir: Path,
    model: Path,
    start_engine: StartEngine,
    expected: list[Completion],
) -> None:
    """One engine through all of it: started without a daemon, it finds prompts whenever it can."""
    engine = start_engine(
        with_kvd(SglangServerOptions(model), runtime_dir, deadline=ENGINE_DEADLINE)
    )
    engine.wait_ready()
    check(ask_all(engine, PROMPTS), expected)

    def found() -> bool:
        push_out(engine)
        answers = ask_all(engine, PROMPTS)
        check(answers, expected)
        return min(answer.cached_tokens for answer in answers) >= findable()

    daemon = start_daemon(*KEEP)
    wait_served(daemon)
    assert any(found() for _ in range(ROUNDS))

    daemon.stop(signal.SIGKILL)
    push_out(engine)
    answers = ask_all(engine, PROMPTS)
    check(answers, expected)
    assert max(answer.cached_tokens for answer in answers) < CHUNK_TOKENS

    daemon = start_daemon(*KEEP)
    wait_served(daemon)
    assert found()

    push_out(engine)
    frozen = [daemon.process.pid]
    frozen += [lane["pid"] for lane in daemon.status()["lanes"]]
    for pid in frozen:
        os.kill(pid, signal.SIGSTOP)

    def go_on() -> None:
        for pid in reversed(frozen):  # a broker that goes on first may kill a lane that hangs
            os.kill(pid, signal.SIGCONT)

    wake = threading.Timer(FROZEN_SECONDS, go_on)
    wake.start()
    try:
        check(ask_all(engine, PROMPTS), expected)
    finally:
        wake.join(FROZEN_SECONDS + PATIENCE)


def test_a_setting_that_is_wrong_stops_the_engine_with_a_sentence(
    model: Path, start_engine: StartEngine, runtime_dir: Path
) -> None:
    """It names the key, its value and what is possible."""
    options = SglangServerOptions(model, linker={"runtime_dir": str(runtime_dir), "leese": 3})
    engine = start_engine(options)
    with pytest.raises(DemoError, match="leese"):
        engine.wait_ready()


# ------------------------------------------------------- a linker over SGLang's device pools


FOUND = list(range(1, NODE + 1))
each_transfer = pytest.mark.parametrize("transfer_by", ["export", "staging"])


def transfer(pages: Sequence[int] = (), keys: Sequence[str] = KEYS[:NODE]) -> list[PoolTransfer]:
    """These keys of the KV cache, in these pages of the device, as the tree makes it."""
    device_indices = indices(list(pages), PAGE) if pages else None
    return [PoolTransfer(PoolName.KV, device_indices=device_indices, keys=list(keys))]


def ready(start_linker: StartLinker, daemon: Daemon, **options: object) -> KvdLinker:
    """A linker that has stored a node, and looked it up for a request."""
    kind = dense()
    kind.fill(1)
    linker = start_linker(daemon, kind, **options)
    assert eventually(lambda: store(linker, transfer(FROM)))
    eventually(lambda: linker.lookup("request", transfer()) == FOUND)
    return linker


def load(linker: KvdLinker) -> bool:
    """Load what was looked up."""
    return linker.load("request", transfer(TO))


def worker_of(linker: KvdLinker) -> Worker:
    """The only pool's."""
    (cache,) = linker._caches.values()
    return cache.worker


def check_loaded(linker: KvdLinker) -> None:
    """The pages that were loaded have the bytes of those that were stored."""
    (cache,) = linker._caches.values()
    for layer in cache.pool.layers:
        assert torch.equal(layer.tensor[indices(TO, PAGE)], layer.tensor[indices(FROM, PAGE)])


def kill(daemon: Daemon, linker: KvdLinker) -> None:
    """Kill the daemon, and wait until the linker knows."""
    daemon.stop(signal.SIGKILL)
    eventually(lambda: not scheduler_of(linker).attached)


@each_transfer
@pytest.mark.parametrize("layerwise", [False, True])
def test_a_daemon_that_has_gone_is_a_load_that_is_refused(
    start_daemon: StartDaemon, start_linker: StartLinker, layerwise: bool, transfer_by: str
) -> None:
    """Killed after the lookup: SGLang is told before it takes the load for done."""
    daemon = start_daemon(*KEEP)
    linker = ready(start_linker, daemon, layerwise=layerwise, transfer=transfer_by)
    kill(daemon, linker)
    assert not load(linker)
    assert linker.start_layer_wise_loading() == -1
    assert linker.lookup("request", transfer()) == []


@each_transfer
def test_a_frozen_lane_holds_a_request_until_it_is_killed(
    start_daemon: StartDaemon, start_linker: StartLinker, transfer_by: str
) -> None:
    """The lane may still write its pages; then it is computed. With staging it is so at once."""
    daemon = start_daemon(*KEEP, "--lane-timeout-seconds", "2")
    linker = ready(start_linker, daemon, load_timeout=0.5, transfer=transfer_by)
    (lane,) = daemon.status()["lanes"]
    os.kill(lane["pid"], signal.SIGSTOP)
    assert not load(linker)
    assert transfer_by == "staging" or not has_memory(lane["pid"])
    eventually(lambda: linker.lookup("request", transfer()) == FOUND)
    assert eventually(lambda: load(linker))
    check_loaded(linker)


@each_transfer
def test_a_lane_that_is_killed_during_a_load_is_followed_by_the_next_one(
    daemon: Daemon, start_linker: StartLinker, transfer_by: str
) -> None:
    """With layers: the forward pass waits until the lane's successor has loaded the pages."""
    linker = ready(start_linker, daemon, layerwise=True, transfer=transfer_by)
    (lane,) = daemon.status()["lanes"]
    os.kill(lane["pid"], signal.SIGSTOP)
    assert load(linker)
    number = linker.start_layer_wise_loading()
    linker.layer_done_counter.set_consumer(number)
    forward = threading.Thread(target=linker.layer_done_counter.wait_until, args=(0,))
    forward.start()
    assert forward.is_alive()
    os.kill(lane["pid"], signal.SIGKILL)
    forward.join(PATIENCE)
    assert not forward.is_alive()
    linker.layer_done_counter.wait_until(1)
    check_loaded(linker)
    assert linker.finish_layer_wise_loading(number)
    worker_of(linker).check_integrity()


@each_transfer
def test_a_reset_voids_what_a_lane_does_not_store(
    daemon: Daemon,
    start_linker: StartLinker,
    monkeypatch: pytest.MonkeyPatch,
    transfer_by: str,
) -> None:
    """Its pages are free again, its chunks are not found, and later stores and loads succeed."""
    monkeypatch.setattr(transfers, "VOID_SECONDS", 0.2)
    linker = ready(start_linker, daemon, transfer=transfer_by)
    (lane,) = daemon.status()["lanes"]
    voided = KEYS[NODE : 2 * NODE]
    os.kill(lane["pid"], signal.SIGSTOP)
    try:
        assert linker.offload(transfer(TO, voided))
        linker.reset()
        assert not linker.num_completed_offloads()
    finally:
        os.kill(lane["pid"], signal.SIGCONT)
    assert eventually(lambda: store(linker, transfer(FROM, KEYS[2 * NODE : 3 * NODE])))
    assert linker.lookup("voided", transfer(keys=voided)) == []
    assert linker.lookup("request", transfer()) == FOUND
    assert load(linker)
    check_loaded(linker)
    worker_of(linker).check_integrity()


@each_transfer
def test_a_store_reads_pages_when_the_engine_has_written_them(
    daemon: Daemon, start_linker: StartLinker, monkeypatch: pytest.MonkeyPatch, transfer_by: str
) -> None:
    """On a device the engine has only begun to write them when it offloads their node."""
    kind = dense()
    linker = start_linker(daemon, kind, transfer=transfer_by)
    written = threading.Event()
    event = SimpleNamespace(synchronize=lambda: written.wait(PATIENCE))
    monkeypatch.setattr(PagePool, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(linker, "record_offload_ready", lambda: [event])
    assert linker.offload(transfer(FROM))
    kind.fill(1)
    written.set()
    eventually(linker.num_completed_offloads, (1).__eq__)
    assert linker.pop_completed_offload()
    eventually(lambda: linker.lookup("request", transfer()), FOUND.__eq__)
    assert load(linker)
    check_loaded(linker)


@each_transfer
def test_requests_that_are_aborted_are_counted(
    start_daemon: StartDaemon,
    start_linker: StartLinker,
    caplog: pytest.LogCaptureFixture,
    transfer_by: str,
) -> None:
    """With layers a load whose chunks are lost fails after SGLang has taken it for begun."""
    daemon = start_daemon(*KEEP)
    linker = ready(
        start_linker, daemon, layerwise=True, load_timeout=120, lease=240, transfer=transfer_by
    )
    assert load(linker)
    kill(daemon, linker)
    number = linker.start_layer_wise_loading()
    after = start_daemon("--keep-pool", "no")
    assert not linker.finish_layer_wise_loading(number)
    assert "the chunks are not in the cache any more" in caplog.text  # and no time was over
    eventually(
        lambda: [engine["counters"]["aborted_requests"] for engine in after.status()["engines"]],
        lambda counts: sum(counts) == 1,
    )


def test_a_load_ends_its_lease(daemon: Daemon, start_linker: StartLinker) -> None:
    """The chunks of a load are pinned until it has ended, and no lease is left to expire."""
    linker = ready(start_linker, daemon)
    for _ in range(3):
        assert linker.lookup("request", transfer()) == FOUND
        assert load(linker)
    scheduler_of(linker).end_step()  # sends the ends of pins
    report = eventually(daemon.status, lambda report: not report["leases"])
    assert not report["counters"]["leases_expired"]


def test_a_requests_first_lookup_is_reported(
    daemon: Daemon, start_linker: StartLinker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it asks for is used once, and what it does not find is missed once."""
    linker = ready(start_linker, daemon)
    used: list[list[bytes]] = []
    missed: list[list[bytes]] = []
    monkeypatch.setattr(scheduler_of(linker), "request_finished", used.append)
    monkeypatch.setattr(scheduler_of(linker), "report_missed", missed.append)
    for _ in range(2):  # as for a request that waits
        assert linker.lookup("longer", transfer(keys=KEYS[: NODE + 3])) == FOUND
    assert load(linker)
    keys = chunk_keys(KEYS[: NODE + 3])
    assert (used, missed) == ([keys], [keys[NODE:]])


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
    node = transfer(TO, KEYS[NODE : 2 * NODE])
    assert not store(linker, node)
    assert "chunks is not submitted" in caplog.text
    monkeypatch.setattr(PagePool, "device", SimpleNamespace(type="cuda"))
    monkeypatch.setattr(linker, "record_offload_ready", lambda: raising(lost))
    assert not store(linker, node)
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
    monkeypatch.setattr(PagePool, "describe", lambda *_: raising(lost))

    linker = make_linker(dense(), runtime_dir=str(daemon.runtime_dir), required=False)
    (line,) = [record.getMessage() for record in caplog.records if record.levelname == "ERROR"]
    assert str(lost) in line
    assert line.endswith("; the engine runs without offload")
    assert linker.lookup("request", transfer()) == []
    assert not load(linker)
    assert not store(linker, transfer(TO))
    linker.close()
    with pytest.raises(type(lost), match=str(lost)[:9]):
        make_linker(dense(), runtime_dir=str(daemon.runtime_dir), required=True)
