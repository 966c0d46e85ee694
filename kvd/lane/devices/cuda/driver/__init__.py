"""The CUDA driver as the daemon uses it: the only package that names its functions.

Thin wrappers over `cuda.bindings.driver`: numbers in, numbers out, and every
failure a CudaError that says what was being attempted. No function waits for the
device unless its name says so. The bindings are imported at the first call, so that
a daemon without them serves host memory as before.
"""

from kvd.lane.devices.cuda.driver.calls import (
    Undo,
    bindings,
    call,
    shown,
    version,
)
from kvd.lane.devices.cuda.driver.copies import (
    Addresses,
    BatchCopy,
    copy,
)
from kvd.lane.devices.cuda.driver.devices import (
    OLDEST,
    WHOLE,
    Context,
    can_share,
    device_name,
    devices,
    memory_of,
    pci_bus_id,
    release_context,
    retain_context,
    shortcomings,
    start,
    use_context,
)
from kvd.lane.devices.cuda.driver.kernels import (
    Function,
    launch,
    load_kernel,
)
from kvd.lane.devices.cuda.driver.memory import (
    address_range,
    allocate,
    close_ipc,
    device_address,
    free,
    map_descriptors,
    open_ipc,
    register_host,
    unregister_host,
)
from kvd.lane.devices.cuda.driver.streams import (
    Event,
    Stream,
    create_event,
    create_stream,
    destroy_event,
    destroy_stream,
    is_idle,
    is_reached,
    nanoseconds_between,
    priorities,
    record,
    wait_for_stream,
)

__all__ = [
    "OLDEST",
    "WHOLE",
    "Addresses",
    "BatchCopy",
    "Context",
    "Event",
    "Function",
    "Stream",
    "Undo",
    "address_range",
    "allocate",
    "bindings",
    "call",
    "can_share",
    "close_ipc",
    "copy",
    "create_event",
    "create_stream",
    "destroy_event",
    "destroy_stream",
    "device_address",
    "device_name",
    "devices",
    "free",
    "is_idle",
    "is_reached",
    "launch",
    "load_kernel",
    "map_descriptors",
    "memory_of",
    "nanoseconds_between",
    "open_ipc",
    "pci_bus_id",
    "priorities",
    "record",
    "register_host",
    "release_context",
    "retain_context",
    "shortcomings",
    "shown",
    "start",
    "unregister_host",
    "use_context",
    "version",
    "wait_for_stream",
]
