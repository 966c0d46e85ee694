"""Where a run lives: a short folder for sockets, and a small tmpfs of its own for the pool."""

import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

POOL_DIR_BYTES = 24 * 2**20  # room for the largest pool of a run, its ledgers, and little more


@dataclass(frozen=True, slots=True)
class Place:
    """Folders of a run; `own_tmpfs` says whether the pool's may be filled to the brim."""

    folder: Path
    runtime_dir: Path
    pool_dir: Path
    own_tmpfs: bool


@contextmanager
def place() -> Iterator[Place]:
    """A place that is gone with the block; its logs are copied by whoever wants to keep them."""
    folder = Path(tempfile.mkdtemp(prefix="kvd-", dir="/tmp"))  # socket paths are short
    pool_dir = folder / "pool"
    pool_dir.mkdir()
    mounted = _mount(pool_dir)
    if not mounted:
        pool_dir.rmdir()
        pool_dir = Path(tempfile.mkdtemp(prefix="kvd-chaos-", dir="/dev/shm"))
    try:
        yield Place(folder, folder / "run", pool_dir, mounted)
    finally:
        if mounted:
            subprocess.run(["umount", "--lazy", str(pool_dir)], check=False, timeout=30)
        shutil.rmtree(pool_dir, ignore_errors=True)
        shutil.rmtree(folder, ignore_errors=True)


def _mount(where: Path) -> bool:
    """A tmpfs there, where this user may mount one."""
    command = ["mount", "-t", "tmpfs", "-o", f"size={POOL_DIR_BYTES},mode=0755", "tmpfs"]
    try:
        done = subprocess.run([*command, str(where)], capture_output=True, check=False, timeout=30)
    except OSError:
        return False
    return done.returncode == 0
