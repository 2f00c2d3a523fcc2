"""Curves of arms: throughput against interactivity, latency against concurrency."""

from typing import Any, Literal

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from workflow.comparison import pareto_front
from workflow.figures.panels import (
    GREY,
    arms_of,
    empty,
    finish,
    groups_of,
    legend,
    log_ticks,
    means,
    measured_groups,
    not_drawn,
    styles_of,
    title_of,
    wrapped,
)
from workflow.style import new_figure

PANEL_W, PANEL_H = 3.5, 2.9
# Where a point's label goes, by arm: offset from its marker, alignment. Neighbours of two arms do not collide then.
LABELS: tuple[tuple[int, int, Literal["left", "right", "center"]], ...] = (
    *((7, 3, "left"), (-6, -9, "right"), (-7, 1, "right"), (0, 8, "center")),
    *((0, -14, "center"), (7, -9, "left"), (-6, 6, "right"), (9, -3, "left")),
)
LOG_ABOVE = 20.0
"""An axis whose values span more than this factor is logarithmic, and says so."""


def throughput_interactivity(table: pd.DataFrame) -> Figure:
    """Draw throughput per GPU against interactivity: the Pareto front of each arm as a line, its points by concurrency.

    Points off their arm's front are drawn without a line. The grey band is the front over all arms.
    """
    title = "Throughput against interactivity (up and right is better)"
    x, y = "interactivity_p50_tok_per_s", "total_tok_per_s_per_gpu"
    groups = [(group, rows) for group, rows in groups_of(table) if rows[x].notna().any()]
    if not groups:
        return empty(table, title, "No point has both numbers.")
    figure = new_figure(8.2, (PANEL_H + 1.0) * len(groups) + 0.6)
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    styles = styles_of(table)
    for (group, rows), axes in zip(groups, panels, strict=True):
        cells = means(rows, [x, y]).dropna(subset=[x, y])
        good = cells[cells["good"]]
        best = good[pareto_front(good[x], good[y])].sort_values(x)
        axes.plot(best[x], best[y], color="#DDDDDD", linewidth=8, solid_capstyle="round", zorder=0)
        for i, arm in enumerate(arms_of(rows)):
            _front(axes, cells[cells["arm"] == arm], rows[rows["arm"] == arm], (x, y), styles[arm], LABELS[i % 8])
        axes.set(xlabel="interactivity: 1 / ITL p50 (tok/s/user)", ylabel="prompt + output tokens (tok/s/GPU)")
        axes.margins(0.1)
        axes.set_ylim(bottom=0)
        axes.yaxis.set_major_formatter("{x:,.0f}")
        title_of(axes, group, rows)
        _list_absent(axes, rows)
    legend(figure, table, Line2D([], [], color="#DDDDDD", linewidth=8, label="front of all arms"))
    return finish(figure, table, title)


def _front(
    axes: Axes,
    cells: pd.DataFrame,
    repeats: pd.DataFrame,
    names: tuple[str, str],
    style: dict[str, Any],
    label: tuple[int, int, Literal["left", "right", "center"]],
) -> None:
    x, y = names
    good, bad = cells[cells["good"]], cells[~cells["good"]]
    front = good[pareto_front(good[x], good[y])].sort_values(x)
    axes.plot(front[x], front[y], color=style["color"])
    single = repeats[repeats["status"] == "ok"]
    if (repeats["repeat"] > 1).any():
        axes.plot(single[x], single[y], linestyle="none", markersize=3, alpha=0.4, **style)
    axes.plot(good[x], good[y], linestyle="none", **style)
    axes.plot(bad[x], bad[y], linestyle="none", markerfacecolor="white", **style)
    for _, cell in cells.iterrows():
        at = (cell[x], cell[y])
        axes.annotate(
            f"c{cell['concurrency']}",
            at,
            label[:2],
            textcoords="offset points",
            ha=label[2],
            size=6.5,
            color=style["color"],
        )


