"""`python -m kvd.report`: the HTTP process. Only the broker starts it."""

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

from kvd.logs import configure_child
from kvd.machine.process import die_with_parent, prefer_oom_kill
from kvd_proto.channel import Channel

log = logging.getLogger("kvd.report")
_NICE = 5
_BEAT_SECONDS = 5.0
_CLOCK_SECONDS = 1.0  # the Date header has whole seconds


def main() -> int:
    """Serve until the broker ends; return the exit status."""
    parser = argparse.ArgumentParser(prog="kvd.report", description=__doc__)
    parser.add_argument("--runtime-dir", required=True, type=Path)
    parser.add_argument("--link-fd", required=True, type=int)
    parser.add_argument("--unix-fd", required=True, type=int)
    parser.add_argument("--tcp-fd", type=int)
    parser.add_argument("--host", default="localhost")
    options = parser.parse_args()
    die_with_parent()
    with contextlib.suppress(OSError):  # a sandbox may forbid it
        os.nice(_NICE)  # the data path goes first
    prefer_oom_kill()
    configure_child("http")
    logging.getLogger("uvicorn").setLevel(logging.ERROR)  # no errors of clients
    with contextlib.suppress(EOFError):  # the broker has just ended
        asyncio.run(_serve(options))
    return 0


async def _serve(options: argparse.Namespace) -> None:
    """Serve HTTP, beat to the broker and record samples, until one of these tasks ends."""
    from uvicorn import Config, Server  # noqa: PLC0415  # load large modules after os.nice

    from kvd.report.app import App, HttpListener  # noqa: PLC0415
    from kvd.report.broker_client import BrokerClient  # noqa: PLC0415

    class ServerWithoutSignals(Server):
        """uvicorn without signal handlers: only the broker ends this process.

        So the loop only renews the Date header, and does not check every 0.1 s whether to end.
        """

        async def main_loop(self) -> None:
            while not await self.on_tick(0):  # noqa: ASYNC110  # uvicorn has no event for it
                await asyncio.sleep(_CLOCK_SECONDS)

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    app = App(BrokerClient(options.runtime_dir))
    config = Config(
        app.guarded(options.host),
        http="h11",
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=5,
        h11_max_incomplete_event_size=16 * 1024,
    )
    fds = [options.unix_fd] + ([options.tcp_fd] if options.tcp_fd is not None else [])
    link = Channel(socket.socket(fileno=options.link_fd))
    beating = asyncio.create_task(_beat(link))
    serving = asyncio.create_task(
        ServerWithoutSignals(config).serve([HttpListener(fd) for fd in fds])
    )
    recording = asyncio.create_task(app.record())
    tasks = [beating, serving, recording]
    ended, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in ended:
        task.result()


async def _beat(link: Channel) -> None:
    """Tell the broker every few seconds that this loop turns."""
    while True:
        if link.flush():  # else the broker hangs and has unread beats
            link.send(b".")
        await asyncio.sleep(_BEAT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
