"""configs/recipes/*.yaml: how a model is served on a GPU by an engine, with every offload backend taken out."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from jinja2 import StrictUndefined, Template, TemplateError
from jinja2.environment import TemplateExpression
from jinja2.runtime import Undefined
from jinja2.sandbox import SandboxedEnvironment
from pydantic import Field, ValidationError, model_validator

from workflow import yamlfile
from workflow.config import Name
from workflow.contract import InputError, Strict
from workflow.matrix import Row
from workflow.serving import Argv, Blocker, CacheFacts, Costs, Env, gpu_family

Model = TypeVar("Model", bound=Strict)


class Serves(Strict):
    """Which rows a recipe is for: every list that is given must hold the row's value."""

    model_prefix: tuple[str, ...] = Field(min_length=1)
    framework: tuple[str, ...] = Field(min_length=1)
    precision: tuple[str, ...] = Field(min_length=1)
    gpu: tuple[str, ...] | None = None
    """GPU families, `b200`: any cluster that has them."""
    runner: tuple[str, ...] | None = None
    """Runner labels, for a recipe that fits one cluster only."""

    @model_validator(mode="after")
    def _one_kind_of_place(self) -> "Serves":
        if (self.gpu is None) == (self.runner is None):
            raise ValueError("give `gpu` or `runner`, and not both")
        return self

    def matches(self, row: Row) -> bool:
        """Tell whether the recipe is for this row."""
        return (
            row.model_prefix in self.model_prefix
            and row.framework in self.framework
            and row.precision in self.precision
            and (self.gpu is None or gpu_family(row.runner) in self.gpu)
            and (self.runner is None or row.runner in self.runner)
        )


class When(Strict):
    """More flags and variables for the rows that fulfil a condition."""

    if_: str = Field(alias="if")
    """Expression over the template's names that is true or false."""
    argv: tuple[str, ...] = ()
    env: dict[str, str] = {}


class Obstacle(Strict):
    """Something that keeps rows from running as the recipe stands."""

    if_: str = Field(alias="if", default="true")
    code: Name
    says: str


class Recipe(Strict):
    """One recipe file. Values are templates over the row and over `let`: `{{ 2 * conc }}`."""

    recipe: Name
    serves: Serves
    let: dict[str, str] = {}
    """Name -> expression; later ones may use earlier ones."""
    argv: tuple[str, ...] = ()
    """Flags of the engine, one word an item. An item that renders to nothing is left out."""
    env: dict[str, str] = {}
    when: tuple[When, ...] = ()
    engine_config: str | None = None
    """The engine's YAML configuration, for an engine that has one, as one template."""
    cache: dict[str, Any] = {}
    """What backends need to know about the KV cache; the fields of CacheFacts."""
    backends: dict[str, dict[str, Any]] = {}
    """Option block -> options for this model; the backend that reads the block checks them."""
    environments: dict[str, Name] = {}
    """Backend -> prepared environment that its services run in, `configs/environments/<name>.txt`; `none` is the
    control. A backend that is not here is served from an image, or from what the node has installed."""
    wants: dict[str, str] = {}
    """Path placeholder -> what the node has to hold there, beside the checkpoint."""
    client_env: dict[str, str] = {}
    """Variables of the replay client that this model needs."""
    blocked_by: tuple[Obstacle, ...] = ()
    costs: Costs


@dataclass(frozen=True)
class Rendered:
    """A recipe for one row."""

    argv: Argv
    env: Env
    engine_config: dict[str, Any]
    cache: CacheFacts
    options: Mapping[str, Any]
    """For the row's backend."""
    wants: dict[str, str]
    client_env: Env
    blocked_by: tuple[Blocker, ...]


def load_recipes(folder: Path) -> tuple[tuple[Path, Recipe], ...]:
    """Read all recipes of a folder, sorted by file name; raises InputError with file, line and key."""
    paths = sorted(folder.glob("*.yaml"))
    if not paths:
        raise InputError("no recipe here", file=folder, allowed="*.yaml", do="see docs/add-a-recipe.md")
    return tuple((path, yamlfile.validate(Recipe, yamlfile.load(path), path)) for path in paths)


def recipe_for(row: Row, recipes: tuple[tuple[Path, Recipe], ...], origin: str) -> tuple[Path, Recipe]:
    """Return the one recipe that serves a row; raises InputError where none or several do."""
    found = [(path, recipe) for path, recipe in recipes if recipe.serves.matches(row)]
    wanted = ", ".join(f"{name} {getattr(row, name)}" for name in ("model_prefix", "framework", "precision", "runner"))
    if not found:
        raise InputError(f"no recipe serves {origin}: {wanted}", do="write one, see docs/add-a-recipe.md")
    if len(found) > 1:
        raise InputError(
            f"{origin} is served by {len(found)} recipes: {', '.join(str(path) for path, _ in found)}",
            do="narrow `serves` in all but one",
        )
    return found[0]


# A recipe is configuration: it may compute with the row, and neither reach Python objects nor hide a misspelt name.
_TEMPLATES = SandboxedEnvironment(undefined=StrictUndefined, autoescape=False)


