"""What became of every planned point: `python -m workflow.status`.

Reads files and Slurm's queue only, so it answers while another process holds the working directory. What Slurm says
about an ended job is written down beside our own records of failures: it forgets.
"""

import argparse
import csv
import json
import os
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal, Protocol, get_args

from workflow import jobs
from workflow.adoption import lock_advice
from workflow.contract import InputError, Strict, reports_input_errors
from workflow.failures import WORTH_RETRYING, Failure, FailureClass
from workflow.jobs import Command, Job, ask
from workflow.lease import live_lease
from workflow.metrics import PointMetrics
from workflow.points import Point
from workflow.runs import Run

State = Literal["planned", "queued", "running", "measured", "done", "invalid", "failed", "refused"]
STATES: tuple[State, ...] = get_args(State)
SELECTORS = ("state", "reason", "entry", "arm", "concurrency", "group", "point")


class PointState(Strict):
    """One planned point as it stands now."""

    point: str
    state: State
    """`measured`: there is a result that has not been judged yet; `refused`: by preflight, before it cost anything."""
    arm: str
    concurrency: int
    entry: int
    group: str
    reasons: tuple[str, ...] = ()
    """Class of the failure, or codes of the findings that make a point invalid."""
    detail: str = ""
    attempts_failed: int = 0
    job: str | None = None
    """The Slurm job that is queued or runs, or that failed last."""


NOT_TRIED = ": not tried again: "
"""What an attempt says that ends at once, since the one before it failed in a way that is not worth another try."""


# --------------------------------------------------------------------------------------------- what happened
def collect(folder: Path, queued: Iterable[Job], command: Command = ask) -> None:
    """Write a record to results/failures/ for each ended job whose end only Slurm or Snakemake knows.

    A job that Slurm killed could write nothing, or only that it was stopped by a signal. Writing again changes nothing.
    """
    failures = folder / "results/failures"
    head_logs = [path.read_text(errors="replace") for path in sorted((folder / ".snakemake/log").glob("*.log"))]
    ours = set().union(*(jobs.cancelled_by_us(log) for log in head_logs))
    for job in jobs.ended(folder, queued, command):
        _collect_job(job, folder, failures, cancelled_by_us=job.id in ours)
    for path in sorted((folder / ".snakemake/log").glob("*.log")):
        for point, said in jobs.refused(path.read_text(errors="replace"), folder).items():
            record = failures / f"{point}.{path.name.removesuffix('.snakemake.log')}.json"
            message = f"Slurm did not take the job: {said}"
            _write(record, point, record.name, FailureClass.SUBMIT_REFUSED, message, path.stat().st_mtime, path)


def _collect_job(job: Job, folder: Path, failures: Path, *, cancelled_by_us: bool) -> None:
    record = failures / f"{job.point}.job{job.id}.json"
    log = folder / job.log
    if record.exists():
        return
    if any((folder / "results/runs" / job.point).glob(f"job{job.id}-*/run.json")):
        return  # this point was measured before its job ended
    text = log.read_text(errors="replace") if log.exists() else ""
    if NOT_TRIED in text:
        return  # it only repeated an earlier cause, whose record stands
    cause = jobs.cause_of(job, text, os.getuid())
    own = own_records(failures, job)
    if cause is None and job.state not in ("COMPLETED", "UNKNOWN") and not own:
        kind, message = FailureClass.UNKNOWN, f"Slurm job {job.id} ended as {job.state} and left no record"
    elif cause is None:
        return
    elif cause.failure_class == FailureClass.CANCELLED and cancelled_by_us:
        kind, message = FailureClass.INTERRUPTED, f"Slurm job {job.id} was cancelled by this sweep's Ctrl-C"
    else:
        kind, message = cause.failure_class, cause.message
    # It explains what the attempt itself recorded when it was signalled, so it counts as the later word on it.
    last = max([record.unix_s for record in own], default=0.0)
    when = max(last + 0.001, log.stat().st_mtime if log.exists() else 0.0) if (own or log.exists()) else time.time()
    _write(record, job.point, f"job{job.id}", kind, message, when, log if log.exists() else None, own)


def own_records(failures: Path, job: Job) -> list[Failure]:
    """Return what the attempts of a job recorded themselves."""
    return [Failure.read(path) for path in sorted(failures.glob(f"{job.point}.job{job.id}-*.json"))]


