"""Commands to a running daemon: status, engines, namespaces, clear, evict, drain, explain."""

import json
import sys
import time
from pathlib import Path
from typing import Any

import click

from kvd.cli.options import duration, json_option, runtime_dir_option, wide_option
from kvd.errors import NotRunning, SocketAccessDenied
from kvd.metrics import reading
from kvd.metrics.counts import MissReason
from kvd.wire.tool import ToolConnection
from kvd_proto.messages import (
    MAX_KEY_BYTES,
    ChunkFate,
    Clear,
    Cleared,
    Drain,
    Drained,
    Explain,
    Explained,
    Resume,
    Resumed,
)
from kvd_proto.text import format_size

_POLL_SECONDS = 0.05


@click.command()
@runtime_dir_option
@json_option("Print the whole report as JSON.")
@click.option(
    "--wait",
    callback=duration,
    default="0",
    metavar="DURATION",
    help="Wait up to this long for ready, such as 30s or 2m.",
)
@wide_option
def status(*, runtime_dir: Path, as_json: bool, wait: float, wide: bool) -> None:
    """Show the daemon's state; exit status 0 only when it is ready.

    \b
    Examples:
      kvd status
      kvd status --runtime-dir /run/kvd --json | jq .pool
      kvd status --wait 30s && start-my-engine
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    deadline = time.monotonic() + wait
    while True:
        timed_out = time.monotonic() >= deadline
        try:
            report = _report(runtime_dir)
            if timed_out or report["ready"]:
                break
        except SocketAccessDenied:  # waiting does not help
            raise
        except NotRunning:
            if timed_out:
                raise
        time.sleep(_POLL_SECONDS)
    _print("report", report, as_json=as_json, wide=wide)
    sys.exit(0 if report["ready"] else 1)


@click.command()
@runtime_dir_option
@json_option("Print `engines` of the report as JSON.")
@wide_option
def engines(*, runtime_dir: Path, as_json: bool, wide: bool) -> None:
    """List the engines that are connected, with every rank.

    \b
    Examples:
      kvd engines
      kvd engines --json | jq '.[] | select(.attached | not) | .name'
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    _print("engines", _report(runtime_dir)["engines"], as_json=as_json, wide=wide)


@click.command()
@runtime_dir_option
@json_option("Print `namespaces` of the report as JSON.")
@wide_option
def namespaces(*, runtime_dir: Path, as_json: bool, wide: bool) -> None:
    """List the namespaces: whose chunks are kept, how many, in how much of the pool.

    \b
    Examples:
      kvd namespaces
      kvd namespaces --json | jq -r '.[] | select(.engines == 0) | .id'
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    _print("namespaces", _report(runtime_dir)["namespaces"], as_json=as_json, wide=wide)


def _report(runtime_dir: Path) -> dict[str, Any]:
    with ToolConnection(runtime_dir) as daemon:
        return daemon.status()


def _print(kind: str, value: Any, *, as_json: bool, wide: bool) -> None:
    if as_json:
        print(json.dumps(value, indent=2))
    else:
        from kvd.cli import tables  # noqa: PLC0415  # --json does not need it

        getattr(tables, f"print_{kind}")(value, wide=wide)


# The daemon drops chunks between requests; millions of them take seconds.
_CLEAR_SECONDS = 120.0

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
    """Drop every chunk of the open namespaces, or of one, in memory and in tiers.

    Engines go on: their lookups miss, and they compute. Stores in flight are dropped. Chunks that a
    load has pinned are no longer found, and dropped when their leases end. Namespaces without an
    engine are closed, unless a slot is still in use. Namespaces that are not open (see kvd status)
    keep their chunks in tiers.

    \b
    Examples:
      kvd clear --namespace llama-70b
      kvd clear --yes
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    with ToolConnection(runtime_dir) as daemon:
        ns_id, name = _find_namespace(daemon, namespace)
        if not yes:
            question = f"Drop every chunk of {name}?"
            if not sys.stdin.isatty():
                raise click.ClickException(f"{question} There is no terminal to ask; give --yes")
            click.confirm(question, abort=True)
        reply = daemon.ask(Clear(namespace=ns_id), Cleared, _CLEAR_SECONDS)
    deferred = f"; {reply.deferred} more go when their leases end" if reply.deferred else ""
    print(f"{name}: {reply.chunks} chunks dropped, {format_size(reply.bytes)}{deferred}")


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
    """Drop the chunks that were not used for some time.

    A chunk is used when a request stores, loads or offers it. Pinned chunks stay. Every namespace
    can use the freed space.

    \b
    Examples:
      kvd evict --older-than 1h
      kvd evict --older-than 2d --namespace llama-70b
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    with ToolConnection(runtime_dir) as daemon:
        ns_id, name = _find_namespace(daemon, namespace)
        request = Clear(unused_seconds=older_than, namespace=ns_id)
        reply = daemon.ask(request, Cleared, _CLEAR_SECONDS)
    print(f"{name}: {reply.chunks} chunks evicted, {format_size(reply.bytes)}")


@click.command()
@runtime_dir_option
@click.option(
    "--wait",
    callback=duration,
    default="0",
    metavar="DURATION",
    help="Return when nothing is in flight, or fail after this long, such as 30s.",
)
def drain(*, runtime_dir: Path, wait: float) -> None:
    """Take no new stores until `kvd resume`; the daemon is then not ready.

    New stores are refused, stores in flight are finished, and loads are served as before. With
    --wait the command returns when all stores and loads that were in flight at the drain have
    ended; exit status 1: some had not in time. The drain lasts until `kvd resume` or the end of the
    daemon.

    \b
    Examples:
      kvd drain
      kvd drain --wait 30s && systemctl restart kvd
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    deadline = time.monotonic() + wait
    with ToolConnection(runtime_dir) as daemon:
        reply = daemon.ask(Drain(), Drained)
        stores, leases = reply.stores, reply.leases
        while (stores or leases) and time.monotonic() < deadline:
            time.sleep(_POLL_SECONDS)
            report: dict[str, Any] | None = daemon.status()["drain"]
            if report is None:
                raise click.ClickException("the daemon was resumed meanwhile; its log says by whom")
            stores, leases = report["stores_in_flight"], report["leases_in_flight"]
    in_flight = f"in flight: {stores} chunks being written, {leases} leases of loads"
    print(f"drained: no new stores; {in_flight if stores or leases else 'nothing is in flight'}")
    sys.exit(1 if wait and (stores or leases) else 0)


