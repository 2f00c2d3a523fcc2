"""Rows + serve plans + traces + client -> points: what is measured, under an id that is its identity."""

import csv
import io
import re
from collections.abc import Container, Iterable, Mapping
from functools import cache
from typing import Any

from workflow.clients import identity as client_identity
from workflow.config import AnyModel, Replay, TraceSet
from workflow.contract import Document, InputError, Strict, digest
from workflow.matrix import PlannedRow, Row
from workflow.plans import backend_name
from workflow.serving import Costs, ServePlan

PROTOCOL = 2
"""How a point is measured. Raise it when numbers measured before are no longer comparable; every point is then new."""
MODEL_FILES = 2
"""Which files are made for a model. Raise it when there are others: what was made before is then made anew."""


class Origin(Strict):
    """Where a point was asked for. Not part of its identity."""

    config_key: str
    file: str
    line: int
    entry: int
    """Index of the changelog entry, 0 is the oldest."""
    pr_link: str


class TraceIdentity(Strict):
    """Which recorded or generated sessions are replayed."""

    name: str
    declaration: dict[str, Any]
    """The set as configs/traces.yaml declares it: source, revision, sha256, filter, scale, or the generator's seed."""
    generator: int | None
    """Version of the generator, for a generated set."""

    @property
    def key(self) -> str:
        """Return the folder name of the prepared set: what it declares is in its path, so it is never out of date."""
        return f"{self.name}-{digest({'declaration': self.declaration, 'generator': self.generator}, 8)}"


class Point(Document):
    """One measurement: a model served in one way, replayed at one concurrency. No defaults: it states everything."""

    SCHEMA_VERSION = 2

    id: str
    curve: str
    """The point without its concurrency: groups the points of one line in a figure."""
    group: str
    """The curve without its backend: groups the arms that are compared."""
    arm: str
    """The backend, `none` for the control; with its version where the group holds several of it."""
    concurrency: int
    """Sessions that are live at once; with sub-agents, more requests than this can be in flight."""
    repeat: int
    """Counts from 1. Repeats of one point differ by their ids only: same curve, same group."""
    gpus: int
    row: Row
    plan: ServePlan
    made_model: dict[str, Any] | None
    """Declaration of a model that the workflow makes itself; None: a checkpoint that exists elsewhere."""
    environments: dict[str, str]
    """Environment of the client and of engines -> its key, which holds a hash of its pinned packages."""
    trace: TraceIdentity
    replay: Replay
    shared_server: bool = False
    """Measured on a server that may have served other points of the plan before; false where nothing says so."""
    protocol: int
    costs: Costs
    origin: Origin

    @property
    def model_key(self) -> str:
        """Return the folder name of a made model. Its vocabulary comes from the client's corpus, so that counts too."""
        client = self.environments[self.replay.client]
        parts = {"declaration": self.made_model, "client": client, "files": MODEL_FILES}
        return f"{slug(self.row.model)}-{digest(parts, 8)}"

    @property
    def server_key(self) -> str:
        """Return what points that may share a server have in common: everything but concurrency and repeat."""
        return digest({"curve": self.curve, "plan": plan_identity(self.plan), "environments": self.environments}, 10)

    @property
    def expected_s(self) -> float:
        """Return the seconds the point is expected to take on its node."""
        return self.costs.startup_s + self.costs.warmup_s + self.replay.duration_s + self.replay.grace_s


