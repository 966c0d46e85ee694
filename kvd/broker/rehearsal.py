"""What a daemon can try before it takes over from the one that serves.

Nothing here touches that one's files or sockets. What is wrong is found while the old
daemon serves undisturbed; what the new one will find of its chunks is said beforehand.
"""

import logging
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from kvd.broker.filesystem import Filesystem
from kvd.broker.http import bind_tcp
from kvd.broker.keep import MANIFEST, POOL, area_name, notes_area
from kvd.broker.manifest import objection, read
from kvd.broker.memory import lack_of_room
from kvd.broker.places import check_place
from kvd.errors import ConfigError, HandoverFailed, PoolError
from kvd.listen import parse_listen
from kvd.settings import Settings
from kvd_proto.sizes import format_size

log = logging.getLogger("kvd.broker")

_CHILDREN = ("kvd.lane.__main__", "kvd.http.__main__", "kvd.http.app", "uvicorn")
_START_SECONDS = 60.0


def rehearse(settings: Settings, runtime_dir: Path) -> None:
    """Try what needs nothing of the daemon that serves.

    Raises:
        ConfigError: the pool's directory cannot be used.
        PoolError: the pool does not fit.
        HandoverFailed: the processes that this installation starts do not start.
    """
    place = Place.of(settings, runtime_dir)
    if settings.pool_bytes is not None:
        problem = lack_of_room(place.filesystem, settings.pool_bytes, place.held_bytes)
        if problem:
            raise PoolError(problem)
    _start_children()


def rehearse_address(settings: Settings, theirs: dict[str, Any]) -> None:
    """Bind HTTP's address, where it is none that the daemon that serves gives back.

    Args:
        settings: of the new daemon.
        theirs: settings of the daemon that serves, by key.

    Raises:
        ConfigError: the address cannot be had.
    """
    wanted, held = parse_listen(settings.http_listen), parse_listen(str(theirs["http_listen"]))
    if wanted is not None and (held is None or wanted.port != held.port):
        listener: socket.socket = bind_tcp(wanted)
        listener.close()


def outlook(settings: Settings, runtime_dir: Path, theirs: dict[str, Any], *, cold: bool) -> str:
    """Why the new daemon's cache will start empty, in a sentence; empty where it will not.

    Args:
        settings: of the new daemon.
        runtime_dir: as an absolute path.
        theirs: settings of the daemon that serves, by key.
        cold: the new daemon is told to start empty.
    """
    if cold:
        return "--cold"
    if settings.keep_pool != "yes":
        return "keep_pool = no"
    if settings.pool_dir != theirs["pool_dir"]:
        return (
            f"pool_dir is {settings.pool_dir}, that of the daemon that serves"
            f" {theirs['pool_dir']}, where its memory stays until: kvd purge --runtime-dir"
            f" {runtime_dir} --pool-dir {theirs['pool_dir']}"
        )
    return _objection(settings, Place.of(settings, runtime_dir))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a daemon with these settings finds what is kept."""

    filesystem: Filesystem
    area: Path
    notes: Path

    @classmethod
    def of(cls, settings: Settings, runtime_dir: Path) -> "Place":
        """Look at the directory.

        Raises:
            ConfigError: it is none, or this user may not write there, or every user may.
        """
        pool_dir = Path(settings.pool_dir)
        if not pool_dir.is_dir():
            raise ConfigError(
                f"pool_dir = {pool_dir}: no such directory; use a tmpfs such as /dev/shm"
            )
        check_place("pool_dir", pool_dir)
        area = pool_dir / area_name(runtime_dir)
        if not os.access(area if area.exists() else pool_dir, os.W_OK | os.X_OK):
            raise ConfigError(
                f"pool_dir = {pool_dir}: Permission denied; choose a directory that this user may"
                " write, with --pool-dir"
            )
        filesystem = Filesystem.of(pool_dir)
        return cls(filesystem, area, notes_area(runtime_dir, pool_dir, filesystem))

    @property
    def pool_file(self) -> Path:
        """The pool."""
        return self.area / POOL

    @property
    def manifest_file(self) -> Path:
        """What says which pool it is."""
        return self.notes / MANIFEST

    @property
    def held_bytes(self) -> int:
        """Memory that the pool takes now."""
        try:
            return self.pool_file.lstat().st_blocks * 512
        except OSError:
            return 0


def _objection(settings: Settings, place: Place) -> str:
    try:
        manifest = read(place.manifest_file)
    except (OSError, msgspec.DecodeError) as error:
        return f"no pool can be read in {place.manifest_file.parent} ({error})"
    wanted = settings.pool_bytes
    if wanted is not None and manifest.cpu_bytes != wanted:
        return (
            f"the pool has {format_size(manifest.cpu_bytes)}, {format_size(wanted)} are wanted:"
            " it is given up when the new one is there"
        )
    return objection(manifest, place.pool_file)


def _start_children() -> None:
    """Load what lanes and HTTP are made of, in the way in which they are started."""
    program = f"import {', '.join(_CHILDREN)}"
    try:
        done = subprocess.run(
            [sys.executable, "-c", program],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            timeout=_START_SECONDS,
        )
        last = done.stderr.strip().rpartition("\n")[2]
        problem = (last or f"exit status {done.returncode}") if done.returncode else ""
    except (OSError, subprocess.TimeoutExpired) as error:
        problem = str(error)
    if problem:
        raise HandoverFailed(
            f"this installation cannot start its processes ({problem}); the daemon that serves is"
            " left as it is: repair the installation, then try again"
        )
