"""What an operator may write: ``disk:/DIRECTORY,size=500GiB[,floor=16GiB][,threads=4]``."""

import os
from dataclasses import dataclass
from pathlib import Path

from kvd.errors import ConfigError
from kvd.machine.room import Shortage, written_size
from kvd.tier.contract import Options
from kvd_proto.errors import SizeError
from kvd_proto.sizes import format_size, parse_size

THREADS = 4
MAX_THREADS = 64
_KNOWN = ("size", "floor", "threads")
_FLOOR_PART = 20  # 5 %
_MOST_FLOOR = 32 * 2**30


@dataclass(frozen=True, slots=True)
class DiskOptions:
    """The options of one disk tier.

    Attributes:
        directory: absolute.
        size: bytes of all files.
        floor: bytes that the file system keeps free; None: 5 % of it, at most 32 GiB.
        threads: batches at a time.
    """

    directory: Path
    size: int
    floor: int | None
    threads: int

    @classmethod
    def parse(cls, options: Options) -> "DiskOptions":
        """Read what the operator wrote.

        Raises:
            ConfigError: it names key, value and remedy.
        """
        if not options.target.startswith("/"):
            raise ConfigError(
                f"disk:{options.target}: give an absolute directory, such as disk:/var/lib/kvd"
            )
        directory = Path(os.path.normpath(options.target))
        for key in options.values:
            if key not in _KNOWN:
                raise ConfigError(
                    f"disk:{directory}: {key} is no option of a disk; there are {', '.join(_KNOWN)}"
                )
        if "size" not in options.values:
            raise ConfigError(f"disk:{directory} needs a size, such as size=500GiB")
        size = _size(directory, "size", options.values["size"])
        if not size:
            raise ConfigError(f"disk:{directory}: size=0 keeps nothing; give one, or no tier")
        floor = options.values.get("floor")
        return cls(
            directory,
            size,
            None if floor is None else _size(directory, "floor", floor),
            _threads(directory, options.values.get("threads", str(THREADS))),
        )

    def floor_of(self, filesystem_bytes: int) -> int:
        """Return the bytes that a file system of this size keeps free."""
        if self.floor is not None:
            return self.floor
        return min(filesystem_bytes // _FLOOR_PART, _MOST_FLOOR)

    def shortage(self, filesystem_bytes: int, free: int, held: int) -> Shortage | None:
        """Return why the file system has less room than `size`; None where it has enough.

        Args:
            filesystem_bytes: all of it.
            free: bytes that are free.
            held: bytes that the tier's files take already.
        """
        floor = self.floor_of(filesystem_bytes)
        largest = max(0, free + held - floor)
        if self.size <= largest:
            return None
        return Shortage(
            f"its size of {format_size(self.size)} cannot be reached: of the file system's"
            f" {format_size(filesystem_bytes)}, {format_size(free)} are free and"
            f" {format_size(held)} the tier's own, of which {format_size(floor)} are left to others"
            " (floor)",
            f"give size={written_size(largest)} at most, or make room",
        )


def _size(directory: Path, key: str, value: str) -> int:
    try:
        return parse_size(value)
    except SizeError as error:
        raise ConfigError(f"disk:{directory}: {key}={value}: {error}") from error


def _threads(directory: Path, value: str) -> int:
    if not value.isascii() or not value.isdigit() or not 1 <= int(value) <= MAX_THREADS:
        raise ConfigError(f"disk:{directory}: threads={value} needs 1 to {MAX_THREADS}")
    return int(value)
