"""What a request costs: its round trip, and the broker's processor time, beside two echoes.

The echoes send back what comes: one is libzmq's ROUTER, the other the daemon's own end
(`kvd/wire/server.py`). Requests are made by hand, so that no client library is in the figures.
All kinds take turns in one run: so many requests one at a time, then so many with several under
way. Processor time is that of the server's whole process, with libzmq's thread.

`--before FOLDER` also asks the daemon of another working tree, which has this file.
`python request_cost.py serve NAME PATH` is an echo, `… ask NAME` asks it, or a daemon: it prints
its kinds, and answers every line of standard input.
"""

import argparse
import json
import os
import platform
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from harness import MIB, SECONDS, Daemon, end, median
from raw_session import RawEngine
from request_kinds import KEYS, Kind, kinds_of, kinds_when_full
from rich.console import Console
from rich.table import Table

from kvd.wire.server import Server

OUT = Path(__file__).parent / "out" / "requests.json"
ECHOES = ("pyzmq", "server")
ALONE, MANY, UNDER_WAY = 500, 1500, 32
ROUNDS = 9
PAGE, SLOTS = 4096, 65536
BLOCKS = 1 + KEYS * (ALONE + MANY)  # one for each chunk of a round

Figures = dict[str, float]


# ------------------------------------------------------------------- servers


def serve(name: str, path: str) -> None:
    """Send back every message, until killed."""
    if name == "pyzmq":
        router = zmq.Context().socket(zmq.ROUTER)
        router.bind(f"ipc://{path}")
        while True:
            router.send_multipart(router.recv_multipart())
    server = Server(Path(path), max_bytes=MIB)
    poll = select.poll()
    poll.register(server.fileno(), select.POLLIN)
    while True:
        if not server.pending:
            poll.poll()
        server.handle_events()
        while (received := server.next_message()) is not None:
            client, frame, _ = received
            server.send(client, frame)


class Echoed(Kind):
    """A message as large as a request for eight slots."""

    name = "echo"

    def next(self) -> bytes:
        """It is the same every time."""
        return bytes(380)


# ------------------------------------------------------------------- clients


class Asked:
    """A server, and what it is asked."""

    def __init__(self, pid: int, socket: Any, kinds: list[Kind]) -> None:
        self._clock = (~pid << 3) | 2  # clock_getcpuclockid(3)
        self._socket = socket
        self.kinds = {kind.name: kind for kind in kinds}

    def one_at_a_time(self, kind: Kind, count: int) -> Figures:
        """Each request waits for the reply to the one before."""
        took = []
        socket = self._socket
        cpu = time.clock_gettime(self._clock)
        for _ in range(count):
            frame = kind.next()
            started = time.perf_counter()
            socket.send(frame)
            reply = socket.recv()
            took.append(time.perf_counter() - started)
            kind.took(reply)
        cpu = time.clock_gettime(self._clock) - cpu
        return {
            "p50_us": float(np.percentile(took, 50)) * 1e6,
            "p99_us": float(np.percentile(took, 99)) * 1e6,
            "cpu_us": cpu / count * 1e6,
        }

    def pipelined(self, kind: Kind, count: int) -> Figures:
        """`UNDER_WAY` requests at a time."""
        socket = self._socket
        cpu, started, sent = time.clock_gettime(self._clock), time.perf_counter(), 0
        for answered in range(count):
            while sent < min(count, answered + UNDER_WAY):
                socket.send(kind.next())
                sent += 1
            kind.took(socket.recv())
        seconds = time.perf_counter() - started
        cpu = time.clock_gettime(self._clock) - cpu
        return {"per_second": count / seconds, "cpu_us": cpu / count * 1e6}

    def run(self) -> None:
        """Print the kinds; answer each line, the name of one, with its figures."""
        print(json.dumps(list(self.kinds)), flush=True)
        for line in sys.stdin:
            kind = self.kinds[line.strip()]
            kind.begin(1)
            alone = self.one_at_a_time(kind, ALONE)
            kind.begin(UNDER_WAY)
            many = self.pipelined(kind, MANY)
            kind.settle()
            figures = alone | {f"pipelined_{name}": value for name, value in many.items()}
            print(json.dumps(figures), flush=True)


def ask(name: str) -> None:
    """Ask one server, as standard input says."""
    context: zmq.Context[Any] = zmq.Context()
    with serving(name) as (runtime_dir, pid):
        if name in ECHOES:
            socket = context.socket(zmq.DEALER)
            socket.connect(f"ipc://{runtime_dir / 'broker.sock'}")
            socket.send(b"")  # it is connected when this comes back
            if not socket.poll(int(SECONDS * 1e3)):
                raise RuntimeError(f"the echo {name} does not answer")
            socket.recv()
            Asked(pid, socket, [Echoed()]).run()
        else:
            with RawEngine(context, runtime_dir, page=PAGE, num_blocks=BLOCKS) as engine:
                kinds = kinds_when_full(engine, SLOTS) if name == "full" else kinds_of(engine)
                Asked(pid, engine.scheduler.socket, kinds).run()
    context.destroy(0)


