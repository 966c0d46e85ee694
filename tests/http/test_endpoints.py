"""Each path as its clients meet it, and what they read when something hangs, dies or misbehaves.

What a path answers is asked of the application itself, with a report of the test's own; sockets,
addresses and the stream of events want a daemon.
"""

import asyncio
import contextlib
import json
import os
import signal
import socket
import stat
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from kvd.config.values import ListenAddress, parse_listen
from kvd.errors import ConfigError, NotRunning
from kvd.report.app import MAX_CONNECTIONS, App
from kvd.report.broker_client import FIELDS, Samples
from kvd.wire.listener import bind_tcp
from kvd.wire.tool import ToolConnection
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.serving import Daemon, StartDaemon
from tests.http.serving import (
    PATIENT,
    SECONDS,
    Asked,
    idle_connection,
    over_tcp,
    over_unix,
    port_of,
    report_of,
    scrape,
)
from tests.processes import children_running, frozen, has_ended
from tests.report.reports import changed, loaded_report
from tests.waiting import PATIENCE, eventually

READY = loaded_report(60.0)
PATHS = "/livez, /healthz, /readyz, /status, /metrics, /events, /history"
DOCS = (Path(__file__).parents[2] / "docs" / "http.md").read_text()


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is asked without a deadline of its own waits for a machine that stands still."""
    monkeypatch.setattr("kvd.report.app.ANSWER_SECONDS", SECONDS)


def ask(
    path: str, method: str = "GET", report: dict[str, Any] = READY, **headers: str
) -> httpx.Response:
    """What the application answers to a client on TCP."""
    (answer,) = ask_all([headers], path, method, report)
    return answer


def ask_all(
    requests: Sequence[dict[str, str]],
    path: str,
    method: str = "GET",
    report: dict[str, Any] = READY,
) -> list[httpx.Response]:
    """What it answers to requests with these headers, one after the other."""
    broker = Asked(report)
    broker.answers.set()
    app = App(broker).guarded("127.0.0.1")

    async def answers() -> list[httpx.Response]:
        transport = httpx.ASGITransport(app, client=("127.0.0.1", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            return [await client.request(method, path, headers=one) for one in requests]

    return asyncio.run(answers())


def test_verbose_probes_list_their_checks() -> None:
    """?verbose is for people: a line a check, and what failed begins with a minus."""
    text = ask("/livez?verbose").text
    assert text.startswith("[+] broker: answered a PING in")
    assert text.endswith("livez ok\n")
    answer = ask("/readyz?verbose", report=changed(READY, "checks", 1, "ok", to=False))
    assert answer.status_code == 503
    assert answer.text.splitlines() == [
        "[+] pool: 64 GiB are allocated",
        "[-] lane host: up",
        "[+] drain: not draining",
        "readyz failed",
    ]


def test_scrapes_in_quick_succession_share_their_metrics(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each format one is made at a time; a version that is not known gets the plain one."""
    monkeypatch.setattr("kvd.report.app.SHARED_SECONDS", 3600.0)
    openmetrics = "application/openmetrics-text; version="
    accepted = ["", "text/plain", openmetrics + "1.0.0", openmetrics + "1.0.1", "*/*"]
    answers = ask_all([{"accept": one} for one in accepted], "/metrics")
    texts = [answer.text for answer in answers]
    assert texts[2] != texts[0]
    assert texts[:2] + texts[3:] == [texts[0]] * 4  # each has the number of answers before
    monkeypatch.setattr("kvd.report.app.SHARED_SECONDS", 0.0)
    first, second = ask_all([{}, {}], "/metrics")
    assert first.text != second.text


def test_a_bad_deadline_or_path_is_refused_with_what_is_possible() -> None:
    """A deadline out of bounds is 400, an unknown path 404 with those that the docs explain."""
    for text in ("never", "0", "nan", "31"):
        answer = ask(f"/livez?timeout={text}")
        assert (answer.status_code, "at most 30" in answer.text) == (400, True)
    for path in ("/nothing", "/livez/", "/static/%2e%2e/app.py"):
        answer = ask(path)
        assert (answer.status_code, PATHS in answer.text) == (404, True)
    assert all(f"`{path}`" in DOCS for path in PATHS.split(", "))
    assert '"checks":' in ask("/livez?format=json").text


@pytest.mark.parametrize("path", ["/livez", "/status", "/metrics", "/events", "/history", "/"])
def test_nothing_can_be_changed(path: str) -> None:
    """HEAD is answered without a body; methods other than GET and HEAD get 405."""
    answer = ask(path, "HEAD")
    assert (answer.status_code, answer.content) == (200, b"")
    for method in ("POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"):
        answer = ask(path, method)
        assert answer.status_code == 405
        assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


