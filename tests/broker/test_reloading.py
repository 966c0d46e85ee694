"""Reading the configuration again: what is taken up, what waits, who is answered."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvd.broker.broker import Broker
from kvd.broker.effects import Effect, LogEvent, ToLane
from kvd.broker.operations import apply_live_settings
from kvd.client_names import Peer
from kvd.config.settings import SETTINGS, Settings
from kvd.config.sources import LoadedSettings
from kvd.errors import ConfigError
from kvd.wire.link import LaneLog
from kvd_proto.messages import (
    ConfigReloaded,
    ConfigShown,
    ErrorCode,
    ReloadConfig,
    ShowConfig,
)
from tests.broker.brokers import join, make_broker, refusal, replies

START = Settings(runtime_dir="/nowhere", cpu_bytes=2**20)


@pytest.fixture
def broker() -> Broker:
    """One with a pool and the host's lane."""
    return make_broker(START.cpu_bytes)


def tool(broker: Broker) -> int:
    """A session that has said HELLO; its number."""
    return join(broker, "tool", peer=Peer(77, 5, 5)).number


def ask(broker: Broker, number: int, message: ReloadConfig | ShowConfig) -> list[Effect]:
    """What a request of this session brings."""
    return broker.request(broker.state.registry.sessions[number], 9, message, 0.0)


def read(**changes: object) -> LoadedSettings:
    """What a reading brings: the settings of the start with these changes."""
    settings = msgspec.structs.replace(START, **changes)
    origins = {key: "kvd.toml:1" if key in changes else "default" for key in SETTINGS}
    return LoadedSettings(settings, origins, Path("kvd.toml"))


def reload(broker: Broker, outcome: LoadedSettings | ConfigError) -> list[Effect]:
    """What a tool's order brings whose reading ends so."""
    assert ask(broker, tool(broker), ReloadConfig()) == []
    assert broker.reloading.begin()
    return broker.reloading.finish(outcome)


def test_what_can_change_live_holds_at_once(broker: Broker) -> None:
    """Times, limits and the log's level reach every part of the daemon that uses them."""
    changed = read(
        lease_seconds=1.0,
        ticket_seconds=2.0,
        max_sessions=3,
        max_sessions_per_user=2,
        log_level="debug",
    )
    effects = reload(broker, changed)
    assert broker.state.settings == changed.settings
    assert broker.state.registry.max_sessions == 3
    assert broker.state.registry.max_sessions_per_user == 2
    assert ToLane("host", LaneLog(level="debug")) in effects
    (reply,) = replies(effects)
    assert isinstance(reply.message, ConfigReloaded)
    assert all(change.live for change in reply.message.changes)
    (event,) = [effect for effect in effects if isinstance(effect, LogEvent)]
    assert "uid 5 pid 77" in event.text
    assert "lease_seconds = 1.0 (was 60.0)" in event.text


def test_what_cannot_change_live_waits_and_is_shown(broker: Broker) -> None:
    """A new pool size is named, changes nothing, and stands beside the value that holds."""
    reload(broker, read(cpu_bytes="1GiB"))
    assert broker.state.settings == START
    (reply,) = replies(ask(broker, tool(broker), ShowConfig()))
    assert isinstance(reply.message, ConfigShown)
    shown = reply.message.config["settings"]["cpu_bytes"]
    assert (shown["value"], shown["from"]) == (2**20, "default")
    assert shown["after_restart"] == {"value": "1GiB", "from": "kvd.toml:1"}
    broker.reloading.sighup()
    broker.reloading.begin()
    broker.reloading.finish(read())
    assert not broker.reloading.loaded.pending_restart


def test_a_file_that_cannot_be_used_changes_nothing(broker: Broker) -> None:
    """The old settings hold, the tool gets all that is wrong, the log says who asked."""
    effects = reload(broker, ConfigError("line one\nline two"))
    assert broker.state.settings == START
    error = refusal(effects)
    assert (error.code, error.text) == (ErrorCode.BAD_CONFIG, "line one\nline two")
    (event,) = [effect for effect in effects if isinstance(effect, LogEvent)]
    assert event.level == "error"
    assert "uid 5 pid 77" in event.text


def test_who_asks_during_a_reading_is_answered_from_the_next(broker: Broker) -> None:
    """A reading that began before the question may not answer it; nobody is forgotten."""
    first, second, third = (tool(broker) for _ in range(3))
    ask(broker, first, ReloadConfig())
    assert broker.reloading.begin()
    ask(broker, second, ReloadConfig())
    ask(broker, third, ReloadConfig())
    assert not broker.reloading.begin()
    answered = [reply.session for reply in replies(broker.reloading.finish(read()))]
    assert answered == [first]
    assert broker.reloading.begin()
    answered = [reply.session for reply in replies(broker.reloading.finish(read()))]
    assert answered == [second, third]
    assert not broker.reloading.begin()


@given(
    st.lists(
        st.fixed_dictionaries(
            {},
            optional={
                "lease_seconds": st.sampled_from([1.0, 2.0, 60.0]),
                "cpu_bytes": st.sampled_from(["auto", "1GiB", 2**20]),
                "policy": st.sampled_from(["adaptive", "lru"]),
                "max_sessions": st.sampled_from([1, 1024]),
            },
        ),
        max_size=6,
    )
)
def test_after_any_readings_live_settings_are_the_last_and_others_the_first(
    readings: list[dict[str, object]],
) -> None:
    """Live settings follow the file, the others stay, and exactly what differs waits."""
    present = LoadedSettings(START)
    for changes in readings:
        present, _ = apply_live_settings(present, read(**changes))
    last = read(**readings[-1]).settings if readings else START
    for key, known in SETTINGS.items():
        wanted = getattr(last if known.live else START, key)
        assert getattr(present.settings, key) == wanted
        assert (key in present.pending_restart) == (getattr(last, key) != wanted)
