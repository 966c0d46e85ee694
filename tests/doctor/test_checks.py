"""What the doctor says of machines that are described to it."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvd.config.settings import Settings
from kvd.config.values import parse_tier
from kvd.doctor import Finding, Level, start
from kvd.doctor.checks import CHECKS, examine
from kvd.doctor.facts import Facts, RuntimeFacts
from kvd.doctor.probes import DiskFacts, Gpu, Gpus, StoreFacts, TierFacts
from kvd.doctor.start import StartFacts
from kvd.errors import ConfigError
from kvd.machine.memory import Filesystem, MachineMemory, MemoryLimit, ResourceLimit

GIB = 2**30
QUIET = {
    "settings",
    "process limits",
    "swap",
    "unused pools",
    "other daemon",
    "tier",
}  # say nothing where nothing is wrong
H200 = Gpu("ab" * 16, "NVIDIA H200", "0000:17:00.0", ipc=True, descriptors=True)


SHM = Filesystem(
    Path("/dev/shm"),
    kind="tmpfs",
    mounted_at="/dev/shm",
    page_bytes=4096,
    total_bytes=128 * GIB,
    free_bytes=127 * GIB,
)
GPUS = Gpus(("/dev/nvidia0",), "580.65", 13000, (H200,))
HEALTHY = {
    "settings": Settings(runtime_dir="/run/kvd", cpu_bytes="64GiB"),
    "kernel": "6.1.0-13-amd64",
    "cpus": 64,
    "child_problem": "",
    "daemon": None,
    "open_files": 1_048_576,
    "memory": MachineMemory(256 * GIB, 200 * GIB),
    "swap_used": 0,
    "cgroup": None,
    "resource_limit": None,
    "filesystem": SHM,
    "existing_bytes": 0,
    "unused_pools": [],
    "kept_cpu_bytes": None,
    "pool_holder": None,
    "pool_problem": None,
    "runtime_problem": None,
    "user_problems": [],
    "tier_problems": [],
    "pinned": True,
    "huge_pages": {"HugePages_Total": 0, "HugePages_Free": 0, "Hugepagesize": 2**21},
    "nodes": {"node0": 256 * GIB},
    "gpu_nodes": (),
    "gpus": GPUS,
    "others": {},
    "tiers": [],
    "port_problem": None,
}
"""A machine with one GPU and a pool of 64 GiB, as it ought to be."""


def runtime(mode: int = 0o40750, gid: int = 990, **changes: Any) -> dict[str, Any]:
    """A runtime directory with this mode and group; 0 for one that is not there."""
    status = os.stat_result((mode, 0, 0, 0, 990, gid, 0, 0, 0, 0)) if mode else None
    facts = replace(RuntimeFacts(Path("/run/kvd"), status, group_name="kvd"), **changes)
    return {"runtime": facts, "daemon": facts.holder}


def machine(**changes: Any) -> Facts:
    """The healthy machine, with other facts."""
    facts = Facts(Settings())
    vars(facts).update(HEALTHY | runtime() | changes)
    return facts


def of(facts: Facts, name: str) -> list[Finding]:
    """The findings of one name that are not ok."""
    return [f for f in examine(facts) if f.name == name and f.level is not Level.OK]


def test_a_healthy_machine_has_nothing_but_ok() -> None:
    """Every check says ok, with what it saw, and no remedy."""
    findings = examine(machine())
    assert {finding.level for finding in findings} == {Level.OK}
    assert all(finding.text and not finding.remedy for finding in findings)
    assert {finding.name for finding in findings} == CHECKS.keys() - QUIET


TWO_NODES = {"node0": 128 * GIB, "node1": 32 * GIB}


def shm(**changes: Any) -> dict[str, Any]:
    """Another filesystem for the pool."""
    return {"filesystem": replace(SHM, **changes)}


HUGE: dict[str, Any] = {"kind": "hugetlbfs", "page_bytes": 2**21}
KEPT = {"existing_bytes": 64 * GIB + 2**21, "kept_cpu_bytes": 64 * GIB}
"""A pool of 64 GiB that a daemon runs with, or has left."""
REFUSED = ConfigError("it is refused", "do something else")


def gpus(**changes: Any) -> dict[str, Any]:
    """Other GPUs."""
    return {"gpus": replace(GPUS, **changes)}


NVME = DiskFacts(
    exists=True,
    filesystem="xfs",
    mounted_at="/var/lib/kvd",
    source="/dev/nvme0n1p1",
    device="nvme0n1",
    medium="NVMe",
    size=1000 * GIB,
    free=900 * GIB,
    writable=True,
    direct=True,
    written=3.1e9,
    read=2.3e9,
)


def disk(hung: str = "", **changes: Any) -> dict[str, Any]:
    """A disk below the pool."""
    setting = parse_tier("disk:/var/lib/kvd/tier,size=500GiB")
    return {"tiers": [TierFacts(setting=setting, hung=hung, disk=replace(NVME, **changes))]}


def store(**given: str) -> dict[str, Any]:
    """A shared store below the pool."""
    setting = parse_tier("mooncake:master=10.0.0.1:50051")
    facts = StoreFacts(master="10.0.0.1:50051", package="mooncake 1", **given)
    return {"tiers": [TierFacts(setting=setting, store=facts)]}


TOTAL, PINLESS = 256 * GIB, 131 * GIB // 2  # a pool of 64 GiB would fit, if it were not pinned
AUTO = Settings(runtime_dir="/run/kvd", reserve="100TiB")
DOWN = {"name": "lane down", "level": "error", "text": "Lane host is down.", "remedy": "Wait."}
REPORT = {
    "version": "kvd 0.1.0",
    "pid": 7,
    "ready": False,
    "conditions": [DOWN],
    "namespaces": [{"model": "llama", "advice": None}],
    "pool": {"cpu_bytes": 2**30},
}
FULL = MachineMemory(256 * GIB, GIB)
ADDRESS_LIMIT = ResourceLimit("RLIMIT_AS", GIB, 0, "a lane takes 1 GiB", "LimitAS=infinity")
OTHER_SIZE = runtime(
    holder=7,
    report=REPORT | {"conditions": []},
    settings={"cpu_bytes": 9, "policy": "adaptive"},
)
HUGE_POOL = shm(**HUGE, free_bytes=65 * GIB)
BROKEN: list[tuple[str, Level, str, dict[str, Any]]] = [
    ("machine", Level.FAIL, "4.18", {"kernel": "4.18.0-553"}),
    ("memory", Level.FAIL, "58GiB or less", {"memory": MachineMemory(256 * GIB, 60 * GIB)}),
    ("memory", Level.FAIL, "768 MiB for pinning it", {"memory": MachineMemory(TOTAL, PINLESS)}),
    ("memory", Level.FAIL, "768 MiB for pinning it", HUGE_POOL | {"memory": FULL}),
    ("memory", Level.WARN, "2 GiB", {"memory": MachineMemory(256 * GIB, 133 * GIB // 2)}),
    ("memory", Level.WARN, "reserve = 100 TiB leaves nothing", {"settings": AUTO}),
    ("processes", Level.FAIL, "PYTHON=", {"child_problem": "Permission denied"}),
    ("swap", Level.WARN, "1 GiB", {"swap_used": GIB}),
    ("cgroup", Level.FAIL, "memory.max", {"cgroup": MemoryLimit(Path("/g"), 9 * GIB, 0)}),
    ("pool directory", Level.FAIL, "something else", {"pool_problem": REFUSED}),
    ("pool directory", Level.FAIL, "pid 9, uses the pool", {"pool_holder": 9}),
    ("pool directory", Level.WARN, "not in memory", shm(kind="ext4")),
    ("pool directory", Level.WARN, "kept pool has 32 GiB", {"kept_cpu_bytes": 32 * GIB}),
    ("pool directory", Level.FAIL, "size=65537M /dev/shm; in", shm(free_bytes=0, total_bytes=0)),
    ("pool directory", Level.FAIL, "echo 32769 > /sys/", shm(**HUGE, total_bytes=0, free_bytes=0)),
    ("open files", Level.WARN, "LimitNOFILE=4352", {"open_files": 1024}),
    ("open files", Level.FAIL, "LimitNOFILE", {"open_files": 64}),
    ("process limits", Level.FAIL, "LimitAS=infinity", {"resource_limit": ADDRESS_LIMIT}),
    ("settings", Level.FAIL, "something else", {"user_problems": [REFUSED]}),
    (
        "settings",
        Level.WARN,
        "did you mean",
        {"warnings": ["KVD_X is no setting; did you mean Y?"]},
    ),
    ("machine", Level.FAIL, "mount -t proc", {"has_proc": False}),
    ("NUMA", Level.WARN, "spans", {"nodes": {"node0": 32 * GIB, "node1": 32 * GIB}}),
    ("NUMA", Level.WARN, "sit at node1, where", {"nodes": TWO_NODES, "gpu_nodes": ("node1",)}),
    ("NUMA", Level.WARN, "spans", {"nodes": TWO_NODES, "gpu_nodes": ("node1", "node1", "node0")}),
    ("GPU", Level.FAIL, "shows no device", gpus(devices=())),
    ("GPU", Level.FAIL, "for CUDA 11.8", gpus(devices=(), cuda=11080, missing="too old")),
    ("GPU", Level.FAIL, "update the NVIDIA driver to 525", gpus(devices=(), cuda=11080)),
    ("GPU", Level.FAIL, "did not answer", gpus(devices=(), problem="it did not answer")),
    ("GPU", Level.WARN, "--enable-cumem-allocator", gpus(devices=(replace(H200, ipc=False),))),
    ("GPU", Level.FAIL, "-i 0000:17:00.0 -c DEFAULT", gpus(devices=(replace(H200, refusal="no"),))),
    ("GPU", Level.FAIL, "WSL", gpus(devices=(replace(H200, ipc=False, descriptors=False),))),
    ("GPU driver", Level.WARN, "12.4", gpus(cuda=12040)),
    ("runtime directory", Level.FAIL, "something else", {"runtime_problem": REFUSED}),
    ("runtime directory", Level.WARN, "users into group kvd", runtime(0o40755)),
    ("runtime directory", Level.WARN, "chgrp kvd /run/kvd", runtime(0o40755, 0)),
    ("daemon", Level.WARN, "Lane host is down", runtime(holder=7, report=REPORT)),
    ("daemon", Level.FAIL, "silent", runtime(holder=7, failure="silent")),
    ("daemon", Level.WARN, "usermod -aG kvd", runtime(holder=7, denied="usermod -aG kvd USER")),
    ("daemon", Level.WARN, "cpu_bytes = 9 (here 64GiB)", OTHER_SIZE),
    ("other daemon", Level.WARN, "kvd serve", {"others": {9: "kvd serve"}}),
    ("tier", Level.FAIL, "something else", {"tier_problems": [REFUSED]}),
    ("tier", Level.FAIL, "hangs", disk(hung="writing and reading a file in /var/lib/kvd")),
    ("tier", Level.FAIL, "ReadWritePaths=/var/lib/kvd/tier", disk(writable=False)),
    ("tier", Level.WARN, "cpu_bytes", disk(medium="memory", filesystem="tmpfs", direct=False)),
    ("tier", Level.WARN, "over a network", disk(medium="network", filesystem="nfs4")),
    ("tier", Level.WARN, "rotating disk", disk(medium="rotating", device="sda")),
    ("tier", Level.WARN, "findmnt", disk(mounted_at="/")),
    ("tier", Level.WARN, "O_DIRECT", disk(direct=False, written=None, read=None)),
    ("tier", Level.WARN, "size=398GiB at most", disk(free=400 * GIB, existing_bytes=30 * GIB)),
    ("tier", Level.FAIL, "pip install mooncake", store(missing="No module named 'mooncake'")),
    ("tier", Level.FAIL, "mooncake_master", store(refused="Connection refused")),
    ("HTTP", Level.FAIL, "something else", {"port_problem": REFUSED}),
]


@pytest.mark.parametrize(("name", "level", "says", "broken"), BROKEN)
def test_each_fault_is_named_with_its_remedy(
    name: str, level: Level, says: str, broken: dict[str, Any]
) -> None:
    """One fault makes one finding, of the right level, with figures and a remedy."""
    findings = of(machine(**broken), name)
    assert [finding.level for finding in findings] == [level], findings
    assert says in findings[0].text + findings[0].remedy
    assert findings[0].remedy


@pytest.mark.parametrize(
    "fact", [*sorted(HEALTHY.keys() - {"settings", "cpus", "daemon"}), "runtime"]
)
def test_a_fact_that_cannot_be_had_is_a_finding(fact: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check that needs it says why it has none, and every other check has its say."""

    def denied(_: Facts) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", "/x")

    monkeypatch.setattr(Facts, fact, property(denied))
    facts = machine()
    unseen = [f for f in examine(facts) if "cannot be examined: [Errno 13]" in f.text]
    assert unseen
    assert {finding.level for finding in unseen} == {Level.WARN}
    assert {f.name for f in examine(facts)} >= CHECKS.keys() - QUIET - {"GPU driver"}


