"""What was read from one attempt's folder, and the window that it is measured over."""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from pathlib import Path
from typing import TypeVar

import numpy as np

from workflow.config import Limits
from workflow.contract import DamagedFile, Finding, InputError, Strict
from workflow.readers import aliases
from workflow.readers.client_log import ClientLog, read_client_log
from workflow.readers.client_summary import ClientSummary, read_client_csv, read_client_summary, start_ns
from workflow.readers.node_samples import resident_max_bytes
from workflow.readers.power_samples import PowerSamples, read_power
from workflow.readers.probes import changed_answers
from workflow.readers.prometheus_text import read_around, read_pair
from workflow.readers.records import Records, read_records
from workflow.readers.series import Scrape, without_double_scrapes
from workflow.readers.server_logs import EngineLog, PromptSources, log_files, read_engine_log
from workflow.readers.server_metrics import read_server_metrics

T = TypeVar("T")

RESTART_S = 1.0
"""Two start times of one process differ by rounding; a restart takes longer than this."""

SERIAL = re.compile(r"-\d+(?=-|$)")
"""What tells servers of one kind apart in the names of their ports, such as `lmcache-3-http`."""


class Context(Strict):
    """What rates and the verdict need beside the artefacts. What is unknown is null and is then not judged."""

    point: str | None = None
    arm: str | None = None
    """The backend's name; `none` is the control."""
    engine: str | None = None
    gpus: int = 1
    concurrency: int | None = None
    duration_s: float | None = None
    """The profiling window that was asked for; null takes it from the client's own configuration."""
    pinned_bytes: int | None = None
    """Host memory that the arm declared to pin."""
    traces_declared: int | None = None
    limits: Limits = Limits()
    startup_s: float | None = None
    run_findings: tuple[Finding, ...] = ()
    """What the run itself saw: proofs, versions."""
    unproven_by_use: tuple[str, ...] = ()
    """What its log would have shown if the tier had given anything."""
    bus_limit_gb_per_s: float = 64.0
    """One way: PCIe 5 x16."""
    client_version: str | None = None


@dataclass(frozen=True)
class Window:
    """The profiling phase on the records' clock, ns."""

    start_ns: int
    duration_s: float | None

    @property
    def end_ns(self) -> int | None:
        """End of the steady window."""
        return None if self.duration_s is None else self.start_ns + round(self.duration_s * 1e9)


@dataclass
class Evidence:
    """Everything that was read from a folder."""

    records: Records
    summary: ClientSummary
    scrapes: list[Scrape]
    logs: list[EngineLog]
    """The engine's first."""
    window: Window | None
    sources: PromptSources | None
    client_log: ClientLog
    changed_answers: tuple[str, ...] = ()
    """Probe prompts that were answered differently after the replay."""
    export: Scrape | None = None
    """The client's server metrics as written, a server that was scraped twice included."""
    power: PowerSamples | None = None
    resident_max_bytes: float | None = None
    """Most that the services had resident at once, from the samples on the node."""
    damaged: tuple[str, ...] = ()
    """Artefacts that were cut off or half written, and are used for nothing."""
    notes: list[str] = field(default_factory=list)

    @property
    def unrecorded(self) -> tuple[int, int] | None:
        """Return (requests sent that have no record, those of them that nothing explains), or None: not known.

        A request that the client cancelled at the end of its phase, or dropped as longer than the context, leaves no
        record and no error anywhere else.
        """
        log, records = self.client_log, self.records
        if log.sent is None:
            return None
        missing = max(0, log.sent - records.succeeded - records.failed - records.cancelled - records.unreadable)
        ended = max(0, (log.cancelled or 0) - records.cancelled)
        return missing, max(0, missing - ended)

    @property
    def log(self) -> EngineLog | None:
        """The engine's log."""
        return self.logs[0] if self.logs else None

    @property
    def phase_s(self) -> float | None:
        """How long the profiling phase really lasted, drain included, as far as anything says."""
        for scrape in self.scrapes:
            if scrape.phase_ns:
                return (scrape.phase_ns[1] - scrape.phase_ns[0]) / 1e9
        if self.summary.start is not None and self.summary.end is not None:
            return (self.summary.end - self.summary.start).total_seconds()
        return None

    @cached_property
    def answers_cached(self) -> tuple[float, float] | None:
        """(cached, prompt) tokens by the answers' own usage fields, of the answers that have both; None: none has."""
        answers, totals = 0, np.zeros(2)
        for part in self.records.answered.parts("cached_tokens", "input_tokens"):
            both = np.isfinite(part).all(axis=0)
            answers += int(both.sum())
            totals += [column[both].sum() for column in part]
        return (float(totals[0]), float(totals[1])) if answers else None

    @property
    def client_cached_share(self) -> float | None:
        """Cached / prompt tokens by the answers' own usage fields, where the engine fills them in."""
        answers = self.answers_cached
        return answers[0] / answers[1] if answers is not None and answers[1] > 0 else None

    def window_amount(self, quantity: str) -> float | None:
        """Return a server quantity that was counted over the profiling phase alone, or None."""
        for scrape in self.scrapes:
            found = None if scrape.whole_life else aliases.find(scrape.series, quantity)
            if found is not None:
                return None if found.reset else found.value
        return None

    def resets(self) -> list[str]:
        """Say which server restarted, and which counter went back, inside the window."""
        said = []
        for scrape in self.scrapes:
            for one in scrape.series:
                started = one.name == "process_start_time_seconds" and one.kind == "gauge"
                if started and (one.high or 0.0) - (one.low or 0.0) > RESTART_S:
                    said.append(f"{one.endpoint}: the process started again inside the window")
            for quantity, definition in aliases.QUANTITIES.items():
                found = aliases.find(scrape.series, quantity) if definition.kind == "counter" else None
                if found is not None and found.reset:
                    said.append(f"{found.name} went back inside the window")
        return list(dict.fromkeys(said))

    def find(self, quantity: str) -> aliases.Found | None:
        """Return a server quantity from the first source that has it: sources overlap and are never added."""
        for scrape in self.scrapes:
            found = aliases.find(scrape.series, quantity)
            if found is not None:
                return found
        return None

    def amount(self, quantity: str) -> float | None:
        """Return a server quantity's value or None."""
        found = self.find(quantity)
        return None if found is None or found.reset else found.value

    def fullest(self, part: str, whole: str) -> tuple[float, float] | tuple[None, None]:
        """Return both of two gauges where part / whole is highest, from the first source that has them."""
        found = (aliases.fullest(scrape.series, part, whole) for scrape in self.scrapes)
        return next((pair for pair in found if pair is not None), (None, None))

    def why_not(self, quantity: str) -> str:
        """Say why a server quantity is null."""
        found = self.find(quantity)
        return f"{found.name} went back inside the window" if found is not None else "no server exports it"


