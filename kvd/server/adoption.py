"""Adoption: a daemon without a pool takes over the newest unused pool of another runtime directory.

A pool is adopted only if its manifest and its records of resets prove that this daemon would have
been allowed to keep it:

1. The pool passes all checks of a kept pool (`Manifest.objection`), and no process uses it.
2. Its manifest names its runtime directory, and the same clients could connect there.
3. It has the configured size; with `cpu_bytes = auto` every size.
4. Resets by its daemons are known: by the copy of their table beside the pool, and by `kvd.resets`
   if their runtime directory is still here. A ledger is adopted only if its salt is in both. This
   daemon learns both tables before it takes the pool.

Then the pool's directories get this daemon's names. A kill before that leaves the pool to others;
after it the pool is this daemon's own.
"""

import contextlib
import logging
import os
import stat
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import msgspec

from kvd.cache.ledger import HEADER_BYTES, salt_in
from kvd.cache.recovery import ResetTable
from kvd.config.settings import Settings
from kvd.config.values import parse_names
from kvd.errors import LedgerDamaged, PoolError
from kvd.machine.directories import MANIFEST
from kvd.machine.memory import Filesystem
from kvd.machine.pools import (
    LEDGER,
    POOL,
    RESETS,
    PoolClaim,
    UnusedPool,
    unused_pools,
)
from kvd.server.reset_file import ResetFile, read_resets
from kvd.server.runtime_dir import RESETS_FILE
from kvd.server.state_files import Manifest, PoolFiles

log = logging.getLogger("kvd.daemon")


def access_digest(settings: Settings, runtime_dir: Path) -> str:
    """Return a digest of what decides who may connect, and whose chunks they find.

    These are the settings, and owner, group and mode of the runtime directory and of each directory
    above it that not every user may enter.
    """
    directories = [runtime_dir.stat(), *(parent.stat() for parent in runtime_dir.parents)]
    closed = [
        (status.st_uid, status.st_gid, stat.S_IMODE(status.st_mode))
        for status in directories
        if not status.st_mode & stat.S_IXOTH
    ]
    names = [sorted(parse_names(names)) for names in (settings.allow_users, settings.allow_groups)]
    text = repr((names, settings.share_between_users, closed))
    return blake2b(text.encode(), digest_size=8).hexdigest()


def adopt_newest(
    files: PoolFiles, runtime_dir: Path, resets: ResetFile, access: str, cpu_bytes: int | None
) -> None:
    """Move the newest unused pool that may be used into `files`; log why newer ones are left.

    Args:
        files: of this daemon, without a pool.
        runtime_dir: of this daemon.
        resets: of this daemon.
        access: `access_digest` of this daemon.
        cpu_bytes: the configured size; None for `auto`.
    """
    for pool in unused_pools(files.directory.parent, runtime_dir):
        try:
            with PoolClaim(pool.directory) as claim:
                metadata_dir = _check_manifest(claim.pool, access, cpu_bytes)
                tables = _reset_tables(claim.pool, metadata_dir)
                for ledger in _outdated_ledgers(metadata_dir, tables):
                    log.warning("%s: its namespace was reset since: it is not adopted", ledger)
                    ledger.unlink()
                for table in tables:
                    resets.learn(table)
                files.adopt(claim)
        except (PoolError, OSError) as error:
            log.info("an unused pool is not adopted, %s: %s", error, pool)
        else:
            log.info("adopted an unused pool: %s", pool)
            return


def _check_manifest(pool: UnusedPool, access: str, cpu_bytes: int | None) -> Path:
    """Return the directory of the pool's manifest if this daemon may use the pool.

    Raises:
        PoolError: it may not; the text has the reason.
        OSError: the manifest cannot be read.
    """
    if pool.uid != os.geteuid():
        raise PoolError(f"it belongs to uid {pool.uid}")
    if pool.metadata_dir is None or pool.runtime_dir is None:
        raise PoolError("no manifest names its runtime directory")
    try:
        manifest = Manifest.read(pool.metadata_dir / MANIFEST)
    except msgspec.DecodeError as error:
        raise PoolError(f"its manifest cannot be read ({error})") from error
    if manifest is None:
        raise PoolError("its manifest is empty")
    reason = manifest.objection(pool.directory / POOL, Filesystem.of(pool.directory.parent))
    if reason:
        raise PoolError(reason)
    if manifest.access != access:
        raise PoolError(
            "other clients could connect to its daemon (allow_users, allow_groups,"
            " share_between_users, or owner, group and mode of its runtime directory)"
        )
    if cpu_bytes not in {None, manifest.cpu_bytes}:
        raise PoolError("it has another cpu_bytes")
    return pool.metadata_dir


def _reset_tables(pool: UnusedPool, metadata_dir: Path) -> list[ResetTable]:
    """Return the tables of resets that the pool's daemons have left.

    Raises:
        PoolError: a table is damaged, or none lies beside the pool.
        OSError: a table cannot be read.
    """
    try:
        tables = [read_resets(metadata_dir / RESETS)]
        if pool.runtime_dir is not None:
            with contextlib.suppress(FileNotFoundError):
                tables.append(read_resets(pool.runtime_dir / RESETS_FILE))
    except FileNotFoundError as error:
        raise PoolError("later resets are not recorded beside it") from error
    except LedgerDamaged as error:
        raise PoolError(f"a table of resets is not valid ({error})") from error
    return tables


def _outdated_ledgers(metadata_dir: Path, tables: Sequence[ResetTable]) -> list[Path]:
    """Return the ledgers whose namespaces were reset since.

    Raises:
        PoolError: all are, or there is none.
        OSError: a ledger cannot be read.
    """
    outdated, ledgers = [], list(metadata_dir.glob(f"*{LEDGER}"))
    for ledger in ledgers:
        with ledger.open("rb") as file:
            salt = salt_in(file.read(HEADER_BYTES))
        if any(table.salt_of(ledger.name.removesuffix(LEDGER)) != salt for table in tables):
            outdated.append(ledger)
    if len(outdated) == len(ledgers):
        raise PoolError("it has no chunks, or only such as were reset")
    return outdated
