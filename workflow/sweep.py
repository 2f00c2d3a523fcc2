"""Everything that is known before the first job: the files of configs/ -> the points to measure."""

from dataclasses import dataclass
from pathlib import Path

from workflow import yamlfile
from workflow.allocation import check_time_limits
from workflow.changelog import load_changelog, select_entries
from workflow.config import Cluster, Clusters, Config, MadeModel, Models, TraceSets
from workflow.contract import InputError, write_atomic
from workflow.environments import environment_key
from workflow.matrix import PlannedRow, load_master, load_runners, plan_rows
from workflow.plans import plan_for
from workflow.points import Point, by_id, make_point, plan_tsv, trace_identity
from workflow.recipes import load_recipes
from workflow.traces import GENERATOR


@dataclass(frozen=True)
class Sweep:
    """A planned sweep."""

    config: Config
    points: dict[str, Point]
    """By id, in the order of the search spaces."""
    locks: dict[str, Path]
    """Key of each environment -> its lock file."""
    clusters: dict[str, Cluster]

    @property
    def trace_sets(self) -> dict[str, Point]:
        """Return the trace sets to prepare: key -> a point that replays it."""
        return {point.trace.key: point for point in self.points.values()}

    @property
    def made_models(self) -> dict[str, Point]:
        """Return the models to make: key -> a point that serves it."""
        return {point.model_key: point for point in self.points.values() if point.made_model is not None}

    def cluster(self, point: str) -> Cluster:
        """Return where a point runs."""
        return self.clusters[self.points[point].row.runner]


def plan_sweep(config: Config) -> Sweep:
    """Read what the config names and plan the points; raises InputError with file, line and key."""
    traces = _load(TraceSets, config.traces).traces
    models = _load(Models, config.models).models
    clusters = _load(Clusters, config.clusters).clusters
    name = config.replay.trace_set
    if name not in traces:
        raise InputError(
            f"no trace set {name!r} in {config.traces}", key="replay.trace_set", allowed=", ".join(sorted(traces))
        )
    entries = select_entries(load_changelog(Path(config.changelog.file)), config.changelog)
    master = load_master([Path(path) for path in config.masters])
    rows = plan_rows(entries, master, load_runners(Path(config.runners)))
    recipes = load_recipes(Path(config.recipes))
    locks = {path.stem: path for path in sorted(Path(config.environments).glob("*.txt"))}
    keys = {name: environment_key(path) for name, path in locks.items()}
    trace = trace_identity(name, traces[name], GENERATOR)
    points = []
    for planned in rows:
        _check_runs_somewhere(planned, config, clusters, models)
        plan, costs = plan_for(planned, recipes)
        points.append(make_point(planned, plan, costs, trace, config.replay, models.get(planned.row.model), keys))
    check_time_limits(points, clusters, Path(config.clusters))
    return Sweep(
        config,
        points=by_id(points),
        locks={keys[name]: path for name, path in locks.items()},
        clusters=clusters,
    )


def write_plan(sweep: Sweep, results: Path) -> None:
    """Write `results`/points/<point>.json and `results`/plan.tsv, leaving alone what already says the same.

    Planning writes them itself, not a rule: see rules/environments.smk for why nothing that makes an `ancient` input
    may ever be out of date. Points of earlier plans stay, with their results.
    """
    texts = {results / "points" / f"{point.id}.json": point.to_json() for point in sweep.points.values()}
    texts[results / "plan.tsv"] = plan_tsv(sweep.points.values())
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            write_atomic(path, text.encode())


def _check_runs_somewhere(
    planned: PlannedRow, config: Config, clusters: dict[str, Cluster], models: dict[str, MadeModel]
) -> None:
    row = planned.row
    if row.runner not in clusters:
        raise InputError(
            f"runner {row.runner!r} of {planned.origin} is not in {config.clusters}",
            key="clusters",
            allowed=", ".join(sorted(clusters)),
        )
    paths = clusters[row.runner].model_paths
    if row.model not in models and row.model not in paths:
        raise InputError(
            f"nobody knows where model {row.model!r} is",
            file=planned.file,
            line=planned.line,
            key="model",
            allowed=", ".join(sorted({*models, *paths})),
            do=f"add it to model_paths of {row.runner} in {config.clusters}, or to {config.models}",
        )


def _load(model: type[yamlfile.Model], path: str) -> yamlfile.Model:
    return yamlfile.validate(model, yamlfile.load(Path(path)), Path(path))
