"""A double of an accelerator: its memory is the CPU's, its streams do their work late.

Work on a stream is a queue. One thread, the device's, does it: in order on each stream, in random
order across streams, and only where a test does not hold it. An event happens when the device gets
to it. Copies of torch inside `with stream:` go to its queue; whatever else torch does runs at once.

The strictest reading of CUDA's rules: a copy between host and device is late on both sides, whether
its host memory is pinned or not.
"""

import contextlib
import ctypes
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch.overrides import TorchFunctionMode

from kvd_client import RankLayout, UnsupportedMemory
from kvd_client.accelerator import Accelerator, Stream
from kvd_client.device_copier import DeviceCopier
from kvd_client.memory import Memory
from kvd_client.staging_memory import BlockCopier, KvTensors, StagingMemory
from kvd_client.timeline import ControlPage
from kvd_client.torch_memory import BlockTensor, describe_torch
from tests.waiting import PATIENCE

QUEUED = {torch.Tensor.copy_, torch.index_select, torch.Tensor.index_copy_}
NAME = "cuda:GPU-of-the-double"


class DeviceFailed(RuntimeError):
    """What the double reports where a test lets it fail."""


@dataclass(eq=False)
class _Recorded:
    """One recording of an event."""

    has_happened: bool = False


@dataclass(frozen=True)
class _Work:
    """An item of a stream's queue; one of the three."""

    action: Callable[[], object] | None = None
    awaits: _Recorded | None = None
    records: _Recorded | None = None


class DoubleEvent:
    """See Event."""

    def __init__(self, device: "DoubleDevice") -> None:
        self._device = device
        self.recorded: _Recorded | None = None

    def record(self, stream: "DoubleStream") -> None:
        """Record it on a stream, from where it has not happened."""
        self.recorded = _Recorded()
        stream.put(_Work(records=self.recorded))

    def query(self) -> bool:
        """Whether it has happened; raises once the device is lost."""
        with self._device.changed:
            self._device.check()
            return self.recorded is None or self.recorded.has_happened


class _Queueing(TorchFunctionMode):
    """Puts torch's copies on a stream."""

    def __init__(self, stream: "DoubleStream") -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Queue a copy, run anything else."""
        arguments = kwargs or {}
        if func not in QUEUED:
            return func(*args, **arguments)
        self._stream.launch(lambda: func(*args, **arguments))
        return args[0]


class DoubleStream:
    """See Stream."""

    def __init__(self, device: "DoubleDevice") -> None:
        self.device = device
        self.queue: deque[_Work] = deque()
        self.is_held = False
        self._modes: list[Any] = []

    def __enter__(self) -> Self:
        self._modes.append(_Queueing(self))
        self._modes[-1].__enter__()
        self.device.current.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self.device.current.pop()
        self._modes.pop().__exit__(*error)

    def wait_event(self, event: DoubleEvent) -> None:
        """Do what comes later after the event as it is recorded now."""
        if event.recorded is not None:
            self.put(_Work(awaits=event.recorded))

    def synchronize(self) -> None:
        """Wait until the queue is empty."""
        with self.device.changed:
            emptied = self.device.changed.wait_for(
                lambda: not self.queue or self.device.is_lost, PATIENCE
            )
            assert emptied
            self.device.check()

    def launch(self, action: Callable[[], object]) -> None:
        """Queue a kernel or a copy."""
        with self.device.changed:
            if self.device.launches_until_failure:
                self.device.launches_until_failure -= 1
                if not self.device.launches_until_failure:
                    raise DeviceFailed("the device refuses this launch")
        self.put(_Work(action))

    def put(self, work: _Work) -> None:
        """Queue work of any kind."""
        with self.device.changed:
            self.device.check()
            self.queue.append(work)
            self.device.changed.notify_all()


class DoubleDevice:
    """A device with its streams and the thread that does their work. Leave its `with` block.

    Attributes:
        streams: in the order in which they were made.
        holds_new_streams: whether only `run_one` does the work of later streams.
        launches_until_failure: 1: the next launch raises, once; 0: none does.
        is_lost: every call raises from now on.
        pinned: pinned host memory, by address.
    """

    def __init__(self, seed: int = 0) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.streams: list[DoubleStream] = []
        self.holds_new_streams = False
        self.launches_until_failure = 0
        self.is_lost = False
        self.pinned: dict[int, int] = {}
        self._local = threading.local()
        self._chance = random.Random(seed)
        self._is_running = True
        self._thread = threading.Thread(target=self._run, name="double-device")
        self._thread.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.changed:
            self._is_running = False
            self.changed.notify_all()
        self._thread.join(PATIENCE)

    @property
    def current(self) -> list[DoubleStream]:
        """The streams of this thread's `with` blocks."""
        if not hasattr(self._local, "streams"):
            self._local.streams = []
        streams: list[DoubleStream] = self._local.streams
        return streams

    def new_stream(self) -> DoubleStream:
        """A stream with nothing to do."""
        stream = DoubleStream(self)
        stream.is_held = self.holds_new_streams
        with self.changed:
            self.streams.append(stream)
        return stream

    def check(self) -> None:
        """Raise if the device is lost. Called under `changed`."""
        if self.is_lost:
            raise DeviceFailed("the device is lost")

    def lose(self) -> None:
        """Drop all work: nothing happens any more, and every call raises."""
        with self.changed:
            self.is_lost = True
            for stream in self.streams:
                stream.queue.clear()
            self.changed.notify_all()

    @contextlib.contextmanager
    def holding(self, *streams: DoubleStream) -> Iterator[None]:
        """In here these streams do nothing."""
        self._hold(streams, is_held=True)
        try:
            yield
        finally:
            self._hold(streams, is_held=False)

    def settle(self) -> None:
        """Wait until nothing that is queued can be done."""
        with self.changed:
            assert self.changed.wait_for(lambda: not self._runnable(), PATIENCE)

    def wait_queued(self, stream: DoubleStream) -> None:
        """Wait until there is something in the stream's queue."""
        with self.changed:
            assert self.changed.wait_for(lambda: stream.queue, PATIENCE)

    def run_one(self, stream: DoubleStream) -> bool:
        """Do the next item of a stream that is held; return whether it could be done."""
        with self.changed:
            if not stream.queue or not self._is_ready(stream.queue[0]):
                return False
            self._do(stream)
            return True

    def _hold(self, streams: Sequence[DoubleStream], *, is_held: bool) -> None:
        with self.changed:
            for stream in streams:
                stream.is_held = is_held
            self.changed.notify_all()

    def _is_ready(self, work: _Work) -> bool:
        return work.awaits is None or work.awaits.has_happened

    def _runnable(self) -> list[DoubleStream]:
        return [
            stream
            for stream in self.streams
            if stream.queue and not stream.is_held and self._is_ready(stream.queue[0])
        ]

    def _do(self, stream: DoubleStream) -> None:
        work = stream.queue.popleft()
        self.changed.notify_all()
        if work.action is not None:
            with torch.inference_mode():
                work.action()
        if work.records is not None:
            work.records.has_happened = True

    def _run(self) -> None:
        with self.changed:
            while self._is_running:
                if runnable := self._runnable():
                    self._do(self._chance.choice(runnable))
                    self.changed.wait(0)  # let others look between two items
                else:
                    self.changed.wait()


