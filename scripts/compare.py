"""Compare the arms of a sweep."""

from pathlib import Path

import pandas as pd

from workflow.comparison import compare, summary

table = pd.read_parquet(snakemake.input.table)
requests = {
    Path(path).name.removesuffix(".requests.parquet"): pd.read_parquet(path) for path in snakemake.input.requests
}
comparison = compare(table, requests)
comparison.to_csv(snakemake.output.comparison, index=False)
Path(snakemake.output.summary).write_text(summary(table, comparison))
