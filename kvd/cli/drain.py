"""`kvd drain` and `kvd resume`: no new stores for a while."""

import sys
import time
from pathlib import Path
from typing import Any

import click

from kvd.cli.asking import control, duration
from kvd.cli.options import runtime_dir_option
from kvd.wire.tool import Control
from kvd_proto.messages import Drain, Drained, Resume, Resumed, Status, StatusReport

_POLL_SECONDS = 0.1


@click.command()
@runtime_dir_option
@click.option(
    "--wait",
    callback=duration,
    default="0",
    metavar="DURATION",
    help="Return when nothing is in flight, or fail after this long, such as 30s.",
)
def drain(*, runtime_dir: Path, wait: float) -> None:
    """Take no new stores until `kvd resume`; the daemon is then not ready.

    Engines notice nothing but that their stores are refused. Stores that have
    begun are finished. Loads are served as before, also new ones: what is cached
    is of use until the daemon stops. With --wait the command returns when every
    store and every load that had begun before the drain has ended; exit status 1
    says that some had not in time, and which. The drain lasts, whatever engines
    come and go, until `kvd resume` or the end of the daemon.

    \b
    Examples:
      kvd drain
      kvd drain --wait 30s && systemctl restart kvd
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    end = time.monotonic() + wait
    with control(runtime_dir) as daemon:
        reply = daemon.ask(Drain(), Drained)
        stores, leases = reply.stores, reply.leases
        while (stores or leases) and time.monotonic() < end:
            time.sleep(_POLL_SECONDS)
            stores, leases = _in_flight(daemon)
    print(f"drained: no new stores; {_words(stores, leases)}")
    sys.exit(1 if wait and (stores or leases) else 0)


def _in_flight(daemon: Control) -> tuple[int, int]:
    report: dict[str, Any] | None = daemon.ask(Status(), StatusReport).status["drain"]
    if report is None:
        raise click.ClickException("somebody has resumed the daemon meanwhile; its log says who")
    return report["stores_in_flight"], report["leases_in_flight"]


def _words(stores: int, leases: int) -> str:
    if not stores and not leases:
        return "nothing is in flight"
    return f"in flight: {stores} chunks being written, {leases} leases of loads"


@click.command()
@runtime_dir_option
def resume(*, runtime_dir: Path) -> None:
    """Take stores again after `kvd drain`.

    A daemon that stops because of SIGTERM does not come back by this.

    \b
    Examples:
      kvd resume
      kvd resume --runtime-dir /run/kvd && kvd status --wait 10
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    with control(runtime_dir) as daemon:
        reply = daemon.ask(Resume(), Resumed)
    print("resumed: stores are taken" if reply.was_draining else "stores are taken as before")
