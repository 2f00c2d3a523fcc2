"""configs/recipes/*.yaml: how a model is served on a GPU by an engine, with every offload backend taken out."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import StrictUndefined, TemplateError
from jinja2.sandbox import SandboxedEnvironment
from pydantic import Field

from workflow import yamlfile
from workflow.config import Name
from workflow.contract import InputError, Strict
from workflow.matrix import Row
from workflow.serving import Argv, Costs, Env


class Serves(Strict):
    """Which rows a recipe is for: every list must hold the row's value."""

    model_prefix: tuple[str, ...] = Field(min_length=1)
    framework: tuple[str, ...] = Field(min_length=1)
    runner: tuple[str, ...] = Field(min_length=1)
    precision: tuple[str, ...] = Field(min_length=1)

    def matches(self, row: Row) -> bool:
        """Tell whether the recipe is for this row."""
        return (
            row.model_prefix in self.model_prefix
            and row.framework in self.framework
            and row.runner in self.runner
            and row.precision in self.precision
        )


class Recipe(Strict):
    """One recipe file. `argv` and `env` values are templates over the row: `{{ 2 * conc }}`."""

    recipe: Name
    serves: Serves
    argv: tuple[str, ...]
    """Flags of the engine, one word an item. An item that renders to nothing is left out."""
    env: dict[str, str] = {}
    costs: Costs


def load_recipes(folder: Path) -> tuple[tuple[Path, Recipe], ...]:
    """Read all recipes of a folder, sorted by file name; raises InputError with file, line and key."""
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise InputError("no recipe here", file=folder, allowed="*.yaml", do="see docs/add-a-recipe.md")
    return tuple((path, yamlfile.validate(Recipe, yamlfile.load(path), path)) for path in paths)


def recipe_for(row: Row, recipes: tuple[tuple[Path, Recipe], ...], origin: str) -> tuple[Path, Recipe]:
    """Return the one recipe that serves a row; raises InputError where none or several do."""
    found = [(path, recipe) for path, recipe in recipes if recipe.serves.matches(row)]
    wanted = ", ".join(f"{name} {getattr(row, name)}" for name in Serves.model_fields)
    if not found:
        raise InputError(f"no recipe serves {origin}: {wanted}", do="write one, see docs/add-a-recipe.md")
    if len(found) > 1:
        raise InputError(
            f"{origin} is served by {len(found)} recipes: {', '.join(str(path) for path, _ in found)}",
            do="narrow `serves` in all but one",
        )
    return found[0]


_TEMPLATES = SandboxedEnvironment(undefined=StrictUndefined, autoescape=False)


def render(path: Path, recipe: Recipe, row: Row) -> tuple[Argv, Env]:
    """Return argv and env of a recipe for one row; raises InputError for a template that does not render."""
    values = template_values(row)
    argv = tuple(word for i, item in enumerate(recipe.argv) if (word := _render(item, values, path, f"argv.{i}")))
    env = {name: _render(text, values, path, f"env.{name}") for name, text in recipe.env.items()}
    return argv, env


def template_values(row: Row) -> dict[str, Any]:
    """Return the names a template may use: the row's fields with underscores."""
    return {name: getattr(row, name) for name in Row.model_fields} | {"gpus": row.gpus}


def _render(text: str, values: Mapping[str, Any], path: Path, key: str) -> str:
    try:
        return _TEMPLATES.from_string(text).render(values).strip()
    except TemplateError as error:
        raise InputError(
            f"{text!r} does not render: {error}", file=path, key=key, allowed=", ".join(sorted(values))
        ) from None
