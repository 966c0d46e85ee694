"""Declaring fields of the report: what each means, and the Prometheus metric it is.

The functions below give dataclass fields their default and their `Shown`; `rows` lists all
fields of a class and of the classes inside it, with their paths.
"""

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from typing import Any, Literal, Self, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from kvd.errors import IntegrityError


@dataclass(slots=True)
class Histogram:
    """Counts of values of 0 and more.

    Attributes:
        bounds: ascending upper bounds; a value equal to one belongs to its range.
        counts: by range, one more than bounds: the last is of values above all; default zeros.
        sum: of the values counted.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """Return how many values there were."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: npt.NDArray[np.floating]) -> None:
        """Count many values at once."""
        places = np.searchsorted(self.bounds, values)
        found = np.bincount(places, minlength=len(self.counts)).tolist()
        self.counts = [have + more for have, more in zip(self.counts, found, strict=True)]
        self.sum += float(values.sum())

    def __add__(self, other: "Histogram") -> "Histogram":
        """The values of both.

        Raises:
            IntegrityError: the bounds differ.
        """
        if self.bounds != other.bounds:
            raise IntegrityError(f"bounds {self.bounds} and {other.bounds} cannot be added up")
        counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.sum + other.sum)

    def since(self, before: "Histogram") -> "Histogram":
        """What has been counted since `before`, an earlier state of it."""
        gained = zip(self.counts, before.counts, strict=True)
        counts = [max(0, now - then) for now, then in gained]
        return Histogram(self.bounds, counts, self.sum - before.sum)

    def quantile(self, q: float) -> float | None:
        """The value below which a share `q` lies, by straight lines within ranges.

        None if it is empty. What lies above the last bound counts as the last bound.
        """
        if not self.count:
            return None
        below = np.cumsum([0, *self.counts[:-1]])
        return float(np.interp(q * self.count, below, [0.0, *self.bounds]))


Kind = Literal["info", "gauge", "counter", "histogram"]
Labels = tuple[str, ...]
_SHOWN = "shown"
MOST = 2**63 - 1
"""The largest number that a message carries; sums stop there."""


@dataclass(frozen=True, slots=True)
class Items:
    """A list whose items have metrics: label names, their values, and how many items are shown."""

    names: Labels = ()
    values: Callable[[Mapping[str, Any]], Labels] = lambda _: ()
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """What is declared of a field.

    metric: without the prefix of its part. labels: fixed ones. keys: labels that the keys of a
    map give, separated by underscores. parts: prefix and class of each part of a sum.
    """

    text: str
    kind: Kind = "gauge"
    metric: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    keys: Labels = ()
    prefix: str = ""
    items: Items | None = None
    parts: tuple[tuple[str | None, type], ...] = ()


def shown(text: str, default: Any = MISSING) -> Any:
    """A field of the report that is no metric."""
    return field(default=default, metadata={_SHOWN: Shown(text)})


def info(text: str, metric: str) -> Any:
    """A text; the metric is 1 and has it as a label of the field's name."""
    return field(metadata={_SHOWN: Shown(text, "info", metric)})


def gauge(text: str, metric: str, **labels: str) -> Any:
    """A number that rises and falls; of a list its length is the metric, None is left out."""
    return field(metadata={_SHOWN: Shown(text, "gauge", metric, tuple(labels.items()))})


def counter(text: str, metric: str = "", *, start: float = 0, **labels: str) -> Any:
    """A number that only grows. Counters of one metric and the same labels are added up."""
    return field(
        default=start, metadata={_SHOWN: Shown(text, "counter", metric, tuple(labels.items()))}
    )


def counters(text: str, metric: str, *labels: str, keys: Sequence[str] = ()) -> Any:
    """Counters by key; `keys` are there from the start, so that the first event is a rise."""
    return field(
        default_factory=lambda: Counter(dict.fromkeys(keys, 0)),
        metadata={_SHOWN: Shown(text, "counter", metric, keys=labels)},
    )


def histogram(text: str, metric: str, bounds: Sequence[float]) -> Any:
    """A histogram with these upper bounds."""
    return field(
        default_factory=lambda: Histogram(tuple(bounds)),
        metadata={_SHOWN: Shown(text, "histogram", metric)},
    )


def histograms(
    text: str, metric: str, *labels: str, keys: Sequence[str], bounds: Sequence[float]
) -> Any:
    """A histogram for each of `keys`."""
    return field(
        default_factory=lambda: {key: Histogram(tuple(bounds)) for key in keys},
        metadata={_SHOWN: Shown(text, "histogram", metric, keys=labels)},
    )


