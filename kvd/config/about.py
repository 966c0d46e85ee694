"""What there is to say about one setting, beside its type and default.

`Settings` carries an `About` in the annotation of every field. Checks, the
options of `kvd serve`, `kvd config show`, the sample file and the table in
docs/configuration.md all come from there; to add a setting is to add a field.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvd.config.listen import parse_listen
from kvd.errors import KvdError
from kvd_proto.errors import ProtoError, SizeError
from kvd_proto.sizes import format_size, parse_size

ENVIRONMENT_PREFIX = "KVD_"


@dataclass(frozen=True, slots=True)
class About:
    """A setting in words.

    Attributes:
        help: one line, a sentence.
        section: under which heading of the sample file it stands.
        metavar: what stands for a value in help texts.
        live: `kvd config reload` applies a change; the others need a restart.
        needs: what a value must be, where the type cannot say it.
    """

    help: str
    section: str
    metavar: str
    live: bool = False
    needs: str = ""


class Mark(ABC):
    """In a field's annotation: what a value must be, where its type says too little.

    `explains`: its errors say more than `needs` does, and are shown before it.
    """

    explains = False

    def parse(self, text: str) -> Any:
        """The value that a variable or a flag means.

        Raises:
            KvdError: it means none.
        """
        return text

    @property
    @abstractmethod
    def needs(self) -> str:
        """What a value must be, for people."""

    @abstractmethod
    def check(self, value: Any) -> None:
        """Look whether it is that.

        Raises:
            KvdError, ProtoError: it is not.
        """


@dataclass(frozen=True, slots=True)
class SizeText(Mark):
    """Marks a field that holds a size: a number of bytes, or text such as 64GiB.

    Attributes:
        auto: the word `auto` is allowed too.
        least: a smaller one makes no sense.
    """

    auto: bool = False
    least: int = 0

    @property
    def needs(self) -> str:
        """What a value must be, for people."""
        least = f" of at least {format_size(self.least)}" if self.least else ""
        return f"a size{least} such as 64GiB or 512MiB{', or auto' if self.auto else ''}"

    def check(self, value: str | int) -> None:
        """Look whether it is a size.

        Raises:
            SizeError: it is none.
        """
        self.bytes_of(value)

    def bytes_of(self, value: str | int) -> int | None:
        """The size, or None for `auto`.

        Raises:
            SizeError: it is neither.
        """
        if self.auto and value == "auto":
            return None
        size = parse_size(value)
        if size < self.least:
            raise SizeError(f"{format_size(size)} is too small")
        return size


class ListenText(Mark):
    """Marks a field that holds an address to listen on."""

    @property
    def needs(self) -> str:
        """What a value must be, for people."""
        return "HOST:PORT such as 127.0.0.1:9330 or [::1]:9330 (port 0: any free one), or off"

    def check(self, value: str) -> None:
        """Look whether it is an address.

        Raises:
            ConfigError: it is none.
        """
        parse_listen(value)


@dataclass(frozen=True, slots=True)
class Known:
    """One setting that exists.

    Attributes:
        key: its name in the file.
        about: the words.
        hint: its type with all annotations.
        default: what holds where nobody says otherwise.
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
        mark = self._mark(Mark)
        if mark is not None:
            return str(mark.needs)
        if self.about.needs:
            return self.about.needs
        base, bounds = get_args(self.hint)[0], self._mark(Meta)
        if base is str:
            return "text in quotes"
        number = "a whole number" if base is int else "a number"
        return number + _range(bounds)

    def convert(self, value: Any, *, typed: bool) -> Any:
        """The value as the setting holds it.

        Args:
            value: as found.
            typed: it comes from TOML, which knows numbers from text; else it is text.

        Raises:
            ValueError: it cannot be one; the text says what can.
        """
        mark = self._mark(Mark)
        try:
            if mark is not None and not typed:
                value = mark.parse(value)
            result = msgspec.convert(value, self.hint, strict=typed)
            if mark is not None:
                mark.check(result)
        except (msgspec.ValidationError, KvdError, ProtoError) as error:
            reason = f"{error}: " if mark is not None and mark.explains else ""
            raise ValueError(f"{reason}needs {self.needs}") from error
        return result

    def _mark(self, kind: type) -> Any:
        return next((mark for mark in self.hint.__metadata__ if isinstance(mark, kind)), None)


def _range(bounds: Meta | None) -> str:
    if bounds is None:
        return ""
    parts = []
    if bounds.gt is not None:
        parts.append(f"above {bounds.gt:g}")
    if bounds.ge is not None:
        parts.append(f"from {bounds.ge:g}")
    if bounds.le is not None:
        parts.append(f"to {bounds.le:g}" if bounds.ge is not None else f"and at most {bounds.le:g}")
    return " " + " ".join(parts)


def known_in(settings: type[msgspec.Struct]) -> Iterator[Known]:
    """Every setting of a struct whose fields carry `About`."""
    hints = get_type_hints(settings, include_extras=True)
    for field in msgspec.structs.fields(settings):
        hint = hints[field.name]
        about = next(mark for mark in hint.__metadata__ if isinstance(mark, About))
        empty = field.default_factory is not msgspec.NODEFAULT
        yield Known(field.name, about, hint, field.default_factory() if empty else field.default)