@pytest.mark.parametrize(
    "fine",
    [
        shm(free_bytes=0)
        | runtime(holder=7, report=REPORT | {"ready": True, "conditions": []})
        | KEPT
        | {"memory": FULL, "cgroup": MemoryLimit(Path("/g"), 66 * GIB, 65 * GIB)},
        shm(free_bytes=0)
        | KEPT
        | {"memory": FULL, "cgroup": MemoryLimit(Path("/g"), 2 * GIB, 2 * GIB), "pinned": False},
        shm(**HUGE, free_bytes=0) | KEPT,
        HUGE_POOL | {"memory": FULL, "pinned": False},
        {"settings": Settings(runtime_dir="/run/kvd"), "memory": MachineMemory(8 * GIB, 4 * GIB)},
    ],
    ids=[
        "the running daemon has taken it",
        "a stopped daemon has left its pool",
        "it left it in huge pages",
        "the pool goes into huge pages",
        "cpu_bytes is auto",
    ],
)
def test_a_full_machine_may_be_fine(fine: dict[str, Any]) -> None:
    """What a daemon has taken or left is not missed, and without a size there is none to judge."""
    assert {finding.level for finding in examine(machine(**fine))} == {Level.OK}


def test_a_pool_that_is_only_being_examined_has_no_holder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another process has the directory's lock for a moment; one that keeps it is a daemon."""
    facts = StartFacts(Settings())
    vars(facts).update(HEALTHY)
    del vars(facts)["pool_holder"]
    holders = iter([4242, 4242, None])
    monkeypatch.setattr(start, "lock_holder", lambda _: next(holders))
    assert facts.pool_holder is None
    del vars(facts)["pool_holder"]
    monkeypatch.setattr(start, "LOCK_SECONDS", 0.0)
    monkeypatch.setattr(start, "lock_holder", lambda _: 4242)
    assert facts.pool_holder == 4242
