"""How a function of the CUDA driver is called, what its failures mean, how calls are undone.

The bindings are imported at the first call, so that a daemon without them serves
host memory as before.
"""

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from types import ModuleType
from typing import Any, NewType

from kvd.errors import CudaError, CudaMissing

_log = logging.getLogger(__name__)

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


class Cleanup:
    """What is to be undone in reverse order, however much of that fails."""

    def __init__(self) -> None:
        self._undo: list[Callable[[], None]] = []

    def add(self, undo: Callable[[], None]) -> None:
        """Something was done; this undoes it."""
        self._undo.append(undo)

    def run(self) -> None:
        """Undo everything.

        Raises:
            CudaError: the first of the failures; the rest was tried all the same.
        """
        failures = list(self._failures())
        if failures:
            raise failures[0]

    @contextmanager
    def on_failure(self) -> Iterator[None]:
        """Undo everything where the block raises; failures to undo are logged, not raised."""
        try:
            yield
        except BaseException:
            for failure in self._failures():
                _log.error("not undone: %s", failure)
            raise

    def _failures(self) -> Iterator[CudaError]:
        while self._undo:
            try:
                self._undo.pop()()
            except CudaError as error:
                yield error

    def __repr__(self) -> str:
        return f"<Cleanup of {len(self._undo)}>"
