"""Flat tables -> matplotlib figures. No files are read or written here, and nothing is computed that a table lacks.

`table` is the sweep's table: one row a planned point. `comparison` has one row an arm, concurrency and metric.
Points that are invalid are drawn hollow; what was not measured is not drawn, and is counted in the footer.
"""

from collections.abc import Callable, Mapping

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from workflow.style import SOURCE_COLOURS, STATUS_COLOURS, arm_styles, new_figure, settings
from workflow.verdict import CONTROL

PANEL_W, PANEL_H = 4.4, 3.2
SOURCES = tuple(SOURCE_COLOURS)


def draw(name: str, table: pd.DataFrame, comparison: pd.DataFrame) -> Figure:
    """Return one of the report's figures."""
    with settings():
        return _DRAW[name](table, comparison)


def sweep(table: pd.DataFrame, comparison: pd.DataFrame) -> Figure:  # noqa: ARG001 - all figures take both
    """Draw the sweep at a glance: arms x concurrencies, the status and its reasons in every cell."""
    groups = list(table.groupby("group", sort=False))
    widest = max(cell["concurrency"].nunique() for _, cell in groups)
    height = sum(0.62 * cell["arm"].nunique() + 1.0 for _, cell in groups)
    figure = new_figure(max(6.0, 2.2 + 1.7 * widest), height)
    panels = figure.subplots(
        len(groups), 1, squeeze=False, height_ratios=[cell["arm"].nunique() + 1.2 for _, cell in groups]
    )
    for (group, cell), axes in zip(groups, panels[:, 0], strict=True):
        arms, concurrencies = _arms(cell), sorted(cell["concurrency"].unique())
        axes.grid(visible=False)
        for _, point in cell.iterrows():
            x, y = concurrencies.index(point["concurrency"]), arms.index(point["arm"])
            axes.add_patch(
                mpl.patches.Rectangle((x - 0.47, y - 0.42), 0.94, 0.84, color=STATUS_COLOURS[point["status"]])
            )
            reasons = "" if pd.isna(point["reasons"]) else str(point["reasons"]).replace(";", "\n")
            requests = f"{int(point['succeeded'])} requests" if pd.notna(point["succeeded"]) else ""
            axes.text(
                x, y, "\n".join(t for t in (point["status"], requests, reasons) if t), ha="center", va="center", size=7
            )
        axes.set(xlim=(-0.6, len(concurrencies) - 0.4), ylim=(len(arms) - 0.5, -0.5), title=group)
        axes.set_xticks(range(len(concurrencies)), [str(c) for c in concurrencies])
        axes.set_yticks(range(len(arms)), arms)
        axes.set_xlabel("concurrency (live sessions)")
    return _finish(figure, table, "Points of the sweep and their status")


def ttft(table: pd.DataFrame, comparison: pd.DataFrame) -> Figure:  # noqa: ARG001
    """Draw TTFT p50 and p90 against concurrency, a line for each arm and a row for each group."""
    groups = list(table.groupby("group", sort=False))
    figure = new_figure(2 * PANEL_W, PANEL_H * len(groups) + 0.6)
    panels = figure.subplots(len(groups), 2, squeeze=False)
    for (group, cell), row in zip(groups, panels, strict=True):
        for axes, percentile in zip(row, ("p50", "p90"), strict=True):
            _lines(axes, cell, "concurrency", f"ttft_{percentile}_s")
            axes.set(xlabel="concurrency (live sessions)", ylabel=f"TTFT {percentile} (s)", title=group)
            axes.set_ylim(bottom=0)
            axes.set_xticks(sorted(cell["concurrency"].unique()))
    _legend(figure, table)
    return _finish(figure, table, "Time to first token by arm (lower is better)")


def prompt_tokens(table: pd.DataFrame, comparison: pd.DataFrame) -> Figure:  # noqa: ARG001
    """Draw the share of prompt tokens by source, a bar for each arm and concurrency, with the trace's ceiling."""
    groups = list(table.groupby("group", sort=False))
    bars = max(len(cell) for _, cell in groups)
    figure = new_figure(max(6.5, 1.0 * bars + 2.5), (PANEL_H + 0.5) * len(groups) + 0.6)
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    for (group, cell), axes in zip(groups, panels, strict=True):
        ordered = cell.sort_values(["concurrency", "arm"], key=_control_first)
        labels = []
        for x, (_, point) in enumerate(ordered.iterrows()):
            labels.append(f"{point['arm']}\nc{point['concurrency']}")
            _source_bar(axes, x, point)
        axes.set_xticks(range(len(ordered)), labels)
        axes.set(ylabel="share of prompt tokens", ylim=(0, 1.08), title=group)
        axes.grid(visible=False, axis="x")
    handles: list[Patch | Line2D] = [Patch(color=colour, label=name) for name, colour in SOURCE_COLOURS.items()]
    handles.append(Patch(facecolor="white", edgecolor="#0072B2", hatch="///", label="cached, tier not told apart"))
    handles.append(Line2D([], [], color="black", label="ceiling of the trace"))
    figure.legend(handles=handles, loc="outside right upper")
    return _finish(figure, table, "Where the prompt tokens came from")


