"""`kvd doctor --engine`: how an engine started here would hand its KV memory to the daemon.

Each visible device gets a small tensor, which is registered as an engine would register its KV
cache, and unregistered again. The engine of the test lacks a rank, so that it takes nothing of the
pool, and no lane pins memory for it. The `kvd` command prints the findings.
"""

import logging
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from kvd_client.errors import KvdClientError, cause
from kvd_client.scheduler import Scheduler
from kvd_client.worker import Worker
from kvd_proto.layout import GroupSpec, RankLayout, TensorRef
from kvd_proto.messages import Fingerprint
from kvd_proto.text import explain_denied, format_size

try:
    import torch

    from kvd_client.accelerator import kind_of
    from kvd_client.torch_memory import describe_torch
except ImportError as import_error:  # not an engine's environment
    TORCH_PROBLEM = str(import_error)
else:
    TORCH_PROBLEM = ""

ANSWER_SECONDS = 5.0
BLOCKS, PAGE_BYTES = 64, 2**16
CPU = "CPU"
STAGING_COSTS = (
    "each byte is copied twice, with processor time of the engine's process, through staging_bytes"
    " of host memory for each rank"
)


@dataclass(frozen=True, slots=True)
class EngineFinding:
    """What `kvd doctor` prints: a check's name, "ok", "warn" or "fail", text and remedy."""

    name: str
    level: str
    text: str
    remedy: str = ""


@dataclass(frozen=True, slots=True)
class TransferOutcome:
    """What a device's registration has shown.

    Attributes:
        way: "export" or "staging".
        reason: why staging was chosen; empty for export.
        obstacle: why the daemon has not taken the memory; empty if it has. Otherwise `way` is the
            client's choice alone.
    """

    way: str
    reason: str
    obstacle: str = ""


def unique_name() -> str:
    """Return an engine's name that no other doctor has; containers share process numbers."""
    return f"doctor-{os.urandom(4).hex()}"


def examine_engine(runtime_dir: Path) -> list[EngineFinding]:
    """Return the findings about this environment as an engine's; `kvd doctor` calls it."""
    logging.getLogger("kvd_client").addHandler(logging.NullHandler())  # the findings say it
    daemon, has_pool = check_daemon(runtime_dir)
    findings = [*_check_torch(), daemon]
    if not TORCH_PROBLEM:
        serving_dir = runtime_dir if has_pool else None
        findings += [check_transfer(device, serving_dir) for device in visible_devices()]
    return findings


# ------------------------------------------------------------------- accelerator


def _check_torch() -> Iterator[EngineFinding]:
    """Yield findings about torch and the accelerator that it was built for."""
    if TORCH_PROBLEM:
        yield EngineFinding(
            "torch",
            "warn",
            f"{sys.prefix} has no torch that can be imported ({TORCH_PROBLEM}), so no memory was"
            " tried",
            "run this with the engine's Python, in its container. A client without torch exports"
            " HostMemory and DeviceMemory; staging needs torch",
        )
        return
    built_for = next(
        (
            f" for {name} {version}"
            for name, version in (
                ("ROCm", torch.version.hip),
                ("CUDA", torch.version.cuda),
                ("XPU", torch.version.xpu),
            )
            if version
        ),
        " for the CPU",
    )
    yield EngineFinding("torch", "ok", f"torch {torch.__version__}, built{built_for}")
    built = torch.accelerator.current_accelerator()
    names = ", ".join(map(describe_device, visible_devices()))
    if built is None:
        yield EngineFinding("accelerator", "ok", "none; engines on the CPU are served")
    elif not torch.accelerator.is_available():
        yield EngineFinding(
            "accelerator",
            "warn",
            f"torch is built for {kind_of(built)} and sees no device",
            "give the container the devices; the daemon's container needs them only for export",
        )
    else:
        yield EngineFinding("accelerator", "ok", names)