def latency(table: pd.DataFrame, arms: pd.DataFrame) -> Figure:
    """Draw TTFT p50 and p90 and TPOT p50 against concurrency with 95 % intervals, a row of panels for each group."""
    title = "Latency by arm (lower is better; bars: 95 % intervals over sessions)"
    shown = {"ttft_p50_s": "TTFT p50 (s)", "ttft_p90_s": "TTFT p90 (s)", "tpot_p50_s": "TPOT p50 (s)"}
    groups = measured_groups(table)
    if not groups:
        return empty(table, title, "No point is measured yet.")
    figure = new_figure(PANEL_W * len(shown) + 1.2, PANEL_H * len(groups) + 0.7)
    panels = figure.subplots(len(groups), len(shown), squeeze=False)
    for (group, rows), line in zip(groups, panels, strict=True):
        known = arms[arms["group"] == group]
        for axes, (metric, label) in zip(line, shown.items(), strict=True):
            values = _against_concurrency(axes, rows, known[known["metric"] == metric], metric, styles_of(table))
            axes.set(xlabel="concurrency (live sessions)", ylabel=label)
            _scale(axes, values, label)
        title_of(line[0], group, rows)
    absent = Line2D([], [], linestyle="none", marker="x", color=GREY, label="too few requests")
    legend(figure, table, *([absent] if _any_too_few(arms, tuple(shown)) else []))
    return finish(figure, table, title)


def _any_too_few(arms: pd.DataFrame, metrics: tuple[str, ...]) -> bool:
    return bool(arms[arms["metric"].isin(metrics)]["value"].isna().any())


def _against_concurrency(
    axes: Axes, rows: pd.DataFrame, known: pd.DataFrame, metric: str, styles: dict[str, dict[str, Any]]
) -> list[float]:
    """Draw one line an arm, apart by a little, so that intervals stay readable; return what was drawn."""
    concurrencies, arms = sorted(rows["concurrency"].unique()), arms_of(rows)
    invalid = means(rows, [metric])
    drawn: list[float] = []
    for i, arm in enumerate(arms):
        shift = min(0.1, 0.5 / len(arms)) * (i - (len(arms) - 1) / 2)
        points = known[known["arm"] == arm].sort_values("concurrency")
        x = np.array([concurrencies.index(one) + shift for one in points["concurrency"]])
        value, low, high = (points[name].to_numpy(np.float64) for name in ("value", "low", "high"))
        axes.plot(x[np.isfinite(value)], value[np.isfinite(value)], markersize=5, **styles[arm])
        has = np.isfinite(low)
        axes.vlines(x[has], low[has], high[has], color=styles[arm]["color"], linewidth=1.1)
        few = x[~np.isfinite(value)]
        if few.size:
            axes.plot(few, np.full(len(few), 0.03), "x", color=GREY, transform=axes.get_xaxis_transform())
        bad = invalid[(invalid["arm"] == arm) & ~invalid["good"] & invalid[metric].notna()]
        at = [concurrencies.index(one) + shift for one in bad["concurrency"]]
        axes.plot(at, bad[metric], linestyle="none", markerfacecolor="white", **styles[arm])
        drawn += [*value[np.isfinite(value)], *low[has], *high[has], *bad[metric]]
    axes.set_xticks(range(len(concurrencies)), [str(one) for one in concurrencies])
    axes.set_xlim(-0.4, len(concurrencies) - 0.6)
    return drawn


def _scale(axes: Axes, values: list[float], label: str) -> None:
    positive = [value for value in values if value > 0]
    if positive and max(positive) / min(positive) > LOG_ABOVE:
        low, high = min(positive) / 1.3, max(positive) * 1.3
        ticks = log_ticks(low, high)
        axes.set(yscale="log", ylabel=f"{label}, log scale", ylim=(low, high))
        axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
        axes.minorticks_off()
    else:
        axes.set_ylim(bottom=0)


def _list_absent(axes: Axes, rows: pd.DataFrame) -> None:
    absent = not_drawn(rows)
    if absent:
        text = wrapped(absent.split("; "), 100)
        # An x label grows the panel's margin with its lines; text in the panel would cover points.
        axes.set_xlabel(f"{axes.get_xlabel()}\nnot drawn: {text}", fontsize=7)
