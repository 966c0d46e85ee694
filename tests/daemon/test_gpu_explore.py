"""What `make gpu-explore` runs, on the test driver, and what it makes of figures.

All figures here are made up, or the test driver's: none is a GPU's.
"""

import json
import os
from pathlib import Path
from typing import Any

import pytest

from tests.fakecuda.harness import FakeCuda
from tests.gpu.stand_ins import bare_python, seeming_mps
from tests.processes import ROOT, python

WHOLE = 280.0  # seconds of all parts, each with daemons of its own
PARTS = (
    *("device", "batch 8192", "kernel 8192", "beside kernel", "pieces bulk=8MiB"),
    *("pieces bulk=32MiB,flight=64MiB", "layouts"),
)


@pytest.mark.slow
@pytest.mark.fakecuda
@pytest.mark.timeout(400)
def test_the_sweeps_run_and_say_what_defaults_should_be(fakecuda: FakeCuda, tmp_path: Path) -> None:
    """Each kind of part, one of which fails, on a bare Python; with MPS and without."""
    bare_python(tmp_path)
    told = seeming_mps(tmp_path)
    found = fakecuda.environment() | {
        "PYTHONPATH": str(tmp_path),
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
    }
    only = [word for name in PARTS for word in ("--only", name)]
    done = python(
        *("tests/gpu/run.py", "--explore", "--mib", 1, "--rounds", 1, "--out", tmp_path / "out"),
        *only,
        environment=found,
        seconds=WHOLE,
    )
    shown = done.stdout
    assert done.returncode == 1, shown + done.stderr
    assert len(shown) < 12_000
    result = json.loads((tmp_path / "out" / "gpu-explore.json").read_text())
    assert set(result["missing"]) == {"layouts"}  # this torch has nothing for it
    assert {(row["direction"], row["any_order"]) for row in result["batch"]} == {
        ("load", True),
        ("load", False),
        ("store", False),
    }
    assert all(row["median"] > 0 for row in result["batch"] + result["kernel"])
    assert {row["blocks"] for row in result["kernel"]} == {4, 8, 12, 16, 24, 32}
    assert set(result["pieces"]) == {"bulk=8MiB,flight=32MiB", "bulk=32MiB,flight=64MiB"}
    assert set(result["beside"]) == {"kernel", "kernel mps"}
    started, *others = told.read_text().splitlines()
    assert started.startswith("started in /")
    assert others == ["get_server_list", "quit -t 5"]
    lines = shown.splitlines()
    assert any("no figure here says anything about a GPU" in line for line in lines)
    for beginning in ("overlap: not measured", "order=", "blocks=", "bulk=", "loads by the kernel"):
        assert any(line.startswith(f"advice: {beginning}") for line in lines), beginning
    assert any(line.startswith("not measured: layouts: AttributeError") for line in lines)
    said = (tmp_path / "out" / "gpu-explore" / "pieces-bulk=8MiB,flight=32MiB.log").read_text()
    assert "lane cuda:" in said


def test_the_sweeps_refuse_in_a_sentence_without_a_gpu() -> None:
    """As make gpu does, and with another exit status than when figures are missing."""
    if not python("tests/gpu/probe.py").returncode:
        pytest.skip("there is a GPU")
    done = python("tests/gpu/run.py", "--explore")
    assert (done.returncode, done.stdout) == (2, "")
    assert "it needs a machine with an NVIDIA GPU" in done.stderr


ADVICE = """
import json, sys
from gpu_advice import advice, facts
result = json.load(open(sys.argv[1]))
print(json.dumps([advice(result), list(facts(result))]))
"""


def advise(tmp_path: Path, **made_up: Any) -> tuple[list[str], list[str]]:
    """Advice and facts of figures that were made up."""
    file = tmp_path / "made-up.json"
    file.write_text(json.dumps(made_up))
    before = f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r})\n"
    done = python("-c", before + ADVICE, file)
    assert done.returncode == 0, done.stderr
    advice, facts = json.loads(done.stdout)
    return advice, facts


def batch(direction: str, median: float, **chosen: Any) -> dict[str, Any]:
    """A row of a sweep, made up."""
    base = {"fragment": 8192, "number": 256, "overlap": False, "any_order": False}
    return {"direction": direction, "median": median, "n": 9} | base | chosen


def test_a_flag_is_advised_unless_it_costs_more_than_noise(tmp_path: Path) -> None:
    """Made-up figures: 98 % of the speed is noise, 90 % is not; what was refused is no figure."""
    plain = batch("store", 50.0)
    for rate, line in (
        (49.0, "overlap=1: batches for copy engines only have 0.98 x the GB/s"),
        (45.0, "overlap=0: batches for copy engines only have 0.90 x the GB/s"),
    ):
        advice, _ = advise(tmp_path, batch=[plain, batch("store", rate, overlap=True)])
        assert line in advice
    refused = {"fragment": 8192, "direction": "store", "overlap": True, "refused": "no such value"}
    advice, _ = advise(tmp_path, batch=[plain, refused])
    assert advice[0].startswith("overlap: not measured")


def test_any_order_is_advised_only_where_it_gains(tmp_path: Path) -> None:
    """Made-up figures: 10 % more is a gain, 2 % is noise."""
    for rate, chosen in ((55.0, "any"), (51.0, "stream")):
        rows = [batch("load", 50.0), batch("load", rate, any_order=True)]
        advice, _ = advise(tmp_path, batch=rows)
        assert any(line.startswith(f"order={chosen}: ") for line in advice), advice