@contextmanager
def serving(name: str) -> Iterator[tuple[Path, int]]:
    """An echo or a daemon: its runtime directory and its pid."""
    if name not in ECHOES:
        with Daemon(SLOTS * PAGE) as daemon:
            yield daemon.runtime_dir, int(daemon.status()["pid"])
        return
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder)
        command = [sys.executable, __file__, "serve", name, str(place / "broker.sock")]
        process = subprocess.Popen(command)
        try:
            yield place, process.pid
        finally:
            end(process)


# ----------------------------------------------------------------- the run


class Turns:
    """A process that asks one server, a kind after the other."""

    def __init__(self, label: str, name: str, tree: Path | None = None) -> None:
        python, script = sys.executable, __file__
        if tree is not None:
            python = str(tree / ".venv" / "bin" / "python")
            script = str(tree / "bench" / Path(__file__).name)
        self.label = label
        self._process = subprocess.Popen(
            [python, script, "ask", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=tree,  # python -m looks here first
        )
        self.kinds: list[str] = self._read()

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(f"the process that asks {self.label} has ended")
        return json.loads(line)

    def ask(self, kind: str) -> Figures:
        """One turn."""
        assert self._process.stdin is not None
        self._process.stdin.write(kind + "\n")
        self._process.stdin.flush()
        figures: Figures = self._read()
        return figures

    def close(self) -> None:
        """End it, and its server."""
        self._process.communicate()


def measure(before: Path | None, rounds: int) -> dict[str, Figures]:
    """Figures by label and kind: medians of the rounds, in which all take turns.

    `cpu_ratio` is to the processor time of the echo `pyzmq` in the same round.
    """
    turns = [Turns(name, name) for name in ECHOES]
    if before is not None:
        turns += [Turns("before", "daemon", before), Turns("before", "full", before)]
    turns += [Turns("kvd", "daemon"), Turns("kvd", "full")]
    series: dict[str, list[Figures]] = {}
    try:
        for number in range(rounds + 1):
            floor: Figures = {}
            for turn in turns:
                for kind in turn.kinds:
                    figures = turn.ask(kind)
                    floor = floor or figures
                    for name in ("cpu_us", "pipelined_cpu_us"):
                        figures[name.replace("us", "ratio")] = figures[name] / floor[name]
                    if number:  # the first round warms up
                        series.setdefault(f"{turn.label}: {kind}", []).append(figures)
    finally:
        for turn in turns:
            turn.close()
    return {
        what: {name: round(median(each[name] for each in all_rounds), 2) for name in all_rounds[0]}
        for what, all_rounds in series.items()
    }


def show(results: dict[str, Figures], console: Console) -> None:
    """Print the table."""
    title = f"requests, {os.cpu_count()} CPUs, Python {platform.python_version()}"
    columns = ("p50 µs", "p99 µs", "processor µs", "of pyzmq's echo")
    table = Table("kind", *columns, "pipelined /s", *columns[2:], title=title)
    for column in table.columns[1:]:
        column.justify = "right"
    for what, figures in results.items():
        table.add_row(
            what,
            f"{figures['p50_us']:,.0f}",
            f"{figures['p99_us']:,.0f}",
            f"{figures['cpu_us']:,.1f}",
            f"{figures['cpu_ratio']:.2f}",
            f"{figures['pipelined_per_second']:,.0f}",
            f"{figures['pipelined_cpu_us']:,.1f}",
            f"{figures['pipelined_cpu_ratio']:.2f}",
        )
    console.print(table)


def main() -> None:
    """Run all, or one part."""
    if sys.argv[1:2] == ["serve"]:
        serve(*sys.argv[2:])
    elif sys.argv[1:2] == ["ask"]:
        ask(*sys.argv[2:])
    else:
        parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
        parser.add_argument("--before", type=Path, metavar="FOLDER")
        parser.add_argument("--rounds", type=int, default=ROUNDS)
        options = parser.parse_args()
        console = Console()
        with console.status("measuring"):
            results = measure(options.before, options.rounds)
        show(results, console)
        OUT.parent.mkdir(parents=True, exist_ok=True)
        OUT.write_text(json.dumps(results, indent=2) + "\n")
        console.print(f"written to {OUT}")


if __name__ == "__main__":
    main()
