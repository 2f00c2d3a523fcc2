"""The replay client's own summary: `profile_export_aiperf.json`, or the CSV beside it where the JSON is missing."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from workflow.contract import InputError, read_json
from workflow.readers.records import number
from workflow.readers.schema import known_object

# The fork (agentx-harness) writes the same file under the same names; both call it schema 1.4.
SUMMARY_VERSIONS = ("1.4",)


@dataclass(frozen=True)
class ClientSummary:
    """What the client says about its own run."""

    client_version: str | None = None
    was_cancelled: bool | None = None
    is_complete: bool | None = None
    start: datetime | None = None
    """Start of the profiling phase; without a zone it is the client machine's local time."""
    end: datetime | None = None
    duration_s: float | None = None
    """The profiling window that was asked for."""
    concurrency: int | None = None
    submission_invalid_reasons: tuple[str, ...] = ()
    metrics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Metric tag -> {unit, avg, p50, ...} as written."""

    def statistic(self, tag: str, name: str = "avg") -> float | None:
        """Return one finite statistic of a metric as written, or None."""
        value = number(self.metrics.get(tag, {}).get(name))
        return value if math.isfinite(value) else None

    def share(self, tag: str) -> tuple[float, float | None, float | None] | None:
        """Return (fraction, numerator, denominator) of a ratio metric; its sum and count win over its rounded avg."""
        total, count = self.statistic(tag, "sum"), self.statistic(tag, "count")
        if total is not None and count:
            return total / count, total, count
        average = self.statistic(tag)
        if average is None:
            return None
        return (average / 100 if self.metrics[tag].get("unit") == "%" else average), None, None


def read_client_summary(path: Path) -> ClientSummary:
    """Read `profile_export_aiperf.json`.

    Bare NaN is accepted. Raises DamagedFile: not JSON; InputError: no such file, or a schema version that is not in
    SUMMARY_VERSIONS: the names and units of a version that nobody has looked at are a guess.
    """
    data = read_json(path)
    data = known_object(data, path, "the replay client's summary", SUMMARY_VERSIONS)
    phase = _profiling_phase(data.get("input_config"))
    found = data.get("metadata")
    metadata: dict[str, Any] = found if isinstance(found, dict) else {}
    return ClientSummary(
        client_version=data.get("aiperf_version"),
        was_cancelled=data.get("was_cancelled"),
        is_complete=data.get("is_complete"),
        start=_moment(data.get("start_time")),
        end=_moment(data.get("end_time")),
        duration_s=_positive(phase.get("duration")),
        concurrency=phase.get("concurrency") if isinstance(phase.get("concurrency"), int) else None,
        submission_invalid_reasons=tuple(metadata.get("submission_invalid_reasons") or ()),
        metrics={tag: value for tag, value in data.items() if isinstance(value, dict) and "unit" in value},
    )


def read_client_csv(path: Path) -> ClientSummary:
    """Read `profile_export_aiperf.csv`: blocks of a header line and rows `Metric (unit),avg,...` between blank lines.

    A quoted "15,559.05" is one number. Raises InputError: no such file.
    """
    try:
        text = path.read_text()
    except FileNotFoundError:
        raise InputError("no such file", file=path) from None
    metrics: dict[str, dict[str, Any]] = {}
    header: list[str] = []
    for row in csv.reader(io.StringIO(text)):
        if not any(row):
            header = []
        elif row[0] == "Metric":
            header = row
        elif header:
            name, _, unit = row[0].partition(" (")
            cells = dict(zip(header[1:], row[1:], strict=False))
            statistics = {"avg" if key == "Value" else key: number(cell) for key, cell in cells.items()}
            metrics[name.strip().lower().replace(" ", "_")] = {"unit": unit.rstrip(")"), **statistics}
    return ClientSummary(metrics=metrics)


def start_ns(summary: ClientSummary, near_ns: int) -> int | None:
    """Return the profiling phase's start on the wall clock, in ns.

    A time without a zone is taken to be in the zone (a multiple of 15 minutes from UTC) that puts it nearest to
    `near_ns`, the first request of the phase: the summary does not say its zone and the reader's own may differ.
    """
    if summary.start is None:
        return None
    if summary.start.tzinfo is not None:
        return round(summary.start.timestamp() * 1e9)
    naive = summary.start.replace(tzinfo=UTC).timestamp()
    quarter = 900.0
    return round((naive + round((near_ns / 1e9 - naive) / quarter) * quarter) * 1e9)


def _profiling_phase(config: Any) -> dict[str, Any]:
    phases = config.get("phases") if isinstance(config, dict) else None
    if isinstance(phases, list):
        for phase in phases:
            if isinstance(phase, dict) and phase.get("kind", phase.get("name")) == "profiling":
                return phase
    return {}


def _moment(text: Any) -> datetime | None:
    try:
        return datetime.fromisoformat(text) if isinstance(text, str) else None
    except ValueError:
        return None


def _positive(value: Any) -> float | None:
    found = number(value)
    return found if math.isfinite(found) and found > 0 else None
