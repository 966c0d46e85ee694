"""The fuzzer, for a moment: the long one is `make fuzz`."""

import random
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvd.broker.sessions import Registry
from kvd.cache.chunks import ChunkTable
from kvd_proto.messages import REPLY_OF, TAGS
from tests.fuzz.core_target import play_core
from tests.fuzz.live_target import LiveTarget
from tests.fuzz.mutate import CHANGES, mutated, random_script
from tests.fuzz.run import TARGETS
from tests.fuzz.script import Case, Script, Step
from tests.fuzz.sessions import engine_session, session
from tests.fuzz.target import Finding, play_codec, shorter
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


def test_a_live_daemon_stands_mutated_sessions(runtime_dir: Path) -> None:
    """Broker and lane stay the same processes, others are served, nothing is left over."""
    rng = random.Random(20)
    with LiveTarget(runtime_dir) as live:
        for _ in range(LIVE_SCRIPTS):
            live.play(random_script(rng))
        live.look()
        eventually(lambda: live.neighbour.verified_bytes)
        assert live.neighbour.wrong == 0


def test_valid_sessions_are_served(runtime_dir: Path) -> None:
    """What is mutated is worth mutating: unchanged, its stores and loads succeed."""
    with LiveTarget(runtime_dir, valid=True) as live:
        live.neighbour.pause()
        live.look()
        live.neighbour.pause()
        before = live.jobs()
        for seed in range(8):
            live.play(engine_session(random.Random(seed)))
        live.look()
        live.neighbour.pause()
        # The lane counts beside its work: what has been answered is in its figures a little later.
        eventually(
            lambda: live.jobs() - before, lambda new: min(new["store_ok"], new["load_ok"]) >= 8
        )


@pytest.mark.parametrize("path", CASES, ids=lambda path: path.stem)
def test_what_was_found_stays_mended(path: Path) -> None:
    """Files of frames that once found a fault find none."""
    case = Case.load(path)
    TARGETS[case.target](case.script)


def test_a_case_is_written_and_read_again(tmp_path: Path) -> None:
    """A file holds the frames as they are, marks included."""
    case = Case("core", 7, "none", random_script(random.Random(7)))
    case.save(tmp_path / "case.json")
    assert Case.load(tmp_path / "case.json") == case


def test_a_finding_is_made_shorter() -> None:
    """Of a long script those steps are left that the finding needs."""

    def pair(script: Script) -> None:
        times = [step.actor for step in script]
        if 3 in times and 17 in times[times.index(3) :]:
            raise Finding("a pair")

    script = tuple(Step(number, "time") for number in range(40))
    assert [step.actor for step in shorter(script, pair, 200)] == [3, 17]


def _raises(*_: object, **__: object) -> NoReturn:
    raise RuntimeError("planted")


@pytest.mark.parametrize(
    ("owner", "name", "planted", "leak"),
    [
        (ChunkTable, "finished", _raises, False),
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
    frames = [part for script in scripts for step in script for part in step.parts]
    sent = {TAGS[int.from_bytes(frame[6:8], "little")] for frame in frames}
    assert sent == {*REPLY_OF}
