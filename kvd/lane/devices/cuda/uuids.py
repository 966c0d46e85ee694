"""The machine's devices: found by UUID, since indices differ from process to process.

And the processors near one, so that the lane's threads and its own memory are there too; the
pool's memory is placed by who allocates it.
"""

import logging
import os
from pathlib import Path
from uuid import UUID

from kvd.errors import CudaMissing
from kvd.machine import cuda
from kvd.machine.numa import numbers

_log = logging.getLogger(__name__)


def show_slice(name: str) -> None:
    """Let this process see the MIG slice that is named, if one is.

    A process sees no more than one slice, and which one is settled before the driver starts.
    """
    if name.startswith("cuda:MIG-"):
        os.environ["CUDA_VISIBLE_DEVICES"] = f"MIG-{_uuid(name)}"


def find(name: str) -> int:
    """Return the driver's handle of the device with this name, as a registration has it.

    Raises:
        CudaMissing: no device that this process sees has this UUID.
        CudaError: the driver fails.
    """
    uuid = _uuid(name).bytes
    seen = cuda.devices()
    for device, other in seen:
        if other == uuid:
            return device
    listed = ", ".join(other.hex() for _, other in seen) or "none"
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    hint = "" if visible is None else f"; CUDA_VISIBLE_DEVICES is {visible!r}"
    raise CudaMissing(
        f"no CUDA device has the UUID {uuid.hex()}; the lane sees {listed}{hint}. Let kvd see all"
        " devices (NVIDIA_VISIBLE_DEVICES=all), and name a MIG slice as cuda:MIG-<uuid>"
    )


def _uuid(name: str) -> UUID:
    return UUID(name.removeprefix("cuda:").removeprefix("MIG-"))


def stay_near(pci_bus_id: str, sysfs: Path = Path("/sys")) -> None:
    """Bind this process to the processors near a device; threads that are started later follow."""
    try:
        folder = sysfs / "bus/pci/devices" / pci_bus_id.lower()
        near = numbers((folder / "local_cpulist").read_text("ascii"))
        allowed = os.sched_getaffinity(0)
        if near & allowed and not near >= allowed:
            os.sched_setaffinity(0, near & allowed)
            _log.info("on the %d processors near the device", len(near & allowed))
    except (OSError, ValueError) as error:
        _log.info("the processors near device %s are not known: %s", pci_bus_id, error)
