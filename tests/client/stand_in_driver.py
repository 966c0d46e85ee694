"""A stand-in for the driver's bindings, for environments of engines, which have no cuda-bindings.

Its functions succeed, and take host memory for a device's, until one is to fail.
"""

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from kvd_client import cuda_driver, torch_memory

UNKNOWN = 999
Failure = int | type[Exception]
FAILURES: tuple[Failure, ...] = (UNKNOWN, ValueError, RuntimeError, AttributeError)
"""How a function fails: with the driver's code, or with what the bindings raise."""
TORCH = "torch"  # fails where torch itself does, with the RuntimeError that it raises
ALLOCATION = 2**32  # bytes: the allocation of any address begins there
_HANDLE = ctypes.create_string_buffer(64)


def _write(_: int, address: int, value: int, __: int) -> tuple[int]:
    ctypes.c_uint64.from_address(address).value = value
    return (0,)


_RESULTS: dict[str, Callable[..., tuple[Any, ...]]] = {
    "cuInit": lambda _: (0,),
    "cuGetErrorName": lambda _: (0, b"CUDA_ERROR_UNKNOWN"),
    "cuDeviceGetUuid": lambda _: (0, SimpleNamespace(bytes=bytes(16))),
    "cuDeviceGetName": lambda *_: (0, b"a stand-in"),
    "cuMemGetAddressRange": lambda address: (0, address, ALLOCATION),
    "cuMemHostGetDevicePointer": lambda address, _: (0, address),
    "cuIpcGetMemHandle": lambda _: (
        0,
        SimpleNamespace(getPtr=lambda: ctypes.addressof(_HANDLE)),
    ),
    "cuStreamWriteValue64": _write,
    "cuEventQuery": lambda _: (0,),
}


class _Constants:
    """An enumeration: CUDA_ERROR_NOT_READY is its own number, everything else is 1."""

    def __getattr__(self, name: str) -> int:
        return 600 if name == "CUDA_ERROR_NOT_READY" else 1


class StandInDriver:
    """In place of `cuda.bindings.driver`.

    Attributes:
        failing: the function that fails; empty where none does.
        failure: how it does.
    """

    def __init__(self) -> None:
        self.failing = ""
        self.failure: Failure = UNKNOWN

    def __getattr__(self, name: str) -> Any:
        if name.startswith("CU_"):
            return 1
        if name.startswith("CU"):
            return _Constants()
        if not name.startswith("cu") or name.endswith("_v2"):
            raise AttributeError(name)
        return partial(self._call, name)

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        if name != self.failing:
            return _RESULTS[name](*arguments) if name in _RESULTS else (0, 1)
        if isinstance(self.failure, int):
            return (self.failure, None)
        raise self.failure(name)

    def torch(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """A function of torch's, which fails when `TORCH` does."""

        def call(*arguments: Any) -> Any:
            if self.failing == TORCH:
                raise RuntimeError("CUDA error: an illegal memory access was encountered\nIt may")
            return function(*arguments)

        return call


def install(patch: pytest.MonkeyPatch) -> StandInDriver:
    """Have this process take CPU tensors for CUDA tensors, on the stand-in."""
    driver = StandInDriver()
    package = ModuleType("cuda.bindings")
    package.driver = driver  # type: ignore[attr-defined]  # as the real one has
    patch.setitem(sys.modules, "cuda", ModuleType("cuda"))
    patch.setitem(sys.modules, "cuda.bindings", package)
    # Not the cached one, and none stays.
    patch.setattr(cuda_driver, "_bindings", cuda_driver._bindings.__wrapped__)
    patch.setattr(torch_memory, "_share_cpu", driver.torch(torch_memory._share_cuda))
    stream = SimpleNamespace(cuda_stream=7)
    patch.setattr(torch.cuda, "current_stream", driver.torch(lambda: stream))
    return driver