def _source_bar(axes: Axes, x: int, point: pd.Series) -> None:
    bottom = 0.0
    hollow = point["status"] != "ok"
    known = [name for name in SOURCES if pd.notna(point[f"prompt_share_{name}"])]
    if {"device", "host"} <= set(known):
        for name in known:
            share = point[f"prompt_share_{name}"]
            colour = SOURCE_COLOURS[name]
            axes.bar(x, share, 0.7, bottom, facecolor="white" if hollow else colour, edgecolor=colour)
            bottom += share
    elif pd.notna(point["cached_share"]):
        axes.bar(x, point["cached_share"], 0.7, facecolor="white", edgecolor="#0072B2", hatch="///")
        axes.bar(x, 1 - point["cached_share"], 0.7, point["cached_share"], color=SOURCE_COLOURS["computed"])
    else:
        axes.text(x, 0.02, point["status"], ha="center", rotation=90, size=7)
        return
    axes.text(x, 1.02, f"{point['cached_share']:.0%} cached", ha="center", size=7)
    if pd.notna(point["ceiling_share"]):
        axes.plot([x - 0.42, x + 0.42], [point["ceiling_share"]] * 2, color="black", linewidth=1.4)


def throughput_interactivity(table: pd.DataFrame, comparison: pd.DataFrame) -> Figure:  # noqa: ARG001
    """Draw throughput per GPU against interactivity, a curve for each arm, its points labelled with the concurrency."""
    groups = list(table.groupby("group", sort=False))
    figure = new_figure(1.6 * PANEL_W, (PANEL_H + 0.4) * len(groups) + 0.6)
    panels = figure.subplots(len(groups), 1, squeeze=False)[:, 0]
    x, y = "interactivity_p50_tok_per_s", "total_tok_per_s_per_gpu"
    for (group, cell), axes in zip(groups, panels, strict=True):
        _lines(axes, cell, x, y)
        for _, point in cell.iterrows():
            if pd.notna(point[x]) and pd.notna(point[y]):
                axes.annotate(
                    f"c{point['concurrency']}", (point[x], point[y]), (5, 4), textcoords="offset points", size=7
                )
        axes.set(
            xlabel="interactivity: 1 / ITL p50 (tok/s/user)",
            ylabel="prompt + output tokens (tok/s/GPU)",
            title=group,
        )
        axes.margins(0.12)
        axes.set_ylim(bottom=0)
    _legend(figure, table)
    return _finish(figure, table, "Throughput against interactivity (up and right is better)")


