"""The same change in InferenceX's own words: the JSON that its generator hands to its CI (revision 843c6254f)."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from workflow.changelog import Entry, LoggedEntry, ScenarioType
from workflow.contract import InputError, digest
from workflow.rows import (
    SCENARIOS,
    AnyRow,
    FixedRow,
    MultiNodeFixedRow,
    MultiNodeRow,
    PlacedRow,
    Row,
    added_rows,
    concurrencies,
    grouped,
    is_agentic,
    is_multi_node,
    recipe_key,
    rows_of,
    sequence_lengths,
)
from workflow.searchspace import Configs, Master, load_master, load_runners, resolve_keys

MIN_EVAL_CONC = 16
"""Below this an accuracy run takes too long to be picked by itself."""

EVAL_LENGTHS = (8192, 1024)
"""Fixed-sequence points are evaluated at these lengths only."""


@dataclass(frozen=True)
class Eval:
    """One accuracy job."""

    row: AnyRow
    eval_conc: int | None = None
    """The concurrency that a multi-node job evaluates."""
    all_concs: bool = False
    """A multi-node fixed-sequence job evaluates every concurrency, one by one."""


def inferencex_matrix(added: Sequence[LoggedEntry], head: Configs, base: Configs) -> dict[str, Any]:
    """Return what InferenceX emits for the entries that a change added, without the revisions in its metadata.

    Raises InputError for what it refuses: append-only beside other entries, an append-only change that does more than
    add, and everything that `rows_of` raises.
    """
    entries = [(logged, resolve_keys(logged, head.master)) for logged in added]
    _check_append_only(entries, head, base)
    # An entry with all-evals goes first, so that its wider selection wins where two entries name one key.
    entries.sort(key=lambda item: not item[0].entry.all_evals)
    measured: list[AnyRow] = []
    evals: list[Eval] = []
    seen_rows: dict[str, set[ScenarioType]] = {}
    seen_evals: dict[str, set[ScenarioType]] = {}
    for logged, keys in entries:
        entry = logged.entry
        if not (entry.evals_only or entry.all_evals):
            for scenarios, group in _claim(keys, entry, seen_rows):
                placed = _expand(group, scenarios, head)
                if entry.append_only:
                    placed = added_rows(_expand(group, scenarios, base), placed)
                measured += [item.row for item in placed]
        if not entry.append_only:
            for scenarios, group in _claim(keys, entry, seen_evals):
                rows = [item.row for item in _expand(group, scenarios, head)]
                chosen = every_eval(rows) if entry.all_evals else default_evals(rows)
                evals += [item for item in chosen if _enough_experts(item.row, entry.eval_min_prefill_ep)]
    return {
        "single_node": _buckets(row for row in measured if not is_multi_node(row)),
        "multi_node": _buckets(row for row in measured if is_multi_node(row)),
        "evals": _eval_rows(evals, agentic=False, multi_node=False),
        "agentic_evals": _eval_rows(evals, agentic=True, multi_node=False),
        "multinode_evals": _eval_rows(evals, agentic=False, multi_node=True),
        "multinode_agentic_evals": _eval_rows(evals, agentic=True, multi_node=True),
        "changelog_metadata": {
            "entries": [item.entry.model_dump(mode="json", by_alias=True, exclude_none=True) for item in added]
        },
    }


def _check_append_only(entries: Sequence[tuple[LoggedEntry, list[str]]], head: Configs, base: Configs) -> None:
    appending = [(logged, keys) for logged, keys in entries if logged.entry.append_only]
    if not appending:
        return
    for logged, _ in entries:
        if not logged.entry.append_only:
            raise InputError(
                "append-only entries cannot share a change with others",
                file=logged.file,
                line=logged.line,
                do="take this entry into a change of its own",
            )
    selected: dict[str, set[str]] = {}
    for logged, keys in appending:
        for key in keys:
            selected.setdefault(key, set()).update(logged.entry.scenario_type or SCENARIOS)
    check_append_only_scope(selected, head.master, base.master)


def check_append_only_scope(selected: dict[str, set[str]], head: Master, base: Master) -> None:
    """Raise InputError where an append-only change edits what its entries do not name.

    `selected` maps config keys to the scenarios that the entries name.
    """
    for key in [*head.places, *(key for key in base.places if key not in head.places)]:
        old = base.plain(key) if key in base.places else None
        new = head.plain(key) if key in head.places else None
        file = (head if key in head.places else base).places[key][0]
        if key not in selected:
            if old != new:
                raise InputError(f"append-only: {key} changed too, and no entry names it", file=file, key=key)
            continue
        if old is None or new is None:
            raise InputError("append-only: the base has no such config key", file=file, key=key, do="drop append-only")
        scenarios, before = new["scenarios"], old["scenarios"]
        if scenarios.keys() != before.keys():
            raise InputError("append-only: a scenario was added or removed", file=file, key=f"{key}.scenarios")
        others = scenarios.keys() - selected[key]
        changed = [name for name in sorted(others) if scenarios[name] != before[name]]
        if others:
            changed += sorted(name for name in new.keys() | old.keys() - {"scenarios"} if _differs(name, new, old))
        if changed:
            found = f"append-only: {', '.join(changed)} changed, beyond the scenarios that the entries name"
            raise InputError(found, file=file, key=key)


def _differs(name: str, new: dict[str, Any], old: dict[str, Any]) -> bool:
    return name != "scenarios" and (name not in new or name not in old or new[name] != old[name])


def _claim(
    keys: Sequence[str], entry: Entry, seen: dict[str, set[ScenarioType]]
) -> list[tuple[tuple[ScenarioType, ...], list[str]]]:
    """Return the keys in groups by the scenarios that no earlier entry has expanded, and note that they are now."""
    wanted = entry.scenario_type or SCENARIOS
    fresh: list[tuple[tuple[ScenarioType, ...], str]] = []
    for key in keys:
        known = seen.setdefault(key, set())
        scenarios = tuple(name for name in SCENARIOS if name in wanted and name not in known)
        if scenarios:
            known.update(scenarios)
            fresh.append((scenarios, key))
    groups = grouped(fresh, lambda item: item[0])
    return [(scenarios, [key for _, key in items]) for scenarios, items in groups.items()]


def _expand(keys: Sequence[str], scenarios: Sequence[ScenarioType], configs: Configs) -> list[PlacedRow]:
    return [placed for key in keys for placed in rows_of(key, configs.master, configs.runners, scenarios)]


# ----------------------------------------------------------------------------------------- which points are evaluated
def default_evals(rows: Sequence[AnyRow]) -> list[Eval]:
    """Return InferenceX's own choice of accuracy jobs, in the order of the rows.

    Single-node, fixed lengths: per model, runner, framework, precision, speculation and attention, all points at the
    highest and at the median concurrency. Single-node, agentic: the highest concurrency per model, runner, framework
    and precision. Several nodes: the highest concurrency of each topology. A concurrency below MIN_EVAL_CONC counts
    only for single-node agentic points.
    """
    chosen: dict[int, Eval] = {}
    numbered = list(enumerate(rows))
    fixed = [(i, row) for i, row in numbered if isinstance(row, FixedRow) and _eligible(row)]
    for group in grouped(fixed, lambda item: (*_served_as(item[1]), item[1].spec_decoding, item[1].dp_attn)).values():
        concs = sorted({row.conc for _, row in group})
        wanted = {concs[-1], concs[len(concs) // 2]}
        chosen |= {i: Eval(row) for i, row in group if row.conc in wanted}
    agentic = [(i, row) for i, row in numbered if isinstance(row, Row)]
    for ladder in grouped(agentic, lambda item: _served_as(item[1])).values():
        i, best = max(ladder, key=lambda item: item[1].conc)
        chosen[i] = Eval(best)
    several = [(i, row) for i, row in numbered if is_multi_node(row) and _eligible(row)]
    for pairs in grouped(several, lambda item: recipe_key(item[1])).values():
        i, widest = max(pairs, key=lambda item: max(concurrencies(item[1])))
        chosen[i] = Eval(widest, eval_conc=max(concurrencies(widest)))
    return [chosen[i] for i in sorted(chosen)]


def every_eval(rows: Sequence[AnyRow]) -> list[Eval]:
    """Return an accuracy job for every point that can have one (`all-evals`).

    The rows of one multi-node topology become one job: with fixed lengths it evaluates all their concurrencies,
    agentic only the highest.
    """
    jobs: list[Eval] = []
    merged: dict[Any, int] = {}
    for row in rows:
        if isinstance(row, FixedRow | MultiNodeFixedRow) and (row.isl, row.osl) != EVAL_LENGTHS:
            continue
        if not isinstance(row, MultiNodeRow | MultiNodeFixedRow):
            jobs.append(Eval(row))
            continue
        topology = recipe_key(row)
        if topology in merged:
            first = jobs[merged[topology]].row
            jobs[merged[topology]] = _merged(first, {*concurrencies(first), *row.conc})
        else:
            merged[topology] = len(jobs)
            jobs.append(_merged(row, set(row.conc)))
    return jobs


def _merged(row: AnyRow, concs: set[int]) -> Eval:
    job = row.model_copy(update={"conc": tuple(sorted(concs))})
    return Eval(job, eval_conc=max(concs)) if is_agentic(row) else Eval(job, all_concs=True)


def _eligible(row: AnyRow) -> bool:
    lengths = (row.isl, row.osl) if isinstance(row, FixedRow | MultiNodeFixedRow) else EVAL_LENGTHS
    return lengths == EVAL_LENGTHS and max(concurrencies(row)) >= MIN_EVAL_CONC


def _served_as(row: AnyRow) -> tuple[str, ...]:
    return (row.model, row.runner, row.framework, row.precision)


def _enough_experts(row: AnyRow, least: int | None) -> bool:
    return least is None or not isinstance(row, MultiNodeRow | MultiNodeFixedRow) or row.prefill.ep >= least


# --------------------------------------------------------------------------------------------- as InferenceX spells it
def _buckets(rows: Iterable[AnyRow]) -> dict[str, list[dict[str, Any]]]:
    named = [("agentic" if is_agentic(row) else _lengths(row), row) for row in rows]
    buckets = grouped(named, lambda item: item[0])
    return {name: [_measured(row) for _, row in items] for name, items in buckets.items()}


def _lengths(row: AnyRow) -> str:
    assert isinstance(row, FixedRow | MultiNodeFixedRow)
    return sequence_lengths(row.isl, row.osl)


def _eval_rows(evals: Iterable[Eval], *, agentic: bool, multi_node: bool) -> list[dict[str, Any]]:
    chosen = [item for item in evals if (is_agentic(item.row), is_multi_node(item.row)) == (agentic, multi_node)]
    rows = []
    for item in chosen:
        row = {**_published(item.row, _plain(item.row)), "run-eval": True, "eval-only": True}
        if item.eval_conc is not None:
            row["eval-conc"] = item.eval_conc
        if item.all_concs:
            row["eval-all-concs"] = True
        rows.append(row)
    return rows


def _measured(row: AnyRow) -> dict[str, Any]:
    plain = _plain(row)
    if not is_agentic(row):
        plain["run-eval"] = False
    recipe = {name: value for name, value in plain.items() if name not in ("conc", "exp-name")}
    return {**_published(row, plain), "recipe-fingerprint": digest(recipe)}


def _plain(row: AnyRow) -> dict[str, Any]:
    """Return a row as InferenceX's generator makes it; the fingerprint is taken of this."""
    return row.model_dump(mode="json", by_alias=True, exclude_none=True)


def _published(row: AnyRow, plain: dict[str, Any]) -> dict[str, Any]:
    """Return a row with the defaults that InferenceX's schema adds when it is written out."""
    published = dict(plain)
    if not is_agentic(row):
        published["eval-only"] = False
    if isinstance(row, MultiNodeFixedRow):
        published["eval-all-concs"] = False
    for role in ("prefill", "decode"):
        if role in plain:
            published[role] = {"additional-settings": [], **plain[role]}
    return published


def configs_of(folder: Path) -> Configs:
    """Read configs/{nvidia-master,amd-master,runners}.yaml of a checkout of InferenceX."""
    configs = folder / "configs"
    # InferenceX merges them in this order, and a wildcard lists keys in the order of the merge.
    master = load_master([configs / "amd-master.yaml", configs / "nvidia-master.yaml"])
    return Configs(master, load_runners(configs / "runners.yaml"))
