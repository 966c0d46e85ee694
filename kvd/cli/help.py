"""`kvd help` and `kvd completion`."""

from typing import Any

import click
from click.shell_completion import get_completion_class

_PLACES = {
    "bash": "/etc/bash_completion.d/kvd",
    "zsh": "/usr/share/zsh/site-functions/_kvd",
    "fish": "/usr/share/fish/vendor_completions.d/kvd.fish",
}


@click.command("help")
@click.argument("names", metavar="[COMMAND]...", nargs=-1)
@click.pass_context
def help_command(context: click.Context, *, names: tuple[str, ...]) -> None:
    """Explain a command, or list them all.

    \b
    Examples:
      kvd help
      kvd help status
      kvd help config show
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    root = context.find_root()
    command, inner = _find(root, names)
    print(command.get_help(inner))


@click.command()
@click.argument("shell", type=click.Choice(list(_PLACES)))
@click.pass_context
def completion(context: click.Context, *, shell: str) -> None:
    """Print the script that completes kvd's commands and options in SHELL.

    \b
    Examples:
      kvd completion bash > /etc/bash_completion.d/kvd
      kvd completion zsh > /usr/share/zsh/site-functions/_kvd
      kvd completion fish > /usr/share/fish/vendor_completions.d/kvd.fish
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"this version of click knows no completion for {shell}")
    print(kind(context.find_root().command, {}, "kvd", "_KVD_COMPLETE").source())


def _find(root: click.Context, names: tuple[str, ...]) -> tuple[click.Command, click.Context]:
    command, context = root.command, root
    for name in names:
        inner: Any = None
        if isinstance(command, click.Group):
            inner = command.get_command(context, name)
        if inner is None:
            known = command.list_commands(context) if isinstance(command, click.Group) else []
            below = f"; there are: {', '.join(known)}" if known else "; it has no commands"
            raise click.ClickException(f"{context.command_path} {name}: no such command{below}")
        command, context = inner, click.Context(inner, info_name=name, parent=context)
    return command, context
