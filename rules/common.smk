"""Functions that the rules share. Nothing is planned or measured here: workflow/ does that."""

import atexit
import gc
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path

from snakemake.exceptions import WorkflowError

from workflow.adoption import live_holders, lock_advice
from workflow.allocation import allocate
from workflow.config import load_config
from workflow.contract import InputError, digest, file_sha256
from workflow.gallery import FIGURES
from workflow.images import image_key
from workflow.jobs import queue as slurm_queue
from workflow.patterns import prefix_tree_pattern, telling_prefixes
from workflow.points import bill
from workflow.sharing import Turns, allocations, notice, turns_file, write_turns
from workflow.sweep import measured, notices, plan_sweep, write_plan

# Snakemake keeps millions of objects of a large sweep until it ends. At its usual pace Python's search for garbage cycles
# walks through all of them again and again, for a fifth of the time of a dry run.
gc.set_threshold(200_000, 20, 100)
# On its way out the interpreter searches twice more: in vain, and as long as it takes to plan the sweep.
atexit.register(gc.freeze)
# The interpreter that runs Snakemake runs the jobs too, whatever is called `python` on the PATH of a node.
shell.prefix(f"export PATH={shlex.quote(str(Path(sys.executable).parent))}:$PATH; ")
# What turns artefacts into numbers: an edit of any of these judges all points again, and measures none.
METRICS_MODULES = sorted(
    str(path)
    for name in (
        "metrics",
        "measured",
        "timeline",
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
# What is asked of Slurm whatever a point's memory and time are, which try it is, and which points follow on its server.
STEADY = ("partition", "account", "qos", "constraint", "gres", "extra")


def load_sweep():
    """Plan the sweep and write the plan, or end with one message without a traceback."""
    files = [Path(path) for path in workflow.config_settings.configfiles] or [
        Path("configs/config.yaml")
    ]
    try:
        sweep = plan_sweep(load_config(files, workflow.config_settings.config))
    except InputError as error:
        # Not a WorkflowError: Snakemake would add where in its rules the error was raised, which helps nobody here.
        print(error, file=sys.stderr)
        sys.exit(1)
    # Jobs read this file too, some of them at the same time on other nodes; only the main process writes and speaks.
    if workflow.is_main_process:
        results = Path("results")
        write_plan(sweep, results)
        lines = [
            *notices(sweep),
            bill(sweep.points.values(), measured(sweep, results), sweep.doomed),
        ]
        print("\n".join(lines), file=sys.stderr)
        print("each point is in results/plan.tsv", file=sys.stderr)
    return sweep


def load_holders():
    """Return the points that jobs of an earlier run still measure, and say so; none inside of a job."""
    if not workflow.is_main_process:
        return {}
    if advice := lock_advice(Path.cwd()):
        print(advice, file=sys.stderr)
    try:
        holders = live_holders(
            SWEEP.points, slurm_queue(Path.cwd()), Path("results/runs")
        )
    except InputError as error:
        print(error, file=sys.stderr)
        sys.exit(1)
    for point, names in holders.items():
        print(f"{point} is being measured by {', '.join(names)}", file=sys.stderr)
    return holders


def load_shared():
    """Return the points that are to take turns on a server, point -> allocation, and write what each is for."""
    if not workflow.is_main_process or SWEEP.config.partial:
        return {}
    doomed = set(SWEEP.doomed)
    due = [p for p in due_points() if p not in HOLDERS and p not in doomed]
    # Who asks for some points by name does not want to pay for the others of their servers.
    named = [point for point in due if f"results/runs/{point}/run.json" in sys.argv]
    groups = allocations([SWEEP.points[p] for p in named or due], SWEEP.clusters)
    if SWEEP.config.share_server and due:
        print(notice(groups), file=sys.stderr)
    # A dry run has no settings of execution.
    tries = getattr(workflow.execution_settings, "retries", 0) + 1
    written = write_turns(groups, Path("results"), tries)
    return {point: name for name, turns in written.items() for point in turns.points}


def any_of(names):
    """Return the pattern of a wildcard that is one of these names; one that matches nothing if there are none."""
    return prefix_tree_pattern(list(names)) if names else "(?!)"


def point_among(points, others):
    """Return the pattern of a wildcard that is one of these points and none of the others.

    By the first digits of the hash that ends each id: Snakemake writes the pattern into every path that holds the
    wildcard and searches it for each file of each job, so that whole ids would cost 5,000 points a minute.
    """
    hashes, rest = (
        {point.rpartition("-")[2] for point in names}
        for names in (points, set(others) - set(points))
    )
    return f"[^/]+-(?:{any_of(telling_prefixes(hashes, rest))})[0-9a-f]*"


def contents(files):
    """Return a hash of what is in these files: a parameter that changes when one is edited, not when it is touched."""
    return digest([file_sha256(Path(path)) for path in files], 12)


def missing(path, names):
    """Return the names whose file does not exist yet; `path` has a place for the name."""
    return [name for name in names if not Path(path.format(name)).exists()]


def print_file(path):
    """Show a result to whoever started the sweep."""
    if Path(path).exists():
        print(Path(path).read_text())


@cache
def part_folders():
    """Return (name of each trace set -> its folder, name of each made model -> its folder)."""
    return (
        {p.trace.name: f"results/traces/{key}" for key, p in SWEEP.trace_sets.items()},
        {p.row.model: f"results/models/{key}" for key, p in SWEEP.made_models.items()},
    )


@cache
def wanted_points():
    """Return the points whose runs are asked for: all that preflight lets through, or with partial=true the measured."""
    if SWEEP.config.partial:
        return sorted(measured(SWEEP, Path("results")))
    doomed = set(SWEEP.doomed)
    return [point for point in SWEEP.points if point not in doomed]


@cache
def due_points():
    """Return the points that may be measured: those without a run, and those that the command line names.

    Snakemake parses this file before it knows what is forced, so the command line itself is looked at.
    """
    if {"-F", "--forceall", "run_point"} & set(sys.argv):
        return list(SWEEP.points)
    done = measured(SWEEP, Path("results")) - {
        point for point in SWEEP.points if f"results/runs/{point}/run.json" in sys.argv
    }
    return [point for point in SWEEP.points if point not in done]


def caption(figure):
    """Return what stands below a figure in a report."""
    return Path(f"workflow/captions/{figure}.rst").read_text().strip()


def refused_points():
    """Return the points that preflight refuses; each fails without a queue, so that the sweep does not look complete."""
    return [] if SWEEP.config.partial else list(SWEEP.doomed)


def show_problems():
    """Tell whoever started the sweep what became of each point that has no valid result."""
    # A process of its own: what it imports would make every start of Snakemake a second slower.
    subprocess.run(
        [sys.executable, "-m", "workflow.status", "--problems"],
        stdout=sys.stderr,
        check=False,
    )


@cache
def kinds_of_points():
    """Return a point of each cluster and number of GPUs."""
    return list(
        {
            (point.row.runner, point.gpus): point for point in SWEEP.points.values()
        }.values()
    )


def one_for_all(values, value):
    """Return what is the same for all jobs, else the function that says it for each.

    Snakemake takes a tenth of a millisecond to ask a function, for each of a job's resources.
    """
    return values.pop() if len(values) == 1 else value


def point_threads():
    """Return the cores that a point takes, or the points of an allocation one after the other."""

    def value(wildcards):
        return cores(SWEEP.points[points_of(wildcards)[0]])

    def cores(point):
        return SWEEP.clusters[point.row.runner].cores_per_point or WHOLE_MACHINE

    return one_for_all({cores(point) for point in kinds_of_points()}, value)


@cache
def allocation_of(point, attempt, following=()):
    """Return what is asked of Slurm for an attempt at a point and those that follow it on its server.

    None on a machine that is not run by Slurm.
    """
    cluster, runner = SWEEP.cluster(point), SWEEP.points[point].row.runner
    if cluster.slurm is None and not workflow.local_exec:
        raise WorkflowError(
            f"{SWEEP.config.clusters}: clusters.{runner}: no key slurm, so nobody knows the partition of {point};"
            " add it (docs/first-sweep.md), or run with --executor local"
        )
    others = [SWEEP.points[other] for other in following]
    return allocate(SWEEP.points[point], cluster, attempt, others)


def points_of(wildcards):
    """Return the points that a job measures, in order: one, or those of an allocation."""
    if "allocation" not in wildcards.keys():
        return (wildcards.point,)
    return Turns.read(turns_file(Path("results"), wildcards.allocation)).points


def asked(field):
    """Return one field of what is asked of Slurm for a job, or the function that gives it; None asks for nothing."""

    def value(wildcards, attempt):
        first, *following = points_of(wildcards)
        allocation = allocation_of(first, attempt, tuple(following))
        # On this machine nothing is asked for; Snakemake still wants a number where a resource has a unit.
        unasked = {"memory_mib": 0, "runtime": "0m", "summary": "this machine"}
        return unasked.get(field) if allocation is None else getattr(allocation, field)

    if field not in STEADY:
        return value
    asks = [allocate(p, SWEEP.cluster(p.id)) for p in kinds_of_points()]
    return one_for_all({getattr(one, field, None) for one in asks}, value)


def point_file(point):
    """Return the file of a planned point."""
    return f"results/points/{point.id}.json"


def client_environment(point):
    """Return what says that a point's replay client is prepared."""
    return f".envs/{point.environments[point.replay.client]}/environment.json"


def runs_there():
    """Return the points whose run exists, those of earlier plans with them."""
    return [path.parent.name for path in Path("results/runs").glob("*/run.json")]


def prepared_parts(wildcards):
    """Return what has to be prepared before a GPU is allocated to a job."""
    parts = set()
    trace_sets, models = part_folders()
    for name in points_of(wildcards):
        if name not in SWEEP.points:
            raise WorkflowError(
                f"{name} is no point of this plan; results/plan.tsv lists them"
            )
        point = SWEEP.points[name]
        parts |= {
            f".envs/{key}/environment.json" for key in point.environments.values()
        }
        parts.add(f"{trace_sets[point.trace.name]}/trace_set.json")
        if point.made_model is not None:
            parts.add(f"{models[point.row.model]}/model.json")
        cluster = SWEEP.cluster(name)
        if cluster.launcher != "bare":
            key = image_key(cluster, point.row.image)
            parts.add(f"results/images/{key}/image.json")
    return [ancient(part) for part in sorted(parts)]
