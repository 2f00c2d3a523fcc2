"""Write the report as one page."""

from pathlib import Path

from workflow.changelog import load_changelog
from workflow.contract import write_atomic
from workflow.points import Point
from workflow.report import page, read_content

points = [Point.read(Path(path)) for path in snakemake.input.points]
content = read_content(Path("results"), points, load_changelog(Path(snakemake.input.changelog)))
write_atomic(Path(snakemake.output.page), page(content).encode())
