"""`kvd help` and `kvd completion`."""

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
    context.find_root().command.main([*names, "--help"], prog_name="kvd")


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
