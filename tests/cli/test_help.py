"""Help texts, the man page made of them, and shell completion."""

import inspect
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from docs import generate_man
from kvd.cli import cli
from kvd.cli.manual import commands, man_page
from kvd.settings import KNOWN

ROOT = click.Context(cli, info_name="kvd", **cli.context_settings)
ALL = {context.command_path: command for command, context in commands(cli, ROOT)}


def examples(command: click.Command) -> list[str]:
    """The lines below "Examples:"."""
    _, _, below = inspect.cleandoc(command.help or "").partition("\b\nExamples:\n")
    return [line.strip() for line in below.split("\n\n")[0].splitlines()]


@pytest.mark.parametrize("path", ["kvd", *ALL])
def test_every_command_has_examples_that_it_understands(path: str) -> None:
    """Each example names this command, and only options that the command has."""
    lines = examples(cli if path == "kvd" else ALL[path])
    assert lines, f"{path} has no examples"
    for line in lines:
        assert path in line, f"an example of {path} is about something else: {line}"
        words = shlex.split(line, comments=True)
        while words and words[0] != "kvd":
            words.pop(0)  # variables before the command
        called, name = ROOT, "kvd"
        command: click.Command = cli
        for word in words[1:]:
            found = command.get_command(called, word) if isinstance(command, click.Group) else None
            if found is None:
                break
            command, name = found, f"{name} {word}"
            called = click.Context(found, info_name=word, parent=called)
        options = {
            text
            for parameter in command.get_params(called)
            for text in (*parameter.opts, *parameter.secondary_opts)
        }
        for word in words:
            if word in {"|", "&&", ">"}:
                break
            if word.startswith("-"):
                assert word.split("=")[0] in options, f"{line}: {name} has no {word}"


def test_the_man_page_is_current() -> None:
    """docs/man/kvd.1 says what the commands say of themselves."""
    assert generate_man.FILE.read_text(encoding="utf-8") == man_page(cli), "run make docs"


def test_the_man_page_names_every_command_and_setting() -> None:
    """Nothing that a user can type is missing from the page."""
    page = man_page(cli).replace("\\-", "-")
    assert all(f".SS {path}" in page for path in ALL)
    assert all(f"\\fB{key}\\fR" in page for key in KNOWN)


@pytest.mark.skipif(shutil.which("groff") is None, reason="groff is not installed")
def test_the_man_page_is_good_troff() -> None:
    """Groff formats it without a warning, and lines that begin with a dot stay text."""
    done = subprocess.run(
        ["groff", "-man", "-ww", "-Tascii", str(generate_man.FILE)],
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    assert not done.stderr
    text = re.sub(".\b", "", done.stdout)  # bold is a letter struck twice
    assert "SETTINGS" in text
    assert all(path in text for path in ALL)


@pytest.mark.skipif(shutil.which("mandoc") is None, reason="mandoc is not installed")
def test_the_man_page_passes_mandoc() -> None:
    """Mandoc finds no error."""
    subprocess.run(
        ["mandoc", "-Tlint", "-W", "error", str(generate_man.FILE)], check=True, timeout=60
    )


def test_help_of_a_command_is_its_own_help() -> None:
    """`kvd help config show` prints what `kvd config show --help` prints."""
    run = CliRunner()
    shown = run.invoke(cli, ["help", "config", "show"], prog_name="kvd")
    own = run.invoke(cli, ["config", "show", "--help"], prog_name="kvd")
    assert shown.exit_code == 0
    assert shown.output == own.output
    listed = run.invoke(cli, ["help"], prog_name="kvd").output
    assert all(path.split()[1] in listed for path in ALL)


@pytest.mark.parametrize(
    ("names", "words"),
    [(["nonsense"], "status"), (["config", "x"], "check"), (["plan", "x"], "has no commands")],
)
def test_help_of_nothing_says_what_there_is(names: list[str], words: str) -> None:
    """An unknown name gives exit status 1 and the names that are known."""
    done = CliRunner().invoke(cli, ["help", *names], prog_name="kvd")
    assert done.exit_code == 1
    assert words in done.output


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


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_get_a_script(shell: str) -> None:
    """The scripts for zsh and fish complete the command kvd."""
    done = CliRunner().invoke(cli, ["completion", shell])
    assert done.exit_code == 0
    assert f"_KVD_COMPLETE={shell}_complete" in done.output
