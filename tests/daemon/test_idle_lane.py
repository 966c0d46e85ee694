"""A CUDA lane's process from the first engine of its device to the daemon's end."""

from pathlib import Path

import pytest

from tests.conftest import StartDaemon
from tests.daemon.cuda_engine import CudaEngine, lane_of, wait_lane
from tests.daemon.cuda_lanes import cuda_lanes
from tests.daemon.engines import keys_of
from tests.waiting import eventually

pytestmark = pytest.mark.fakecuda


def test_a_lane_ends_without_engines_and_comes_back_for_the_next(
    fakecuda_folder: Path, start_daemon: StartDaemon, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its end unpins the pool and is no error; the next engine finds its chunks."""
    monkeypatch.setenv("LD_LIBRARY_PATH", str(fakecuda_folder))
    daemon = start_daemon("--lane-idle-seconds", "0.3")
    keys = keys_of("kept", 4)
    with CudaEngine(daemon.runtime_dir) as engine:
        engine.register()
        engine.store(keys)
        eventually(lambda: lane_of(daemon)["pinned_bytes"])
        first = lane_of(daemon)["pid"]
    daemon.wait_log("has ended: no engine for 0.3 s")
    assert not cuda_lanes(daemon)
    with CudaEngine(daemon.runtime_dir, name="next") as engine:
        engine.register()
        daemon.wait_ready()  # its arenas are pinned again
        assert engine.load(keys) == 0
        lane = wait_lane(daemon, workers=2)
        assert (lane["pid"] != first, lane["counters"]["restarts"]) == (True, 0)
        eventually(lambda: lane_of(daemon)["pinned_bytes"])
        assert daemon.stop() == 0
    log = daemon.log.read_text()
    assert "[error" not in log
    assert "is killed" not in log
    assert "is lost" not in log
