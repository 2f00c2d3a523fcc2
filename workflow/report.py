"""One self-contained page about a sweep, which opens without a network, and what it is made of."""

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jinja2
import pandas as pd

from workflow.changelog import LoggedEntry
from workflow.comparison import number
from workflow.definitions import DEFINITIONS
from workflow.failures import Failure
from workflow.gallery import FIGURES
from workflow.metrics import PointMetrics
from workflow.points import Point
from workflow.runs import Run
from workflow.shell import as_shell

HERE = Path(__file__).parent

TAIL_LINES = 40
TAIL_CHARACTERS = 6000
INTERVAL_MEANS = (
    "The 95 % interval says how sure a ratio is: if both arms replayed other sessions of the same kind, 95 % of "
    "intervals made in this way would hold the true ratio."
)


@dataclass(frozen=True)
class Content:
    """Everything that the page shows. What was not measured is simply not in the mappings."""

    table: pd.DataFrame
    pairs: pd.DataFrame
    explanations: pd.DataFrame
    fairness: pd.DataFrame
    points: Sequence[Point]
    figures: Mapping[str, str]
    """Name -> SVG text."""
    timelines: Mapping[str, str] = field(default_factory=dict)
    """Point -> SVG text."""
    metrics: Mapping[str, PointMetrics] = field(default_factory=dict)
    runs: Mapping[str, Run] = field(default_factory=dict)
    failures: Mapping[str, Sequence[Failure]] = field(default_factory=dict)
    logs: Mapping[str, Sequence[tuple[str, str]]] = field(default_factory=dict)
    """Point -> (file name, its last lines)."""
    entries: Sequence[LoggedEntry] = ()
    title: str = "Offload Sweep"


# ------------------------------------------------------------------------------------------------------- reading
def read_content(
    results: Path, points: Sequence[Point], entries: Sequence[LoggedEntry], title: str = "Offload Sweep"
) -> Content:
    """Read what the stages before have written to `results`; raises InputError for a damaged document."""
    ids = [point.id for point in points]
    metrics = {one: PointMetrics.read(path) for one in ids if (path := results / f"metrics/{one}.json").is_file()}
    runs = {one: Run.read(path) for one in ids if (path := results / f"runs/{one}/run.json").is_file()}
    failures = {one: _failures(results / "failures", one) for one in ids}
    return Content(
        table=pd.read_parquet(results / "metrics.parquet"),
        pairs=pd.read_csv(results / "comparison.csv", keep_default_na=True),
        explanations=pd.read_csv(results / "explanations.csv"),
        fairness=pd.read_csv(results / "fairness.csv", dtype=str, keep_default_na=False),
        points=points,
        figures={name: path.read_text() for name in FIGURES if (path := results / f"figures/{name}.svg").is_file()},
        timelines={
            one: path.read_text() for one in ids if (path := results / f"figures/timelines/{one}.svg").is_file()
        },
        metrics=metrics,
        runs=runs,
        failures=failures,
        logs={one: list(_logs(results / "runs" / one, runs.get(one), failures[one])) for one in ids},
        entries=entries,
        title=title,
    )


def _failures(folder: Path, point: str) -> list[Failure]:
    found = [Failure.read(path) for path in folder.glob(f"{point}.*.json")]
    return sorted(found, key=lambda failure: failure.unix_s)


def _logs(folder: Path, run: Run | None, failures: Sequence[Failure]) -> Iterable[tuple[str, str]]:
    """Yield the ends of the logs of the attempt that counts: the published one, else the last that failed."""
    attempt = run.attempt if run else failures[-1].attempt if failures else None
    if attempt is not None:
        for path in sorted((folder / attempt).glob("*.log")):
            yield f"{attempt}/{path.name}", tail(path)


def tail(path: Path) -> str:
    """Return the last lines of a log, without reading all of a large one."""
    with path.open("rb") as stream:
        stream.seek(0, 2)
        stream.seek(max(0, stream.tell() - 4 * TAIL_CHARACTERS))
        lines = stream.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
    return "\n".join(lines)[-TAIL_CHARACTERS:]