def client_folder(folder: Path) -> Path:
    """Return where a run's client artefacts lie: `client/`, InferenceX's `aiperf_artifacts/`, or the folder itself.

    Raises InputError: no records in any of them.
    """
    for candidate in (folder / "client", folder / "aiperf_artifacts", folder):
        if _records_path(candidate) is not None:
            return candidate
    children = sorted(folder.glob("*/profile_export.jsonl"))
    if len(children) > 1:
        # Taking the first would silently measure one of several attempts.
        raise InputError(
            f"found the records of {len(children)} attempts: {', '.join(path.parent.name for path in children)}",
            file=folder,
            allowed="one attempt",
            do="name the folder of the attempt",
        )
    if children:
        return children[0].parent
    raise InputError(
        "no client records",
        file=folder,
        allowed="a folder with profile_export.jsonl (aiperf, agentx-harness) or requests.jsonl",
        do="name the attempt's own folder; a replay that was refused before its first request writes none",
    )


def _records_path(folder: Path) -> Path | None:
    for name in ("profile_export.jsonl", "requests.jsonl"):
        if (folder / name).is_file():
            return folder / name
    return None


def read_evidence(folder: Path, context: Context) -> Evidence:
    """Read every artefact of a folder; raises what the readers raise.

    A client that was ended leaves files that are cut off. They are listed in `damaged` and the others are still read:
    the records of a phase that was cancelled say more than an error message.
    """
    client = client_folder(folder)
    path = _records_path(client)
    assert path is not None
    records = read_records(path)
    notes: list[str] = []
    damaged: list[str] = []
    summary = _read_summary(client, notes, damaged)
    path = client / "server_metrics_export.json"
    export = _whole(partial(read_server_metrics, path), damaged) if path.is_file() else None
    scrapes = _read_servers(folder, export.phase_ns if export else None, notes, damaged)
    if export is not None:
        series, remarks = without_double_scrapes(export.series)
        notes += remarks
        scrapes.insert(0, replace(export, series=series))
    logs = [read_engine_log(path) for path in _logs(folder, client)]
    window = _window(records, summary, scrapes, context)
    before, after = folder / "probes.before.json", folder / "probes.after.json"
    return Evidence(
        records=records,
        summary=summary,
        scrapes=scrapes,
        logs=logs,
        window=window,
        sources=_sources(logs, records, window),
        client_log=read_client_log(client / "logs" / "aiperf.log"),
        changed_answers=changed_answers(before, after) if before.is_file() and after.is_file() else (),
        export=export if export is not None and export.families else None,
        power=next((read_power(path) for path in _power_files(folder, client)), None),
        resident_max_bytes=resident_max_bytes(folder / "node.jsonl"),
        damaged=tuple(damaged),
        notes=notes,
    )


