"""The CUDA driver of this machine: calls, version and devices.

Thin wrappers over `cuda.bindings.driver`: numbers in, numbers out; a failure is a CudaDriverError
that says what was attempted. The bindings are imported at the first call, so a daemon without them
serves host memory. What a lane does with a device is in `kvd.lane.cuda`.
"""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from types import ModuleType
from typing import Any

from kvd.errors import CudaDriverError, CudaMissing, LaneError

_log = logging.getLogger(__name__)

OLDEST_VERSION = 12000
"""Oldest supported version, 1000 * major + 10 * minor: the bindings need its functions."""
BATCHED_COPY_VERSION = 12080
"""From this version on one call copies many fragments."""
_PROHIBITED, _EXCLUSIVE_PROCESS = 2, 3  # compute modes


@cache
def bindings() -> ModuleType:
    """Return the module of the bindings.

    Raises:
        CudaMissing: they are not installed.
    """
    try:
        from cuda.bindings import driver  # noqa: PLC0415  # an extra; host lanes do without
    except ImportError as error:
        raise CudaMissing(
            f"a CUDA device needs the package cuda-bindings ({error});"
            " install it with: pip install cuda-bindings"
        ) from error
    module: ModuleType = driver
    return module


def call(attempted: str, name: str, *arguments: object) -> Any:
    """Call a driver function; return None, one value, or a tuple.

    Raises:
        CudaDriverError: the call failed, or this driver lacks the function.
    """
    code, *values = call_raw(attempted, name, *arguments)
    check(code, attempted)
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


def call_raw(attempted: str, name: str, *arguments: object) -> tuple[Any, ...]:
    """Call a driver function; return everything that it returns, the code first."""
    try:
        returned: tuple[Any, ...] = getattr(bindings(), name)(*arguments)
    except (RuntimeError, AttributeError) as error:
        raise CudaDriverError(-1, f"{name} is not in this driver ({error})", attempted) from error
    except (ValueError, KeyError) as error:  # a code that bindings 13, 12 do not know
        raise CudaDriverError(-1, f"{name} failed ({error})", attempted) from error
    return returned


def check(code: Any, attempted: str) -> None:
    """Raise the error that a call returned, if any.

    Args:
        code: the bindings' enum member, or the driver's number.
        attempted: the operation, in words.

    Raises:
        CudaDriverError: the code is not success.
    """
    if not code:
        return
    name = getattr(code, "name", "")
    if not name:
        try:
            name = bindings().CUresult(code).name
        except (ValueError, KeyError):
            name = "an error that the bindings do not know"
    raise CudaDriverError(int(code), name, attempted)


class Undo(ExitStack):
    """Cleanup calls, made in reverse order even if some fail.

    If an error ended the block, errors of cleanup are logged; else the first of them is raised.
    """

    def add(self, undo: Callable[..., object], *arguments: object) -> None:
        """Call `undo` with these arguments at the end."""

        def exit_(_kind: object, error: BaseException | None, _trace: object) -> None:
            try:
                undo(*arguments)
            except LaneError as failure:
                if error is None:
                    raise
                _log.error("not undone: %s", failure)  # not what is raised

        self.push(exit_)


def start() -> None:
    """Load and initialise the driver.

    Raises:
        CudaMissing: the driver is missing or too old, or there is no device.
        CudaDriverError: the driver cannot be initialised.
    """
    cuda = bindings()
    try:
        (code,) = cuda.cuInit(0)
    except RuntimeError as error:  # the bindings did not find the library
        raise CudaMissing(
            f"libcuda.so.1 cannot be loaded ({error}); install the NVIDIA driver, or in a"
            " container let the runtime mount it (NVIDIA_DRIVER_CAPABILITIES=compute)"
        ) from error
    except (ValueError, KeyError) as error:
        raise CudaDriverError(
            -1, f"cuInit failed ({error})", "initialising the CUDA driver"
        ) from error
    if code.name == "CUDA_ERROR_NO_DEVICE":
        raise CudaMissing(
            "the CUDA driver sees no device; look at CUDA_VISIBLE_DEVICES, and in a container at"
            " NVIDIA_VISIBLE_DEVICES"
        )
    check(code, "initialising the CUDA driver")
    driver_version = version()
    if driver_version < OLDEST_VERSION:
        raise CudaMissing(
            f"the NVIDIA driver is too old: it is for CUDA {version_text(driver_version)}, kvd"
            f" needs {version_text(OLDEST_VERSION)} or newer (driver 525), and is fast from"
            f" {version_text(BATCHED_COPY_VERSION)} on (driver 570); update the driver"
        )


