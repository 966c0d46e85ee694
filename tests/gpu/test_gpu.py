"""Engines on a real GPU: two processes on one device, expandable segments, kills in a copy."""

import os
import signal
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest

from kvd_client import LookupResult
from tests.asked import Asked
from tests.daemon.cuda_engine import CudaEngine, Rank, blocks_of, wait_lane
from tests.daemon.engines import keys_of
from tests.daemon.serving import StartDaemon
from tests.gpu.others_engine import NOBODY, OthersEngine

pytestmark = pytest.mark.gpu

LARGE_PAGE = 2**20
MANY = 200  # loads of 60 MiB by each rank: the bus is busy for longer than a kill takes
JOBS = list(range(1001, 1001 + MANY))
NOT_SERVED = "not served here, which is told as it should be"
Use = Callable[[], type[Rank]]


def driver_rank() -> type[Rank]:
    """Memory by the driver's own functions."""
    return Rank


def torch_rank() -> type[Rank]:
    """Memory of torch."""
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    from tests.gpu.torch_rank import TorchRank  # noqa: PLC0415  # needs torch

    return TorchRank


@pytest.mark.parametrize(
    ("use", "kind"), [(torch_rank, "ipc"), (driver_rank, "ipc"), (driver_rank, "vmm")]
)
def test_two_ranks_on_one_gpu_get_every_byte_back(
    gpu_daemons: StartDaemon, use: Use, kind: str
) -> None:
    """Stored, loaded into other poisoned blocks, equal; the source is as it was."""
    rank_type = use()
    daemon = gpu_daemons()
    with CudaEngine(daemon.runtime_dir, kind=kind, rank_type=rank_type) as engine:
        engine.register()
        keys = keys_of("gpu", 6)
        engine.store(keys)
        assert engine.load(keys) == 0
        for rank in engine.ranks.values():
            assert not rank.ask("wrong_bytes", keys, blocks_of(keys, 1))
        assert wait_lane(daemon, workers=2)["counters"]["restarts"] == 0


def staging_rank() -> type[Rank]:
    """Memory of torch that is staged."""
    torch_rank()
    from tests.gpu.torch_rank import StagingRank  # noqa: PLC0415  # needs torch

    return StagingRank


def test_staging_and_exporting_engines_exchange_chunks(gpu_daemons: StartDaemon) -> None:
    """Each loads what the other has stored, byte for byte; staging needs the host lane only."""
    daemon = gpu_daemons()
    keys, others = keys_of("staged", 6), keys_of("exported", 6)
    with CudaEngine(daemon.runtime_dir, "stages", rank_type=staging_rank()) as staging:
        staging.register()
        staging.store(keys)
        assert staging.load(keys) == 0
        assert [lane["device"] for lane in daemon.status()["lanes"]] == ["host"]
        with CudaEngine(daemon.runtime_dir, "exports", rank_type=torch_rank()) as exporting:
            exporting.register()
            exporting.wait_hit(keys)
            assert exporting.load(keys) == 0
            exporting.store(others)
            staging.wait_hit(others)
            assert staging.load(others) == 0


def test_staging_is_timed(gpu_daemons: StartDaemon) -> None:
    """Prints GB/s of 60 MiB between the GPU and the pool, from submission to the end."""
    daemon = gpu_daemons(cpu_bytes="256MiB")
    how = {"world_size": 1, "page": LARGE_PAGE, "rank_type": staging_rank()}
    with CudaEngine(daemon.runtime_dir, **how) as engine:  # type: ignore[arg-type]
        engine.register()
        keys = keys_of("timed", 15)
        engine.store(keys)
        ticket = engine.scheduler.prepare_load(keys)
        slots, generations = ticket.slots.tolist(), ticket.generations.tolist()
        blocks, rank = blocks_of(keys, 33), engine.ranks[0]
        nbytes = 2 * LARGE_PAGE * len(blocks)
        seconds = [
            rank.ask("seconds", "load", 100 + number, blocks, slots, generations)
            for number in range(9)
        ]
        engine.scheduler.complete_load(ticket)
        assert not rank.ask("wrong_bytes", keys, blocks)
        print(f"staging: load {nbytes / sorted(seconds)[4] / 1e9:.1f} GB/s, median of 9")


@pytest.mark.parametrize("exportable", ["0", "1"])
def test_expandable_segments_are_served_or_refused_with_the_remedy(
    gpu_daemons: StartDaemon, monkeypatch: pytest.MonkeyPatch, exportable: str
) -> None:
    """Whether torch makes exportable segments is its version's affair; nothing is half served."""
    rank_type = torch_rank()
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    monkeypatch.setenv("TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC", exportable)
    daemon = gpu_daemons(cpu_bytes="256MiB")
    # Storages of 64 MiB: longer than a segment.
    with CudaEngine(daemon.runtime_dir, page=LARGE_PAGE, rank_type=rank_type) as engine:
        try:
            engine.register()
        except RuntimeError as refusal:
            text = str(refusal)
            assert "UnsupportedMemory" in text  # refusing is one of two right ways
            assert "expandable_segments:True from PYTORCH_CUDA_ALLOC_CONF" in text
            pytest.skip(f"{NOT_SERVED}: {text}")
        keys = keys_of("expandable", 6)
        engine.store(keys)
        assert engine.load(keys) == 0


