"""How a function of the CUDA driver is called, and what its failures mean; names none of them.

The bindings are imported at the first call, so that a daemon without them serves
host memory as before.
"""

from functools import cache
from types import ModuleType
from typing import Any, NewType

from kvd.errors import CudaError, CudaMissing

Context = NewType("Context", object)
Stream = NewType("Stream", object)
Event = NewType("Event", object)
Module = NewType("Module", object)
Function = NewType("Function", object)
Allocation = NewType("Allocation", object)

# The context is lost for good: nothing that was or will be asked of it succeeds.
_LOST = frozenset(
    {
        "CUDA_ERROR_DEINITIALIZED",
        "CUDA_ERROR_DEVICE_UNAVAILABLE",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "CUDA_ERROR_UNKNOWN",
    }
)


def is_lost(error: CudaError) -> bool:
    """Whether the error is sticky: only another process can use the device again."""
    return error.name in _LOST


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
            " install it with: pip install 'kvd-offload[cuda]'"
        ) from error
    module: ModuleType = driver
    return module


def call(attempted: str, name: str, *arguments: object) -> Any:
    """Call a driver function; its result: None, one value, or a tuple."""
    try:
        code, *values = getattr(bindings(), name)(*arguments)
    except (RuntimeError, AttributeError) as error:
        raise CudaError(-1, f"{name} is not in this driver ({error})", attempted) from error
    if code:
        raise CudaError(int(code), code.name, attempted)
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None