def version() -> int:
    """Return the driver's CUDA version, 1000 * major + 10 * minor."""
    return int(call("asking for the driver's version", "cuDriverGetVersion"))


def version_text(number: int) -> str:
    """Return a version as text, such as 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


def version_warning() -> str:
    """Return a warning with its remedy if the driver is old but supported; else empty.

    Raises:
        CudaDriverError: the driver does not report its version.
    """
    driver_version = version()
    if driver_version >= BATCHED_COPY_VERSION:
        return ""
    return (
        f"the NVIDIA driver is old: it is for CUDA {version_text(driver_version)}, and only from"
        f" {version_text(BATCHED_COPY_VERSION)} on (driver 570) are many fragments copied in one"
        " call; kvd works, slower, until the driver is updated"
    )


def devices() -> list[tuple[int, bytes]]:
    """Return handle and UUID of each visible device; with MIG the UUID is the slice's."""
    count = call("counting devices", "cuDeviceGetCount")
    # In bindings older than CUDA 13 the function without _v2 returns the whole GPU's UUID.
    newer = hasattr(bindings(), "cuDeviceGetUuid_v2")
    name = "cuDeviceGetUuid_v2" if newer else "cuDeviceGetUuid"
    handles_and_uuids = []
    for index in range(count):
        device = call(f"opening device {index}", "cuDeviceGet", index)
        uuid = call(f"asking device {index} for its UUID", name, device)
        handles_and_uuids.append((int(device), bytes(uuid.bytes)))
    return handles_and_uuids


def device_name(device: int) -> str:
    """Return the device's product name."""
    name: bytes = call("asking for a device's name", "cuDeviceGetName", 256, device)
    return name.split(b"\0")[0].decode(errors="replace")


def total_memory(device: int) -> int:
    """Return the size of the device's memory in bytes."""
    return int(call("asking for a device's memory", "cuDeviceTotalMem", device))


def pci_bus_id(device: int) -> str:
    """Return the PCI bus id, such as `0000:17:00.0`."""
    text: bytes = call("asking for a device's bus id", "cuDeviceGetPCIBusId", 64, device)
    return text.split(b"\0")[0].decode(errors="replace")


def can_share(device: int) -> tuple[bool, bool]:
    """Return whether memory can be shared by IPC handle, and by file descriptor."""
    return (
        bool(_attribute(device, "IPC_EVENT_SUPPORTED")),
        bool(_attribute(device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
    )


def compute_mode_problem(device: int) -> str:
    """Return why no context can be created on a device, and the remedy; empty if one can.

    In mode EXCLUSIVE_PROCESS only one process may have a context, this one or the engine. Under
    MPS the server's process has the only context.

    Raises:
        CudaDriverError: the driver does not report the mode.
    """
    mode = int(_attribute(device, "COMPUTE_MODE"))
    if mode == _PROHIBITED:
        return "the GPU's compute mode is PROHIBITED; nvidia-smi -c DEFAULT changes it"
    if mode != _EXCLUSIVE_PROCESS:
        return ""
    try:
        if _attribute(device, "MPS_ENABLED"):
            return ""
    except CudaDriverError:  # an older driver does not report it
        pass
    return (
        "the GPU's compute mode is EXCLUSIVE_PROCESS: only one process may use it, the engine or"
        " kvd; nvidia-smi -c DEFAULT changes it, or run both under MPS"
    )


def _attribute(device: int, name: str) -> int:
    attempted = f"asking a device for {name}"
    kind = getattr(bindings().CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
    if kind is None:
        raise CudaDriverError(-1, "the bindings do not know it", attempted)
    return int(call(attempted, "cuDeviceGetAttribute", kind, device))
