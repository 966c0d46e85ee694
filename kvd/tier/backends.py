"""Backends by the name that an operator writes before the colon: entry points of `kvd.tiers`."""

from collections.abc import Sequence
from importlib.metadata import entry_points

from kvd.config.values import TierSetting
from kvd.errors import ConfigError
from kvd.tier.contract import Options, Tier

GROUP = "kvd.tiers"


def backend(setting: TierSetting) -> type[Tier]:
    """Return the class that serves a tier.

    Raises:
        ConfigError: there is none of this name, or it cannot be imported; says what to do.
    """
    known = {point.name: point for point in entry_points(group=GROUP)}
    if setting.kind not in known:
        raise ConfigError(
            f"{setting.text!r}: no tier is called {setting.kind}; known are"
            f" {', '.join(sorted(known)) or 'none: install kvd again'}"
        )
    try:
        found = known[setting.kind].load()
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{setting.text!r}: {known[setting.kind].value} cannot be imported ({error});"
            " install what it needs, or remove the tier"
        ) from error
    if not (isinstance(found, type) and issubclass(found, Tier)):
        raise ConfigError(f"{setting.text!r}: {known[setting.kind].value} is no kvd.tier Tier")
    return found


def options_of(setting: TierSetting) -> Options:
    """What of a tier's setting its backend is told."""
    return Options(setting.target, setting.options)


def check_tiers(settings: Sequence[TierSetting]) -> list[type[Tier]]:
    """Return the tiers' classes, which have looked at what is written for them, without any I/O.

    Raises:
        ConfigError: all that is wrong, a line each.
    """
    kinds, problems = [], []
    for setting in settings:
        try:
            kinds.append(backend(setting))
            kinds[-1].check(options_of(setting))
        except ConfigError as error:
            text = str(error)
            problems.append(text if setting.text in text else f"{setting.text!r}: {text}")
    if problems:
        raise ConfigError("\n".join(problems))
    return kinds
