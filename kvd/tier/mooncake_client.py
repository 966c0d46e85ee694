"""Mooncake's own client, wrapped: options, error codes, registered memory, and calls.

Calls of the client take no timeout: they stall for seconds while the master is away. So this module
shortens the timeouts that the client reads from the environment. After a call that failed for lack
of a master, it first connects to the master, which fails at once if that is still away.
"""

import mmap
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, Final

import numpy as np

from kvd.config.values import size_option
from kvd.errors import ConfigError, TierError
from kvd.tier.contract import BackendOptions

PROTOCOLS = ("tcp", "rdma")
NO_METADATA_SERVER = "P2PHANDSHAKE"
_KEYS = ("master", "metadata", "protocol", "devices", "segment", "host")
PACKAGES = ("mooncake-transfer-engine-non-cuda", "mooncake-transfer-engine")
INSTALL = f"pip install {PACKAGES[0]} (or {PACKAGES[1]} where CUDA is)"
LIBRARIES = "libibverbs1, librdmacm1, libnuma1 and libcurl4"

DONE: Final = 0
NO_ROOM: Final = -200  # NO_AVAILABLE_HANDLE: eviction is behind, or there is no store
BAD_LENGTH: Final = -600  # INVALID_PARAMS: the object is longer than the memory to read into
NOT_READY: Final = -703  # another node's put of it has not ended
NOT_FOUND: Final = -704
LEASE_EXPIRED: Final = -707  # the get took so long that the bytes may be another object's
MASTER_AWAY: Final = (-900, -901)  # RPC_FAIL, RPC_TIMEOUT

_TIMEOUTS = {
    "MC_RPC_TIMEOUT_MS": "2000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "500",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "3",
    "MC_TCP_STATUS_TIMEOUT_SEC": "3",
    "MC_STORE_CLIENT_SETUP_RETRIES": "1",
    "MC_LOG_LEVEL": "ERROR",
}
_CONNECT_SECONDS = 1.0  # at the start
_PROBE_SECONDS = 0.2  # after the master was away
_AT_ONCE_SECONDS, _MAX_STALE_CONNECTIONS = 0.1, 4
_BUFFER_BYTES = 2**20
_PIECE_ALIGNMENT = 64  # a piece of a buffer begins at a cache line


@dataclass(frozen=True, slots=True)
class MooncakeOptions:
    """The options ``mooncake:master=HOST:PORT,…`` of a tier.

    Attributes:
        master: host and port of the master's RPC.
        metadata: URL of a metadata server; P2PHANDSHAKE: there is none.
        protocol: of transfers, `tcp` or `rdma`.
        devices: RDMA devices, separated by "+"; empty: Mooncake chooses.
        segment_bytes: memory that this process contributes to the cluster.
        host: the address under which other nodes reach this one; empty: this node's address on the
            way to the master.
    """

    master: tuple[str, int]
    metadata: str
    protocol: str
    devices: str
    segment_bytes: int
    host: str

    @property
    def master_text(self) -> str:
        """Host and port, as an operator writes them."""
        return f"{self.master[0]}:{self.master[1]}"

    @classmethod
    def parse(cls, options: BackendOptions) -> "MooncakeOptions":
        """Parse the operator's options, without any I/O.

        Raises:
            ConfigError: an option is invalid; names key, value and remedy.
        """
        values = options.values
        if options.target:
            raise ConfigError(
                f"mooncake:{options.target}: mooncake takes no target",
                "give mooncake:master=HOST:PORT",
            )
        if "size" in values:
            raise ConfigError(
                f"mooncake: size={values['size']}: the cluster's stores decide how much it holds",
                "leave it out, or give segment=SIZE to let this node contribute",
            )
        if unknown := sorted(values.keys() - set(_KEYS)):
            raise ConfigError(
                f"mooncake: unknown option {unknown[0]}", f"known are {', '.join(_KEYS)}"
            )
        protocol = values.get("protocol", "tcp")
        if protocol not in PROTOCOLS:
            raise ConfigError(
                f"mooncake: protocol={protocol} is unknown", f"use one of {', '.join(PROTOCOLS)}"
            )
        if "devices" in values and protocol != "rdma":
            raise ConfigError(
                f"mooncake: devices={values['devices']} needs protocol=rdma",
                "give that too, or leave devices out",
            )
        return cls(
            master=_master(values.get("master", "")),
            metadata=values.get("metadata", NO_METADATA_SERVER),
            protocol=protocol,
            devices=values.get("devices", ""),
            segment_bytes=size_option("mooncake", "segment", values.get("segment", "0")),
            host=values.get("host", ""),
        )


