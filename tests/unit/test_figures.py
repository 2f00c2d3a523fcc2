"""Figures: compared with images, byte-stable, and honest about what they leave out.

`pytest tests/unit/test_figures.py --regenerate-images` writes the images anew; look at them before committing.
"""

import subprocess
import sys
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib.lines import Line2D
from matplotlib.testing.compare import compare_images
from PIL import Image

from tests.examples import gallery, synthetic
from workflow.figures import Tables, draw, draw_timeline
from workflow.figures.panels import log_ticks, spread
from workflow.report import FIGURES, HERE
from workflow.style import render

IMAGES = Path(__file__).parents[1] / "images"
# Root mean square of the difference of 8-bit pixels: fonts are drawn a little differently by other versions.
TOLERANCE = 4.0


@pytest.fixture(scope="module")
def examples():
    return {"llamacpp": gallery.tables(gallery.real())[0], "synthetic": gallery.tables(gallery.made_up())[0]}


@pytest.fixture
def same_image(request, tmp_path):
    """Return a check of a figure against tests/images/<name>.png."""

    def check(figure, name):
        expected, found = IMAGES / f"{name}.png", tmp_path / f"{name}.png"
        figure.set_dpi(50)
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(__import__("workflow.style").style.SETTINGS, "savefig.dpi", 50)
            found.write_bytes(render(figure, "png"))
        if request.config.getoption("--regenerate-images"):
            IMAGES.mkdir(exist_ok=True)
            expected.write_bytes(found.read_bytes())
            pytest.skip(f"{expected} was written anew")
        assert expected.is_file(), f"{expected} is missing: run with --regenerate-images and look at it"
        difference = compare_images(str(expected), str(found), tol=TOLERANCE)
        assert difference is None, difference

    return check


@pytest.mark.parametrize("example", ["llamacpp", "synthetic"])
@pytest.mark.parametrize("name", FIGURES)
def test_figure_looks_as_it_did(examples, same_image, example, name):
    same_image(draw(name, examples[example]), f"{example}-{name}")


def test_time_sheet_looks_as_it_did(same_image):
    same_image(draw_timeline("SYNTHETIC", synthetic.timeline(synthetic.points(1)[0])), "synthetic-timeline")


def test_the_same_table_gives_the_same_bytes_of_svg_and_png(examples):
    for file_format in ("svg", "png"):
        one, other = (render(draw("ratios", examples["llamacpp"]), file_format) for _ in range(2))
        assert one == other
    assert b"<dc:date>" not in render(draw("sweep", examples["llamacpp"]), "svg")


def test_a_png_after_an_svg_is_as_fine_as_one_alone(examples):
    figure = draw("sweep", examples["llamacpp"])
    render(figure, "svg")
    width, height = Image.open(BytesIO(render(figure, "png"))).size
    assert (width, height) == tuple((figure.get_size_inches() * 120).astype(int))


def texts(figure):
    return "\n".join(text.get_text() for text in figure.findobj(match=lambda artist: hasattr(artist, "get_text")))


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_how_much_is_behind_it_and_what_is_missing(examples, name):
    said = texts(draw(name, examples["synthetic"]))
    assert "31 of 36 planned points are ok, 4,752 requests, up to 2 repeats of each" in said
    assert "2 invalid, 2 failed, 1 missing" in said


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_has_a_caption(name):
    assert (HERE / "captions" / f"{name}.rst").read_text().strip()


def test_no_caption_is_left_over():
    assert {path.stem for path in (HERE / "captions").glob("*.rst")} == set(FIGURES)


def test_failed_points_are_listed_and_invalid_ones_are_hollow(examples):
    figure = draw("throughput_interactivity", examples["synthetic"])
    assert "lmcache c64 2 of 2 repeats failed (engine_died)" in texts(figure)
    mooncake = [line for axes in figure.axes for line in axes.lines if line.get_marker() == "^"]
    assert any(line.get_markerfacecolor() == "white" and len(line.get_xdata()) for line in mooncake)


def test_a_point_that_failed_is_told_from_its_repeat_that_is_missing(examples):
    tables = examples["synthetic"]
    table = tables.sweep.copy()
    _, second = table.index[(table["arm"] == "lmcache") & (table["status"] == "failed")][:2]
    table.loc[second, ["status", "reasons"]] = "missing", "not measured yet"
    said = texts(draw("throughput_interactivity", Tables(table, tables.pairs, tables.arms)))
    assert "lmcache c64 1 of 2 repeats failed (engine_died)" in said
    others = int((tables.sweep["status"] == "missing").sum())
    assert f"{others + 1} not measured yet" in said


def test_a_sweep_in_which_nothing_was_measured_yet_still_has_its_figures(examples):
    tables = examples["synthetic"]
    numbers = [name for name in tables.sweep.select_dtypes("number") if name not in ("concurrency", "repeat", "entry")]
    empty = tables.sweep.assign(status="missing", reasons="not measured yet", **dict.fromkeys(numbers, np.nan))
    for name in FIGURES:
        said = texts(draw(name, Tables(empty, tables.pairs.iloc[:0], tables.arms.iloc[:0])))
        assert "0 of 36 planned points are ok, 0 requests" in said, name


@pytest.mark.parametrize("name", ["latency", "prompt_tokens", "transfers"])
def test_a_group_in_which_nothing_was_measured_has_no_empty_axes(examples, name):
    tables = examples["synthetic"]
    numbers = [name for name in tables.sweep.select_dtypes("number") if name not in ("concurrency", "repeat", "entry")]
    missing = dict.fromkeys(numbers, np.nan) | {"status": "missing", "reasons": "", "group": "another-group"}
    both = pd.concat([tables.sweep, tables.sweep.assign(**missing)])
    figure = draw(name, Tables(both, tables.pairs, tables.arms))
    assert len(figure.axes) == len(draw(name, tables).axes)
    assert "another-group" not in texts(figure)
    assert f"{len(tables.sweep) + (tables.sweep['status'] == 'missing').sum()} missing" in texts(figure)


