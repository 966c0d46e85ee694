"""Every public function of the client with arguments that cannot be meant.

`GOOD` has a row for each function: arguments that are served. The tests put something
else in the place of each of them, one at a time, and close what it belongs to first. What
is served after all is no fault; what is refused is refused with an error of ours that names
the argument, before any thread of ours has met it. A function without a row fails.
"""

import contextlib
import enum
import gc
import inspect
import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

import kvd_client
from kvd_client import (
    ChunkBlocks,
    DeviceMemory,
    Fingerprint,
    GroupSpec,
    HostMemory,
    KvdClientError,
    LoadTicket,
    RankLayout,
    Scheduler,
    StoreTicket,
    TensorRef,
    TensorSpec,
    Timeline,
    UnsupportedMemory,
    UsageError,
    Worker,
    sealed,
    torch_memory,
)
from kvd_client.session import Handler
from kvd_client.torch_memory import BlockTensor, share_torch
from tests.client.conftest import FINGERPRINT, LAYOUT
from tests.client.fake_daemon import SECONDS, FakeDaemon
from tests.waiting import DEADLINE

JOB: dict[str, Any] = {
    "block_ids": [3, 4, 5],
    "group_sizes": [3],
    "block_indices": [1],
    "slots": [0, 2],
    "generations": [5, 6],
    "after": None,
}
KEYS = [b"key-1", b"key-2"]
TICKET_JOB: dict[str, Any] = {
    "ticket": StoreTicket((b"key-1",), np.array([0], "<u4"), np.array([5], "<u8")),
    "groups": [ChunkBlocks(KEYS, [3, 4, 5])],
    "after": None,
}
BLOCKS = [(0, 1), (0, 1)]


class Odd:
    """An object that is nothing."""

    def __repr__(self) -> str:
        return "<Odd>"


JUNK: dict[str, Any] = {
    "None": None,
    "an object": Odd(),
    "a text": "text",
    "half a surrogate pair": "\ud800",
    "NUL": "a\0b",
    "bytes": b"bytes",
    "bytearray": bytearray(9),
    "-1": -1,
    "2**40": 2**40,
    "2**63": 2**63,
    "2**200": 2**200,
    "1.5": 1.5,
    "nan": float("nan"),
    "inf": float("inf"),
    "1e300": 1e300,
    "True": True,
    "a list of objects": [Odd()],
    "a list of None": [None],
    "a list of lists": [[1], [2]],
    "a list of text": ["a", "b"],
    "a list of large numbers": [2**200],
    "a list of empty bytes": [b""],
    "a list of long bytes": [bytes(49)],
    "a dict": {"a": 1},
    "a dict's keys": {}.keys(),
    "numpy int": np.int64(1),
    "numpy float": np.float32(0.5),
    "floats": np.array([0.5, 1.5]),
    "two dimensions": np.zeros((2, 2), np.uint32),
    "no dimension": np.array(7),
    "objects": np.array([Odd()], dtype=object),
    "texts": np.array(["a"]),
    "signed": np.array([-1, -2], np.int64),
    "every second": np.arange(6, dtype=np.uint32)[::2],
    "big endian": np.arange(3, dtype=">u4"),
    "a tensor": torch.zeros(3),
    "a tensor of no dimension": torch.tensor(3),
    "a type": int,
    "a function": len,
    "an exception": ValueError("x"),
}


@dataclass
class Rig:
    """One of everything, open."""

    daemon: FakeDaemon
    scheduler: Scheduler
    worker: Worker
    memory: HostMemory
    free: list[Callable[[], None]] = field(default_factory=list)

    def keep(self, made: Any) -> Any:
        """Close it in the end, if it can be closed."""
        if hasattr(made, "close"):
            self.free.append(made.close)
        return made


def device_memory() -> DeviceMemory:
    """What `DeviceMemory.at` would make; no driver is asked."""
    return DeviceMemory(
        ordinal=0,
        device="cuda:" + "0f" * 16,
        base=4096,
        allocation=8192,
        offset=0,
        nbytes=4096,
        ipc=bytes(64),
    )


