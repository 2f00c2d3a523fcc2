"""Draw the time sheet of each point."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pandas as pd

from workflow.contract import write_atomic
from workflow.figures import draw_timeline
from workflow.style import render

folder = Path(snakemake.output.folder)
folder.mkdir(exist_ok=True)


def draw(table: Path) -> None:
    """Draw one."""
    figure = draw_timeline(table.stem, pd.read_parquet(table))
    write_atomic(folder / f"{table.stem}.svg", render(figure, "svg"))


# Forked: the folder and the imports are there already.
with ProcessPoolExecutor(snakemake.threads, multiprocessing.get_context("fork")) as pool:
    list(pool.map(draw, map(Path, snakemake.input.tables), chunksize=8))
