"""A matrix row -> the serve plan: recipe + engine + backend + router, put together and checked against each other.

`python -m workflow.plans --all --configs DIR` plans every single-node agentic point of InferenceX's files;
`python -m workflow.plans POINT.json` prints a plan as shell, `--against POINT2.json` how two arms differ.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from workflow.backends import BACKENDS, Backend, combinations
from workflow.changelog import Entry, LoggedEntry
from workflow.contract import InputError, Strict, read_json, reports_input_errors
from workflow.engines import ENGINES, Engine
from workflow.engines.routers import ROUTERS, Router
from workflow.matrix import Component, Master, PlannedRow, Row, Runners, load_master, load_runners, plan_rows
from workflow.recipes import Recipe, Rendered, load_recipes, recipe_for, render
from workflow.serving import Arm, Costs, Emptying, ServePlan, Situation, flags_of, lowered, without_flags
from workflow.shell import as_shell

CONFIGS = Path(__file__).parents[1] / "configs"
RECIPES = CONFIGS / "recipes"
RUNNERS = CONFIGS / "runners.yaml"
# The arms of one model side by side: what docs/serve-plans.md shows.
ARMS = CONFIGS / "master" / "offload-arms.yaml"


# --------------------------------------------------------------------------------------------- one row, one plan
def plan_for(
    planned: PlannedRow, recipes: tuple[tuple[Path, Recipe], ...], peers: Iterable[str] = ()
) -> tuple[ServePlan, Costs]:
    """Return the serve plan of a row and what its recipe says it costs.

    `peers` are the other backends of the row's group: what one of them forbids or derates, the row does without too,
    so that arms differ only by their backends (`equalize: true`). Without peers the difference stays and is printed.
    Raises InputError: unknown engine, backend or router, a backend that the engine does not have, no recipe, a template
    that does not render, or a recipe that carries a flag or variable which the backend owns.
    """
    row = planned.row
    engine = _engine(planned)
    name = backend_name(row)
    backend = _backend(planned, engine, name)
    router = _router(planned)
    path, recipe = recipe_for(row, recipes, planned.origin)
    rendered = render(path, recipe, row, backend.option_blocks)
    arm = _arm(backend, row, rendered, path)
    _refuse_owned(arm, rendered, path)
    others = [_peer_arm(planned, peer, path, recipe) for peer in sorted(set(peers) - {name})]
    argv, env, notes = _bare(rendered, (arm, *others))
    config = _merged(rendered.engine_config, arm.engine_config, path)
    service = engine.service(row, (*argv, *arm.argv), {**env, **arm.env}, arm.distributions)
    forbidden = {variable for one in (arm, *others) for variable in one.forbidden_env}
    unset = tuple(sorted((forbidden | set(service.unset)) - service.env.keys()))
    file = engine.config_file(config) if config else None
    component = row.router if router else None

    plan = ServePlan(
        recipe=recipe.recipe,
        backend=name,
        served_model_name=row.model,
        engine=service.model_copy(update={"unset": unset}),
        sidecars=arm.services,
        router=router.service(row) if router else None,
        pinned_bytes=arm.pinned_bytes,
        proofs=arm.proofs,
        versions=(
            *engine.versions(row),
            *arm.versions,
            *(router.versions(component) if router and component else ()),
        ),
        notes=(*arm.notes, *notes),
        metrics=(*engine.metrics(), *arm.metrics),
        cache=rendered.cache,
        files=(*((file,) if file else ()), *arm.files),
        scratch=arm.scratch,
        wants={"model": row.model, **rendered.wants},
        packages=(*arm.packages, *(router.packages(component) if router and component else ())),
        client_env={**rendered.client_env, **(router.client_env if router else {})},
        session_header=router.session_header if router else None,
        blocked_by=(*rendered.blocked_by, *arm.blocked_by),
        empties=_empties(engine.empties(service.argv), arm.empties),
    )
    environment = recipe.environments.get(name)
    return (plan.in_environment(environment) if environment else plan), recipe.costs


def _empties(device: Emptying | None, tier: Emptying | None) -> Emptying | None:
    return None if device is None or tier is None else tier.then(device)


def check_arm(planned: PlannedRow) -> None:
    """Raise InputError if a row's engine or backend does not exist, at the line that names it.

    Called for every row before any is planned: planning one row looks at the backends of its group, and would speak of
    a misspelt one at the line of another arm.
    """
    _backend(planned, _engine(planned), backend_name(planned.row))


def backend_name(row: Row) -> str:
    """Return the arm of a row: its backend, or `none`."""
    return row.kv_offload_backend.name if row.kv_offload_backend else "none"


def with_backend(planned: PlannedRow, name: str, version: str | None, budget_gb: int) -> PlannedRow:
    """Return the row of another arm: the same point under another backend (`none` for the control)."""
    arm: dict[str, Any] = {"kv_offloading": "none", "kv_offload_backend": None, "total_cpu_dram_gb": 0}
    if name != "none":
        component = Component(name=name, version=version)
        arm = {"kv_offloading": "dram", "kv_offload_backend": component, "total_cpu_dram_gb": budget_gb}
    row = planned.row.model_copy(update=arm)
    return PlannedRow(row, planned.config_key, planned.file, planned.line, planned.entry)


def _engine(planned: PlannedRow) -> Engine:
    engine = ENGINES.get(planned.row.framework)
    if engine is None:
        raise InputError(
            f"unknown framework {planned.row.framework!r} ({planned.config_key})",
            file=planned.file,
            line=planned.line,
            key="framework",
            allowed=", ".join(sorted(ENGINES)),
        )
    return engine


def _backend(planned: PlannedRow, engine: Engine, name: str) -> Backend:
    backend = BACKENDS.get((engine.name, name))
    if backend is None:
        have = [other for other, names in combinations().items() if name in names]
        found = f"{engine.name} has no backend {name!r}" if have else f"unknown backend {name!r}"
        listed = "; ".join(f"{other}: {', '.join(names)}" for other, names in sorted(combinations().items()))
        raise InputError(
            found,
            file=planned.file,
            line=planned.line,
            key="kv-offload-backend.name",
            allowed=f"{listed}",
            do=f"choose one of {engine.name}'s, or write it: docs/add-a-backend.md",
        )
    return backend


def _router(planned: PlannedRow) -> Router | None:
    component = planned.row.router
    # A search space may name a router for all of its lines; only ranks with schedulers of their own need one.
    if component is None or not planned.row.dp_attn:
        return None
    if component.name not in ROUTERS:
        raise InputError(
            f"unknown router {component.name!r}",
            file=planned.file,
            line=planned.line,
            key="router.name",
            allowed=", ".join(sorted(ROUTERS)),
        )
    return ROUTERS[component.name]


def _arm(backend: Backend, row: Row, rendered: Rendered, path: Path) -> Arm:
    try:
        return backend.arm(Situation(row=row, cache=rendered.cache, options=rendered.options))
    except InputError as error:
        raise InputError(str(error), file=path) from None


def _peer_arm(planned: PlannedRow, peer: str, path: Path, recipe: Recipe) -> Arm:
    backend = _backend(planned, _engine(planned), peer)
    row = with_backend(planned, peer, None, planned.row.total_cpu_dram_gb).row
    return _arm(backend, row, render(path, recipe, row, backend.option_blocks), path)


def _refuse_owned(arm: Arm, rendered: Rendered, path: Path) -> None:
    clashes = {
        "argv": sorted(flags_of(rendered.argv).keys() & (flags_of(arm.argv).keys() - {""})),
        "env": sorted(rendered.env.keys() & arm.env.keys()),
    }
    for key, clash in clashes.items():
        if clash:
            raise InputError(
                f"{', '.join(clash)} belongs to backend {arm.backend!r}",
                file=path,
                key=key,
                do="take it out of the recipe: a backend's logic stands in one place",
            )


def _bare(rendered: Rendered, arms: tuple[Arm, ...]) -> tuple[tuple[str, ...], dict[str, str], tuple[str, ...]]:
    """Return the recipe's argv and env less what the arms forbid, derated, and what that changed, for print."""
    argv, env = rendered.argv, dict(rendered.env)
    forbidden = sorted({flag for arm in arms for flag in arm.forbidden_argv} & flags_of(argv).keys())
    variables = sorted({name for arm in arms for name in arm.forbidden_env} & env.keys())
    derate: dict[str, float] = {}
    for arm in arms:
        for flag, by in arm.derate.items():
            derate[flag] = max(by, derate.get(flag, 0.0))
    derate = {flag: by for flag, by in derate.items() if flag in flags_of(argv)}
    notes = [f"{name} of the recipe is left out" for name in (*forbidden, *variables)]
    notes += [f"{flag} is lowered by {by:g}" for flag, by in derate.items()]
    kept = {name: value for name, value in env.items() if name not in variables}
    return lowered(without_flags(argv, tuple(forbidden)), derate), kept, tuple(notes)


