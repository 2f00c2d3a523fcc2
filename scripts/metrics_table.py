"""Join the metrics of all planned points into one table."""

from pathlib import Path

from workflow.measured import sweep_table
from workflow.metrics import PointMetrics
from workflow.points import Point
from workflow.runs import Run

points = [Point.read(Path(path)) for path in snakemake.input.points]
metrics = [PointMetrics.read(Path(path)) for path in snakemake.input.metrics]
runs = [Run.read(Path(f"results/runs/{one.point}/run.json")) for one in metrics]
table = sweep_table(
    points, {one.point: one for one in metrics}, Path("results/failures"), {run.point: run for run in runs}
)
table.to_csv(snakemake.output.csv, index=False)
table.to_parquet(snakemake.output.parquet, index=False)
