"""A point over time: one row a slice of the replay, from the client's records and the servers' time slices.

Only reads a run's folder. A slice without a scrape is NaN, not 0; counters become rates of their slice. Servers are
scraped at moments of their own, so every series is brought to our slices before series are added up.
"""

from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd

from workflow.evidence import Context, Evidence, client_folder, last_end, read_evidence
from workflow.metrics import first_token_ns, output_tokens_in
from workflow.readers import aliases
from workflow.readers.aliases import Alias, Quantity
from workflow.readers.series import Series
from workflow.readers.server_metrics import read_families

SLICES = 120
"""At most about this many slices: more would be finer than a figure shows."""

Floats = npt.NDArray[np.float64]
Edges = npt.NDArray[np.int64]

# What only a timeline shows, so that it has no place among the quantities that metrics are made of.
QUEUES: Mapping[str, Quantity] = {
    "running": Quantity(
        "requests",
        "gauge",
        (
            Alias("vllm", "vllm:num_requests_running"),
            Alias("sglang", "sglang:num_running_reqs"),
            Alias("llamacpp", "llamacpp:requests_processing"),
            Alias("atom", "atom:num_requests_running"),
        ),
    ),
    "waiting": Quantity(
        "requests",
        "gauge",
        (
            Alias("vllm", "vllm:num_requests_waiting"),
            Alias("sglang", "sglang:num_queue_reqs"),
            Alias("llamacpp", "llamacpp:requests_deferred"),
            Alias("atom", "atom:num_requests_waiting"),
        ),
    ),
}

COLUMNS: Mapping[str, str] = {
    "start_s": "start of the slice since the profiling phase began; negative: warm-up",
    "length_s": "length of the slice",
    "phase": "warm-up, profiling or drain",
    "in_flight": "profiled requests in flight, by the client",
    "running": "requests that the engines run, highest in the slice",
    "waiting": "requests that the engines queue, highest in the slice",
    "ttft_p50_s": "median TTFT of the requests whose first token came in the slice",
    "ttft_max_s": "longest of them",
    "output_tok_per_s": "output tokens, spread evenly from a request's first token to its end",
    "prompt_tok_per_s": "prompt tokens of requests whose first token came in the slice",
    "cached_share": "cached / all prompt tokens of these requests",
    "device_use_share": "fill of the device's KV pool, highest in the slice",
    "host_use_share": "fill of the host tier, highest in the slice",
    "to_host_gb_per_s": "KV copied to the host / length of the slice",
    "to_device_gb_per_s": "KV copied to the device / length of the slice",
    "preemptions_per_s": "preemptions / length of the slice",
}
"""Column -> what it is. Every timeline has all of them."""


def timeline(folder: Path, context: Context) -> pd.DataFrame:
    """Return COLUMNS for one attempt, a row a slice, in order of time.

    Slices are those of the servers' export, joined to at most SLICES; without one they divide the profiling phase
    evenly, as they do where the export is damaged. Raises what `evidence.read_evidence` raises.
    """
    return timeline_of_evidence(read_evidence(folder, context), folder)


def timeline_of_evidence(evidence: Evidence, folder: Path) -> pd.DataFrame:
    """Return what `timeline` does, of a folder that was read already."""
    if evidence.window is None:
        return pd.DataFrame(columns=list(COLUMNS))
    zero = evidence.window.start_ns
    export = client_folder(folder) / "server_metrics_export.json"
    families = read_families(export) if evidence.export is not None else {}
    edges = _edges(evidence, _exported(families))
    frame = _from_records(evidence, edges)
    for name, values in _from_servers(families, edges).items():
        frame[name] = values
    # The drain begins when the requested window is over.
    window_s = np.inf if evidence.window.duration_s is None else evidence.window.duration_s
    frame["start_s"] = (edges[:-1] - zero) / 1e9
    frame["length_s"] = np.diff(edges) / 1e9
    frame["phase"] = np.select(
        [frame["start_s"] < 0, frame["start_s"] < window_s - 1e-6], ["warm-up", "profiling"], "drain"
    )
    return frame.reindex(columns=list(COLUMNS))


