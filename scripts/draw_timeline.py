"""Read one point over time and draw its time sheet."""

import json
from pathlib import Path

from workflow.config import Limits
from workflow.figures import draw_timeline
from workflow.measured import timeline_of_run
from workflow.style import render

limits = Limits.model_validate(json.loads(snakemake.params.limits))
frame = timeline_of_run(Path(snakemake.input.point), Path(snakemake.input.run), limits)
frame.to_parquet(snakemake.output.table, index=False)
Path(snakemake.output.svg).write_bytes(render(draw_timeline(snakemake.wildcards.point, frame), "svg"))
