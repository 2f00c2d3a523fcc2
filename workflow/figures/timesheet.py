"""One point over time."""

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import AutoLocator, EngFormatter

from workflow.figures.panels import GREY
from workflow.style import LINE_COLOURS, new_figure


class Strip(NamedTuple):
    """One panel: its columns with their labels."""

    ylabel: str
    lines: tuple[tuple[str, str], ...]
    top: float | None = None
    large: bool = False
    """Thousands and millions are written 20k and 1.5M."""
    dots: bool = False
    """Slices without a value are gaps between events, not between readings: draw markers, no line."""


STRIPS: tuple[Strip, ...] = (
    Strip("KV pool\nin use (share)", (("device_use_share", "device"), ("host_use_share", "host")), 1.05),
    Strip("requests", (("in_flight", "in flight (client)"), ("running", "running"), ("waiting", "waiting"))),
    Strip("cached share\nof prompts", (("cached_share", "cached"),), 1.05, dots=True),
    Strip("prompt\n(tok/s)", (("prompt_tok_per_s", "at first token"),), large=True),
    Strip("output\n(tok/s)", (("output_tok_per_s", "output tokens"),), large=True),
    Strip("transfers\n(GB/s)", (("to_host_gb_per_s", "to the host"), ("to_device_gb_per_s", "to the device"))),
    Strip("TTFT (s)", (("ttft_p50_s", "median"), ("ttft_max_s", "longest")), dots=True),
    Strip("preemptions\n(1/s)", (("preemptions_per_s", "a second"),)),
)
PHASES = {"warm-up": "#F2F2F2", "drain": "#F7EBDD"}


def timesheet(title: str, frame: pd.DataFrame) -> Figure:
    """Draw one point over time: pools, queue, hits, throughput, transfers, TTFT, preemptions, and the phases."""
    strips = [strip for strip in STRIPS if _known(strip, frame)]
    if not strips:
        figure = new_figure(8.2, 1.6)
        figure.text(0.5, 0.5, "Nothing of this point was recorded over time.", ha="center", va="center")
        figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
        return figure
    # There is one for each point, hundreds in a sweep, and all are made alike: fixed margins, or fitting takes most of
    # the time.
    height = 1.05 * len(strips) + 1.0
    figure = new_figure(8.2, height, fitted=False)
    panels = figure.subplots(len(strips), 1, squeeze=False)[:, 0]
    figure.subplots_adjust(left=0.115, right=0.85, bottom=0.62 / height, top=1 - 0.45 / height, hspace=0.14)
    # A slice stands for its whole length, so its value is drawn in its middle.
    middle = frame["start_s"] + frame["length_s"] / 2
    low, high = float(frame["start_s"].min()), float((frame["start_s"] + frame["length_s"]).max())
    ticks = [tick for tick in AutoLocator().tick_values(low, high) if low <= tick <= high]
    phases = list(_phases(frame))
    for strip, axes in zip(strips, panels, strict=True):
        columns = [column for column, _ in _known(strip, frame)]
        for (column, label), colour in zip(_known(strip, frame), LINE_COLOURS, strict=False):
            mark = {"marker": ".", "markersize": 4, "linewidth": 0.7} if strip.dots else {"linewidth": 1.2}
            known = frame[column].notna() if strip.dots else slice(None)
            axes.plot(middle[known], frame[column][known], color=colour, label=label, **mark)
        axes.set_ylabel(strip.ylabel, fontsize=7.5)
        axes.yaxis.set_label_coords(-0.08, 0.5)
        # Nothing at all must look like nothing, not like noise on an axis that ends at 0.05.
        axes.set_ylim(0, strip.top or max(axes.get_ylim()[1], 1.0 if not frame[columns].any(axis=None) else 0.0))
        if strip.large:
            axes.yaxis.set_major_formatter(EngFormatter(sep=""))
        axes.tick_params(labelsize=7)
        axes.legend(loc="center left", bbox_to_anchor=(1.0, 0.5), fontsize=7)
        _draw_phases(axes, phases, named=axes is panels[0])
        _time_axis(axes, low, high, ticks, last=axes is panels[-1])
    figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, y=1 - 0.1 / height, ha="left", va="top")
    figure.text(0.01, 0.06 / height, _footer(frame, strips), fontsize=7, color=GREY, ha="left", va="bottom")
    return figure


def _known(strip: Strip, frame: pd.DataFrame) -> list[tuple[str, str]]:
    return [(column, label) for column, label in strip.lines if frame[column].notna().any()]


def _time_axis(axes: Axes, low: float, high: float, ticks: Sequence[float], *, last: bool) -> None:
    axes.set_xlim(low, high)
    axes.vlines(ticks, 0, 1, color="#E5E5E5", linewidth=0.8, zorder=0.5, transform=axes.get_xaxis_transform())
    if last:
        axes.set_xticks(ticks)
        axes.grid(visible=False, axis="x")
        axes.set_xlabel("seconds since the profiling phase began")
    else:
        # An axis without labels still makes, places and draws each of its ticks: half of the time of a sheet.
        axes.xaxis.set_visible(False)


def _phases(frame: pd.DataFrame) -> Iterator[tuple[str, float, float]]:
    """Yield (phase, start, end in seconds) of those in PHASES."""
    for phase in PHASES:
        rows = frame[frame["phase"] == phase]
        if len(rows):
            yield phase, rows["start_s"].min(), (rows["start_s"] + rows["length_s"]).max()


def _draw_phases(axes: Axes, phases: Iterable[tuple[str, float, float]], *, named: bool) -> None:
    for phase, start, end in phases:
        axes.axvspan(start, end, color=PHASES[phase], lw=0, zorder=0)
        if named:
            axes.text((start + end) / 2, 1.02, phase, ha="center", va="bottom", size=7, color=GREY,
                      transform=axes.get_xaxis_transform())  # fmt: skip


def _footer(frame: pd.DataFrame, strips: Sequence[Strip]) -> str:
    shown = {column for strip in strips for column, _ in _known(strip, frame)}
    named = [(strip.ylabel.partition("(")[0], column, label) for strip in STRIPS for column, label in strip.lines]
    absent = [f"{' '.join(what.split())} {label}" for what, column, label in named if column not in shown]
    text = f"slices of {frame['length_s'].median():.3g} s"
    return text + (f"; not exported by this engine: {', '.join(absent)}" if absent else "")
