"""Compare the arms of a sweep, and say why."""

from pathlib import Path

import pandas as pd

from workflow.comparison import compare, summary
from workflow.contract import without_traceback
from workflow.explanation import explain
from workflow.fairness import fairness_table
from workflow.measured import requests_by_point
from workflow.points import Point

table = pd.read_parquet(snakemake.input.table)
with without_traceback():
    requests = requests_by_point(table, Path("results"))
points = [Point.read(Path(f"results/points/{point}.json")) for point in table["point"]]
pairs, arms = compare(table, requests)
explanations = explain(table, pairs)
pairs.to_csv(snakemake.output.pairs, index=False)
arms.to_csv(snakemake.output.arms, index=False)
explanations.to_csv(snakemake.output.explanations, index=False)
fairness_table(points, table).to_csv(snakemake.output.fairness, index=False)
Path(snakemake.output.summary).write_text(summary(table, pairs, explanations))