def test_what_was_not_measured_is_not_drawn_as_zero(examples):
    figure = draw("transfers", examples["synthetic"])
    rates = [axes for axes in figure.axes if axes.get_ylabel().startswith("rate")]
    bars = [bar for axes in rates for bar in axes.patches if bar.get_height() == 0]
    assert rates
    assert not [bar for bar in bars if bar.get_width() < 1]
    assert "No engine of this sweep" in texts(draw("transfers", examples["llamacpp"]))


def test_a_time_sheet_names_what_the_engine_does_not_export():
    frame = synthetic.timeline(synthetic.points(1)[0]).assign(host_use_share=np.nan, preemptions_per_s=np.nan)
    figure = draw_timeline("SYNTHETIC", frame)
    assert "not exported by this engine: KV pool in use host, preemptions a second" in texts(figure)
    assert "Nothing of this point" in texts(draw_timeline("x", frame.iloc[:0]))


def only(frame, **columns):
    """Return a timeline in which nothing but these columns is known."""
    unknown = [name for name in frame.columns if name not in ("start_s", "length_s", "phase")]
    return frame.assign(**dict.fromkeys(unknown, np.nan) | columns)


def test_a_time_sheet_shows_values_beside_their_ticks():
    frame = synthetic.timeline(synthetic.points(1)[0])
    figure = draw_timeline("SYNTHETIC", only(frame, ttft_p50_s=np.linspace(1, 3, len(frame))))
    line, at = figure.findobj(Line2D)[0], {text.get_text(): text.get_position() for text in figure.texts}
    assert line.get_ydata()[[0, -1]] == pytest.approx([at["1"][1], at["3"][1]])
    middles = frame["start_s"] + frame["length_s"] / 2
    inside = middles.between(200, 800).to_numpy()
    expected = np.interp(middles, [200, 800], [at["200"][0], at["800"][0]])
    assert line.get_xdata()[inside] == pytest.approx(expected[inside])


@pytest.mark.parametrize(
    ("highest", "ticks"),
    [(3e-5, {"1e-05", "2e-05"}), (0.15, {"0.05", "0.1", "0.15"}), (4.1e4, {"20k", "40k"}), (2.6e6, {"1M", "2M"})],
)
def test_a_time_sheet_writes_small_and_large_values_in_short(highest, ticks):
    frame = synthetic.timeline(synthetic.points(1)[0])
    said = {text.get_text() for text in draw_timeline("x", only(frame, prompt_tok_per_s=highest)).texts}
    assert ticks <= said


SHEET = """
import sys
from io import BytesIO
from tests.examples import synthetic
from workflow.figures import draw_timeline
from workflow.style import render
sys.stdout.buffer.write(render(draw_timeline("A", synthetic.timeline(synthetic.points(1)[0])), "svg"))
"""


def test_a_time_sheet_depends_on_its_own_table_only(project):
    frame = synthetic.timeline(synthetic.points(1)[0])
    shorter = only(frame, running=300.0).iloc[:40].assign(length_s=1.0)
    first, other, again = (
        render(draw_timeline(title, table), "svg") for title, table in (("A", frame), ("B", shorter), ("A", frame))
    )
    fresh = subprocess.run([sys.executable, "-c", SHEET], cwd=project, stdout=subprocess.PIPE, check=True).stdout
    assert first == again == fresh != other


def test_drawing_does_not_wait_for_the_statistics_that_only_the_comparison_needs(project):
    told = "import sys, workflow.figures, workflow.report; sys.exit('scipy.stats' in sys.modules)"
    subprocess.run([sys.executable, "-c", told], cwd=project, check=True)


@pytest.mark.parametrize(("low", "high"), [(0.9, 1.1), (0.3, 3.0), (0.05, 20.0), (1e-4, 1e4)])
def test_a_logarithmic_axis_has_a_readable_number_of_ticks(low, high):
    ticks = log_ticks(low, high)
    assert 2 <= len(ticks) <= 12
    assert all(low <= tick <= high for tick in ticks)


def test_labels_are_moved_apart_in_their_order():
    assert spread([1.0, 1.0, 5.0], 0.5) == [1.0, 1.5, 5.0]
    assert spread([], 1.0) == []


def test_arms_keep_their_look_when_others_are_missing(examples):
    sweep = examples["synthetic"].sweep
    assert isinstance(sweep, pd.DataFrame)
    colours = {
        line.get_label(): line.get_color() for line in draw("latency", examples["synthetic"]).legends[0].get_lines()
    }
    assert len({colours[arm] for arm in sweep["arm"].unique()}) == 4


def test_a_backend_that_counts_no_copies_is_not_drawn_as_one_that_copied_nothing(examples):
    tables = examples["synthetic"]
    columns = [name for name in tables.sweep if name.startswith(("transfer_to_", "copy_rate_to_"))]
    silent = tables.sweep.copy()
    silent.loc[silent["arm"] == "lmcache", columns] = np.nan
    before = texts(draw("transfers", tables)).count("not counted")
    after = texts(draw("transfers", Tables(silent, tables.pairs, tables.arms))).count("not counted")
    cells = silent[(silent["arm"] == "lmcache") & (silent["succeeded"] > 0)].groupby(["group", "concurrency"]).ngroups
    assert cells > 0
    assert after - before == 2 * cells, "in both panels"
