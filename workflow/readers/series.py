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
    whole_life: bool = False
    """Counters count since the process started, because there is no snapshot from before the window."""
    phase_ns: tuple[int, int] | None = None
    """Start and end of the profiling phase on the wall clock, where the source knows."""
    warmup_ns: tuple[int, int] | None = None
    duration_s: float | None = None
    """The profiling window that was asked for, where the source knows."""