# ------------------------------------------------------------------------------------------------------- the page
class Column(NamedTuple):
    """A column of a table on the page."""

    name: str
    kind: str = "text"
    """CSS class: `n` sorts as a number, `id` is monospaced, `prose` wraps."""
    title: str = ""
    choices: tuple[str, ...] = ()
    """Values to choose from in a filter."""
    state: bool = False
    """The value is a CSS class too."""


class Cell(NamedTuple):
    """A value of a table on the page."""

    text: str
    key: str | None = None
    """What it sorts by, where that is not its text."""
    link: str | None = None


class Table(NamedTuple):
    """A table on the page."""

    id: str
    columns: tuple[Column, ...]
    rows: list[list[Cell]]
    empty: str


def page(content: Content) -> str:
    """Return the report as one HTML page with nothing outside of it."""
    statuses = content.table["status"].value_counts()
    requests = int(content.table["succeeded"].fillna(0).sum())
    planned = ", ".join(
        f"{statuses[name]} {name}" for name in ("ok", "invalid", "failed", "missing") if name in statuses
    )
    return _template().render(
        title=content.title,
        sections=[(name.lower(), name) for name in _SECTIONS],
        counts=f"{len(content.table)} points planned: {planned}; {requests:,} successful requests.",
        interval_means=INTERVAL_MEANS,
        verdicts=_verdicts(content.pairs),
        figures=[_figure(name, content.figures[name]) for name in FIGURES if name in content.figures],
        explanations=_explanations(content.explanations),
        fairness=_fairness(content.fairness),
        point_table=_points(content.table),
        points=[_point(content, point) for point in content.points],
        definitions=_definitions(),
        provenance=_provenance(content),
    )


_SECTIONS = ("Verdicts", "Figures", "Why", "Fairness", "Points", "Definitions", "Provenance")


@cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(HERE / "templates"),
        # Always: the file's name ends in .j2, and logs hold whatever a server printed.
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html.j2")


def _figure(name: str, svg: str) -> dict[str, str]:
    caption = " ".join((HERE / "captions" / f"{name}.rst").read_text().replace("``", "").split())
    return {"name": name, "question": FIGURES[name], "svg": inline_svg(svg, name), "caption": caption}


def inline_svg(svg: str, prefix: str) -> str:
    """Return an SVG for the inside of a page: no XML head, and ids that no other figure of the page has."""
    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.DOTALL)
    body = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', body)
    body = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", body)
    return re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', body)


def _number(value: float) -> Cell:
    return Cell(number(value), "" if pd.isna(value) else repr(float(value)))


def _text(value: Any) -> Cell:
    return Cell("" if pd.isna(value) else str(value))


def _choices(column: pd.Series) -> tuple[str, ...]:
    return tuple(str(one) for one in dict.fromkeys(column))


def _verdicts(pairs: pd.DataFrame) -> Table:
    columns = (
        Column("verdict", choices=_choices(pairs["verdict"]), state=True),
        Column("arm", choices=_choices(pairs["arm"])),
        Column("against", choices=_choices(pairs["against"])),
        Column("conc.", "n", "concurrency: live sessions"),
        Column("metric", "id", choices=_choices(pairs["metric"])),
        Column("ratio", "n", "arm / against"),
        Column("low", "n", "lower end of the 95 % interval over sessions"),
        Column("high", "n", "upper end of the 95 % interval over sessions"),
        Column("noise", "n", "equal arms lie within this factor of 1 by the noise between repeats"),
        Column("arm's value", "n"),
        Column("against's value", "n"),
        Column("repeats", "n", "of the arm"),
        Column("requests", "n", "of the arm, all repeats"),
        Column("sessions", "n", "of the arm"),
        Column("why", "prose", title="what the verdict rests on, where it is not plain"),
        Column("group", "id", choices=_choices(pairs["group"])),
    )
    rows = [
        [
            _text(row["verdict"]),
            _text(row["arm"]),
            _text(row["against"]),
            _number(row["concurrency"]),
            _text(row["metric"]),
            *(_number(row[name]) for name in ("ratio", "ratio_low", "ratio_high", "noise_high")),
            *(_number(row[name]) for name in ("value", "against_value", "repeats", "requests", "sessions")),
            _text(row["why"]),
            _text(row["group"]),
        ]
        for _, row in pairs.iterrows()
    ]
    return Table("verdict-table", columns, rows, "No arm of this sweep has another one to be compared with.")


