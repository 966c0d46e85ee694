"""Each path as its clients meet it: probes, report, events, and what is refused."""

import contextlib
import json
import socket
import stat

import httpx
import pytest

from kvd.config.values import parse_listen
from kvd.errors import ConfigError
from tests.daemon.serving import Daemon, StartDaemon
from tests.http.serving import PATIENT, SECONDS, over_tcp, over_unix, port_of, report_of
from tests.processes import children_running
from tests.waiting import PATIENCE, eventually


def test_a_ready_daemon_passes_its_probes(web: Daemon) -> None:
    """/livez, its alias and /readyz say 200 over TCP and over the Unix socket."""
    with over_tcp(web) as tcp, over_unix(web) as unix:
        for client in (tcp, unix):
            for path in ("/livez", "/healthz", "/readyz"):
                answer = client.get(f"{path}?{PATIENT}")
                assert (answer.status_code, answer.text) == (200, "ok\n")


def test_verbose_probes_list_their_checks(web: Daemon) -> None:
    """?verbose is for people: a line a check, with each lane's heartbeat and queue."""
    with over_tcp(web) as client:
        text = client.get(f"/livez?verbose&{PATIENT}").text
        assert "[+] broker: answered a PING in" in text
        assert text.endswith("livez ok\n")
        text = client.get(f"/readyz?verbose&{PATIENT}").text
        assert "[+] lane host: up, last heard" in text
        assert text.endswith("readyz ok\n")


@pytest.mark.parametrize(
    ("query", "headers"), [("format=json", {}), ("", {"accept": "application/json"})]
)
def test_probes_speak_json_on_request(web: Daemon, query: str, headers: dict[str, str]) -> None:
    """The same checks for programs, by query or by Accept."""
    with over_unix(web) as client:
        answer = client.get(f"/livez?{PATIENT}&{query}", headers=headers)
    assert answer.headers["content-type"] == "application/json"
    body = answer.json()
    assert (body["probe"], body["ok"]) == ("livez", True)
    assert [check["name"] for check in body["checks"]] == ["broker"]


def test_a_deadline_that_makes_no_sense_is_refused(web: Daemon) -> None:
    """?timeout= takes seconds within bounds."""
    with over_unix(web) as client:
        for text in ("never", "0", "-1", "nan", "31"):
            answer = client.get("/livez", params={"timeout": text})
            assert answer.status_code == 400
            assert "at most 30" in answer.text


def test_the_report_is_the_one_of_kvd_status(web: Daemon) -> None:
    """/status has the model of `kvd status --json`, and is never cached."""
    with over_unix(web) as client:
        assert client.get("/status").headers["cache-control"] == "no-store"
        report, other = report_of(client), web.status()
    assert report.keys() == other.keys()
    for key in ("boot_id", "pid", "version", "ready"):
        assert report[key] == other[key]


def test_events_bring_the_report_every_second(web: Daemon) -> None:
    """The stream pushes whole reports, one after the other."""
    reports = []
    with over_tcp(web) as client, client.stream("GET", "/events") as stream:
        assert stream.headers["content-type"].startswith("text/event-stream")
        lines = stream.iter_lines()
        for line in lines:
            if line == "event: report":
                data = next(lines)
                reports.append(json.loads(data.removeprefix("data: ")))
            if len(reports) == 3:
                break
    assert {report["boot_id"] for report in reports} == {web.status()["boot_id"]}


def test_watchers_are_limited_and_places_become_free(web: Daemon) -> None:
    """Beyond 32 event streams a client is told to wait; those that leave make room."""
    with over_unix(web) as client:
        with contextlib.ExitStack() as watching:
            for _ in range(32):
                request = client.build_request("GET", "/events")
                stream = client.send(request, stream=True)
                watching.callback(stream.close)
                assert stream.status_code == 200
            refused = client.send(client.build_request("GET", "/events"), stream=True)
            watching.callback(refused.close)
            assert refused.status_code == 503
            assert "retry-after" in refused.headers

        def come_again() -> int:
            with client.stream("GET", "/events") as again:
                return again.status_code

        eventually(come_again, lambda status: status == 200)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_nothing_can_be_changed(web: Daemon, method: str) -> None:
    """Methods other than GET and HEAD get 405."""
    with over_unix(web) as client:
        for path in ("/livez", "/status"):
            answer = client.request(method, path)
            assert answer.status_code == 405
            assert set(answer.headers["allow"].split(", ")) == {"GET", "HEAD"}


def test_unknown_paths_are_told_what_there_is(web: Daemon) -> None:
    """404 in one sentence, with the paths."""
    with over_unix(web) as client:
        for path in ("/nothing", "/livez/", "/static/../app.py", "/static/%2e%2e/app.py"):
            answer = client.get(path)
            assert answer.status_code == 404
            assert "/livez, /healthz, /readyz, /status, /metrics, /events" in answer.text


