"""Public functions of the client with invalid arguments.

The tests replace each argument of `CALLS` with something else, one at a time. What is refused is
refused with an error of the client's that names the argument, before any thread of its has met it.
"""

import gc
import itertools
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cached_property
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from kvd_client import (
    ChunkBlocks,
    DeviceMemory,
    Fingerprint,
    GroupSpec,
    HostMemory,
    JobBlocks,
    KvdClientError,
    Label,
    LoadTicket,
    Scheduler,
    Store,
    StoreTicket,
    TensorRef,
    TensorSpec,
    UnsupportedMemory,
    UsageError,
    Worker,
)
from kvd_client.changes import ChunkLocation
from kvd_client.torch_memory import BlockTensor, describe_torch
from tests.client.conftest import FINGERPRINT, LAYOUT
from tests.client.fake_daemon import FakeDaemon
from tests.descriptors import open_files
from tests.layouts import flat_layout
from tests.waiting import DEADLINE

KEYS = [b"key-1", b"key-2"]
BLOCKS = [(0, 1), (0, 1)]
JOB = JobBlocks.of([3, 4, 5], [3], [1], [0, 2], [5, 6])


JUNK: list[Any] = [
    *(None, object(), int, len, ValueError("x"), True, {"a": 1}, {}.keys()),
    *("text", "half a surrogate pair \ud800", "a\0b", b"bytes", bytearray(9)),
    *(-1, 2**40, 2**63, 2**200, 1.5, float("nan"), float("inf"), 1e300),
    *([object()], [None], [[1], [2]], ["a", "b"], [2**200], [b""], [bytes(49)]),
    *(np.int64(1), np.float32(0.5), np.array(7), np.array([0.5, 1.5]), np.array(["a"])),
    *(np.zeros((2, 2), np.uint32), np.array([object()], dtype=object), np.array([-1, -2])),
    *(np.arange(6, dtype=np.uint32)[::2], np.arange(3, dtype=">u4")),
    *(torch.zeros(3), torch.tensor(3)),
]