def _exported(families: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return (start of the first slice, usual length of a slice) of the servers' export, ns, or None."""
    spans = {
        (int(one["start_ns"]), int(one["end_ns"]))
        for body in families.values()
        for series in body.get("series") or ()
        for one in series.get("timeslices") or ()
    }
    return (min(spans)[0], int(np.median([end - start for start, end in spans]))) if spans else None


def _edges(evidence: Evidence, exported: tuple[int, int] | None) -> Edges:
    """Return the edges of the slices, ns, from the first scrape to the last end; one of them is the window's start."""
    assert evidence.window is not None
    records, zero = evidence.records, evidence.window.start_ns
    last = last_end(records)
    first, length = exported or (zero, 1)
    first = min(first, zero)
    # Finer than the scrapes would leave slices without any.
    length = max(length, (last - first) // SLICES, 1)
    before, after = -(-(zero - first) // length), max(1, -(-(last - zero) // length))
    return zero + length * np.arange(-before, after + 1, dtype=np.int64)


def _from_records(evidence: Evidence, edges: Edges) -> pd.DataFrame:
    records, slices = evidence.records, len(edges) - 1
    lengths = np.diff(edges) / 1e9
    prompt, cached, cached_known = np.zeros((3, slices))
    overlap = np.zeros(slices, np.int64)
    # Of a request that has no TTFT, or whose first token came outside, the place is -1.
    places, ttft = np.full(records.succeeded, -1, np.int16), records.answered["ttft_s"]
    at = 0
    for start, first, inputs, hits in records.answered.parts("start_ns", "ttft_s", "input_tokens", "cached_tokens"):
        place = np.searchsorted(edges, first_token_ns(start, first), side="right") - 1
        inside = (place >= 0) & (place < slices)
        places[at : at + place.size] = np.where(inside & np.isfinite(first), place, -1)
        at += place.size
        for counted, amounts in (
            (prompt, np.nan_to_num(inputs)),
            (cached, np.nan_to_num(hits)),
            (cached_known, np.isfinite(hits)),
        ):
            np.add.at(counted, place[inside], amounts[inside])
    for table in (records.answered, records.unanswered):
        for begins, ends in table.parts("start_ns", "end_ns"):
            overlap += [np.clip(np.minimum(ends, b) - np.maximum(begins, a), 0, None).sum() for a, b in pairwise(edges)]
    frame = pd.DataFrame(index=range(slices))
    for i in range(slices):
        here = ttft[places == i]
        if here.size:
            frame.loc[i, ["ttft_p50_s", "ttft_max_s"]] = np.median(here), here.max()
    frame["prompt_tok_per_s"] = prompt / lengths
    with np.errstate(divide="ignore", invalid="ignore"):
        frame["cached_share"] = np.where(cached_known > 0, cached / prompt, np.nan)
    frame["output_tok_per_s"] = np.array(output_tokens_in(records, edges.tolist())) / lengths
    frame["in_flight"] = overlap / np.diff(edges)
    return frame


def _from_servers(families: Mapping[str, Any], edges: Edges) -> dict[str, Floats]:
    lengths = np.diff(edges) / 1e9
    known = {**aliases.QUANTITIES, **QUEUES}

    def highest(name: str) -> Floats:
        return _slices(families, known[name], edges)

    def rate(name: str, scale: float = 1.0) -> Floats:
        return _slices(families, known[name], edges) * scale / lengths

    host = highest("host_use")
    for used, total in (("host_used_tokens", "host_total_tokens"), ("host_used_bytes", "host_total_bytes")):
        if np.isnan(host).all():
            with np.errstate(divide="ignore", invalid="ignore"):
                host = highest(used) / highest(total)
    return {
        "running": highest("running"),
        "waiting": highest("waiting"),
        "device_use_share": highest("device_use"),
        "host_use_share": host,
        "to_host_gb_per_s": rate("bytes_to_host", 1e-9),
        "to_device_gb_per_s": rate("bytes_to_device", 1e-9),
        "preemptions_per_s": rate("preemptions"),
    }


def _slices(families: Mapping[str, Any], quantity: Quantity, edges: Edges) -> Floats:
    """Return a quantity per slice: counters summed, gauges at their highest; NaN where nothing was scraped."""
    for component in dict.fromkeys(alias.component for alias in quantity.aliases):
        chosen = _chosen(families, quantity, component)
        if chosen:
            return _combined(chosen, quantity, edges)
    return np.full(len(edges) - 1, np.nan)


def _chosen(families: Mapping[str, Any], quantity: Quantity, component: str) -> list[tuple[Alias, dict[str, Any]]]:
    """Return the series of a component, by the newest of its names that is there for each endpoint."""
    found: dict[str, list[tuple[Alias, dict[str, Any]]]] = {}
    for alias in (one for one in quantity.aliases if one.component == component):
        here: dict[str, list[tuple[Alias, dict[str, Any]]]] = {}
        for family, body in families.items():
            kind = "counter" if body.get("type") in ("counter", "histogram") else "gauge"
            name = family.removesuffix("_total")
            name += "_sum" if body.get("type") == "histogram" else ""
            for series in body.get("series") or ():
                where, labels = str(series.get("endpoint_url") or ""), dict(series.get("labels") or {})
                if alias.matches(
                    Series(name, "counter" if kind == "counter" else "gauge", where, labels), quantity.kind
                ):
                    here.setdefault(where, []).append((alias, series))
        found = {**here, **found}
    return [one for listed in found.values() for one in listed]


def _combined(chosen: list[tuple[Alias, dict[str, Any]]], quantity: Quantity, edges: Edges) -> Floats:
    """Return the sum (or the highest) of the series in each slice; NaN where one of them has a hole."""
    resample = _counted if quantity.kind == "counter" else _highest
    grid = np.array([resample(series, edges) * alias.scale for alias, series in chosen])
    known = np.isfinite(grid)
    # A series that has not begun or is over adds nothing. One with a hole is not known there: without it the sum of the
    # others would look like a fall.
    reached = np.maximum.accumulate(known, axis=1) & np.maximum.accumulate(known[:, ::-1], axis=1)[:, ::-1]
    usable = known.any(axis=0) & ~(reached & ~known).any(axis=0)
    filled = np.where(known, grid, 0.0 if quantity.combine == "sum" else -np.inf)
    together = filled.sum(axis=0) if quantity.combine == "sum" else filled.max(axis=0)
    return np.where(usable, together, np.nan)


def _parts(series: Mapping[str, Any], names: tuple[str, ...], zero: int) -> tuple[Floats, Floats, Floats]:
    """Return (start, end, value) of a series' slices, ns since `zero`, by the first of the names that they have."""
    found = (
        number
        for one in series.get("timeslices") or ()
        if (value := next((one[name] for name in names if one.get(name) is not None), None)) is not None
        for number in (int(one["start_ns"]) - zero, int(one["end_ns"]) - zero, float(value))
    )
    table = np.fromiter(found, np.float64).reshape(-1, 3)
    starts, ends, values = table[np.lexsort(table.T[::-1])].T
    return starts, ends, values


def _counted(series: Mapping[str, Any], edges: Edges) -> Floats:
    """Return a counter's increase in each of our slices; an exported slice is spread evenly over those it reaches."""
    starts, ends, increases = _parts(series, ("total", "sum"), int(edges[0]))
    if not starts.size:
        return np.full(len(edges) - 1, np.nan)
    moments, at = np.stack([starts, ends], axis=1).ravel(), (edges - edges[0]).astype(np.float64)

    def until_edges(amounts: Floats) -> Floats:
        after = np.cumsum(amounts)
        return np.asarray(np.interp(at, moments, np.stack([after - amounts, after], axis=1).ravel()), np.float64)

    covered = np.diff(until_edges(ends - starts)) > 0
    return np.where(covered, np.diff(until_edges(increases)), np.nan)


def _highest(series: Mapping[str, Any], edges: Edges) -> Floats:
    """Return a gauge's highest value in each of our slices: of those that lie mostly in it, or that hold its middle."""
    starts, ends, values = _parts(series, ("max",), int(edges[0]))
    at = (edges - edges[0]).astype(np.float64)
    highest = np.full(len(edges) - 1, np.nan)
    place = np.searchsorted(at, (starts + ends) / 2, side="right") - 1
    inside = (place >= 0) & (place < highest.size)
    np.fmax.at(highest, place[inside], values[inside])
    middles = (at[:-1] + at[1:]) / 2
    holder = np.searchsorted(starts, middles, side="right") - 1
    held = holder >= 0
    held[held] = middles[held] < ends[holder[held]]
    highest[held] = np.fmax(highest[held], values[holder[held]])
    return highest
