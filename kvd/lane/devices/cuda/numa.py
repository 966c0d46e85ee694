"""Keep the lane near its device, so that its pages and its threads are there too."""

import logging
import os
from pathlib import Path

_log = logging.getLogger(__name__)


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
