"""Where prompt tokens came from, and what it cost to bring them."""

from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from workflow.explanation import SLOW_COPY_GB_PER_S
from workflow.figures.panels import GREY, empty, finish, means, measured_groups, styles_of, title_of
from workflow.style import DIRECTION_COLOURS, SOURCE_COLOURS, new_figure
from workflow.verdict import CONTROL

BAR_W = 0.52
PANEL_H = 2.9
SHARES = tuple(f"prompt_share_{name}" for name in SOURCE_COLOURS)


def prompt_tokens(table: pd.DataFrame) -> Figure:
    """Draw the share of prompt tokens by source, a bar for each arm and concurrency, with the ceiling of the trace."""
    title = "Where the prompt tokens came from"

    def one(axes: Axes, cells: pd.DataFrame) -> None:
        for x, cell in cells.iterrows():
            _source_bar(axes, float(str(x)), cell)
        axes.set(ylabel="share of prompt tokens", ylim=(0, 1.12))
        axes.set_yticks([0, 0.2, 0.4, 0.6, 0.8, 1.0])

    seen = [name for name in SOURCE_COLOURS if (table[f"prompt_share_{name}"] > 0).any()]
    handles: list[Patch | Line2D] = [Patch(color=SOURCE_COLOURS[name], label=name) for name in seen]
    if (table["cached_share"].notna() & table["prompt_share_device"].isna()).any():
        handles.append(Patch(facecolor="white", edgecolor="#0072B2", hatch="///", label="cached, tier not told"))
    handles.append(Line2D([], [], color="black", label="ceiling of the trace"))
    if (table["status"] == "invalid").any():
        handles.append(Patch(facecolor="white", edgecolor="black", label="hollow: invalid"))
    return _bars(table, [*SHARES, "cached_share", "ceiling_share"], [one], title, handles)


def _source_bar(axes: Axes, x: float, cell: pd.Series) -> None:
    hollow = not cell["good"]
    known = {name: cell[f"prompt_share_{name}"] for name in SOURCE_COLOURS if pd.notna(cell[f"prompt_share_{name}"])}
    if {"device", "computed"} <= known.keys():
        bottom = 0.0
        for name, share in known.items():
            colour = SOURCE_COLOURS[name]
            axes.bar(x, share, 0.8, bottom, facecolor="white" if hollow else colour, edgecolor=colour, linewidth=0.8)
            bottom += share
    elif pd.notna(cell["cached_share"]):
        axes.bar(x, cell["cached_share"], 0.8, facecolor="white", edgecolor="#0072B2", hatch="///")
        axes.bar(x, 1 - cell["cached_share"], 0.8, cell["cached_share"], color=SOURCE_COLOURS["computed"])
    else:
        axes.text(x, 0.03, "not measured", ha="center", va="bottom", rotation=90, size=6.5, color=GREY)
        return
    if pd.notna(cell["cached_share"]):
        axes.text(x, 1.02, f"{cell['cached_share']:.0%}", ha="center", size=6.5)
    if pd.notna(cell["ceiling_share"]):
        axes.plot([x - 0.46, x + 0.46], [cell["ceiling_share"]] * 2, color="black", linewidth=1.4)


def transfers(table: pd.DataFrame) -> Figure:
    """Draw KV bytes moved for each request and the copy rate against the bus limit, by arm and concurrency."""
    title = "KV transfers between device and host"
    if table[["transfer_to_host_bytes", "transfer_to_device_bytes"]].isna().all(axis=None):
        return empty(table, title, "No engine of this sweep exports bytes that it copied between device and host.")

    def moved(axes: Axes, cells: pd.DataFrame) -> None:
        _two_directions(axes, cells, "transfer_to_{}_bytes", 1e9)
        axes.set(ylabel="KV copied (GB a request)")

    def rate(axes: Axes, cells: pd.DataFrame) -> None:
        _two_directions(axes, cells, "copy_rate_to_{}_gb_per_s", None)
        limit = cells["bus_limit_gb_per_s"].max()
        if pd.notna(limit):
            axes.set_ylim(0, max(axes.get_ylim()[1], 1.15 * limit))
            axes.axhline(limit, color="#D55E00", linewidth=1.2)
            axes.text(1.0, limit, f"bus limit {limit:.0f}", va="bottom", ha="right", size=6.5, color="#D55E00",
                      transform=axes.get_yaxis_transform())  # fmt: skip
        axes.axhspan(0, SLOW_COPY_GB_PER_S, color="#F3E3D0", lw=0, zorder=0)
        axes.set(ylabel="rate while copying (GB/s)")

    handles: list[Patch | Line2D] = [
        Patch(color=colour, label=f"to the {name}") for name, colour in DIRECTION_COLOURS.items()
    ]
    handles.append(Patch(color="#F3E3D0", label=f"below {SLOW_COPY_GB_PER_S:.0f} GB/s: not pinned,\nor small blocks"))
    if (table["status"] == "invalid").any():
        handles.append(Patch(facecolor="white", edgecolor="black", label="hollow: invalid"))
    columns = [f"{kind}_to_{way}_{unit}" for kind, unit in (("transfer", "bytes"), ("copy_rate", "gb_per_s"))
               for way in DIRECTION_COLOURS]  # fmt: skip
    return _bars(table, [*columns, "succeeded", "bus_limit_gb_per_s"], [moved, rate], title, handles)