def host_memory(rig: Rig, **arguments: Any) -> Any:
    """Over a descriptor of its own, where none of another kind is given."""
    fd = sealed.make("test", 4096)
    try:
        return rig.keep(HostMemory(**{"fd": fd, **arguments}))
    except KvdClientError:
        os.close(fd)
        raise


@dataclass(frozen=True)
class Row:
    """How to call a function.

    call: with the rig and keyword arguments.
    good: arguments that are served.
    closed: calls it again after its object was closed; None: it has none.
    """

    call: Callable[..., Any]
    good: Callable[[Rig], Mapping[str, Any]]
    closes: Callable[[Rig], Any] | None = None


def method(owner: str, name: str, **good: Any) -> Row:
    """A row of a method of an object in the rig."""
    return Row(
        lambda rig, **arguments: getattr(getattr(rig, owner), name)(**arguments),
        lambda _: good,
        lambda rig: getattr(rig, owner).close(),
    )


def made(kind: Callable[..., Any], **good: Any) -> Row:
    """A row of something that makes an object."""
    return Row(lambda rig, **arguments: rig.keep(kind(**arguments)), lambda _: good)


def job(name: str, good: Mapping[str, Any] = JOB) -> Row:
    """A row of a job; each has a number of its own, from 1000 on."""
    numbers = itertools.count(1000)
    row = method("worker", name)
    return Row(row.call, lambda _: {"job_id": next(numbers), **good}, row.closes)


def new_worker(rig: Rig, **arguments: Any) -> Any:
    """Register with a worker of its own: a registration is made once."""
    worker = rig.keep(Worker(rig.daemon.runtime_dir, "engine", 0, 1, deadline=DEADLINE))
    return worker.register(**arguments)


def on_timeline(name: str, **good: Any) -> Row:
    """A row of a method of the worker's timeline."""
    return Row(
        lambda rig, **arguments: getattr(rig.worker.timeline, name)(**arguments),
        lambda _: good,
        lambda rig: rig.worker.close(),
    )


def on_device_memory(name: str, **good: Any) -> Row:
    """A row of a method of CUDA memory."""
    return Row(
        lambda rig, **arguments: getattr(rig.keep(device_memory()), name)(**arguments),
        lambda _: good,
    )


