"""Runs Dynamo's indexer in this process's network namespace and answers requests to it.

Standard input carries requests, one JSON array [method, path, body] a line; standard output
carries answers, [status, body]. The first line out says why the indexer has not started, or is
empty. The indexer ends with the input, or if this process is killed.
"""

import json
import subprocess
import sys
import time
from http.client import HTTPConnection
from typing import Any

PORT = 8090  # this network namespace has no other listener
START_SECONDS = 180.0
REQUEST_SECONDS = 30.0
POLL_SECONDS = 0.02


def request(method: str, path: str, body: Any = None) -> tuple[int, Any]:
    """Send one HTTP request to the indexer; returns the status and the decoded answer."""
    connection = HTTPConnection("127.0.0.1", PORT, timeout=REQUEST_SECONDS)
    try:
        data = None if body is None else json.dumps(body)
        connection.request(method, path, data, {"content-type": "application/json"})
        reply = connection.getresponse()
        status, text = reply.status, reply.read().decode()
    finally:
        connection.close()
    try:
        return status, json.loads(text)
    except ValueError:
        return status, text


def await_health(indexer: subprocess.Popen[bytes]) -> str:
    """Wait until the indexer serves HTTP; returns why it does not, or an empty string."""
    end = time.monotonic() + START_SECONDS
    while time.monotonic() < end:
        if indexer.poll() is not None:
            return f"the indexer ended with status {indexer.returncode}"
        try:
            request("GET", "/health")
        except OSError:
            time.sleep(POLL_SECONDS)
        else:
            return ""
    return f"the indexer does not serve HTTP after {START_SECONDS:g} s"


def main() -> None:
    """Start the indexer and answer requests until the input ends."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    command = [sys.executable, "-m", "dynamo.indexer", "--port", str(PORT), "--threads", "1"]
    indexer = subprocess.Popen(
        ["setpriv", "--pdeathsig", "KILL", *command],
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr,
        stderr=sys.stderr,
    )
    try:
        print(json.dumps(await_health(indexer)), flush=True)
        for line in sys.stdin:
            try:
                answer = request(*json.loads(line))
            except OSError as failure:
                answer = (0, str(failure))
            print(json.dumps(answer), flush=True)
    finally:
        indexer.kill()
        indexer.wait(REQUEST_SECONDS)


if __name__ == "__main__":
    main()
