"""Declarations of the report's fields, and the values that hold figures.

A dataclass field made by `gauge`, `counter` and the like carries a `Declaration`: the field's
meaning and its Prometheus metric. `report_fields` lists the declared fields of a class and of the
classes inside it, with their paths. Values: `Histogram`, `Counts`, `RecentMax`, `Progress`.
"""

from bisect import bisect_left
from collections import Counter, deque
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
        buckets = np.searchsorted(self.bounds, values)
        added = np.bincount(buckets, minlength=len(self.counts)).tolist()
        self.counts = [old + new for old, new in zip(self.counts, added, strict=True)]
        self.sum += float(values.sum())

    def __add__(self, other: "Histogram") -> "Histogram":
        """Return a histogram of the values of both.

        Raises:
            IntegrityError: the bounds differ.
        """
        if self.bounds != other.bounds:
            raise IntegrityError(f"bounds {self.bounds} and {other.bounds} cannot be added up")
        counts = [left + right for left, right in zip(self.counts, other.counts, strict=True)]
        return Histogram(self.bounds, counts, self.sum + other.sum)

    def since(self, before: "Histogram") -> "Histogram":
        """Return the values added since `before`, an earlier state of this histogram."""
        pairs = zip(self.counts, before.counts, strict=True)
        counts = [max(0, now - then) for now, then in pairs]
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
_DECLARATION = "declaration"
MAX_INTEGER = 2**63 - 1
"""The largest integer that a message carries; sums saturate there."""


@dataclass(frozen=True, slots=True)
class ItemLabels:
    """The labels that metrics of a list's items get.

    names: of the labels. values: returns an item's values. max_items: that have metrics.
    """

    names: Labels = ()
    values: Callable[[Mapping[str, Any]], Labels] = lambda _: ()
    max_items: int | None = None


@dataclass(frozen=True, slots=True)
class Declaration:
    """The declaration of a field.

    metric: name without the prefix of its part; empty if the field is no metric.
    labels: fixed labels and their values.
    keys: names of the labels whose values are the keys of a map, split at underscores.
    parts: of `sums`: the prefix and the class of each part.
    """

    text: str
    kind: Kind = "gauge"
    metric: str = ""
    labels: tuple[tuple[str, str], ...] = ()
    keys: Labels = ()
    prefix: str = ""
    items: ItemLabels | None = None
    parts: tuple[tuple[str | None, type], ...] = ()


def plain(text: str, default: Any = MISSING) -> Any:
    """Declare a field that is no metric."""
    return field(default=default, metadata={_DECLARATION: Declaration(text)})


def info(text: str, metric: str) -> Any:
    """Declare a text; its metric is 1, with the text as the label of the field's name."""
    return field(metadata={_DECLARATION: Declaration(text, "info", metric)})


def gauge(text: str, metric: str, **labels: str) -> Any:
    """Declare a number that rises and falls, or a list whose length does; None is left out."""
    return field(metadata={_DECLARATION: Declaration(text, "gauge", metric, tuple(labels.items()))})


def counter(text: str, metric: str = "", *, start: float = 0, **labels: str) -> Any:
    """Declare a number that only grows. Counters of one metric with equal labels are summed."""
    return field(
        default=start,
        metadata={_DECLARATION: Declaration(text, "counter", metric, tuple(labels.items()))},
    )


def counters(text: str, metric: str, *labels: str, keys: Sequence[str] = ()) -> Any:
    """Declare counters by key; `keys` start at 0, so that the first event is an increase."""
    return field(
        default_factory=lambda: Counter(dict.fromkeys(keys, 0)),
        metadata={_DECLARATION: Declaration(text, "counter", metric, keys=labels)},
    )


def histogram(text: str, metric: str, bounds: Sequence[float]) -> Any:
    """Declare a histogram with these upper bounds."""
    return field(
        default_factory=lambda: Histogram(tuple(bounds)),
        metadata={_DECLARATION: Declaration(text, "histogram", metric)},
    )


def histograms(
    text: str, metric: str, *labels: str, keys: Sequence[str], bounds: Sequence[float]
) -> Any:
    """Declare a histogram for each of `keys`."""
    return field(
        default_factory=lambda: {key: Histogram(tuple(bounds)) for key in keys},
        metadata={_DECLARATION: Declaration(text, "histogram", metric, keys=labels)},
    )


def part(text: str = "", prefix: str = "") -> Any:
    """Declare a field whose type declares fields; `prefix` begins their metrics' names."""
    return field(metadata={_DECLARATION: Declaration(text, prefix=prefix)})


def listed(items: ItemLabels = ItemLabels(), text: str = "", metric: str = "") -> Any:
    """Declare a list of parts (`part`), whose metrics have labels; `metric` is its length."""
    return field(metadata={_DECLARATION: Declaration(text, metric=metric, items=items)})


def sums(*parts: tuple[str | None, type]) -> Any:
    """Declare a map of sums, by the prefix of their metrics (None: no metrics) and their class."""
    return field(metadata={_DECLARATION: Declaration("", parts=parts)})


def report_of(declared: type, *owners: object, **derived: Any) -> dict[str, Any]:
    """Return a part of the report: the value of every field of the class `declared`, by name.

    A value is looked up by the field's name: in `derived`, then among the attributes of each owner
    in turn, then as the field's default.
    """
    values: dict[str, Any] = {}
    for declared_field in fields(declared):
        name = declared_field.name
        owned = (getattr(owner, name, MISSING) for owner in owners)
        value = next((value for value in owned if value is not MISSING), declared_field.default)
        values[name] = derived.get(name, value)
    builtins: dict[str, Any] = msgspec.to_builtins(values)
    return builtins