def _explanations(explanations: pd.DataFrame) -> list[dict[str, Any]]:
    keys = ["group", "concurrency", "arm", "against"]
    return [
        {"title": f"{arm} against {against}, concurrency {concurrency}, {group}", "says": list(rows["says"])}
        for (group, concurrency, arm, against), rows in explanations.groupby(keys, sort=False)
    ]


def _fairness(fairness: pd.DataFrame) -> Table:
    columns = (
        Column("arm", choices=_choices(fairness["arm"])),
        Column("where", choices=_choices(fairness["where"])),
        Column("what", "id"),
        Column("kind"),
        Column("control", "prose"),
        Column("arm's", "prose"),
        Column("concurrencies"),
        Column("group", "id"),
    )
    names = ("arm", "where", "name", "kind", "against_value", "value", "concurrencies", "group")
    rows = [[_text(row[name]) for name in names] for _, row in fairness.iterrows()]
    return Table("fairness-table", columns, rows, "No arm differs from a control, or there is no control.")


_SHOWN = {
    "ttft_p50_s": "TTFT p50 (s)",
    "ttft_p90_s": "TTFT p90 (s)",
    "tpot_p50_s": "TPOT p50 (s)",
    "output_tok_per_s_per_gpu": "output tok/s/GPU",
    "total_tok_per_s_per_gpu": "total tok/s/GPU",
    "cached_share": "cached share",
    "ceiling_share": "ceiling",
    "startup_s": "start-up (s)",
}


def _points(table: pd.DataFrame) -> Table:
    columns = (
        Column("point", "id"),
        Column("status", choices=_choices(table["status"]), state=True),
        Column("arm", choices=_choices(table["arm"])),
        Column("conc.", "n", "concurrency: live sessions"),
        Column("repeat", "n"),
        Column("requests", "n", "successful profiled requests"),
        *(Column(label, "n", name) for name, label in _SHOWN.items()),
        Column("reasons", "prose"),
    )
    rows = [
        [
            Cell(row["point"], link=row["point"]),
            _text(row["status"]),
            _text(row["arm"]),
            *(_number(row[name]) for name in ("concurrency", "repeat", "succeeded", *_SHOWN)),
            _text(str(row["reasons"]).replace(";", ", ")),
        ]
        for _, row in table.iterrows()
    ]
    return Table("point-table", columns, rows, "No point was planned.")


def _point(content: Content, point: Point) -> dict[str, Any]:
    row = content.table[content.table["point"] == point.id].iloc[0]
    metrics, run = content.metrics.get(point.id), content.runs.get(point.id)
    facts: list[tuple[str, str]] = [
        ("arm", f"{point.arm}, {point.concurrency} live sessions, repeat {point.repeat}"),
        ("model", f"{point.row.model}, {point.row.precision}, {point.gpus} GPUs of {point.row.runner}"),
        ("image", point.row.image),
        ("trace set", point.trace.name),
        (
            "asked for in",
            f"{point.origin.file}:{point.origin.line} ({point.origin.config_key}), {point.origin.pr_link}",
        ),
    ]
    commands = [("Serve plan", as_shell(point.plan))]
    if run is not None:
        facts += [
            ("measured", f"{_utc(run.started_unix_s)} as attempt {run.attempt}"),
            ("node", f"{run.host.name}, {run.host.cpu}, {run.host.cores} cores, {run.host.memory_bytes / 1e9:.0f} GB"),
            ("kernel, Python", f"{run.host.kernel}, {run.host.python}"),
            ("versions read back", _listed(run.versions) or "none"),
            ("proofs", _listed({name: "seen" if seen else "not seen" for name, seen in run.proofs.items()}) or "none"),
            ("phases", ", ".join(f"{name} {seconds:.1f} s" for name, seconds in run.phases_s.items())),
            ("trace content sha256", run.trace_content_sha256),
            ("git revision", run.git_revision or "unknown"),
        ]
        commands = [(f"{one.name} as started", _command(one.env, one.argv)) for one in run.services]
        commands.append(("Replay client", shlex.join(run.client_argv)))
    if metrics is not None:
        facts.append(("records", ", ".join(f"{k} {v}" for k, v in metrics.accounting.model_dump().items())))
    timeline = content.timelines.get(point.id)
    return {
        "id": point.id,
        "status": row["status"],
        "reasons": "" if pd.isna(row["reasons"]) else str(row["reasons"]).replace(";", ", "),
        "facts": facts,
        "findings": metrics.findings if metrics else (),
        "notes": metrics.notes if metrics else (),
        "failures": content.failures.get(point.id, ()),
        "timeline": inline_svg(timeline, point.id) if timeline else None,
        "rows": _values(metrics) if metrics else [],
        "commands": commands,
        "logs": content.logs.get(point.id, ()),
    }


