"""Prepare one trace set."""

from pathlib import Path

from pydantic import TypeAdapter

from workflow.config import TraceSet
from workflow.traces import prepare

declared = TypeAdapter(TraceSet).validate_json(snakemake.params.declaration)
folder = Path(snakemake.output[0]).parent
manifest = prepare(snakemake.wildcards.trace_set, declared, Path.cwd(), folder)
Path(snakemake.log[0]).write_text(manifest.to_json())