@dataclass(frozen=True, slots=True)
class ReportField:
    """One field: its path in the report, its metric (empty if it is none), and the metric's labels.

    A step of `path` is a field's name, or the `ItemLabels` of a list.
    """

    path: tuple[str | ItemLabels, ...]
    declaration: Declaration
    metric: str
    label_names: Labels

    def samples(self, report: Mapping[str, Any]) -> Iterator[tuple[Labels, Any]]:
        """Yield label values and value for each occurrence in a report; None is left out."""
        keys = self.declaration.keys
        for labels, value in _occurrences(report, self.path, ()):
            if keys:
                for key, sample in value.items():
                    yield (*labels, *key.split("_", len(keys) - 1)), sample
            elif value is not None:
                fixed = tuple(label for _, label in self.declaration.labels)
                yield (*labels, *fixed), len(value) if isinstance(value, list) else value


def _occurrences(
    value: Any, path: tuple[str | ItemLabels, ...], labels: Labels
) -> Iterator[tuple[Labels, Any]]:
    if not path:
        yield labels, value
        return
    step, *rest = path
    if isinstance(step, str):
        if value is not None and step in value:
            yield from _occurrences(value[step], tuple(rest), labels)
    else:
        for item in value[: step.max_items]:
            yield from _occurrences(item, tuple(rest), (*labels, *step.values(item)))


def _class_in(annotation: Any) -> type | None:
    """Return the dataclass of a part or of a list's items; None for plain values."""
    for candidate in (annotation, *get_args(annotation)):
        if candidate is not Histogram and isinstance(candidate, type) and is_dataclass(candidate):
            return candidate
    return None


def report_fields(
    declared: type,
    path: tuple[str | ItemLabels, ...] = (),
    prefix: str | None = "",
    label_names: Labels = (),
) -> Iterator[ReportField]:
    """Yield every declared field of a class; the fields of a part follow the part."""
    for declared_field in fields(declared):
        declaration: Declaration = declared_field.metadata[_DECLARATION]
        name = declared_field.name
        field_path = (*path, name)
        part_class, items = _class_in(declared_field.type), declaration.items
        if declaration.text:
            own_labels = declaration.keys or tuple(label for label, _ in declaration.labels)
            own_labels = (name,) if declaration.kind == "info" else own_labels
            is_metric = declaration.metric and prefix is not None
            metric = f"{prefix}{declaration.metric}" if is_metric else ""
            yield ReportField(field_path, declaration, metric, (*label_names, *own_labels))
        if declaration.parts:
            for part_prefix, counts in declaration.parts:
                yield from report_fields(counts, field_path, part_prefix, label_names)
        elif part_class is not None and items is not None:
            item_path, item_labels = (*field_path, items), (*label_names, *items.names)
            yield from report_fields(part_class, item_path, declaration.prefix, item_labels)
        elif part_class is not None:
            yield from report_fields(part_class, field_path, declaration.prefix, label_names)


@dataclass(slots=True)
class Counts:
    """A base for dataclasses of counts that can be added."""

    def add(self, more: Self) -> None:
        """Add every count of `more` to this one's."""
        for count in fields(self):
            name = count.name
            setattr(self, name, _sum(getattr(self, name), getattr(more, name)))

    def __add__(self, other: Self) -> Self:
        total = type(self)()
        total.add(self)
        total.add(other)
        return total

    def catch_up(self, totals: Self) -> Self:
        """Return what `totals` have beyond these counts, and raise these counts to `totals`.

        A scheduler reports the totals of its session again and again; only the differences count.
        Totals below these counts come from an earlier report and add nothing.
        """
        names = [count.name for count in fields(self)]
        new = type(self)(**{n: max(0, getattr(totals, n) - getattr(self, n)) for n in names})
        self.add(new)
        return new


def _sum(left: Any, right: Any) -> Any:
    if isinstance(left, dict):
        total = dict(left)
        for key, value in right.items():
            total[key] = _sum(total[key], value) if key in total else value
        return type(left)(total)
    return left + right if isinstance(left, Histogram) else min(left + right, MAX_INTEGER)


class RecentMax:
    """The greatest value of the last `seconds`."""

    def __init__(self, seconds: float = 60.0) -> None:
        self._seconds = seconds
        # (time, value) without the values that a later one exceeds: times rise, values fall.
        self._candidates: deque[tuple[float, float]] = deque()

    def observe(self, value: float, now: float) -> None:
        """Add a value; `now` never goes back."""
        while self._candidates and self._candidates[-1][1] <= value:
            self._candidates.pop()
        self._candidates.append((now, value))
        self.get(now)

    def get(self, now: float) -> float:
        """Return the greatest value; 0 if there is none."""
        while self._candidates and self._candidates[0][0] <= now - self._seconds:
            self._candidates.popleft()
        return self._candidates[0][1] if self._candidates else 0.0


WINDOW_SECONDS = 10.0
_SAMPLE_SECONDS = 0.1


class Progress:
    """Progress towards a total, at the rate of the last `WINDOW_SECONDS`."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int]] = deque()

    def record(self, now: float, amount: int) -> None:
        """Record that `amount` is finished by `now`; a smaller amount than before starts anew."""
        samples = self._samples
        if samples and amount < samples[-1][1]:
            samples.clear()
        if samples and now < samples[-1][0] + _SAMPLE_SECONDS:
            return
        samples.append((now, amount))
        while len(samples) > 2 and samples[1][0] <= now - WINDOW_SECONDS:
            samples.popleft()

    def seconds_left(self, total: int) -> float | None:
        """Return the seconds until `total` is reached; None while no rate is known."""
        if not self._samples:
            return None
        (begin, first), (end, last) = self._samples[0], self._samples[-1]
        if last >= total:
            return 0.0
        if end <= begin or last <= first:
            return None
        return (total - last) * (end - begin) / (last - first)
