"""Write the report as one page."""

from pathlib import Path

import pandas as pd

from workflow.changelog import load_changelog
from workflow.contract import write_atomic
from workflow.points import Point
from workflow.report import page, read_content

planned = pd.read_parquet(snakemake.input.table, columns=["point"])["point"]
points = [Point.read(Path(f"results/points/{point}.json")) for point in planned]
content = read_content(Path("results"), points, load_changelog(Path(snakemake.input.changelog)))
write_atomic(Path(snakemake.output.page), page(content).encode())