def make_point(
    planned: PlannedRow,
    plan: ServePlan,
    costs: Costs,
    trace: TraceIdentity,
    replay: Replay,
    made_model: AnyModel | None,
    locks: Mapping[str, str],
    repeat: int = 1,
    *,
    arm: str | None = None,
    shared_server: bool = False,
) -> Point:
    """Put a point together and name it.

    The id is a readable prefix and 10 hex digits of the sha256 of everything that the measurement depends on. Where
    the point was asked for and what it costs do not change a number, so they are left out. `locks` holds the key of
    every environment by name. `arm` is what to call the arm, the backend's name if None; it is no part of the id, so
    that a second version beside a first does not buy the first again.
    """
    row = planned.row
    identity_row = _identity_row(row)
    made = None if made_model is None else made_model.model_dump(mode="json")
    setting = {
        "made_model": made,
        "trace": trace.model_dump(mode="json"),
        "replay": client_identity(replay),
        "protocol": PROTOCOL,
        "client": locks[replay.client],
    }
    if shared_server:
        # Another protocol, and other points: a server that has served before is warm in ways that no flush undoes
        # (allocators, compiled kernels, page cache), so the two are never pooled, compared or taken for each other.
        setting["server"] = "shared"
    used = {replay.client, *(service.environment for service in plan.services if service.environment)}
    if unknown := sorted(used - locks.keys()):
        raise InputError(
            f"no lock file {unknown[0]}.txt, so nobody knows how to make the environment of {planned.origin}",
            key=f"environments of recipe {plan.recipe}",
            allowed=", ".join(sorted(locks)),
        )
    environments = {name: locks[name] for name in sorted(used)}
    identity = {"row": identity_row, "plan": plan_identity(plan), "environments": environments, **setting}
    # The first repeat is the point itself: asking for repeats later must not buy it again.
    if repeat > 1:
        identity["repeat"] = repeat
    curve = {**setting, "row": {name: value for name, value in identity_row.items() if name != "conc"}}
    group = {**setting, "row": row_group(row)}
    backend = backend_name(row)
    base = slug(f"{row.model_prefix}-{row.runner.removeprefix('cluster:')}-{row.framework}-{topology(row)}")
    return Point(
        schema_version=Point.SCHEMA_VERSION,
        id=f"{base}-{slug(backend)}-c{row.conc}-{f'r{repeat}-' if repeat > 1 else ''}{digest(identity, 10)}",
        curve=f"{base}-{slug(backend)}-{digest(curve, 6)}",
        group=f"{base}-{digest(group, 6)}",
        arm=arm or backend,
        concurrency=row.conc,
        repeat=repeat,
        gpus=row.gpus,
        row=row,
        plan=plan,
        made_model=made,
        environments=environments,
        trace=trace,
        replay=replay,
        shared_server=shared_server,
        protocol=PROTOCOL,
        costs=costs,
        origin=Origin(
            config_key=planned.config_key,
            file=str(planned.file),
            line=planned.line,
            entry=planned.entry.index,
            pr_link=planned.entry.entry.pr_link,
        ),
    )


def _identity_row(row: Row) -> dict[str, Any]:
    """Return a row without InferenceX's own name and window of it, which are not what runs here."""
    return row.model_dump(mode="json", exclude={"exp_name", "duration"})


@cache
def row_group(row: Row) -> str:
    """Return what the arms of a group have in common: a key of the row without its concurrency and its offload."""
    arm = {"conc", "kv_offloading", "kv_offload_backend", "total_cpu_dram_gb"}
    return digest({name: value for name, value in _identity_row(row).items() if name not in arm})


def plan_identity(plan: ServePlan) -> dict[str, Any]:
    """Return what of a serve plan a measurement depends on: what is started, with which files and packages.

    Proofs, notes, probes and preflight's facts judge a measurement or describe it; mending one must not buy it again.
    """
    service = {"name", "argv", "env", "unset", "environment"}
    return {
        "services": [one.model_dump(mode="json", include=service) for one in plan.services],
        "versions": [{"component": probe.component, "declared": probe.declared} for probe in plan.versions],
        **plan.model_dump(
            mode="json",
            include={"served_model_name", "files", "scratch", "wants", "packages", "client_env", "session_header"},
        ),
    }


def by_id(points: Iterable[Point]) -> dict[str, Point]:
    """Return points by id; raises InputError, naming both origins, where two rows expand to one point."""
    found: dict[str, Point] = {}
    for point in points:
        if (other := found.get(point.id)) is not None:
            raise InputError(
                f"conc {point.concurrency} of {point.origin.config_key} is the same point as "
                f"conc {other.concurrency} of {other.origin.config_key} ({other.origin.file}:{other.origin.line})",
                file=point.origin.file,
                line=point.origin.line,
                do="remove one of the two",
            )
        found[point.id] = point
    return found


def interleaved(points: Iterable[Point]) -> list[Point]:
    """Return points in the order to measure them: concurrency by concurrency, and in it repeat by repeat over all arms.

    Arms then take turns, so that a node which drifts (heat, a neighbour, a filling disk) favours none of them.
    """
    listed = list(points)
    groups = {group: i for i, group in enumerate(dict.fromkeys(point.group for point in listed))}
    places: dict[tuple[str, int], int] = {}
    for point in listed:
        places.setdefault((point.group, point.concurrency), len(places))
    return sorted(listed, key=lambda point: (groups[point.group], places[point.group, point.concurrency], point.repeat))


