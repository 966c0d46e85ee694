"""The CUDA driver on this machine: how it is called, which one it is, and its devices.

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
"""The oldest driver that serves, 1000 * major + 10 * minor: the bindings find nothing in others."""
BATCHED_COPY_VERSION = 12080
"""From this driver on many fragments are copied by one call."""
_PROHIBITED, _EXCLUSIVE_PROCESS = 2, 3  # compute modes


@cache
def bindings() -> ModuleType:
    """The module of the bindings.

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
    """Call a driver function; its result: None, one value, or a tuple.

    Raises:
        CudaDriverError: the call failed, or this driver lacks the function.
    """
    code, *values = call_raw(attempted, name, *arguments)
    check(code, attempted)
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


def call_raw(attempted: str, name: str, *arguments: object) -> tuple[Any, ...]:
    """What the function returned, its code first."""
    try:
        returned: tuple[Any, ...] = getattr(bindings(), name)(*arguments)
    except (RuntimeError, AttributeError) as error:
        raise CudaDriverError(-1, f"{name} is not in this driver ({error})", attempted) from error
    except (ValueError, KeyError) as error:  # a code that bindings 13, 12 do not know
        raise CudaDriverError(-1, f"{name} failed ({error})", attempted) from error
    return returned


def check(code: Any, attempted: str) -> None:
    """Raise what a call returned.

    Args:
        code: the bindings' name of a code, or the driver's number of it.
        attempted: what the call was for.

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
    """Calls that undo others, made in reverse order, however many of them fail.

    The first error is raised, or the one that ended the block; others are logged.
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
        CudaMissing: it is not installed or too old, or there is no device.
        CudaDriverError: it cannot be initialised.
    """
    cuda = bindings()
    try:
        (code,) = cuda.cuInit(0)
    except RuntimeError as error:  # what the bindings raise where no library is found
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
    have = version()
    if have < OLDEST_VERSION:
        raise CudaMissing(
            f"the NVIDIA driver is too old: it is for CUDA {version_text(have)}, kvd needs"
            f" {version_text(OLDEST_VERSION)} or newer (driver 525), and is fast from"
            f" {version_text(BATCHED_COPY_VERSION)} on (driver 570); update the driver"
        )


def version() -> int:
    """The CUDA version of the driver, 1000 * major + 10 * minor."""
    return int(call("asking for the driver's version", "cuDriverGetVersion"))


def version_text(number: int) -> str:
    """A version as people write it: 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


def version_warning() -> str:
    """What this driver lacks, and the remedy; empty where it lacks nothing.

    Raises:
        CudaDriverError: the driver does not report its version.
    """
    have = version()
    if have >= BATCHED_COPY_VERSION:
        return ""
    return (
        f"the NVIDIA driver is old: it is for CUDA {version_text(have)}, and only from"
        f" {version_text(BATCHED_COPY_VERSION)} on (driver 570) are many fragments copied in one"
        " call; kvd works, slower, until the driver is updated"
    )


def devices() -> list[tuple[int, bytes]]:
    """Every device that this process sees: its handle and its UUID, which is a slice's for MIG."""
    count = call("counting devices", "cuDeviceGetCount")
    # Bindings older than CUDA 13 have both; there the plain name gives that of the whole GPU.
    newer = hasattr(bindings(), "cuDeviceGetUuid_v2")
    name = "cuDeviceGetUuid_v2" if newer else "cuDeviceGetUuid"
    seen = []
    for index in range(count):
        device = call(f"opening device {index}", "cuDeviceGet", index)
        uuid = call(f"asking device {index} for its UUID", name, device)
        seen.append((int(device), bytes(uuid.bytes)))
    return seen


def device_name(device: int) -> str:
    """What its maker calls it."""
    name: bytes = call("asking for a device's name", "cuDeviceGetName", 256, device)
    return name.split(b"\0")[0].decode(errors="replace")


def total_memory(device: int) -> int:
    """Bytes of memory that it has, free or not."""
    return int(call("asking for a device's memory", "cuDeviceTotalMem", device))


def pci_bus_id(device: int) -> str:
    """Where it sits, as `0000:17:00.0`."""
    text: bytes = call("asking for a device's bus id", "cuDeviceGetPCIBusId", 64, device)
    return text.split(b"\0")[0].decode(errors="replace")


def can_share(device: int) -> tuple[bool, bool]:
    """Whether its memory can be shared by IPC handle, and as a file descriptor."""
    return (
        bool(_attribute(device, "IPC_EVENT_SUPPORTED")),
        bool(_attribute(device, "HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")),
    )


def compute_mode_problem(device: int) -> str:
    """Why no context may be made on a device, and the remedy; empty where one may.

    In mode EXCLUSIVE_PROCESS the context of this process would lock the engine's out, or fail
    because the engine's is there. With MPS the server's process is the only one.

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
    except CudaDriverError:  # an older driver, which does not say
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
