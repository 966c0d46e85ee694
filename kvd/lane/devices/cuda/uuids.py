"""The machine's devices: found by UUID, since indices differ from process to process.

And the NUMA node near one, so that the lane's pages and threads are there too.
"""

import logging
import os
import re
from pathlib import Path
from uuid import UUID

from kvd.errors import CudaMissing, LaneError
from kvd.lane.devices.cuda import driver

_log = logging.getLogger(__name__)
_FORM = re.compile(r"(?:cuda:)?(GPU-|MIG-)?([0-9a-f-]+)", re.IGNORECASE)


def parse(name: str) -> bytes:
    """The UUID in a device's name.

    Args:
        name: 32 hexadecimal digits, perhaps with dashes, after "cuda:", "GPU-" or "MIG-".

    Raises:
        LaneError: it is none.
    """
    return _parts(name)[1].bytes


def show_slice(name: str) -> None:
    """Let this process see the MIG slice that is named, if one is.

    A process sees no more than one slice, and which one is settled before the driver starts.

    Raises:
        LaneError: it is no device's name.
    """
    kind, uuid = _parts(name)
    if kind == "MIG-":
        os.environ["CUDA_VISIBLE_DEVICES"] = f"MIG-{uuid}"


def find(name: str) -> int:
    """The driver's handle of the device with this name.

    Raises:
        LaneError: it is no device's name.
        CudaMissing: no device that this process sees has this UUID.
        CudaError: the driver fails.
    """
    uuid = parse(name)
    seen = driver.devices()
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


def _parts(name: str) -> tuple[str, UUID]:
    match = _FORM.fullmatch(name)
    digits = match[2].replace("-", "") if match else ""
    if match is None or len(digits) != 32:
        raise LaneError(
            f"{name!r} names no CUDA device; write cuda: and the 32 hexadecimal digits of its"
            " UUID, which nvidia-smi -L shows"
        )
    return (match[1] or "").upper(), UUID(digits)


def stay_near(pci_bus_id: str, sysfs: Path = Path("/sys")) -> None:
    """Bind this process to the NUMA node of a device, where the machine has several nodes.

    Threads that are started later follow. Where the node is unknown, nothing happens.
    """
    nodes = sysfs / "devices/system/node"
    try:
        if len(list(nodes.glob("node[0-9]*"))) < 2:
            return
        text = (sysfs / "bus/pci/devices" / pci_bus_id.lower() / "numa_node").read_text("ascii")
        node = int(text)
        if node < 0:
            return
        near = _cpus((nodes / f"node{node}" / "cpulist").read_text("ascii"))
        allowed = near & os.sched_getaffinity(0)
        if allowed:
            os.sched_setaffinity(0, allowed)
            _log.info("on NUMA node %d, %d processors", node, len(allowed))
    except (OSError, ValueError) as error:
        _log.warning("the NUMA node of device %s is not known: %s", pci_bus_id, error)


def _cpus(text: str) -> set[int]:
    """What a list such as "0-3,8" names."""
    cpus: set[int] = set()
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if first:
            cpus.update(range(int(first), int(last or first) + 1))
    return cpus