def visible_devices() -> list["torch.device"]:
    """Return the torch devices that this process sees; the CPU if there is none other."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return [torch.device("cpu")]
    return [
        torch.device(accelerator.type, index) for index in range(torch.accelerator.device_count())
    ]


def describe_device(device: "torch.device") -> str:
    """Return a device with its kind, and its name if torch knows it."""
    kind = kind_of(device)
    if kind == CPU:
        return CPU
    name_of = getattr(torch.get_device_module(device), "get_device_name", None)
    return f"{device} ({kind}{f', {name_of(device)}' if name_of else ''})"


# ---------------------------------------------------------------------- transfer


def check_transfer(device: "torch.device", runtime_dir: Path | None) -> EngineFinding:
    """Register a small tensor of the device, and return which way its memory goes.

    runtime_dir: None if no daemon there can take memory; then the client's choice is returned.
    """
    subject = describe_device(device)
    try:
        if runtime_dir is not None:
            outcome = try_transfer(device, runtime_dir)
        else:
            with tempfile.TemporaryDirectory() as without_daemon:
                outcome = replace(
                    try_transfer(device, Path(without_daemon)), obstacle="no daemon was asked"
                )
    except KvdClientError as error:
        return EngineFinding(
            "transfer", "fail", f"{subject}: {cause(error)}", "an engine here runs without offload"
        )
    except RuntimeError as error:  # torch's
        return EngineFinding(
            "transfer",
            "fail",
            f"{subject}: torch cannot allocate {format_size(BLOCKS * PAGE_BYTES)}: {cause(error)}",
            "stop the engine on this device, or repair its driver",
        )
    return transfer_finding(subject, kind_of(device), outcome)


def try_transfer(device: "torch.device", runtime_dir: Path) -> TransferOutcome:
    """Register a tensor of the device as rank 0 of 2, and unregister it.

    Raises:
        RuntimeError: torch has no memory on the device.
        KvdClientError: the memory can be registered in neither way.
    """
    blocks = torch.zeros((BLOCKS, PAGE_BYTES), dtype=torch.uint8, device=device)
    tensors = describe_torch([blocks])
    layout = RankLayout(
        num_blocks=BLOCKS,
        blocks_per_chunk=1,
        hash_block_size=1,
        storages=tensors.storages,
        tensors=tensors.tensors,
        groups=(GroupSpec((TensorRef(0, PAGE_BYTES),), 1),),
    )
    with Worker(
        runtime_dir, unique_name(), rank=0, world_size=2, deadline=ANSWER_SECONDS
    ) as worker:
        worker.register(
            tensors, layout, Fingerprint(model="kvd doctor"), temporary=True, transfer="auto"
        )
        obstacle = "" if worker.registered else worker.wait_attached(0).why
        outcome = TransferOutcome(str(worker.transfer), worker.transfer_reason, obstacle)
        worker.unregister()
    return outcome


def transfer_finding(subject: str, kind: str, outcome: TransferOutcome) -> EngineFinding:
    """Return the finding about a device of this kind.

    Staging is a warning where export is possible in principle: on the CPU and on NVIDIA's GPUs.
    """
    if outcome.obstacle:
        proof = f"the client's choice, which a daemon has not confirmed: {outcome.obstacle}"
    else:
        proof = "the daemon has taken a tensor this way"
    text = f"{subject}: {outcome.way}; {proof}"
    if outcome.way == "export":
        return EngineFinding("transfer", "ok", text)
    text = f"{text}. {outcome.reason}"
    if kind in {CPU, "CUDA"}:
        return EngineFinding(
            "transfer", "warn", text, f"staging works, but {STAGING_COSTS}; see docs/staging.md"
        )
    return EngineFinding("transfer", "ok", f"{text}. {STAGING_COSTS[0].upper()}{STAGING_COSTS[1:]}")


# ------------------------------------------------------------------------ daemon


def check_daemon(runtime_dir: Path) -> tuple[EngineFinding, bool]:
    """Return the finding about the daemon, and whether it has a pool to register with."""
    with Scheduler(runtime_dir, unique_name(), deadline=ANSWER_SECONDS) as observer:
        status = observer.status()
        if not status:
            text, remedy = _why_unreachable(runtime_dir, observer)
            return EngineFinding("daemon", "fail", text, remedy), False
    name = f"{status['version']}, pid {status['pid']}, answers in {runtime_dir}"
    if not status["pool"]["cpu_bytes"]:
        remedy = "run this again once an engine is registered, or give the daemon --cpu-bytes"
        text = f"{name}; cpu_bytes is auto and the pool has no size yet, so nothing was registered"
        return EngineFinding("daemon", "warn", text, remedy), False
    return EngineFinding("daemon", "ok", name), True


def _why_unreachable(runtime_dir: Path, observer: Scheduler) -> tuple[str, str]:
    """Return why no daemon answers, and the remedy."""
    socket = runtime_dir / "broker.sock"
    if denied := explain_denied(socket):
        return f"this process may not connect to the daemon in {runtime_dir}", denied
    if not runtime_dir.is_dir():
        return (
            f"there is no directory {runtime_dir} here",
            "mount the daemon's runtime directory (read-only suffices), or pass --runtime-dir",
        )
    if not socket.exists():
        return (
            f"{runtime_dir} has no broker.sock: no daemon has run there",
            "start kvd serve, or mount the directory that it uses; kvd config show has its name",
        )
    return observer.wait_attached(0).why, "kvd status and kvd doctor on the daemon's side say more"
