"""Metrics -> pairs of arms, ratios with intervals, verdicts. Pure functions on tables.

Arms are compared inside a group, at one concurrency. What the interval of a ratio means, in one sentence: if both arms
replayed other sessions of the same kind, 95 % of intervals made in this way would hold the true ratio. Between runs of
the same sessions there is noise too; repeats show it, and a difference inside it is none.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import combinations
from typing import Any, Literal, NamedTuple

import numpy as np
import pandas as pd

from workflow.environments import same_version
from workflow.intervals import (
    COMPARED,
    Compared,
    Noise,
    Resampled,
    Sample,
    interval,
    noise_between,
    resample,
    samples_of,
)
from workflow.verdict import CONTROL

MINIMUM_SESSIONS = 6
"""With fewer sessions in one arm nobody can say how much sessions vary."""
NEGLIGIBLE = 0.2
"""What cannot be told from 1 is "no difference" only where more than this is ruled out; else the data are too few."""

Verdict = Literal["better", "worse", "no difference", "not enough data", "no baseline", "not comparable"]
REFUSED: tuple[Verdict, ...] = ("no baseline", "not comparable")

ARM_COLUMNS = (
    *("group", "concurrency", "arm", "metric", "value", "low", "high"),
    *("repeats", "requests", "sessions"),
)
COLUMNS = (
    *("group", "concurrency", "arm", "against", "metric", "better", "against_value", "value"),
    *("ratio", "ratio_low", "ratio_high", "noise_low", "noise_high", "verdict", "why"),
    *("repeats", "requests", "sessions", "against_repeats", "against_requests", "against_sessions"),
    *("points", "against_points"),
)
_NEEDED = (
    *("point", "group", "concurrency", "arm", "status", "reasons"),
    *("definition_version", "trace_sha256", "versions", "budget_gb", "backend_version"),
)
_STATUS = {"invalid": "is invalid", "failed": "failed", "missing": "is missing"}
_COUNTS = ("repeats", "requests", "sessions", "against_repeats", "against_requests", "against_sessions")


class Comparison(NamedTuple):
    """What a sweep says about its arms."""

    pairs: pd.DataFrame
    """COLUMNS: a row for each pair of arms, concurrency and metric; `ratio` is arm / against, its interval at 95 %."""
    arms: pd.DataFrame
    """ARM_COLUMNS: a row for each arm that was measured, concurrency and metric, with the interval of its value."""


@dataclass(frozen=True)
class _Side:
    """One arm at one concurrency: its repeats that are fit to publish."""

    name: str
    rows: pd.DataFrame
    planned: pd.DataFrame
    sample: Sample | None

    @cached_property
    def counts(self) -> dict[str, int]:
        requests = 0 if self.sample is None else len(self.sample.sessions)
        sessions = 0 if self.sample is None else self.sample.session_count
        return {"repeats": len(self.rows), "requests": requests, "sessions": sessions}

    @property
    def unusable(self) -> str | None:
        """Say why nothing of this arm can be compared, or None."""
        if len(self.rows):
            return None
        first = self.planned.iloc[0]
        return f"{self.name} {_STATUS[first['status']]}: {first['reasons']}"


def compare(table: pd.DataFrame, requests: Mapping[str, pd.DataFrame]) -> Comparison:
    """Compare the arms of every group, at every concurrency: each with the control, and each two under one budget.

    `table` is the sweep's table (one row a planned point), `requests` holds the successful profiled requests of each
    point that is `ok`. Repeats of a point are pooled; repeats that are not `ok` are left out.
    """
    # Cells are cut out of the table often, and most of its columns are of no use here.
    table = table[[*_NEEDED, *(metric.name for metric in COMPARED)]]
    pairs: list[dict[str, Any]] = []
    arms: list[dict[str, Any]] = []
    for group, planned in table.groupby("group", sort=False):
        noise = _noise(planned)
        for concurrency, cell in planned.groupby("concurrency", sort=False):
            place = {"group": group, "concurrency": concurrency}
            sides = _sides(cell, requests)
            drawn = resample({name: side.sample for name, side in sides.items() if side.sample is not None})
            for side in sides.values():
                arms += [place | row for row in _arm_rows(side, drawn)]
            for arm, against in _pairs(sides):
                pairs += [place | row for row in _pair_rows(arm, against, drawn, noise)]
    frame = pd.DataFrame(pairs, columns=list(COLUMNS)).astype(dict.fromkeys(_COUNTS, "Int64"))
    numbers = ["against_value", "value", "ratio", "ratio_low", "ratio_high", "noise_low", "noise_high"]
    return Comparison(frame.astype(dict.fromkeys(numbers, "float64")), pd.DataFrame(arms, columns=list(ARM_COLUMNS)))


def _sides(cell: pd.DataFrame, requests: Mapping[str, pd.DataFrame]) -> dict[str, _Side]:
    good = cell[cell["status"] == "ok"]
    frames = {arm: [requests[point] for point in rows["point"]] for arm, rows in good.groupby("arm", sort=False)}
    samples = samples_of({str(arm): listed for arm, listed in frames.items()})
    return {
        str(arm): _Side(str(arm), good[good["arm"] == arm], planned, samples.get(str(arm)))
        for arm, planned in cell.groupby("arm", sort=False)
    }


def _pairs(sides: Mapping[str, _Side]) -> Iterator[tuple[_Side, _Side | None]]:
    """Yield (arm, what it is compared with): the control first, then the other arms among themselves."""
    others = [side for name, side in sides.items() if name != CONTROL]
    for side in others:
        yield side, sides.get(CONTROL)
    for against, side in combinations(others, 2):
        yield side, against


def _noise(planned: pd.DataFrame) -> dict[str, Noise | None]:
    """Return the noise between repeats of one arm for each metric, from all arms and concurrencies of a group."""
    good = planned[planned["status"] == "ok"]
    cells = [rows for _, rows in good.groupby(["arm", "concurrency"]) if _mixed(rows) is None]
    return {metric.name: noise_between([rows[metric.name].tolist() for rows in cells]) for metric in COMPARED}


# ------------------------------------------------------------------------------------------------------- one arm
def _value(metric: Compared, side: _Side, drawn: Mapping[tuple[str, str], Resampled]) -> float:
    """Return the value of an arm over its repeats; NaN is unknown or fewer requests than the metric needs.

    Percentiles are of all requests together, which is also why repeats can reach the count of a rarer percentile.
    Rates and shares have a window or a server's counter in each repeat, so they are averaged.
    """
    found = drawn.get((side.name, metric.name))
    if not metric.of_requests or found is None or side.sample is None:
        return float(side.rows[metric.name].mean()) if len(side.rows) else np.nan
    return found.estimate if _count(metric, side.sample) >= metric.least else np.nan


def _count(metric: Compared, sample: Sample) -> int:
    values = sample.columns[metric.column]
    return int(np.sum(np.isfinite(values) & (values > 0))) if metric.of_requests else int(np.isfinite(values).sum())


def _relative_draws(metric: Compared, side: _Side, drawn: Mapping[tuple[str, str], Resampled]) -> Any:
    """Return resampled values / their estimate, or None."""
    found = drawn.get((side.name, metric.name))
    if found is None or not np.isfinite(found.estimate) or found.estimate <= 0:
        return None
    return found.draws / found.estimate


def _arm_rows(side: _Side, drawn: Mapping[tuple[str, str], Resampled]) -> Iterator[dict[str, Any]]:
    # Over other sessions, or with another build, a repeat is none: what they measured has no mean.
    if not len(side.rows) or _mixed(side.rows) is not None:
        return
    for metric in COMPARED:
        value, draws = _value(metric, side, drawn), _relative_draws(metric, side, drawn)
        enough = draws is not None and side.counts["sessions"] >= MINIMUM_SESSIONS
        ends = interval(draws * value, side.counts["sessions"]) if enough and np.isfinite(value) else None
        low, high = ends or (np.nan, np.nan)
        row: dict[str, Any] = {"arm": side.name, "metric": metric.name, "value": value, "low": low, "high": high}
        yield row | side.counts


# ------------------------------------------------------------------------------------------------------ two arms
def _pair_rows(
    arm: _Side, against: _Side | None, drawn: Mapping[tuple[str, str], Resampled], noise: Mapping[str, Noise | None]
) -> Iterator[dict[str, Any]]:
    refused = _refused(arm, against)
    for metric in COMPARED:
        row: dict[str, Any] = {
            "arm": arm.name,
            "against": CONTROL if against is None else against.name,
            "metric": metric.name,
            "better": metric.better,
            "value": _value(metric, arm, drawn),
            "points": ";".join(arm.rows["point"]),
            **arm.counts,
        }
        if against is not None:
            row |= {"against_value": _value(metric, against, drawn), "against_points": ";".join(against.rows["point"])}
            row |= {f"against_{name}": count for name, count in against.counts.items()}
        if refused is not None:
            yield row | {"verdict": refused[0], "why": refused[1]}
        else:
            assert against is not None
            yield row | _ratio(metric, arm, against, row, drawn, noise[metric.name])


def _refused(arm: _Side, against: _Side | None) -> tuple[Verdict, str] | None:
    """Say why two arms must not be compared at all, or None."""
    if against is None:
        return "no baseline", f"no point without offload ({CONTROL}) is planned at this concurrency"
    for side in (arm, against):
        if side.unusable is not None:
            return "not comparable", side.unusable
    if (mixed := _mixed(pd.concat([arm.rows, against.rows]))) is not None:
        return "not comparable", mixed
    budgets = [float(side.rows["budget_gb"].iloc[0]) for side in (arm, against)]
    if against.name != CONTROL and budgets[0] != budgets[1]:
        return "not comparable", f"host memory budgets differ: {budgets[0]:g} GB and {budgets[1]:g} GB"
    return None


def _mixed(rows: pd.DataFrame) -> str | None:
    """Say why numbers of some points must not be laid beside each other or pooled, or None."""
    for column, what in (("definition_version", "metric definitions"), ("trace_sha256", "contents of the trace set")):
        found = sorted(str(one)[:12] for one in rows[column].dropna().unique())
        if len(found) > 1:
            return f"two {what} must not share an axis: {', '.join(found)}"
    for component, versions in _versions(rows).items():
        if len(versions) > 1 and not _asked_for(rows, component):
            return f"two builds of {component}: {', '.join(sorted(versions))}"
    return None


def _asked_for(rows: pd.DataFrame, component: str) -> bool:
    """Tell whether each arm has one version of a component, the one that the search space asks for as its backend's.

    Two versions of a backend are two arms then, and which is better is the question.
    """
    for _, of_arm in rows.groupby("arm"):
        versions = _versions(of_arm).get(component, set())
        asked = set(of_arm["backend_version"].dropna())
        if len(versions) != 1 or len(asked) != 1 or not same_version(*versions, *asked):
            return False
    return True


def _versions(rows: pd.DataFrame) -> dict[str, set[str]]:
    """Return every version that was read back from a process, by component."""
    found: dict[str, set[str]] = {}
    for text in rows["versions"].dropna():
        for component, version in json.loads(text).items():
            if version is not None:
                found.setdefault(component, set()).add(version)
    return found


def _ratio(
    metric: Compared,
    arm: _Side,
    against: _Side,
    values: Mapping[str, Any],
    drawn: Mapping[tuple[str, str], Resampled],
    noise: Noise | None,
) -> dict[str, Any]:
    value, other = values["value"], values["against_value"]
    for side, one in ((arm, value), (against, other)):
        if not np.isfinite(one):
            counted = 0 if side.sample is None else _count(metric, side.sample)
            few = metric.of_requests and counted < metric.least
            why = f"{counted} requests in {side.name}, it needs {metric.least}" if few else f"not known in {side.name}"
            return {"verdict": "not enough data", "why": why}
    if other <= 0:
        return {"verdict": "not enough data", "why": f"it is 0 in {against.name}"}
    row: dict[str, Any] = {"ratio": value / other}
    if noise is not None:
        row["noise_low"], row["noise_high"] = noise.band(len(arm.rows), len(against.rows))
    sessions = min(arm.counts["sessions"], against.counts["sessions"])
    if sessions < MINIMUM_SESSIONS:
        return row | {"verdict": "not enough data", "why": f"{sessions} sessions, it needs {MINIMUM_SESSIONS}"}
    ours, theirs = _relative_draws(metric, arm, drawn), _relative_draws(metric, against, drawn)
    ends = None if ours is None or theirs is None else interval(row["ratio"] * ours / theirs, sessions)
    if ends is None:
        return row | {"verdict": "not enough data", "why": "the requests do not say how much it varies"}
    row["ratio_low"], row["ratio_high"] = ends
    said, why = verdict(row["ratio"], ends, metric.better, (row.get("noise_low"), row.get("noise_high")))
    return row | {"verdict": said, "why": why}


def verdict(
    ratio: float,
    ends: tuple[float, float],
    better: Literal["lower", "higher"],
    noise: tuple[float | None, float | None] = (None, None),
) -> tuple[Verdict, str]:
    """Return what a ratio of arm / against says, and why.

    `ends` is its interval over sessions; `noise` is the range in which equal arms lie, (None, None) without repeats.
    """
    low, high = ends
    noise_low, noise_high = noise
    if low <= 1.0 <= high:
        widest = max(high - 1.0, 1.0 - low)
        if widest <= NEGLIGIBLE:
            return "no difference", f"a difference above {widest:.0%} is ruled out"
        return "not enough data", f"anything from {low:.3g} to {high:.3g} fits these sessions"
    if noise_low is not None and noise_high is not None and noise_low <= ratio <= noise_high:
        equal = f"equal arms lie anywhere from {noise_low:.3g} to {noise_high:.3g} by the noise between runs"
        return "no difference" if noise_high - 1.0 <= NEGLIGIBLE else "not enough data", equal
    won = (high < 1.0) == (better == "lower")
    return "better" if won else "worse", "" if noise_low is not None else "noise between runs not known"


# --------------------------------------------------------------------------------------------------- the frontier
def pareto_front(x: pd.Series, y: pd.Series) -> pd.Series:
    """Return which points are on the front where more of both is better.

    Strict dominance: a point is off it only if another has as much of both and more of one, so points that are equal
    stay together. NaN is never on it.
    """
    known = x.notna() & y.notna()
    flags = [
        bool(known.iloc[i])
        and not bool((known & (x >= x.iloc[i]) & (y >= y.iloc[i]) & ((x > x.iloc[i]) | (y > y.iloc[i]))).any())
        for i in range(len(x))
    ]
    return pd.Series(flags, index=x.index, dtype=bool)


# ------------------------------------------------------------------------------------------------------ in words
def headline(pairs: pd.DataFrame) -> str:
    """Return the verdicts of one pair and concurrency in a sentence; a loss is said as plainly as a win."""
    first = pairs.iloc[0]
    if set(pairs["verdict"]) <= set(REFUSED):
        return f"{first['arm']} against {first['against']}: {first['verdict']} ({first['why']})"
    parts = []
    for said in ("better", "worse", "no difference"):
        rows = pairs[pairs["verdict"] == said]
        if len(rows):
            parts.append(
                f"{said} in " + ", ".join(f"{row['metric']} (x{row['ratio']:.3g})" for _, row in rows.iterrows())
            )
    unsure = pairs[~pairs["verdict"].isin(["better", "worse", "no difference"])]["metric"]
    if len(unsure):
        parts.append("not enough data for " + ", ".join(unsure))
    return f"{first['arm']} against {first['against']}: " + "; ".join(parts)


def summary(table: pd.DataFrame, pairs: pd.DataFrame, explanations: pd.DataFrame) -> str:
    """Return the comparison as Markdown, for a terminal and for a comment on a pull request."""
    statuses = table["status"].value_counts()
    repeats = int(table["repeat"].max()) if len(table) else 1
    planned = ", ".join(f"{statuses.get(name, 0)} {name}" for name in ("ok", "invalid", "failed", "missing"))
    lines = [
        "# Offload backends compared",
        "",
        f"{len(table)} points planned: {planned}; {repeats} {'repeat' if repeats == 1 else 'repeats'} each.",
        "Ratios are arm / the arm it is compared with; 95 % intervals: other sessions of the same kind would give "
        "ratios in them; noise: two equal arms give ratios in it, by the spread of repeats.",
    ]
    for group, rows in pairs.groupby("group", sort=False):
        refused = rows["verdict"].isin(REFUSED)
        against_control = rows["against"] == CONTROL
        compared = rows[~refused & against_control]
        lines += ["", f"## {group}", "", *([_overview(compared)] if len(compared) else [])]
        for key, pair in compared.groupby(["concurrency", "arm", "against"], sort=False):
            concurrency, arm, against = key
            said = _said(explanations, pair.iloc[0])
            lines += ["", f"### {arm} against {against}, concurrency {concurrency}", "", _verdicts(pair)]
            lines += ["", *(f"* {text}" for text in said)] if said else []
        between = rows[~refused & ~against_control]
        if len(between):
            lines += ["", "### Between the backends", ""]
            for key, pair in between.groupby(["concurrency", "arm", "against"], sort=False):
                lines.append(f"* Concurrency {key[0]}: {headline(pair)}.")
        lines += _not_compared(rows[refused])
    unusable = table[table["status"] != "ok"]
    if len(unusable):
        lines += ["", "## Not usable", ""]
        # What nobody has measured yet is one fact; a line for each of hundreds would hide those that failed.
        missing = unusable["status"] == "missing"
        lines += [f"* `{row['point']}`: {row['status']}: {row['reasons']}" for _, row in unusable[~missing].iterrows()]
        if missing.any():
            lines.append(f"* {missing.sum()} points are not measured yet; `results/plan.tsv` lists them.")
    return "\n".join(lines) + "\n"


OVERVIEW = ("ttft_p50_s", "tpot_p50_s", "total_tok_per_s_per_gpu", "cached_share")
"""Metrics of the table that says in one look what each arm did to the control's numbers."""


