"""The description of one setting, beside its type and default.

`Settings` carries an `About` in the annotation of every field. Checks, the
options of `kvd serve`, `kvd config show`, the sample file and the table in
docs/configuration.md all come from there; to add a setting is to add a field.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvd.errors import ConfigError
from kvd_proto.errors import SizeError

ENVIRONMENT_PREFIX = "KVD_"


@dataclass(frozen=True, slots=True)
class About:
    """Description of a setting.

    Attributes:
        help: one line, a sentence.
        section: under which heading of the sample file it stands.
        metavar: what stands for a value in help texts.
        live: `kvd config reload` applies a change; the others need a restart.
        needs: what a value must be, where the type cannot say it.
        check: raises SizeError, or ConfigError with the remedy, where a value is not that.
        parse: makes the value of a variable's or a flag's text; raises ConfigError.
    """

    help: str
    section: str
    metavar: str
    live: bool = False
    needs: str = ""
    check: Callable[[Any], object] | None = None
    parse: Callable[[str], Any] | None = None


@dataclass(frozen=True, slots=True)
class Known:
    """One setting that exists.

    Attributes:
        key: its name in the file.
        about: its description.
        hint: its type with all annotations.
        default: the value where none is given.
    """

    key: str
    about: About
    hint: Any
    default: Any

    @property
    def flag(self) -> str:
        """The option of `kvd serve`."""
        return "--" + self.key.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.key.upper()

    @property
    def choices(self) -> tuple[str, ...]:
        """The words that it may be, where they are few."""
        base = get_args(self.hint)[0]
        return get_args(base) if get_origin(base) is Literal else ()

    @property
    def needs(self) -> str:
        """What a value must be, for people."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.about.needs:
            return self.about.needs
        number = "a whole number" if get_args(self.hint)[0] is int else "a number"
        bounds = next(mark for mark in self.hint.__metadata__ if isinstance(mark, Meta))
        if bounds.ge is not None:
            return f"{number} from {bounds.ge:g} to {bounds.le:g}"
        return f"{number} above {bounds.gt:g} and at most {bounds.le:g}"

    def convert(self, value: Any, *, typed: bool) -> Any:
        """Return the value as the setting holds it.

        Args:
            value: as found.
            typed: it comes from TOML, which knows numbers from text; else it is text.

        Raises:
            ConfigError: it cannot be one; the text says what can.
        """
        about = self.about
        try:
            if about.parse is not None and not typed:
                value = about.parse(value)
            result = msgspec.convert(value, self.hint, strict=typed)
            if about.check is not None:
                about.check(result)
        except (msgspec.ValidationError, SizeError) as error:
            raise ConfigError(f"needs {self.needs}") from error
        return result


def known_in(settings: type[msgspec.Struct]) -> Iterator[Known]:
    """Every setting of a struct whose fields carry `About`."""
    hints = get_type_hints(settings, include_extras=True)
    for field in msgspec.structs.fields(settings):
        hint = hints[field.name]
        about = next(mark for mark in hint.__metadata__ if isinstance(mark, About))
        empty = field.default_factory is not msgspec.NODEFAULT
        yield Known(field.name, about, hint, field.default_factory() if empty else field.default)
