"""`kvd serve`: run the daemon."""

import logging
import resource
import sys
from pathlib import Path
from typing import Any

import click

from kvd.broker.service import Service
from kvd.errors import KvdError
from kvd.settings import load_settings
from kvd.version import VERSION


@click.command()
@click.option("--runtime-dir", help="Directory for sockets and the lock, such as /run/kvd.")
@click.option("--cpu-bytes", help="Size of the pool, such as 64GiB, or auto (default).")
@click.option(
    "--config",
    type=click.Path(path_type=Path, dir_okay=False),
    help="TOML file with any of the settings; options given here come first.",
)
@click.option("--pool-dir", help="Where the pool's file lies (default /dev/shm).")
@click.option("--policy", type=click.Choice(["lru", "arc"]), help="What is evicted first.")
@click.option("--reuse-threshold", type=int, help="Store a chunk on its n-th offer (default 1).")
@click.option("--host-ratio", type=float, help="With auto: pool per reported GPU KV byte.")
@click.option("--reserve", help="With auto: memory to leave to everybody else (default 2GiB).")
@click.option(
    "--http-listen",
    help="Where health and metrics are served: HOST:PORT (default 127.0.0.1:9330), or off.",
)
@click.option("-v", "--verbose", is_flag=True, help="Log every detail.")
def serve(*, config: Path | None, verbose: bool, **options: Any) -> None:
    """Own a pool of host memory and serve it to inference engines until SIGTERM.

    \b
    Examples:
      kvd serve --runtime-dir /run/kvd --cpu-bytes 64GiB
      kvd serve --runtime-dir /run/kvd --cpu-bytes auto
      kvd serve --config /etc/kvd/kvd.toml
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    logging.basicConfig(
        stream=sys.stderr,
        level=logging.DEBUG if verbose else logging.INFO,
        format="%(asctime)s %(levelname)-7s %(name)s: %(message)s",
    )
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # sessions bring descriptors
    try:
        settings = load_settings(config, options)
        status = Service(settings, f"kvd {VERSION}").run()
    except KvdError as error:
        raise click.ClickException(str(error)) from error
    sys.exit(status)
