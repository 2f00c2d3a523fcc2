"""Draw the time sheet of each point."""

from pathlib import Path

import pandas as pd

from workflow.contract import write_atomic
from workflow.figures import draw_timeline
from workflow.style import render

for table, picture in zip(snakemake.input.tables, snakemake.output, strict=True):
    figure = draw_timeline(Path(table).stem, pd.read_parquet(table))
    write_atomic(Path(picture), render(figure, "svg"))
