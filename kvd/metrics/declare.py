"""Declarations of the report's fields: the meaning of each, and its Prometheus metric.

The functions below return dataclass fields with a default and a `Shown`; `rows` lists all fields of
a class and of the classes inside it, with their paths.
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
    """A histogram of values of 0 and more.

    Attributes:
        bounds: inclusive upper bounds of the buckets, ascending.
        counts: by bucket; the last one, beyond `bounds`, has the values above all bounds.
        sum: of the values observed.
    """

    bounds: tuple[float, ...]
    counts: list[int] = field(default_factory=list)
    sum: float = 0.0

    def __post_init__(self) -> None:
        if not self.counts:
            self.counts = [0] * (len(self.bounds) + 1)

    @property
    def count(self) -> int:
        """The number of values observed."""
        return sum(self.counts)

    def observe(self, value: float) -> None:
        """Add one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def observe_all(self, values: npt.NDArray[np.floating]) -> None:
        """Add an array of values."""
        places = np.searchsorted(self.bounds, values)
        found = np.bincount(places, minlength=len(self.counts)).tolist()
        self.counts = [have + more for have, more in zip(self.counts, found, strict=True)]
        self.sum += float(values.sum())

    def __add__(self, other: "Histogram") -> "Histogram":
        """Return a histogram of the values of both.

        Raises:
            IntegrityError: the bounds differ.
        """
        if self.bounds != other.bounds:
            raise IntegrityError(f"bounds {self.bounds} and {other.bounds} cannot be added up")
        counts = [mine + theirs for mine, theirs in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.sum + other.sum)

    def since(self, before: "Histogram") -> "Histogram":
        """Return the values added since `before`, an earlier state of this histogram."""
        gained = zip(self.counts, before.counts, strict=True)
        counts = [max(0, now - then) for now, then in gained]
        return Histogram(self.bounds, counts, self.sum - before.sum)

    def quantile(self, q: float) -> float | None:
        """Return the `q` quantile, interpolated linearly within buckets; None if empty.

        Values above the last bound count as the last bound.
        """
        if not self.count:
            return None
        below = np.cumsum([0, *self.counts[:-1]])
        return float(np.interp(q * self.count, below, [0.0, *self.bounds]))


Kind = Literal["info", "gauge", "counter", "histogram"]
Labels = tuple[str, ...]
_SHOWN = "shown"
MOST = 2**63 - 1
"""The largest integer that a message carries; sums saturate there."""


@dataclass(frozen=True, slots=True)
class Items:
    """The labels of a list's items: names, a function for values, and the most items to show."""

    names: Labels = ()
    values: Callable[[Mapping[str, Any]], Labels] = lambda _: ()
    most: int | None = None


@dataclass(frozen=True, slots=True)
class Shown:
    """The declaration of a field.

    metric: name without the prefix of its part. labels: fixed ones. keys: names of the labels whose
    values are the keys of a map, split at underscores. parts: prefix and class of a sum's parts.
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
    """Declare a field that is no metric."""
    return field(default=default, metadata={_SHOWN: Shown(text)})


def info(text: str, metric: str) -> Any:
    """Declare a text; its metric is 1, with the text as the label of the field's name."""
    return field(metadata={_SHOWN: Shown(text, "info", metric)})


def gauge(text: str, metric: str, **labels: str) -> Any:
    """Declare a number that rises and falls, or a list whose length does; None is left out."""
    return field(metadata={_SHOWN: Shown(text, "gauge", metric, tuple(labels.items()))})


def counter(text: str, metric: str = "", *, start: float = 0, **labels: str) -> Any:
    """Declare a number that only grows. Counters of one metric with equal labels are summed."""
    return field(
        default=start, metadata={_SHOWN: Shown(text, "counter", metric, tuple(labels.items()))}
    )


def counters(text: str, metric: str, *labels: str, keys: Sequence[str] = ()) -> Any:
    """Declare counters by key; `keys` start at 0, so that the first event is an increase."""
    return field(
        default_factory=lambda: Counter(dict.fromkeys(keys, 0)),
        metadata={_SHOWN: Shown(text, "counter", metric, keys=labels)},
    )


def histogram(text: str, metric: str, bounds: Sequence[float]) -> Any:
    """Declare a histogram with these upper bounds."""
    return field(
        default_factory=lambda: Histogram(tuple(bounds)),
        metadata={_SHOWN: Shown(text, "histogram", metric)},
    )


def histograms(
    text: str, metric: str, *labels: str, keys: Sequence[str], bounds: Sequence[float]
) -> Any:
    """Declare a histogram for each of `keys`."""
    return field(
        default_factory=lambda: {key: Histogram(tuple(bounds)) for key in keys},
        metadata={_SHOWN: Shown(text, "histogram", metric, keys=labels)},
    )


def part(text: str = "", prefix: str = "") -> Any:
    """Declare a field whose type declares fields; `prefix` begins their metrics' names."""
    return field(metadata={_SHOWN: Shown(text, prefix=prefix)})


def listed(items: Items = Items(), text: str = "", metric: str = "") -> Any:
    """Declare a list of parts (`part`), whose metrics have labels; `metric` is its length."""
    return field(metadata={_SHOWN: Shown(text, metric=metric, items=items)})


def sums(*parts: tuple[str | None, type]) -> Any:
    """Declare a map of sums, by the prefix of their metrics (None: no metrics) and their class."""
    return field(metadata={_SHOWN: Shown("", parts=parts)})


def report_of(declared: type, *owners: object, **derived: Any) -> dict[str, Any]:
    """Return a part of the report as plain values: every field of the class `declared`.

    A value is looked up by the field's name: in `derived`, then among the attributes of each owner
    in turn, then as the field's default.
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
    """One field: its path in the report, and its metric with the names of its labels.

    metric: empty if it is none. A step of `path` is a field's name, or the `Items` of a list.
    """

    path: tuple[str | Items, ...]
    shown: Shown
    metric: str
    names: Labels

    def samples(self, report: Mapping[str, Any]) -> Iterator[tuple[Labels, Any]]:
        """Yield label values and value for each occurrence in a report; None is left out."""
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
    """Return the dataclass of a part or of a list's items; None for plain values."""
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
    """Yield every declared field of a class, with those of parts after the part."""
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
    """A base for dataclasses of counts that can be added."""

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