def _overview(rows: pd.DataFrame) -> str:
    """Return a table, an arm and concurrency a row: value, ratio to the control and verdict of each in OVERVIEW."""
    body: list[tuple[str, ...]] = []
    for (concurrency, arm), pair in rows.groupby(["concurrency", "arm"], sort=False):
        if not body or body[-1][1] != str(concurrency):
            control = {row["metric"]: number(row["against_value"]) for _, row in pair.iterrows()}
            body.append((CONTROL, str(concurrency), *(control.get(name, "-") for name in OVERVIEW)))
        of = {row["metric"]: row for _, row in pair.iterrows()}
        cells = [
            f"{number(of[name]['value'])} ({_times(of[name]['ratio'])}, {of[name]['verdict']})" if name in of else "-"
            for name in OVERVIEW
        ]
        body.append((str(arm), str(concurrency), *cells))
    return _markdown(("arm", "concurrency", *OVERVIEW), body)


def _times(ratio: float) -> str:
    return "-" if pd.isna(ratio) else f"x{number(ratio)}"


def _said(explanations: pd.DataFrame, pair: pd.Series) -> list[str]:
    keys = ["group", "concurrency", "arm", "against"]
    return list(explanations[(explanations[keys] == pair[keys]).all(axis=1)]["says"])


