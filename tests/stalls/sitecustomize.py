"""A busy machine on demand: every process naps now and then around what others can see of it.

`make test-stalls` puts this folder on PYTHONPATH, where Python imports it in every process that
the tests start. Naps come before and after messages, threads, processes and signals between
threads; most are short, a few are as long as a machine without CPU time makes them. A test that
fails only so takes what usually comes first for what must come first.
"""

import functools
import gc
import importlib.abc
import importlib.machinery
import os
import random
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

SWITCH_SECONDS = 0.0005  # threads take turns ten times as often as usual
# Probability of a nap, and the seconds between which it lasts.
NAPS = ((0.0002, 0.8, 2.2), (0.002, 0.05, 0.4), (0.1, 0.0, 0.006))
COLLECTIONS = 0.005  # probability of a collection of garbage

_chance = random.Random()  # not seeded: which process comes when is chance anyway
_sleep = time.sleep


def nap() -> None:
    """Sleep, most of the time not at all; let the collector run, as any allocation may."""
    if _chance.random() < COLLECTIONS:
        gc.collect()
    dice = _chance.random()
    for probability, least, most in NAPS:
        if dice < probability:
            _sleep(_chance.uniform(least, most))
            return


def drowsy(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function with naps around it."""

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        nap()
        try:
            return function(*args, **kwargs)
        finally:
            nap()

    return call


def make_drowsy(owner: Any, *names: str) -> None:
    """Replace functions of a module or class."""
    for name in names:
        setattr(owner, name, drowsy(getattr(owner, name)))


class ZeroMQ(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Makes ZeroMQ's sockets drowsy when they are imported."""

    module = "zmq.sugar.socket"

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """The module's own way to be loaded, followed by ours."""
        if name != self.module:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, importlib.machinery.SourceFileLoader):
            self._loader = spec.loader
            spec.loader = self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        """Run it, then replace what sends and receives."""
        self._loader.exec_module(module)
        make_drowsy(module.Socket, "send", "recv", "send_multipart", "recv_multipart")


sys.setswitchinterval(SWITCH_SECONDS)
make_drowsy(socket.socket, "send", "sendall", "sendmsg", "accept", "close")
make_drowsy(socket, "send_fds", "recv_fds")
make_drowsy(os, "eventfd_write")
make_drowsy(threading.Thread, "start", "run")
make_drowsy(threading.Event, "set")
make_drowsy(threading.Condition, "wait")
make_drowsy(subprocess.Popen, "__init__")
sys.meta_path.insert(0, ZeroMQ())