@pytest.mark.parametrize("kind", ["ipc", "vmm"])
def test_an_engine_of_another_user_is_served_or_told_of_both_users(
    gpu_daemons: StartDaemon, kind: str
) -> None:
    """Whether a driver opens the memory of another user's process is its own affair."""
    if os.getuid():
        pytest.skip("only root can start a process of another user")
    daemon = gpu_daemons()
    daemon.runtime_dir.parent.chmod(0o711)
    with closing(Asked(OthersEngine, daemon.runtime_dir, kind)) as engine:
        try:
            wrong_bytes, refusal = engine.ask("serve"), ""
        except RuntimeError as error:
            wrong_bytes, refusal = 0, str(error)
    assert wrong_bytes == 0
    if refusal:  # the other of two right ways
        assert f"the worker's user is {NOBODY}" in refusal
        assert f"the lane's is {os.getuid()}" in refusal
        pytest.skip(f"{NOT_SERVED}: {refusal}")


def test_memory_that_cannot_be_exported_is_refused_with_the_remedy(
    gpu_daemons: StartDaemon,
) -> None:
    """Virtual memory made without handle types has neither an IPC handle nor a descriptor."""
    daemon = gpu_daemons()
    with (
        CudaEngine(daemon.runtime_dir, world_size=1, kind="closed") as engine,
        pytest.raises(RuntimeError, match=r"UnsupportedMemory: .*--enable-sleep-mode"),
    ):
        engine.ranks[0].ask("register")
    assert [lane["device"] for lane in daemon.status()["lanes"]] == ["host"]


@pytest.mark.parametrize("use", [torch_rank, driver_rank])
def test_a_worker_killed_in_a_copy_costs_nobody_else(gpu_daemons: StartDaemon, use: Use) -> None:
    """The lane lives, what was stored is there byte for byte, the next rank takes over."""
    rank_type = use()
    daemon = gpu_daemons(cpu_bytes="256MiB")
    with CudaEngine(daemon.runtime_dir, page=LARGE_PAGE, rank_type=rank_type) as engine:
        engine.register()
        keys = keys_of("kept", 15)
        engine.store(keys)
        lane = wait_lane(daemon, workers=2)
        ticket = busy(engine, keys)
        engine.ranks[1].kill()
        after = wait_lane(daemon, workers=1)
        assert (after["pid"], after["counters"]["restarts"]) == (lane["pid"], 0)
        settle(engine, 0)  # done, or cancelled with the engine, which is incomplete now
        engine.scheduler.complete_load(ticket)
        engine.replace(1)
        assert engine.load(keys) == 0


@pytest.mark.parametrize("use", [torch_rank, driver_rank])
def test_a_lane_killed_in_a_copy_costs_its_jobs(gpu_daemons: StartDaemon, use: Use) -> None:
    """Its jobs end as failed; the next lane maps the same memory, and the chunks are all there."""
    rank_type = use()
    daemon = gpu_daemons(cpu_bytes="256MiB")
    with CudaEngine(daemon.runtime_dir, page=LARGE_PAGE, rank_type=rank_type) as engine:
        engine.register()
        keys = keys_of("kept", 15)
        engine.store(keys)
        pid = wait_lane(daemon, workers=2)["pid"]
        ticket = busy(engine, keys)
        os.kill(pid, signal.SIGKILL)
        succeeded = [settle(engine, rank) for rank in engine.ranks]
        assert not any(succeeded)
        engine.scheduler.complete_load(ticket)
        daemon.wait_ready()
        wait_lane(daemon, workers=2, restarts=1)
        engine.wait_attached()
        assert set(engine.scheduler.lookup_many(keys)) == {LookupResult.HIT}
        assert engine.load(keys) == 0


def busy(engine: CudaEngine, keys: list[bytes]) -> Any:
    """Let every rank load into the same blocks many times; the ticket, once copies are under way.

    The jobs have the numbers 1001 and on.
    """
    ticket = engine.scheduler.prepare_load(keys)
    slots, generations = ticket.slots.tolist(), ticket.generations.tolist()
    for rank in engine.ranks.values():
        rank.ask("submit_many", JOBS, "load", blocks_of(keys, 33), slots, generations)
    for rank in engine.ranks.values():
        assert rank.ask("result", JOBS[0]).success
    return ticket


def settle(engine: CudaEngine, rank: int) -> bool:
    """Wait for the other loads of `busy` to end, however; whether all succeeded."""
    results = [engine.ranks[rank].ask("result", job) for job in JOBS[1:]]
    return all(result.success for result in results)
