"""One point over time.

A sweep has a sheet for each of its points, and Axes take several times as long to make as all that they show. So a
sheet has none: everything is placed in inches, and the rules of a panel are one path.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import PathPatch, Rectangle
from matplotlib.path import Path
from matplotlib.ticker import EngFormatter, MaxNLocator
from matplotlib.transforms import Bbox, TransformedBbox

from workflow.figures.panels import GREY
from workflow.style import LINE_COLOURS, new_figure

Floats = npt.NDArray[np.float64]
Rule = tuple[float, float, float, float]
"""x, y of one end, x, y of the other, inches."""
Phases = Mapping[str, tuple[float, float]]
"""Phase -> its start and end, seconds."""


class Strip(NamedTuple):
    """What one panel shows: its columns with their labels."""

    ylabel: str
    lines: tuple[tuple[str, str], ...]
    top: float | None = None
    dots: bool = False
    """Slices without a value are gaps between events, not between readings: draw markers, no line."""


STRIPS: tuple[Strip, ...] = (
    Strip("KV pool\nin use (share)", (("device_use_share", "device"), ("host_use_share", "host")), 1.05),
    Strip("requests", (("in_flight", "in flight (client)"), ("running", "running"), ("waiting", "waiting"))),
    Strip("cached share\nof prompts", (("cached_share", "cached"),), 1.05, dots=True),
    Strip("prompt\n(tok/s)", (("prompt_tok_per_s", "at first token"),)),
    Strip("output\n(tok/s)", (("output_tok_per_s", "output tokens"),)),
    Strip("transfers\n(GB/s)", (("to_host_gb_per_s", "to the host"), ("to_device_gb_per_s", "to the device"))),
    Strip("TTFT (s)", (("ttft_p50_s", "median"), ("ttft_max_s", "longest")), dots=True),
    Strip("preemptions\n(1/s)", (("preemptions_per_s", "a second"),)),
)
PHASES = {"warm-up": "#F2F2F2", "drain": "#F7EBDD"}

# All in inches. The sheet: its width, what lies around the panels, a panel's height, from one panel to the next.
WIDTH, LEFT, RIGHT, BOTTOM, ABOVE = 8.2, 0.94, 6.97, 0.62, 0.45
PANEL, PITCH = 0.92, 1.05
# Outwards from a panel's edge: the end of a tick, its label, the label of the whole axis.
TICK, TICK_LABEL, YLABEL, XLABEL = 0.05, 0.1, 0.5, 0.26
# To the right of a panel: a legend's line, its text; down to the next line.
KEY, KEY_LABEL, KEY_PITCH = (0.08, 0.185, 0.29), 0.36, 0.155


class Panel(NamedTuple):
    """Where a panel lies on its sheet, in inches, and what its edges stand for."""

    figure: Figure
    bottom: float
    low: float
    """Seconds at the left edge."""
    high: float
    """Seconds at the right edge."""
    top: float
    """Value at the upper edge; the lower edge is 0."""

    def x(self, seconds: npt.ArrayLike) -> Floats:
        """Return inches from the left of the sheet."""
        return LEFT + (np.asarray(seconds) - self.low) / (self.high - self.low) * (RIGHT - LEFT)

    def y(self, values: npt.ArrayLike) -> Floats:
        """Return inches from the bottom of the sheet."""
        return self.bottom + np.asarray(values) / self.top * PANEL

    def text(self, x: float, y: float, text: str, **style: Any) -> None:
        """Write at a place of the sheet."""
        self.figure.text(x, y, text, transform=self.figure.dpi_scale_trans, **{"size": 7, **style})

    def rules(self, rules: Sequence[Rule], **style: Any) -> None:
        """Draw straight lines."""
        path = Path(np.reshape(rules, (-1, 2)), [Path.MOVETO, Path.LINETO] * len(rules))
        scale = self.figure.dpi_scale_trans
        self.figure.add_artist(PathPatch(path, fill=False, linewidth=0.8, transform=scale, **style))

    def line(self, x: Floats, y: Floats, *, dots: bool, **style: Any) -> Line2D:
        """Draw a line at places of the sheet."""
        mark = {"marker": ".", "markersize": 4, "linewidth": 0.7} if dots else {"linewidth": 1.2}
        line = Line2D(x, y, transform=self.figure.dpi_scale_trans, **{**mark, **style})
        self.figure.add_artist(line)
        return line


def timesheet(title: str, frame: pd.DataFrame) -> Figure:
    """Draw one point over time: pools, queue, hits, throughput, transfers, TTFT, preemptions, and the phases."""
    columns = {name: frame[name].to_numpy(dtype=float) for strip in STRIPS for name, _ in strip.lines}
    known = {name: values for name, values in columns.items() if np.isfinite(values).any()}
    strips = [strip for strip in STRIPS if any(name in known for name, _ in strip.lines)]
    if not strips:
        figure = new_figure(WIDTH, 1.6)
        figure.text(0.5, 0.5, "Nothing of this point was recorded over time.", ha="center", va="center")
        figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, ha="left")
        return figure
    height = BOTTOM + PITCH * (len(strips) - 1) + PANEL + ABOVE
    figure = new_figure(WIDTH, height, fitted=False)
    starts, lengths = (frame[name].to_numpy(dtype=float) for name in ("start_s", "length_s"))
    ends = starts + lengths
    low, high = float(starts.min()), float(ends.max())
    ticks = _round_values(low, high, 9)
    inside = {phase: (frame["phase"] == phase).to_numpy() for phase in PHASES}
    phases = {phase: (starts[here].min(), ends[here].max()) for phase, here in inside.items() if here.any()}
    for place, strip in enumerate(reversed(strips)):
        lines = [(label, known[name]) for name, label in strip.lines if name in known]
        panel = Panel(figure, BOTTOM + PITCH * place, low, high, strip.top or _top(values for _, values in lines))
        _draw_axes(panel, strip.ylabel, ticks, phases)
        # A slice stands for its whole length, so its value is drawn in its middle.
        _draw_lines(panel, (starts + ends) / 2, lines, dots=strip.dots)
        if strip is strips[-1]:
            _label_ticks(panel, ticks)
        if strip is strips[0]:
            _label_phases(panel, phases)
    figure.suptitle(title, fontsize=10, fontweight="bold", x=0.01, y=1 - 0.1 / height, ha="left", va="top")
    figure.text(0.01, 0.06 / height, _footer(lengths, known), fontsize=7, color=GREY, ha="left", va="bottom")
    return figure


def _round_values(low: float, high: float, intervals: int) -> list[float]:
    """Return round values from `low` to `high`, at most so many intervals of them."""
    values = MaxNLocator(intervals, steps=[1, 2, 2.5, 5, 10]).tick_values(low, high)
    return [value for value in values if low <= value <= high]


def _top(lines: Iterable[Floats]) -> float:
    """Return where an axis ends: a little above what it shows."""
    highest = max(float(values[np.isfinite(values)].max()) for values in lines)
    # Nothing at all must look like nothing, not like noise on an axis that ends at 0.05.
    return 1.05 * highest if highest > 0 else 1.0


def _draw_axes(panel: Panel, ylabel: str, ticks: Sequence[float], phases: Phases) -> None:
    bottom, top = panel.bottom, panel.bottom + PANEL
    for phase, span in phases.items():
        left, right = panel.x(span)
        box = Rectangle((left, bottom), right - left, PANEL, color=PHASES[phase], lw=0, zorder=0)
        panel.figure.add_artist(box).set_transform(panel.figure.dpi_scale_trans)
    values = _round_values(0, panel.top, 4)
    heights, moments = panel.y(values), panel.x(ticks)
    grid = [*((LEFT, y, RIGHT, y) for y in heights), *((x, bottom, x, top) for x in moments)]
    panel.rules(grid, edgecolor="#E5E5E5", zorder=0.5)
    spines = [(LEFT, bottom, LEFT, top), (LEFT, bottom, RIGHT, bottom)]
    panel.rules([*spines, *((LEFT - TICK, y, LEFT, y) for y in heights)], edgecolor="black", zorder=2.5)
    for value, y in zip(values, heights, strict=True):
        panel.text(LEFT - TICK_LABEL, y, _number(value), ha="right", va="center_baseline")
    panel.text(LEFT - YLABEL, bottom + PANEL / 2, ylabel, size=7.5, rotation=90, rotation_mode="anchor", ha="center")


def _number(value: float) -> str:
    """Return an axis' value, thousands and millions as 20k and 1.5M."""
    return EngFormatter(sep="").format_data(value) if value >= 1000 else f"{value:g}"


