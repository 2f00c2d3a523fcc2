"""Draw one figure in both formats."""

from pathlib import Path

import pandas as pd

from workflow.figures import Tables, draw
from workflow.style import render

tables = Tables(
    pd.read_parquet(snakemake.input.table), pd.read_csv(snakemake.input.pairs), pd.read_csv(snakemake.input.arms)
)
figure = draw(snakemake.wildcards.figure, tables)
for file_format in ("svg", "png"):
    Path(getattr(snakemake.output, file_format)).write_bytes(render(figure, file_format))
