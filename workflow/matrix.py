"""Entries x search spaces -> matrix rows, one row for each point that is measured.

`python -m workflow.matrix --base DIR --head DIR` prints what a change plans, as JSON; with `--inferencex` as
InferenceX's own generator does. DIR holds perf-changelog.yaml and configs/{nvidia-master,amd-master,runners}.yaml.
"""

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from workflow import yamlfile
from workflow.changelog import LoggedEntry, changes_of_texts, load_changelog, select
from workflow.contract import InputError, reports_input_errors
from workflow.inferencex_matrix import configs_of, inferencex_matrix
from workflow.lint import PlanFinding, lint, lint_text, refuse
from workflow.rows import (
    SCENARIOS,
    NotRunnable,
    PlacedRow,
    PlannedRow,
    Row,
    added_rows,
    concurrencies,
    is_agentic,
    is_multi_node,
    rows_of,
)
from workflow.searchspace import (
    Component,
    Configs,
    Hardware,
    Master,
    Runners,
    configs_at,
    dram_budget_gb,
    load_master,
    load_runners,
    resolve_keys,
)

if TYPE_CHECKING:
    from workflow.config import Config

__all__ = [
    "Component",
    "Configs",
    "Expansion",
    "Hardware",
    "Master",
    "NotRunnable",
    "PlannedMatrix",
    "PlannedRow",
    "Row",
    "Runners",
    "configs_at",
    "dram_budget_gb",
    "expand",
    "load_master",
    "load_runners",
    "plan_matrix",
    "plan_rows",
    "resolve_keys",
]


@dataclass(frozen=True)
class Expansion:
    """Everything that entries ask for."""

    rows: tuple[PlannedRow, ...]
    not_runnable: tuple[NotRunnable, ...]


def expand(entries: Sequence[LoggedEntry], master: Master, runners: Runners, base: Configs | None = None) -> Expansion:
    """Return all rows of all entries, in their order; a scenario of a key is expanded once, by the first that names it.

    With `base`, an append-only entry gives only what the base does not have; without, all of its rows: those that were
    measured already keep their ids and are not measured again. Raises InputError: no match, a search space that does
    not fit, a single-node row that needs more GPUs than its node has, an append-only entry that does more than append.
    """
    rows: list[PlannedRow] = []
    others: list[NotRunnable] = []
    seen: set[tuple[str, str]] = set()
    for entry in entries:
        for key in resolve_keys(entry, master):
            wanted = entry.entry.scenario_type or SCENARIOS
            scenarios = [name for name in SCENARIOS if name in wanted and (key, name) not in seen]
            seen |= {(key, name) for name in scenarios}
            placed = rows_of(key, master, runners, scenarios)
            if entry.entry.append_only and base is not None and placed:
                known = rows_of(key, base.master, base.runners, scenarios) if key in base.master.places else []
                placed = added_rows(known, placed)
            for item in placed:
                why = _why_not(item, entry)
                where = (item.config_key, item.file, item.line, entry)
                if why is None and isinstance(item.row, Row):
                    _check_fits(item, item.row, runners)
                    rows.append(PlannedRow(item.row, *where))
                else:
                    others.append(NotRunnable(item.row, why or "", *where))
    return Expansion(tuple(rows), tuple(others))


@dataclass(frozen=True)
class PlannedMatrix:
    """The input side of a plan: what was selected, what it asks for, and what is wrong with it."""

    entries: tuple[LoggedEntry, ...]
    rows: tuple[PlannedRow, ...]
    not_runnable: tuple[NotRunnable, ...]
    messages: tuple[str, ...]
    """A line for each entry that was withdrawn, edited or moved since `changelog.base`."""
    findings: tuple[PlanFinding, ...]
    """Warnings; with `strict: true` they are errors already."""


def plan_matrix(config: "Config", root: Path = Path()) -> PlannedMatrix:
    """Read the files that a config names, relative to the checkout `root`, and plan the rows of the selected entries.

    Raises InputError, with file and line: everything that the readers, `select` and `expand` raise, no row to measure,
    and with `strict` every finding.
    """
    selection = select(root, config.changelog)
    master = load_master([root / path for path in config.masters])
    runners = load_runners(root / config.runners)
    base = None
    if config.changelog.base is not None and any(entry.entry.append_only for entry in selection.entries):
        base = configs_at(root, config.changelog.base, config.masters, config.runners)
    expansion = expand(selection.entries, master, runners, base)
    everything: list[PlannedRow | NotRunnable] = [*expansion.rows, *expansion.not_runnable]
    path = root / config.changelog.file
    texts = [path, *(root / name for name in (*config.masters, config.runners))]
    findings = [finding for text in texts for finding in lint_text(text, yamlfile.read_bytes(text))]
    findings += lint(selection.entries, master, runners, everything, selection.log or load_changelog(path))
    if config.strict:
        refuse(findings)
    if not expansion.rows:
        raise _nothing(selection.entries, expansion, selection.messages)
    return PlannedMatrix(selection.entries, expansion.rows, expansion.not_runnable, selection.messages, tuple(findings))