class Rig:
    """One of everything, open, and functions that close what they make when the test ends."""

    def __init__(
        self, scheduler: Scheduler, worker: Worker, memory: HostMemory, free: ExitStack
    ) -> None:
        self.scheduler, self.worker, self.memory, self.free = scheduler, worker, memory, free
        self.new_scheduler, self.new_worker = self.closing(Scheduler), self.closing(Worker)
        self.allocate = self.closing(HostMemory.allocate)
        self.wrap = self.closing(lambda **options: HostMemory(os.dup(memory.fd), **options))
        self.describe_torch = describe_torch
        self.submit, self.load = self.numbered(worker.submit), self.numbered(worker.load)

    def closing(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """Close what it makes in the end."""
        return lambda **arguments: self.free.callback(make(**arguments).close)

    @staticmethod
    def numbered(submit: Callable[..., Any]) -> Callable[..., Any]:
        """Give it a job number that is not in use where there is none."""
        numbers = itertools.count(1000)

        def run(job_id: Any = None, **arguments: Any) -> None:
            submit(job_id=next(numbers) if job_id is None else job_id, **arguments)

        return run

    def register(self, memory: Any = None, **arguments: Any) -> Worker:
        """Register with a worker of its own: a registration is made once."""
        worker = Worker(self.worker.runtime_dir, "engine", 0, 1, deadline=DEADLINE)
        self.free.callback(worker.close)
        worker.register(memory=[self.memory] if memory is None else memory, **arguments)
        return worker

    def register_tensors(self, **arguments: Any) -> Worker:
        """Register tensors with a worker of its own."""
        tensors = describe_torch([torch.zeros(512, 64, dtype=torch.uint8)])
        layout = flat_layout(64, blocks=512, factor=2)
        return self.register(tensors, layout=layout, fingerprint=FINGERPRINT, **arguments)

    @cached_property
    def staged(self) -> Worker:
        """A worker whose memory is staged."""
        return self.register_tensors(transfer="staging", staging_bytes=2**20)


CALLS: dict[str, dict[str, Any]] = {
    "new_scheduler": {
        "runtime_dir": "/nowhere",
        "engine": "e",
        "deadline": 1.0,
        "counts_tokens": False,
    },
    "scheduler.lookup": {"key": b"key", "first": 0, "count": 1},
    "scheduler.lookup_many": {"keys": KEYS},
    "scheduler.count_tokens": {"asked": 5, "found": 0},
    "scheduler.count_aborted": {"requests": 1},
    "scheduler.cached_blocks": {"key": b"key"},
    "scheduler.prepare_store": {"keys": KEYS, "blocks": BLOCKS, "descriptions": [b"a", None]},
    "scheduler.complete_store": {"stored": KEYS, "success": True},
    "scheduler.prepare_load": {"keys": KEYS, "lease_seconds": 1.0, "blocks": BLOCKS},
    "scheduler.complete_load": {"ticket": LoadTicket(lease=3)},
    "scheduler.count_hints": {"hints": 1, "ignored": 1, "cut": 1},
    "scheduler.set_prefill_seconds": {"seconds_per_token": 1e-4},
    "scheduler.request_finished": {"keys": KEYS, "prompt": 0, "label": Label.DONE},
    "scheduler.label": {"keys": KEYS, "label": Label.DONE},
    "scheduler.report_missed": {"keys": KEYS},
    "scheduler.request_promotion": {"keys": KEYS},
    "scheduler.find_tier": {"key": b"key", "first": 0, "count": 1},
    "scheduler.tier_status": {"number": 0},
    "scheduler.give_up": {"keys": KEYS},
    "scheduler.reset": {"timeout": 1.0},
    "scheduler.wait_attached": {"timeout": 0.0},
    "scheduler.take_changes": {"limit": 100},
    "scheduler.description": {"location": ChunkLocation(0, 1, 0, 1, 0)},
    "new_worker": {
        "runtime_dir": "/nowhere",
        "engine": "e",
        "rank": 0,
        "world_size": 1,
        "deadline": 1.0,
        "job_timeout": 5.0,
    },
    "register": {
        "memory": None,
        "layout": LAYOUT,
        "fingerprint": FINGERPRINT,
        "stage": 0,
        "temporary": False,
        "required": False,
        "timeout": DEADLINE,
        "transfer": "auto",
        "staging_bytes": 2**20,
    },
    "register_tensors": {"transfer": "staging", "staging_bytes": 2**20, "timeout": DEADLINE},
    "submit": {"kind": Store, "job_id": None, "blocks": JOB, "after": None},
    "load": {
        "job_id": None,
        "ticket": StoreTicket((b"key-1",), np.array([0], "<u4"), np.array([5], "<u8")),
        "groups": [ChunkBlocks(KEYS, [3, 4, 5])],
    },
    "worker.wait": {"job_ids": [1], "timeout": 0.0},
    "worker.cancel": {"job_ids": [1]},
    "worker.timeline.signal": {"number": 1},
    "staged.suspend": {"timeout": DEADLINE},
    "allocate": {"nbytes": 4096},
    "wrap": {"nbytes": 512, "offset": 0},
    "describe_torch": {"tensors": [torch.zeros(8, 64)]},
}
"""Functions, and arguments that are served."""
NEVER_CLOSED = {"scheduler.tier_status", "scheduler.description", "worker.timeline.signal"}
NAMED_AS = {"keys": "key", "stored": "key"}  # of several things the one that is wrong


@pytest.fixture
def rig(
    daemon: FakeDaemon, scheduler: Scheduler, worker: Worker, memory: HostMemory
) -> Iterator[Rig]:
    """One of everything, and nothing of it left."""
    daemon.attach(scheduler)
    worker.timeline.reserve()
    with ExitStack() as free:
        yield Rig(scheduler, worker, memory, free)


@pytest.mark.parametrize("name", CALLS)
def test_invalid_arguments_are_refused_by_an_error_that_names_them(
    rig: Rig, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each argument in turn is something else: served, or one error that names the argument."""
    function, good = attrgetter(name)(rig), CALLS[name]
    function(**good)
    unclear = []
    for argument, junk in itertools.product(good, JUNK):
        try:
            function(**{**good, argument: junk})
        except KvdClientError as error:
            text = str(error)
            if NAMED_AS.get(argument, argument) not in text or not 15 < len(text) < 1000:
                unclear.append(f"{argument}={junk!r}: {text}")
    assert not unclear
    faults = [r for r in caplog.records if r.levelno >= logging.ERROR or r.exc_info]
    assert not faults, faults[0].getMessage()


def test_what_is_closed_says_so(rig: Rig) -> None:
    """Every call that decides, reports or waits; `close` itself may be called again."""
    for session in (rig.scheduler, rig.worker):
        session.close()
        session.close()
    counts = {name for name in CALLS if ".count_" in name or "seconds" in name}
    for name in CALLS.keys() - counts - NEVER_CLOSED:
        if name.startswith(("scheduler", "worker", "submit", "load")):
            with pytest.raises(UsageError, match="closed"):
                attrgetter(name)(rig)(**CALLS[name])


BAD_FIELDS: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # layout, fingerprint, the words
    ({"num_blocks": np.int64(8)}, {}, "int64"),
    ({"num_blocks": 2**70}, {}, "num_blocks"),
    ({"tensors": (TensorSpec(0, "0", 512, 512),)}, {}, r"tensors\["),  # type: ignore[arg-type]
    ({"groups": (GroupSpec((TensorRef(7, 512),), 16),)}, {}, "refs"),
    ({"groups": (GroupSpec((TensorRef(0, 512),), 16, kind="\ud800"),)}, {}, "surrogate"),
    ({}, {"model": 7}, "model"),
    ({}, {"model": ""}, "model"),
    ({}, {"model": "a\u202e"}, r"fingerprint.model.*U\+202E at 1"),
    ({}, {"dtype": None}, "dtype"),
]


def test_layouts_and_fingerprints_are_checked_to_the_last_field(rig: Rig) -> None:
    """A field of the wrong type is named, by the worker, before a daemon sees it."""
    for fields, names, words in BAD_FIELDS:
        layout = msgspec.structs.replace(LAYOUT, **fields)
        with pytest.raises(UsageError, match=words):
            rig.register(layout=layout, fingerprint=Fingerprint(**{"model": "tiny", **names}))


def freed() -> torch.Tensor:
    """A tensor whose storage is gone."""
    tensor = torch.zeros(8, 64)
    tensor.untyped_storage().resize_(0)
    return tensor


BAD_TENSORS: list[tuple[Any, type[KvdClientError], str]] = [
    ([], UsageError, "no tensors"),
    (torch.zeros(4, 4), UsageError, "list of tensors"),
    ([np.zeros((4, 4))], UsageError, "ndarray"),
    ([torch.zeros(4, 4, device="meta")], UnsupportedMemory, "meta"),
    ([freed()], UsageError, "freed"),
    ([torch.zeros(0, 4)], UsageError, "empty"),
    ([torch.tensor(3)], UsageError, "0 dimensions"),
    ([torch.zeros(4, 4).to_sparse()], UnsupportedMemory, "strided"),
    ([torch.zeros(4, 8)[:, ::2]], UnsupportedMemory, "page_bytes"),
    ([torch.zeros(1, 8).expand(4, 8)], UsageError, "overlap"),
    ([BlockTensor(torch.zeros(4, 4), "0")], UsageError, "block_dim"),  # type: ignore[arg-type]
    ([BlockTensor(torch.zeros(4, 4), 2)], UsageError, "block_dim"),
    ([BlockTensor(torch.zeros(4, 4), page_bytes=0)], UsageError, "page_bytes"),
    ([BlockTensor(torch.zeros(4, 4), block_stride="x")], UsageError, "block_stride"),  # type: ignore[arg-type]
]


def test_memory_that_cannot_be_shared_is_named() -> None:
    """Wrong devices, layouts, strides, freed memory, addresses and descriptors, in a sentence."""
    for tensors, error, named in BAD_TENSORS:
        with pytest.raises(error, match=named):
            describe_torch(tensors)
    for fd in (-1, 10**6, 2**200, "7", None, 1.5):
        with pytest.raises(UsageError, match="fd="):
            HostMemory(fd, 4096)  # type: ignore[arg-type]
    for address, nbytes in ((0, 1), ("x", 1), (2**64, 1), (4096, 0), (4096, 1.5)):
        with pytest.raises(UsageError, match="needed"):  # before a driver is asked
            DeviceMemory.at(address, nbytes)  # type: ignore[arg-type]


def control_pages() -> int:
    """Descriptors of workers' control pages in this process."""
    return sum("kvd-control" in file for file in open_files().values())


def test_a_refused_worker_leaves_no_descriptor(rig: Rig) -> None:
    """What a constructor has opened before it refuses is closed."""
    gc.collect()  # workers of other tests have gone
    before = control_pages()
    for engine in ("", 7, "\ud800", "a\x1b[2J"):
        with pytest.raises(UsageError, match=r"engine=.*printable"):
            Worker(rig.worker.runtime_dir, engine, 0, 1)  # type: ignore[arg-type]
    gc.collect()
    assert control_pages() == before
