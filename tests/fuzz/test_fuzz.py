"""The fuzzer, for a moment: the long one is `make fuzz`."""

import random
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.broker.sessions import Registry
from kvd.broker.status_report import status_report
from kvd.cache.chunks import ChunkTable
from kvd.cache.uses import Loads
from kvd_proto.messages import REPLY_OF, TAGS
from tests.fuzz.core_target import CorePlay, play_core
from tests.fuzz.live_target import live_target
from tests.fuzz.mutate import CHANGES, mutated, random_script
from tests.fuzz.run import TARGETS, play_codec
from tests.fuzz.sessions import Case, Finding, engine_session, session
from tests.waiting import eventually

CASES = sorted((Path(__file__).parent / "cases").glob("*.json"))
SEEDS = st.integers(0, 2**32)
COMMON = st.tuples(st.sampled_from(sorted(set(CHANGES) - {"large"})), SEEDS)
SHORT = settings(derandomize=True, database=None, max_examples=150)
LIVE_SCRIPTS = 40


@SHORT
@given(SEEDS, st.lists(st.tuples(st.sampled_from(sorted(CHANGES)), SEEDS), max_size=6))
def test_the_codec_refuses_what_is_no_message(seed: int, changes: list[tuple[str, int]]) -> None:
    """Every frame of a mutated session is a message or a DecodeError."""
    play_codec(mutated(session(random.Random(seed)), changes))


@SHORT
@given(SEEDS, st.lists(COMMON, max_size=6))
def test_the_broker_decides_on_anything(seed: int, changes: list[tuple[str, int]]) -> None:
    """A mutated session leaves the broker's state sound, each request answered, nothing held."""
    play_core(mutated(session(random.Random(seed)), changes))


def test_a_live_daemon_stands_mutated_sessions() -> None:
    """Broker and lane stay the same processes, others are served, nothing is left over."""
    rng = random.Random(20)
    with live_target() as live:
        for _ in range(LIVE_SCRIPTS):
            live.play(random_script(rng))
        live.look()
        eventually(lambda: live.neighbour.verified_bytes)
        assert live.neighbour.wrong == 0


def test_valid_sessions_are_served() -> None:
    """What is mutated is worth mutating: unchanged, its stores and loads succeed."""
    for seed in range(20):
        play = CorePlay()
        for step in engine_session(random.Random(seed)):
            play.do(step)
        counters = status_report(play.broker.state, 1, "fuzz", play.now)["counters"]
        assert counters["stored"], seed
        assert counters["hits"], seed


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_what_was_found_stays_mended(path: Path) -> None:
    """Files of frames that once found a fault find none."""
    case = Case.load(path)
    TARGETS[case.target](case.script)


def _raises(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    ("owner", "name", "planted", "leak"),
    [
        (Loads, "refresh", _raises, False),
        (ChunkTable, "drop_owner", lambda *_: [], True),
        (Registry, "remove", lambda *_: None, True),
    ],
)
def test_planted_faults_are_found(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, planted: object, leak: bool
) -> None:
    """A handler that raises is a crash; what is not given back is a leak."""
    monkeypatch.setattr(owner, name, planted)
    found = []
    for seed in range(60):
        try:
            play_core(random_script(random.Random(seed)))
        except Finding as finding:
            found.append(finding)
    assert found
    assert any(finding.leak for finding in found) == leak


def test_every_request_is_generated() -> None:
    """Valid sessions have every message that a client may send."""
    scripts = [session(random.Random(seed)) for seed in range(300)]
    frames = [step.frame for script in scripts for step in script if step.frame]
    sent = {TAGS[int.from_bytes(frame[6:8], "little")] for frame in frames}
    assert sent == {*REPLY_OF}