def _not_compared(rows: pd.DataFrame) -> list[str]:
    """Return why pairs were refused, a line for each reason: a pair for each point that is missing says nothing new."""
    pairs = rows.drop_duplicates(["concurrency", "arm", "against"])
    lines = []
    for (refusal, why), some in pairs.groupby(["verdict", "why"], sort=False):
        at = ", ".join(str(one) for one in sorted(some["concurrency"].unique()))
        lines.append(f"* {str(refusal).capitalize()} at concurrency {at} ({len(some)} of the pairs): {why}.")
    return ["", "### Not compared", "", *lines] if lines else []


def _verdicts(rows: pd.DataFrame) -> str:
    header = ("metric", "against", "value", "ratio", "95 % interval", "noise", "verdict")
    body = [
        (
            row["metric"],
            number(row["against_value"]),
            number(row["value"]),
            number(row["ratio"]),
            _range(row["ratio_low"], row["ratio_high"]),
            _range(row["noise_low"], row["noise_high"]),
            row["verdict"] + (f" ({row['why']})" if row["why"] else ""),
        )
        for _, row in rows.iterrows()
    ]
    return _markdown(header, body)


def _range(low: float, high: float) -> str:
    return "-" if pd.isna(low) else f"{number(low)} to {number(high)}"


def _markdown(header: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    widths = [max(len(line[i]) for line in (header, *body)) for i in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |"
        for line in (header, *body)
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def number(value: float) -> str:
    """Return a number to three digits, or a dash where there is none."""
    if pd.isna(value):
        return "-"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
