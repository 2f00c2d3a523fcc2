"""Time the comparison, figures, time sheets and report of about 500 points: `python -m tests.benchmarks.comparison`.

Eight groups of the made-up sweep: 4 arms x 4 concurrencies x 4 repeats each, 720 requests a point. Every script that a
rule runs is run as a process of its own, on files; what Snakemake takes to plan and start them is not in it.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.examples import gallery, synthetic
from workflow.gallery import FIGURES
from workflow.metrics import PointMetrics
from workflow.runs import Run

GROUPS = 8
REPEATS = 4
TURNS = 5
"""Copies of each request, a little apart in time to first token."""
PROCESSES = 2
"""For the time sheets."""
SHEETS = "results/figures/timelines"
SCRIPT = """
import json, runpy, sys
from types import SimpleNamespace
snakemake = json.loads(sys.argv[2], object_hook=lambda members: SimpleNamespace(**members))
runpy.run_path(sys.argv[1], init_globals={"snakemake": snakemake})
"""


@contextmanager
def timed(what: str) -> Iterator[None]:
    """Print the wall-clock and processor seconds of the processes that a block starts as a row of a Markdown table."""
    wall, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    yield
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    print(f"| {what} | {time.perf_counter() - wall:.1f} | {cpu:.1f} |", flush=True)


def run(results: Path, script: str, **given: Any) -> None:
    """Run a script of the workflow with the members of `snakemake` that it reads."""
    argv = [sys.executable, "-c", SCRIPT, str(gallery.PROJECT / "scripts" / script), json.dumps(given)]
    # As Snakemake does for a job of one thread: threads of the linear algebra only wait for each other here.
    environment = os.environ | {"PYTHONPATH": str(gallery.PROJECT), "OPENBLAS_NUM_THREADS": "1"}
    subprocess.run(argv, cwd=results.parent, env=environment, check=True)


def write_sweep(results: Path) -> None:
    """Write what measuring leaves in `results`; each point has a timeline, also those that have no other numbers."""
    all_points, table, requests = synthetic.sweep(REPEATS)
    newest = table[table["entry"] == 1]
    copies = [
        newest.assign(**{name: newest[name] + f"-{i}" for name in ("point", "group", "curve")}) for i in range(GROUPS)
    ]
    for name in ("points", "metrics", "timelines"):
        (results / name).mkdir(parents=True)
    pd.concat(copies, ignore_index=True).to_parquet(results / "metrics.parquet", index=False)
    like = next(gallery.REAL.glob("metrics/*.json"))
    metrics, seen = PointMetrics.read(like), Run.read(gallery.REAL / "runs" / like.stem / "run.json")
    rng = np.random.default_rng(1)
    for point in (one for one in all_points if one.origin.entry == 1):
        for i in range(GROUPS):
            name = f"{point.id}-{i}"
            copy = point.model_copy(update={"id": name, "group": f"{point.group}-{i}"})
            copy.write(results / f"points/{name}.json")
            synthetic.timeline(point).to_parquet(results / f"timelines/{name}.parquet", index=False)
            if point.id not in requests:
                continue
            longer = pd.concat([requests[point.id]] * TURNS, ignore_index=True)
            longer["ttft_s"] *= np.exp(rng.normal(0, 0.1, len(longer)))
            longer.to_parquet(results / f"metrics/{name}.requests.parquet")
            metrics.model_copy(update={"point": name}).write(results / f"metrics/{name}.json")
            seen.model_copy(update={"point": name}).write(results / f"runs/{name}/run.json")


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder, "results")
        write_sweep(results)
        (results / "figures").mkdir()
        table = "results/metrics.parquet"
        pairs, arms, explanations, fairness = (
            f"results/{name}.csv" for name in ("comparison", "arms", "explanations", "fairness")
        )
        print("| step | wall (s) | processor (s) |\n|---|---|---|")
        with timed("everything"):
            with timed("pairs, intervals, verdicts, explanations, fairness, summary"):
                output = {"pairs": pairs, "arms": arms, "explanations": explanations, "fairness": fairness}
                run(results, "compare.py", input={"table": table}, output=output | {"summary": "results/summary.md"})
            for name in FIGURES:
                with timed(f"figure {name}, SVG and PNG"):
                    output = {kind: f"results/figures/{name}.{kind}" for kind in ("svg", "png")}
                    given = {"table": table, "pairs": pairs, "arms": arms}
                    run(results, "draw_figure.py", input=given, output=output, wildcards={"figure": name})
            with timed(f"a time sheet for each point, SVG, {PROCESSES} processes"):
                run(results, "draw_timelines.py", input={"table": table}, output={"folder": SHEETS}, threads=PROCESSES)
            with timed("report"):
                given = {"table": table, "changelog": str(gallery.PROJECT / "configs/perf-changelog.yaml")}
                run(results, "write_report.py", input=given, output={"page": "results/report.html"})
        planned, verdicts = pd.read_parquet(results / "metrics.parquet"), pd.read_csv(results / "comparison.csv")
        size, sheets = (results / "report.html").stat().st_size, len(list((results.parent / SHEETS).iterdir()))
        print(
            f"\n{len(planned)} points, {sheets} time sheets, {len(verdicts)} verdicts, a report of {size / 1e6:.1f} MB"
        )


if __name__ == "__main__":
    main()
