"""The parts of the GPU's benchmark, each alone, on a test driver that is no GPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fakecuda.harness import FakeCuda
from tests.gpu import run as gpu_run

ROOT = Path(__file__).parents[2]
PATIENCE = 150
MIB = 2**20

pytestmark = [pytest.mark.slow, pytest.mark.fakecuda]


def run(code: str, environment: dict[str, str], *arguments: object) -> str:
    """Run code with the benchmark's modules at hand; what it prints."""
    before = f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r})\n"
    done = subprocess.run(
        [sys.executable, "-c", before + code, *map(str, arguments)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


TORCH = """
import time, types
with open({log!r}, "a") as log:
    log.write("imported\\n")
bfloat16 = None
Tensor = object
cuda = types.SimpleNamespace(is_available=lambda: True, synchronize=lambda: None)
randn = lambda *shape, **how: object()
empty_like = lambda other: object()
def matmul(left, right, out):
    time.sleep(0.001)
"""

WAITING = """
from pathlib import Path
from gpu_device import Gpu
from gpu_engine import GpuEngine, pool_bytes
from harness import Daemon
from tests.fakecuda.harness import write_control

FRAGMENT, NBYTES = 65536, 96 * 2**20
control, partly = Path(sys.argv[1]), []

class Watched(Daemon):
    def status(self):
        found = super().status()
        lanes = [lane for lane in found.get("lanes", []) if lane["device"] != "host"]
        if any(0 < lane["usable_bytes"] < lane["pool_bytes"] for lane in lanes):
            partly.append(True)
            write_control(control, "unhang=")
        return found

with Watched(pool_bytes(FRAGMENT, NBYTES)) as daemon:
    with GpuEngine(Gpu(), daemon, FRAGMENT, NBYTES) as engine:
        keys, _ = engine.move(store=True)
        assert len(keys) == engine.chunks
        engine.move(keys)
        engine.check()
assert partly
"""


def test_an_engine_of_the_benchmark_waits_for_the_whole_pool(
    fakecuda: FakeCuda, tmp_path: Path
) -> None:
    """The second piece is not pinned until somebody looks; the first store finds all the room."""
    control = tmp_path / "switches"
    # Two registrations for the lane itself, then the pool's pieces.
    environment = fakecuda.environment(CONTROL=control, HANG="cuMemHostRegister:4")
    run(WAITING, environment, control)


BESIDE = """
import json
from pathlib import Path
import gpu_interference
from gpu_device import Gpu
gpu_interference.SECONDS = 0.1
log, *ways = sys.argv[1:]
for way in ways:
    print(json.dumps(gpu_interference.measure(Gpu(), way, 2**21, 1, Path(log))))
"""


def test_what_another_process_loses_is_measured_with_one_import_of_torch(
    fakecuda: FakeCuda, tmp_path: Path
) -> None:
    """Both ways, beside a process that computes; the daemons' and lanes' lines are kept."""
    package, imports = tmp_path / "torch", tmp_path / "imports"
    package.mkdir()
    (package / "__init__.py").write_text(TORCH.format(log=str(imports)))
    environment = fakecuda.environment() | {"PYTHONPATH": str(tmp_path)}
    log = tmp_path / "log"
    found = run(BESIDE, environment, log, "dma", "kernel").splitlines()
    assert len(found) == 2
    for figures in map(json.loads, found):
        assert all(figures[name] > 0 for name in ("alone_tflops", "beside_tflops", "kvd_GBps"))
    assert len(imports.read_text().splitlines()) == len(found)
    said = log.read_text()
    assert "lane cuda:" in said
    assert "by the kernel: none" in said  # what each lane does
    assert "by the kernel: store below 1048576 bytes, load below 1048576 bytes" in said


def test_logs_of_the_tests_daemons_are_kept(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """The tests as make gpu runs them: what a daemon and its lanes said goes to one file."""
    log = tmp_path / "gpu-tests.log"
    environment = fakecuda.environment() | {
        "GPU_TESTS_LOG": str(log),
        "PYTHONPATH": ":".join(map(str, gpu_run.SOURCES)),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    wanted = "test_two_ranks_on_one_gpu_get_every_byte_back[driver_rank-ipc]"
    done = subprocess.run(
        [sys.executable, *gpu_run.TESTS, "-k", wanted],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=PATIENCE,
    )
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    said = log.read_text()
    assert said.startswith(f"== {wanted}, run-0.log\n")
    assert "lane cuda:" in said
