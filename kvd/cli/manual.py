"""The man page kvd(1), made of the commands' own help and of what kvd/settings.py says."""

import inspect
from collections.abc import Iterator

import click

from kvd.config.render import toml_value
from kvd.config.sources import DEFAULT_FILE, FILE_VARIABLE
from kvd.settings import KNOWN
from kvd.version import VERSION

_VERBATIM = "\b"  # click's mark for a paragraph that is not rewrapped
_LEADING = (".", "'")  # these begin a request to troff

_EXIT = """\
0 where what was asked for was done or is so, 1 where it was not, 2 where the command line could \
not be understood."""

_FILES = (
    (str(DEFAULT_FILE), "The settings, where the file exists."),
    ("/run/kvd", "The runtime directory: sockets and the lock."),
    ("/dev/shm/kvd-*", "The pool; a daemon that has stopped may keep it, see kvd purge."),
)


def man_page(root: click.Group) -> str:
    """The page in man's language, troff with the macros of man(7)."""
    context = click.Context(root, info_name="kvd", **root.context_settings)
    lines = [f'.TH KVD 1 "" "kvd {_text(VERSION)}" "User Commands"']
    lines += [".SH NAME", "kvd \\- keep an inference server's KV cache in a daemon of its own"]
    lines += [".SH SYNOPSIS", ".B kvd", r"\fICOMMAND\fR [\fIOPTION\fR]... [\fIARGUMENT\fR]..."]
    lines += [".SH DESCRIPTION", *_prose(root.help or "")]
    lines.append(".SH COMMANDS")
    for command, inner in commands(root, context):
        lines += _command(command, inner)
    lines += [".SH SETTINGS", *_prose(_settings_words())]
    for known in KNOWN.values():
        default = f"Default: {toml_value(known.default)}."
        live = " Changes live." if known.about.live else ""
        lines += _item(known.key, f"{known.about.help} Needs {known.needs}. {default}{live}")
    lines.append(".SH ENVIRONMENT")
    lines += _item(FILE_VARIABLE, "The file with the settings, where --config names none.")
    lines += _item("KVD_<KEY>", "A setting, such as KVD_CPU_BYTES; an empty one is not set.")
    lines += _item("NO_COLOR", "The log has no colour on a terminal.")
    lines.append(".SH FILES")
    for path, words in _FILES:
        lines += _item(path, words)
    lines += [".SH EXIT STATUS", _text(_EXIT)]
    return "\n".join(lines) + "\n"


def commands(
    group: click.Group, context: click.Context
) -> Iterator[tuple[click.Command, click.Context]]:
    """Every command below a group, each with its context, in the order of their names."""
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        if command is None or command.hidden:
            continue
        inner = click.Context(command, info_name=name, parent=context)
        yield command, inner
        if isinstance(command, click.Group):
            yield from commands(command, inner)


def _command(command: click.Command, context: click.Context) -> list[str]:
    usage = " ".join(command.collect_usage_pieces(context))
    lines = [f".SS {_text(context.command_path)} {_text(usage)}", *_prose(command.help or "")]
    for parameter in command.get_params(context):
        record = parameter.get_help_record(context)
        if record is not None and record[1] and "--help" not in record[0]:
            lines += _item(*record)
    return lines


def _settings_words() -> str:
    return (
        f"The daemon reads them from {DEFAULT_FILE} (or the file named by --config or"
        f" {FILE_VARIABLE}), then from the environment, then from the flags of kvd serve; the"
        " later wins. In the environment a setting is KVD_ and its key in capitals, as a flag it"
        " is the key with dashes. Commands that talk to a daemon find its runtime_dir by the same"
        " rules."
    )


def _item(name: str, words: str) -> list[str]:
    return [".TP", rf"\fB{_text(name)}\fR", _text(" ".join(words.split()))]


def _prose(words: str) -> list[str]:
    lines = []
    for paragraph in inspect.cleandoc(words).split("\n\n"):
        if paragraph.startswith(_VERBATIM):
            lines += [".PP", ".nf", *map(_text, paragraph.splitlines()[1:]), ".fi"]
        else:
            lines += [".PP", _text(" ".join(paragraph.split()))]
    return lines


def _text(words: str) -> str:
    escaped = words.replace("\\", "\\e").replace("-", "\\-").replace('"', "\\(dq")
    return rf"\&{escaped}" if escaped.startswith(_LEADING) else escaped
