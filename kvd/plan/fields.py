"""Whole numbers of a config.json."""

from collections.abc import Mapping
from typing import Any

from kvd.errors import PlanError


def optional(fields: Mapping[str, Any], names: tuple[str, ...], least: int = 1) -> int | None:
    """Return the first of these fields that is there and not null.

    Raises:
        PlanError: it is no whole number of at least `least`.
    """
    for name in names:
        value = fields.get(name)
        if value is None:
            continue
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise PlanError(f"{name} = {value!r} is no whole number of at least {least}")
        return value
    return None


def required(fields: Mapping[str, Any], names: tuple[str, ...]) -> int:
    """Return the first of these fields that is there.

    Raises:
        PlanError: none is, or it is no whole number above 0.
    """
    value = optional(fields, names)
    if value is None:
        aliases = f" (nor {', '.join(names[1:])})" if names[1:] else ""
        raise PlanError(f"the model configuration has no {names[0]}{aliases}; is it a config.json?")
    return value
