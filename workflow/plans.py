"""A matrix row -> the serve plan: recipe + engine + backend, put together and checked against each other."""

from pathlib import Path

from workflow.backends import BACKENDS, Backend
from workflow.contract import InputError
from workflow.engines import ENGINES, Engine
from workflow.matrix import PlannedRow, Row
from workflow.recipes import Recipe, recipe_for, render
from workflow.serving import Costs, ServePlan


def plan_for(planned: PlannedRow, recipes: tuple[tuple[Path, Recipe], ...]) -> tuple[ServePlan, Costs]:
    """Return the serve plan of a row and what its recipe says it costs.

    Raises InputError: unknown engine or backend, a backend that the engine does not have, no recipe, or a recipe that
    carries a flag which the backend owns or forbids.
    """
    row = planned.row
    engine = _engine(planned)
    backend = _backend(planned, engine)
    path, recipe = recipe_for(row, recipes, planned.origin)
    argv, env = render(path, recipe, row)
    arm = backend.arm(row)
    flags = {word.split("=", 1)[0] for word in argv if word.startswith("-")}
    owned = {word.split("=", 1)[0] for word in arm.argv if word.startswith("-")}
    if clash := sorted(flags & (owned | set(arm.forbidden_argv))):
        raise InputError(
            f"{', '.join(clash)} belongs to backend {backend.name!r}",
            file=path,
            key="argv",
            do="take it out of the recipe",
        )
    if clash := sorted(env.keys() & (arm.env.keys() | set(arm.forbidden_env))):
        raise InputError(
            f"{', '.join(clash)} belongs to backend {backend.name!r}",
            file=path,
            key="env",
            do="take it out of the recipe",
        )
    plan = ServePlan(
        recipe=recipe.recipe,
        backend=backend.name,
        served_model_name=row.model,
        engine=engine.service(row, (*argv, *arm.argv), {**env, **arm.env}),
        sidecars=arm.services,
        router=None,
        pinned_bytes=arm.pinned_bytes,
        proofs=arm.proofs,
        versions=(*engine.versions(row), *arm.versions),
        notes=arm.notes,
        metrics=engine.metrics(),
    )
    return plan, recipe.costs


def backend_name(row: Row) -> str:
    """Return the arm of a row: its backend, or `none`."""
    return row.kv_offload_backend.name if row.kv_offload_backend else "none"


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


def _backend(planned: PlannedRow, engine: Engine) -> Backend:
    name = backend_name(planned.row)
    possible = sorted(backend.name for backend in BACKENDS.values() if engine.name in backend.engines)
    backend = BACKENDS.get(name)
    if backend is None or name not in possible:
        found = f"unknown backend {name!r}" if backend is None else f"{engine.name} has no backend {name!r}"
        raise InputError(
            found,
            file=planned.file,
            line=planned.line,
            key="kv-offload-backend.name",
            allowed=f"{', '.join(possible)} (with {engine.name})",
            do="see docs/add-a-backend.md",
        )
    return backend
