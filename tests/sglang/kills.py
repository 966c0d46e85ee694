"""Kill the daemon at random moments while SGLang serves, start it again, and check every answer.

    make sglang-kills KILLS=100 SEED=7 LAYERWISE=1 STAGING=1

An engine whose own cache is too small for its prompts is asked them at random by several clients at
once, so that it always loads and stores. A prompt's beginning comes from kvd or is computed; its
answer is always that of an engine without kvd, in tokens and log-probabilities. The daemon keeps
its pool. It is away for a moment, or longer than a load may take.

Counted are the requests that the engine aborted, which happens with LAYERWISE alone, and those it
did not answer, which must not happen. The last line of the output is JSON.
"""

import json
import random
import sys
import tempfile
import threading
import time
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Self

import psutil

from kvd_tools.engine_server import Completion
from kvd_tools.errors import DemoError, RequestAborted
from kvd_tools.models import LLAMA, write_model
from kvd_tools.sglang_engine import SglangServer, SglangServerOptions
from tests.daemon.serving import Daemon, started_daemons
from tests.engine_answers import TOLERANCE, ask_all, far_apart
from tests.sglang.support import prompts, with_kvd
from tests.waiting import PATIENCE, eventually

# Little to compute with and much to load, so that the daemon is often killed while it loads.
MODEL = LLAMA | {"num_hidden_layers": 4, "num_key_value_heads": 8, "head_dim": 128}
PROMPTS, PROMPT_TOKENS = 24, 1000  # five times what the engine's own cache holds
DEVICE_TOKENS = 5120
POOL = "2GiB"
CLIENTS = 4
LOAD_TIMEOUT = 10.0  # kvd's default
IN_A_LOAD = 0.7  # of the kills; the others are at any moment
LONGEST_LOAD, LONGEST_LIFE, LONGEST_GAP = 0.02, 1.0, 0.5
WHOLE = 0.7  # of the kills take lanes as well; left alone they end by themselves
LONG_GAP = 0.05  # of the gaps are longer than a load may take
FOUND_SECONDS = 60.0


@dataclass
class Tally:
    """What was done and seen."""

    kills: int = 0
    answers: int = 0
    found: int = 0  # answers whose beginning was found, in the engine's own cache or kvd's
    failed_loads: int = 0  # computed instead, or aborted
    begun_anew: int = 0  # loads that failed first, with LAYERWISE
    aborted: int = 0
    wrong: list[str] = field(default_factory=list)  # other tokens or log-probabilities
    unanswered: list[str] = field(default_factory=list)  # requests without an answer or an abort
    slowest: float = 0.0  # seconds


class Load:
    """Clients that ask an engine for these prompts without a pause, until the context ends."""

    def __init__(
        self,
        engine: SglangServer,
        expected: list[tuple[list[int], Completion]],
        tally: Tally,
        seed: int,
    ) -> None:
        self._engine, self._expected, self._tally = engine, expected, tally
        self._over = threading.Event()
        self._changed = threading.Condition()
        self._clients = [
            threading.Thread(target=self._ask, args=(random.Random(seed + number),))
            for number in range(CLIENTS)
        ]

    def __enter__(self) -> Self:
        for client in self._clients:
            client.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for client in self._clients:
            client.join(PATIENCE)

    def wait_found(self) -> None:
        """Wait until a whole prompt is found again."""
        with self._changed:
            before = self._tally.found
            if not self._changed.wait_for(lambda: self._tally.found > before, FOUND_SECONDS):
                self._tally.unanswered.append(f"nothing was found for {FOUND_SECONDS:g} s")

    def _ask(self, source: random.Random) -> None:
        while not self._over.is_set() and self._engine.running:
            number = source.randrange(len(self._expected))
            prompt, expected = self._expected[number]
            try:
                (answer,) = self._engine.generate([prompt])
            except RequestAborted:
                with self._changed:
                    self._tally.aborted += 1
            except DemoError as error:
                with self._changed:
                    self._tally.unanswered.append(str(error)[:200])
            else:
                with self._changed:
                    self._count(number, answer, expected)

    def _count(self, number: int, answer: Completion, expected: Completion) -> None:
        tally = self._tally
        tally.answers += 1
        tally.slowest = max(tally.slowest, answer.seconds)
        if answer.cached_tokens > PROMPT_TOKENS // 2:
            tally.found += 1
            self._changed.notify_all()
        if far_apart(answer, expected) > TOLERANCE:
            tally.wrong.append(f"prompt {number}, {answer.cached_tokens} tokens found")


