"""What a stream, an event and pinned memory are on each kind of device that torch drives.

    kind   torch device   streams and events              pinned memory
    CUDA   cuda           torch.Stream, torch.Event       cudaHostRegister
    ROCm   cuda, with     torch.Stream, torch.Event       hipHostRegister, under CUDA's name
           version.hip
    XPU    xpu            torch.Stream, torch.Event       none: copies pass through the driver's

Other accelerators work as XPU does if torch has streams and events for them. torch's functions for
any device are used where it has them.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any, Protocol, Self, cast

import torch

from kvd_client import cuda_driver
from kvd_client.errors import KvdClientError

_PORTABLE = 1  # cudaHostRegisterPortable


class Event(Protocol):
    """A point in a stream's work."""

    def record(self, stream: Any) -> None:
        """Let the event happen when all that is on the stream now has finished."""

    def query(self) -> bool:
        """Return whether it has happened, or was never recorded."""


class Stream(Protocol):
    """Work of a device in order. In a `with` block torch's operations go to it."""

    def __enter__(self) -> Self:
        """Make it the thread's current stream."""

    def __exit__(self, *error: object) -> None:
        """Restore the stream that was current."""

    def wait_event(self, event: Any) -> None:
        """Let later work on this stream wait for the event."""

    def synchronize(self) -> None:
        """Wait until all work on the stream has finished."""


def kind_of(device: torch.device) -> str:
    """Return the name of a device's kind: CPU, CUDA, ROCm, XPU or torch's own name."""
    if device.type == "cuda":
        return "ROCm" if torch.version.hip else "CUDA"
    return device.type.upper()


class Accelerator:
    """One device.

    Args:
        device: of the KV cache, not the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.kind = kind_of(device)

    def new_stream(self) -> Stream:
        """Return a new stream."""
        stream: Any = torch.Stream(device=self.device)
        return cast("Stream", stream)

    def new_event(self) -> Event:
        """Return a new event."""
        event: Event = torch.Event(device=self.device)
        return event

    def current_stream(self) -> Any:
        """Return the stream to which this thread's operations go."""
        return torch.accelerator.current_stream(self.device)

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Make it this thread's current device, and allow its calls beside captures of graphs.

        Without the first, a context of another device would be made for the thread.
        """
        torch.accelerator.set_device_index(self.device.index or 0)
        with contextlib.ExitStack() as stack:
            if self.kind == "CUDA":
                with contextlib.suppress(KvdClientError):  # there are no bindings of the driver
                    stack.enter_context(cuda_driver.beside_captures())
            yield

    def pin(self, address: int, nbytes: int) -> bool:
        """Register host memory so that copies from and to it run beside the CPU.

        A thread of its own makes the call: the runtime reports a failure to whatever its thread
        calls next.

        Returns:
            Whether it is registered. If not, copies are slower, and block this thread.
        """
        if self.device.type != "cuda":
            return False
        codes: list[int] = []

        def register() -> None:
            with self.current(), contextlib.suppress(Exception):
                codes.append(int(_cudart().cudaHostRegister(address, nbytes, _PORTABLE)))

        thread = threading.Thread(target=register, name="kvd-pin", daemon=True)
        thread.start()
        thread.join()
        return codes == [0]

    def unpin(self, address: int) -> None:
        """Undo `pin`, when no copy uses the memory any more."""
        _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    """Return torch's CUDA runtime, with ROCm HIP's under the same names."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
