"""What was measured of a device, kept for the lanes that follow.

The file lies in the daemon's runtime directory. What others may have put there is neither followed
nor believed.
"""

import logging
import os
import stat
from pathlib import Path

import msgspec

from kvd.lane.devices.cuda.copier import Thresholds
from kvd.lane.devices.device import Direction

_log = logging.getLogger(__name__)

MOST_BYTES = 2**16


class Identity(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Of what a measurement is: it says nothing of anything else.

    kvd: its version.
    driver: CUDA version of the driver, 1000 * major + 10 * minor.
    device: with its UUID, as a registration has it.
    model: what its maker calls it.
    ways: to copy, of those that were compared.
    """

    kvd: str
    driver: int
    device: str
    model: str
    ways: str


class Calibration(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is fast.

    below: see Thresholds; empty where the kernel was not measured.
    any_order: loads are faster when the pool may be read in any order.
    """

    identity: Identity
    below: dict[Direction, list[int]]
    any_order: bool

    @property
    def thresholds(self) -> Thresholds:
        """As the copier takes them."""
        return Thresholds(self.below)


def path_in(folder: Path, device: str) -> Path:
    """Where a device's file lies."""
    return folder / f"calibration-{device.replace(':', '-')}.json"


def load(path: Path, identity: Identity) -> Calibration | None:
    """What was measured of just this, or None."""
    try:
        data = _read(path)
    except FileNotFoundError:
        return None
    except OSError as error:
        _log.warning("%s cannot be read (%s): what is fast is measured again", path, error)
        return None
    try:
        kept = msgspec.json.decode(data, type=Calibration)
    except msgspec.DecodeError as error:
        _log.warning("%s is not understood (%s): what is fast is measured again", path, error)
        return None
    if not _is_of(kept, identity):
        _log.info(
            "%s is of another device, driver, kvd or way to copy: what is fast is measured again",
            path,
        )
        return None
    return kept


def _is_of(kept: Calibration, identity: Identity) -> bool:
    return kept.identity == identity


def save(path: Path, calibration: Calibration) -> None:
    """Keep it, whole or not at all; without room for it the next lane measures again."""
    fresh = path.with_suffix(f".{os.getpid()}")
    try:
        fresh.unlink(missing_ok=True)
        # Made anew, so that no link is followed.
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o640)
        with os.fdopen(fd, "wb") as file:
            file.write(msgspec.json.format(msgspec.json.encode(calibration)))
        fresh.replace(path)
    except OSError as error:
        _log.warning("%s cannot be written (%s): the next lane measures again", path, error)


def _read(path: Path) -> bytes:
    """What this user has written there.

    Raises:
        OSError: it cannot be read, or is somebody else's.
    """
    fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(fd, "rb") as file:
        about = os.fstat(fd)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != os.geteuid():
            raise PermissionError(f"it is no file of user {os.geteuid()}")
        return file.read(MOST_BYTES)