def _two_directions(axes: Axes, cells: pd.DataFrame, name: str, per: float | None) -> None:
    for offset, (way, colour) in zip((-0.2, 0.2), DIRECTION_COLOURS.items(), strict=True):
        for x, cell in cells.iterrows():
            value = cell[name.format(way)]
            if pd.isna(value):
                continue
            height = value if per is None else value / per / cell["succeeded"]
            face = colour if cell["good"] else "white"
            axes.bar(float(str(x)) + offset, height, 0.38, facecolor=face, edgecolor=colour, linewidth=0.8)
    axes.set_ylim(0, None)
    # A gap would read as nothing copied, where the backend exports no such counter.
    both = [name.format(way) for way in DIRECTION_COLOURS]
    uncounted = (cells["arm"] != CONTROL) & (cells["succeeded"] > 0) & cells[both].isna().all(axis=1)
    for x in cells.index[uncounted]:
        axes.text(x, 0.03, "not counted", ha="center", va="bottom", rotation=90, size=6.5, color=GREY,
                  transform=axes.get_xaxis_transform())  # fmt: skip


def _bars(
    table: pd.DataFrame,
    columns: Sequence[str],
    panels: Sequence[Callable[[Axes, pd.DataFrame], None]],
    title: str,
    handles: Sequence[Patch | Line2D],
) -> Figure:
    """Draw panels of bars for each group, a bar for each arm and concurrency, arms of one concurrency side by side."""
    groups = measured_groups(table)
    if not groups:
        return empty(table, title, "No point is measured yet.")
    cells = {group: means(rows, columns) for group, rows in groups}
    widest = max(len(one) for one in cells.values())
    figure = new_figure(max(7.0, 3.0 + BAR_W * widest), (PANEL_H * len(panels) + 0.5) * len(groups) + 0.5)
    grid = figure.subplots(len(groups) * len(panels), 1, squeeze=False)[:, 0]
    styles = styles_of(table)
    for i, (group, rows) in enumerate(groups):
        for j, draw in enumerate(panels):
            axes = grid[i * len(panels) + j]
            draw(axes, cells[group])
            _label_bars(axes, cells[group], widest, styles)
            axes.grid(visible=False, axis="x")
            if j == 0:
                title_of(axes, group, rows, pad=17.0)
    figure.legend(handles=list(handles), loc="outside right upper")
    return finish(figure, table, title)


def _label_bars(axes: Axes, cells: pd.DataFrame, widest: int, styles: dict[str, dict[str, Any]]) -> None:
    axes.set_xticks(range(len(cells)), cells["arm"], rotation=90, size=6.5)
    for label, arm in zip(axes.get_xticklabels(), cells["arm"], strict=True):
        label.set_color(styles[arm]["color"])
    # One width of a bar in all panels.
    axes.set_xlim(-0.6, widest - 0.4)
    for concurrency, members in cells.groupby("concurrency"):
        middle = (members.index[0] + members.index[-1]) / 2
        axes.text(middle, 1.0, f"c{concurrency}", ha="center", va="bottom", size=7.5, color=GREY,
                  transform=axes.get_xaxis_transform())  # fmt: skip
        if members.index[0] > 0:
            axes.axvline(members.index[0] - 0.5, color="#CCCCCC", linewidth=0.7)
