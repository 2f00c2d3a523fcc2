"""Everything that is known before the first job: the files of configs/ -> the points to measure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from workflow import yamlfile
from workflow.allocation import check_time_limits
from workflow.clients import settled
from workflow.config import AnyModel, Cluster, Clusters, Config, Models, TraceSets
from workflow.contract import InputError, write_atomic
from workflow.environments import environment_key, environment_with, pins
from workflow.images import image_key
from workflow.lint import PlanFinding
from workflow.matrix import NotRunnable, PlannedRow, Row, load_runners, plan_matrix
from workflow.node import declared_facts
from workflow.plans import backend_name, check_arm, plan_for
from workflow.points import Point, by_id, interleaved, make_point, plan_tsv, row_group, trace_identity
from workflow.preflight import PreflightFinding, preflight
from workflow.recipes import load_recipes
from workflow.serving import ServePlan
from workflow.sharing import check_emptied
from workflow.traces import GENERATOR


@dataclass(frozen=True)
class Sweep:
    """A planned sweep."""

    config: Config
    points: dict[str, Point]
    """By id, in the order to measure them."""
    locks: dict[str, Path]
    """Key of each environment -> its lock file."""
    clusters: dict[str, Cluster]
    not_runnable: tuple[NotRunnable, ...]
    """Rows that the entries ask for and this workflow cannot measure yet."""
    messages: tuple[str, ...]
    """What happened to entries of the log: withdrawn, edited, moved."""
    findings: tuple[PlanFinding, ...]
    """What is odd about the entries; errors with `strict: true`."""
    preflight: dict[str, tuple[PreflightFinding, ...]]
    """Point -> what its plan breaks on a node with the cluster's declared facts."""

    @cached_property
    def trace_sets(self) -> dict[str, Point]:
        """Return the trace sets to prepare: key -> a point that replays it."""
        by_name = {point.trace.name: point for point in self.points.values()}
        return {point.trace.key: point for point in by_name.values()}

    @cached_property
    def made_models(self) -> dict[str, Point]:
        """Return the models to make: key -> a point that serves it."""
        by_name = {point.row.model: point for point in self.points.values() if point.made_model is not None}
        return {point.model_key: point for point in by_name.values()}

    @property
    def images(self) -> dict[str, Point]:
        """Return the container images to import: key of the record -> a point that is served in it."""
        contained = [point for point in self.points.values() if self.cluster(point.id).launcher != "bare"]
        return {image_key(self.cluster(point.id), point.row.image): point for point in contained}

    @cached_property
    def doomed(self) -> tuple[str, ...]:
        """Return the points that preflight refuses: they must not queue."""
        return tuple(point for point, found in self.preflight.items() if any(f.severity == "error" for f in found))

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
    matrix = plan_matrix(config)
    recipes = load_recipes(Path(config.recipes))
    locks = {path.stem: path for path in sorted(Path(config.environments).glob("*.txt"))}
    keys = {name: environment_key(path) for name, path in locks.items()}
    trace, replay = trace_identity(name, traces[name], GENERATOR), settled(config.replay, locks)
    peers = _peers(matrix.rows) if config.equalize else {}
    versions = _versions(matrix.rows)
    on_bare = {
        name
        for planned in matrix.rows
        if planned.row.runner in clusters
        for name in clusters[planned.row.runner].environments
    }
    held = {name: pins(locks[name]) for name in on_bare & locks.keys()}
    points = []
    for planned in matrix.rows:
        _check_runs_somewhere(planned, config, clusters, models)
        check_arm(planned)
    for planned in matrix.rows:
        plan, costs = plan_for(planned, recipes, peers.get(row_group(planned.row), ()) if peers else ())
        plan = _in_environment(planned, plan, clusters[planned.row.runner], config, locks, held)
        if config.share_server:
            plan = plan.shareable()
        made = models.get(planned.row.model)
        points += [
            make_point(
                *(planned, plan, costs, trace, replay, made, keys, repeat),
                arm=_arm(planned.row, versions),
                shared_server=config.share_server,
            )
            for repeat in range(1, config.repeats + 1)
        ]
    check_time_limits(points, clusters, Path(config.clusters))
    check_emptied(points)
    runners = load_runners(Path(config.runners))
    facts = {runner: declared_facts(runner, runners) for runner in {point.row.runner for point in points}}
    return Sweep(
        config,
        points=by_id(interleaved(points)),
        locks={keys[name]: path for name, path in locks.items()},
        clusters=clusters,
        not_runnable=matrix.not_runnable,
        messages=matrix.messages,
        findings=matrix.findings,
        preflight={point.id: preflight(point, point.plan, facts[point.row.runner]) for point in points},
    )


