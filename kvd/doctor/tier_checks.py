"""What the doctor says of each tier: judges what `tiers.py` has found."""

from collections.abc import Iterator

from kvd.config.tiers import TierSetting
from kvd.doctor.findings import Said, fail, ok, warn
from kvd.doctor.tiers import (
    BLOCK_BYTES,
    PATIENCE_SECONDS,
    PROBE_THREADS,
    DiskFacts,
    StoreFacts,
    TierFacts,
    size_shortage,
)
from kvd.metrics.words import rate
from kvd_proto.sizes import format_size


def said_of_tier(tier: TierFacts) -> Iterator[Said]:
    """Its disk or its store is there, is what it seems, and has room."""
    name = tier.setting.text
    if tier.problem:
        told = tier.problem if name in tier.problem else f"{name}: {tier.problem}"
        yield fail(told, "until then the daemon serves from memory alone")
    elif tier.hung:
        where = f" ({_mount(tier.disk)})" if tier.disk and tier.disk.mounted_at else ""
        yield fail(
            f"{name}: it hangs: no answer within {PATIENCE_SECONDS:g} s of {tier.hung}{where}",
            "look at dmesg, and at the mount's server if it has one; a tier that hangs is set"
            " aside, and costs misses",
        )
    elif tier.disk:
        yield from _disk_tier(name, tier.setting, tier.disk)
    elif tier.store:
        yield from _store_tier(name, tier.store)
    else:
        yield ok(f"{name}: its options are right; there is nothing to look at")


def _mount(disk: DiskFacts) -> str:
    named = f"{disk.device}, " if disk.device and not disk.source.endswith(disk.device) else ""
    return f"{disk.filesystem} at {disk.mounted_at} of {disk.source} ({named}{disk.medium})"


def _disk_tier(name: str, setting: TierSetting, disk: DiskFacts) -> Iterator[Said]:
    text = f"{name}: {_mount(disk)}, {format_size(disk.free)} of {format_size(disk.size)} free"
    if not disk.writable:
        missing = "" if disk.exists else ", and it is not there yet"
        yield fail(
            f"{text}; this user may not write there{missing}",
            f"mkdir -p {setting.target}, owned by the daemon's user, mode 0700; under systemd"
            f" ReadWritePaths={setting.target} too, in a container a volume",
        )
        return
    if disk.written and disk.read:
        text += (
            f"; {PROBE_THREADS} threads write {rate(disk.written)} and read {rate(disk.read)}"
            f" in blocks of {format_size(BLOCK_BYTES)}"
        )
    problems = list(_disk_problems(setting, disk))
    for problem, remedy in problems:
        yield warn(f"{text}; {problem}", remedy)
        text = name
    if not problems:
        yield ok(text)


def _disk_problems(setting: TierSetting, disk: DiskFacts) -> Iterator[tuple[str, str]]:
    if disk.medium == "memory":
        what = "this is memory: it takes what the pool could have, and does not outlive a reboot"
        yield what, "a directory on a disk, or a larger cpu_bytes in its place"
    elif disk.medium in {"network", "rotating"}:
        over = "a file system over a network" if disk.medium == "network" else "a rotating disk"
        yield over, "a local NVMe: loading from here is hardly faster than computing"
    elif disk.mounted_at == "/":
        remedy = (
            "if a disk was to be mounted there, it is not (findmnt); else a floor of free space"
        )
        yield "this is the root file system", f"{remedy} is left to the system"
    elif not disk.direct:
        yield "it takes no I/O past the page cache (O_DIRECT)", "ext4 or xfs on a local disk"
    if shortage := size_shortage(setting, disk):
        yield shortage.text, shortage.remedy


def _store_tier(name: str, store: StoreFacts) -> Iterator[Said]:
    if store.missing:
        yield fail(
            f"{name}: the package cannot be used: {store.missing}",
            "pip install mooncake-transfer-engine-non-cuda, and of the system libibverbs1,"
            " librdmacm1 and libnuma1",
        )
    if store.refused:
        yield fail(
            f"{name}: the master at {store.master} does not answer: {store.refused}",
            "start mooncake_master, or see whether a firewall or the unit's IPAddressAllow is in"
            " the way",
        )
    if not store.missing and not store.refused:
        yield ok(f"{name}: {store.package}; the master at {store.master} takes connections")