class DoubleAccelerator(Accelerator):
    """See Accelerator.

    Args:
        device: the double.
        kind: that it claims to be.
        pins: whether it can pin host memory.
    """

    def __init__(self, device: DoubleDevice, kind: str = "CUDA", *, pins: bool = True) -> None:
        self.double = device
        self.device = torch.device("cuda", 0)
        self.kind = kind
        self._pins = pins

    def new_stream(self) -> Stream:
        """See Accelerator."""
        return self.double.new_stream()

    def new_event(self) -> DoubleEvent:
        """See Accelerator."""
        return DoubleEvent(self.double)

    def current_stream(self) -> Any:
        """See Accelerator."""
        return self.double.current[-1]

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """See Accelerator."""
        yield

    def pin(self, address: int, nbytes: int) -> bool:
        """See Accelerator."""
        if self._pins:
            self.double.pinned[address] = nbytes
        return self._pins

    def unpin(self, address: int) -> None:
        """See Accelerator."""
        del self.double.pinned[address]


def swap_blocks_batch(
    device: DoubleDevice,
) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """Return a double of vLLM's function: copies by addresses on the current stream."""

    def swap(sources: torch.Tensor, targets: torch.Tensor, sizes: torch.Tensor) -> None:
        fragments = list(zip(targets.tolist(), sources.tolist(), sizes.tolist(), strict=True))

        def copy() -> None:
            for fragment in fragments:
                ctypes.memmove(*fragment)

        device.current[-1].launch(copy)

    return swap


class DoubleTensors(KvTensors):
    """Tensors in the double's memory.

    Args:
        device: that has them.
        tensors: of the CPU.
        exports: whether other processes can map the memory, as far as the client knows.
        kind: of the accelerator.
    """

    def __init__(
        self,
        device: DoubleDevice,
        tensors: Sequence[torch.Tensor | BlockTensor],
        *,
        exports: bool = False,
        kind: str = "CUDA",
    ) -> None:
        self.described = describe_torch(tensors)
        self.storages = self.described.storages
        self._device, self._exports, self._kind = device, exports, kind

    @property
    def is_host(self) -> bool:
        """See KvTensors."""
        return False

    def share(self) -> list[Memory]:
        """See KvTensors."""
        if not self._exports:
            raise UnsupportedMemory("memory of the double cannot be mapped")
        shared = self.described.share()
        for memory in shared:
            memory.device = NAME
        return shared

    def open_copier(
        self, layout: RankLayout, staging: StagingMemory, page: ControlPage
    ) -> BlockCopier:
        """See KvTensors."""
        accelerator = DoubleAccelerator(self._device, self._kind)
        storages = self.described.untyped_storages
        return DeviceCopier(accelerator, storages, layout, staging, page)
