"""Draw the time sheet of each point."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd

from workflow.contract import without_traceback, write_atomic
from workflow.figures import draw_timeline
from workflow.measured import timeline_files
from workflow.style import render


def draw(table: Path) -> None:
    """Draw one."""
    figure = draw_timeline(table.stem, pd.read_parquet(table))
    write_atomic(Path(snakemake.output.folder, f"{table.stem}.svg"), render(figure, "svg"))


Path(snakemake.output.folder).mkdir(exist_ok=True)
# Forked: the imports are there already.
with without_traceback(), ProcessPoolExecutor(snakemake.threads, multiprocessing.get_context("fork")) as pool:
    list(pool.map(draw, timeline_files(pd.read_parquet(snakemake.input.table), Path("results")), chunksize=8))
