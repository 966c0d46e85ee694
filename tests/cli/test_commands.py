"""What commands print: help, completion, names, and why no daemon answers."""

import inspect
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from rich.console import Console

from kvd.cli import cli
from kvd.cli.tables import print_report
from kvd.cli.top import picture
from kvd.errors import NotRunning, SocketAccessDenied
from kvd.metrics.reading import History
from kvd.wire.tool import ToolConnection
from kvd_proto.codec import WIRE
from kvd_proto.messages import Error, ErrorCode, Message, Ping, Pong, Status, StatusReport
from tests.client.fake_daemon import FakeDaemon
from tests.daemon.users import OTHER_UID, as_user, needs_root
from tests.report.reports import loaded_report
from tests.waiting import PATIENCE, eventually


def commands(
    command: click.Command, path: str, parent: click.Context | None = None
) -> Iterator[tuple[str, click.Command]]:
    """A command and every command below it, by what is typed."""
    yield path, command
    context = click.Context(command, info_name=path, parent=parent)
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            below = command.get_command(context, name)
            assert below is not None
            yield from commands(below, f"{path} {name}", context)


ALL = dict(commands(cli, "kvd"))


@pytest.mark.parametrize("path", ALL)
def test_every_command_has_examples_that_it_understands(path: str) -> None:
    """Each example names this command, and only options that the command has."""
    _, _, below = inspect.cleandoc(ALL[path].help or "").partition("\b\nExamples:\n")
    lines = [line.strip() for line in below.split("\n\n")[0].splitlines()]
    assert lines, f"{path} has no examples"
    for line in lines:
        assert path in line, f"an example of {path} is about something else: {line}"
        words = shlex.split(line[line.index("kvd ") :], comments=True)
        typed = " ".join([*words, ""])
        name = max((command for command in ALL if typed.startswith(f"{command} ")), key=len)
        known = {option for parameter in ALL[name].params for option in parameter.opts}
        for word in words:
            if word in {"|", "&&", ">"}:
                break
            if word.startswith("-"):
                assert word.split("=")[0] in known, f"{line}: {name} has no {word}"


def test_a_tool_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without the tools' distribution one sentence names it, exit status 1."""
    monkeypatch.setattr("kvd.cli._foreign_commands", list)
    remedy = "is not installed here; in kvd's source tree run: pip install ./client/tools"
    for name in ("demo", "demo-sglang", "demo-vllm", "selftest"):
        result = CliRunner().invoke(cli, [name])
        assert (result.exit_code, result.stderr) == (1, f"Error: kvd {name} {remedy}\n")


def test_bash_completes_commands_options_and_words() -> None:
    """The script for bash works in bash: subcommands, options, the words of a setting."""
    kvd = Path(sys.executable).parent / "kvd"
    script = """
        eval "$(kvd completion bash)"
        ask() { COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _kvd_completion kvd; }
        ask kvd sta; echo "${COMPREPLY[@]}"
        ask kvd config ch; echo "${COMPREPLY[@]}"
        ask kvd serve --cpu; echo "${COMPREPLY[@]}"
        ask kvd serve --policy l; echo "${COMPREPLY[@]}"
    """
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
        env=os.environ | {"PATH": f"{kvd.parent}:{os.environ['PATH']}"},
    )
    assert done.stdout.splitlines() == ["status", "check", "--cpu-bytes", "lru"]


SOON = 0.3
REFUSAL = WIRE.encode(Error(code=ErrorCode.FORBIDDEN, text="not\x1b you"))
PONG = WIRE.encode(Pong(pid=1))
VERSION_3 = PONG[:4] + b"\3\0" + PONG[6:16] + bytes(32) + PONG[16:]  # whose headers are longer


@pytest.fixture
def fake(runtime_dir: Path) -> Iterator[FakeDaemon]:
    """A daemon that does as a test says."""
    runtime_dir.mkdir(mode=0o711)
    with FakeDaemon(runtime_dir) as started:
        yield started


@pytest.mark.parametrize(
    ("act", "why"),
    [
        (
            lambda fake: fake.send(VERSION_3),
            "speaks protocol version 3, .* is it of another version",
        ),
        (lambda fake: fake.sessions[0].client.channel.detach(), "has closed the connection"),
        (lambda fake: fake.send(REFUSAL), r"refuses: not\\x1b you"),
        (lambda _: None, r"did not answer Ping within 0\.3 s"),
    ],
    ids=["another version", "end", "refusal", "silence"],
)
def test_a_request_without_a_reply_names_the_cause(
    fake: FakeDaemon, act: Callable[[FakeDaemon], object], why: str
) -> None:
    """Another version, the end, its reason, or silence."""

    def reply(_: Message) -> None:
        act(fake)

    fake.replies[Ping] = reply
    with (
        ToolConnection(fake.runtime_dir, PATIENCE) as control,
        pytest.raises(NotRunning, match=why),
    ):
        control.request(Ping(), SOON if "within" in why else None)


def test_an_absent_daemon_is_named_with_the_systems_reason(tmp_path: Path) -> None:
    """No socket, a file that is none, one on which nothing listens, a name that is too long."""
    broker_socket = tmp_path / "broker.sock"
    start = "; start one with: kvd serve"
    with pytest.raises(NotRunning, match=rf"no daemon answers .*\(No such file .*{start}"):
        ToolConnection(broker_socket.parent)
    broker_socket.touch()
    with pytest.raises(NotRunning, match=r"\(Connection refused\)"):
        ToolConnection(broker_socket.parent)
    broker_socket.unlink()
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(str(broker_socket))
        with pytest.raises(NotRunning, match=r"\(Connection refused\)"):
            ToolConnection(broker_socket.parent)
    with pytest.raises(NotRunning, match="path too long"):
        ToolConnection(broker_socket.parent / ("x" * 100))


