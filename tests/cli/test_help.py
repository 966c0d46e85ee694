"""Help texts with their examples, and shell completion."""

import inspect
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kvd.cli import cli


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
        name = max((each for each in ALL if typed.startswith(f"{each} ")), key=len)
        known = {option for parameter in ALL[name].params for option in parameter.opts}
        for word in words:
            if word in {"|", "&&", ">"}:
                break
            if word.startswith("-"):
                assert word.split("=")[0] in known, f"{line}: {name} has no {word}"


@pytest.mark.parametrize("name", ["demo", "demo-sglang", "demo-vllm", "selftest"])
def test_a_tool_that_is_not_installed_says_how_to_install_it(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Without the tools' distribution one sentence names it, exit status 1."""
    monkeypatch.setattr("kvd.cli._foreign_commands", list)
    result = CliRunner().invoke(cli, [name])
    assert result.exit_code == 1
    assert result.stderr == (
        f"Error: kvd {name} is not installed here;"
        " in kvd's source tree run: pip install ./client/tools\n"
    )


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