def _merged(
    recipe: Mapping[str, Any], arm: Mapping[str, Any], path: Path, key: str = "engine_config"
) -> dict[str, Any]:
    """Return the recipe's configuration with the arm's keys added; raises InputError where both set one."""
    merged = dict(recipe)
    for name, value in arm.items():
        if isinstance(value, dict) and isinstance(merged.get(name, {}), dict):
            merged[name] = _merged(merged.get(name, {}), value, path, f"{key}.{name}")
        elif name in merged:
            raise InputError(f"{name} belongs to the backend", file=path, key=key, do="take it out of the recipe")
        else:
            merged[name] = value
    return merged


# ------------------------------------------------------------------------------------------------ two plans
class Difference(Strict):
    """One thing in which two plans differ."""

    where: str
    """`engine argv`, `engine env`, `service lmcache-0`, `file mooncake.json`, ..."""
    name: str
    kind: Literal["added", "removed", "changed"]
    """From the first plan to the second."""
    first: str | None
    second: str | None

    def __str__(self) -> str:
        """Return one line: + what only the second has, - what only the first has, ~ what both have differently."""
        sign = {"added": "+", "removed": "-", "changed": "~"}[self.kind]
        values = " -> ".join(value for value in (self.first, self.second) if value is not None)
        return f"{sign} {self.where}: {self.name} {values}".rstrip()


