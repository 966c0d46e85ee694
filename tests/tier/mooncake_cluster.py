"""Network namespaces as nodes, and in them a Mooncake cluster that can be broken.

What Mooncake starts listens on all addresses without asking who comes, so it runs in namespaces
of its own, which end with the process that made them: nothing is left where that is killed.

`python -m tests.tier.mooncake_cluster MASTER NAMESPACE KEY…` turns a bit in chunks of the cluster.
"""

import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Self
from urllib.request import urlopen

from kvd.errors import TierError
from kvd.outcomes import Outcome
from kvd.tier.batches import HEAD_BYTES, space_id
from kvd.tier.contract import BackendOptions, Space
from kvd.tier.mooncake import MooncakeTier
from kvd_proto.descriptions import max_description_bytes, record_bytes
from tests.daemon.engines import FACTOR, PAGE, TENSORS, make_layout
from tests.tier.areas import Area
from tests.tier.conformance import put_all, soon
from tests.waiting import PATIENCE, eventually

MASTER_PORT = 50051
METRICS_PORT = 9003
STORE_PORT = 50061
LEASE_MS = 60_000  # a get that takes longer is a miss
TTL_SECONDS = 15  # a store that stands still for longer counts as dead, and all that it held
_TOOLS = ("ip", "nsenter", "setpriv", "unshare")


def why_not() -> str:
    """Why no cluster can be started here; empty where one can."""
    if find_spec("mooncake") is None:
        return "the package mooncake-transfer-engine-non-cuda is not installed"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"{', '.join(missing)} missing: run tests/install-debian.sh"
    tried = subprocess.run(
        ["unshare", "--net", "ip", "link", "add", "kvd0", "type", "veth", "peer", "name", "kvd1"],
        capture_output=True,
        text=True,
        check=False,
    )
    if tried.returncode:
        return f"no network namespaces ({tried.stderr.strip()}); as root they are there"
    tried = subprocess.run(
        [str(program("mooncake_master")), "--version"], capture_output=True, text=True, check=False
    )
    return f"{tried.stderr.strip()}: run tests/install-debian.sh" if tried.returncode == 127 else ""


def program(name: str) -> Path:
    """A program of the package."""
    spec = find_spec("mooncake")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0]) / name


