"""Filesystems without room."""

import errno
from pathlib import Path


def fill_up(place: Path) -> Path:
    """Take all that is left of a small filesystem; the file that has it."""
    hog = place / "hog"
    with hog.open("wb", buffering=0) as file:
        for size in (2**20, 4096):
            try:
                while True:
                    file.write(bytes(size))
            except OSError as error:
                assert error.errno == errno.ENOSPC  # noqa: PT017  # what is meant to happen
    return hog
