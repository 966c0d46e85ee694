"""`kvd serve`: run the daemon."""

import logging
import resource
import sys
from pathlib import Path

import click

from kvd.cli.options import settings_options, sources
from kvd.daemon.loop import Service
from kvd.errors import ConfigError, KvdError
from kvd.logs.setup import configure
from kvd.version import VERSION

log = logging.getLogger("kvd.cli")


@click.command()
@settings_options
@click.option("--cold", is_flag=True, help="Begin without the chunks of the daemon before.")
@click.option("-v", "--verbose", is_flag=True, help="Log every detail: --log-level debug.")
def serve(*, config: Path | None, cold: bool, verbose: bool, **options: str | None) -> None:
    """Own a pool of host memory and serve it to inference engines until SIGTERM.

    Settings come from the defaults, one TOML file, the environment (KVD_CPU_BYTES and so on)
    and the options here; the later wins.

    \b
    Examples:
      kvd serve --cpu-bytes 64GiB
      kvd serve --runtime-dir /run/kvd --cpu-bytes auto
      kvd serve --config /etc/kvd/kvd.toml
      KVD_CPU_BYTES=64GiB kvd serve
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    if verbose:
        options["log_level"] = "debug"
    try:
        places = sources(config, options)
        loaded = places.load()
    except ConfigError as error:
        raise click.ClickException(str(error)) from error
    settings = loaded.settings
    configure(settings.log_level, settings.log_format, "broker")
    for warning in loaded.warnings:
        log.warning("%s", warning)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # sessions bring descriptors
    try:
        status = Service(loaded, places, f"kvd {VERSION}", cold=cold).run()
    except KvdError as error:
        log.error("%s", error)  # noqa: TRY400  # a sentence with its remedy, no bug to trace
        status = 1
    sys.exit(status)