def kill(daemon: Daemon, *, whole: bool) -> None:
    """Kill the broker, or all processes of the daemon at once."""
    process = psutil.Process(daemon.process.pid)
    for victim in [*(process.children(recursive=True) if whole else ()), process]:
        with suppress(psutil.NoSuchProcess):
            victim.kill()
    daemon.process.wait(PATIENCE)


def run(kills: int, seed: int, *, layerwise: bool, staging: bool) -> Tally:
    """Kill the daemon so many times."""
    tally, source = Tally(), random.Random(seed)
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="kvd-", dir="/tmp")))
        start = stack.enter_context(started_daemons(place / "run"))
        plain = SglangServerOptions(write_model(place / "model", MODEL), DEVICE_TOKENS, threads=2)
        asked = prompts(PROMPTS, tokens=PROMPT_TOKENS)
        with SglangServer(plain, place / "plain.log") as engine:
            expected = list(zip(asked, ask_all(engine, asked), strict=True))
        next_daemon = partial(start, "--keep-pool", "yes", cpu_bytes=POOL, ready=False)
        daemon = next_daemon()
        daemon.wait_ready()
        extra: dict[str, Any] = {"load_timeout": LOAD_TIMEOUT, "deadline": 1}
        extra |= {"layerwise": layerwise, "transfer": "staging" if staging else "auto"}
        options = with_kvd(plain, daemon.runtime_dir, **extra)
        log = place / "engine.log"
        engine = stack.enter_context(SglangServer(options, log))
        load = stack.enter_context(Load(engine, expected, tally, seed))
        for number in range(kills):
            daemon.wait_ready()
            load.wait_found()
            if source.random() < IN_A_LOAD:
                eventually(daemon.status, itemgetter("leases"))  # of what a request loads
                time.sleep(source.uniform(0.0, LONGEST_LOAD))
            else:
                time.sleep(source.uniform(0.0, LONGEST_LIFE))
            kill(daemon, whole=source.random() < WHOLE)
            tally.kills += 1
            long = source.random() < LONG_GAP
            time.sleep(LOAD_TIMEOUT + 2 if long else source.uniform(0.0, LONGEST_GAP))
            daemon = next_daemon()
            if (number + 1) % 10 == 0:
                print(json.dumps(asdict(tally)), flush=True)
            if not engine.running:
                tally.unanswered.append("the engine has ended")
                break
        load.wait_found()
        lines = log.read_text(errors="replace")
        tally.failed_loads = lines.count(" were not loaded in ")
        tally.begun_anew = lines.count(" is submitted again")
    return tally


def main() -> int:
    """The command line: kills, seed, --layerwise and --staging."""
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    ways = {"layerwise": "--layerwise" in sys.argv, "staging": "--staging" in sys.argv}
    kills = int(words[0]) if words else 100
    seed = int(words[1]) if len(words) > 1 else random.SystemRandom().randrange(2**31)
    began = time.monotonic()
    tally = run(kills, seed, **ways)
    seconds = round(time.monotonic() - began, 1)
    print(json.dumps({"seconds": seconds, "seed": seed} | ways | asdict(tally)))
    return 1 if tally.wrong or tally.unanswered or (tally.aborted and not ways["layerwise"]) else 0


if __name__ == "__main__":
    sys.exit(main())
