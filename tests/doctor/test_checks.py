"""What the doctor says of machines that are described to it."""

from collections.abc import Callable
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from kvd.config.settings import Settings
from kvd.doctor.checks import CHECKS, examine
from kvd.doctor.facts import Facts, Filesystem, RuntimeFacts
from kvd.doctor.findings import Finding, Level, summary
from kvd.doctor.gpus import Gpu, Gpus
from kvd.machine.cgroup import MemoryLimit

GIB = 2**30
H200 = Gpu("ab" * 16, "NVIDIA H200", "0000:17:00.0", ipc=True, descriptors=True)


def healthy() -> Facts:
    """A machine with one GPU and a pool of 64 GiB, as it ought to be."""
    return Facts(
        settings=Settings(runtime_dir="/run/kvd", cpu_bytes="64GiB"),
        kernel="6.1.0-13-amd64",
        python="3.11.7",
        subject="a process started from here",
        locked=None,
        open_files=1_048_576,
        memory=256 * GIB,
        available=200 * GIB,
        cgroup=None,
        pool=Filesystem(
            Path("/dev/shm"),
            exists=True,
            kind="tmpfs",
            mounted_at="/dev/shm",
            size=128 * GIB,
            free=127 * GIB,
            writable=True,
        ),
        huge_pages={"HugePages_Total": 0, "HugePages_Free": 0, "Hugepagesize": 2**21},
        nodes={"node0": 256 * GIB},
        gpus=Gpus(("/dev/nvidia0",), "580.65", 13000, (H200,)),
        runtime=RuntimeFacts(
            path=Path("/run/kvd"),
            exists=True,
            is_directory=True,
            mode=0o750,
            owner=990,
            group=990,
            group_name="kvd",
            writable=True,
            path_bytes=8,
            most_bytes=80,
            holder=None,
            report=None,
            silence="",
        ),
        others={},
        clock_synchronized=True,
        port_problem="",
        cpus=64,
    )


def of(facts: Facts, name: str) -> list[Finding]:
    """The findings of one name that are not ok."""
    return [f for f in examine(facts) if f.name == name and f.level is not Level.OK]


def test_a_healthy_machine_has_nothing_but_ok() -> None:
    """Every check says ok, with what it saw, and no remedy."""
    findings = examine(healthy())
    assert {finding.level for finding in findings} == {Level.OK}
    assert all(finding.text and not finding.remedy for finding in findings)
    assert len(findings) >= len(CHECKS)


def pool(**changes: Any) -> Callable[[Facts], Facts]:
    """The machine with another filesystem for the pool."""
    return lambda facts: replace(facts, pool=replace(facts.pool, **changes))


def runtime(**changes: Any) -> Callable[[Facts], Facts]:
    """The machine with another runtime directory."""
    return lambda facts: replace(facts, runtime=replace(facts.runtime, **changes))


def gpus(**changes: Any) -> Callable[[Facts], Facts]:
    """The machine with other GPUs."""
    return lambda facts: replace(facts, gpus=replace(facts.gpus, **changes))


def with_facts(**changes: Any) -> Callable[[Facts], Facts]:
    """The machine with other facts."""
    return lambda facts: replace(facts, **changes)