def ratios(table: pd.DataFrame, comparison: pd.DataFrame) -> Figure:
    """Draw the ratio of each arm to the control by metric, with its interval."""
    known = comparison[comparison["ratio"].notna()]
    cells = list(known.groupby(["group", "concurrency"], sort=False))
    if not cells:
        figure = new_figure(6.0, 2.0)
        figure.text(0.5, 0.5, "No pair of arms can be compared; see the table for why.", ha="center", va="center")
        return _finish(figure, table, "Arm / control, with 95 % intervals over sessions")
    styles = arm_styles(table["arm"], CONTROL)
    heights = [0.34 * cell["metric"].nunique() * max(1, cell["arm"].nunique()) + 0.9 for _, cell in cells]
    figure = new_figure(7.4, sum(heights) + 0.5)
    panels = figure.subplots(len(cells), 1, squeeze=False, height_ratios=heights)[:, 0]
    for ((group, concurrency), cell), axes in zip(cells, panels, strict=True):
        metrics, arms = list(dict.fromkeys(cell["metric"])), _arms(cell)
        for _, row in cell.iterrows():
            y = metrics.index(row["metric"]) + 0.22 * (arms.index(row["arm"]) - (len(arms) - 1) / 2)
            style = styles[row["arm"]]
            sure = row["verdict"] in ("better", "worse")
            if pd.notna(row["ratio_low"]):
                axes.plot(
                    [row["ratio_low"], row["ratio_high"]], [y, y], color=style["color"], alpha=1.0 if sure else 0.4
                )
            axes.plot(
                row["ratio"],
                y,
                style["marker"],
                color=style["color"],
                markerfacecolor=style["color"] if sure else "white",
            )
            axes.annotate(row["verdict"], (1.01, y), xycoords=("axes fraction", "data"), va="center", size=7)
        better = dict(zip(cell["metric"], cell["better"], strict=True))
        axes.set_yticks(range(len(metrics)), [f"{name}\n({better[name]} is better)" for name in metrics], size=7)
        axes.set(xscale="log", title=f"{group}, concurrency {concurrency}", ylim=(len(metrics) - 0.5, -0.5))
        axes.axvline(1.0, color=styles[CONTROL]["color"], linewidth=1)
        _plain_log_ticks(axes, cell)
    panels[-1].set_xlabel("ratio to the control (log scale)")
    handles = [Line2D([], [], linestyle="-", label=arm, **styles[arm]) for arm in _arms(known)]
    figure.legend(handles=handles, loc="outside lower right", ncols=len(handles))
    return _finish(figure, table, "Arm / control, with 95 % intervals over sessions; hollow: no difference or unsure")


def _plain_log_ticks(axes: Axes, cell: pd.DataFrame) -> None:
    values = cell[["ratio", "ratio_low", "ratio_high"]].to_numpy(np.float64)
    low, high = float(np.nanmin(values)), float(np.nanmax(values))
    steps = [0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100]
    shown = [step for step in steps if min(low, 1) / 2 <= step <= max(high, 1) * 2]
    axes.set_xlim(shown[0], shown[-1])
    axes.set_xticks(shown, [f"{step:g}" for step in shown])
    axes.minorticks_off()


def _lines(axes: Axes, cell: pd.DataFrame, x: str, y: str) -> None:
    """Draw one line an arm; points that are not `ok` are hollow and off the line."""
    styles = arm_styles(cell["arm"], CONTROL)
    for arm in _arms(cell):
        points = cell[(cell["arm"] == arm) & cell[x].notna() & cell[y].notna()].sort_values("concurrency")
        good, bad = points[points["status"] == "ok"], points[points["status"] != "ok"]
        axes.plot(good[x], good[y], label=arm, **styles[arm])
        axes.plot(bad[x], bad[y], linestyle="none", markerfacecolor="white", **styles[arm])


def _legend(figure: Figure, table: pd.DataFrame) -> None:
    styles = arm_styles(table["arm"], CONTROL)
    handles = [Line2D([], [], label=arm, **styles[arm]) for arm in _arms(table)]
    if (table["status"] == "invalid").any():
        handles.append(
            Line2D([], [], linestyle="none", marker="o", color="black", markerfacecolor="white", label="invalid")
        )
    figure.legend(handles=handles, loc="outside right upper")


def _finish(figure: Figure, table: pd.DataFrame, title: str) -> Figure:
    """Add the title and, in the footer, how much is behind the figure and what is not in it."""
    figure.suptitle(title, fontsize=11, x=0.01, ha="left")
    statuses = table["status"].value_counts()
    requests = int(table["succeeded"].fillna(0).sum())
    absent = [f"{statuses[name]} {name}" for name in ("invalid", "failed", "missing") if name in statuses]
    footer = f"{statuses.get('ok', 0)} of {len(table)} points, {requests} requests, 1 repeat each" + (
        f"; {', '.join(absent)}" if absent else ""
    )
    figure.supxlabel(footer, fontsize=7, color="#666666", x=0.01, ha="left")
    return figure


def _arms(table: pd.DataFrame) -> list[str]:
    """Return the arms in the order they are shown: the control first, then by name."""
    return sorted(table["arm"].unique(), key=lambda arm: (arm != CONTROL, arm))


def _control_first(column: pd.Series) -> pd.Series:
    return column.map(lambda arm: "" if arm == CONTROL else arm) if column.name == "arm" else column


_DRAW: Mapping[str, Callable[[pd.DataFrame, pd.DataFrame], Figure]] = {
    "sweep": sweep,
    "ttft": ttft,
    "prompt_tokens": prompt_tokens,
    "throughput_interactivity": throughput_interactivity,
    "ratios": ratios,
}
