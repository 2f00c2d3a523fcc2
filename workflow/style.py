"""How every figure looks: one palette that colour-blind people can read, one set of settings, stable bytes."""

from collections.abc import Iterable, Mapping
from io import BytesIO
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

# Okabe and Ito's palette: told apart with every common colour blindness, and by lightness in print.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C564B", "#332288")
CONTROL_COLOUR = "#444444"
_MARKERS = ("s", "^", "D", "v", "P", "X", "<", ">")
SOURCE_COLOURS: Mapping[str, str] = {
    "device": "#0072B2",
    "host": "#E69F00",
    "storage": "#CC79A7",
    "peer": "#56B4E9",
    "computed": "#BBBBBB",
}
DIRECTION_COLOURS: Mapping[str, str] = {"host": "#56B4E9", "device": "#0072B2"}
LINE_COLOURS = ("#0072B2", "#E69F00", "#009E73")
VERDICT_COLOURS: Mapping[str, str] = {"better": "#00704F", "worse": "#B34700"}
STATUS_COLOURS: Mapping[str, str] = {"ok": "#009E73", "missing": "#BBBBBB", "invalid": "#E69F00", "failed": "#D55E00"}
"""From good to bad."""

SETTINGS: Mapping[str, Any] = {
    "figure.dpi": 120,
    "savefig.dpi": 120,
    # A list, so that a browser without the first font takes another one without serifs.
    "font.family": "sans-serif",
    "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E5E5E5",
    "legend.frameon": False,
    "lines.linewidth": 1.6,
    # Ids in the SVG come from this salt instead of a random number, so equal tables give equal bytes.
    "svg.hashsalt": "offload-sweep",
    "svg.fonttype": "none",
}


def arm_styles(arms: Iterable[str], control: str) -> dict[str, dict[str, Any]]:
    """Return colour and marker for each arm: the control grey with a circle, the others by their order of name."""
    others = sorted({arm for arm in arms if arm != control})
    styles: dict[str, dict[str, Any]] = {control: {"color": CONTROL_COLOUR, "marker": "o"}}
    for i, arm in enumerate(others):
        styles[arm] = {"color": _COLOURS[i % len(_COLOURS)], "marker": _MARKERS[i % len(_MARKERS)]}
    return styles


def settings() -> Any:
    """Return a context in which the house style is set."""
    return mpl.rc_context(dict(SETTINGS))  # type: ignore[arg-type]  # its keys are a closed list in the stubs


def new_figure(width_in: float, height_in: float, *, fitted: bool = True) -> Figure:
    """Return an empty figure in the house style; `fitted` makes room for labels, which takes time."""
    with settings():
        return Figure(figsize=(width_in, height_in), layout="constrained" if fitted else None)


def render(figure: Figure, file_format: str) -> bytes:
    """Return a figure as `svg` or `png` bytes without a date, the same for the same figure."""
    stream = BytesIO()
    engine = figure.get_layout_engine()
    if engine is not None and figure.axes:
        # Once: a second format would lay the figure out again, which takes most of the time.
        with settings():
            engine.execute(figure)
        figure.set_layout_engine("none")
    dots_per_inch = figure.dpi
    with settings():
        # Not Figure.savefig, which draws everything once more to lay it out.
        if file_format == "svg":
            canvas: Any = FigureCanvasSVG(figure)
            canvas.print_svg(stream, metadata={"Date": None})
        else:
            # The smallest file takes several times as long to pack as one that is a tenth larger.
            canvas = FigureCanvasAgg(figure)
            canvas.print_png(stream, metadata={"Software": None}, pil_kwargs={"compress_level": 3})
    # An SVG leaves its own 72 behind: a PNG after it is coarse, and its wider letters are cut off at the edge.
    figure.dpi = dots_per_inch
    return stream.getvalue()