def _write(
    path: Path,
    point: str,
    attempt: str,
    kind: FailureClass,
    message: str,
    when: float,
    log: Path | None,
    own: Iterable[Failure] = (),
) -> None:
    if path.exists():
        return
    Failure(
        schema_version=Failure.SCHEMA_VERSION,
        point=point,
        attempt=attempt,
        failure_class=kind,
        message=message,
        first_cause=next((record.first_cause for record in own if record.first_cause), None),
        worth_retrying=kind in WORTH_RETRYING,
        unix_s=when,
        logs=() if log is None else (str(log),),
    ).write(path)


# ------------------------------------------------------------------------------------------------ the states
_SAID = re.compile(r"^\[(?P<clock>[\d:]{8})\] (?P<point>\S+): (?P<text>.*)$")


def phase_of(log: str) -> tuple[str, str] | None:
    """Return the phase that a point's log speaks of last and since when, (`replay: warm-up`, `12:34:56`)."""
    found: tuple[str, str] | None = None
    for line in log.splitlines():
        match = _SAID.match(line)
        if match is None:
            continue
        phase = match["text"].split(",", 1)[0]
        if found is None or found[0] != phase:
            found = (phase, match["clock"])
    return found


def states(folder: Path, queued: Iterable[Job]) -> list[PointState]:
    """Return the state of every planned point, in the order of the plan; raises InputError without a plan."""
    results = folder / "results"
    running = jobs.newest_by_point(job for job in queued if job.live)
    failures = _by_point(results / "failures")
    return [
        _state_of(point, refused, results, running.get(point.id), failures.get(point.id, []))
        for point, refused in planned(results)
    ]


def planned(results: Path) -> list[tuple[Point, tuple[str, ...]]]:
    """Return the points of results/plan.tsv, each with the codes for which preflight refuses it, if it does."""
    plan = results / "plan.tsv"
    if not plan.exists():
        raise InputError("nothing is planned yet", file=plan, do="run `snakemake --dry-run` first")
    with plan.open(newline="") as stream:
        rows = [row for row in csv.DictReader(stream, delimiter="\t") if row["point"] != "-"]
    return [
        (
            Point.read(results / "points" / f"{row['point']}.json"),
            tuple(row["why"].split(",")) if row["state"] == "refused" else (),
        )
        for row in rows
    ]


def _by_point(folder: Path) -> dict[str, list[Failure]]:
    found: dict[str, list[Failure]] = {}
    for path in folder.glob("*.json"):
        record = Failure.read(path)
        found.setdefault(record.point, []).append(record)
    return {point: sorted(records, key=lambda record: record.unix_s) for point, records in found.items()}


def _state_of(
    point: Point, refused: tuple[str, ...], results: Path, job: Job | None, failures: list[Failure]
) -> PointState:
    def state(name: State, reasons: tuple[str, ...] = (), detail: str = "", job_id: str | None = None) -> PointState:
        return PointState(
            point=point.id,
            state=name,
            arm=point.arm,
            concurrency=point.concurrency,
            entry=point.origin.entry,
            group=point.group,
            reasons=reasons,
            detail=detail,
            attempts_failed=len({record.attempt.split("-", 1)[0] for record in failures}),
            job=job_id,
        )

    out = results / "runs" / point.id
    lease = live_lease(out)
    if job is not None and job.state in jobs.QUEUED:
        return state("queued", detail=job.reason or "", job_id=job.id)
    if job is not None or lease is not None:
        log = results / "logs" / "runs" / f"{point.id}.log"
        phase = phase_of(log.read_text(errors="replace")) if log.exists() else None
        where = f" on {job.nodes}" if job is not None and job.nodes else f" on {lease.host}" if lease else ""
        said = f"{phase[0]} since {phase[1]}{where}" if phase else f"starting{where}"
        return state("running", detail=said, job_id=job.id if job else None)
    if (out / "run.json").exists():
        return _measured(point, results, state_of=state)
    if refused:
        return state("refused", refused, "preflight: see results/preflight.tsv")
    if failures:
        last = failures[-1]
        cause = f"; first cause: {last.first_cause}" if last.first_cause else ""
        job_id = re.match(r"job(\d+)", last.attempt)
        return state("failed", (last.failure_class.value,), f"{last.message}{cause}", job_id[1] if job_id else None)
    return state("planned")


