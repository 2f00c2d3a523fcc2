"""A published run -> its metrics, judged with what the point declared; and all points -> one flat table."""

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from workflow.config import Limits
from workflow.contract import InputError, file_sha256, reports_input_errors
from workflow.definitions import DEFINITIONS
from workflow.evidence import Context, Evidence, read_evidence
from workflow.failures import last_failure
from workflow.metrics import Accounting, PointMetrics, measure_evidence
from workflow.points import Point, topology
from workflow.readers.columns import PART_ROWS
from workflow.runs import Run
from workflow.timeline import timeline_of_evidence


def context_for(point: Point, run: Run, limits: Limits) -> Context:
    """Return what rates and the verdict need to know beside the artefacts.

    What only use can prove is left to the verdict, which knows whether the tier was needed.
    """
    by_use = {
        proof.unmet(point.arm)
        for proof in point.plan.proofs
        if proof.by_use and run.proofs.get(proof.name) != proof.expected
    }
    return Context(
        point=point.id,
        arm=point.arm,
        engine=point.row.framework,
        gpus=point.gpus,
        concurrency=point.concurrency,
        duration_s=point.replay.duration_s,
        pinned_bytes=point.plan.pinned_bytes,
        traces_declared=run.traces,
        limits=limits,
        startup_s=run.startup_s,
        run_findings=tuple(finding for finding in run.findings if finding not in by_use),
        unproven_by_use=tuple(finding.detail for finding in run.findings if finding in by_use),
        client_version=point.replay.client_version,
    )


class Measured(NamedTuple):
    """One run in numbers."""

    metrics: PointMetrics
    evidence: Evidence
    """What the numbers are made of, the requests among it."""
    timeline: pd.DataFrame
    """With the columns of `workflow.timeline`."""


def measure_run(point_file: Path, run_file: Path, limits: Limits) -> Measured:
    """Return a run's metrics, its evidence, and both over time; its artefacts are read once for all three.

    Raises InputError where an artefact is not what was published: a changed artefact would give a number
    that nobody measured, so every file is compared with the run's hash.
    """
    point, run = Point.read(point_file), Run.read(run_file)
    folder = run_file.parent / run.attempt
    for artefact in run.artefacts:
        path = folder / artefact.path
        if not path.exists() or file_sha256(path) != artefact.sha256:
            raise InputError(
                "the artefact is missing or has changed since it was published",
                file=path,
                do=f"delete {run_file} to measure the point again",
            )
    context = context_for(point, run, limits)
    evidence = read_evidence(folder, context)
    metrics = measure_evidence(evidence, context, folder.name)
    return Measured(metrics, evidence, timeline_of_evidence(evidence, folder))


def write_requests(evidence: Evidence, path: Path) -> None:
    """Write the successful profiled requests as Parquet, a row each and a row group for every PART_ROWS of them.

    Columns: session, conversation, turn, agent_depth, start_s (since the window's start), ttft_s, e2e_s, itl_s,
    input_tokens, output_tokens, cached_tokens; NaN is unknown.
    """
    frames = map(pa.Table.from_pandas, request_frames(evidence))
    first = next(frames)
    with pq.ParquetWriter(path, first.schema) as writer:
        for rows in chain((first,), frames):
            writer.write_table(rows)


def request_frames(evidence: Evidence) -> Iterator[pd.DataFrame]:
    """Yield the requests a part at a time; one without a row where there is none."""
    records = evidence.records
    start = evidence.window.start_ns if evidence.window else 0
    codes = ("turn", "agent_depth", "session", "conversation", "start_ns")
    values = ("ttft_s", "e2e_s", "itl_s", "input_tokens", "output_tokens", "cached_tokens")
    sessions, conversations = (pd.Index(names, dtype=object) for names in (records.sessions, records.conversations))
    for at in range(0, max(1, records.succeeded), PART_ROWS):
        stop = min(at + PART_ROWS, records.succeeded)
        column = {name: records.answered.read(name, at, stop) for name in (*codes, *values)}
        yield pd.DataFrame(
            {
                "session": pd.Categorical.from_codes(column["session"], categories=sessions),
                "conversation": pd.Categorical.from_codes(column["conversation"], categories=conversations),
                "turn": column["turn"],
                "agent_depth": column["agent_depth"],
                "start_s": (column["start_ns"] - start) / 1e9,
                **{name: column[name] for name in values},
            },
            index=pd.RangeIndex(at, stop),
            copy=False,
        )


def table(points: Iterable[PointMetrics]) -> pd.DataFrame:
    """Return a row a point and a column a metric; in front point, status, reasons, notes (a line each), accounting."""
    rows = []
    for one in points:
        row: dict[str, object] = {
            "point": one.point,
            "status": one.status,
            "reasons": ";".join(finding.code.value for finding in one.findings),
            "notes": "\n".join(one.notes),
            "definition_version": one.definition_version,
            **one.accounting.model_dump(),
        }
        row.update({name: one.values[name].value if name in one.values else None for name in DEFINITIONS})
        rows.append(row)
    fixed = ["point", "status", "reasons", "notes", "definition_version", *Accounting.model_fields]
    frame = pd.DataFrame(rows, columns=[*fixed, *DEFINITIONS])
    return frame.astype(dict.fromkeys(DEFINITIONS, "float64"))


