"""Make one model with random weights."""

from pathlib import Path

from workflow.config import MadeModel
from workflow.models import make
from workflow.replay import corpus

declared = MadeModel.model_validate_json(snakemake.params.declaration)
text = corpus(Path(snakemake.input.client).parent)
manifest = make(snakemake.params.name, declared, text, Path(snakemake.output[0]).parent)
Path(snakemake.log[0]).write_text(manifest.to_json())