def differences(first: ServePlan, second: ServePlan) -> tuple[Difference, ...]:
    """Return all differences between two plans, in the order of a plan's parts.

    Between two arms of a group this is what their backends changed and nothing else; it is what a comparison compares.
    """
    found: list[Difference] = []
    for where, one, other in _both(_parts(first), _parts(second)):
        for name in dict.fromkeys((*one, *other)):
            a, b = one.get(name), other.get(name)
            if a != b:
                kind: Literal["added", "removed", "changed"]
                kind = "added" if a is None else "removed" if b is None else "changed"
                found.append(Difference(where=where, name=name, kind=kind, first=a, second=b))
    return tuple(found)


def _both(
    first: Mapping[str, Mapping[str, str]], second: Mapping[str, Mapping[str, str]]
) -> list[tuple[str, Mapping[str, str], Mapping[str, str]]]:
    """Return (name, part of the first, part of the second) for the parts of both, missing ones empty."""
    return [(name, first.get(name, {}), second.get(name, {})) for name in dict.fromkeys((*first, *second))]


def _parts(plan: ServePlan) -> dict[str, dict[str, str]]:
    """Return a plan as part -> name -> text, one entry for each thing that can differ by itself."""
    parts: dict[str, dict[str, str]] = {}
    for service in (plan.engine, *plan.sidecars, *((plan.router,) if plan.router else ())):
        flags = {flag or "command": " ".join(values) for flag, values in flags_of(service.argv).items()}
        parts[f"{service.name} argv"] = flags
        parts[f"{service.name} env"] = dict(service.env)
        parts[f"{service.name} environment"] = {service.environment: ""} if service.environment else {}
        parts[f"{service.name} env"] |= {f"{name} (must be unset)": "" for name in service.unset}
    for file in plan.files:
        parts[f"file {file.filename}"] = dict(_lines(file.text))
    parts["host memory"] = {"pinned": f"{plan.pinned_bytes} bytes"}
    parts["packages"] = dict.fromkeys(plan.packages, "")
    parts["client env"] = dict(plan.client_env)
    parts["recipe"] = {"name": plan.recipe}
    parts["notes"] = dict.fromkeys(plan.notes, "")
    return parts


def _lines(text: str) -> Iterable[tuple[str, str]]:
    for line in text.splitlines():
        key, _, value = line.strip().rstrip(",").partition(":")
        yield key, value.strip()


# ------------------------------------------------------------------------------- every point of InferenceX's files
def single_node_keys(master: Master) -> tuple[str, ...]:
    """Return the config keys that have single-node agentic points."""
    found = []
    for key, (_, data) in master.places.items():
        scenarios = data[key].get("scenarios") or {}
        if not data[key].get("multinode") and "agentic-coding" in scenarios:
            found.append(key)
    return tuple(found)


def single_node_rows(master: Master, runners: Runners) -> list[PlannedRow]:
    """Return all single-node agentic rows, in the order of the files."""
    keys = single_node_keys(master)
    entry = Entry.model_validate(
        {
            "config-keys": keys,
            "description": ("every single-node agentic point",),
            "pr-link": "",
            "scenario-type": ("agentic-coding",),
        }
    )
    return plan_rows((LoggedEntry(0, 1, Path("--all"), entry),), master, runners)


def load_inferencex(folder: Path) -> tuple[Master, Runners]:
    """Read *-master.yaml and runners.yaml of a folder."""
    masters = sorted(folder.glob("*-master.yaml"))
    if not masters:
        raise InputError("no search space here", file=folder, allowed="*-master.yaml")
    return load_master(masters), load_runners(folder / "runners.yaml")


