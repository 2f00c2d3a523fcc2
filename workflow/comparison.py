"""Metrics -> pairs of arms, ratios with intervals, verdicts. Pure functions on tables.

Arms are compared inside a group, at one concurrency, with the control `none`. Requests of one session are not
independent, so intervals come from a bootstrap over sessions: if the replay were repeated with other sessions of the
same kind, 95 % of such intervals would hold the true ratio.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import pandas as pd
from scipy.stats import bootstrap

CONTROL = "none"
MINIMUM_SESSIONS = 5
"""With fewer sessions in one arm a bootstrap over sessions has too few of them to say how much they vary."""
RESAMPLES = 999
CONFIDENCE = 0.95

Floats = npt.NDArray[np.float64]
Verdict = Literal["better", "worse", "no difference", "not enough data", "no baseline", "not comparable"]


@dataclass(frozen=True)
class Compared:
    """One metric that arms are compared by."""

    name: str
    """Column of the metrics table."""
    better: Literal["lower", "higher"]
    statistic: Callable[[pd.DataFrame, npt.NDArray[np.int64]], Floats]
    """(requests, counts of sessions (resamples x sessions)) -> the metric for each resample, up to a constant."""


def quantile_of(column: str, q: float) -> Callable[[pd.DataFrame, npt.NDArray[np.int64]], Floats]:
    """Return a statistic: the q-quantile of a column of requests under session counts."""

    def statistic(requests: pd.DataFrame, counts: npt.NDArray[np.int64]) -> Floats:
        known = requests[requests[column].notna()].sort_values(column)
        values = known[column].to_numpy(np.float64)
        weights = counts[:, known["session_code"].to_numpy()]
        cumulated = weights.cumsum(axis=1)
        # The first request at which the share of the weight reaches q; linear interpolation is lost in the noise.
        reached = cumulated >= np.maximum(q * cumulated[:, -1:], 1e-12)
        return np.asarray(values[reached.argmax(axis=1)], np.float64)

    return statistic


def sum_of(column: str, over: str | None = None) -> Callable[[pd.DataFrame, npt.NDArray[np.int64]], Floats]:
    """Return a statistic: the sum of a column, or its ratio to the sum of another, under session counts."""

    def per_session(requests: pd.DataFrame, name: str, sessions: int) -> Floats:
        codes, values = requests["session_code"].to_numpy(), requests[name].fillna(0.0).to_numpy(np.float64)
        return np.bincount(codes, values, minlength=sessions).astype(np.float64)

    def statistic(requests: pd.DataFrame, counts: npt.NDArray[np.int64]) -> Floats:
        numerator = counts @ per_session(requests, column, counts.shape[1])
        if over is None:
            return np.asarray(numerator, np.float64)
        return np.asarray(numerator / (counts @ per_session(requests, over, counts.shape[1])), np.float64)

    return statistic


COMPARED: tuple[Compared, ...] = (
    Compared("ttft_p50_s", "lower", quantile_of("ttft_s", 0.50)),
    Compared("ttft_p90_s", "lower", quantile_of("ttft_s", 0.90)),
    Compared("itl_p50_s", "lower", quantile_of("itl_s", 0.50)),
    Compared("e2e_p50_s", "lower", quantile_of("e2e_s", 0.50)),
    Compared("output_tok_per_s_per_gpu", "higher", sum_of("output_tokens")),
    Compared("total_tok_per_s_per_gpu", "higher", sum_of("total_tokens")),
    Compared("cached_share", "higher", sum_of("cached_tokens", over="input_tokens")),
)

COLUMNS = (
    "group",
    "concurrency",
    "arm",
    "metric",
    "better",
    "control_value",
    "value",
    "ratio",
    "ratio_low",
    "ratio_high",
    "verdict",
    "why",
    "requests",
    "sessions",
    "control_requests",
    "control_sessions",
    "point",
    "control_point",
)


def compare(table: pd.DataFrame, requests: Mapping[str, pd.DataFrame]) -> pd.DataFrame:
    """Return one row for each arm other than the control, concurrency and metric.

    `table` is the sweep's table (one row a planned point), `requests` holds the successful profiled requests of each
    measured point. Columns: COLUMNS; `ratio` is arm / control, its interval at 95 %.
    """
    rows = []
    for (group, concurrency), cell in table.groupby(["group", "concurrency"], sort=False):
        controls = cell[cell["arm"] == CONTROL]
        control = controls.iloc[0] if len(controls) else None
        for _, arm in cell[cell["arm"] != CONTROL].iterrows():
            for metric in COMPARED:
                row = {"group": group, "concurrency": concurrency, "arm": arm["arm"], "metric": metric.name}
                rows.append(row | {"better": metric.better} | _pair(metric, arm, control, requests))
    frame = pd.DataFrame(rows, columns=list(COLUMNS))
    counts = ["requests", "sessions", "control_requests", "control_sessions"]
    return frame.astype(dict.fromkeys(counts, "Int64"))


def _pair(
    metric: Compared, arm: pd.Series, control: pd.Series | None, requests: Mapping[str, pd.DataFrame]
) -> dict[str, object]:
    row: dict[str, object] = {"point": arm["point"], "value": arm[metric.name]}
    if control is None:
        return row | {
            "verdict": "no baseline",
            "why": f"no point without offload in this group at {arm['concurrency']}",
        }
    row |= {"control_point": control["point"], "control_value": control[metric.name]}
    for side in (arm, control):
        if side["status"] != "ok":
            return row | {"verdict": "not comparable", "why": f"{side['arm']} is {side['status']}: {side['reasons']}"}
    if pd.isna(arm[metric.name]) or pd.isna(control[metric.name]) or control[metric.name] == 0:
        return row | {"verdict": "not enough data", "why": f"{metric.name} is not known in both arms"}
    ours, theirs = _coded(requests[arm["point"]]), _coded(requests[control["point"]])
    sessions, control_sessions = ours["session_code"].nunique(), theirs["session_code"].nunique()
    row |= {
        "ratio": arm[metric.name] / control[metric.name],
        "requests": len(ours),
        "sessions": sessions,
        "control_requests": len(theirs),
        "control_sessions": control_sessions,
    }
    if min(sessions, control_sessions) < MINIMUM_SESSIONS:
        return row | {"verdict": "not enough data", "why": f"fewer than {MINIMUM_SESSIONS} sessions in one arm"}
    low, high = ratio_interval(metric, ours, theirs)
    return row | {"ratio_low": low, "ratio_high": high, "verdict": verdict(low, high, metric.better), "why": ""}


def _coded(requests: pd.DataFrame) -> pd.DataFrame:
    codes, _ = pd.factorize(requests["session"].astype(str))
    return requests.assign(session_code=codes, total_tokens=requests["input_tokens"] + requests["output_tokens"])


def ratio_interval(metric: Compared, arm: pd.DataFrame, control: pd.DataFrame) -> tuple[float, float]:
    """Return the 95 % interval of metric(arm) / metric(control) from a percentile bootstrap over sessions.

    Both frames have a `session_code` from 0. Sessions of the two arms are resampled apart: the arms replay the same
    set, but a faster arm gets further in it.
    """
    sizes = [int(frame["session_code"].max()) + 1 for frame in (arm, control)]

    # scipy passes `axis`; it is always the last.
    def statistic(ours: npt.NDArray[np.int64], theirs: npt.NDArray[np.int64], axis: int = -1) -> Floats:  # noqa: ARG001
        sides = []
        for frame, drawn, size in ((arm, ours, sizes[0]), (control, theirs, sizes[1])):
            flat = np.atleast_2d(drawn)
            counts = np.stack([np.bincount(resample, minlength=size) for resample in flat])
            sides.append(metric.statistic(frame, counts))
        value = sides[0] / sides[1]
        return value if np.ndim(ours) > 1 else np.asarray(value[0])

    result = bootstrap(
        tuple(np.arange(size) for size in sizes),
        statistic,
        n_resamples=RESAMPLES,
        confidence_level=CONFIDENCE,
        method="percentile",
        vectorized=True,
        # The same table gives the same interval, in any order of points.
        rng=np.random.default_rng(0),
    )
    return float(result.confidence_interval.low), float(result.confidence_interval.high)


def verdict(low: float, high: float, better: Literal["lower", "higher"]) -> Verdict:
    """Return what an interval of arm / control says."""
    if not np.isfinite([low, high]).all():
        return "not enough data"
    if low <= 1.0 <= high:
        return "no difference"
    return "better" if (high < 1.0) == (better == "lower") else "worse"


def summary(table: pd.DataFrame, comparison: pd.DataFrame) -> str:
    """Return the comparison as Markdown, for a terminal and for a pull request."""
    lines = ["# Offload backends compared", ""]
    statuses = table["status"].value_counts()
    lines.append(
        f"{len(table)} points planned: "
        + ", ".join(f"{statuses.get(name, 0)} {name}" for name in ("ok", "invalid", "failed", "missing"))
        + ". Ratios are arm / control (`none`), with 95 % intervals over sessions."
    )
    for group, rows in comparison.groupby("group", sort=False):
        lines += ["", f"## {group}", "", _verdicts(rows)]
    unusable = table[table["status"] != "ok"]
    if len(unusable):
        lines += ["", "## Not usable", ""]
        lines += [f"* `{row['point']}`: {row['status']}: {row['reasons']}" for _, row in unusable.iterrows()]
    return "\n".join(lines) + "\n"


def _verdicts(rows: pd.DataFrame) -> str:
    header = ("arm", "concurrency", "metric", "control", "arm's value", "ratio", "95 % interval", "verdict")
    body = [
        (
            row["arm"],
            str(row["concurrency"]),
            row["metric"],
            _number(row["control_value"]),
            _number(row["value"]),
            _number(row["ratio"]),
            f"{_number(row['ratio_low'])} to {_number(row['ratio_high'])}" if pd.notna(row["ratio_low"]) else "-",
            row["verdict"] + (f" ({row['why']})" if row["why"] else ""),
        )
        for _, row in rows.iterrows()
    ]
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (header, *body)
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _number(value: float) -> str:
    return "-" if pd.isna(value) else f"{value:.3g}"
