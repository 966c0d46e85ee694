"""What a stream, an event and pinned memory are on each kind of device that torch drives.

    kind   torch device   streams and events              pinned memory
    CUDA   cuda           torch.Stream, torch.Event       cudaHostRegister
    ROCm   cuda, with     torch.Stream, torch.Event       hipHostRegister, under CUDA's name
           version.hip
    XPU    xpu            torch.Stream, torch.Event       none: copies pass through the driver's

Other accelerators work as XPU does if torch has streams and events for them. torch's functions for
any device are used where it has them.
"""

from typing import Any, Protocol, Self, cast

import torch

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

    def pin(self, address: int, nbytes: int) -> bool:
        """Register host memory so that copies from and to it run beside the CPU.

        Returns:
            Whether it is registered. If not, copies are slower, and block this thread.
        """
        if self.device.type != "cuda":
            return False
        with torch.accelerator.device_index(self.device.index):
            return not int(_cudart().cudaHostRegister(address, nbytes, _PORTABLE))

    def unpin(self, address: int) -> None:
        """Undo `pin`, when no copy uses the memory any more."""
        _cudart().cudaHostUnregister(address)


def _cudart() -> Any:
    """Return torch's CUDA runtime, with ROCm HIP's under the same names."""
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