def _values(metrics: PointMetrics) -> list[tuple[str, str, str, str]]:
    rows = []
    for name, value in metrics.values.items():
        unit = DEFINITIONS[name].unit if name in DEFINITIONS else ""
        parts = [f"{value.samples} requests"] if value.samples is not None else []
        if value.numerator is not None and value.denominator is not None:
            parts.append(f"{number(value.numerator)} / {number(value.denominator)}")
        known = value.value is not None
        said = ", ".join(parts) if known else f"null: {value.null_reason}"
        rows.append((name, number(value.value) if value.value is not None else "-", unit, said))
    return rows


def _command(env: Mapping[str, str], argv: Sequence[str]) -> str:
    return " \\\n  ".join([*(f"{name}={shlex.quote(value)}" for name, value in env.items()), shlex.join(argv)])


def _definitions() -> Table:
    columns = (
        Column("name", "id"),
        Column("unit"),
        Column("better", choices=("lower", "higher")),
        Column("at least", "n", "requests"),
        Column("formula", "prose"),
        Column("source", "prose"),
    )
    rows = [
        [
            Cell(one.name),
            Cell(one.unit),
            _text(one.better),
            _number(one.minimum_samples),
            Cell(one.formula),
            Cell(one.source),
        ]
        for one in DEFINITIONS.values()
    ]
    return Table("definition-table", columns, rows, "")


def _provenance(content: Content) -> list[tuple[str, str]]:
    runs = content.runs.values()
    points = content.points
    wanted = {point.origin.entry for point in points}
    facts = [
        (f"changelog entry {one.index}", f"{' '.join(one.entry.description)} ({one.entry.pr_link})")
        for one in content.entries
        if one.index in wanted
    ]
    traces = {point.trace.name: "" for point in points} | {
        point.trace.name: content.runs[point.id].trace_content_sha256 for point in points if point.id in content.runs
    }
    locks = {name: key for point in points for name, key in point.environments.items()}
    definitions = sorted({one.definition_version for one in content.metrics.values()})
    started = [run.started_unix_s for run in runs]
    facts += [
        ("git revision of the runs", ", ".join(sorted({run.git_revision or "unknown" for run in runs})) or "none"),
        ("measured", f"{_utc(min(started))} to {_utc(max(started))}" if started else "nothing yet"),
        ("nodes", ", ".join(sorted({run.host.name for run in runs})) or "none"),
        ("images", ", ".join(sorted({point.row.image for point in points}))),
        ("environments", _listed(locks)),
        ("trace sets, sha256 of content", _listed(traces)),
        ("definition version", ", ".join(str(one) for one in definitions) or "none"),
    ]
    return facts


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {'unknown' if value is None else value}".strip() for name, value in values.items())


def _utc(unix_s: float) -> str:
    return datetime.fromtimestamp(unix_s, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
