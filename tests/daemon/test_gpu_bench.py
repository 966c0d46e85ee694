"""What `make gpu` runs, where there is no GPU: its refusals, and its benchmark's shape."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from operator import not_
from pathlib import Path

import psutil
import pytest

from tests.fakecuda.harness import FakeCuda
from tests.gpu import environment as gpu_environment
from tests.gpu import run as gpu_run
from tests.gpu.stand_ins import bare_python, seeming_torch
from tests.processes import LONG, ROOT, python
from tests.waiting import eventually

FRAGMENTS = (4096, 65536)
WHOLE = 280.0  # seconds of all parts, each with daemons of its own


def run(code: str, *arguments: object, environment: dict[str, str] | None = None) -> str:
    """Run code with the benchmark's modules at hand; what it prints."""
    before = f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r})\n"
    done = python("-c", before + code, *arguments, environment=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


# The benchmark, in which two parts meet a bad driver; the rest as it is.
PARTS = """
import os, sys
sys.path.insert(0, sys.argv.pop(1))
import gpu_parts, gpu_transfer
gpu_parts.LAST_WORDS_SECONDS = 1.0
BAD = {
    "fragments 8192": {"FAKECUDA_FAIL": "cuMemAlloc:1:2"},
    "fragments 16384": {"FAKECUDA_HANG": "cuMemcpyBatchAsync:1"},
}
run = gpu_parts.run_part
def with_a_driver(command, name, seconds, log):
    for switch in ("FAKECUDA_FAIL", "FAKECUDA_HANG"):
        os.environ.pop(switch, None)
    os.environ.update(BAD.get(name, {}))
    return run(command, name, 10.0 if "FAKECUDA_HANG" in os.environ else seconds, log)
gpu_parts.run_part = with_a_driver
gpu_transfer.main()
"""


@pytest.mark.slow
@pytest.mark.fakecuda
@pytest.mark.timeout(400)
def test_the_gpu_benchmark_runs_and_writes_every_figure(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """Tiny sizes through real daemons; a part that fails or hangs costs its own figures."""
    out, log = tmp_path / "gpu.json", tmp_path / "log"
    command = [sys.executable, "-c", PARTS, str(ROOT / "bench"), "--out", str(out)]
    command += ["--mib", "2", "--rounds", "1", "--jobs", "4"]
    command += ["--fragments", ",".join(map(str, (*FRAGMENTS, 8192, 16384)))]
    # An interrupt lets it end its daemons too.
    with (
        log.open("w") as sink,
        subprocess.Popen(
            command, env=fakecuda.environment(), cwd=ROOT, stdout=sink, stderr=sink
        ) as process,
    ):
        try:
            status = process.wait(WHOLE)
        finally:
            process.send_signal(signal.SIGINT)
    shown = log.read_text()
    assert status == 1, shown  # something is missing, which is said
    result = json.loads(out.read_text())
    assert {"driver", "cuda", "date", "bytes"} <= set(result)
    assert result["device"].startswith("kvd test double")
    assert {row["bytes"] for row in result["fragments"]} == set(FRAGMENTS)
    for row in result["fragments"]:
        assert row["moved"] == 2**21
        for direction in ("store", "load", "both"):
            figures = row[direction]
            assert set(figures) == {"kvd", "raw", "batch", "kernel", "ratio", "cpu_ms_per_GB"}
            assert all(found["n"] == 1 and found["median"] > 0 for found in figures.values())
    assert result["ways"] == {"batch": "", "kernel": ""}
    assert set(result["registration"]) == {
        "register_s_per_gib",
        "allocate_and_register_s_per_gib",
    }
    assert {"store_p50_us", "store_p99_us", "load_p50_us", "load_p99_us", "context_mib"} == set(
        result["latency"]
    )
    missing = result["missing"]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in missing.pop("fragments 8192")
    assert missing.pop("fragments 16384") == "it took more than 10 s"
    assert missing == {
        f"interference {way}": "RuntimeError: torch sees no GPU" for way in ("dma", "kernel")
    }
    assert "at least 0.95" in shown
    assert "not measured: fragments 8192" in shown
    assert "  | " in shown  # the end of its log
    assert "noted: lane cuda:" in shown
    # What a part, its daemon and its lanes said.
    said = (tmp_path / "gpu" / "fragments-4096.log").read_text()
    assert "lane cuda:" in said
    assert "all 6 MiB of the pool are allocated" in said


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


@pytest.mark.slow
@pytest.mark.fakecuda
def test_an_engine_of_the_benchmark_waits_for_the_whole_pool(
    fakecuda: FakeCuda, tmp_path: Path
) -> None:
    """The second piece is not pinned until somebody looks; the first store finds all the room."""
    control = tmp_path / "switches"
    # Two registrations for the lane itself, then the pool's pieces.
    environment = fakecuda.environment(CONTROL=control, HANG="cuMemHostRegister:4")
    run(WAITING, control, environment=environment)


PARTLY = """
import time
import harness
from gpu_device import Gpu
from gpu_engine import GpuEngine, pool_bytes
from harness import Daemon

FRAGMENT, NBYTES = 65536, 280 * 2**20

class Hasty(Daemon):
    def wait_usable(self, seconds):
        usable = pool = 0
        while not 0 < usable < pool:
            time.sleep(0.01)
            lane, = (lane for lane in self.status()["lanes"] if lane["device"] != "host")
            usable, pool = lane["usable_bytes"], lane["pool_bytes"]

with Hasty(288 * 2**20) as daemon:
    with GpuEngine(Gpu(), daemon, FRAGMENT, NBYTES) as engine:
        harness.SECONDS = 5.0  # for room that does not come
        try:
            engine.move(store=True)
        except RuntimeError as error:
            print(error)
"""


@pytest.mark.slow
@pytest.mark.fakecuda
def test_a_store_of_the_benchmark_that_is_not_taken_whole_is_an_error(fakecuda: FakeCuda) -> None:
    """The second piece of the pool is never pinned, and nobody waits for it."""
    environment = fakecuda.environment(HANG="cuMemHostRegister:4")
    assert "slots are needed for all keys" in run(PARTLY, environment=environment)


BESIDE = """
import json
from pathlib import Path
import gpu_interference
from gpu_device import Gpu
gpu_interference.PRODUCTS_SECONDS = gpu_interference.DECODE_SECONDS = 0.1
log, *ways = sys.argv[1:]
for way in ways:
    print(json.dumps(gpu_interference.measure(Gpu(), way, 2**21, 1, Path(log))))
"""


@pytest.mark.slow
@pytest.mark.fakecuda
def test_what_another_process_loses_is_measured_with_one_import_of_torch(
    fakecuda: FakeCuda, tmp_path: Path
) -> None:
    """Both ways, beside a process that computes; the daemons' and lanes' lines are kept."""
    imports = seeming_torch(tmp_path)
    environment = fakecuda.environment() | {"PYTHONPATH": str(tmp_path)}
    log = tmp_path / "log"
    found = run(BESIDE, log, "dma", "kernel", environment=environment).splitlines()
    assert len(found) == 2
    for figures in map(json.loads, found):
        names = ["alone_tflops", "beside_tflops", "kvd_GBps"]
        names += [f"decode_{of}_{at}_us" for of in ("alone", "beside") for at in ("p50", "p99")]
        assert all(figures[name]["median"] > 0 for name in names)
    assert len(imports.read_text().splitlines()) == len(found)
    said = log.read_text()
    assert "lane cuda:" in said
    assert "by the kernel: none" in said  # what each lane does
    assert "by the kernel: store below 1048576 bytes, load below 1048576 bytes" in said


@pytest.mark.slow
@pytest.mark.fakecuda
def test_logs_of_the_tests_daemons_are_kept(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """The tests as make gpu runs them: what a daemon and its lanes said goes to one file."""
    log = tmp_path / "gpu-tests.log"
    environment = fakecuda.environment() | {
        "GPU_TESTS_LOG": str(log),
        "PYTHONPATH": ":".join(map(str, gpu_environment.SOURCES)),
        "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
    }
    wanted = "test_two_ranks_on_one_gpu_get_every_byte_back[driver_rank-ipc]"
    done = python(*gpu_run.TESTS, "-k", wanted, environment=environment)
    assert "1 passed" in done.stdout, done.stdout + done.stderr
    said = log.read_text()
    assert said.startswith(f"== {wanted}, run-0.log\n")
    assert "lane cuda:" in said


def test_the_table_shows_what_is_there(tmp_path: Path) -> None:
    """Figures beside their goals, met and missed; parts without figures with the reason."""
    good = {"kvd": about(50.0), "raw": about(51.0), "ratio": about(0.98), "cpu_ms_per_GB": about(9)}
    poor = good | {"kvd": about(20.0), "batch": about(40.0), "ratio": about(0.39)}
    noisy = good | {"ratio": about(0.91, 0.02)}
    few = good | {"ratio": about(0.98) | {"n": 4}}
    result = {
        "device": "A GPU",
        "driver": "1.2",
        "date": "2026-01-01",
        "bytes": 2**31,
        "fragments": [
            {"bytes": 2**21, "store": good, "load": poor, "both": noisy},
            {"bytes": 8192, "store": poor, "load": poor, "both": poor},
            {"bytes": 65536, "store": few, "load": few, "both": few},
        ],
        "latency": {"store_p50_us": 123.456},
        "ways": {"batch": "", "kernel": "no such thing"},
        "interference": {"dma": {"loss_percent": about(1.5)}, "kernel": {"loss_percent": about(9)}},
        "missing": {"registration": "it took more than 45 s"},
    }
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps(result))
    done = python("bench/gpu_transfer.py", "--show", file)
    lines = [" ".join(line.split()) for line in done.stdout.splitlines()]
    assert lines[0].startswith("A GPU, driver 1.2, 2026-01-01, 2048 MiB a measurement")
    wanted = [
        "store, 2 MiB 50.00 51.00 none none 0.98 ±0.00 9.00 7 at least 0.95: met",
        "load, 2 MiB 20.00 51.00 40.00 none 0.39 ±0.00 9.00 7 at least 0.95: missed",
        "both, 2 MiB 50.00 51.00 none none 0.91 ±0.02 9.00 7 at least 0.9: open",
        "store, 64 KiB 50.00 51.00 none none 0.98 ±0.00 9.00 7 at least 0.95: open",
        "load, 8 KiB 20.00 51.00 40.00 none 0.39 ±0.00 9.00 7 at least 0.6: missed",
        "store, 8 KiB 20.00 51.00 40.00 none 0.39 ±0.00 9.00 7",
        "store p50 us 123.46",
        "beside dma: loss percent 1.50 ±0.00 7 at most 2: met",
        "beside kernel: loss percent 9.00 ±0.00 7",
        "kernel, called directly, cannot be used here: no such thing",
        "not measured: registration: it took more than 45 s",
    ]
    assert [line for line in lines if line in wanted] == sorted(wanted, key=lines.index)


def about(median: float, margin: float = 0.0) -> dict[str, float]:
    """Seven samples, in short."""
    return {"median": median, "low": median, "high": median, "margin": margin, "n": 7}


def test_a_part_that_dies_while_it_writes_costs_its_own_figures(tmp_path: Path) -> None:
    """Nothing, or half of what was to be written: the part is missing, with how it ended."""
    code = (
        "import sys\n"
        "from gpu_parts import run_part, Path\n"
        "for half in ('', '{', '{\"a\": [1'):\n"
        "    dies = f'import sys; open(sys.argv[5], \"w\").write({half!r}); sys.exit(7)'\n"
        "    command = [sys.executable, '-c', dies, sys.argv[1]]\n"
        "    print(run_part(command, 'dies', 30.0, Path(sys.argv[1]))['error'])\n"
    )
    assert run(code, tmp_path / "log") == "it ended with exit status 7\n" * 3


def test_parts_for_which_no_time_is_left_are_named(tmp_path: Path) -> None:
    """Time is over before the first: none is started, each is told to be missing."""
    code = (
        "from gpu_parts import Part, Path, run_parts\n"
        "parts = [Part('one', 9.0), Part('two', 9.0)]\n"
        "keep = lambda name, figures: print(name, figures)\n"
        "run_parts(parts, ['/nonexistent'], Path(sys.argv[1]), 0.0, keep)\n"
    )
    lines = run(code, tmp_path / "logs").splitlines()
    assert lines[-1] == "two {'error': 'no time was left'}"
    assert lines.count("  not measured: no time was left") == 2


def test_make_gpu_says_which_wheels_are_missing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packages that are neither there nor in the folder are named, and no others."""
    packages = ["kvd-one>=1", "kvd.two>=2", "kvd-three"]
    monkeypatch.delenv("WHEELS", raising=False)
    with pytest.raises(
        gpu_environment.Refused, match=r"lacks kvd-one>=1, kvd.two>=2, kvd-three; put"
    ):
        gpu_environment._install(packages, tmp_path / "site")
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    (wheels / "kvd_two-2.0-py3-none-any.whl").touch()
    monkeypatch.setenv("WHEELS", str(wheels))
    with pytest.raises(gpu_environment.Refused, match=r" lack kvd-one>=1, kvd-three; put"):
        gpu_environment._install(packages, tmp_path / "site")


def test_make_gpu_installs_wheels_without_a_network(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wheel whose own needs are not in the folder is installed all the same, kvd is not."""
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    with zipfile.ZipFile(wheels / "kvd_two-2.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("kvd_two.py", "HERE = True\n")
        info = "kvd_two-2.0.dist-info/"
        needs = "Metadata-Version: 2.1\nName: kvd-two\nVersion: 2.0\nRequires-Dist: numpy\n"
        wheel.writestr(info + "METADATA", needs)
        wheel.writestr(info + "WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        wheel.writestr(info + "RECORD", "")
    monkeypatch.setenv("WHEELS", str(wheels))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setattr(
        gpu_environment, "needed", lambda: {"kvd_two": "kvd-two>=2", "numpy": "numpy"}
    )
    environment = gpu_environment.environment(site)
    code = "import kvd_two, kvd.version; print(kvd_two.HERE, kvd.version.__file__)"
    assert (
        python("-c", code, environment=environment).stdout
        == f"True {ROOT / 'kvd' / 'version.py'}\n"
    )


def test_make_gpu_says_how_to_enlarge_shared_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Less is moved where that is still much; where it is not, the command that makes room."""
    free = gpu_environment.POOLS * 300 * 2**20 + gpu_environment.SPARE_BYTES
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, free))
    assert gpu_environment.mib_that_fit(200, tmp_path) == 200
    assert gpu_environment.mib_that_fit(2048, tmp_path) == 300
    free = gpu_environment.POOLS * 100 * 2**20 + gpu_environment.SPARE_BYTES
    assert gpu_environment.mib_that_fit(2, tmp_path) == 2  # as tests ask for
    with pytest.raises(gpu_environment.Refused, match=rf"remount,size=24g {tmp_path} "):
        gpu_environment.mib_that_fit(2048, tmp_path)


def test_what_make_gpu_starts_has_ended_when_it_goes_on(tmp_path: Path) -> None:
    """A process that its program leaves behind does not run beside the next part."""
    said = tmp_path / "said"
    code = (
        "import subprocess, sys\n"
        "left = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        "open(sys.argv[1], 'w').write(str(left.pid))"
    )
    command = [sys.executable, "-c", code, str(said)]
    end = time.monotonic() + LONG
    assert gpu_run._run("the tests", command, dict(os.environ), end) == 0
    left = int(said.read_text())
    eventually(lambda: runs(left), not_)


def test_what_make_gpu_starts_can_be_told_to_end() -> None:
    """In the background of a shell, which ignores interrupts: what is started heeds them."""
    heeds = "signal.getsignal(signal.SIGINT) is signal.default_int_handler"
    code = (
        "import os, signal, sys, time\n"
        "signal.signal(signal.SIGINT, signal.SIG_IGN)\n"
        "from tests.gpu import run\n"
        f"command = [sys.executable, '-c', 'import signal, sys; sys.exit(not {heeds})']\n"
        "sys.exit(run._run('it', command, dict(os.environ), time.monotonic() + 60))"
    )
    assert python("-c", code).returncode == 0


@pytest.mark.slow
@pytest.mark.fakecuda
@pytest.mark.timeout(400)
def test_make_gpu_runs_from_end_to_end_without_packages_for_the_command_line(
    fakecuda: FakeCuda, tmp_path: Path
) -> None:
    """A test, each kind of part, and at the end what passed, the figures and where the logs are."""
    bare_python(tmp_path)
    wanted = "every_byte_back and driver_rank-ipc or cannot_be_exported"
    environment = fakecuda.environment() | {
        "PYTHONPATH": str(tmp_path),
        "PYTEST_ADDOPTS": f"-k '{wanted}'",
    }
    environment.pop("LD_PRELOAD", None)  # naps: its parts have limits
    out = tmp_path / "out" / "gpu.json"
    done = python(
        *("tests/gpu/run.py", "--mib", 2, "--rounds", 1, "--jobs", 4, "--fragments", 65536),
        *("--out", tmp_path / "out"),
        environment=environment,
        seconds=WHOLE,
    )
    shown = done.stdout
    assert done.returncode == 0, shown + done.stderr
    assert len(shown) < 12_000
    result = json.loads(out.read_text())
    assert result["missing"] == {}
    assert result["device"].startswith("kvd test double")
    lines = shown.splitlines()
    assert "tests: 2 of 2 passed" in lines
    assert "  passed: test_memory_that_cannot_be_exported_is_refused_with_the_remedy" in lines
    assert any(line.startswith("load, 64 KiB") for line in lines)
    assert any(line.startswith("beside dma: decode beside p99 us") for line in lines)
    assert f"written to {out}, what each part said to {out.with_suffix('')}/*.log" in lines
    logs = tmp_path / "out"
    assert "lane cuda:" in (logs / "gpu" / "interference-dma.log").read_text()
    assert "lane cuda:" in (logs / "gpu-tests" / "daemons.log").read_text()
    assert "2 passed" in (logs / "gpu-tests" / "tests.log").read_text()


def test_what_pytest_said_is_told_in_short() -> None:
    """Tests by outcome, the one that was running when time was over, and why some were skipped."""
    said = (
        "tests/gpu/test_gpu.py::test_a PASSED  [ 25%]\n"
        "test_gpu.py::test_b[x-y] FAILED  [ 50%]\n"
        "test_gpu.py::test_c SKIPPED (why)  [ 75%]\n"
        "test_gpu.py::test_d \n"
        "SKIPPED [1] test_gpu.py:3: not root\n"
    )
    assert gpu_run.tests_summary(said) == [
        "tests: 1 of 4 passed",
        "  passed: test_a",
        "  failed: test_b[x-y]",
        "  skipped: test_c",
        "  not ended: test_d",
        "  reason to skip: not root",
    ]


def runs(pid: int) -> bool:
    """Whether a process is there, and no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def test_make_gpu_refuses_in_a_sentence_without_a_gpu() -> None:
    """No driver, no device: one line that says so, before anything else is looked at."""
    if not python("tests/gpu/probe.py").returncode:
        pytest.skip("there is a GPU")
    done = refused()
    assert "it needs a machine with an NVIDIA GPU" in done


@pytest.mark.fakecuda
def test_make_gpu_refuses_a_torch_that_cannot_use_the_gpu(fakecuda: FakeCuda) -> None:
    """A device, and a torch that does not know what to do with it."""
    assert "has no CUDA; choose another: make gpu PYTHON=" in refused(fakecuda.environment())


def refused(environment: dict[str, str] | None = None) -> str:
    """The one line that `make gpu` prints."""
    done = python("tests/gpu/run.py", environment=environment)
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("make gpu: ")
    return line
