"""Redraw all figures and reports of the example: `python -m tests.examples.gallery results/gallery`."""

import shutil
import sys
from pathlib import Path

import pandas as pd

from tests.examples import synthetic
from workflow.changelog import load_changelog
from workflow.comparison import compare, summary
from workflow.contract import write_atomic
from workflow.explanation import explain
from workflow.fairness import fairness_table
from workflow.figures import Tables, draw, draw_timeline
from workflow.measured import sweep_table
from workflow.metrics import PointMetrics
from workflow.points import Point, interleaved
from workflow.report import FIGURES, page, read_content
from workflow.runs import Run
from workflow.style import render

PROJECT = Path(__file__).parents[2]
REAL = Path(__file__).parent / "llamacpp"
Example = tuple[list[Point], pd.DataFrame, dict[str, pd.DataFrame], dict[str, pd.DataFrame]]
"""(points, the sweep's table, requests by point, timelines by point)."""


def real() -> Example:
    """Return the committed sweep of llama.cpp."""
    found = (Point.read(path) for path in (REAL / "points").glob("*.json"))
    points = interleaved(sorted(found, key=lambda point: (point.concurrency, point.arm != "none")))
    metrics = {point.id: PointMetrics.read(REAL / "metrics" / f"{point.id}.json") for point in points}
    runs = {point.id: Run.read(REAL / "runs" / point.id / "run.json") for point in points}
    requests, timelines = (
        {str(point): rows.reset_index(drop=True) for point, rows in pd.read_parquet(REAL / name).groupby("point")}
        for name in ("requests.parquet", "timelines.parquet")
    )
    return points, sweep_table(points, metrics, REAL / "failures", runs), requests, timelines


def made_up() -> Example:
    """Return the sweep whose numbers are made up."""
    points, table, requests = synthetic.sweep()
    shown = next(point for point in points if point.arm == "lmcache" and point.concurrency == 32)
    return points, table, requests, {shown.id: synthetic.timeline(shown)}


def tables(example: Example) -> tuple[Tables, pd.DataFrame, pd.DataFrame]:
    """Return (what figures are drawn from, explanations, fairness)."""
    points, table, requests, _ = example
    pairs, arms = compare(table, requests)
    return Tables(table, pairs, arms), explain(table, pairs), fairness_table(points, table)


def write(example: Example, out: Path, title: str, documents: Path | None, changelog: Path | None) -> None:
    """Write every output of the comparison and figures stages; `documents` holds runs and metrics to show."""
    points, table, _, timelines = example
    drawn, explanations, fairness = tables(example)
    if documents is not None:
        for name in ("runs", "metrics"):
            shutil.copytree(documents / name, out / name, dirs_exist_ok=True)
    for name in ("figures", "timelines"):
        (out / name).mkdir(parents=True, exist_ok=True)
    table.to_parquet(out / "metrics.parquet", index=False)
    drawn.pairs.to_csv(out / "comparison.csv", index=False)
    drawn.arms.to_csv(out / "arms.csv", index=False)
    explanations.to_csv(out / "explanations.csv", index=False)
    fairness.to_csv(out / "fairness.csv", index=False)
    (out / "summary.md").write_text(summary(table, drawn.pairs, explanations))
    for name in FIGURES:
        figure = draw(name, drawn)
        for file_format in ("svg", "png"):
            (out / "figures" / f"{name}.{file_format}").write_bytes(render(figure, file_format))
    for point, frame in timelines.items():
        (out / "timelines" / f"{point}.svg").write_bytes(render(draw_timeline(point, frame), "svg"))
    entries = load_changelog(changelog) if changelog else ()
    write_atomic(out / "report.html", page(read_content(out, points, entries, title)).encode())


def gallery(out: Path) -> None:
    """Write both examples."""
    write(real(), out / "llamacpp", "Offload Sweep: llama.cpp", REAL, PROJECT / "configs/perf-changelog.yaml")
    write(made_up(), out / "synthetic", "Offload Sweep: SYNTHETIC numbers", None, None)


if __name__ == "__main__":
    gallery(Path(sys.argv[1]))
    print(f"{sys.argv[1]}/llamacpp/report.html (measured) and {sys.argv[1]}/synthetic/report.html (made up)")
