"""A daemon with a CUDA lane is killed: the next one pins the pool anew, and every chunk is there.

On a test driver that is no GPU.
"""

import signal
from pathlib import Path

import pytest

from kvd_client import LookupResult
from tests.conftest import Daemon, StartDaemon
from tests.daemon.cuda_engine import CudaEngine, blocks_of, lane_of, wait_lane
from tests.daemon.engines import keys_of
from tests.daemon.test_cuda import in_copy
from tests.fakecuda.harness import write_control

pytestmark = pytest.mark.fakecuda

MIB = 2**20
POOL = (
    128 * MIB
)  # pinned in two pieces; the arena of rank 0 is in the first, rank 1's in the second


class Restarts:
    """Daemons one after another in one place, whose lanes obey switches of the test driver."""

    def __init__(self, start: StartDaemon, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._start = start
        self._control = folder / "lanes.switches"
        self._patch = patch

    def switch(self, text: str) -> None:
        """A line of `key=value`; read before a lane's next call of the driver."""
        write_control(self._control, text)

    def start(self, *, ready: bool = True) -> Daemon:
        """The next daemon, with the pool of the one before; ranks see nothing of the switches."""
        with self._patch.context() as patch:
            patch.setenv("FAKECUDA_CONTROL", str(self._control))
            return self._start("--keep-pool", "yes", cpu_bytes=str(POOL), ready=ready)


@pytest.fixture
def restarts(
    fakecuda_folder: Path,
    start_daemon: StartDaemon,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Restarts:
    """All find the test driver, with unkind timing."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fakecuda_folder))
    monkeypatch.setenv("FAKECUDA_SEED", "17")
    monkeypatch.delenv("FAKECUDA_LOG", raising=False)
    return Restarts(start_daemon, tmp_path, monkeypatch)


def test_chunks_outlive_the_daemon_that_pinned_them(restarts: Restarts) -> None:
    """Killed while a store copies: workers register again by themselves, and hits are right."""
    first = restarts.start()
    kept, lost = keys_of("kept", 6), keys_of("lost", 2)
    with CudaEngine(first.runtime_dir) as engine:
        engine.register()
        engine.store(kept)
        pid = lane_of(first)["pid"]
        restarts.switch("hold=copies")
        ticket = engine.scheduler.prepare_store(lost)
        job = engine.submit("store", ticket, blocks_of(lost, 20))
        in_copy(first)
        first.stop(signal.SIGKILL)
        restarts.switch("hold=")
        for rank in engine.ranks.values():
            assert not rank.ask("result", job).success
        second = restarts.start()
        engine.wait_attached(second)
        lane = wait_lane(second, workers=2, usable_bytes=POOL)
        assert lane["pid"] != pid
        assert engine.scheduler.lookup_many(kept) == [LookupResult.HIT] * 6
        assert engine.scheduler.lookup_many(lost) == [LookupResult.MISS] * 2
        assert engine.load(kept) == 0
        engine.store(lost, first_block=20)
        assert engine.load(lost) == 0


def test_lookups_are_answered_while_the_pool_is_pinned_anew(restarts: Restarts) -> None:
    """Half pinned: a hit by the directory, a miss where it would be loaded; whole: right bytes."""
    first = restarts.start()
    keys = keys_of("kept", 6)
    with CudaEngine(first.runtime_dir) as engine:
        engine.register()
        engine.store(keys)
        first.stop(signal.SIGKILL)
        restarts.switch("hang=cuMemHostRegister:4")  # two for the lane itself, two for the pool
        second = restarts.start(ready=False)
        engine.wait_attached(second)
        wait_lane(second, workers=2, usable_bytes=POOL // 2)
        assert not second.status()["ready"]
        assert engine.scheduler.lookup_many(keys) == [LookupResult.HIT] * 6
        assert not engine.scheduler.prepare_load(keys).keys
        restarts.switch("unhang=")
        wait_lane(second, usable_bytes=POOL)
        assert engine.load(keys) == 0
        assert second.wait_ready()["namespaces"][0]["counters"]["restored"] == 6
