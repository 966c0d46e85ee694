"""What the CUDA driver says of this machine, asked in a process of its own.

A broken driver can hang for ever inside a call; then this process is given up, and that is
the finding.
"""

import contextlib
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from kvd.doctor.tiers import CHILD_SECONDS, run_python
from kvd.errors import CudaMissing, LaneError
from kvd.machine import cuda


@dataclass(frozen=True)
class Gpu:
    """One device.

    ipc, descriptors: memory can be shared by handle, and as a descriptor.
    refusal: why no lane can use it; empty where one can.
    """

    uuid: str
    name: str
    bus: str
    ipc: bool
    descriptors: bool
    refusal: str = ""


@dataclass(frozen=True)
class Gpus:
    """All of them.

    nodes: device files of the NVIDIA driver that are here. kernel: version of its kernel module.
    cuda: version of the CUDA driver, 1000 * major + 10 * minor, 0 where unknown.
    missing: what is not there, which is as it should be on a machine without GPUs.
    problem: how the driver fails.
    """

    nodes: tuple[str, ...] = ()
    kernel: str = ""
    cuda: int = 0
    devices: tuple[Gpu, ...] = ()
    missing: str = ""
    problem: str = ""


def ask_gpus() -> Gpus:
    """What is here; it never hangs."""
    nodes = tuple(sorted(str(path) for path in Path("/dev").glob("nvidia*")))
    try:
        kernel = Path("/sys/module/nvidia/version").read_text(encoding="ascii").strip()
    except OSError:
        kernel = ""
    said, problem, hung = run_python("-m", "kvd.doctor.gpus")
    if hung:
        problem = f"no answer within {CHILD_SECONDS:g} s"
    if problem:
        return Gpus(nodes, kernel, problem=f"asking the CUDA driver failed: {problem}")
    return replace(msgspec.json.decode(said, type=Gpus), nodes=nodes, kernel=kernel)


def main() -> None:
    """Print what the driver says as JSON."""
    version, found, missing, problem = 0, [], "", ""
    try:
        cuda.start()
        version = cuda.version()
        for device, uuid in cuda.devices():
            name, bus = cuda.device_name(device), cuda.pci_bus_id(device)
            shared = cuda.can_share(device)
            found.append(Gpu(uuid.hex(), name, bus, *shared, cuda.refusal(device)))
    except CudaMissing as error:
        missing = str(error)
        with contextlib.suppress(LaneError):
            version = cuda.version()  # of one that is too old
    except LaneError as error:
        problem = str(error)
    said = Gpus(cuda=version, devices=tuple(found), missing=missing, problem=problem)
    sys.stdout.buffer.write(msgspec.json.encode(said))


if __name__ == "__main__":
    main()
