"""aiperf's server metrics export (`server_metrics_export.json`): counters as increases over the profiling phase.

An export grows with the length of the run and the number of servers, to gigabytes, nearly all of which are time slices.
They stay in the file: of each list only its place is kept, and whoever wants one reads it piece by piece.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from workflow.contract import DamagedFile, InputError
from workflow.readers.schema import known_object
from workflow.readers.series import Scrape, Series

SERVER_METRICS_VERSIONS = ("1.0", "1.1")

BLOCK_BYTES = 1 << 20
_OPEN = re.compile(rb'(?<!\\)"timeslices"\s*:\s*\[')
_WHOLE = re.compile(rb"(.*\})\s*,\s*(?=\{)", re.DOTALL)
"""Items of a list up to the last comma between two of them: inside an item, a name follows a comma."""
_NEGATIVE = re.compile(rb'"(?:total|count)"\s*:\s*-')
_NO_NUMBER = re.compile(rb"(?<=[:\s\[,])(?:NaN|-?Infinity)(?=[\s,}\]])")


@dataclass(frozen=True)
class TimeSlices:
    """The time slices of one series; each iteration reads them from the file, a piece at a time."""

    path: Path
    start: int
    stop: int
    """Bytes [start, stop) of the file, without the brackets."""
    backwards: bool
    """A counter ran backwards in one of them."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Raises DamagedFile: not JSON."""
        with self.path.open("rb") as stream:
            stream.seek(self.start)
            left, text = self.stop - self.start, b""
            while left > 0:
                text += stream.read(min(BLOCK_BYTES, left))
                left = self.stop - stream.tell()
                cut = _WHOLE.match(text) if left > 0 else None
                if cut is not None or left <= 0:
                    yield from self._items(cut[1] if cut else text)
                    text = text[cut.end() :] if cut else b""

    def _items(self, text: bytes) -> list[dict[str, Any]]:
        try:
            items: list[dict[str, Any]] = orjson.loads(b"[" + _with_nulls(text) + b"]")
        except ValueError as error:
            raise DamagedFile(f"time slices that are not JSON: {error}", file=self.path) from None
        return items


def _with_nulls(text: bytes) -> bytes:
    """Return JSON with null for the bare NaN and Infinity that Python writes; nearly no text has one."""
    return _NO_NUMBER.sub(b"null", text) if b"NaN" in text or b"Infinity" in text else text


def read_server_metrics(path: Path) -> Scrape:
    """Read an export of any size: the statistics of each series, and whether a counter ran backwards in its slices.

    Raises DamagedFile: not JSON; InputError: no such file, or a schema version that is not in SERVER_METRICS_VERSIONS.
    """
    data = _read(path)
    summary = data.get("summary") or {}
    ranges = summary.get("phase_time_ranges") or {}
    phases = (data.get("input_config") or {}).get("phases") or [{}]
    return Scrape(
        series=tuple(_series(data.get("metrics") or {})),
        source=path.name,
        families=len(data.get("metrics") or {}),
        phase_ns=_range(ranges.get("profiling")),
        warmup_ns=_range(ranges.get("warmup")),
        duration_s=phases[0].get("duration"),
    )


def read_families(path: Path) -> dict[str, Any]:
    """Return an export's metric families as they are, with TimeSlices for each series' list of slices.

    Raises what read_server_metrics raises.
    """
    return _read(path).get("metrics") or {}


def _read(path: Path) -> dict[str, Any]:
    places: list[TimeSlices] = []
    try:
        with path.open("rb") as stream:
            text = b"".join(_without_timeslices(stream, path, places))
    except FileNotFoundError:
        raise InputError("no such file", file=path) from None
    try:
        data = orjson.loads(_with_nulls(text))
    except ValueError as error:
        raise DamagedFile(f"not JSON: {error}", file=path) from None
    data = known_object(data, path, "the server metrics export", SERVER_METRICS_VERSIONS)
    for body in (data.get("metrics") or {}).values():
        for series in body.get("series") or ():
            if series.get("timeslices") is not None:
                series["timeslices"] = places[series["timeslices"]]
    return data


def _without_timeslices(stream: BinaryIO, path: Path, places: list[TimeSlices]) -> Iterator[bytes]:
    """Yield the file with each `"timeslices": [...]` replaced by `"timeslices": index`, into `places`."""
    buffer, at, inside, backwards = b"", 0, None, False
    while True:
        block = stream.read(BLOCK_BYTES)
        buffer += block
        while True:
            if inside is not None:
                # Slices hold numbers, `null` and bucket names only, so the first bracket ends the list.
                end = buffer.find(b"]")
                part = buffer if end < 0 else buffer[:end]
                backwards = backwards or _NEGATIVE.search(part) is not None
                if end < 0:
                    at += len(buffer[:-64])
                    buffer = buffer[-64:]
                    break
                places.append(TimeSlices(path, inside, at + end, backwards))
                buffer, at, inside, backwards = buffer[end + 1 :], at + end + 1, None, False
            else:
                found = _OPEN.search(buffer)
                if found is None:
                    # The key may be cut in two by the block's end.
                    yield buffer[:-64]
                    at += len(buffer[:-64])
                    buffer = buffer[-64:]
                    break
                yield buffer[: found.start()] + b'"timeslices": %d' % len(places)
                inside = at + found.end()
                buffer, at = buffer[found.end() :], inside
        if not block:
            yield buffer
            return


def _series(metrics: dict[str, Any]) -> Iterator[Series]:
    for family, body in metrics.items():
        name, kind = family.removesuffix("_total"), body.get("type")
        for one in body.get("series") or ():
            statistics = one.get("stats") or {}
            where, labels = str(one.get("endpoint_url") or ""), dict(one.get("labels") or {})
            slices = one.get("timeslices")
            backwards = slices is not None and slices.backwards
            if kind == "counter":
                total = statistics.get("total")
                reset = backwards or (total is not None and total < 0)
                yield Series(name, "counter", where, labels, delta=total, reset=reset)
            elif kind == "histogram":
                # aiperf writes null buckets for a histogram whose counts went back.
                reset = backwards or ("buckets" in statistics and statistics["buckets"] is None)
                for part in ("sum", "count"):
                    yield Series(f"{name}_{part}", "counter", where, labels, delta=statistics.get(part), reset=reset)
            else:
                low, high, mean = (statistics.get(key) for key in ("min", "max", "avg"))
                yield Series(name, "gauge", where, labels, low=low, high=high, mean=mean)
                if kind in (None, "unknown", "untyped") and low is not None and high is not None:
                    # A counter without `# TYPE` is exported as a gauge; its maximum is the absolute value, warm-up
                    # included. Only last - first is its increase, which for a counter is max - min.
                    yield Series(name, "counter", where, labels, delta=high - low)


def _range(data: Any) -> tuple[int, int] | None:
    if isinstance(data, dict) and data.get("start_ns") and data.get("end_ns"):
        return int(data["start_ns"]), int(data["end_ns"])
    return None
