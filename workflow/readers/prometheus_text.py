"""Prometheus text snapshots of one server, through prometheus_client's own parser.

`<name>.before.prom` and `<name>.after.prom` lie around the whole replay. `<name>.samples.prom.gz`, a gzip member for
each scrape in between, narrows them to a phase of it.
"""

import io
import re
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

from prometheus_client.parser import text_fd_to_metric_families

from workflow.contract import DamagedFile, InputError
from workflow.readers.series import Scrape, Series

Key = tuple[str, tuple[tuple[str, str], ...]]

BLOCK_BYTES = 1 << 16
_GZIP = 16 + zlib.MAX_WBITS
_SAMPLED_AT_S = re.compile(rb"# sampled at (\d+(?:\.\d+)?)\n")


@dataclass(frozen=True)
class Snapshot:
    """The values of one scrape by (sample name without `_total`, sorted labels)."""

    counters: dict[Key, float]
    gauges: dict[Key, float]
    untyped: dict[Key, float]


def read_snapshot(path: Path) -> Snapshot:
    """Read one scrape.

    `*_created` gauges hold epoch seconds and are left out; histogram buckets are left out, their sum and count are
    counters. Raises InputError: no such file; DamagedFile: text that is not in the format.
    """
    try:
        with path.open() as stream:
            return _snapshot(stream, path)
    except FileNotFoundError:
        raise InputError("no such file", file=path) from None


def _snapshot(stream: TextIO, path: Path) -> Snapshot:
    counters: dict[Key, float] = {}
    gauges: dict[Key, float] = {}
    untyped: dict[Key, float] = {}
    try:
        for family in text_fd_to_metric_families(stream):
            for sample in family.samples:
                name = sample.name
                if name.endswith(("_created", "_bucket")):
                    continue
                key = (name.removesuffix("_total"), tuple(sorted(sample.labels.items())))
                if family.type == "counter" or name.endswith(("_total", "_sum", "_count")):
                    counters[key] = sample.value
                elif family.type in ("unknown", "untyped"):
                    untyped[key] = sample.value
                else:
                    gauges[key] = sample.value
    except (ValueError, KeyError) as error:
        raise DamagedFile(f"not Prometheus text: {error}", file=path) from None
    return Snapshot(counters, gauges, untyped)


def read_pair(
    before: Path | None, after: Path, endpoint: str, samples: tuple[Snapshot | None, Snapshot | None] = (None, None)
) -> Scrape:
    """Return what changed between two scrapes of one server; without the first, the counts since its start.

    `samples` (what `read_around` returns) are taken instead of the files where they are known.
    """
    last = samples[1] or read_snapshot(after)
    first = samples[0] or (read_snapshot(before) if before else None)
    series = changes(first or Snapshot({}, {}, {}), last, endpoint)
    return Scrape(tuple(series), source=after.name, whole_life=first is None)


def read_around(path: Path, phase_ns: tuple[int, int]) -> tuple[Snapshot | None, Snapshot | None]:
    """Return the last sample from before a phase and the first from after it; None for one that was not taken.

    A last sample that is cut off was not taken. Raises DamagedFile: not gzip, a sample without its time, or text that
    is not in the format.
    """
    start_s, end_s = (edge / 1e9 for edge in phase_ns)
    found: list[bytes | None] = [None, None]
    for text in _members(path):
        sampled = _SAMPLED_AT_S.match(text)
        if sampled is None:
            raise DamagedFile("a sample without its time", file=path)
        if float(sampled[1]) <= start_s:
            found[0] = text
        elif float(sampled[1]) >= end_s:
            found[1] = text
            break
    before, after = (_snapshot(io.StringIO(text.decode()), path) if text is not None else None for text in found)
    return before, after


def _members(path: Path) -> Iterator[bytes]:
    """Yield the content of each whole gzip member."""
    with path.open("rb") as stream:
        block = stream.read(BLOCK_BYTES)
        while block:
            member, text = zlib.decompressobj(_GZIP), b""
            while block and not member.eof:
                try:
                    text += member.decompress(block)
                except zlib.error as error:
                    raise DamagedFile(f"not gzip: {error}", file=path) from None
                block = member.unused_data or stream.read(BLOCK_BYTES)
            if member.eof:
                yield text


def changes(first: Snapshot, last: Snapshot, endpoint: str) -> Iterator[Series]:
    """Yield a series for each sample of the later snapshot; a counter that is new in it started from 0."""
    for (name, labels), value in last.counters.items():
        old = first.counters.get((name, labels), 0.0)
        yield _counter(name, labels, endpoint, old, value)
    for (name, labels), value in last.gauges.items():
        old = first.gauges.get((name, labels), value)
        yield Series(name, "gauge", endpoint, dict(labels), None, min(old, value), max(old, value), value)
    for (name, labels), value in last.untyped.items():
        # Without `# TYPE` nobody knows: offered as both, and the alias table says which one the name means.
        old = first.untyped.get((name, labels), 0.0)
        yield _counter(name, labels, endpoint, old, value)
        yield Series(name, "gauge", endpoint, dict(labels), None, min(old, value), max(old, value), value)


def _counter(name: str, labels: tuple[tuple[str, str], ...], endpoint: str, old: float, new: float) -> Series:
    # After a restart the counter began again from 0, so the later value is what is left of the increase.
    reset = new < old
    return Series(name, "counter", endpoint, dict(labels), delta=new if reset else new - old, reset=reset)
