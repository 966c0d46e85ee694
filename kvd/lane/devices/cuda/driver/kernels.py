"""Kernels."""

from typing import Any, NewType

from kvd.lane.devices.cuda.driver.calls import Undo, call
from kvd.lane.devices.cuda.driver.streams import Stream

Function = NewType("Function", object)


def load_kernel(ptx: bytes, name: str, undo: Undo) -> Function:
    """Translate and load a module; its kernel of this name, which may not run when it is undone."""
    module = call("loading the copy kernel", "cuModuleLoadData", ptx + b"\0")
    undo.add(call, "unloading the copy kernel", "cuModuleUnload", module)
    found = call("finding the copy kernel", "cuModuleGetFunction", module, name.encode())
    return Function(found)


def launch(
    function: Function,
    *,
    blocks: int,
    threads: int,
    values: tuple[int, ...],
    types: tuple[type[Any], ...],
    stream: Stream,
) -> None:
    """Enqueue a kernel with these parameters."""
    shape = (blocks, 1, 1, threads, 1, 1, 0)
    call(
        "launching the copy kernel", "cuLaunchKernel", function, *shape, stream, (values, types), 0
    )