def topology(row: Row) -> str:
    """Return how the model is spread over GPUs, in short: tp8-ep8-dpa."""
    parts = [f"tp{row.tp}"]
    sizes = {"pp": row.pp, "dcp": row.dcp_size, "pcp": row.pcp_size, "ep": row.ep}
    parts += [f"{name}{size}" for name, size in sizes.items() if size > 1]
    parts += ["dpa"] if row.dp_attn else []
    parts += [row.spec_decoding] if row.spec_decoding != "none" else []
    return "-".join(parts)


def slug(text: str) -> str:
    """Return text as part of a file name: lower case, dashes for anything else."""
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def trace_identity(name: str, declared: TraceSet, generator: int) -> TraceIdentity:
    """Return the identity of a declared trace set; `path` is where it lies, not what it is."""
    declaration = declared.model_dump(mode="json", exclude={"path"})
    return TraceIdentity(
        name=name, declaration=declaration, generator=generator if declared.kind == "generated" else None
    )


PLAN_COLUMNS = (
    *("point", "state", "arm", "concurrency", "repeat", "gpus", "expected_min", "gpu_h"),
    *("cluster", "model", "config_key", "trace_set", "origin", "why"),
)


def plan_tsv(
    points: Iterable[Point], measured: Container[str], doomed: Mapping[str, str], left_out: Iterable[Any]
) -> str:
    """Return the bill as tab-separated text, a row for everything that was asked for.

    `state` is `to measure`, `measured` (it has a published run and costs nothing), `refused` (by preflight, whose
    codes are in `doomed`) or `not runnable` for the rows of `left_out`, with the reason under `why`.
    """
    stream = io.StringIO()
    writer = csv.DictWriter(stream, PLAN_COLUMNS, delimiter="\t", lineterminator="\n", restval="")
    writer.writeheader()
    for point in points:
        state = "measured" if point.id in measured else "refused" if point.id in doomed else "to measure"
        writer.writerow(_bill_row(point, state, doomed.get(point.id, "")))
    for item in left_out:
        place = {"config_key": item.config_key, "origin": f"{item.file}:{item.line}", "why": item.why}
        writer.writerow({"point": "-", "state": "not runnable", "model": item.row.model, **place})
    return stream.getvalue()


def _bill_row(point: Point, state: str, why: str) -> dict[str, Any]:
    return {
        "point": point.id,
        "state": state,
        "arm": point.arm,
        "concurrency": point.concurrency,
        "repeat": point.repeat,
        "gpus": point.gpus,
        "expected_min": round(point.expected_s / 60, 1),
        "gpu_h": round(point.expected_s / 3600 * point.gpus, 3),
        "cluster": point.row.runner,
        "model": point.row.model,
        "config_key": point.origin.config_key,
        "trace_set": point.trace.name,
        "origin": f"{point.origin.file}:{point.origin.line}",
        "why": why,
    }


def bill(points: Iterable[Point], measured: Container[str], refused: Container[str]) -> str:
    """Return what is still to pay: a line for the sweep, and one for each cluster, model and arm."""
    listed = list(points)
    done = [point for point in listed if point.id in measured]
    due = [point for point in listed if point.id not in measured and point.id not in refused]
    out = len(listed) - len(done) - len(due)
    head = f"{len(listed)} points, {len(done)} measured already" + (f", {out} refused by preflight" if out else "")
    lines = [f"{head}; to measure: {_cost(due)}"]
    parts: dict[tuple[str, str, str], list[Point]] = {}
    for point in due:
        parts.setdefault((point.row.runner, point.row.model, point.arm), []).append(point)
    if len(parts) > 1:
        lines += [f"  {runner}, {model}, {arm}: {_cost(some)}" for (runner, model, arm), some in parts.items()]
    return "\n".join(lines)


def _cost(points: list[Point]) -> str:
    seconds = sum(point.expected_s for point in points)
    gpu_hours = sum(point.expected_s * point.gpus for point in points) / 3600
    return f"{len(points)} points, about {seconds / 60:.0f} min one after the other, {gpu_hours:.2f} GPU-hours"