def survey(rows: Iterable[PlannedRow], recipes: tuple[tuple[Path, Recipe], ...]) -> tuple[list[str], Counter[str]]:
    """Return one line a row (exp-name, arm, `ok` or codes) and how many rows are ok, blocked or without a plan."""
    lines, totals = [], Counter[str]()
    for planned in rows:
        row = planned.row
        try:
            plan, _ = plan_for(planned, recipes)
        except InputError as error:
            totals["no plan"] += 1
            outcome = f"no plan: {error}"
        else:
            codes = [blocker.code for blocker in plan.blocked_by]
            totals["blocked" if codes else "ok"] += 1
            outcome = ", ".join(codes) or "ok"
        lines.append(f"{row.exp_name}\t{row.framework}/{backend_name(row)}\t{outcome}")
    return lines, totals


def document(master: Master, runners: Runners, recipes: tuple[tuple[Path, Recipe], ...]) -> str:
    """Return docs/serve-plans.md: for each config key, every arm's full command and how it differs from the first."""
    lines = [
        "# Serve plans, arm by arm",
        "",
        "Generated by `python -m workflow.plans --document`; do not edit. Each arm is shown as shell to paste in",
        "a checkout, and as what it changes against the arm without offload: `+` added, `-` left out, `~` changed.",
        "With `equalize: true` a group takes what one of its arms forces, and lines about the recipe's flags vanish.",
    ]
    keys = tuple(master.places)
    for key in keys:
        rows = [row for row in single_node_rows(master, runners) if row.config_key == key]
        plans = [plan_for(row, recipes)[0] for row in rows]
        first = rows[0].row
        lines += ["", f"## {first.model} on {first.runner.removeprefix('cluster:')}, tp {first.tp}, {first.framework}"]
        for planned, plan in zip(rows, plans, strict=True):
            budget = f", host memory budget {planned.row.total_cpu_dram_gb} GB" if planned.row.total_cpu_dram_gb else ""
            lines += ["", f"### {plan.backend}, {planned.row.conc} sessions{budget}", ""]
            if plan is not plans[0]:
                found = [str(difference) for difference in differences(plans[0], plan)]
                lines += ["What it changes:", "", "```text", *found, "```", ""]
            lines += ["```bash", as_shell(plan).rstrip("\n"), "```"]
    return "\n".join(lines) + "\n"


def plan_of_point(path: Path) -> ServePlan:
    """Return the plan in a point file; raises InputError where there is none or it does not fit."""
    data = read_json(path)
    if not isinstance(data, dict) or "plan" not in data:
        raise InputError("not a point file: it holds no plan", file=path, key="plan")
    try:
        return ServePlan.model_validate_json(json.dumps(data["plan"]))
    except ValueError as error:
        raise InputError(f"the plan does not fit: {error}", file=path, key="plan") from None


@reports_input_errors
def main(arguments: list[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m workflow.plans", description=__doc__)
    parser.add_argument("point", nargs="?", type=Path, help="a point file: print its plan as shell")
    parser.add_argument("--against", type=Path, help="a second point file: print how the two plans differ")
    parser.add_argument("--all", action="store_true", help="plan every single-node agentic point of --configs")
    parser.add_argument("--configs", type=Path, help="folder of *-master.yaml and runners.yaml")
    parser.add_argument("--document", action="store_true", help="print docs/serve-plans.md")
    parser.add_argument("--recipes", type=Path, default=RECIPES)
    options = parser.parse_args(arguments)
    if [options.all, options.document, options.point is not None].count(True) != 1:
        parser.error("give a point file, or --all with --configs, or --document")
    if options.all and options.configs is None:
        parser.error("--all needs --configs")
    if options.document:
        print(document(load_master([ARMS]), load_runners(RUNNERS), load_recipes(options.recipes)), end="")
        return 0
    if options.all:
        rows = single_node_rows(*load_inferencex(options.configs))
        lines, totals = survey(rows, load_recipes(options.recipes))
        counts = ", ".join(f"{totals[name]} {name}" for name in ("ok", "blocked", "no plan"))
        print("\n".join([*lines, f"{len(rows)} points: {counts}"]))
        return 1 if totals["no plan"] or not rows else 0
    plan = plan_of_point(options.point)
    if options.against is None:
        print(as_shell(plan), end="")
    else:
        found = differences(plan, plan_of_point(options.against))
        print("\n".join(str(difference) for difference in found) or "no difference")
    return 0


if __name__ == "__main__":
    sys.exit(main())