GOOD: dict[str, Row] = {
    "Scheduler": Row(
        lambda rig, **a: rig.keep(Scheduler(**a)),
        lambda rig: {
            "runtime_dir": rig.daemon.runtime_dir,
            "engine": "e",
            "deadline": DEADLINE,
            "counts_tokens": False,
        },
    ),
    "Scheduler.lookup": method("scheduler", "lookup", key=b"key", first=0, count=1),
    "Scheduler.lookup_many": method("scheduler", "lookup_many", keys=KEYS),
    "Scheduler.count_tokens": method("scheduler", "count_tokens", asked=9, found=3),
    "Scheduler.prepare_store": method("scheduler", "prepare_store", keys=KEYS, blocks=BLOCKS),
    "Scheduler.complete_store": method("scheduler", "complete_store", stored=KEYS, success=True),
    "Scheduler.prepare_load": method(
        "scheduler", "prepare_load", keys=KEYS, lease_seconds=1.0, blocks=BLOCKS
    ),
    "Scheduler.complete_load": method("scheduler", "complete_load", ticket=LoadTicket(lease=3)),
    "Scheduler.request_finished": method("scheduler", "request_finished", keys=KEYS),
    "Scheduler.fileno": method("scheduler", "fileno"),
    "Scheduler.take_ready": method("scheduler", "take_ready"),
    "Scheduler.reset": method("scheduler", "reset", timeout=1.0),
    "Scheduler.status": method("scheduler", "status"),
    "Scheduler.wait_attached": method("scheduler", "wait_attached", timeout=0.0),
    "Scheduler.close": method("scheduler", "close"),
    "Worker": Row(
        lambda rig, **a: rig.keep(Worker(**a)),
        lambda rig: {
            "runtime_dir": rig.daemon.runtime_dir,
            "engine": "e",
            "rank": 0,
            "world_size": 1,
            "deadline": DEADLINE,
            "job_timeout": 5.0,
        },
    ),
    "Worker.register": Row(
        new_worker,
        lambda rig: {
            "memory": [rig.memory],
            "layout": LAYOUT,
            "fingerprint": FINGERPRINT,
            "device": None,
            "stage": 0,
            "temporary": False,
            "required": False,
            "timeout": DEADLINE,
        },
    ),
    "Worker.wait_attached": method("worker", "wait_attached", timeout=0.0),
    "Worker.submit_store": job("submit_store"),
    "Worker.submit_load": job("submit_load"),
    "Worker.store": job("store", TICKET_JOB),
    "Worker.load": job("load", TICKET_JOB),
    "Worker.get_finished": method("worker", "get_finished"),
    "Worker.fileno": method("worker", "fileno"),
    "Worker.wait": method("worker", "wait", job_ids=[1], timeout=0.0),
    "Worker.cancel": method("worker", "cancel", job_ids=[1]),
    "Worker.close": method("worker", "close"),
    "Timeline": Row(lambda _, **a: Timeline(**a), lambda rig: {"page": rig.worker._control}),
    "Timeline.reserve": on_timeline("reserve"),
    "Timeline.signal": on_timeline("signal", number=1),
    "Timeline.signal_on": on_timeline("signal_on", stream=0),
    "HostMemory": Row(host_memory, lambda _: {"nbytes": 4096, "offset": 0, "array": None}),
    "HostMemory.allocate": made(HostMemory.allocate, nbytes=4096),
    "HostMemory.part": method("memory", "part", offset=0, nbytes=512),
    "HostMemory.duplicate": method("memory", "duplicate"),
    "HostMemory.handle": method("memory", "handle", fd_index=1),
    "HostMemory.view": method("memory", "view", dtype="u1", shape=(4, 4)),
    "HostMemory.close": method("memory", "close"),
    "DeviceMemory": made(
        DeviceMemory,
        ordinal=0,
        device="cuda:" + "0f" * 16,
        base=4096,
        allocation=8192,
        offset=0,
        nbytes=4096,
        ipc=bytes(64),
    ),
    "DeviceMemory.at": made(DeviceMemory.at, address=4096, nbytes=4096),
    "DeviceMemory.duplicate": on_device_memory("duplicate"),
    "DeviceMemory.handle": on_device_memory("handle", fd_index=1),
    "DeviceMemory.close": on_device_memory("close"),
    "share_torch": Row(
        lambda rig, **a: rig.keep(share_torch(**a)), lambda _: {"tensors": [torch.zeros(8, 64)]}
    ),
    "SharedTensors.close": Row(lambda _: share_torch([torch.zeros(8, 64)]).close(), lambda _: {}),
}
VALUES = {
    "ChunkBlocks",
    "BlockTensor",
    "Fingerprint",
    "GroupSpec",
    "RankLayout",
    "TensorRef",
    "TensorSpec",
}  # checked by whoever is given them
RESULTS = {
    "AttachState",
    "JobResult",
    "LoadTicket",
    "ResetSummary",
    "SharedTensors",
    "StoreSummary",
    "StoreTicket",
}  # made by the client
NAMED_AS = {"keys": "key", "stored": "key"}  # of several things the one that is wrong
INSIDE = {name for name in vars(Handler) if not name.startswith("_")} | {"follow", "abandon"}


