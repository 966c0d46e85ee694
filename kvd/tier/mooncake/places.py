"""Where the cluster is, and what this node is in it: ``mooncake:master=HOST:PORT,…``."""

from dataclasses import dataclass

from kvd.errors import ConfigError
from kvd.tier.contract import Options
from kvd_proto.errors import SizeError
from kvd_proto.sizes import parse_size

PROTOCOLS = ("tcp", "rdma")
NO_METADATA_SERVER = "P2PHANDSHAKE"
_KEYS = ("master", "metadata", "protocol", "devices", "segment", "host")


@dataclass(frozen=True, slots=True)
class Places:
    """What an operator wrote.

    Attributes:
        master: host and port of the master's RPC.
        metadata: URL of a metadata server; P2PHANDSHAKE: there is none.
        protocol: how bytes travel.
        devices: RDMA devices, separated by "+"; empty: Mooncake chooses.
        segment_bytes: memory that this node's process gives to the cluster.
        host: the address under which others reach this node; empty: that of the way to the master.
    """

    master: tuple[str, int]
    metadata: str
    protocol: str
    devices: str
    segment_bytes: int
    host: str

    @property
    def master_text(self) -> str:
        """As an operator writes it."""
        return f"{self.master[0]}:{self.master[1]}"


def parse_places(options: Options) -> Places:
    """Look at a tier's options, without any I/O.

    Raises:
        ConfigError: it names key, value and remedy.
    """
    values = options.values
    if options.target:
        raise ConfigError(
            f"mooncake:{options.target}: it has no target; give mooncake:master=HOST:PORT"
        )
    if "size" in values:
        raise ConfigError(
            f"mooncake: size={values['size']}: the cluster's stores decide how much it holds;"
            " leave it out, or give segment=SIZE to let this node contribute"
        )
    if unknown := sorted(values.keys() - set(_KEYS)):
        raise ConfigError(f"mooncake: {unknown[0]} is none of {', '.join(_KEYS)}")
    protocol = values.get("protocol", "tcp")
    if protocol not in PROTOCOLS:
        raise ConfigError(f"mooncake: protocol={protocol} is none of {', '.join(PROTOCOLS)}")
    if "devices" in values and protocol != "rdma":
        raise ConfigError(
            f"mooncake: devices={values['devices']} needs protocol=rdma; without it leave it out"
        )
    return Places(
        master=_master(values.get("master", "")),
        metadata=values.get("metadata", NO_METADATA_SERVER),
        protocol=protocol,
        devices=values.get("devices", ""),
        segment_bytes=_segment(values.get("segment", "0")),
        host=values.get("host", ""),
    )


def _master(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 2**16:
        raise ConfigError(
            f"mooncake: master={text}: it needs HOST:PORT of mooncake_master,"
            " such as master=10.0.0.1:50051"
        )
    return host, int(port)


def _segment(text: str) -> int:
    try:
        return parse_size(text)
    except SizeError as error:
        raise ConfigError(f"mooncake: segment={text}: {error}") from error