def test_the_cheapest_of_what_is_about_as_fast_is_advised(tmp_path: Path) -> None:
    """Made-up figures: 12 blocks are within noise of 24, 8 are not; cases must be in all."""
    rates = {8: 30.0, 12: 39.2, 24: 40.0}
    rows: list[dict[str, Any]] = [
        {"fragment": 8192, "direction": "load", "blocks": blocks, "median": rate}
        for blocks, rate in rates.items()
    ]
    rows.append({"fragment": 32768, "direction": "load", "blocks": 24, "median": 1.0})
    advice, _ = advise(tmp_path, kernel=rows)
    assert advice == ["blocks=12 (8: 75%, 12: 98%, 24: 100% of the best)"]


def test_the_kernel_is_advised_where_it_is_a_quarter_faster(tmp_path: Path) -> None:
    """Made-up figures: at 8 KiB it is, at 32 KiB a tenth is too little."""
    batches = [batch("load", 20.0), batch("load", 40.0, fragment=32768)]
    kernels = [
        {"fragment": 8192, "direction": "load", "blocks": 16, "median": 30.0},
        {"fragment": 32768, "direction": "load", "blocks": 16, "median": 44.0},
    ]
    advice, _ = advise(tmp_path, batch=batches, kernel=kernels)
    assert advice[-1] == (
        "loads by the kernel, against batches: 8192 bytes 1.50 x, kernel;"
        " 32768 bytes 1.10 x, copy engines"
    )


def test_pieces_are_advised_over_all_lengths_and_directions(tmp_path: Path) -> None:
    """Made-up figures: smaller pieces lose at one length, so larger ones are advised."""

    def found(short: float, long: float) -> list[dict[str, Any]]:
        ways = ("store", "load", "both")
        return [
            {"bytes": nbytes} | {way: {"ratio": {"median": ratio}} for way in ways}
            for nbytes, ratio in ((8192, short), (65536, long))
        ]

    pieces = {
        "bulk=8MiB": found(0.5, 0.95),
        "bulk=16MiB": found(0.7, 0.95),
        "bulk=32MiB": found(0.7, 0.96),
    }
    advice, _ = advise(tmp_path, pieces=pieces)
    assert advice == ["bulk=16MiB (bulk=8MiB: 84%, bulk=16MiB: 99%, bulk=32MiB: 100% of the best)"]


def test_what_no_default_follows_from_is_told_as_it_is(tmp_path: Path) -> None:
    """Made-up figures: small kernels beside copies, pairs of users, layouts."""

    def about(median: float) -> dict[str, float]:
        return {"median": median, "margin": 0.5, "n": 5}

    beside = {
        f"decode_{of}_{at}_us": about(value)
        for of, value in (("alone", 20.0), ("beside", 2000.0))
        for at in ("p50", "p99", "longest")
    }
    beside |= {"loss_percent": about(3.0), "kvd_GBps": about(40.0)}
    advice, facts = advise(
        tmp_path,
        beside={"kernel": beside},
        users={"daemon 0, engine 65534": "works"},
        layouts={"gather_ratio": about(1.01), "attend_ratio": about(1.2)},
    )
    slower = ", ".join(3 * ["20 -> 2000"])
    loss = "its matrix products lose 3.0 ±0.5 %; kvd 40.0 GB/s"
    assert facts == [
        f"beside kernel: its small kernels' p50, p99, longest us {slower}; {loss}",
        "daemon 0, engine 65534: works",
        "layouts, gather ratio: 1.01, n 5",
        "layouts, attend ratio: 1.20, n 5",
    ]
    (line,) = advice
    assert line.endswith("before blocks outermost: torch takes 1.20 x the time at worst")


TURNS = """
import json, types
from gpu_sweeps import in_turns
from kvd.errors import CudaError

asked = []
def refused():
    asked.append("refused")
    raise CudaError(1, "CUDA_ERROR_INVALID_VALUE", "enqueueing 3 copies")
def taken():
    asked.append("taken")
    return 7.0
gpu = types.SimpleNamespace(warm=lambda *seconds: None, wait=lambda: None)
ways = {(("overlap", True),): refused, (("overlap", False),): taken}
rows = in_turns(gpu, ways, rounds=4)
print(json.dumps([rows, asked.count("refused"), asked.count("taken")]))
"""


def test_a_choice_that_the_driver_refuses_costs_the_others_nothing() -> None:
    """It is asked once, and its row says why it has no figures."""
    before = f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r})\n"
    done = python("-c", before + TURNS)
    assert done.returncode == 0, done.stderr
    (refused, taken), times_refused, times_taken = json.loads(done.stdout)
    assert set(refused) == {"overlap", "refused"}
    assert "CUDA_ERROR_INVALID_VALUE" in refused["refused"]
    assert (taken["median"], taken["n"]) == (7.0, 4)
    assert (times_refused, times_taken) == (1, 5)  # the first round does not count


LAYOUTS = """
import torch
from gpu_layouts import Memory
how = {"device": "cpu", "layers": 3, "blocks": 8, "request": 4}
layers, blocks = (Memory(blocks_outermost=outermost, **how) for outermost in (False, True))
assert layers.gather().shape == (4, 2, 8, 16, 128)
assert torch.equal(layers.gather(), blocks.gather())
assert torch.equal(layers.attend(), blocks.attend())
"""


def test_both_layouts_are_measured_with_the_same_bytes() -> None:
    """What is gathered and attended to is equal; only where it lies differs."""
    before = f"import sys; sys.path.insert(0, {str(ROOT / 'bench')!r})\n"
    done = python("-c", before + LAYOUTS)
    assert done.returncode == 0, done.stderr
