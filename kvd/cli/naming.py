"""Which namespace an operator means by an id, its beginning, or a model's name."""

from typing import Any

import click

from kvd.wire.tool import Control
from kvd_proto.messages import Status, StatusReport

ALL = "all namespaces"


def find_namespace(daemon: Control, name: str | None) -> tuple[bytes | None, str]:
    """The id of the namespace, and how to call it; None means all of them.

    Raises:
        ClickException: none has this name, or several have.
    """
    if name is None:
        return None, ALL
    space = pick(daemon.ask(Status(), StatusReport).status["namespaces"], name)
    return bytes.fromhex(space["id"]), words(space)


def pick(namespaces: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """The one namespace of a report that `name` means.

    Raises:
        ClickException: none, or several.
    """
    found = [
        space
        for space in namespaces
        if name == space["model"] or (name and space["id"].startswith(name.lower()))
    ]
    if len(found) == 1:
        return found[0]
    listed = ", ".join(map(words, found or namespaces)) or "none"
    if found:
        raise click.ClickException(f"--namespace {name}: several are meant: {listed}; give an id")
    raise click.ClickException(f"--namespace {name}: no such namespace; there are: {listed}")


def words(space: dict[str, Any]) -> str:
    """A namespace of a report, for people."""
    return f"namespace {space['id'][:8]} ({space['model']})"
