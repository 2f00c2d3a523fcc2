"""Draw the time sheet of each point."""

from pathlib import Path

import pandas as pd

from workflow.contract import write_atomic
from workflow.figures import draw_timeline
from workflow.style import render

folder = Path(snakemake.output.folder)
folder.mkdir(exist_ok=True)
for table in map(Path, snakemake.input.tables):
    figure = draw_timeline(table.stem, pd.read_parquet(table))
    write_atomic(folder / f"{table.stem}.svg", render(figure, "svg"))