@pytest.mark.parametrize("path", ["/livez", "/status", "/nothing"])
def test_every_answer_keeps_other_sites_out(path: str) -> None:
    """Security headers on good answers and bad, and nothing that shares with other origins."""
    headers = ask(path, origin="http://evil.example").headers
    assert headers["cache-control"] == "no-store"
    assert "default-src 'self'" in headers["content-security-policy"]
    assert headers["x-content-type-options"] == "nosniff"
    assert "access-control-allow-origin" not in headers


def test_a_foreign_host_header_is_refused() -> None:
    """A Host header that is not ours (DNS rebinding) is refused over TCP."""
    for host in ("evil.example", "evil.example:9330"):
        assert ask("/livez", host=host).status_code == 400
    for host in ("10.0.0.1", "localhost", "LOCALHOST:1", "[::1]:9330"):
        assert ask("/livez", host=host).status_code == 200


def test_a_ready_daemon_is_asked_over_both_sockets(web: Daemon) -> None:
    """Its probes pass, /status is the report of `kvd status`, and the broker holds the port."""
    with over_tcp(web) as tcp, over_unix(web) as unix:
        for client in (tcp, unix):
            for path in ("/livez", "/healthz", "/readyz"):
                answer = client.get(f"{path}?{PATIENT}")
                assert (answer.status_code, answer.text) == (200, "ok\n")
        report, other = report_of(unix), web.status()
    assert report.keys() == other.keys()
    for key in ("boot_id", "pid", "version", "ready"):
        assert report[key] == other[key]
    with socket.socket() as another, pytest.raises(OSError, match="in use"):
        another.bind(("127.0.0.1", port_of(web)))


def test_watchers_are_limited_and_places_become_free(web: Daemon) -> None:
    """Beyond 32 event streams a client is told to wait; those that leave make room."""
    with over_unix(web) as client:
        with contextlib.ExitStack() as watching:
            for _ in range(32):
                stream = watching.enter_context(client.stream("GET", "/events"))
                assert stream.status_code == 200
            refused = watching.enter_context(client.stream("GET", "/events"))
            assert refused.status_code == 503
            assert "retry-after" in refused.headers

        def come_again() -> int:
            with client.stream("GET", "/events") as again:
                return again.status_code

        eventually(come_again, lambda status: status == 200)


def test_with_the_port_off_there_is_the_unix_socket_and_a_process_when_asked(
    daemon: Daemon,
) -> None:
    """For owner and group, under any Host; what answers starts with the first connection."""
    assert stat.S_IMODE((daemon.runtime_dir / "http.sock").stat().st_mode) == 0o660
    assert "http://" not in daemon.log.read_text()
    assert not children_running(daemon.process.pid, "kvd.report")
    with over_unix(daemon) as client:
        assert client.get(f"/livez?{PATIENT}", headers={"host": "anything"}).status_code == 200
    assert children_running(daemon.process.pid, "kvd.report")


def test_a_port_in_use_is_an_error_before_the_pool_is_allocated(start_daemon: StartDaemon) -> None:
    """The error names the setting, the address and the remedy; no pool has been made.

    The exit status is not that of a wrong setting: the port may be free soon.
    """
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = start_daemon("--http-listen", f"127.0.0.1:{port}", ready=False)
        assert daemon.process.wait(PATIENCE) == 1
    log = daemon.log.read_text()
    assert f"http_listen = 127.0.0.1:{port}: the port is in use" in log
    assert "--http-listen off" in log
    assert "pool of" not in log
    assert "Traceback" not in log


def test_what_is_no_address_is_refused_with_an_example() -> None:
    """The refusal gives examples; an address that is not this machine's is named."""
    for text in ("9330", "127.0.0.1", "::1:9330", "127.0.0.1:x", "h:65536", "h:-1", ":9", ""):
        with pytest.raises(ConfigError, match=r"such as 127\.0\.0\.1:9330"):
            parse_listen(text)
    with pytest.raises(ConfigError, match=r"http_listen = 192\.0\.2\.1:9330"):
        bind_tcp(ListenAddress("192.0.2.1", 9330))


@pytest.mark.parametrize(
    ("host", "own"),
    [("0.0.0.0", "127.0.0.1"), ("[::]", "[::1]")],  # noqa: S104  # what the test is about
)
def test_every_interface_only_on_request_and_with_a_warning(
    start_daemon: StartDaemon, host: str, own: str
) -> None:
    """It works, answers to addresses in figures, and is warned about; IPv6 as good as IPv4."""
    if host == "[::]" and not Path("/proc/net/if_inet6").exists():
        pytest.skip("this machine has no IPv6")
    daemon = start_daemon("--http-listen", f"{host}:0")
    log = daemon.wait_log("every machine that reaches this one")
    port = log.split(f"http://{host}:")[1].split()[0]
    url = f"http://{own}:{port}/livez?{PATIENT}"
    for name, status in (("10.1.2.3", 200), ("evil.example", 400)):
        answer = httpx.get(url, headers={"host": name}, timeout=SECONDS, trust_env=False)
        assert answer.status_code == status