POINT_COLUMNS = (
    *("arm", "concurrency", "repeat", "gpus", "model", "runner", "framework", "group", "curve", "trace_set"),
    *("lineage", "entry", "pr_link", "image", "budget_gb", "backend_version"),
)
RUN_COLUMNS = ("trace_sha256", "versions", "node", "git_revision", "started_unix_s", "bus_limit_gb_per_s")


def sweep_table(
    points: Iterable[Point], metrics: Mapping[str, PointMetrics], failures: Path, runs: Mapping[str, Run]
) -> pd.DataFrame:
    """Return one row for every planned point, in the order of the plan; nothing disappears.

    Columns: point, POINT_COLUMNS, RUN_COLUMNS, status (`ok`, `invalid`, `failed`, `missing`), reasons, and the columns
    of `table`; None and NaN where nothing was measured. `metrics` and `runs` hold what there is, by point.
    """
    listed = list(points)
    measured = table(metrics[point.id] for point in listed if point.id in metrics)
    rows = [_planned(point) | _seen(runs.get(point.id)) for point in listed]
    planned = pd.DataFrame(rows, columns=["point", *POINT_COLUMNS, *RUN_COLUMNS])
    joined = planned.merge(measured, on="point", how="left", validate="one_to_one")
    for i, point in enumerate(listed):
        if point.id in metrics:
            continue
        failure = last_failure(failures, point.id)
        joined.loc[i, "status"] = "failed" if failure else "missing"
        joined.loc[i, "reasons"] = failure.failure_class.value if failure else "not measured yet"
    return joined


def _planned(point: Point) -> dict[str, Any]:
    row = point.row
    return {
        "point": point.id,
        "arm": point.arm,
        "concurrency": point.concurrency,
        "repeat": point.repeat,
        "gpus": point.gpus,
        "model": row.model,
        "runner": row.runner,
        "framework": row.framework,
        "group": point.group,
        "curve": point.curve,
        "trace_set": point.trace.name,
        # What stays the same when a changelog entry brings another image: what a history is of.
        "lineage": f"{row.model} {row.precision} on {row.runner.removeprefix('cluster:')}, {row.framework}, "
        f"{topology(row)}, {point.trace.name}",
        "entry": point.origin.entry,
        "pr_link": point.origin.pr_link,
        "image": row.image,
        "budget_gb": float(row.total_cpu_dram_gb),
        # As the search space declares it: two arms may be two versions of one backend.
        "backend_version": row.kv_offload_backend.version if row.kv_offload_backend else None,
    }


def _seen(run: Run | None) -> dict[str, Any]:
    if run is None:
        return dict.fromkeys(RUN_COLUMNS)
    return {
        "trace_sha256": run.trace_content_sha256,
        # A tag that was moved between two runs is another build, whatever versions its processes tell.
        "versions": json.dumps(
            run.versions | ({"image": run.image_digest} if run.image_digest else {}), sort_keys=True
        ),
        "node": run.host.name,
        "git_revision": run.git_revision,
        "started_unix_s": run.started_unix_s,
        "bus_limit_gb_per_s": Context.model_fields["bus_limit_gb_per_s"].default,
    }


def write_measured(measured: Measured, results: Path) -> None:
    """Write the point's two tables and then `metrics/<point>.json`, which says that they are there."""
    point = measured.metrics.point
    requests, timeline = _requests_file(results, point), _timeline_file(results, point)
    for path in (requests, timeline):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_requests(measured.evidence, requests)
    measured.timeline.to_parquet(timeline, index=False)
    measured.metrics.write(results / "metrics" / f"{point}.json")


def requests_by_point(table: pd.DataFrame, results: Path) -> dict[str, pd.DataFrame]:
    """Return the requests of each point of the sweep's table that is `ok`; raises InputError: a lost file."""
    files = _files(table, {"ok"}, results, _requests_file)
    return {point: pd.read_parquet(file) for point, file in files.items()}


def timeline_files(table: pd.DataFrame, results: Path) -> list[Path]:
    """Return the timeline of each point that has metrics, `ok` or `invalid`; raises InputError: a lost file."""
    return list(_files(table, {"ok", "invalid"}, results, _timeline_file).values())


def _files(
    table: pd.DataFrame, status: set[str], results: Path, file_of: Callable[[Path, str], Path]
) -> dict[str, Path]:
    files = {point: file_of(results, point) for point in table.loc[table["status"].isin(status), "point"]}
    lost = [
        InputError(
            f"the file of {point} is missing",
            file=file,
            # Snakemake makes a missing file again only if what it makes of it is missing too.
            do=f"delete {results / 'metrics' / f'{point}.json'} and {results / 'metrics.parquet'} "
            "to judge the point again",
        )
        for point, file in files.items()
        if not file.is_file()
    ]
    if lost:
        raise InputError.join(lost)
    return files


def _requests_file(results: Path, point: str) -> Path:
    return results / "metrics" / f"{point}.requests.parquet"


def _timeline_file(results: Path, point: str) -> Path:
    return results / "timelines" / f"{point}.parquet"


@reports_input_errors
def main() -> int:
    """Reduce one run: POINT RUN LIMITS_JSON RESULTS, the last being the folder to write to."""
    point, run, results = (Path(sys.argv[i]) for i in (1, 2, 4))
    limits = Limits.model_validate_json(sys.argv[3])
    write_measured(measure_run(point, run, limits), results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