def plan_rows(
    entries: Sequence[LoggedEntry], master: Master, runners: Runners, base: Configs | None = None
) -> list[PlannedRow]:
    """Return the rows of `expand` that this workflow measures; raises InputError, saying why, where there is none."""
    expansion = expand(entries, master, runners, base)
    if not expansion.rows:
        raise _nothing(entries, expansion, ())
    return list(expansion.rows)


def _nothing(entries: Sequence[LoggedEntry], expansion: Expansion, messages: Sequence[str]) -> InputError:
    """Return why there is no row: an empty plan that succeeds would be taken for a sweep that is done."""
    titles = "; ".join(entry.title for entry in entries)
    found = f"{titles} selects no single-node agentic-coding row" if titles else "no entry was added"
    if reasons := sorted({item.why for item in expansion.not_runnable}):
        found += f": {len(expansion.not_runnable)} rows are not runnable here yet ({'; '.join(reasons)})"
    return InputError("\n".join([f"nothing to measure: {found}", *messages]), key="changelog")


def _why_not(item: PlacedRow, entry: LoggedEntry) -> str | None:
    """Return why this workflow does not measure a row, or None where it does."""
    if entry.entry.evals_only or entry.entry.all_evals:
        return "the entry asks for accuracy runs only, and this workflow measures no accuracy yet"
    if is_multi_node(item.row):
        return "several nodes: this workflow serves on one node yet"
    return None if is_agentic(item.row) else "fixed-seq-len: this workflow replays recorded sessions only yet"


def _check_fits(item: PlacedRow, row: Row, runners: Runners) -> None:
    hardware = runners.hardware.get(row.runner)
    if hardware is not None and row.gpus > hardware.gpus_per_node:
        found = f"{row.gpus} GPUs on a node of {hardware.gpus_per_node} ({row.runner})"
        raise InputError(found, file=item.file, line=item.line, key=item.config_key)


# ------------------------------------------------------------------------------------------------------- command line
@reports_input_errors
def main(arguments: Sequence[str] | None = None) -> int:
    """Print the matrix of a change; returns the exit status: 0, or 2 for a user's mistake."""
    parser = argparse.ArgumentParser(prog="python -m workflow.matrix", description="What a changelog change plans.")
    parser.add_argument("--base", type=Path, required=True, help="folder with the files before the change")
    parser.add_argument("--head", type=Path, required=True, help="folder with the files after the change")
    parser.add_argument("--inferencex", action="store_true", help="print what InferenceX's generator prints")
    options = parser.parse_args(arguments)
    printed = _inferencex(options.base, options.head) if options.inferencex else _own(options.base, options.head)
    print(json.dumps(printed, indent=1, sort_keys=True))
    return 0


def _changes(base: Path, head: Path) -> Any:
    for folder in (base, head):
        if not folder.is_dir():
            raise InputError("no such folder", file=folder, allowed="perf-changelog.yaml and configs/ in it")
    old, new = base / "perf-changelog.yaml", head / "perf-changelog.yaml"
    found = changes_of_texts((old, yamlfile.read_bytes(old)), (new, yamlfile.read_bytes(new)))
    if not found:
        raise InputError("no entry was added", file=new, do="append one; see docs/write-an-entry.md")
    return found


def _inferencex(base: Path, head: Path) -> dict[str, Any]:
    found = _changes(base, head)
    added = [change.new for change in found if change.kind == "added"]
    others = [change.message for change in found if change.kind != "added"]
    if not added:
        raise InputError("\n".join(["no entry was added; the log changed otherwise:", *others]))
    for message in others:
        print(message, file=sys.stderr)
    # The base is read only where something is compared with it.
    needs_base = any(entry.entry.append_only for entry in added)
    new = configs_of(head)
    return inferencex_matrix(added, new, configs_of(base) if needs_base else new)


def _own(base: Path, head: Path) -> dict[str, Any]:
    found = _changes(base, head)
    added = [change.new for change in found if change.kind == "added"]
    configs, before = configs_of(head), configs_of(base)
    expansion = expand(added, configs.master, configs.runners, before)
    log = head / "perf-changelog.yaml"
    everything: list[PlannedRow | NotRunnable] = [*expansion.rows, *expansion.not_runnable]
    findings = [
        *lint_text(log, yamlfile.read_bytes(log)),
        *lint(added, configs.master, configs.runners, everything, load_changelog(log)),
    ]
    return {
        "changes": [{"kind": change.kind, "message": change.message} for change in found],
        "rows": [
            {
                "entry": item.entry.title,
                "origin": item.origin,
                "row": item.row.model_dump(mode="json", by_alias=True, exclude_none=True),
            }
            for item in expansion.rows
        ],
        "not_runnable": [
            {"conc": list(concurrencies(item.row)), "entry": item.entry.title, "origin": item.origin, "why": item.why}
            for item in expansion.not_runnable
        ],
        "findings": [{**finding.model_dump(mode="json"), "message": finding.message} for finding in findings],
    }


if __name__ == "__main__":
    # What is parsed is kept until the end: collecting garbage would only walk it, and once more on the way out.
    gc.disable()
    status = main()
    gc.freeze()
    sys.exit(status)
