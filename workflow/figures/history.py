"""How the same arms did over the entries of the changelog."""

from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from workflow.figures.panels import GREY, empty, finish, legend, means, spread, styles_of
from workflow.style import new_figure

SHOWN = {"total_tok_per_s_per_gpu": "prompt + output tokens (tok/s/GPU)", "ttft_p50_s": "TTFT p50 (s)"}
TITLE = "The same points over the entries of the changelog"


def history(table: pd.DataFrame) -> Figure:
    """Draw throughput and TTFT over changelog entries, and the image that each brought.

    A line is an arm at a concurrency that two or more entries have. Two contents of a trace set or two definitions of
    the metrics never share an axis.
    """
    lines = []
    for key, rows in table.groupby(["lineage", "trace_sha256", "definition_version"], sort=False):
        entries = rows.groupby(["arm", "concurrency"])["entry"].transform("nunique")
        if (entries > 1).any():
            lines.append((str(key[0]), rows[entries > 1]))
    if not lines:
        return empty(table, TITLE, "No arm and concurrency of this sweep is in two changelog entries.")
    figure = new_figure(4.6 * len(SHOWN) + 1.2, 3.6 * len(lines) + 0.6)
    panels = figure.subplots(len(lines), len(SHOWN), squeeze=False)
    for (lineage, rows), line in zip(lines, panels, strict=True):
        for axes, (metric, label) in zip(line, SHOWN.items(), strict=True):
            _panel(axes, rows, metric, styles_of(table))
            axes.set_ylabel(label)
        line[0].set_title(lineage, loc="left", fontsize=7.5, color="#333333")
    legend(figure, table)
    return finish(figure, table, TITLE)


def _panel(axes: Axes, rows: pd.DataFrame, metric: str, styles: dict[str, dict[str, Any]]) -> None:
    entries = sorted(rows["entry"].unique())
    per_entry = {entry: means(rows[rows["entry"] == entry], [metric]) for entry in entries}
    ends: list[tuple[str, float, float]] = []
    for (arm, concurrency), _ in rows.groupby(["arm", "concurrency"], sort=False):
        points = []
        for x, entry in enumerate(entries):
            cells = per_entry[entry]
            here = cells[(cells["arm"] == arm) & (cells["concurrency"] == concurrency) & cells[metric].notna()]
            points += [(x, float(one[metric]), bool(one["good"])) for _, one in here.iterrows()]
        style = styles[str(arm)]
        good, bad = ([(x, y) for x, y, fine in points if fine is wanted] for wanted in (True, False))
        axes.plot([x for x, _ in good], [y for _, y in good], markersize=5, **style)
        axes.plot([x for x, _ in bad], [y for _, y in bad], linestyle="none", markerfacecolor="white", **style)
        ends += [(f"c{concurrency}", x, y) for x, y, _ in points[-1:]]
    top = max(axes.get_ylim()[1], *(1.08 * y for _, _, y in ends))
    for (label, at, _), y in zip(ends, spread([y for _, _, y in ends], 0.04 * top), strict=True):
        axes.annotate(label, (at, y), (7, 0), textcoords="offset points", va="center", size=6.5, color=GREY)
    axes.set_xticks(range(len(entries)), _entry_labels(rows, entries), size=7)
    axes.set_xlim(-0.3, len(entries) - 0.6)
    axes.set_ylim(0, top)


def _entry_labels(rows: pd.DataFrame, entries: list[int]) -> list[str]:
    """Return each entry's pull request, and its image where it is another than before."""
    labels, before = [], None
    for entry in entries:
        members = rows[rows["entry"] == entry]
        images = ", ".join(sorted({str(one).rpartition("/")[2] for one in members["image"]}))
        pull = str(members["pr_link"].iloc[0]).rpartition("/")[2]
        labels.append(f"entry {entry} (#{pull})" + (f"\n{images}" if images != before else "\nsame image"))
        before = images
    return labels
