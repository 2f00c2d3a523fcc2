"""Write one planned point."""

from pathlib import Path

from workflow.contract import write_atomic

write_atomic(Path(snakemake.output[0]), snakemake.params.document.encode())