def render(path: Path, recipe: Recipe, row: Row, option_blocks: tuple[str, ...] = ()) -> Rendered:
    """Return a recipe for one row; raises InputError, with file and key, for a template that does not render."""
    values = template_values(row)
    for name, expression in recipe.let.items():
        values[name] = _evaluate(expression, values, path, f"let.{name}")
    parts = [
        (f"when.{i}", part) for i, part in enumerate(recipe.when) if _condition(part.if_, values, path, f"when.{i}.if")
    ]
    argv = [_text(item, values, path, f"argv.{i}") for i, item in enumerate(recipe.argv)]
    env = {name: _text(text, values, path, f"env.{name}") for name, text in recipe.env.items()}
    for key, part in parts:
        argv += [_text(item, values, path, f"{key}.argv.{i}") for i, item in enumerate(part.argv)]
        env |= {name: _text(text, values, path, f"{key}.env.{name}") for name, text in part.env.items()}
    config: dict[str, Any] = {}
    if recipe.engine_config is not None:
        loaded = yamlfile.parse(_text(recipe.engine_config, values, path, "engine_config").encode(), path)
        # As plain data: the positions that yamlfile keeps are those of the rendered text, not of the recipe.
        config = json.loads(json.dumps(loaded))
    return Rendered(
        argv=tuple(word for word in argv if word),
        env=env,
        engine_config=config,
        cache=_checked(CacheFacts, _native(recipe.cache, values, path, "cache"), path, "cache"),
        options={
            name: option
            for block in option_blocks
            for name, option in _native(recipe.backends.get(block, {}), values, path, f"backends.{block}").items()
        },
        wants={name: _text(text, values, path, f"wants.{name}") for name, text in recipe.wants.items()},
        client_env=recipe.client_env,
        blocked_by=tuple(
            Blocker(code=part.code, says=part.says)
            for i, part in enumerate(recipe.blocked_by)
            if _condition(part.if_, values, path, f"blocked_by.{i}.if")
        ),
    )


def template_values(row: Row) -> dict[str, Any]:
    """Return the names a template may use: the row's fields with underscores, `gpus` and the GPU family `gpu`."""
    fields = {name: getattr(row, name) for name in Row.model_fields}
    return fields | {"gpus": row.gpus, "gpu": gpu_family(row.runner)}


# A survey renders each recipe for hundreds of rows, and compiling is nearly all of the time.
@cache
def _template(text: str) -> Template:
    return _TEMPLATES.from_string(text)


@cache
def _expression(text: str) -> TemplateExpression:
    return _TEMPLATES.compile_expression(text, undefined_to_none=False)


def _text(text: str, values: Mapping[str, Any], path: Path, key: str) -> str:
    if "{" not in text:  # most words are plain, and rendering one costs a hundred times as much as looking
        return text.strip()
    try:
        return _template(text).render(values).strip()
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise _does_not_render(text, error, values, path, key) from None


def _evaluate(expression: str, values: Mapping[str, Any], path: Path, key: str) -> Any:
    try:
        value = _expression(expression)(**values)
        if isinstance(value, Undefined):
            # StrictUndefined speaks up only when it is used.
            str(value)
        return value
    except (TemplateError, TypeError, ValueError, ArithmeticError) as error:
        raise _does_not_render(expression, error, values, path, key) from None


def _condition(expression: str, values: Mapping[str, Any], path: Path, key: str) -> bool:
    value = _evaluate(expression, values, path, key)
    if not isinstance(value, bool):
        raise InputError(
            f"{expression!r} is {value!r}", file=path, key=key, allowed="an expression that is true or false"
        )
    return value


def _native(value: Any, values: Mapping[str, Any], path: Path, key: str) -> Any:
    """Return a value with its templates rendered; one that is `{{ ... }}` alone keeps its type."""
    if isinstance(value, dict):
        return {name: _native(part, values, path, f"{key}.{name}") for name, part in value.items()}
    if isinstance(value, list | tuple):
        return tuple(_native(part, values, path, f"{key}.{i}") for i, part in enumerate(value))
    if not isinstance(value, str):
        return value
    alone = re.fullmatch(r"\{\{((?:(?!\}\}).)*)\}\}", value.strip())
    return _evaluate(alone[1].strip(), values, path, key) if alone else _text(value, values, path, key)


def _checked(model: type[Model], data: Any, path: Path, key: str) -> Model:
    try:
        return model.model_validate(data)
    except ValidationError as error:
        raise InputError.join(
            InputError(
                f"found {issue['input']!r}: {issue['msg']}",
                file=path,
                key=".".join((key, *(str(part) for part in issue["loc"]))),
                allowed=", ".join(sorted(model.model_fields)),
            )
            for issue in error.errors()
        ) from None


def _does_not_render(text: str, error: Exception, values: Mapping[str, Any], path: Path, key: str) -> InputError:
    return InputError(f"{text!r} does not render: {error}", file=path, key=key, allowed=", ".join(sorted(values)))
