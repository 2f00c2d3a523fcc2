"""Reduce one run to its metrics and its table of requests."""

from pathlib import Path

from workflow.config import Limits
from workflow.measured import measure_run

limits = Limits.model_validate_json(snakemake.params.limits)
metrics, requests = measure_run(Path(snakemake.input.point), Path(snakemake.input.run), limits)
requests.to_parquet(snakemake.output.requests)
metrics.write(Path(snakemake.output.metrics))
