"""One time series of a server, whatever file it came from: the change of a counter, the range of a gauge."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Series:
    """A labelled series over the profiling window. A histogram becomes the two counters `<name>_sum` and `_count`."""

    name: str
    """Family name without `_total`."""
    kind: Literal["counter", "gauge"]
    endpoint: str
    labels: Mapping[str, str] = field(default_factory=dict)
    delta: float | None = None
    """Counter: increase over the window."""
    low: float | None = None
    high: float | None = None
    mean: float | None = None
    reset: bool = False
    """The counter went back inside the window, so `delta` is not to be trusted."""


@dataclass(frozen=True)
class Scrape:
    """All series that one source (an export, or a pair of text snapshots) gives."""

    series: tuple[Series, ...] = ()
    source: str = ""
    families: int = 0
    """How many metric families the source holds."""
    whole_life: bool = False
    """Counters count since the process started, because there is no snapshot from before the window."""
    phase_ns: tuple[int, int] | None = None
    """Start and end of the profiling phase on the wall clock, where the source knows."""
    warmup_ns: tuple[int, int] | None = None
    duration_s: float | None = None
    """The profiling window that was asked for, where the source knows."""


# Names to recognise; nothing is bound.
LOOPBACK = ("localhost", "127.0.0.1", "0.0.0.0", "[::1]")  # noqa: S104


def without_double_scrapes(series: tuple[Series, ...]) -> tuple[tuple[Series, ...], tuple[str, ...]]:
    """Drop the series of an endpoint that is another endpoint's server under a second URL.

    Returns the rest and one remark for each dropped endpoint. Two URLs are one server where they differ in a name of
    the loopback only, or where the process started at the same moment and the counters agree; without a start time
    all counters have to be equal and not all of them 0.
    """
    by_endpoint: dict[str, list[Series]] = {}
    for one in series:
        by_endpoint.setdefault(one.endpoint, []).append(one)
    kept: dict[str, list[Series]] = {}
    remarks = []
    for endpoint, here in by_endpoint.items():
        twin = next((other for other, there in kept.items() if _same_server(endpoint, here, other, there)), None)
        if twin is None:
            kept[endpoint] = here
        else:
            remarks.append(f"{endpoint} is the server of {twin} under another URL; it is counted once")
    return tuple(one for here in kept.values() for one in here), tuple(remarks)


def _same_server(one: str, first: list[Series], other: str, second: list[Series]) -> bool:
    if _address(one) == _address(other):
        return True
    counts, others = _counts(first), _counts(second)
    if counts.keys() != others.keys() or not any(counts.values()):
        return False
    started, other_started = _started(first), _started(second)
    # Both URLs are scraped a moment apart, so busy counters of one server differ a little.
    tolerance = 0.02 if started is not None and started == other_started else 0.0
    if started != other_started:
        return False
    return all(abs(value - others[key]) <= tolerance * max(value, others[key]) for key, value in counts.items())


def _address(url: str) -> str:
    address = url.removesuffix("/").removesuffix("/metrics")
    for name in LOOPBACK:
        address = address.replace(f"//{name}:", "//loopback:")
    return address


def _counts(series: list[Series]) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (one.name, tuple(sorted(one.labels.items()))): one.delta
        for one in series
        if one.kind == "counter" and one.delta is not None and not one.name.startswith(("process_", "python_"))
    }


def _started(series: list[Series]) -> float | None:
    return next((one.high for one in series if one.name == "process_start_time_seconds"), None)
