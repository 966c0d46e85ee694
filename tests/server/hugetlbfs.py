"""A directory that looks like hugetlbfs, in the process of a test."""

import os
from pathlib import Path

import pytest

from kvd.machine import directories, memory


def hugetlbfs_double(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A directory with three huge pages of 2 MiB, and the one where its pools' other files lie."""
    huge, notes, mounts = tmp_path / "huge", tmp_path / "shm", tmp_path / "mounts"
    huge.mkdir()
    notes.mkdir()
    real = os.statvfs

    def statvfs(path: Path) -> os.statvfs_result:
        fields = list(real(path))
        if Path(path).is_relative_to(huge):
            fields[:5] = [2**21, 2**21, 0, 0, 0]  # no size option: the mount knows nothing
        return os.statvfs_result(fields)

    mounts.write_text(f"tmpfs {tmp_path} tmpfs rw 0 0\nnone {huge} hugetlbfs rw 0 0\n")
    monkeypatch.setattr(os, "statvfs", statvfs)
    monkeypatch.setattr(memory, "_MOUNTS", mounts)
    monkeypatch.setattr(Path, "is_mount", lambda path: path in (huge, tmp_path))
    monkeypatch.setattr(memory, "_huge_pages", lambda page, _: 3 if page == 2**21 else 0)
    monkeypatch.setattr(directories, "METADATA_DIR", notes)
    return huge, notes
