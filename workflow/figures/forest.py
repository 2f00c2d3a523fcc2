"""Which backend wins, by how much, and how sure."""

from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from workflow.figures.panels import GREY, arms_of, empty, finish, hollow, log_ticks, styles_of, title_of
from workflow.intervals import COMPARED
from workflow.style import VERDICT_COLOURS, new_figure
from workflow.verdict import CONTROL

ARROWS = {"lower": "↓", "higher": "↑"}
SHORT = {"better": "better", "worse": "worse", "no difference": "=", "not enough data": "?"}
ROW_H = 0.15
TITLE = "Ratio to the control (95 % intervals over sessions)"


def ratios(table: pd.DataFrame, pairs: pd.DataFrame) -> Figure:
    """Draw the ratio of each arm to the control, a panel for each group and concurrency, with the noise of repeats."""
    # A ratio without an interval says nothing, and one to nearly nothing would squeeze all others together.
    known = pairs[pairs["ratio_low"].notna() & (pairs["against"] == CONTROL)]
    if known.empty:
        return empty(table, TITLE, "No arm can be compared with a control; the verdict table says why.")
    groups = [(str(group), rows) for group, rows in known.groupby("group", sort=False)]
    columns = max(rows["concurrency"].nunique() for _, rows in groups)
    heights = [rows["metric"].nunique() * (ROW_H * rows["arm"].nunique() + 0.13) + 1.0 for _, rows in groups]
    figure = new_figure(2.3 + 2.7 * max(columns, 2), sum(heights) + 0.7)
    panels = figure.subplots(len(groups), columns, squeeze=False, height_ratios=heights)
    styles = styles_of(table)
    for (group, rows), line in zip(groups, panels, strict=True):
        cells = list(rows.groupby("concurrency"))
        metrics = [one.name for one in COMPARED if one.name in set(rows["metric"])]
        for axes in line[len(cells) :]:
            axes.set_visible(False)
        for axes, (concurrency, cell) in zip(line, cells, strict=False):
            _panel(axes, cell, metrics, arms_of(rows), styles)
            # Each group has one range, so that its panels can be compared by eye.
            _log_scale(axes, rows)
            axes.set_xlabel(f"arm / {CONTROL}, log scale")
            if axes is line[0]:
                better = dict(zip(rows["metric"], rows["better"], strict=True))
                axes.set_yticks(range(len(metrics)), [f"{name} {ARROWS[better[name]]}" for name in metrics], size=7)
                title_of(axes, group, table[table["group"] == group], f"concurrency {concurrency}")
            else:
                axes.set_yticks(range(len(metrics)), [""] * len(metrics))
                axes.set_title(f"concurrency {concurrency}", loc="left", fontsize=7.5, color="#333333")
    arms = [Line2D([], [], linestyle="-", label=arm, **styles[arm]) for arm in arms_of(known)]
    handles: list[Line2D | Patch] = [
        *arms,
        hollow("not settled"),
        Patch(color="#E4E4E4", label="noise between repeats"),
    ]
    figure.legend(
        handles=handles, loc="outside right upper", title="↓ lower is better, ↑ higher is better", title_fontsize=7
    )
    return finish(figure, table, TITLE)


def _panel(
    axes: Axes, cell: pd.DataFrame, metrics: list[str], arms: list[str], styles: dict[str, dict[str, Any]]
) -> None:
    step = 0.8 / max(1, len(arms))
    beside = axes.get_yaxis_transform()
    axes.grid(visible=False, axis="y")
    # A call for all rows of an arm: an artist a row would take most of the time of a large sweep's figures.
    for i, arm in enumerate(arms):
        rows, style = cell[cell["arm"] == arm], styles[arm]
        y = np.array([metrics.index(name) for name in rows["metric"]]) + step * (i - (len(arms) - 1) / 2)
        low, high = rows["noise_low"].to_numpy(np.float64), rows["noise_high"].to_numpy(np.float64)
        axes.barh(y, high - low, step, left=low, color="#E4E4E4", linewidth=0, zorder=0)
        axes.hlines(y, rows["ratio_low"], rows["ratio_high"], color=style["color"], linewidth=1.3)
        sure = rows["verdict"].isin(["better", "worse"]).to_numpy()
        for chosen, face in ((sure, style["color"]), (~sure, "white")):
            look = {"marker": style["marker"], "color": style["color"], "markerfacecolor": face, "markersize": 4.5}
            axes.plot(rows["ratio"][chosen], y[chosen], linestyle="none", **look)
        for at, said in zip(y, rows["verdict"], strict=True):
            colour = VERDICT_COLOURS.get(said, GREY)
            axes.text(1.01, at, SHORT[said], va="center", size=6, color=colour, transform=beside)
    between = np.arange(len(metrics) - 1) + 0.5
    axes.hlines(between, 0, 1, color="#EEEEEE", linewidth=0.6, zorder=0, transform=beside)
    axes.axvline(1.0, color="#444444", linewidth=0.9, zorder=1)
    axes.set_ylim(len(metrics) - 0.5, -0.5)


def _log_scale(axes: Axes, rows: pd.DataFrame) -> None:
    values = rows[["ratio", "ratio_low", "ratio_high"]].to_numpy(np.float64)
    low, high = min(float(np.nanmin(values)), 1.0) / 1.15, max(float(np.nanmax(values)), 1.0) * 1.15
    ticks = log_ticks(low, high)
    axes.set(xscale="log", xlim=(low, high))
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks], size=7)
    axes.minorticks_off()
