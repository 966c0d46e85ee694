"""`kvd purge`: give back the memory that a stopped daemon has kept."""

import os
from pathlib import Path

import click

from kvd.cli.options import settings_options, sources
from kvd.daemon.kept_pool import KeptPool, area_name
from kvd.daemon.runtime_dir import RuntimeDir
from kvd.errors import ConfigError, KvdError
from kvd_proto.sizes import format_size


@click.command()
@settings_options
def purge(*, config: Path | None, **options: str | None) -> None:
    """Remove the pool that a stopped daemon has left for the next one, and its chunks.

    Settings are found as `kvd serve` finds them; runtime_dir and pool_dir say which pool.
    Refuses while a daemon serves the runtime directory.

    \b
    Examples:
      kvd purge
      kvd purge --runtime-dir /run/kvd --pool-dir /dev/shm
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    try:
        settings = sources(config, options).load().settings
        runtime = RuntimeDir(Path(settings.runtime_dir))
        runtime.lock()
        try:
            _check_owner(Path(settings.pool_dir) / area_name(runtime.path))
            kept = KeptPool.of(settings, runtime.path)
            freed = kept.remove()
            kept.close()
        finally:
            runtime.release()
    except KvdError as error:
        raise click.ClickException(str(error)) from error
    click.echo(f"{format_size(freed)} given back")


def _check_owner(area: Path) -> None:
    """Refuse the pool of another user."""
    owner = area.lstat().st_uid if area.exists() else os.geteuid()
    if owner != os.geteuid():
        raise ConfigError(
            f"{area} belongs to uid {owner}, this is uid {os.geteuid()}; run it as the daemon's"
            " user, such as: runuser -u kvd -- kvd purge"
        )