def _in_environment(
    planned: PlannedRow,
    plan: ServePlan,
    cluster: Cluster,
    config: Config,
    locks: Mapping[str, Path],
    held: Mapping[str, Mapping[str, str]],
) -> ServePlan:
    """Return a plan whose services run in a prepared environment where the cluster has those in place of images.

    `held` is what the locks of such environments pin.

    Raises InputError: the cluster names an environment without a lock, or none of them pins what the row declares.
    """
    if not cluster.environments:
        return plan
    if unknown := sorted(set(cluster.environments) - locks.keys()):
        raise InputError(
            f"no lock of environment {', '.join(unknown)}",
            file=config.clusters,
            key=f"clusters.{planned.row.runner}.environments",
            allowed=", ".join(sorted(locks)),
            do=f"add it to {config.environments}",
        )
    declared = [probe.declared for probe in plan.versions if probe.component == planned.row.framework]
    engine = f"{planned.row.framework}=={declared[0]}" if declared and declared[0] else planned.row.framework
    candidates = {locks[name]: held[name] for name in cluster.environments}
    return plan.in_environment(environment_with((engine, *plan.packages), candidates, planned.origin))


def _peers(rows: Iterable[PlannedRow]) -> dict[str, set[str]]:
    """Return the backends of each group."""
    peers: dict[str, set[str]] = defaultdict(set)
    for planned in rows:
        peers[row_group(planned.row)].add(backend_name(planned.row))
    return peers


def _versions(rows: Iterable[PlannedRow]) -> dict[tuple[str, str], set[str | None]]:
    """Return (group, backend) -> the declared versions, of the backends that are declared with several."""
    listed = [(planned.row, backend_name(planned.row), _version(planned.row)) for planned in rows]
    anywhere: dict[str, set[str | None]] = defaultdict(set)
    for _, name, version in listed:
        anywhere[name].add(version)
    found: dict[tuple[str, str], set[str | None]] = defaultdict(set)
    for row, name, version in listed:
        if len(anywhere[name]) > 1:  # a row's group is a hash, and a large sweep has thousands of rows
            found[row_group(row), name].add(version)
    return found


def _version(row: Row) -> str | None:
    return row.kv_offload_backend.version if row.kv_offload_backend else None


def _arm(row: Row, versions: Mapping[tuple[str, str], set[str | None]]) -> str:
    """Return what to call a row's arm: two versions of a backend in one group are two arms, not repeats of one."""
    name, version = backend_name(row), _version(row)
    several = bool(versions) and len(versions.get((row_group(row), name), ())) > 1
    return f"{name}-{version or 'undeclared'}" if several else name


def notices(sweep: Sweep) -> list[str]:
    """Return what a person should read before paying, a line each: events, odd entries, preflight, left out rows."""
    lines = list(sweep.messages)
    lines += [f"warning: {finding.message}" for finding in sweep.findings]
    by_text: dict[str, list[str]] = defaultdict(list)
    for point, found in sweep.preflight.items():
        for finding in found:
            by_text[str(finding)].append(point)
    lines += [f"preflight {text} [{_some(points)}]" for text, points in by_text.items()]
    reasons: dict[str, int] = defaultdict(int)
    for item in sweep.not_runnable:
        reasons[item.why] += 1
    lines += [f"{count} rows are not runnable here yet: {why}" for why, count in reasons.items()]
    return lines


def _some(points: list[str]) -> str:
    return points[0] if len(points) == 1 else f"{points[0]} and {len(points) - 1} more"


def write_plan(sweep: Sweep, results: Path) -> None:
    """Write `results`/points/<point>.json, plan.tsv and preflight.tsv, leaving alone what already says the same.

    Planning writes them itself, not a rule: see rules/environments.smk for why nothing that makes an `ancient` input
    may ever be out of date. Points of earlier plans stay, with their results.
    """
    folder = results / "points"
    texts = {folder / f"{point.id}.json": point.to_json() for point in sweep.points.values()}
    refused = {point: ",".join(finding.code for finding in sweep.preflight[point]) for point in sweep.doomed}
    texts[results / "plan.tsv"] = plan_tsv(sweep.points.values(), measured(sweep, results), refused, sweep.not_runnable)
    texts[results / "preflight.tsv"] = preflight_tsv(sweep)
    for path, text in texts.items():
        if not path.exists() or path.read_text() != text:
            write_atomic(path, text.encode(), durable=False)


def preflight_tsv(sweep: Sweep) -> str:
    """Return what preflight found with the clusters' declared facts, a row a point and finding, tab-separated."""
    lines = ["point\tseverity\tcode\tfound\twhat to change"]
    for point, found in sweep.preflight.items():
        lines += [f"{point}\t{one.severity}\t{one.code}\t{one.says}\t{one.do}" for one in found]
    return "\n".join(lines) + "\n"


def measured(sweep: Sweep, results: Path) -> set[str]:
    """Return the points that have a published run."""
    # What is there is looked at, not what might be: most points of a new sweep have no folder yet.
    return sweep.points.keys() & {path.parent.name for path in (results / "runs").glob("*/run.json")}


def _check_runs_somewhere(
    planned: PlannedRow, config: Config, clusters: dict[str, Cluster], models: dict[str, AnyModel]
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
