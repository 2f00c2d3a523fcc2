"""Draw one figure in both formats."""

from pathlib import Path

import pandas as pd

from workflow.figures import draw
from workflow.style import render

figure = draw(
    snakemake.wildcards.figure, pd.read_parquet(snakemake.input.table), pd.read_csv(snakemake.input.comparison)
)
for file_format in ("svg", "png"):
    Path(getattr(snakemake.output, file_format)).write_bytes(render(figure, file_format))
