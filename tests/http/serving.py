"""Daemons that serve HTTP, clients of it, and their scrapes, parsed."""

import re
import socket
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeAlias

import httpx
import uvicorn
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from kvd.report.app import App
from kvd.report.broker_client import BrokerClient
from kvd_proto.messages import Message, Ping, Pong, StatusReport
from tests.daemon.serving import Daemon
from tests.waiting import PATIENCE, eventually

SECONDS = 30.0
# How long the broker may take to answer a probe, in tests that are not about that.
PATIENT = "timeout=30"


class Asked(BrokerClient):
    """The connection to a broker that gives this report, while `answers` is set."""

    def __init__(self, status: dict[str, Any]) -> None:
        super().__init__(Path("/run/kvd"))
        self.status = status
        self.answers = threading.Event()
        self.asked: list[Message] = []

    def _request_blocking(self, message: Message, reply_type: type[Message]) -> Message:
        del reply_type
        self.asked.append(message)
        assert self.answers.wait(PATIENCE)
        return Pong(pid=1) if isinstance(message, Ping) else StatusReport(status=self.status)


@contextmanager
def served(status: dict[str, Any], port: int = 0) -> Iterator[tuple[Asked, int]]:
    """What asks a broker that gives this report, over HTTP on a port: both."""
    asked = Asked(status)
    asked.answers.set()
    config = uvicorn.Config(App(asked).guarded("127.0.0.1"), log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    with socket.create_server(("127.0.0.1", port)) as listener:
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        try:
            yield asked, listener.getsockname()[1]
        finally:
            server.force_exit = server.should_exit = True  # pages watch as long as they are open
            thread.join(PATIENCE)


def port_of(daemon: Daemon) -> int:
    """The TCP port that the kernel chose, from the log."""
    said = daemon.wait_log("http://127.0.0.1:").split("http://127.0.0.1:")[1]
    return int(re.split(r"\D", said, maxsplit=1)[0])


@contextmanager
def over_unix(daemon: Daemon) -> Iterator[httpx.Client]:
    """A client on the Unix socket."""
    transport = httpx.HTTPTransport(uds=str(daemon.runtime_dir / "http.sock"))
    with httpx.Client(transport=transport, base_url="http://kvd", timeout=SECONDS) as client:
        yield client


@contextmanager
def over_tcp(daemon: Daemon) -> Iterator[httpx.Client]:
    """A client on the TCP port; no proxy stands between them."""
    url = f"http://127.0.0.1:{port_of(daemon)}"
    with httpx.Client(base_url=url, timeout=SECONDS, trust_env=False) as client:
        yield client


def report_of(client: httpx.Client) -> dict[str, Any]:
    """/status, as soon as the broker answers in time."""
    answer = eventually(lambda: client.get("/status"), lambda answer: answer.status_code == 200)
    report: dict[str, Any] = answer.json()
    return report


def idle_connection(daemon: Daemon, receive_buffer: int = 0) -> socket.socket:
    """A connection on which nothing is sent; its buffer for answers is small if asked."""
    client = socket.socket()
    if receive_buffer:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    client.settimeout(SECONDS)
    client.connect(("127.0.0.1", port_of(daemon)))
    return client


Samples: TypeAlias = dict[tuple[str, tuple[tuple[str, str], ...]], float]


class Scrape:
    """The samples of one answer by name and labels, and the type of each family."""

    def __init__(self, text: str) -> None:
        self.families: list[Metric] = list(text_string_to_metric_families(text))
        self.samples: Samples = {}
        for family in self.families:
            for sample in family.samples:
                where = (sample.name, tuple(sorted(sample.labels.items())))
                assert where not in self.samples, f"{where} twice"
                self.samples[where] = sample.value

    def get(self, name: str, **labels: str) -> float:
        """One sample."""
        return self.samples[name, tuple(sorted(labels.items()))]

    def total(self, name: str, **labels: str) -> float:
        """The sum over the samples that have these labels."""
        selected = set(labels.items())
        return sum(
            v for (n, where), v in self.samples.items() if n == name and selected <= {*where}
        )

    def growing(self) -> Samples:
        """Everything that must never fall while the daemon lives."""
        kinds = {"counter", "histogram"}
        names = {s.name for family in self.families if family.type in kinds for s in family.samples}
        return {where: value for where, value in self.samples.items() if where[0] in names}

    def check(self) -> None:
        """What holds at every moment: totals are those of the parts, histograms well formed."""
        totals = ("store_answered_chunks", "load_answered_chunks", "evicted_chunks")
        for total in totals:
            whole = self.total(f"kvd_{total}_total")
            assert whole == self.total(f"kvd_namespace_{total}_total")
        accepted = self.get("kvd_store_answered_chunks_total", answer="accepted")
        ended = self.get("kvd_stored_chunks_total") + self.get("kvd_store_dropped_chunks_total")
        assert accepted == ended + self.total("kvd_namespace_chunks", state="writing")
        for family in self.families:
            if family.type != "histogram":
                continue
            series = defaultdict(list)
            for sample in family.samples:
                if sample.name.endswith("_bucket"):
                    labels = {k: v for k, v in sample.labels.items() if k != "le"}
                    series[tuple(sorted(labels.items()))].append(sample)
            for where, buckets in series.items():
                bounds = [float(sample.labels["le"]) for sample in buckets]
                counts = [sample.value for sample in buckets]
                assert bounds == sorted(bounds)
                assert bounds[-1] == float("inf")
                assert counts == sorted(counts)
                assert counts[-1] == self.samples[f"{family.name}_count", where]


def scrape(client: httpx.Client) -> Scrape:
    """Ask until the broker has had its say; a scrape says by `kvd_up` whether it has."""
    return eventually(lambda: _scrape(client), lambda one: one.get("kvd_up") == 1)


def _scrape(client: httpx.Client) -> Scrape:
    answer = client.get("/metrics")
    assert answer.status_code == 200
    assert answer.headers["content-type"].startswith("text/plain; version=")
    return Scrape(answer.text)