def _whole(read: Callable[[], T], damaged: list[str]) -> T | None:
    """Return what was read; None, and a line in `damaged`, for a file that is cut off."""
    try:
        return read()
    except DamagedFile as error:
        damaged.append(f"{Path(str(error.file)).name} is cut off or damaged ({error.found})")
        return None


def _power_files(folder: Path, client: Path) -> list[Path]:
    return [path for path in (folder / "gpu_metrics.csv", client / "gpu_metrics.csv") if path.is_file()]


def _sources(logs: Sequence[EngineLog], records: Records, window: Window | None) -> PromptSources | None:
    if not logs or window is None or not records.wall_clock:
        return None
    end = max(last_end(records), window.end_ns or 0)
    sent: list[tuple[float, int]] = []
    if logs[0].tasks:
        starts, prompts = records.answered["start_ns"] / 1e9, np.nan_to_num(records.answered["input_tokens"], nan=-1)
        sent = [(float(at), int(prompt)) for at, prompt in zip(starts, prompts, strict=True)]
    found = logs[0].sources(window.start_ns / 1e9, end / 1e9, sent)
    return found if found is not None and found.tasks else None


def _logs(folder: Path, client: Path) -> list[Path]:
    return list(dict.fromkeys([*log_files(folder), *log_files(client)]))


def _read_summary(client: Path, notes: list[str], damaged: list[str]) -> ClientSummary:
    path = client / "profile_export_aiperf.json"
    summary = _whole(partial(read_client_summary, path), damaged) if path.is_file() else None
    if summary is not None:
        return summary
    if path.with_suffix(".csv").is_file():
        notes.append("the client's JSON summary is missing or damaged; its CSV was read")
        return read_client_csv(path.with_suffix(".csv"))
    notes.append("the client wrote no summary")
    return ClientSummary()


def _read_servers(folder: Path, phase_ns: tuple[int, int] | None, notes: list[str], damaged: list[str]) -> list[Scrape]:
    """Read what our own scrapes say, one Scrape a kind of server: each of its servers did a part of the work.

    Where the phase is known, the samples taken during the replay narrow a server's counts to it: the client's export
    has the phase alone, and counts of both stand side by side.
    """
    kinds: dict[str, list[Scrape]] = {}
    for after in sorted((folder / "metrics").glob("*.after.prom")):
        name = after.name.removesuffix(".after.prom")
        scrape = _whole(partial(_read_server, after, name, phase_ns), damaged)
        if scrape is not None:
            kinds.setdefault(SERIAL.sub("", name), []).append(scrape)
    for lone in sorted(folder.glob("metrics_*.prom")):
        scrape = _whole(partial(read_pair, None, lone, lone.stem), damaged)
        if scrape is not None:
            kinds[lone.name] = [scrape]
    for scrape in chain.from_iterable(kinds.values()):
        if scrape.whole_life:
            notes.append(f"{scrape.source}: no scrape from before the window, so its counters include the warm-up")
    return [
        Scrape(
            tuple(chain.from_iterable(one.series for one in servers)),
            source=kind,
            whole_life=any(one.whole_life for one in servers),
        )
        for kind, servers in kinds.items()
    ]


def _read_server(after: Path, name: str, phase_ns: tuple[int, int] | None) -> Scrape:
    before, samples = (after.with_name(f"{name}.{what}") for what in ("before.prom", "samples.prom.gz"))
    around = read_around(samples, phase_ns) if phase_ns is not None and samples.is_file() else (None, None)
    return read_pair(before if before.is_file() else None, after, name, around)


def _window(records: Records, summary: ClientSummary, scrapes: Sequence[Scrape], context: Context) -> Window | None:
    starts = [int(table["start_ns"].min()) for table in (records.answered, records.unanswered) if len(table)]
    if not starts:
        return None
    first = min(starts)
    exported = next((scrape.phase_ns[0] for scrape in scrapes if scrape.phase_ns), None)
    start = exported or start_ns(summary, first) or first
    asked = (scrape.duration_s for scrape in scrapes if scrape.duration_s)
    return Window(start, context.duration_s or summary.duration_s or next(asked, None))


def last_end(records: Records) -> int:
    """Return the last end of a profiled request, ns; there has to be one."""
    return max(int(table["end_ns"].max()) for table in (records.answered, records.unanswered) if len(table))