def part(text: str = "", prefix: str = "") -> Any:
    """A field whose type is a class of declared fields; `prefix` begins its metrics' names."""
    return field(metadata={_SHOWN: Shown(text, prefix=prefix)})


def listed(items: Items = Items(), text: str = "", metric: str = "") -> Any:
    """A list of such parts, whose metrics have labels; `metric` counts them."""
    return field(metadata={_SHOWN: Shown(text, metric=metric, items=items)})


def sums(*parts: tuple[str | None, type]) -> Any:
    """A map with the sums of parts: the prefix of their metrics, or None for no metrics."""
    return field(metadata={_SHOWN: Shown("", parts=parts)})


def report_of(declared: type, *owners: object, **derived: Any) -> dict[str, Any]:
    """Return a part of the report as plain values: every field of the class that declares it.

    A field is in `derived`, or is an attribute of the first owner that has one of its name; else
    its default holds.
    """
    part: dict[str, Any] = {}
    for each in fields(declared):
        values = (getattr(owner, each.name, MISSING) for owner in owners)
        value = next((value for value in values if value is not MISSING), each.default)
        part[each.name] = derived.get(each.name, value)
    plain: dict[str, Any] = msgspec.to_builtins(part)
    return plain


@dataclass(frozen=True, slots=True)
class Row:
    """One field: where it is in the report, and its metric with the names of its labels.

    metric: empty where it is none. A step of `path` is a field's name, or `Items` of a list.
    """

    path: tuple[str | Items, ...]
    shown: Shown
    metric: str
    names: Labels

    def samples(self, report: Mapping[str, Any]) -> Iterator[tuple[Labels, Any]]:
        """Values of its labels and of the field, wherever it is in a report; None is left out."""
        for labels, value in _find(report, self.path, ()):
            if self.shown.keys:
                for key, one in value.items():
                    yield (*labels, *key.split("_", len(self.shown.keys) - 1)), one
            elif value is not None:
                fixed = tuple(label for _, label in self.shown.labels)
                yield (*labels, *fixed), len(value) if isinstance(value, list) else value


def _find(
    value: Any, path: tuple[str | Items, ...], labels: Labels
) -> Iterator[tuple[Labels, Any]]:
    if not path:
        yield labels, value
        return
    step, *rest = path
    if isinstance(step, str):
        if value is not None and step in value:
            yield from _find(value[step], tuple(rest), labels)
    else:
        for item in value[: step.most]:
            yield from _find(item, tuple(rest), (*labels, *step.values(item)))


def _class_in(declared: Any) -> type | None:
    """Return the class of a part, or of a list's items; None for plain values."""
    for one in (declared, *get_args(declared)):
        if isinstance(one, type) and is_dataclass(one) and one is not Histogram:
            return one
    return None


def rows(
    declared: type,
    path: tuple[str | Items, ...] = (),
    prefix: str | None = "",
    names: Labels = (),
) -> Iterator[Row]:
    """Every declared field of a class, those of parts in the place of the part."""
    for each in fields(declared):
        told: Shown = each.metadata[_SHOWN]
        here = (*path, each.name)
        inner = _class_in(each.type)
        if told.text:
            own = told.keys or tuple(label for label, _ in told.labels)
            own = (each.name,) if told.kind == "info" else own
            metric = f"{prefix}{told.metric}" if told.metric and prefix is not None else ""
            yield Row(here, told, metric, (*names, *own))
        if told.parts:
            for of_part, counted in told.parts:
                yield from rows(counted, here, of_part, names)
        elif inner is not None and told.items is not None:
            yield from rows(inner, (*here, told.items), told.prefix, (*names, *told.items.names))
        elif inner is not None:
            yield from rows(inner, here, told.prefix, names)


@dataclass(slots=True)
class Counts:
    """Counts that can be added."""

    def add(self, more: Self) -> None:
        """Add every count of `more` to this one's."""
        for each in fields(self):
            setattr(self, each.name, _sum(getattr(self, each.name), getattr(more, each.name)))

    def __add__(self, other: Self) -> Self:
        both = type(self)()
        both.add(self)
        both.add(other)
        return both


def _sum(left: Any, right: Any) -> Any:
    if isinstance(left, dict):
        both = dict(left)
        for key, value in right.items():
            both[key] = _sum(both[key], value) if key in both else value
        return type(left)(both)
    return left + right if isinstance(left, Histogram) else min(left + right, MOST)
