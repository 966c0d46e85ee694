"""The daemon's settings with their descriptions; each is a field of `Settings`.

The fields define the checks, the options of `kvd serve`, `kvd config show`, the sample file and the
table in docs/configuration.md; `kvd.config.sources` finds the values. Sizes are text such as
``64GiB`` or bytes; durations are seconds.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta

from kvd.config.values import (
    QUOTA_NEEDS,
    TIER_LIST_NEEDS,
    Quota,
    QuotaTable,
    parse_listen,
    parse_names,
    parse_quotas,
    parse_tiers,
    quotas_of,
    split_tiers,
)
from kvd.errors import ConfigError
from kvd_proto.changes import MAX_CHANGES, MIN_CHANGES
from kvd_proto.errors import SizeError
from kvd_proto.text import parse_size

ENVIRONMENT_PREFIX = "KVD_"


@dataclass(frozen=True, slots=True)
class Setting:
    """Description of a setting.

    Attributes:
        help: one sentence.
        section: its heading in the sample file.
        metavar: placeholder of the value in help texts.
        live: `kvd config reload` applies a change; other settings need a restart.
        expected: valid values, as text, if the type does not define them.
        check: raises SizeError or ConfigError, with the remedy, for an invalid value.
        parse: converts the text of a variable or a flag; raises ConfigError.
        repeatable: the flag may be repeated; `parse` gets the texts joined with `;`.
        key, hint, default: name, annotated type and default of the field.
    """

    help: str
    section: str
    metavar: str
    live: bool = False
    expected: str = ""
    check: Callable[[Any], object] | None = None
    parse: Callable[[str], Any] | None = None
    repeatable: bool = False
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
        """The possible values, if the type lists them; else empty."""
        base = get_args(self.hint)[0]
        return get_args(base) if get_origin(base) is Literal else ()

    @property
    def requirement(self) -> str:
        """The valid values, as text."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        if self.expected:
            return self.expected
        number = "a whole number" if get_args(self.hint)[0] is int else "a number"
        bounds = next(mark for mark in self.hint.__metadata__ if isinstance(mark, Meta))
        if bounds.ge is not None:
            return f"{number} from {bounds.ge:.12g} to {bounds.le:.12g}"
        return f"{number} above {bounds.gt:.12g} and at most {bounds.le:.12g}"

    def convert(self, value: Any, *, typed: bool) -> Any:
        """Return a source's value converted to the setting's type.

        Errors name the key and the value; `check` names the invalid item of a list or table.

        Args:
            value: from the source.
            typed: it comes from TOML, with its type; else it is text.

        Raises:
            ConfigError: the value is invalid; names the valid ones.
        """
        subject, result = f"{self.key} = {value!r}", value
        try:
            if self.parse is not None and not typed:
                result = self.parse(result)
            result = msgspec.convert(result, self.hint, strict=typed)
            if isinstance(result, list | dict):
                subject = self.key
            if self.check is not None:
                self.check(result)
        except msgspec.ValidationError as error:
            raise ConfigError(f"{subject}: needs {self.requirement}") from error
        except SizeError as error:
            suggestion = f"did you mean {error.suggestion}?" if error.suggestion else ""
            raise ConfigError(f"{subject}: needs {self.requirement}", suggestion) from error
        except ConfigError as error:
            raise ConfigError(f"{subject}: {error.text}", error.remedy) from error
        return result


def settings_of(settings: type[msgspec.Struct]) -> Iterator[Setting]:
    """Yield the settings of a struct whose fields are annotated with `Setting`."""
    hints = get_type_hints(settings, include_extras=True)
    for field in msgspec.structs.fields(settings):
        hint = hints[field.name]
        setting = next(
            annotation for annotation in hint.__metadata__ if isinstance(annotation, Setting)
        )
        has_factory = field.default_factory is not msgspec.NODEFAULT
        default = field.default_factory() if has_factory else field.default
        yield replace(setting, key=field.name, hint=hint, default=default)


_DIRECTORIES = "Where the daemon lives"
_POOL = "The pool"
_TIERS = "Tiers below the pool"
_DEADLINES = "Deadlines"
_LIMITS = "Limits"
_ACCESS = "Who may connect"
_LOG = "The log"

