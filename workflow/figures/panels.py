"""What all figures have in common: panels by group, legends, the footer that says what is behind them."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from workflow.style import arm_styles, new_figure
from workflow.verdict import CONTROL

GREY = "#666666"


def groups_of(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return (group, its rows) in the order of the plan."""
    return [(str(group), rows) for group, rows in table.groupby("group", sort=False)]


def measured_groups(table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """Return (group, its rows) of the groups in which something was measured; empty axes would only take room."""
    return [(group, rows) for group, rows in groups_of(table) if rows["status"].isin(["ok", "invalid"]).any()]


def arms_of(table: pd.DataFrame) -> list[str]:
    """Return the arms in the order they are shown: the control first, then by name."""
    return sorted(table["arm"].unique(), key=lambda arm: (arm != CONTROL, arm))


def styles_of(table: pd.DataFrame) -> dict[str, dict[str, Any]]:
    """Return colour and marker of each arm; give it the whole sweep, so that an arm looks the same in all panels."""
    return arm_styles(table["arm"], CONTROL)


def means(rows: pd.DataFrame, columns: Sequence[str]) -> pd.DataFrame:
    """Return arm, concurrency, `good` (is it fit to publish) and the mean of columns over repeats.

    Where some repeats are `ok`, only those count; else those that are invalid do, for a hollow marker.
    """
    found = []
    rows = rows[["arm", "concurrency", "status", *columns]]
    for (arm, concurrency), cell in rows.groupby(["arm", "concurrency"], sort=False):
        good = cell[cell["status"] == "ok"]
        used = good if len(good) else cell[cell["status"] == "invalid"]
        row = {"arm": arm, "concurrency": concurrency, "good": len(good) > 0, "repeats": len(used)}
        found.append(row | {name: used[name].mean() if len(used) else np.nan for name in columns})
    frame = pd.DataFrame(found, columns=["arm", "concurrency", "good", "repeats", *columns])
    return frame.sort_values(["concurrency", "arm"], key=control_first, ignore_index=True)


def control_first(column: pd.Series) -> pd.Series:
    """Sort the control before other arms."""
    return column.map(lambda arm: "" if arm == CONTROL else arm) if column.name == "arm" else column


def not_drawn(rows: pd.DataFrame) -> str:
    """Return which points of a panel have no numbers, and why; empty where all have.

    Those that failed are named. Those that nobody has measured yet are counted: a long list of them squeezes the axes.
    """
    listed = []
    for (arm, concurrency), cell in rows.groupby(["arm", "concurrency"], sort=False):
        failed = cell[cell["status"] == "failed"]
        for reasons, some in failed.groupby("reasons", sort=False):
            count = "" if len(cell) == 1 else f" {len(some)} of {len(cell)} repeats"
            listed.append(f"{arm} c{concurrency}{count} failed ({reasons})")
    missing = int((rows["status"] == "missing").sum())
    return "; ".join([*listed, *([f"{missing} not measured yet"] if missing else [])])


def empty(table: pd.DataFrame, title: str, says: str) -> Figure:
    """Return a figure that says why there is nothing to draw."""
    figure = new_figure(7.0, 1.6)
    figure.text(0.5, 0.5, says, ha="center", va="center", size=9)
    return finish(figure, table, title)


def legend(figure: Figure, table: pd.DataFrame, *more: Line2D) -> None:
    """Add the arms, and what hollow markers mean where there are any, to the right of the panels."""
    styles = styles_of(table)
    handles = [Line2D([], [], linestyle="-", label=arm, **styles[arm]) for arm in arms_of(table)]
    if (table["status"] == "invalid").any():
        handles.append(hollow("invalid, in no ratio"))
    figure.legend(handles=[*handles, *more], loc="outside right upper")


def hollow(label: str) -> Line2D:
    """Return the legend entry of a hollow marker."""
    return Line2D([], [], linestyle="none", marker="o", color="black", markerfacecolor="white", label=label)


def title_of(axes: Axes, group: str, rows: pd.DataFrame, more: str = "", pad: float = 6.0) -> None:
    """Write a panel's title: the group, and what its id stands for."""
    images = ", ".join(sorted({str(image).rpartition("/")[2] for image in rows["image"]}))
    entries = ", ".join(str(entry) for entry in sorted(rows["entry"].unique()))
    text = f"{group}\n{images}, {rows['trace_set'].iloc[0]}, changelog entry {entries}"
    axes.set_title(text + (f"\n{more}" if more else ""), loc="left", fontsize=7.5, color="#333333", pad=pad)


def log_ticks(low: float, high: float) -> list[float]:
    """Return round values from `low` to `high` for a logarithmic axis: about four to nine of them."""
    span = high / low
    if span < 2:
        return [float(tick) for tick in MaxNLocator(6).tick_values(low, high) if low <= tick <= high]
    digits = {4: (1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7), 8: (1, 1.5, 2, 3, 5, 7), 400: (1, 2, 5)}
    chosen = next((values for limit, values in digits.items() if span < limit), (1.0,))
    steps = [digit * 10.0**power for power in range(-9, 10) for digit in chosen]
    return [step for step in steps if low <= step <= high]


def spread(values: Sequence[float], gap: float) -> list[float]:
    """Return values moved apart so that neighbours are at least `gap` from each other, in the order given."""
    order = sorted(range(len(values)), key=lambda i: values[i])
    placed = [0.0] * len(values)
    last = -np.inf
    for i in order:
        last = max(values[i], last + gap)
        placed[i] = float(last)
    return placed


def finish(figure: Figure, table: pd.DataFrame, title: str) -> Figure:
    """Add the title and, in the footer, how much is behind the figure and what is not in it."""
    figure.suptitle(title, fontsize=11, fontweight="bold", x=0.01, ha="left")
    statuses = table["status"].value_counts()
    requests = int(table["succeeded"].fillna(0).sum())
    repeats = int(table["repeat"].max()) if len(table) else 0
    absent = [f"{statuses[name]} {name}" for name in ("invalid", "failed", "missing") if name in statuses]
    times = "1 repeat" if repeats == 1 else f"up to {repeats} repeats"
    footer = f"{statuses.get('ok', 0)} of {len(table)} planned points are ok, {requests:,} requests, {times} of each"
    figure.supxlabel(footer + (f"; {', '.join(absent)}" if absent else ""), fontsize=7, color=GREY, x=0.01, ha="left")
    return figure


def wrapped(parts: Iterable[str], width: int) -> str:
    """Return parts joined by semicolons, broken into lines of about `width` characters."""
    lines = [""]
    for part in parts:
        if lines[-1] and len(lines[-1]) + len(part) > width:
            lines.append("")
        lines[-1] += part + "; "
    return "\n".join(line.rstrip("; ") for line in lines)
