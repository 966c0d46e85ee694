"""How the driver's functions are called, and what their failures become."""

import logging
from collections.abc import Callable
from contextlib import ExitStack
from functools import cache
from types import ModuleType
from typing import Any

from kvd.errors import CudaError, CudaMissing, DeviceLost, LaneError

_log = logging.getLogger(__name__)

NOT_READY = 600
# DeviceLost: nothing that was or will be asked of the context succeeds.
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
        CudaError: it failed, or this driver has none.
        DeviceLost: it says that the context is lost.
    """
    code, *values = _call(attempted, name, *arguments)
    check(code, attempted)
    if len(values) > 1:
        return tuple(values)
    return values[0] if values else None


def call_for_code(attempted: str, name: str, *arguments: object) -> Any:
    """Call a driver function for what it returns, which the caller looks at.

    Raises:
        CudaError: this driver has none.
    """
    return _call(attempted, name, *arguments)[0]


def _call(attempted: str, name: str, *arguments: object) -> tuple[Any, ...]:
    try:
        returned: tuple[Any, ...] = getattr(bindings(), name)(*arguments)
    except (RuntimeError, AttributeError) as error:
        raise CudaError(-1, f"{name} is not in this driver ({error})", attempted) from error
    return returned


def check(code: Any, attempted: str) -> None:
    """Look at what a call returned.

    Raises:
        CudaError: it failed.
        DeviceLost: it says that the context is lost.
    """
    if code:
        error = CudaError(int(code), code.name, attempted)
        raise DeviceLost(str(error)) if code.name in _LOST else error


def version() -> int:
    """The CUDA version of the driver, 1000 * major + 10 * minor."""
    return int(call("asking for the driver's version", "cuDriverGetVersion"))


def shown(number: int) -> str:
    """A version as people write it: 12.8."""
    return f"{number // 1000}.{number % 1000 // 10}"


class Undo(ExitStack):
    """What is to be undone in reverse order, however much of that fails.

    The first error is raised, the one that ended the block if there is one; others are logged.
    """

    def add(self, undo: Callable[..., object], *arguments: object) -> None:
        """Something was done; this undoes it."""

        def exit_(_kind: object, error: BaseException | None, _trace: object) -> None:
            try:
                undo(*arguments)
            except LaneError as failure:
                if error is None:
                    raise
                _log.error("not undone: %s", failure)  # not what is raised

        self.push(exit_)