def surface() -> set[str]:
    """Functions, constructors and methods that a user may call."""
    names = set()
    exported = {name: getattr(kvd_client, name) for name in kvd_client.__all__}
    exported |= {
        name: thing
        for name, thing in vars(torch_memory).items()
        if not name.startswith("_") and getattr(thing, "__module__", "") == torch_memory.__name__
    }
    for name, thing in exported.items():
        if isinstance(thing, type) and issubclass(thing, (Exception, enum.Enum)):
            continue
        if name not in VALUES | RESULTS:
            names.add(name)
        if isinstance(thing, type) and name not in VALUES:
            names |= {
                f"{name}.{attribute}"
                for attribute, value in vars(thing).items()
                if not attribute.startswith("_")
                and attribute not in INSIDE
                and (inspect.isfunction(value) or isinstance(value, (classmethod, staticmethod)))
            }
    return names


@pytest.fixture
def rig(daemon: FakeDaemon, scheduler: Scheduler, worker: Worker) -> Iterator[Rig]:
    """One of everything, and nothing of it left."""
    memory = HostMemory.allocate(LAYOUT.storages[0])
    one = Rig(daemon, scheduler, worker, memory)
    daemon.attach()
    assert scheduler.wait_attached(SECONDS)
    worker.timeline.reserve()
    yield one
    memory.close()
    for close in one.free:
        close()


def refused(call: Callable[[], Any]) -> KvdClientError | None:
    """The client's error, if there is one; any other one is a fault and is not caught."""
    try:
        call()
    except KvdClientError as error:
        return error
    return None


def test_every_public_function_has_a_row() -> None:
    """A new public function fails here until it is in the table."""
    assert set(GOOD) == surface()


@pytest.mark.parametrize("name", sorted(GOOD))
def test_the_rows_are_right(rig: Rig, name: str) -> None:
    """What the table calls good is served, and names every argument."""
    row = GOOD[name]
    target: Any = kvd_client if hasattr(kvd_client, name.partition(".")[0]) else torch_memory
    for part in name.split("."):
        target = getattr(target, part)
    named = set(inspect.signature(target).parameters) - {"self", "fd"}
    assert set(row.good(rig)) == named
    error = refused(lambda: row.call(rig, **row.good(rig)))
    if name not in {"DeviceMemory.at", "Timeline.signal_on"}:  # there is no CUDA here
        assert error is None


