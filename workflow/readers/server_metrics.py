"""aiperf's server metrics export (`server_metrics_export.json`): counters as increases over the profiling phase."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import orjson

from workflow.contract import DamagedFile, InputError
from workflow.readers.schema import known_object
from workflow.readers.series import Scrape, Series

SERVER_METRICS_VERSIONS = ("1.0", "1.1")

BLOCK_BYTES = 1 << 20
_OPEN = re.compile(rb'(?<!\\)"timeslices"\s*:\s*\[')
_NEGATIVE = re.compile(rb'"(?:total|count)"\s*:\s*-')
_MARK = b'"offload_sweep_reset":'


def read_server_metrics(path: Path) -> Scrape:
    """Read an export of any size.

    The time slices make up nearly all of it; they are dropped while the file streams by, after a look whether a
    counter ran backwards in them, so that memory is that of the statistics alone.
    Raises DamagedFile: not JSON; InputError: no such file, or a schema version that is not in SERVER_METRICS_VERSIONS.
    """
    try:
        with path.open("rb") as stream:
            text = b"".join(_without_timeslices(stream))
    except FileNotFoundError:
        raise InputError("no such file", file=path) from None
    try:
        data = orjson.loads(re.sub(rb"(?<=[:\s\[,])(?:NaN|-?Infinity)(?=[\s,}\]])", b"null", text))
    except ValueError as error:
        raise DamagedFile(f"not JSON: {error}", file=path) from None
    data = known_object(data, path, "the server metrics export", SERVER_METRICS_VERSIONS)
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


def _without_timeslices(stream: BinaryIO) -> Iterator[bytes]:
    """Yield the file with each `"timeslices": [...]` replaced by a mark that says whether a counter ran backwards."""
    buffer, inside, backwards = b"", False, False
    while True:
        block = stream.read(BLOCK_BYTES)
        buffer += block
        while True:
            if inside:
                # Slices hold numbers, `null` and bucket names only, so the first bracket ends the list.
                end = buffer.find(b"]")
                part = buffer if end < 0 else buffer[:end]
                backwards = backwards or _NEGATIVE.search(part) is not None
                if end < 0:
                    buffer = buffer[-64:]
                    break
                yield b"true" if backwards else b"false"
                buffer, inside, backwards = buffer[end + 1 :], False, False
            else:
                found = _OPEN.search(buffer)
                if found is None:
                    # The key may be cut in two by the block's end.
                    if len(buffer) > 64:
                        yield buffer[:-64]
                        buffer = buffer[-64:]
                    break
                yield buffer[: found.start()] + _MARK
                buffer, inside = buffer[found.end() :], True
        if not block:
            yield buffer
            return


def _series(metrics: dict[str, Any]) -> Iterator[Series]:
    for family, body in metrics.items():
        name, kind = family.removesuffix("_total"), body.get("type")
        for one in body.get("series") or ():
            statistics = one.get("stats") or {}
            where, labels = str(one.get("endpoint_url") or ""), dict(one.get("labels") or {})
            backwards = bool(one.get("offload_sweep_reset"))
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
