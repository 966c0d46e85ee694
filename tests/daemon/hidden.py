"""Whatever a daemon lets people read, searched for what it must never show."""

import json
from collections.abc import Sequence
from functools import partial

import httpx

from tests.daemon.serving import Daemon
from tests.waiting import eventually

PAGES = ("/status", "/metrics", "/livez?verbose", "/readyz?verbose", "/")


def texts_of(daemon: Daemon, http: httpx.Client) -> list[str]:
    """Status, metrics, probes, page, events and log."""
    texts = [json.dumps(daemon.status())]
    for path in PAGES:
        answer = eventually(partial(http.get, path), lambda response: response.status_code == 200)
        texts.append(answer.text)
    with http.stream("GET", "/events") as events:
        texts.append(next(events.iter_text()))
    return [*texts, daemon.log.read_text()]


def assert_hidden(texts: Sequence[str], *secrets: bytes) -> None:
    """None of the texts has one of these, raw, as Python writes bytes, or in hexadecimal digits."""
    for text in texts:
        for secret in secrets:
            assert secret.decode("latin-1") not in text
            assert str(secret)[2:-1] not in text
            assert secret.hex() not in text.lower()
