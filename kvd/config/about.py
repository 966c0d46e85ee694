"""The description of one setting, beside its type and default.

`Settings` carries an `About` in the annotation of every field. Checks, the
options of `kvd serve`, `kvd config show`, the sample file and the table in
docs/configuration.md all come from there; to add a setting is to add a field.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
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
        wants: what a value must be, where the type cannot say it.
        check: raises SizeError, or ConfigError with the remedy, where a value is not that.
        parse: makes the value of a variable's or a flag's text; raises ConfigError.
        key, hint, default: of the field: its name, its type with all annotations, its value
            where none is given.
    """

    help: str
    section: str
    metavar: str
    live: bool = False
    wants: str = ""
    check: Callable[[Any], object] | None = None
    parse: Callable[[str], Any] | None = None
    key: str = ""
    hint: Any = None
    default: Any = None

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
        if self.wants:
            return self.wants
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
        try:
            if self.parse is not None and not typed:
                value = self.parse(value)
            result = msgspec.convert(value, self.hint, strict=typed)
            if self.check is not None:
                self.check(result)
        except (msgspec.ValidationError, SizeError) as error:
            raise ConfigError(f"needs {self.needs}") from error
        return result


def known_in(settings: type[msgspec.Struct]) -> Iterator[About]:
    """Every setting of a struct whose fields carry `About`."""
    hints = get_type_hints(settings, include_extras=True)
    for field in msgspec.structs.fields(settings):
        hint = hints[field.name]
        about = next(mark for mark in hint.__metadata__ if isinstance(mark, About))
        made = field.default_factory is not msgspec.NODEFAULT
        default = field.default_factory() if made else field.default
        yield replace(about, key=field.name, hint=hint, default=default)