@pytest.mark.parametrize("accepts", [True, False])
def test_a_frozen_daemon_is_named_in_time(tmp_path: Path, *, accepts: bool) -> None:
    """The system accepts for it and nothing answers, or its backlog is full."""
    broker_socket = tmp_path / "broker.sock"
    with socket.socket(socket.AF_UNIX) as frozen:
        frozen.bind(str(broker_socket))
        frozen.listen(0)
        waiting = []
        while not accepts:
            client = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
            waiting.append(client)
            if client.connect_ex(str(broker_socket)):
                break
        with pytest.raises(NotRunning, match=r"does not answer within 0\.3 s: it is frozen"):
            ToolConnection(broker_socket.parent, SOON)
        for client in waiting:
            client.close()


@needs_root
def test_a_socket_that_may_not_be_reached_is_explained(fake: FakeDaemon) -> None:
    """Its mode and its group, with the remedy."""
    fake.runtime_dir.parent.chmod(0o711)
    (fake.runtime_dir / "broker.sock").chmod(0o600)
    denied = f"uid {OTHER_UID} may not connect to"
    with as_user(), pytest.raises(SocketAccessDenied, match=denied):
        ToolConnection(fake.runtime_dir)


EVIL = "a\x1b[2J\0\u202e"
SHOWN = "a\\x1b[2J\\x00\\u202e"
LOOKUPS = ("lookup_chunks", "hit_chunks", "lookup_tokens", "hit_tokens", "detached_tokens")
LONG = "org/a-model-with-a-name-that-is-longer-than-most-terminals-are-wide-" + "x" * 60


@pytest.mark.parametrize("name", [EVIL, EVIL + LONG])
@pytest.mark.parametrize("command", ["status", "engines", "namespaces", "top"])
def test_no_command_writes_a_names_escapes_to_the_terminal(
    fake: FakeDaemon, command: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """ESC, NUL and changes of direction are written out; with --wide names are whole."""
    monkeypatch.setenv("COLUMNS", "200")
    report = loaded_report(60.0)
    report["engines"][0]["name"] = name
    for space in report["namespaces"]:
        space["model"] = name
    report["events"][0]["text"] = f"engine {name} is here"
    fake.replies[Status] = lambda _: StatusReport(status=report)
    arguments = [command, "--runtime-dir", str(fake.runtime_dir)]
    arguments += ["--wide"] if name != EVIL else []
    arguments += ["--once", "--interval", "0.1"] if command == "top" else []
    done = eventually(lambda: CliRunner().invoke(cli, arguments), lambda it: it.exit_code == 0)
    assert not set("\x1b\0\u202e") & set(done.output)
    assert name.replace(EVIL, SHOWN) in done.output


@pytest.mark.parametrize(("columns", "cut"), [(80, True), (120, False)])
def test_names_take_the_room_that_a_terminal_has(columns: int, *, cut: bool) -> None:
    """Where a line has none left, the middle of a name is left out; nothing else is shortened."""
    report = loaded_report(60.0)
    name = "vllm-llama-3-3-70b-instruct-prefill-7c9d8f6b5d-x2k4q"
    report["engines"] = [report["engines"][0] | {"name": name}]
    report["namespaces"] = [report["namespaces"][0] | {"model": f"{name}-model"}]
    history = History()
    history.add(report)
    with (console := Console(width=columns, color_system=None)).capture() as shown:
        console.print(picture(history))
    lines = shown.get().splitlines()
    for text, beside in ((f"{name}-model", "1,536 ready, 12 pinned"), (name, "attached")):
        (line,) = (line for line in lines if "vllm-llama-3" in line and beside in line)
        assert (text in line, "\N{HORIZONTAL ELLIPSIS}" in line) == (not cut, cut)
        assert text[-13:] in line


def test_names_are_no_markup(capsys: pytest.CaptureFixture[str]) -> None:
    """Brackets in names and errors are printed as they are."""
    report = loaded_report(1.0)
    report["engines"][0]["name"] = "[red]evil[/]"
    report["namespaces"][0]["model"] = "[/]"
    print_report(report)
    assert "[red]evil[/]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("lookups", "shown"),
    [
        ({}, "0"),
        ({"lookup_chunks": 25, "hit_chunks": 16}, "not known"),
        ({"lookup_chunks": 25, "hit_chunks": 25}, "0"),
        # Two keys were polled until their stores had ended.
        ({"lookup_chunks": 27, "hit_chunks": 25, "lookup_tokens": 9, "hit_tokens": 9}, "0"),
        ({"lookup_chunks": 27, "hit_chunks": 25, "lookup_tokens": 9, "hit_tokens": 8}, "not known"),
        # What no daemon served has its reason.
        ({"lookup_chunks": 2, "lookup_tokens": 9, "detached_tokens": 9}, "0"),
    ],
)
def test_misses_that_no_engine_reports_are_not_shown_as_none(
    capsys: pytest.CaptureFixture[str], lookups: dict[str, int], shown: str
) -> None:
    """Where lookups missed and no miss was reported, `kvd status` does not say that none was."""
    report = loaded_report(1.0)
    report["counters"] |= dict.fromkeys(LOOKUPS, 0) | lookups
    report["counters"]["missed"] = dict.fromkeys(report["counters"]["missed"], 0)
    print_report(report)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "chunks missed" in line]
    assert line.split("\N{BOX DRAWINGS LIGHT VERTICAL}")[2].strip().startswith(shown)
