"""A point and its cluster -> what is asked of Slurm for it. Pure."""

import math
import shlex
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from workflow.config import Cluster, Slurm
from workflow.contract import InputError
from workflow.points import Point

MIB = 1_048_576
EMPTY_S = 60.0
"""What emptying a server's caches between two points, and proving it, may take at most."""
LONGEST_MIN = 47 * 60
"""Snakemake's Slurm plugin asks `sacct` for the last two days only: it loses sight of a job that runs longer."""


@dataclass(frozen=True)
class Allocation:
    """What one attempt at a point takes of a cluster."""

    partition: str
    account: str | None
    qos: str | None
    constraint: str | None
    gres: str | None
    """`gpu:<count>` or `gpu:<type>:<count>`, on one node; None where the cluster has no GPUs to ask for."""
    cores: int
    memory_mib: int
    runtime_min: int
    extra: str | None
    """Further options of sbatch."""

    @property
    def runtime(self) -> str:
        """Return the time limit with its unit, `90m`; a bare number is minutes to one program and hours to another."""
        return f"{self.runtime_min}m"

    @property
    def summary(self) -> str:
        """Return all of it in one line, for whoever reads the dry run before it costs anything."""
        named = {"account": self.account, "qos": self.qos, "constraint": self.constraint}
        parts = [self.partition, self.gres, f"{self.cores} cores", f"{self.memory_mib} MiB", self.runtime]
        parts += [f"{name} {value}" for name, value in named.items() if value]
        return ", ".join(part for part in (*parts, self.extra) if part)


def needed_s(point: Point, slurm: Slurm, attempt: int = 1) -> float:
    """Return the wall time of one attempt in seconds: start-up, warm-up, window, drain and margin.

    The margin grows with each attempt, so that a point which ran out of time gets more the next time.
    """
    return point.expected_s + slurm.margin_min * 60 * attempt


def turn_s(point: Point) -> float:
    """Return the wall time of a point on a server that has served others before, in seconds."""
    return point.expected_s - point.costs.startup_s + EMPTY_S


def allocate(point: Point, cluster: Cluster, attempt: int = 1, following: Iterable[Point] = ()) -> Allocation | None:
    """Return what to ask Slurm for; None for a cluster that is not run by Slurm.

    `following` are points that are measured on the same server after it.

    Memory is what the tiers pin, what the recipe reserves on the host and the cluster's base. The base grows with
    each attempt, since a job that was killed for its memory would be killed again.
    """
    slurm = cluster.slurm
    if slurm is None:
        return None
    assert cluster.cores_per_point is not None, "the model of clusters.yaml asks for it"
    reserved_bytes = point.plan.pinned_bytes + point.plan.cache.host_reserve_gib * 1024 * MIB
    memory_bytes = reserved_bytes + slurm.base_memory_gb * 1e9 * attempt
    seconds = needed_s(point, slurm, attempt) + sum(turn_s(one) for one in following)
    runtime_min = min(math.ceil(seconds / 60), slurm.time_limit_min)
    extra = ["--exclusive"] if slurm.exclusive else []
    # Quoted, since the plugin hands the whole line to a shell: node[1-3] is a pattern there.
    extra += [f"--exclude={shlex.quote(','.join(slurm.exclude))}"] if slurm.exclude else []
    return Allocation(
        partition=slurm.partition,
        account=slurm.account,
        qos=slurm.qos,
        constraint=slurm.constraint,
        gres=f"{slurm.gres}:{point.gpus}" if slurm.gres else None,
        cores=cluster.cores_per_point,
        memory_mib=math.ceil(memory_bytes / MIB),
        runtime_min=runtime_min,
        extra=" ".join(extra) or None,
    )


def check_time_limits(points: Iterable[Point], clusters: dict[str, Cluster], file: Path) -> None:
    """Raise InputError for each cluster on which a point would be killed before it can end.

    Told before anything is submitted: a job that is killed by its time limit has cost all of its GPU hours.
    """
    longest: dict[str, Point] = {}
    for point in points:
        runner = point.row.runner
        if runner not in longest or point.expected_s > longest[runner].expected_s:
            longest[runner] = point
    errors = [
        _too_short(point, slurm, file)
        for runner, point in longest.items()
        if (slurm := clusters[runner].slurm) is not None and needed_s(point, slurm) > limit_min(slurm) * 60
    ]
    if errors:
        raise InputError.join(errors)


def limit_min(slurm: Slurm) -> int:
    """Return the longest job that can be run and watched, in minutes."""
    return min(slurm.time_limit_min, LONGEST_MIN)


def _too_short(point: Point, slurm: Slurm, file: Path) -> InputError:
    replay, costs = point.replay, point.costs
    parts = {
        "start-up": costs.startup_s,
        "warm-up": costs.warmup_s,
        "window": replay.duration_s,
        "drain": replay.grace_s,
        "margin": slurm.margin_min * 60,
    }
    listed = " + ".join(f"{name} {seconds / 60:g}" for name, seconds in parts.items())
    return InputError(
        f"{point.id} needs {math.ceil(needed_s(point, slurm) / 60)} min ({listed}), "
        f"a job on {point.row.runner} gets at most {limit_min(slurm)} min",
        file=file,
        key=f"clusters.{point.row.runner}.slurm.time_limit_min",
        do="choose a partition or QOS with a longer limit, or shorten replay.duration_s",
    )