@click.command()
@runtime_dir_option
def resume(*, runtime_dir: Path) -> None:
    """Take stores again after `kvd drain`.

    A daemon that stops because of SIGTERM does not come back by this.

    \b
    Examples:
      kvd resume
      kvd resume --runtime-dir /run/kvd && kvd status --wait 10s
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    with ToolConnection(runtime_dir) as daemon:
        reply = daemon.ask(Resume(), Resumed)
    print("resumed: stores are taken" if reply.was_draining else "stores are taken as before")


def _key(context: click.Context, parameter: click.Parameter, text: str) -> bytes:
    """Parse a key from hex digits; a callback."""
    del context, parameter
    try:
        key = bytes.fromhex(text)
    except ValueError:
        key = b""
    if not 0 < len(key) <= MAX_KEY_BYTES:
        raise click.BadParameter(
            f"{text!r}: a key has 2 to {2 * MAX_KEY_BYTES} hex digits, an even number"
        )
    return key


@click.command()
@runtime_dir_option
@_namespace_option
@click.argument("key", callback=_key)
def explain(*, runtime_dir: Path, namespace: str | None, key: bytes) -> None:
    """Say what became of the chunk of KEY: in memory, being stored, evicted, refused, never seen.

    KEY is in hex digits; with vLLM a block's hash and the group's index. The daemon
    remembers twice as many keys as the pool has chunks, since its start.

    \b
    Examples:
      kvd explain 5c0ffee5c0ffee5c0ffee5c0ffee5c0f00000000
      kvd explain --namespace llama-70b 5c0ffee5c0ffee5c0ffee5c0ffee5c0f00000000
    """  # noqa: D301  # \b is click's mark for text that is not rewrapped
    with ToolConnection(runtime_dir) as daemon:
        ns_id, _ = _find_namespace(daemon, namespace)
        fates = daemon.ask(Explain(key=key, namespace=ns_id), Explained).chunks
    for fate in fates:
        print(f"namespace {fate.namespace.hex()[:8]} ({fate.model}): {_fate_text(fate)}")
    if not fates:
        print("no namespace is open")


_FATE_TEXTS = {
    MissReason.EVICTED: "evicted {gone} ago",
    MissReason.REFUSED: "not stored {gone} ago: no slot was at hand",
    MissReason.QUOTA: "not stored {gone} ago: the model held what its cap allows",
    MissReason.RESET: "dropped {gone} ago by a reset, or by kvd clear",
    MissReason.REMOVED: "dropped {gone} ago by kvd evict",
    MissReason.NEVER_SEEN: "never seen, as far back as the daemon remembers",
    MissReason.OTHER_LAYOUT: "never seen here; another namespace has it",
    MissReason.BEING_STORED: "being stored in slot {slot}",
    MissReason.READY: "READY in slot {slot}, last used {used} ago",
}


def _fate_text(fate: ChunkFate) -> str:
    gone_ago, used_ago = (
        reading.duration(None if ms is None else ms / 1000) for ms in (fate.gone_ms, fate.used_ms)
    )
    text = _FATE_TEXTS[MissReason(fate.reason)].format(gone=gone_ago, used=used_ago, slot=fate.slot)
    if fate.requests:
        suffix = " or more" if fate.requests == 3 else ""
        text += f"; {fate.requests}{suffix} finished requests had it"
    return f"{text}; in tier {', '.join(fate.tiers)}" if fate.tiers else text


def _find_namespace(daemon: ToolConnection, pattern: str | None) -> tuple[bytes | None, str]:
    """Return id and name of the only namespace that matches; None and `all` without a pattern."""
    if pattern is None:
        return None, "all open namespaces"
    namespaces: list[dict[str, Any]] = daemon.status()["namespaces"]
    names = {
        namespace["id"]: f"namespace {namespace['id'][:8]} ({namespace['model']})"
        for namespace in namespaces
    }
    ids = [
        namespace["id"]
        for namespace in namespaces
        if pattern == namespace["model"]
        or (pattern and namespace["id"].startswith(pattern.lower()))
    ]
    if not ids:
        listed = ", ".join(names.values()) or "none"
        raise click.ClickException(f"--namespace {pattern}: no such namespace; there are: {listed}")
    if len(ids) > 1:
        listed = ", ".join(names[ns_id] for ns_id in ids)
        raise click.ClickException(f"--namespace {pattern} is ambiguous: {listed}; give an id")
    return bytes.fromhex(ids[0]), names[ids[0]]
