"""Prometheus text snapshots (`<name>.before.prom`, `<name>.after.prom`), through prometheus_client's own parser."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from prometheus_client.parser import text_fd_to_metric_families

from workflow.contract import DamagedFile, InputError
from workflow.readers.series import Scrape, Series

Key = tuple[str, tuple[tuple[str, str], ...]]


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
    counters: dict[Key, float] = {}
    gauges: dict[Key, float] = {}
    untyped: dict[Key, float] = {}
    try:
        with path.open() as stream:
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
    except FileNotFoundError:
        raise InputError("no such file", file=path) from None
    except (ValueError, KeyError) as error:
        raise DamagedFile(f"not Prometheus text: {error}", file=path) from None
    return Snapshot(counters, gauges, untyped)


def read_pair(before: Path | None, after: Path, endpoint: str) -> Scrape:
    """Return what changed between two scrapes of one server; without the first, the counts since its start."""
    last = read_snapshot(after)
    first = read_snapshot(before) if before else Snapshot({}, {}, {})
    return Scrape(tuple(changes(first, last, endpoint)), source=after.name, whole_life=before is None)


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
