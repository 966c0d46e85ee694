"""The settings `allow_users` and `allow_groups`: names or numbers, with commas between."""

from dataclasses import dataclass

from kvd.config.about import Mark
from kvd.errors import ConfigError

_MAX_ID = 2**32 - 2


@dataclass(frozen=True, slots=True)
class NamesText(Mark):
    """Marks a field that lists users or groups; `what` is either word."""

    what: str

    @property
    def needs(self) -> str:
        """What a value must be, for people."""
        return f"names or numbers of {self.what}, with commas between; or nothing"

    def check(self, value: str) -> None:
        """Look whether it is a list; whether the names exist is asked where the daemon runs.

        Raises:
            ConfigError: it is none.
        """
        names_in(value)


def names_in(text: str) -> list[str]:
    """The items of a list; none for an empty text.

    Raises:
        ConfigError: an item is empty, or a number out of range.
    """
    if not text.strip():
        return []
    items = [item.strip() for item in text.split(",")]
    for item in items:
        if not item or (item.isdecimal() and int(item) > _MAX_ID):
            raise ConfigError(f"{item!r} is neither a name nor a number")
    return items
