"""Flat tables -> matplotlib figures, one module a question. No files are read or written here.

Points that are invalid are drawn hollow, what failed or is missing is listed, and what was not measured is not drawn.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import pandas as pd
from matplotlib.figure import Figure

from workflow.figures import curves, forest, heatmap, history, timesheet, tokens
from workflow.style import settings


class Tables(NamedTuple):
    """What figures are drawn from."""

    sweep: pd.DataFrame
    """One row a planned point."""
    pairs: pd.DataFrame
    """One row a pair of arms, concurrency and metric."""
    arms: pd.DataFrame
    """One row an arm, concurrency and metric, with the interval of its value."""


_DRAW: Mapping[str, Callable[[Tables], Figure]] = {
    "sweep": lambda tables: heatmap.sweep(tables.sweep),
    "throughput_interactivity": lambda tables: curves.throughput_interactivity(tables.sweep),
    "latency": lambda tables: curves.latency(tables.sweep, tables.arms),
    "ratios": lambda tables: forest.ratios(tables.sweep, tables.pairs),
    "prompt_tokens": lambda tables: tokens.prompt_tokens(tables.sweep),
    "transfers": lambda tables: tokens.transfers(tables.sweep),
    "history": lambda tables: history.history(tables.sweep),
}


def draw(name: str, tables: Tables) -> Figure:
    """Return one of the report's figures."""
    with settings():
        return _DRAW[name](tables)


def draw_timeline(title: str, frame: pd.DataFrame) -> Figure:
    """Return the time sheet of one point; `frame` has the columns of `workflow.timeline`."""
    with settings():
        return timesheet.timesheet(title, frame)