def test_a_silent_broker_is_not_buried_in_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fifty who ask at once cost it one report, and those soon after none.

    While it stands still all who ask and give up are one request, and the history has a hole.
    """
    monkeypatch.setattr("kvd.report.broker_client.PERIOD_SECONDS", 0.01)
    monkeypatch.setattr("kvd.report.broker_client._ANSWER_SECONDS", 0.01)
    monkeypatch.setattr("kvd.report.broker_client.FRESH_SECONDS", 3600.0)
    broker, samples = Asked(loaded_report()), Samples()

    async def silent_and_back() -> None:
        recording = asyncio.create_task(samples.record(broker))
        for _ in range(30):
            with pytest.raises(NotRunning, match="has not answered Ping"):
                await broker.ping(0.002)
        with pytest.raises(NotRunning):
            await broker.report(0.1)
        assert samples.history() == {"fields": FIELDS, "samples": [], "report": None}
        broker.answers.set()
        await broker.ping(PATIENCE)
        await asyncio.gather(*(broker.report(PATIENCE) for _ in range(50)))
        for _ in range(6000):  # 60 s
            if samples.history()["samples"]:
                break
            await asyncio.sleep(0.01)
        assert samples.history()["samples"]
        recording.cancel()

    asyncio.run(asyncio.wait_for(silent_and_back(), PATIENCE))
    assert len(broker.asked) <= 3


def http_process(daemon: Daemon) -> psutil.Process:
    """The child that serves HTTP; it is asked for something, which starts it."""

    def found() -> list[psutil.Process]:
        with over_tcp(daemon) as client:
            client.get("/livez")
        return children_running(daemon.process.pid, "kvd.report")

    return eventually(found)[0]


def next_event(name: str, lines: Iterator[str]) -> Any:
    """The data of the next event of this name in a stream."""
    next(line for line in lines if line == f"event: {name}")
    return json.loads(next(lines).removeprefix("data: "))


def test_a_wedged_broker_fails_liveness_in_time_and_recovers(web: Daemon) -> None:
    """Frozen: 503 within the deadline, watchers read of it, all else answers; then 200."""
    with over_tcp(web) as client, client.stream("GET", "/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        report = next_event("report", lines)
        assert report["boot_id"] == next_event("report", lines)["boot_id"]
        assert "age" in client.get("/status").headers
        assert client.get(f"/livez?{PATIENT}").status_code == 200
        with frozen(web.process.pid):
            answer = client.get("/livez?timeout=0.5")
            assert answer.status_code == 503
            assert "has not answered Ping within 0.5 s" in answer.text
            assert answer.elapsed.total_seconds() < SECONDS
            for path in ("/readyz?timeout=0.1", "/status", "/livez?verbose&timeout=0.1"):
                assert client.get(path).status_code == 503
            stopped = f"pid {web.process.pid} is stopped (state T); let it go on with kill -CONT"
            for path in ("/readyz?timeout=0.1", "/livez?timeout=0.1"):
                assert stopped in client.get(path).text
            silent = client.get("/status")
            assert silent.json()["since"] <= time.time()
            assert stopped in silent.json()["error"]
            last = silent.json()["last_report"]
            assert last["boot_id"] == report["boot_id"]
            assert 0 <= int(silent.headers["age"]) <= time.time() - last["time"]
            text = client.get("/metrics").text
            assert "kvd_up 0.0" in text
            assert "kvd_http_requests_total" in text
            assert "kvd_pool_bytes" not in text
            trouble = next_event("trouble", lines)
            assert "last_report" not in trouble  # this watcher has it
            with client.stream("GET", "/events") as late:
                late_lines = late.iter_lines()
                assert (
                    next_event("trouble", late_lines)["last_report"]["boot_id"] == report["boot_id"]
                )
                assert "last_report" not in next_event("trouble", late_lines)
        assert "has not answered" in trouble["text"]
        assert trouble["since"] <= trouble["time"]
        assert next_event("report", lines)["pid"] == web.process.pid
        for path in ("/livez", "/readyz"):
            assert client.get(f"{path}?{PATIENT}").status_code == 200
        assert report_of(client)["pid"] == web.process.pid
        assert scrape(client).get("kvd_broker_silent_seconds") == 0


def test_what_happens_to_the_http_process_does_not_disturb_the_broker(
    start_daemon: StartDaemon,
) -> None:
    """Killed it is replaced on the same port; frozen it delays no engine; it ends with the broker.

    It is nicer than the broker, whose data path comes first. It takes no place of a session.
    """
    daemon = start_daemon("--http-listen", "127.0.0.1:0", "--max-sessions", "4")
    taken = [ToolConnection(daemon.runtime_dir, PATIENCE) for _ in range(4)]
    first = http_process(daemon)
    assert first.nice() == min(19, psutil.Process(daemon.process.pid).nice() + 5)
    first.kill()
    with over_tcp(daemon) as tcp, over_unix(daemon) as unix:
        assert tcp.get(f"/livez?{PATIENT}").status_code == 200
        assert report_of(unix)["sessions"]["open"] == 5
    for control in taken:
        control.close()
    daemon.wait_log("the HTTP process has ended: killed by signal 9")
    child = http_process(daemon)
    assert child.pid != first.pid
    child.suspend()
    try:
        engine = Engine(daemon.runtime_dir, world_size=1)
        with engine.wait_attached():
            keys = keys_of("frozen", 5)
            engine.store(keys)
            wait_hit(engine, keys)
            assert engine.load(keys) == (5, 0)
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            child.resume()
    child = http_process(daemon)
    daemon.stop(signal.SIGKILL)
    eventually(lambda: has_ended(child))
    with pytest.raises(OSError, match="refused"):
        socket.create_connection(("127.0.0.1", port_of(daemon)), timeout=SECONDS)


def test_many_slow_clients_keep_no_probe_out(web: Daemon) -> None:
    """More idle, slow and deaf connections than there are places: probes are answered."""
    http_process(web)
    crowd = [idle_connection(web) for _ in range(MAX_CONNECTIONS + 50)]
    try:
        for slow in crowd[1::3]:
            with contextlib.suppress(ConnectionError):  # it may have made room already
                slow.sendall(b"GET /livez HTTP/1.1\r\nHost: localhost\r\nX: ")
        for deaf in crowd[2::3]:
            with contextlib.suppress(ConnectionError):
                deaf.sendall(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 20)
        with over_tcp(web) as tcp, over_unix(web) as unix:
            assert tcp.get(f"/livez?{PATIENT}").status_code == 200
            assert unix.get(f"/livez?{PATIENT}").status_code == 200
        assert web.wait_ready()["ready"]
        assert len(http_process(web).net_connections("tcp")) <= MAX_CONNECTIONS + 1 + 2
    finally:
        for connection in crowd:
            connection.close()


@pytest.mark.slow
def test_a_client_that_does_not_read_is_disconnected(web: Daemon) -> None:
    """An answer that is not read costs its connection only."""
    child = http_process(web)

    def connected(client: socket.socket) -> bool:
        return client.getsockname() in [
            connection.raddr for connection in child.net_connections("tcp")
        ]

    with idle_connection(web, receive_buffer=4096) as deaf, over_tcp(web) as client:
        assert eventually(lambda: connected(deaf))
        deaf.setblocking(False)
        with contextlib.suppress(BlockingIOError, ConnectionError):  # it may be cut meanwhile
            while True:
                deaf.send(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100)
        eventually(lambda: not connected(deaf))
        assert client.get(f"/livez?{PATIENT}").status_code == 200


@pytest.mark.parametrize(
    ("method", "more", "status"),
    [(b"GET", b"X: " + b"x" * 17_000, b"400"), (b"POST", b"Content-Length: 9999\r\n\r\n", b"405")],
    ids=["headers above 16 KiB", "a body that never comes"],
)
def test_what_is_too_much_is_refused_at_once(
    web: Daemon, method: bytes, more: bytes, status: bytes
) -> None:
    """Endless headers cost an error, not memory, and a body is not waited for."""
    with idle_connection(web) as client:
        client.sendall(method + b" /livez HTTP/1.1\r\nHost: localhost\r\n" + more)
        assert client.recv(100).startswith(b"HTTP/1.1 " + status)


def test_a_broken_http_process_costs_the_broker_nothing(
    start_daemon: StartDaemon, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where HTTP's libraries are missing the daemon serves engines and says what is wrong."""
    (tmp_path / "uvicorn.py").write_text("raise ImportError('no uvicorn here')\n")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    daemon = start_daemon("--http-listen", "127.0.0.1:0")
    with socket.create_connection(("127.0.0.1", port_of(daemon)), timeout=SECONDS):
        ended = "the HTTP process has ended: exit status 1"
        eventually(daemon.log.read_text, lambda log: ended in log)
    assert daemon.wait_ready()["ready"]