def _draw_lines(panel: Panel, moments: Floats, lines: Sequence[tuple[str, Floats]], *, dots: bool) -> None:
    """Draw (label, values) over moments in seconds, and their legend beside the panel."""
    scale = panel.figure.dpi_scale_trans
    box = TransformedBbox(Bbox.from_extents(LEFT, panel.bottom, RIGHT, panel.bottom + PANEL), scale)
    highest = panel.bottom + PANEL / 2 + KEY_PITCH * (len(lines) - 1) / 2
    for i, ((label, values), colour) in enumerate(zip(lines, LINE_COLOURS, strict=False)):
        shown = np.isfinite(values) if dots else slice(None)
        panel.line(panel.x(moments[shown]), panel.y(values[shown]), dots=dots, color=colour).set_clip_box(box)
        y = highest - KEY_PITCH * i
        panel.line(RIGHT + np.array(KEY), np.full(3, y), dots=dots, color=colour, markevery=[1])
        panel.text(RIGHT + KEY_LABEL, y, label, va="center_baseline")


def _label_phases(panel: Panel, phases: Phases) -> None:
    for phase, span in phases.items():
        panel.text(panel.x(span).mean(), panel.bottom + PANEL + 0.02, phase, ha="center", va="bottom", color=GREY)


def _label_ticks(panel: Panel, ticks: Sequence[float]) -> None:
    places = panel.x(ticks)
    panel.rules([(x, panel.bottom - TICK, x, panel.bottom) for x in places], edgecolor="black", zorder=2.5)
    for tick, x in zip(ticks, places, strict=True):
        panel.text(x, panel.bottom - TICK_LABEL, f"{tick:g}", ha="center", va="top")
    middle = (LEFT + RIGHT) / 2
    panel.text(middle, panel.bottom - XLABEL, "seconds since the profiling phase began", size=9, ha="center", va="top")


def _footer(lengths: Floats, known: Iterable[str]) -> str:
    named = [(strip.ylabel.partition("(")[0], column, label) for strip in STRIPS for column, label in strip.lines]
    absent = [f"{' '.join(what.split())} {label}" for what, column, label in named if column not in known]
    text = f"slices of {np.median(lengths):.3g} s"
    return text + (f"; not exported by this engine: {', '.join(absent)}" if absent else "")
