"""`kvd serve`: run the daemon; `kvd purge`: free the pool that a stopped daemon has left."""

import logging
import os
import sys
from pathlib import Path

import click

from kvd.cli.options import settings_options, sources
from kvd.errors import AddressUnavailable, AlreadyRunning, ConfigError, KvdError
from kvd.logs import configure
from kvd.machine.process import raise_descriptor_limit
from kvd.server import serve as run_daemon
from kvd.server.runtime_dir import RuntimeDir
from kvd.version import VERSION
from kvd_proto.text import format_size

log = logging.getLogger("kvd.cli")


@click.command()
@settings_options
@click.option("--cold", is_flag=True, help="Begin without the chunks of the daemon before.")
@click.option("-v", "--verbose", is_flag=True, help="Log every detail: --log-level debug.")
def serve(*, config: Path | None, cold: bool, verbose: bool, **options: str | None) -> None:
    """Own a pool of host memory and serve it to inference engines until SIGTERM.

    Settings come from the defaults, one TOML file, the environment (KVD_CPU_BYTES and so on)
    and the options here; the later wins. The exit status is 0 after SIGTERM, 78 where a setting
    cannot work, and 1 where it cannot start for a reason that may pass.

    \b
    Examples:
      kvd serve --cpu-bytes 64GiB
      kvd serve --runtime-dir /run/kvd --cpu-bytes auto
      kvd serve --config /etc/kvd/kvd.toml
      KVD_CPU_BYTES=64GiB kvd serve
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    if verbose:
        options["log_level"] = "debug"
    setting_sources = sources(config, options)
    try:
        loaded = setting_sources.load()
        settings = loaded.settings
        configure(settings.log_level, settings.log_format, "broker")
        raise_descriptor_limit()
        status = run_daemon(loaded, setting_sources, f"kvd {VERSION}", cold=cold)
    except KvdError as error:
        if not log.hasHandlers():  # the log's settings are invalid
            configure("error", setting_sources.log_format(), "broker")
        for line in str(error).splitlines():
            log.error("%s", line)  # noqa: TRY400  # no bug: no traceback
        passing = isinstance(error, AddressUnavailable) or not isinstance(error, ConfigError)
        status = 1 if passing else os.EX_CONFIG
    sys.exit(status)


@click.command()
@settings_options
@click.option(
    "--unused",
    is_flag=True,
    help="Remove the pools in pool_dir of all other runtime directories that no process uses.",
)
def purge(*, config: Path | None, unused: bool, **options: str | None) -> None:
    """Remove the pool that a stopped daemon has left for the next one, and its chunks.

    Settings are found as `kvd serve` finds them; runtime_dir and pool_dir say which pool.
    Refuses while a daemon uses that pool.

    With --unused the pool of runtime_dir is left. Those of all other runtime directories are
    removed, also those that stopped daemons would use again, and what is left is named.

    \b
    Examples:
      kvd purge
      kvd purge --runtime-dir /run/kvd --pool-dir /dev/shm
      kvd purge --unused
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    settings = sources(config, options).load().settings
    runtime = RuntimeDir(Path(settings.runtime_dir))
    pool_dir = Path(settings.pool_dir).absolute()
    freed_bytes = _purge_unused(runtime, pool_dir) if unused else _purge_own(runtime, pool_dir)
    click.echo(f"{format_size(freed_bytes)} given back")


def _purge_unused(runtime: RuntimeDir, pool_dir: Path) -> int:
    """Remove the unused pools of other runtime directories; return the bytes freed."""
    from kvd.machine.directories import check_pool_dir  # noqa: PLC0415  # as of _purge_own
    from kvd.machine.pools import remove_unused_pools  # noqa: PLC0415

    check_pool_dir(pool_dir)
    freed_bytes = 0
    for nbytes, text in remove_unused_pools(pool_dir, runtime.path):
        click.echo(text)
        freed_bytes += nbytes
    return freed_bytes


def _purge_own(runtime: RuntimeDir, pool_dir: Path) -> int:
    """Remove the pool of the runtime directory; return the bytes freed."""
    from kvd.machine.memory import pool_directory_name  # noqa: PLC0415
    from kvd.machine.pools import purge_command  # noqa: PLC0415
    from kvd.server.persistent_pool import PersistentPool  # noqa: PLC0415  # serve imports it later
    from kvd.server.state_files import last_pool_dir  # noqa: PLC0415

    own_directory = pool_dir / pool_directory_name(runtime.path)
    try:
        runtime.lock()
    except AlreadyRunning:  # that daemon may use another pool_dir, and the one given may be free
        latest_pool_dir = last_pool_dir(runtime.path)
        if latest_pool_dir is None or latest_pool_dir.resolve() == pool_dir.resolve():
            raise
    try:
        owner = own_directory.lstat().st_uid if own_directory.exists() else os.geteuid()
        if owner != os.geteuid():
            command = purge_command(runtime.path, pool_dir)
            raise click.ClickException(
                f"{own_directory} belongs to uid {owner}, this is uid {os.geteuid()}; run it as"
                f" the daemon's user, such as: runuser -u kvd -- {command}"
            )
        # Raises AlreadyRunning if a daemon has this pool.
        pool = PersistentPool(pool_dir, runtime.path, persistent=False)
        freed_bytes = pool.remove()
        pool.close()
    finally:
        runtime.release()
    return freed_bytes
