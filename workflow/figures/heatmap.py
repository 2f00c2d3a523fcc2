"""What was measured, and what was not."""

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from workflow.figures.panels import arms_of, finish, groups_of, title_of
from workflow.style import STATUS_COLOURS, new_figure

REASONS_SHOWN = 3
CELL_W, CELL_H, LETTER_W = 1.75, 0.62, 0.08


def sweep(table: pd.DataFrame) -> Figure:
    """Draw the sweep at a glance: arms x concurrencies, status and reasons in every cell."""
    groups = groups_of(table)
    widest = max(cell["concurrency"].nunique() for _, cell in groups)
    heights = [CELL_H * cell["arm"].nunique() + 0.9 for _, cell in groups]
    names = LETTER_W * table["arm"].astype(str).str.len().max()
    figure = new_figure(max(6.5, max(1.6, 0.6 + names) + CELL_W * widest), sum(heights) + 0.6)
    panels = figure.subplots(len(groups), 1, squeeze=False, height_ratios=heights)[:, 0]
    for (group, rows), axes in zip(groups, panels, strict=True):
        arms, concurrencies = arms_of(rows), sorted(rows["concurrency"].unique())
        axes.grid(visible=False)
        for (arm, concurrency), cell in rows.groupby(["arm", "concurrency"], sort=False):
            x, y = concurrencies.index(concurrency), arms.index(str(arm))
            # The worst status colours the cell: a repeat that failed must not hide behind one that went well.
            worst = max(cell["status"], key=list(STATUS_COLOURS).index)
            axes.add_patch(Rectangle((x - 0.48, y - 0.45), 0.96, 0.9, color=STATUS_COLOURS[worst], alpha=0.55, lw=0))
            axes.text(x, y, _says(cell), ha="center", va="center", size=6.5, linespacing=1.15)
        # One width of a cell in all panels, however many concurrencies a group has.
        axes.set(xlim=(-0.55, widest - 0.45), ylim=(len(arms) - 0.5, -0.5))
        axes.set_xticks(range(len(concurrencies)), [str(one) for one in concurrencies])
        axes.set_yticks(range(len(arms)), arms)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_xlabel("concurrency (live sessions)", loc="left")
        title_of(axes, group, rows)
    return finish(figure, table, "The sweep at a glance")


def _says(cell: pd.DataFrame) -> str:
    statuses = cell["status"].value_counts()
    names = [name for name in STATUS_COLOURS if name in statuses]
    lines = [", ".join(name if len(cell) == 1 else f"{statuses[name]} {name}" for name in names)]
    requests = int(cell["succeeded"].fillna(0).sum())
    if requests:
        lines[0] += f", {requests:,} requests"
    reasons = [one for text in cell["reasons"].fillna("") for one in str(text).split(";") if one]
    unique = list(dict.fromkeys(reasons))
    lines += unique[:REASONS_SHOWN]
    if len(unique) > REASONS_SHOWN:
        lines.append(f"and {len(unique) - REASONS_SHOWN} more")
    return "\n".join(lines)