class Node:
    """A network namespace. Files, and so Unix sockets, are those of the machine."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.address = "127.0.0.1"
        self._holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "ip link set lo up && echo up && exec cat"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._holder.stdout is not None
        assert self._holder.stdout.readline() == b"up\n"
        self.pid = self._holder.pid
        self._processes: list[subprocess.Popen[bytes]] = []

    def command(self, *arguments: object) -> list[str]:
        """What runs in this node, and ends with this process."""
        inside = ["nsenter", "--target", str(self.pid), "--net"]
        return ["setpriv", "--pdeathsig", "KILL", *inside, *map(str, arguments)]

    def run(self, *arguments: object) -> str:
        """Run a program until it ends, with success."""
        done = subprocess.run(
            self.command(*arguments), capture_output=True, text=True, check=False, timeout=PATIENCE
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    def start(self, log: Path, *arguments: object) -> subprocess.Popen[bytes]:
        """Start a program of Mooncake, which ends with the node.

        Without what `make test-stalls` preloads: its stores drop a transfer that rests for 3 s.
        """
        others = {name: text for name, text in os.environ.items() if name != "LD_PRELOAD"}
        with log.open("ab") as sink:
            process = subprocess.Popen(
                self.command(*arguments), stdout=sink, stderr=sink, env=others
            )
        self._processes.append(process)
        return process

    @contextmanager
    def entered(self) -> Iterator[None]:
        """This thread, and those that it starts meanwhile, are in the node."""
        libc = ctypes.CDLL(None, use_errno=True)
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        inside = os.open(f"/proc/{self.pid}/ns/net", os.O_RDONLY)
        try:
            assert libc.setns(inside, 0) == 0, os.strerror(ctypes.get_errno())
            yield
        finally:
            assert libc.setns(before, 0) == 0, os.strerror(ctypes.get_errno())
            os.close(before)
            os.close(inside)

    def close(self) -> None:
        """End what runs in it, and it."""
        for process in [*self._processes, self._holder]:
            if process.poll() is None:
                process.kill()
            process.wait(timeout=PATIENCE)
        for stream in (self._holder.stdin, self._holder.stdout):
            assert stream is not None
            stream.close()


class Cluster:
    """A master and stores on a node of their own, and further nodes beside it on one network."""

    def __init__(self, logs: Path) -> None:
        self._logs = logs
        self.hub = Node("hub")
        self.nodes: dict[str, Node] = {}
        self.hub.address = "10.77.0.1"
        self.hub.run("ip", "link", "add", "bridge", "type", "bridge")
        self.hub.run("ip", "address", "add", f"{self.hub.address}/24", "dev", "bridge")
        self.hub.run("ip", "link", "set", "bridge", "up")
        self.master: subprocess.Popen[bytes] | None = None
        self.stores: dict[int, subprocess.Popen[bytes]] = {}

    @property
    def master_address(self) -> str:
        """What `master=` is given."""
        return f"{self.hub.address}:{MASTER_PORT}"

    def add_node(self, name: str) -> Node:
        """A node that reaches the hub and the others."""
        node = self.nodes[name] = Node(name)
        node.address = f"10.77.0.{1 + len(self.nodes)}"
        port = ("ip", "link", "add", f"to-{name}", "type", "veth", "peer", "name", "eth0")
        self.hub.run(*port, "netns", node.pid)
        self.hub.run("ip", "link", "set", f"to-{name}", "master", "bridge", "up")
        node.run("ip", "address", "add", f"{node.address}/24", "dev", "eth0")
        node.run("ip", "link", "set", "eth0", "up")
        return node

    def cut(self, node: Node) -> None:
        """Nothing that a node sends arrives, and nobody is told."""
        self.hub.run("ip", "link", "set", f"to-{node.name}", "nomaster")

    def mend(self, node: Node) -> None:
        """A node reaches the others again."""
        self.hub.run("ip", "link", "set", f"to-{node.name}", "master", "bridge")

    def start_master(self) -> None:
        """Start the master, which knows nothing of before."""
        self.master = self.hub.start(
            self._logs / "master.log",
            program("mooncake_master"),
            f"--rpc_port={MASTER_PORT}",
            f"--metrics_port={METRICS_PORT}",
            f"--default_kv_lease_ttl={LEASE_MS}",
            f"--client_ttl={TTL_SECONDS}",
        )
        eventually(lambda: self._asked("health") is not None)

    def kill_master(self) -> None:
        """SIGKILL."""
        assert self.master is not None
        _kill(self.master)

    def start_store(self, number: int = 0, megabytes: int = 512) -> None:
        """Start a process that gives memory to the cluster, and wait until the master has it."""
        port = STORE_PORT + number
        self.stores[number] = self.hub.start(
            self._logs / f"store-{number}.log",
            program("mooncake_client"),
            f"--host={self.hub.address}",
            f"--port={port}",
            "--metadata_server=P2PHANDSHAKE",
            f"--master_server_address={self.master_address}",
            f"--global_segment_size={megabytes} MB",
            "--protocol=tcp",
        )
        self.wait_segments(len(self.stores))

    def kill_store(self, number: int = 0) -> None:
        """SIGKILL the owner of a segment."""
        _kill(self.stores.pop(number))

    def wait_segments(self, count: int) -> None:
        """Until the master knows of so many segments."""
        eventually(self._segments, lambda segments: len(segments) == count)

    def _segments(self) -> list[str]:
        return (self._asked("get_all_segments") or "").split()

    def _asked(self, page: str) -> str | None:
        """A page of the master's HTTP server; None where it does not answer."""
        with (
            self.hub.entered(),
            suppress(OSError),
            urlopen(f"http://127.0.0.1:{METRICS_PORT}/{page}", timeout=5) as answer,
        ):
            text: str = answer.read().decode()
            return text
        return None

    def close(self) -> None:
        """End everything."""
        for node in [*self.nodes.values(), self.hub]:
            node.close()

    @classmethod
    @contextmanager
    def running(cls, *, megabytes: int = 512) -> Iterator[Self]:
        """A master and one store."""
        with tempfile.TemporaryDirectory(prefix="kvd-mooncake-") as logs:
            cluster = cls(Path(logs))
            try:
                cluster.start_master()
                cluster.start_store(megabytes=megabytes)
                yield cluster
            finally:
                cluster.close()


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait(timeout=PATIENCE)


def open_tier(master: str, area: Area) -> MooncakeTier:
    """A backend on the cluster, once its master answers: it stands still for a while."""
    options = BackendOptions("", {"master": master})
    MooncakeTier.check(options)

    def opened() -> MooncakeTier | None:
        with suppress(TierError):
            return MooncakeTier.open(options, area.memory)
        return None

    tier = eventually(opened)
    assert tier is not None
    return tier


def spoil(master: str, namespace: str, *keys: str) -> None:
    """Replace chunks of an `Engine` by ones with a bit turned; all names in hexadecimal digits."""
    area = Area()
    tier = open_tier(master, area)
    head_bytes = HEAD_BYTES + max_description_bytes(record_bytes(make_layout()))
    name = bytes.fromhex(namespace)
    shares = (PAGE * FACTOR * TENSORS,) * 2  # of the ranks of an Engine
    space = Space(space_id(name, tier.salt(name)), shares, head_bytes)
    chunks = area.empties(space, map(bytes.fromhex, keys))
    assert tier.get(chunks, soon()) == [Outcome.OK] * len(keys)
    tier.remove(space, [chunk.key for chunk in chunks])
    for chunk in chunks:
        chunk.shares[0][0] ^= 1
    put_all(tier, chunks)
    tier.close()


if __name__ == "__main__":
    spoil(*sys.argv[1:])
