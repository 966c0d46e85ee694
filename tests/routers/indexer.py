"""Dynamo's real indexer of KV events, run for a test and asked what it knows.

`ai-dynamo-runtime` ships it as `python -m dynamo.indexer`. It listens on all addresses, so it runs
in a network namespace of its own; `indexer_host.py` passes HTTP requests on. Publishers stay
outside: an `ipc://` endpoint is a file, which every network namespace sees. A `tcp://` endpoint
outside cannot be reached.
"""

import json
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

from tests.processes import ROOT
from tests.waiting import PATIENCE

_HOST = Path(__file__).with_name("indexer_host.py")
_SETTLE_SECONDS = 0.1  # between two answers that must be the same
_RECEIVE_SECONDS = 1.0  # for one attempt of `await_events`
_LOG_LINES = 20


class Matched(NamedTuple):
    """How many tokens of a prompt an instance has, by the router's books.

    The router walks down the tiers: each figure contains the one before it.

    longest: the greatest of the three.
    gpu: from the prompt's first token on, on the device.
    cpu: and then in the host's memory.
    disk: and then on disk.
    """

    longest: int
    gpu: int
    cpu: int
    disk: int


NOTHING = Matched(0, 0, 0, 0)


class DynamoIndexer:
    """An indexer that runs as long as this context.

    Any thread may call the methods. They fail if the indexer refuses the request.

    Its environment is that of `make .venv-routers`, or `KVD_ROUTERS_PYTHON` names its Python.

    Args:
        log: the file that takes what the indexer prints.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        default = ROOT / ".venv-routers/bin/python"
        self._python = Path(os.environ.get("KVD_ROUTERS_PYTHON") or default)
        self._lock = Lock()
        self._host: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if not self._python.exists():
            raise AssertionError(f"{self._python} is missing: run make .venv-routers")
        own_network = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]
        with self._log.open("wb") as log:
            self._host = subprocess.Popen(
                [*own_network, "setpriv", "--pdeathsig", "KILL", str(self._python), str(_HOST)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"DYN_LOG": "info", "DYN_SDK_DISABLE_ANSI_LOGGING": "1"},
            )
        assert self._host.stdout is not None
        line = self._host.stdout.readline()
        why = (
            json.loads(line) if line else "it needs root or unprivileged user namespaces (unshare)"
        )
        if why:
            self._end()
            raise AssertionError(f"Dynamo's indexer does not start: {why}\n{self._log_tail()}")
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def register(
        self,
        instance_id: int,
        endpoint: str,
        model: str,
        block_size: int,
        replay_endpoint: str | None = None,
    ) -> None:
        """Follow the events of one engine, to which the indexer connects in the background.

        Args:
            instance_id: names the engine in answers. It belongs to one engine and one model.
            endpoint: of the publisher, `ipc://PATH`. It should be bound already, or the next
                attempt to connect may come 5 s later.
            model: engines of one model share an index; another model has another.
            block_size: tokens of a block.
            replay_endpoint: where the indexer requests what it missed, with the first batch.
        """
        body: dict[str, object] = {
            "instance_id": instance_id,
            "endpoint": endpoint,
            "model_name": model,
            "block_size": block_size,
        }
        if replay_endpoint is not None:
            body["replay_endpoint"] = replay_endpoint
        self._request("POST", "/register", body)

    def unregister(self, instance_id: int, model: str) -> None:
        """Stop following an engine and drop its blocks."""
        self._request("POST", "/unregister", {"instance_id": instance_id, "model_name": model})

    def await_events(
        self, instance_id: int, model: str, publish: Callable[[int], Sequence[int]]
    ) -> None:
        """Wait until the indexer receives the events of a registered engine.

        Args:
            instance_id: of the engine.
            model: of the engine.
            publish: makes the engine publish a block that it never published before, and returns
                the block's tokens. Called with 0, 1, 2, ... until one is received.
        """
        number = 0
        give_up = time.monotonic() + PATIENCE
        while True:
            tokens = publish(number)
            end = time.monotonic() + _RECEIVE_SECONDS
            while time.monotonic() < end:
                if self.query(tokens, model).get(instance_id, NOTHING).longest:
                    return
                time.sleep(_SETTLE_SECONDS)
            assert time.monotonic() < give_up, f"instance {instance_id} is not received"
            number += 1

    def query(
        self,
        tokens: Sequence[int],
        model: str,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> dict[int, Matched]:
        """Return what each instance has of a prompt; one that has nothing is left out."""
        body = {"token_ids": list(tokens), "model_name": model}
        options = {"lora_name": lora_name, "cache_salt": cache_salt}
        body |= {name: value for name, value in options.items() if value is not None}
        instances = self._request("POST", "/query", body)["instances"]
        return {
            int(instance): Matched(
                found["longest_matched"], found["gpu"], found["cpu"], found["disk"]
            )
            for instance, found in instances.items()
        }

    def settled_query(self, tokens: Sequence[int], model: str) -> dict[int, Matched]:
        """Ask until two answers in a row are the same: the indexer takes events in the background.

        An event that is still on its way looks like one that was never sent: publish a marker and
        wait for it first (`RoutedEngine.publish_all`).
        """
        end = time.monotonic() + PATIENCE
        before, answer = None, self.query(tokens, model)
        while before != answer:
            assert time.monotonic() < end, f"answers do not settle: {answer}"
            time.sleep(_SETTLE_SECONDS)
            before, answer = answer, self.query(tokens, model)
        return answer

    def dump_blocks(self) -> dict[int, dict[str, set[int]]]:
        """Return the hashes of all blocks, by instance and Dynamo's name of the tier."""
        blocks: dict[int, dict[str, set[int]]] = {}
        for model in self._request("GET", "/dump").values():
            for entry in model["events"]:
                tiers = blocks.setdefault(entry["worker_id"], {})
                stored = entry["event"]["data"]["stored"]["blocks"]
                tier = tiers.setdefault(entry["storage_tier"], set())
                tier.update(block["block_hash"] for block in stored)
        return blocks

    def _request(self, method: str, path: str, body: object = None) -> Any:
        """Send an HTTP request and return the decoded answer."""
        host = self._host
        assert host is not None
        assert host.stdin is not None
        assert host.stdout is not None
        with self._lock:
            with suppress(BrokenPipeError):  # then no line is answered
                host.stdin.write(json.dumps([method, path, body]) + "\n")
                host.stdin.flush()
            line = host.stdout.readline()
        assert line, f"the indexer has ended:\n{self._log_tail()}"
        status, answer = json.loads(line)
        assert 200 <= status < 300, f"{status}: {answer}"
        return answer

    def _log_tail(self) -> str:
        """Return the last lines that the indexer printed."""
        return "\n".join(self._log.read_text("utf-8", "replace").splitlines()[-_LOG_LINES:])

    def _end(self) -> None:
        host, self._host = self._host, None
        if host is None:
            return
        assert host.stdin is not None
        assert host.stdout is not None
        with suppress(BrokenPipeError):
            host.stdin.close()  # the indexer ends with it
        try:
            host.wait(PATIENCE)
        except subprocess.TimeoutExpired:
            host.kill()
            host.wait(PATIENCE)
        host.stdout.close()
