"""Functions that the rules share. Nothing is planned or measured here: workflow/ does that."""

import re
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from workflow.config import load_config
from workflow.contract import InputError
from workflow.points import bill, plan_tsv, slug
from workflow.report import FIGURES
from workflow.sweep import plan_sweep

# The interpreter that runs Snakemake runs the jobs too, whatever is called `python` on the PATH of a node.
PYTHON = shlex.quote(sys.executable)
ENVIRONMENTS = sorted(path.stem for path in Path("configs/environments").glob("*.txt"))
# What turns artefacts into numbers: an edit of any of these judges all points again, and measures none.
METRICS_MODULES = sorted(
    str(path)
    for name in ("metrics", "measured", "definitions", "evidence", "verdict", "readers/*")
    for path in Path("workflow").glob(f"{name}.py")
)
# More threads than any machine has: Snakemake scales a job down to the cores it was given, so that such a job runs alone.
WHOLE_MACHINE = 10_000


def load_sweep():
    """Plan the sweep, or end with one message without a traceback."""
    files = [Path(path) for path in workflow.config_settings.configfiles] or [Path("configs/config.yaml")]
    try:
        return plan_sweep(load_config(files, workflow.config_settings.config))
    except InputError as error:
        raise WorkflowError(str(error)) from None


def show_bill():
    """Say what the sweep costs before it is paid."""
    print(f"Sweep: {bill(SWEEP.points.values())}", file=sys.stderr)


def any_of(names):
    """Return the pattern of a wildcard that is one of these names."""
    return "|".join(re.escape(name) for name in names)


def print_file(path):
    """Show a result to whoever started the sweep."""
    if Path(path).exists():
        print(Path(path).read_text())


def wanted_points():
    """Return the points whose runs are asked for: all, or with partial=true those that have been measured."""
    if SWEEP.config.partial:
        return [point for point in SWEEP.points if Path(f"results/runs/{point}/run.json").exists()]
    return list(SWEEP.points)


def point_threads(wildcards):
    """Return the cores that a point takes."""
    return SWEEP.cluster(wildcards.point).cores_per_point or WHOLE_MACHINE


def point_message(wildcards):
    """Return what a point is and how long it takes, for the list of jobs."""
    point = SWEEP.points[wildcards.point]
    return (
        f"{point.id}: {point.arm} at concurrency {point.concurrency}, {point.gpus} GPU(s), "
        f"about {point.expected_s / 60:.1f} min"
    )


def prepared_parts(wildcards):
    """Return what has to be prepared before a GPU is allocated to a point."""
    point = SWEEP.points[wildcards.point]
    environments = {point.replay.client, *(s.environment for s in point.plan.services if s.environment)}
    parts = [f".envs/{name}/environment.json" for name in sorted(environments)]
    parts.append(f"results/traces/{point.trace.name}/trace_set.json")
    if point.made_model is not None:
        parts.append(f"results/models/{slug(point.row.model)}/model.json")
    return [ancient(part) for part in parts]