@pytest.mark.parametrize("name", sorted(GOOD))
def test_what_cannot_be_meant_is_refused_by_an_error_of_ours(
    rig: Rig, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Each argument in turn is something else: served, or one error that names the argument."""
    row = GOOD[name]
    usual = refused(lambda: row.call(rig, **row.good(rig)))  # there is no CUDA here
    for argument in row.good(rig):
        named = (NAMED_AS.get(argument, argument), str(usual))
        for what, junk in JUNK.items():
            arguments = {**row.good(rig), argument: junk}
            error = refused(lambda arguments=arguments: row.call(rig, **arguments))  # type: ignore[misc]
            if error is not None:
                told = f"{argument}={what}: {error}"
                assert any(name in str(error) for name in named), told
                assert 15 < len(str(error)) < 1000, told
    faults = [r for r in caplog.records if r.levelno >= logging.ERROR or r.exc_info]
    assert not faults, faults[0].getMessage()


@pytest.mark.parametrize("name", sorted(name for name, row in GOOD.items() if row.closes))
def test_after_close_there_is_one_clear_error(rig: Rig, name: str) -> None:
    """A closed object serves or says that it is closed; nothing breaks inside."""
    row = GOOD[name]
    assert row.closes is not None
    row.closes(rig)
    refused(lambda: row.call(rig, **row.good(rig)))


def test_properties_of_closed_objects_can_be_read(rig: Rig) -> None:
    """Or say that there is nothing to read."""
    shared = share_torch([torch.zeros(8, 64)])
    for thing in (rig.scheduler, rig.worker, rig.memory, rig.worker.timeline, shared):
        if hasattr(thing, "close"):
            thing.close()
        for name, value in vars(type(thing)).items():
            if isinstance(value, property):
                refused(lambda thing=thing, name=name: getattr(thing, name))  # type: ignore[misc]
        repr(thing)


BAD_LAYOUTS: dict[str, tuple[Any, str]] = {
    "text for a number": (msgspec.structs.replace(LAYOUT, num_blocks="8"), "num_blocks"),
    "a fraction": (msgspec.structs.replace(LAYOUT, num_blocks=8.5), "num_blocks"),
    "numpy's number": (msgspec.structs.replace(LAYOUT, num_blocks=np.int64(8)), "int64"),
    "None for storages": (msgspec.structs.replace(LAYOUT, storages=None), "storages"),
    "an object": (msgspec.structs.replace(LAYOUT, replicated=Odd()), "Odd"),
    "a number for groups": (msgspec.structs.replace(LAYOUT, groups=3), "groups"),
    "huge": (msgspec.structs.replace(LAYOUT, num_blocks=2**70), "num_blocks"),
    "no tensors": (msgspec.structs.replace(LAYOUT, tensors=()), "0 tensors"),
    "deep inside": (
        msgspec.structs.replace(LAYOUT, tensors=(TensorSpec(0, "0", 512, 512),)),  # type: ignore[arg-type]
        r"tensors\[",
    ),
    "no such tensor": (
        msgspec.structs.replace(LAYOUT, groups=(GroupSpec((TensorRef(7, 512),), 16),)),
        "refs",
    ),
    "half a surrogate pair": (
        msgspec.structs.replace(
            LAYOUT, groups=(GroupSpec((TensorRef(0, 512),), 16, kind="\ud800"),)
        ),
        "surrogate",
    ),
}


@pytest.mark.parametrize("what", sorted(BAD_LAYOUTS))
def test_layouts_are_checked_to_the_last_field(rig: Rig, what: str) -> None:
    """A field of the wrong type is named, by the worker, before a daemon sees it."""
    layout, named = BAD_LAYOUTS[what]
    with pytest.raises(UsageError, match=named):
        new_worker(rig, memory=[rig.memory], layout=layout, fingerprint=FINGERPRINT)


@pytest.mark.parametrize(
    "fields", [{"model": 7}, {"model": b"m"}, {"model": ""}, {"model": "\ud800"}, {"dtype": None}]
)
def test_fingerprints_are_checked_too(rig: Rig, fields: dict[str, Any]) -> None:
    """As layouts are."""
    fingerprint = Fingerprint(**{"model": "tiny", **fields})
    with pytest.raises(UsageError, match=next(iter(fields)) + "|surrogate"):
        new_worker(rig, memory=[rig.memory], layout=LAYOUT, fingerprint=fingerprint)


def freed() -> torch.Tensor:
    """A tensor whose storage is gone."""
    tensor = torch.zeros(8, 64)
    tensor.untyped_storage().resize_(0)
    return tensor


BAD_TENSORS: dict[str, tuple[Any, type[KvdClientError], str]] = {
    "nothing": ([], UsageError, "no tensors"),
    "one tensor": (torch.zeros(4, 4), UsageError, "list of tensors"),
    "numpy": ([np.zeros((4, 4))], UsageError, "ndarray"),
    "another device": ([torch.zeros(4, 4, device="meta")], UnsupportedMemory, "meta"),
    "freed": ([freed()], UsageError, "freed"),
    "empty": ([torch.zeros(0, 4)], UsageError, "empty"),
    "no dimension": ([torch.tensor(3)], UsageError, "0 dimensions"),
    "sparse": ([torch.zeros(4, 4).to_sparse()], UnsupportedMemory, "strided"),
    "every second column": ([torch.zeros(4, 8)[:, ::2]], UnsupportedMemory, "page_bytes"),
    "expanded": ([torch.zeros(1, 8).expand(4, 8)], UsageError, "overlap"),
    "a text as a dimension": ([BlockTensor(torch.zeros(4, 4), "0")], UsageError, "block_dim"),  # type: ignore[arg-type]
    "no such dimension": ([BlockTensor(torch.zeros(4, 4), 2)], UsageError, "block_dim"),
    "a page of 0 bytes": (
        [BlockTensor(torch.zeros(4, 4), page_bytes=0)],
        UsageError,
        "page_bytes",
    ),
    "a text as a stride": (
        [BlockTensor(torch.zeros(4, 4), block_stride="x")],  # type: ignore[arg-type]
        UsageError,
        "block_stride",
    ),
}


@pytest.mark.parametrize("what", sorted(BAD_TENSORS))
def test_tensors_that_cannot_be_shared_are_named(what: str) -> None:
    """Wrong devices, layouts, strides and freed memory are refused in a sentence."""
    tensors, error, named = BAD_TENSORS[what]
    with pytest.raises(error, match=named):
        share_torch(tensors)


@pytest.mark.parametrize("fd", [-1, 10**6, 2**40, 2**200, "7", None, 1.5])
def test_only_open_descriptors_are_memory(fd: Any) -> None:
    """A number that is no descriptor, or no number."""
    with pytest.raises(UsageError, match="fd="):
        HostMemory(fd, 4096)
    if fd != -1:
        with pytest.raises(UsageError, match="fd="):
            DeviceMemory(ordinal=0, device="cuda", base=0, allocation=1, offset=0, nbytes=1, fd=fd)


@pytest.mark.parametrize(
    ("dtype", "shape", "named"),
    [
        ("no dtype", (1,), "dtype"),
        (object, (1,), "object"),
        ("u1", 4, "shape"),
        ("u1", (-1,), "shape"),
        ("u1", ("4",), "shape"),
        ("u8", (2**32, 2**32), "does not fit"),
        ("V0", (1,), "dtype"),
    ],
)
def test_views_are_of_what_is_there(dtype: Any, shape: Any, named: str) -> None:
    """A dtype or shape that memory cannot have is refused."""
    memory = HostMemory.allocate(4096)
    with pytest.raises(UsageError, match=named):
        memory.view(dtype, shape)
    memory.close()


def test_lookups_of_a_generator_are_of_all_its_keys(rig: Rig) -> None:
    """Keys that can be gone through once only are not lost on the way."""
    assert len(rig.scheduler.lookup_many(key for key in KEYS)) == len(KEYS)  # type: ignore[arg-type]


def control_pages() -> int:
    """Descriptors of workers' control pages in this process."""
    found = 0
    for fd in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is gone
            found += "kvd-control" in str(fd.readlink())
    return found


def test_a_refused_worker_leaves_no_descriptor(rig: Rig) -> None:
    """What a constructor has opened before it refuses is closed."""
    gc.collect()  # workers of other tests have gone
    before = control_pages()
    for engine in ("", 7, "\ud800"):
        with pytest.raises(UsageError, match="engine"):
            Worker(rig.daemon.runtime_dir, engine, 0, 1)  # type: ignore[arg-type]
    gc.collect()
    assert control_pages() == before


def test_a_layout_of_lists_is_taken_for_one_of_tuples(rig: Rig) -> None:
    """What is equal on the wire is equal here."""
    layout = RankLayout(**{name: getattr(LAYOUT, name) for name in LAYOUT.__struct_fields__})
    layout = msgspec.structs.replace(layout, storages=list(layout.storages))
    assert new_worker(rig, memory=[rig.memory], layout=layout, fingerprint=FINGERPRINT)


def test_names_that_cannot_be_shown_are_refused(runtime_dir: Path, memory: HostMemory) -> None:
    """An escape in the engine's or the model's name is an error that names it."""
    with pytest.raises(UsageError, match="printable"):
        Scheduler(runtime_dir, "a\x1b[2J")
    worker = Worker(runtime_dir, "engine", 0, 1, deadline=DEADLINE)
    with worker, pytest.raises(UsageError, match=r"fingerprint.model.*U\+202E at 1"):
        worker.register([memory], LAYOUT, Fingerprint(model="a\u202e"), timeout=0.0)