def test_every_answer_keeps_other_sites_out(web: Daemon) -> None:
    """Security headers on good answers and bad, and nothing that shares with other origins."""
    with over_tcp(web) as client:
        for path in ("/livez", "/status", "/nothing"):
            headers = client.get(path, headers={"origin": "http://evil.example"}).headers
            assert "default-src 'self'" in headers["content-security-policy"]
            assert headers["x-content-type-options"] == "nosniff"
            assert "access-control-allow-origin" not in headers


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("evil.example", 400),
        ("evil.example:9330", 400),
        ("10.0.0.1", 200),
        ("localhost", 200),
        ("LOCALHOST:1", 200),
        ("[::1]:9330", 200),
    ],
)
def test_names_of_others_are_not_answered(web: Daemon, host: str, status: int) -> None:
    """A Host header that is not ours (DNS rebinding) is refused over TCP."""
    with over_tcp(web) as client:
        assert client.get(f"/livez?{PATIENT}", headers={"host": host}).status_code == status


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


def test_a_port_in_use_is_said_before_anything_is_made(start_daemon: StartDaemon) -> None:
    """The error names the setting, the address and the remedy; no pool has been made."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        daemon = start_daemon("--http-listen", f"127.0.0.1:{port}", ready=False)
        assert daemon.process.wait(PATIENCE) == 1
    log = daemon.log.read_text()
    assert f"http_listen = 127.0.0.1:{port}: the port is in use" in log
    assert "--http-listen off" in log
    assert "pool of" not in log
    assert "Traceback" not in log


@pytest.mark.parametrize(
    "text", ["9330", "127.0.0.1", "::1:9330", "127.0.0.1:x", "h:65536", "h:-1", "h:1_0", ":9", ""]
)
def test_what_is_no_address_is_told_what_one_is(text: str) -> None:
    """The refusal gives examples."""
    with pytest.raises(ConfigError, match=r"such as 127\.0\.0\.1:9330"):
        parse_listen(text)


@pytest.mark.parametrize("text", ["127.0.0.1:9330", "[::1]:0", "localhost:80"])
def test_addresses_read_as_they_are_written(text: str) -> None:
    """Parsing and printing are inverse."""
    assert str(parse_listen(text)) == text


def test_a_foreign_address_is_refused_with_a_remedy(start_daemon: StartDaemon) -> None:
    """An address that this machine does not have says so."""
    daemon = start_daemon("--http-listen", "192.0.2.1:9330", ready=False)
    assert daemon.process.wait(PATIENCE) == 1
    assert "http_listen = 192.0.2.1:9330" in daemon.log.read_text()


def test_every_interface_only_when_asked_and_with_a_warning(start_daemon: StartDaemon) -> None:
    """0.0.0.0 works, answers to addresses in figures, and is warned about."""
    daemon = start_daemon("--http-listen", "0.0.0.0:0")
    log = daemon.wait_log("everybody who reaches this machine")
    port = int(log.split("http://0.0.0.0:")[1].split()[0])
    for host, status in (("10.1.2.3", 200), ("evil.example", 400)):
        assert livez(f"127.0.0.1:{port}", host=host) == status


def test_ipv6_is_served(start_daemon: StartDaemon) -> None:
    """[::1] is an address as good as others, where the machine has it."""
    try:
        with socket.create_server(("::1", 0), family=socket.AF_INET6):
            pass
    except OSError:
        pytest.skip("this machine has no IPv6")
    daemon = start_daemon("--http-listen", "[::1]:0")
    port = daemon.wait_log("http://[::1]:").split("http://[::1]:")[1].split()[0]
    assert livez(f"[::1]:{port}") == 200


def livez(address: str, **headers: str) -> int:
    """The status of /livez there; no proxy stands between."""
    url = f"http://{address}/livez?{PATIENT}"
    return httpx.get(url, headers=headers, timeout=SECONDS, trust_env=False).status_code


def test_head_is_answered_without_a_body(web: Daemon) -> None:
    """HEAD is reading too, on every path."""
    with over_unix(web) as client:
        for path in (f"/livez?{PATIENT}", "/events"):
            answer = client.head(path)
            assert (answer.status_code, answer.content) == (200, b"")
        answer = eventually(lambda: client.head("/status"), lambda one: one.status_code == 200)
        assert answer.content == b""


def test_the_address_is_kept_by_the_broker(web: Daemon) -> None:
    """The broker itself holds the port from its start on, also before anybody has asked."""
    with socket.socket() as other, pytest.raises(OSError, match="in use"):
        other.bind(("127.0.0.1", port_of(web)))
