"""YAML with line numbers: every mapping and list remembers where it stood, so that an error can point at its line."""

import difflib
import json
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ValidationError

from workflow.contract import InputError

Model = TypeVar("Model", bound=BaseModel)
Location = tuple[int | str, ...]


class Mapping(dict[str, Any]):
    """A YAML mapping; `lines[key]` is the 1-based line of the key, `line` that of the mapping itself."""

    __slots__ = ("line", "lines")

    line: int
    lines: dict[str, int]


class Sequence(list[Any]):
    """A YAML list; `lines[i]` is the 1-based line of item i, `line` that of the list itself."""

    __slots__ = ("line", "lines")

    line: int
    lines: list[int]


class _DuplicateKey(yaml.constructor.ConstructorError):
    """Two equal keys in one mapping: YAML keeps the last in silence, so a setting would be lost."""


class _Loader(yaml.CSafeLoader):
    """The C parser, with positions kept and duplicate keys refused."""


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> Any:
    mapping = Mapping()
    mapping.line = node.start_mark.line + 1
    mapping.lines = {}
    yield mapping
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        line = key_node.start_mark.line + 1
        if key in mapping:
            problem = f"key {key!r} again; first on line {mapping.lines[key]}"
            raise _DuplicateKey(None, None, problem, key_node.start_mark)
        mapping.lines[key] = line
        mapping[key] = loader.construct_object(value_node, deep=True)


def _construct_sequence(loader: _Loader, node: yaml.SequenceNode) -> Any:
    sequence = Sequence()
    sequence.line = node.start_mark.line + 1
    sequence.lines = [item.start_mark.line + 1 for item in node.value]
    yield sequence
    sequence.extend(loader.construct_object(item, deep=True) for item in node.value)


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:seq", _construct_sequence)


def load(path: Path) -> Any:
    """Parse a YAML file into Mapping, Sequence and scalars.

    Raises InputError with file and line: missing file, bad bytes (NUL, tab indent), bad syntax, duplicate keys.
    """
    try:
        text = path.read_bytes()
    except (FileNotFoundError, IsADirectoryError):
        raise InputError("no such file", file=path) from None
    return parse(text, path)


def parse(text: bytes, path: Path) -> Any:
    """Parse the text of a YAML file; `path` is only what errors call it."""
    try:
        return yaml.load(text, _Loader)  # noqa: S506 - a SafeLoader with positions
    except _DuplicateKey as error:
        raise InputError(
            f"duplicate {error.problem}", file=path, line=_line(error.problem_mark), do="keep one of the two"
        ) from None
    except yaml.MarkedYAMLError as error:
        raise InputError(
            f"not YAML: {error.problem or error.context}",
            file=path,
            line=_line(error.problem_mark or error.context_mark),
        ) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(f"not YAML: {error}", file=path) from None


def _line(mark: Any) -> int | None:
    return None if mark is None else mark.line + 1


def line_of(data: Any, location: Location) -> int | None:
    """Return the line of the deepest part of `location` that exists in loaded data."""
    line = getattr(data, "line", None)
    for part in location:
        lines = getattr(data, "lines", None)
        try:
            line = lines[part]  # type: ignore[index]
            data = data[part]
        except (KeyError, IndexError, TypeError):
            return line
    return line


def validate(model: type[Model], data: Any, path: Path, at: Location = ()) -> Model:
    """Check the part of loaded data at location `at` against a model.

    Raises InputError, with one line per mistake: file, line, key, what was found and what is allowed.
    """
    part = data
    for step in at:
        part = part[step]
    try:
        # Through JSON, since strict mode takes a list for a tuple there and still refuses "4" for 4.
        return model.model_validate_json(json.dumps(part, default=str))
    except ValidationError as error:
        raise InputError.join(_explain(model, data, path, at, dict(issue)) for issue in error.errors()) from None


def _explain(model: type[BaseModel], data: Any, path: Path, at: Location, issue: dict[str, Any]) -> InputError:
    inner: Location = tuple(issue["loc"])
    location = at + inner
    key = ".".join(str(part) for part in location) or None
    line = line_of(data, location)
    if issue["type"] == "extra_forbidden":
        fields = _fields_at(model, inner[:-1])
        close = difflib.get_close_matches(str(inner[-1]), fields, n=1)
        hint = f"did you mean {close[0]!r}?" if close else "remove it, or mend its name"
        found = f"unknown key {inner[-1]!r}"
        return InputError(found, file=path, line=line, key=key, allowed=", ".join(fields), do=hint)
    if issue["type"] == "missing":
        return InputError("missing key", file=path, line=line_of(data, location[:-1]), key=key)
    message = issue["msg"].removeprefix("Value error, ")
    found = issue["input"]
    shown = f"found {found!r}: {message}" if isinstance(found, str | int | float | bool | None) else message
    return InputError(shown, file=path, line=line, key=key)


def _fields_at(model: type[BaseModel], location: Location) -> list[str]:
    """Return the keys that a model allows at a location, by walking its JSON schema."""
    schema = model.model_json_schema(by_alias=True)
    node = schema
    for part in location:
        node = _resolve(schema, node)
        properties = node.get("properties", {})
        if part in properties:
            node = properties[part]
        elif isinstance(part, int):
            node = node.get("items", node)
        else:
            node = node.get("additionalProperties", node) or {}
        node = _resolve(schema, node)
    return sorted(_resolve(schema, node).get("properties", {}))


def _resolve(schema: dict[str, Any], node: Any) -> dict[str, Any]:
    """Follow $ref, and the one object among the members of an optional."""
    resolved: dict[str, Any] = node if isinstance(node, dict) else {}
    for option in resolved.get("anyOf", []):
        if "$ref" in option or option.get("type") in ("object", "array"):
            resolved = option
    if "$ref" in resolved:
        target: dict[str, Any] = schema["$defs"][resolved["$ref"].rsplit("/", 1)[1]]
        return target
    return resolved