GIVEN = ("settings", "unseen", "cpus", "subject")
DOWN = {"name": "lane down", "level": "error", "text": "Lane host is down.", "remedy": "Wait."}
REPORT = {"version": "kvd 0.1.0", "pid": 7, "ready": False, "conditions": [DOWN]}
BROKEN: list[tuple[str, Level, str, Callable[[Facts], Facts]]] = [
    ("machine", Level.FAIL, "4.18", with_facts(kernel="4.18.0-553")),
    ("memory", Level.FAIL, "at most 58 GiB", with_facts(available=60 * GIB)),
    ("memory", Level.WARN, "2 GiB", with_facts(available=65 * GIB)),
    ("processes", Level.FAIL, "PYTHON=", with_facts(child_problem="Permission denied")),
    ("swap", Level.WARN, "1 GiB", with_facts(swap_used=GIB)),
    ("cgroup", Level.FAIL, "memory.max", with_facts(cgroup=MemoryLimit(Path("/g"), 9 * GIB, 0))),
    ("pool directory", Level.FAIL, "no such directory", pool(exists=False)),
    ("pool directory", Level.FAIL, "no memory", pool(kind="ext4")),
    ("pool directory", Level.FAIL, "not writable", pool(writable=False)),
    ("pool directory", Level.FAIL, "--shm-size", pool(free=2**26, size=2**26)),
    ("pool directory", Level.FAIL, "chmod +t /dev/shm", pool(mode=0o777)),
    ("huge pages", Level.FAIL, "vm.nr_hugepages=32768", pool(kind="hugetlbfs")),
    ("memlock", Level.FAIL, "LimitMEMLOCK", with_facts(locked=2**23)),
    ("open files", Level.WARN, "LimitNOFILE=4352", with_facts(open_files=1024)),
    ("NUMA", Level.WARN, "spans", with_facts(nodes={"node0": 32 * GIB, "node1": 32 * GIB})),
    ("GPU", Level.FAIL, "shows no device", gpus(devices=())),
    ("GPU", Level.FAIL, "did not answer", gpus(devices=(), problem="it did not answer")),
    ("GPU", Level.WARN, "expandable", gpus(devices=(replace(H200, ipc=False),))),
    ("GPU", Level.FAIL, "WSL", gpus(devices=(replace(H200, ipc=False, descriptors=False),))),
    ("GPU driver", Level.WARN, "12.4", gpus(cuda=12040)),
    ("runtime directory", Level.FAIL, "/run/kvd", runtime(path_bytes=99)),
    ("runtime directory", Level.FAIL, "no directory", runtime(is_directory=False)),
    ("runtime directory", Level.FAIL, "RuntimeDirectory", runtime(exists=False, writable=False)),
    ("runtime directory", Level.FAIL, "chmod o-w /run/kvd", runtime(mode=0o777)),
    ("runtime directory", Level.WARN, "users into group kvd", runtime(mode=0o755)),
    ("runtime directory", Level.WARN, "chgrp kvd /run/kvd", runtime(mode=0o755, group=0)),
    ("daemon", Level.WARN, "Lane host is down", runtime(holder=7, report=REPORT)),
    ("daemon", Level.FAIL, "silent", runtime(holder=7, silence="silent")),
    ("other daemon", Level.WARN, "kvd serve", with_facts(others={9: "kvd serve"})),
    ("HTTP", Level.FAIL, "in use", with_facts(port_problem="in use")),
    ("clock", Level.WARN, "chrony", with_facts(clock_synchronized=False)),
]


@pytest.mark.parametrize(("name", "level", "says", "breaks"), BROKEN)
def test_each_fault_is_named_with_its_remedy(
    name: str, level: Level, says: str, breaks: Callable[[Facts], Facts]
) -> None:
    """One fault makes one finding, of the right level, with figures and a remedy."""
    found = of(breaks(healthy()), name)
    assert [finding.level for finding in found] == [level], found
    assert says in found[0].text + found[0].remedy
    assert found[0].remedy


@pytest.mark.parametrize("fact", [f.name for f in fields(Facts) if f.name not in GIVEN])
def test_a_fact_that_cannot_be_had_is_a_finding(fact: str) -> None:
    """The check that needs it says why it has none, and every other check has its say."""
    facts = replace(healthy(), unseen={fact: "[Errno 13] Permission denied: '/x'"})
    unseen = [f for f in examine(facts) if "cannot be looked at: [Errno 13]" in f.text]
    assert unseen
    assert {finding.level for finding in unseen} == {Level.WARN}
    assert len({finding.name for finding in examine(facts)}) >= len(CHECKS) - len(unseen)


def test_a_check_that_fails_is_a_finding() -> None:
    """A kernel whose version nobody can read ends no doctor."""
    (found,) = of(replace(healthy(), kernel="custom"), "machine")
    assert "this check failed: ValueError" in found.text


def test_what_a_running_daemon_has_taken_is_not_missed() -> None:
    """A machine whose memory is the running daemon's pool is not called too small."""
    facts = runtime(holder=7, report=REPORT | {"ready": True, "conditions": []})(healthy())
    facts = replace(
        pool(free=0)(facts), available=GIB, cgroup=MemoryLimit(Path("/g"), 66 * GIB, 65 * GIB)
    )
    assert {finding.level for finding in examine(facts)} == {Level.OK}


def test_without_a_gpu_a_low_memlock_is_a_warning() -> None:
    """Nothing pins the pool on a machine without GPUs."""
    facts = replace(healthy(), locked=2**16, gpus=Gpus())
    assert [finding.level for finding in of(facts, "memlock")] == [Level.WARN]


def test_auto_is_judged_without_a_size() -> None:
    """With cpu_bytes auto there is no size to hold against the machine."""
    facts = replace(healthy(), settings=Settings(runtime_dir="/run/kvd"), available=GIB)
    assert {finding.level for finding in examine(facts)} == {Level.OK}


def test_the_summary_is_as_bad_as_the_worst() -> None:
    """One failure outweighs warnings."""
    good, bad = Finding("a", Level.OK, "x"), Finding("b", Level.FAIL, "y", "z")
    assert summary([good])["level"] == "ok"
    assert summary([good, Finding("c", Level.WARN, "w", "v"), bad])["level"] == "fail"
    assert summary([bad])["findings"] == [
        {"name": "b", "level": "fail", "text": "y", "remedy": "z"}
    ]
