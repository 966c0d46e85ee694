"""The `kvd` command. A subcommand's module is imported only when it is used.

Other packages add commands through the entry-point group `kvd.commands`.
"""

import difflib
import importlib
import json
import os
from typing import TYPE_CHECKING, Any

import click

from kvd.version import VERSION

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint


_COMMANDS = {
    "clear": "kvd.cli.operate:clear",
    "drain": "kvd.cli.operate:drain",
    "engines": "kvd.cli.operate:engines",
    "evict": "kvd.cli.operate:evict",
    "explain": "kvd.cli.operate:explain",
    "namespaces": "kvd.cli.operate:namespaces",
    "resume": "kvd.cli.operate:resume",
    "serve": "kvd.cli.serve:serve",
    "status": "kvd.cli.operate:status",
    "top": "kvd.cli.top:top",
    "plan": "kvd.cli.plan:plan",
    "purge": "kvd.cli.serve:purge",
    "replay": "kvd.cli.plan:replay",
    "doctor": "kvd.cli.config:doctor",
    "config": "kvd.cli.config:config",
    "help": "kvd.cli:help_command",
    "completion": "kvd.cli:completion",
}

AS_JSON = "kvd.cli.json"
"""Key in a context's `meta`: whether the command prints JSON, errors included."""

_TOOL_COMMANDS = {"demo", "demo-sglang", "demo-vllm", "selftest"}
"""Commands of the distribution `kvd-offload-tools`."""


class _LazyGroup(click.Group):
    """A group that imports commands when they are used, and prints errors as one line or JSON."""

    def invoke(self, ctx: click.Context) -> Any:
        from kvd.errors import KvdError, Refusal  # noqa: PLC0415  # completion does not need it
        from kvd_proto.errors import ProtoError  # noqa: PLC0415

        try:
            return super().invoke(ctx)
        except click.UsageError:
            raise
        except click.ClickException as error:
            failure = error
        except (KvdError, ProtoError) as error:
            text = str(error)
            if isinstance(error, Refusal):
                text = f"the daemon refuses: {error} [{error.code}]"
            failure = click.ClickException(text)
        if ctx.meta.get(AS_JSON):
            print(json.dumps({"error": failure.message}))
        raise failure

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:  # click does not know the lazy commands
            matches = difflib.get_close_matches(args[0], self.list_commands(ctx), n=1)
            if not matches:
                raise
            text = f"{error.message} Did you mean {matches[0]!r}?"
            raise click.UsageError(text, ctx) from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return sorted({*_COMMANDS, *(entry.name for entry in _foreign_commands())})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        target = _COMMANDS.get(cmd_name)
        if target is not None:
            # No command computes, and numpy would start a thread for each core.
            os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
            module, _, name = target.partition(":")
            command = getattr(importlib.import_module(module), name)
        else:
            entries = [entry for entry in _foreign_commands() if entry.name == cmd_name]
            if not entries and cmd_name in _TOOL_COMMANDS:
                raise tools_missing(cmd_name)
            if not entries:
                return None
            command = _with_kvd_options(entries[0].load())
        if not isinstance(command, click.Command):
            raise click.ClickException(f"{cmd_name} is registered but is no command: {command!r}")
        return command


def tools_missing(command: str) -> click.ClickException:
    """Return the error of a command that needs the distribution `kvd-offload-tools`."""
    return click.ClickException(
        f"kvd {command} is not installed here; in kvd's source tree run: pip install ./client/tools"
    )


def _foreign_commands() -> list["EntryPoint"]:
    """Return the commands of other packages; the search takes longer than all own imports."""
    from importlib.metadata import entry_points  # noqa: PLC0415

    return list(entry_points(group="kvd.commands"))


def _with_kvd_options(command: Any) -> Any:
    """Make another package's command find the runtime directory and print errors as kvd's do."""
    from kvd.cli.options import (  # noqa: PLC0415  # costs imports
        RUNTIME_DIR,
        find_reachable_dir,
        store_json,
    )

    if isinstance(command, click.Command):
        for parameter in command.params:
            if parameter.name == "as_json":
                parameter.callback = store_json
        command.params = [
            click.Option(["--runtime-dir"], **RUNTIME_DIR | {"callback": find_reachable_dir})
            if parameter.name == "runtime_dir"
            else parameter
            for parameter in command.params
        ]
    return command


_CONTEXT_SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": 100}


@click.group(cls=_LazyGroup, context_settings=_CONTEXT_SETTINGS)
@click.version_option(VERSION, prog_name="kvd")
def cli() -> None:
    """Keep an inference server's KV cache in a daemon of its own.

    The pool of host memory outlives the engines that use it. `kvd serve` runs the daemon, the
    other commands talk to it, or plan and try without it.

    \b
    Examples:
      kvd serve --cpu-bytes 64GiB
      kvd status
      kvd help drain
      kvd plan Meta-Llama-3-70B/ --tp 8 --cpu-bytes 512GiB
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped


_COMPLETION_PATHS = {
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
@click.argument("shell", type=click.Choice(list(_COMPLETION_PATHS)))
@click.pass_context
def completion(context: click.Context, *, shell: str) -> None:
    """Print the script that completes kvd's commands and options in SHELL.

    \b
    Examples:
      kvd completion bash > /etc/bash_completion.d/kvd
      kvd completion zsh > /usr/share/zsh/site-functions/_kvd
      kvd completion fish > /usr/share/fish/vendor_completions.d/kvd.fish
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    from click.shell_completion import get_completion_class  # noqa: PLC0415

    kind = get_completion_class(shell)
    if kind is None:
        raise click.ClickException(f"this version of click knows no completion for {shell}")
    print(kind(context.find_root().command, {}, "kvd", "_KVD_COMPLETE").source())
