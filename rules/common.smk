"""Functions that the rules share. Nothing is planned or measured here: workflow/ does that."""

import re
import shlex
import sys
from pathlib import Path

from snakemake.exceptions import WorkflowError

from workflow.config import load_config
from workflow.contract import InputError
from workflow.points import bill
from workflow.report import FIGURES
from workflow.sweep import plan_sweep, write_plan

# The interpreter that runs Snakemake runs the jobs too, whatever is called `python` on the PATH of a node.
PYTHON = shlex.quote(sys.executable)
# What turns artefacts into numbers: an edit of any of these judges all points again, and measures none.
METRICS_MODULES = sorted(
    str(path)
    for name in (
        "metrics",
        "measured",
        "definitions",
        "evidence",
        "verdict",
        "readers/*",
    )
    for path in Path("workflow").glob(f"{name}.py")
)
COMPARISON_MODULES = [
    f"workflow/{name}.py"
    for name in ("comparison", "intervals", "explanation", "fairness")
]
FIGURE_MODULES = sorted(
    str(path)
    for pattern in ("style.py", "figures/*.py")
    for path in Path("workflow").glob(pattern)
)
# More threads than any machine has: Snakemake scales a job down to the cores it was given, so that such a job runs alone.
WHOLE_MACHINE = 10_000


def load_sweep():
    """Plan the sweep and write the plan, or end with one message without a traceback."""
    files = [Path(path) for path in workflow.config_settings.configfiles] or [
        Path("configs/config.yaml")
    ]
    try:
        sweep = plan_sweep(load_config(files, workflow.config_settings.config))
    except InputError as error:
        raise WorkflowError(str(error)) from None
    # Jobs read this file too, some of them at the same time on other nodes; only the main process writes and speaks.
    if workflow.is_main_process:
        write_plan(sweep, Path("results"))
        print(
            f"Sweep: {bill(sweep.points.values())}; each point is in results/plan.tsv",
            file=sys.stderr,
        )
    return sweep


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
        return [
            point
            for point in SWEEP.points
            if Path(f"results/runs/{point}/run.json").exists()
        ]
    return list(SWEEP.points)


def point_threads(wildcards):
    """Return the cores that a point takes."""
    return SWEEP.cluster(wildcards.point).cores_per_point or WHOLE_MACHINE


def point_file(point):
    """Return the file of a planned point."""
    return f"results/points/{point.id}.json"


def client_environment(point):
    """Return what says that a point's replay client is prepared."""
    return f".envs/{point.environments[point.replay.client]}/environment.json"


def prepared_parts(wildcards):
    """Return what has to be prepared before a GPU is allocated to a point."""
    point = SWEEP.points[wildcards.point]
    parts = [f".envs/{key}/environment.json" for key in point.environments.values()]
    parts.append(f"results/traces/{point.trace.key}/trace_set.json")
    if point.made_model is not None:
        parts.append(f"results/models/{point.model_key}/model.json")
    return [ancient(part) for part in parts]
