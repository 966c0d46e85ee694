"""Dynamo's real indexer of KV events, run for a test and asked what it knows.

`ai-dynamo-runtime` ships it as `python -m dynamo.indexer`. It listens on all addresses, so it runs
in a network namespace of its own; `indexer_host.py` passes HTTP requests on. Publishers stay
outside: an `ipc://` endpoint is a file, which every network namespace sees.
"""

import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple, Self

from tests.processes import ROOT

_HOST = Path(__file__).with_name("indexer_host.py")
_LOG_LINES = 20


def endpoints(folder: Path, engine: str) -> tuple[str, str]:
    """Return where an engine publishes, and where it replays what was missed."""
    return f"ipc://{folder}/{engine}.events", f"ipc://{folder}/{engine}.replay"


class Matched(NamedTuple):
    """How many tokens of a prompt an instance has: the router walks down the tiers."""

    longest: int  # the greatest of the three
    gpu: int  # from the prompt's first token on, on the device
    cpu: int  # and then in the host's memory
    disk: int  # and then on disk


NOTHING = Matched(0, 0, 0, 0)


class DynamoIndexer:
    """An indexer that runs until it is closed; any thread may call its methods.

    Its environment is that of `make .venv-routers`, or `KVD_ROUTERS_PYTHON` names its Python.
    """

    def __init__(self, log: Path) -> None:
        default = ROOT / ".venv-routers/bin/python"
        python = Path(os.environ.get("KVD_ROUTERS_PYTHON") or default)
        assert python.exists(), f"{python} is missing: run make .venv-routers"
        own_network = ["unshare", "-n"] if os.geteuid() == 0 else ["unshare", "-rn"]
        self._log = log
        self._lock = Lock()
        with log.open("wb") as sink:
            self._host = subprocess.Popen(
                [*own_network, "setpriv", "--pdeathsig", "KILL", str(python), str(_HOST)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=sink,
                text=True,
                env=os.environ | {"DYN_LOG": "info", "DYN_SDK_DISABLE_ANSI_LOGGING": "1"},
            )
        try:
            problem = self._answer("it needs root or unprivileged user namespaces (unshare)")
            assert not problem, f"Dynamo's indexer does not start: {problem}\n{self._log_tail()}"
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End it: the indexer ends with its host."""
        with self._host as host:
            host.kill()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def register(
        self,
        instance: int,
        endpoint: str,
        model: str,
        block_size: int,
        replay: str | None = None,
        rank: int = 0,
    ) -> None:
        """Follow the events of one engine, to which the indexer connects in the background.

        An instance belongs to one engine, with its data-parallel replicas by `rank`, and one model.
        The endpoint should be bound already, or the next attempt to connect may come 5 s later.
        From `replay` it requests what it missed.
        """
        body: dict[str, object] = {
            "instance_id": instance,
            "endpoint": endpoint,
            "model_name": model,
            "block_size": block_size,
        }
        if rank:
            body["dp_rank"] = rank
        self._request("POST", "/register", body | ({"replay_endpoint": replay} if replay else {}))

    def unregister(self, instance: int, model: str) -> None:
        """Stop following an engine, all its replicas, and drop their blocks."""
        self._request("POST", "/unregister", {"instance_id": instance, "model_name": model})

    def query(self, instance: int, tokens: Sequence[int], model: str, **options: str) -> Matched:
        """Return what an instance has of a prompt, with this `lora_name` or `cache_salt`."""
        body = {"token_ids": list(tokens), "model_name": model} | options
        matched = self._request("POST", "/query", body)["instances"].get(str(instance))
        if matched is None:
            return NOTHING
        return Matched(matched["longest_matched"], matched["gpu"], matched["cpu"], matched["disk"])

    def dump_blocks(self) -> dict[int, set[tuple[str, int]]]:
        """Return all blocks by instance, each as Dynamo's name of the tier and its hash."""
        blocks: dict[int, set[tuple[str, int]]] = {}
        for model in self._request("GET", "/dump").values():
            for entry in model["events"]:
                stored = entry["event"]["data"]["stored"]["blocks"]
                blocks.setdefault(entry["worker_id"], set()).update(
                    (entry["storage_tier"], block["block_hash"]) for block in stored
                )
        return blocks

    def _request(self, method: str, path: str, body: object = None) -> Any:
        """Send an HTTP request and return the decoded answer, which must be a success."""
        assert self._host.stdin is not None
        with self._lock:
            with suppress(BrokenPipeError):  # then no line is answered
                self._host.stdin.write(json.dumps([method, path, body]) + "\n")
                self._host.stdin.flush()
            status, answer = self._answer([0, f"the indexer has ended:\n{self._log_tail()}"])
        assert 200 <= status < 300, f"{status}: {answer}"
        return answer

    def _answer(self, at_the_end: Any) -> Any:
        assert self._host.stdout is not None
        line = self._host.stdout.readline()
        return json.loads(line) if line else at_the_end

    def _log_tail(self) -> str:
        return "\n".join(self._log.read_text("utf-8", "replace").splitlines()[-_LOG_LINES:])
