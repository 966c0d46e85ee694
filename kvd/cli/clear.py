"""`kvd clear` and `kvd evict`: drop chunks of a running daemon."""

import sys
from pathlib import Path

import click

from kvd.cli.asking import control, duration
from kvd.cli.naming import find_namespace
from kvd.cli.options import runtime_dir_option
from kvd_proto.messages import Clear, Cleared, EvictOlderThan, OlderEvicted
from kvd_proto.sizes import format_size

# The daemon drops chunks between other things; millions of them take it some seconds.
_PATIENCE_SECONDS = 120.0

_namespace_option = click.option(
    "--namespace",
    metavar="ID-OR-MODEL",
    help="This one only: its id, the beginning of its id, or its model's name. [default: all]",
)


@click.command()
@runtime_dir_option
@_namespace_option
@click.option("--yes", is_flag=True, help="Do not ask.")
def clear(*, runtime_dir: Path, namespace: str | None, yes: bool) -> None:
    """Drop every chunk, of all namespaces or of one.

    Engines go on; what they look for is a miss and computed anew. Stores that are
    under way are given up. Chunks that a load has pinned are found by nobody any
    more and go when the load has ended. Namespaces that no engine uses are closed.

    \b
    Examples:
      kvd clear --namespace llama-70b
      kvd clear --yes
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    with control(runtime_dir) as daemon:
        ns_id, name = find_namespace(daemon, namespace)
        if not yes:
            _confirm(f"Drop every chunk of {name}?")
        done = daemon.ask(Clear(namespace=ns_id), Cleared, _PATIENCE_SECONDS)
    deferred = f"; {done.deferred} more go when their leases end" if done.deferred else ""
    print(f"{name}: {done.chunks} chunks dropped, {format_size(done.bytes)}{deferred}")


@click.command()
@runtime_dir_option
@_namespace_option
@click.option(
    "--older-than",
    required=True,
    callback=duration,
    metavar="DURATION",
    help="Since a chunk was stored or last used, such as 1h or 2d.",
)
def evict(*, runtime_dir: Path, namespace: str | None, older_than: float) -> None:
    """Drop the chunks that were of no use for some time.

    A chunk is of use when a request stores, loads or offers it. Pinned
    chunks are in use and stay. Room that becomes free by it is free for every
    namespace.

    \b
    Examples:
      kvd evict --older-than 1h
      kvd evict --older-than 2d --namespace llama-70b
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    with control(runtime_dir) as daemon:
        ns_id, name = find_namespace(daemon, namespace)
        order = EvictOlderThan(seconds=older_than, namespace=ns_id)
        done = daemon.ask(order, OlderEvicted, _PATIENCE_SECONDS)
    print(f"{name}: {done.chunks} chunks evicted, {format_size(done.bytes)}")


def _confirm(question: str) -> None:
    if not sys.stdin.isatty():
        raise click.ClickException(f"{question} Nobody is here to answer; say --yes if so")
    click.confirm(question, abort=True)
