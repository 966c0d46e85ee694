"""Start, devices and contexts."""

from typing import NewType

from kvd.errors import CudaMissing
from kvd.lane.devices.cuda.driver.calls import bindings, call, check, shown, version

Context = NewType("Context", object)

# The bindings find no function in an older driver.
OLDEST = 12000
# From here on a driver has all that is used: batches, and events' times as the bindings ask.
WHOLE = 12080


def start() -> None:
    """Load and initialise the driver.

    Raises:
        CudaMissing: it is not installed or too old, or there is no device.
        CudaError: it cannot be initialised.
    """
    cuda = bindings()
    try:
        (code,) = cuda.cuInit(0)
    except RuntimeError as error:  # what the bindings raise where no library is found
        raise CudaMissing(
            f"libcuda.so.1 cannot be loaded ({error}); install the NVIDIA driver, or in a"
            " container let the runtime mount it (NVIDIA_DRIVER_CAPABILITIES=compute)"
        ) from error
    if code.name == "CUDA_ERROR_NO_DEVICE":
        raise CudaMissing(
            "the CUDA driver sees no device; look at CUDA_VISIBLE_DEVICES, and in a container at"
            " NVIDIA_VISIBLE_DEVICES"
        )
    check(code, "initialising the CUDA driver")
    have = version()
    if have < OLDEST:
        raise CudaMissing(
            f"the NVIDIA driver is too old: it is for CUDA {shown(have)}, kvd needs"
            f" {shown(OLDEST)} or newer (driver 525), and is fast from {shown(WHOLE)} on"
            " (driver 570); update the driver"
        )


def shortcomings() -> str:
    """What kvd misses in this driver, and the remedy; empty where nothing.

    Raises:
        CudaError: the driver does not report its version.
    """
    have = version()
    if have >= WHOLE:
        return ""
    return (
        f"the NVIDIA driver is old: it is for CUDA {shown(have)}, and only from {shown(WHOLE)} on"
        " (driver 570) are many fragments copied in one call and copies timed by the device;"
        " kvd works, slower, until the driver is updated"
    )


def devices() -> list[tuple[int, bytes]]:
    """Every device that this process sees: its handle and its UUID, which is a slice's for MIG."""
    count = call("counting devices", "cuDeviceGetCount")
    # Bindings older than CUDA 13 have both; there the plain name gives that of the whole GPU.
    newer = hasattr(bindings(), "cuDeviceGetUuid_v2")
    name = "cuDeviceGetUuid_v2" if newer else "cuDeviceGetUuid"
    found = []
    for index in range(count):
        device = call(f"opening device {index}", "cuDeviceGet", index)
        uuid = call(f"asking device {index} for its UUID", name, device)
        found.append((int(device), bytes(uuid.bytes)))
    return found


def device_name(device: int) -> str:
    """What its maker calls it."""
    name: bytes = call("asking for a device's name", "cuDeviceGetName", 256, device)
    return name.split(b"\0")[0].decode(errors="replace")


def memory_of(device: int) -> int:
    """Bytes of memory that it has, free or not."""
    return int(call("asking for a device's memory", "cuDeviceTotalMem", device))


def pci_bus_id(device: int) -> str:
    """Where it sits, as `0000:17:00.0`."""
    text: bytes = call("asking for a device's bus id", "cuDeviceGetPCIBusId", 64, device)
    return text.split(b"\0")[0].decode(errors="replace")


def can_share(device: int) -> tuple[bool, bool]:
    """Whether its memory can be shared by IPC handle, and as a file descriptor."""
    kinds = bindings().CUdevice_attribute
    asked = (
        kinds.CU_DEVICE_ATTRIBUTE_IPC_EVENT_SUPPORTED,
        kinds.CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED,
    )
    attempted = "asking how a device's memory can be shared"
    ipc, descriptors = (call(attempted, "cuDeviceGetAttribute", kind, device) for kind in asked)
    return bool(ipc), bool(descriptors)


def retain_context(device: int) -> Context:
    """The device's primary context, made if need be; `release_context` gives it back."""
    return Context(call("making a context", "cuDevicePrimaryCtxRetain", device))


def release_context(device: int) -> None:
    """Give the primary context back."""
    call("releasing the context", "cuDevicePrimaryCtxRelease", device)


def use_context(context: Context) -> None:
    """Make it the calling thread's context; every thread needs that once."""
    call("making the context current", "cuCtxSetCurrent", context)
