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


class Refused(Exception):
    """The indexer answered a request with an error.

    Attributes:
        status: of HTTP.
    """

    def __init__(self, status: int, message: object) -> None:
        super().__init__(f"{status}: {message}")
        self.status = status


class DynamoIndexer:
    """An indexer that runs as long as this context.

    Any thread may call the methods. They raise `Refused` if the indexer refuses the request.

    Args:
        log: the file that takes what the indexer prints.
        level: of that, as `DYN_LOG` takes it.
        python: of an environment with `ai-dynamo-runtime`; as a default `KVD_ROUTERS_PYTHON` or
            the one of `make .venv-routers`.

    Attributes:
        host: the process in the network namespace, while it runs.
    """

    def __init__(self, log: Path, level: str = "info", python: Path | None = None) -> None:
        self.log = log
        self._level = level
        default = os.environ.get("KVD_ROUTERS_PYTHON") or ROOT / ".venv-routers/bin/python"
        self._python = Path(python or default)
        self._lock = Lock()
        self.host: subprocess.Popen[str] | None = None

    def __enter__(self) -> Self:
        if not self._python.exists():
            raise AssertionError(f"{self._python} is missing: run make .venv-routers")
        own_network = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]
        with self.log.open("wb") as log:
            self.host = subprocess.Popen(
                [*own_network, "setpriv", "--pdeathsig", "KILL", str(self._python), str(_HOST)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env=os.environ | {"DYN_LOG": self._level, "DYN_SDK_DISABLE_ANSI_LOGGING": "1"},
            )
        assert self.host.stdout is not None
        line = self.host.stdout.readline()
        why = (
            json.loads(line) if line else "it needs root or unprivileged user namespaces (unshare)"
        )
        if why:
            self._end()
            raise AssertionError(f"Dynamo's indexer does not start: {why}\n{self.log_tail()}")
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    # ----------------------------------------------------------------- instances

    def register(
        self,
        instance_id: int,
        endpoint: str,
        model: str,
        block_size: int,
        replay_endpoint: str | None = None,
    ) -> None:
        """Follow the events of one engine.

        The indexer connects in the background: see `await_events`. With a replay endpoint it
        requests the batches that it missed, when it receives the first one.

        Args:
            instance_id: names the engine in answers. It belongs to one engine and one model.
            endpoint: of the publisher, `ipc://PATH`. It should be bound already, or the next
                attempt to connect may come 5 s later.
            model: engines of one model share an index; another model has another.
            block_size: tokens of a block.
            replay_endpoint: of the publisher's replay socket.
        """
        body: dict[str, object] = {
            "instance_id": instance_id,
            "endpoint": endpoint,
            "model_name": model,
            "block_size": block_size,
        }
        if replay_endpoint is not None:
            body["replay_endpoint"] = replay_endpoint
        self.request("POST", "/register", body)

    def unregister(self, instance_id: int, model: str) -> None:
        """Stop following an engine and drop its blocks."""
        self.request("POST", "/unregister", {"instance_id": instance_id, "model_name": model})

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
            assert time.monotonic() < give_up, f"instance {instance_id} is not received: {self.log}"
            number += 1

    # ------------------------------------------------------------------- answers

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
        instances = self.request("POST", "/query", body)["instances"]
        return {
            int(instance): Matched(
                found["longest_matched"], found["gpu"], found["cpu"], found["disk"]
            )
            for instance, found in instances.items()
        }

    def settled_query(
        self,
        tokens: Sequence[int],
        model: str,
        lora_name: str | None = None,
        cache_salt: str | None = None,
    ) -> dict[int, Matched]:
        """Ask until two answers in a row are the same: the indexer takes events in the background.

        Publish a marker and wait for it first (`RoutedEngine.publish_all`).

        It cannot tell an event that is still on its way from one that was never sent. Wait for
        what should appear with `eventually`.
        """
        end = time.monotonic() + PATIENCE
        before, answer = None, self.query(tokens, model, lora_name, cache_salt)
        while before != answer:
            assert time.monotonic() < end, f"answers do not settle: {answer}"
            time.sleep(_SETTLE_SECONDS)
            before, answer = answer, self.query(tokens, model, lora_name, cache_salt)
        return answer

    def dump(self) -> Any:
        """Return all that is indexed: by model and tenant the events that would make it anew."""
        return self.request("GET", "/dump")

    def dump_blocks(self) -> dict[int, dict[str, set[int]]]:
        """Return the hashes of all blocks, by instance and Dynamo's name of the tier."""
        blocks: dict[int, dict[str, set[int]]] = {}
        for model in self.dump().values():
            for entry in model["events"]:
                tiers = blocks.setdefault(entry["worker_id"], {})
                stored = entry["event"]["data"]["stored"]["blocks"]
                tier = tiers.setdefault(entry["storage_tier"], set())
                tier.update(block["block_hash"] for block in stored)
        return blocks

    def request(self, method: str, path: str, body: object = None) -> Any:
        """Send an HTTP request and return the decoded answer."""
        host = self.host
        assert host is not None
        assert host.stdin is not None
        assert host.stdout is not None
        with self._lock:
            with suppress(BrokenPipeError):  # then no line is answered
                host.stdin.write(json.dumps([method, path, body]) + "\n")
                host.stdin.flush()
            line = host.stdout.readline()
        assert line, f"the indexer has ended:\n{self.log_tail()}"
        status, answer = json.loads(line)
        if not 200 <= status < 300:
            raise Refused(status, answer)
        return answer

    def log_tail(self) -> str:
        """Return the last lines that the indexer printed."""
        return "\n".join(self.log.read_text("utf-8", "replace").splitlines()[-_LOG_LINES:])

    def _end(self) -> None:
        host, self.host = self.host, None
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
            host.wait()
        host.stdout.close()
