"""Engines that keep a daemon busy while a test looks at it."""

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from kvd_client import LookupResult
from tests.daemon.engines import Engine, keys_of, make_layout

ROUND = 12  # chunks stored and loaded at a time
BLOCKS = 2 * 2 * ROUND + 2  # a half to store from, a half to load into


@contextmanager
def engines_at_work(runtime_dir: Path, *names: str) -> Iterator[None]:
    """An engine for each name, of a model of that name, storing and loading until the end."""
    stop = threading.Event()
    failures: list[Exception] = []
    with ExitStack() as stack:
        threads = []
        for name in names:
            layout = make_layout(blocks=BLOCKS, page=65536)
            engine = stack.enter_context(
                Engine(runtime_dir, name=f"{name}-0", model=name, layout=layout)
            )
            engine.wait_attached()
            threads.append(
                threading.Thread(target=_work, args=(engine, stop, failures), daemon=True)
            )
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            stop.set()
            for thread in threads:
                thread.join(60)
    assert not failures, failures


def _work(engine: Engine, stop: threading.Event, failures: list[Exception]) -> None:
    """The same prompts again and again, of which one in twenty is replaced by a new one."""
    number = 0
    try:
        while not stop.wait(0.1):
            keys = keys_of(f"prompt-{number % 10 + number // 20}", ROUND)
            found = [engine.scheduler.lookup(key) for key in keys]
            if all(result == LookupResult.HIT for result in found):
                _, wrong = engine.load(keys, first_block=BLOCKS // 2 + 1)
                assert wrong == 0
            else:
                engine.store(keys, first_block=1)
            number += 1
    except Exception as error:  # noqa: BLE001  # a thread's failure is the test's
        failures.append(error)