def _measured(point: Point, results: Path, state_of: "StateOf") -> PointState:
    try:
        run = Run.read(results / "runs" / point.id / "run.json")
        judged = results / "metrics" / f"{point.id}.json"
        metrics = PointMetrics.read(judged) if judged.exists() else None
    except InputError as error:
        return state_of("failed", ("unreadable_result",), f"{error}; delete it to measure the point again")
    if metrics is None:
        return state_of("measured", detail=run.attempt)
    if metrics.status == "ok":
        return state_of("done", detail=run.attempt)
    reasons = tuple(sorted({finding.code.value for finding in metrics.findings}))
    return state_of("invalid", reasons, "; ".join(finding.detail for finding in metrics.findings))


class StateOf(Protocol):
    """Makes the state of one point."""

    def __call__(
        self, name: State, reasons: tuple[str, ...] = (), detail: str = "", job_id: str | None = None
    ) -> PointState:
        """Return the state."""


# ------------------------------------------------------------------------------------------------ the answer
def render(found: list[PointState], *, problems_only: bool = False) -> str:
    """Return a line for each point, the counts, and what to do next."""
    counts = Counter(point.state for point in found)
    shown = [point for point in found if not problems_only or point.state in ("failed", "invalid", "refused")]
    rows = [
        (point.point, point.state, point.job or "-", ", ".join(point.reasons) or "-", point.detail) for point in shown
    ]
    widths = [max((len(row[i]) for row in rows), default=0) for i in range(4)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[4]]).rstrip()
        for row in rows
    ]
    total = ", ".join(f"{counts[state]} {state}" for state in STATES if counts[state])
    lines.append(f"{len(found)} points: {total}")
    if counts["failed"] or counts["planned"]:
        lines.append("Missing points are measured by the same `snakemake` command again; nothing else is.")
    if counts["invalid"]:
        lines.append(
            "Invalid points are kept; force them: snakemake -R $(python -m workflow.status --select state=invalid)"
        )
    return "\n".join(lines)


def select(found: Iterable[PointState], expression: str) -> list[PointState]:
    """Return the points that fit `key=value,key=value`; several values of one key are alternatives (`arm=a|b`).

    Raises InputError for a key that is not one of SELECTORS or a value that no point has.
    """
    chosen = list(found)
    for part in expression.split(","):
        key, equals, wanted = part.partition("=")
        if not equals or key not in SELECTORS:
            raise InputError(f"found {part!r}", key="--select", allowed=", ".join(f"{name}=..." for name in SELECTORS))
        values = set(wanted.split("|"))
        known = {value for point in found for value in _values(point, key)}
        if not values & known:
            allowed = ", ".join(sorted(known)) or "nothing: no point has one"
            raise InputError(f"no point has {part}", key="--select", allowed=allowed)
        chosen = [point for point in chosen if values & _values(point, key)]
    return chosen


def _values(point: PointState, key: str) -> set[str]:
    if key == "reason":
        return set(point.reasons)
    return {str(getattr(point, key))}


@reports_input_errors
def main() -> int:
    """Print the state of every point, or the files of a selection for `snakemake -R`."""
    parser = argparse.ArgumentParser(prog="python -m workflow.status", description="State of every planned point.")
    parser.add_argument("--json", action="store_true", help="one JSON object a line")
    parser.add_argument(
        "--select",
        metavar="KEY=VALUE,...",
        help=f"print the run files of these points, for `snakemake -R`; keys: {', '.join(SELECTORS)}",
    )
    parser.add_argument("--problems", action="store_true", help="only points that failed, are invalid or are refused")
    arguments = parser.parse_args()
    folder = Path.cwd()
    queued = jobs.queue(folder)
    collect(folder, queued)
    found = states(folder, queued)
    if arguments.select is not None:
        chosen = select(found, arguments.select)
        print(*(f"results/runs/{point.point}/run.json" for point in chosen))
        return 0 if chosen else 1
    if arguments.json:
        for point in found:
            print(json.dumps(point.model_dump(mode="json")))
    else:
        print(render(found, problems_only=arguments.problems))
        if not arguments.problems and (advice := lock_advice(folder)):
            print(advice)
    return 0


if __name__ == "__main__":
    sys.exit(main())