_Seconds = Annotated[float, Meta(gt=0, le=86_400)]
_DIRECTORY = "the path of a directory"
_SIZE = "such as 64GiB or 512MiB"
_NAMES = "names or numbers of {}, separated by commas; or nothing"


_MIN_BYTES = 2**16  # a smaller number lacks its unit, such as 5 for 5GiB


def _at_least(minimum: int, value: str | int) -> None:
    if parse_size(value) < minimum:
        raise SizeError(f"{value} is too small")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The settings; every field has a default."""

    runtime_dir: Annotated[
        str,
        Meta(min_length=1),
        Setting(
            "Directory for the sockets and the lock.", _DIRECTORIES, "DIR", expected=_DIRECTORY
        ),
    ] = "/run/kvd"
    pool_dir: Annotated[
        str,
        Meta(min_length=1),
        Setting(
            "Where the pool's file lies: the node's tmpfs.",
            _DIRECTORIES,
            "DIR",
            expected=_DIRECTORY,
        ),
    ] = "/dev/shm"
    http_listen: Annotated[
        str,
        Setting(
            "Where health, metrics and the status page are served.",
            _DIRECTORIES,
            "HOST:PORT",
            expected="HOST:PORT such as 127.0.0.1:9330 or [::1]:9330 (port 0: any free), or off",
            check=parse_listen,
        ),
    ] = "127.0.0.1:9330"
    cpu_bytes: Annotated[
        str | int,
        Setting(
            "Size of the pool; auto takes it from what the first engine reports.",
            _POOL,
            "SIZE",
            expected=f"a size of at least 64 KiB {_SIZE}, or auto",
            check=lambda value: value == "auto" or _at_least(_MIN_BYTES, value),
        ),
    ] = "auto"
    host_ratio: Annotated[
        float,
        Meta(gt=0, le=1000),
        Setting("With auto: bytes of pool for each byte of KV cache on the GPUs.", _POOL, "NUMBER"),
    ] = 2.0
    reserve: Annotated[
        str | int,
        Setting(
            "With auto: memory that is left to other processes.",
            _POOL,
            "SIZE",
            expected=f"a size {_SIZE}",
            check=parse_size,
        ),
    ] = "2GiB"
    policy: Annotated[
        Literal["adaptive", "lru"],
        Setting(
            "What is evicted first: adaptive learns from past requests and their labels what is"
            " used again, and when.",
            _POOL,
            "POLICY",
        ),
    ] = "adaptive"
    keep_pool: Annotated[
        Literal["yes", "no"],
        Setting("Leave the pool and what is in it to the next daemon.", _POOL, "YES|NO"),
    ] = "yes"
    unused_pools: Annotated[
        Literal["keep", "adopt", "remove"],
        Setting(
            "Pools in pool_dir that daemons of other runtime directories have left: keep only names"
            " them, adopt takes over the newest that matches, remove frees them all.",
            _POOL,
            "KEEP|ADOPT|REMOVE",
        ),
    ] = "keep"
    reuse_threshold: Annotated[
        int,
        Meta(ge=1, le=1000),
        Setting(
            "Store a chunk when it is offered for the n-th time. Above 1 each chunk is computed"
            " again before it is stored: 2 lost 7 to 14 points of hits on a chat trace.",
            _POOL,
            "N",
        ),
    ] = 1
    quota: Annotated[
        QuotaTable,
        Setting(
            "Floor and cap of models, as parts of the pool.",
            _POOL,
            "TABLE",
            live=True,
            expected=QUOTA_NEEDS,
            check=lambda table: quotas_of(table, 0),
            parse=parse_quotas,
        ),
    ] = {}  # msgspec makes a new one each time
    change_ring: Annotated[
        int,
        Meta(ge=MIN_CHANGES, le=MAX_CHANGES),
        Setting(
            "Changes of a namespace, of 88 bytes each, that an engine which publishes KV events may"
            " fall behind; made a power of two.",
            _POOL,
            "N",
        ),
    ] = 262144  # a second of the most the broker was seen to write: docs/benchmarks.md
    tier: Annotated[
        list[str],
        Setting(
            "Where chunks go that the pool has no room for; asked in this order.",
            _TIERS,
            "TIER",
            expected=TIER_LIST_NEEDS,
            check=parse_tiers,
            parse=split_tiers,
            repeatable=True,
        ),
    ] = []  # msgspec makes a new one each time
    lease_seconds: Annotated[
        _Seconds,
        Setting(
            "Longest time that a load may keep its chunks pinned.", _DEADLINES, "SECONDS", live=True
        ),
    ] = 60.0
    ticket_seconds: Annotated[
        _Seconds,
        Setting("A store that takes longer is given up.", _DEADLINES, "SECONDS", live=True),
    ] = 60.0
    lane_timeout_seconds: Annotated[
        _Seconds,
        Setting("A lane that is silent for longer is replaced.", _DEADLINES, "SECONDS", live=True),
    ] = 5.0
    lane_idle_seconds: Annotated[
        _Seconds,
        Setting(
            "A GPU's lane that no engine uses for longer ends.", _DEADLINES, "SECONDS", live=True
        ),
    ] = 300.0
    drain_seconds: Annotated[
        _Seconds,
        Setting(
            "How long the daemon waits for copies when it stops.", _DEADLINES, "SECONDS", live=True
        ),
    ] = 10.0
    max_sessions: Annotated[
        int,
        Meta(ge=1, le=65536),
        Setting("Most connections at one time.", _LIMITS, "N", live=True),
    ] = 1024
    max_sessions_per_user: Annotated[
        int,
        Meta(ge=1, le=65536),
        Setting("Most connections of one user at one time.", _LIMITS, "N", live=True),
    ] = 512
    max_namespaces: Annotated[
        int,
        Meta(ge=1, le=4096),
        Setting("Most namespaces at one time; unused ones give way.", _LIMITS, "N", live=True),
    ] = 64
    max_leases: Annotated[
        int,
        Meta(ge=1, le=1_000_000),
        Setting("Most leases that an engine may hold.", _LIMITS, "N", live=True),
    ] = 4096
    max_queued_jobs: Annotated[
        int,
        Meta(ge=1, le=1_000_000),
        Setting("Most jobs of an engine that wait in a lane; then stores are shed.", _LIMITS, "N"),
    ] = 4096
    max_queued_bytes: Annotated[
        str | int,
        Setting(
            "Most bytes of such jobs.",
            _LIMITS,
            "SIZE",
            expected=f"a size of at least 64 KiB {_SIZE}",
            check=lambda value: _at_least(_MIN_BYTES, value),
        ),
    ] = "64GiB"

    allow_users: Annotated[
        str,
        Setting(
            "Users that may connect; with no groups either, all who can open the sockets.",
            _ACCESS,
            "NAMES",
            expected=_NAMES.format("users"),
            check=parse_names,
        ),
    ] = ""
    allow_groups: Annotated[
        str,
        Setting(
            "Groups whose members may connect, beside those users.",
            _ACCESS,
            "NAMES",
            expected=_NAMES.format("groups"),
            check=parse_names,
        ),
    ] = ""
    share_between_users: Annotated[
        Literal["yes", "no"],
        Setting(
            "Let engines of different users share chunks of the same model.", _ACCESS, "YES|NO"
        ),
    ] = "yes"

    log_level: Annotated[
        Literal["debug", "info", "warning", "error"],
        Setting("Lines below this are not written.", _LOG, "LEVEL", live=True),
    ] = "info"
    log_format: Annotated[
        Literal["human", "json"],
        Setting("How a line of the log looks; json is one object a line.", _LOG, "FORMAT"),
    ] = "human"

    @property
    def pool_bytes(self) -> int | None:
        """The configured size of the pool; None for ``auto``."""
        return None if self.cpu_bytes == "auto" else parse_size(self.cpu_bytes)

    @property
    def reserve_bytes(self) -> int:
        """Memory that ``auto`` leaves to other processes."""
        return parse_size(self.reserve)

    @property
    def queued_bytes(self) -> int:
        """Limit of the bytes of an engine's jobs that wait in a lane."""
        return parse_size(self.max_queued_bytes)

    def quotas(self, cpu_bytes: int) -> dict[str, Quota]:
        """Return the quotas by model, in bytes of a pool of `cpu_bytes`."""
        return quotas_of(self.quota, cpu_bytes)


SETTINGS: dict[str, Setting] = {setting.key: setting for setting in settings_of(Settings)}
"""All settings by key, in the order of the sample file."""