def _master(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host or bare_ipv6 or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"mooncake: master={text} is no HOST:PORT" if text else "mooncake has no master",
            "give host and port of mooncake_master, such as master=10.0.0.1:50051",
        )
    return host, int(port)


def check_installed() -> None:
    """Check that the package is installed, without importing it.

    Raises:
        ConfigError: it is not; names what to install.
    """
    if find_spec("mooncake") is None:
        raise ConfigError("mooncake: the package is not installed", INSTALL)


def package_version() -> str:
    """Return the installed package and its version."""
    for name in PACKAGES:
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "mooncake"


def address_of(memory: memoryview) -> int:
    """Return the address of the first byte."""
    address: int = np.frombuffer(memory, np.uint8).__array_interface__["data"][0]
    return address


class MooncakeClient:
    """A connected client. Thread-safe; calls block, and release the interpreter lock.

    Raises:
        TierError: it cannot be created; names the remedy.
    """

    def __init__(self, options: MooncakeOptions, pool: memoryview) -> None:
        self._master = options.master
        self._master_away = False
        self._lock = threading.Lock()
        self._free_buffers: list[memoryview] = []
        library = _library()
        # `setup` holds the interpreter lock for seconds if there is no master: connect first.
        host = self._connect(_CONNECT_SECONDS)
        self.host = options.host or host
        self._store = library.MooncakeDistributedStore()
        self._never_evicted = library.ReplicateConfig()
        self._never_evicted.with_hard_pin = True
        code = self._store.setup(
            {
                "local_hostname": self.host,
                "metadata_server": options.metadata,
                "global_segment_size": options.segment_bytes,
                "local_buffer_size": 0,
                "protocol": options.protocol,
                "rdma_devices": options.devices.replace("+", ","),
                "master_server_addr": options.master_text,
            }
        )
        if code != DONE:
            raise TierError(
                f"Mooncake's client cannot be set up with master={options.master_text},"
                f" metadata={options.metadata}, protocol={options.protocol} as host={self.host}"
                f" (code {code}); see its own lines above"
            )
        try:
            self._register(pool)
        except TierError:
            self.close()
            raise

    def put(self, names: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> Any:
        """Write objects from pieces of registered memory; existing objects stay as they are."""
        return self._call(self._store.batch_put_from_multi_buffers, names, addresses, sizes)

    def get(self, names: list[str], addresses: list[list[int]], sizes: list[list[int]]) -> Any:
        """Read objects into pieces of registered memory; return bytes, or a code < 0, of each."""
        return self._call(self._store.batch_get_into_multi_buffers, names, addresses, sizes)

    def exist(self, names: list[str]) -> list[bool]:
        """Return for each name whether its object exists.

        Raises:
            TierError: the master does not answer.
        """
        codes: list[int] = self._call(self._store.batch_is_exist, names)
        if all(code < 0 for code in codes):
            raise TierError(f"{self.master_text} cannot look up objects (code {codes[0]})")
        return [code == 1 for code in codes]

    def remove(self, names: list[str]) -> None:
        """Drop objects, even while nodes read them: a reader notices by the checksum.

        Raises:
            TierError: the master does not answer.
        """
        codes = self._call(self._store.batch_remove, names, True)  # `force`
        if any(code in MASTER_AWAY for code in codes):
            raise TierError(f"{self.master_text} does not answer; nothing was removed")

    def read_word(self, name: str) -> bytes | None:
        """Return the 8 bytes of a small object.

        None if it is absent, still being written, or longer than 8 bytes.

        Raises:
            TierError: the object cannot be read.
        """
        with self.buffer(8) as (memory, address):
            (nbytes_or_error,) = self.get([name], [[address]], [[8]])
            if nbytes_or_error == 8:
                return bytes(memory[:8])
        if nbytes_or_error in (NOT_FOUND, NOT_READY, BAD_LENGTH):
            return None
        raise TierError(
            f"{self.master_text}: an object of 8 bytes cannot be read (code {nbytes_or_error})"
        )

    def write_word(self, name: str, word: bytes, *, replace: bool) -> None:
        """Write a small object that is never evicted. An existing one stays, unless `replace`.

        Raises:
            TierError: it is not written.
        """
        write = self._store.batch_upsert_from if replace else self._store.batch_put_from
        with self.buffer(8) as (memory, address):
            memory[:8] = word
            (code,) = self._call(write, [name], [address], [8], self._never_evicted)
        if code != DONE:
            raise TierError(
                f"{self.master_text}: an object of 8 bytes cannot be written (code {code});"
                " is a store there, with room?"
            )

    @contextmanager
    def buffer(self, nbytes: int) -> Iterator[tuple[memoryview, int]]:
        """Yield registered memory of at least this size, and its address."""
        with self._lock:
            fitting = [buffer for buffer in self._free_buffers if len(buffer) >= nbytes]
            memory = min(fitting, key=len, default=None)
            if memory is not None:
                self._free_buffers.remove(memory)
        if memory is None:
            rounded = -(-max(nbytes, 1) // _BUFFER_BYTES) * _BUFFER_BYTES
            memory = memoryview(mmap.mmap(-1, rounded))
            self._register(memory)
        try:
            yield memory, address_of(memory)
        finally:
            with self._lock:
                self._free_buffers.append(memory)

    def close(self) -> None:
        """Disconnect; the cluster loses the objects in this node's segment."""
        self._store.close()

    @property
    def master_text(self) -> str:
        """The master, as error texts name it."""
        return f"Mooncake's master {self._master[0]}:{self._master[1]}"

    def _register(self, memory: memoryview) -> None:
        code = self._store.register_buffer(address_of(memory), len(memory))
        if code != DONE:
            raise TierError(
                f"Mooncake cannot register {len(memory)} bytes (code {code}); with RDMA the process"
                " must be allowed to lock them: LimitMEMLOCK=infinity, or ulimit -l unlimited"
            )

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Call the library; all its calls may be repeated.

        The library's connections to a master that has restarted fail at once, one after the other,
        so such calls are repeated.
        """
        for _ in range(_MAX_STALE_CONNECTIONS):
            if self._master_away:
                self._connect(_PROBE_SECONDS)
            start = time.monotonic()
            codes = method(*arguments)
            self._master_away = any(code in MASTER_AWAY for code in codes)
            if not self._master_away or time.monotonic() - start > _AT_ONCE_SECONDS:
                break
        return codes

    def _connect(self, seconds: float) -> str:
        """Connect to the master; return this node's address on the way there."""
        try:
            with socket.create_connection(self._master, timeout=seconds) as connection:
                host: str = connection.getsockname()[0]
                return host
        except OSError as error:
            raise TierError(
                f"{self.master_text} does not answer ({error}); start mooncake_master there,"
                " or correct master="
            ) from error


def aligned_bytes(nbytes: int) -> int:
    """Return the bytes of a piece of a buffer, up to the next piece."""
    return -(-nbytes // _PIECE_ALIGNMENT) * _PIECE_ALIGNMENT


def only_code(codes: Sequence[int]) -> int | None:
    """Return the code with which all calls failed; None if one succeeded or codes differ."""
    return codes[0] if codes and all(code == codes[0] < 0 for code in codes) else None


def _library() -> Any:
    for name, value in _TIMEOUTS.items():
        os.environ.setdefault(name, value)
    try:
        from mooncake import store  # noqa: PLC0415  # large, and starts threads
    except ImportError as error:
        raise TierError(
            f"Mooncake's client cannot be loaded ({error}); it needs {LIBRARIES} of the system,"
            f" and: {INSTALL}"
        ) from error
    return store
