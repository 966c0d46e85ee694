"""When something hangs, dies or misbehaves: HTTP says so, and the broker notices nothing."""

import contextlib
import json
import os
import signal
import socket
import time
from pathlib import Path

import psutil
import pytest

from kvd.report.app import MAX_CONNECTIONS
from kvd.wire.tool import ToolConnection
from tests.daemon.engines import Engine, keys_of, wait_hit
from tests.daemon.serving import Daemon, StartDaemon
from tests.http.serving import (
    PATIENT,
    SECONDS,
    idle_connection,
    over_tcp,
    over_unix,
    port_of,
    report_of,
    scrape,
)
from tests.processes import children_running, frozen, has_ended
from tests.waiting import PATIENCE, eventually


def http_process(daemon: Daemon) -> psutil.Process:
    """The child that serves HTTP; it is asked for something, which starts it."""

    def found() -> list[psutil.Process]:
        with over_tcp(daemon) as client:
            client.get("/livez")
        return children_running(daemon.process.pid, "kvd.report")

    return eventually(found)[0]


def test_a_wedged_broker_fails_liveness_in_time_and_recovers(web: Daemon) -> None:
    """Frozen: 503 within the deadline, watchers read of it, all else answers; then 200."""
    with over_tcp(web) as client, client.stream("GET", "/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()

        def next_event(name: str) -> dict[str, object]:
            for line in lines:
                if line == f"event: {name}":
                    data: dict[str, object] = json.loads(next(lines).removeprefix("data: "))
                    return data
            raise AssertionError("the stream has ended")

        assert next_event("report")["boot_id"] == next_event("report")["boot_id"]
        assert client.get(f"/livez?{PATIENT}").status_code == 200
        with frozen(web.process.pid):
            answer = client.get("/livez?timeout=0.5")
            assert answer.status_code == 503
            assert "has not answered Ping within 0.5 s" in answer.text
            assert answer.elapsed.total_seconds() < SECONDS
            for path in ("/readyz?timeout=0.1", "/status", "/livez?verbose&timeout=0.1"):
                assert client.get(path).status_code == 503
            assert client.get("/status").json()["since"] <= time.time()
            text = client.get("/metrics").text
            assert "kvd_up 0.0" in text
            assert "kvd_http_requests_total" in text
            assert "kvd_pool_bytes" not in text
            trouble = next_event("trouble")
        assert "has not answered" in str(trouble["text"])
        assert float(str(trouble["since"])) <= float(str(trouble["time"]))
        assert next_event("report")["pid"] == web.process.pid
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
        return client.getsockname() in [each.raddr for each in child.net_connections("tcp")]

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
