"""YAML with line numbers: every mapping and list remembers where it stood, so that an error can point at its line."""

import difflib
import gc
import json
from collections.abc import Iterator
from collections.abc import Mapping as AnyMapping
from collections.abc import Sequence as AnySequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, cast

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


class Sections(AnyMapping[str, Any]):
    """A file's top-level mapping whose values are built when they are asked for.

    A search space of 300 kB holds some 400 keys and an entry selects a few; building only those is what keeps
    planning fast. The whole file is parsed, and searched for duplicate keys, all the same.
    """

    def __init__(self, loader: "_Loader", node: yaml.MappingNode, path: Path) -> None:
        loader.flatten_mapping(node)
        self._path = path
        self.line: int = node.start_mark.line + 1
        self.lines: dict[str, int] = {}
        self._loader = loader
        self._nodes: dict[str, yaml.Node] = {}
        self._built: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_document(key_node)
            self.lines[key] = key_node.start_mark.line + 1
            self._nodes[key] = value_node

    def __getitem__(self, key: str) -> Any:
        if key not in self._built:
            with _as_input_errors(self._path):
                self._built[key] = self._loader.construct_document(self._nodes[key])
        return self._built[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._nodes)

    def __len__(self) -> int:
        return len(self._nodes)


class Items(AnySequence[Any]):
    """A file's top-level list whose items are built when they are asked for; see Sections."""

    def __init__(self, loader: "_Loader", node: yaml.SequenceNode, path: Path) -> None:
        self._path = path
        self.line: int = node.start_mark.line + 1
        self.lines: list[int] = [item.start_mark.line + 1 for item in node.value]
        self._loader = loader
        self._nodes: list[yaml.Node] = node.value
        self._built: dict[int, Any] = {}

    def __getitem__(self, index: Any) -> Any:
        if index not in self._built:
            with _as_input_errors(self._path):
                self._built[index] = self._loader.construct_document(self._nodes[index])
        return self._built[index]

    def __len__(self) -> int:
        return len(self._nodes)


class _Loader(yaml.CSafeLoader):
    """The C parser, with positions kept and the type of equal scalars found once."""

    def __init__(self, text: bytes) -> None:
        super().__init__(text)
        self._tags: dict[str, str] = {}

    def resolve(self, kind: type[yaml.Node], value: str, implicit: Any) -> str:
        """Return a node's tag. The same few keys and numbers fill a search space, so plain scalars are remembered."""
        # `implicit` is a pair for scalars only.
        plain = kind is yaml.ScalarNode and implicit[0]
        tag = self._tags.get(value) if plain else None
        if tag is None:
            tag = cast(str, super().resolve(kind, value, implicit))  # type: ignore[no-untyped-call]
            if plain:
                self._tags[value] = tag
        return tag


def _construct_mapping(loader: _Loader, node: yaml.MappingNode) -> Any:
    mapping = Mapping()
    mapping.line = node.start_mark.line + 1
    mapping.lines = {}
    yield mapping
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        key = loader.construct_object(key_node, deep=True)
        mapping.lines[key] = key_node.start_mark.line + 1
        mapping[key] = loader.construct_object(value_node, deep=True)


def _construct_sequence(loader: _Loader, node: yaml.SequenceNode) -> Any:
    sequence = Sequence()
    sequence.line = node.start_mark.line + 1
    sequence.lines = [item.start_mark.line + 1 for item in node.value]
    yield sequence
    sequence.extend(loader.construct_object(item, deep=True) for item in node.value)


_Loader.add_constructor("tag:yaml.org,2002:map", _construct_mapping)
_Loader.add_constructor("tag:yaml.org,2002:seq", _construct_sequence)


def read_bytes(path: Path) -> bytes:
    """Return a file's bytes; raises InputError where there is no such file."""
    try:
        return path.read_bytes()
    except (FileNotFoundError, IsADirectoryError, NotADirectoryError):
        raise InputError("no such file", file=path) from None
    except OSError as error:
        raise InputError(f"cannot be read: {error.strerror}", file=path) from None


def load(path: Path) -> Any:
    """Parse a YAML file into Mapping, Sequence and scalars.

    Raises InputError with file and line: missing file, bad bytes (NUL, tab indent), bad syntax, duplicate keys.
    """
    return parse(read_bytes(path), path)


def parse(text: bytes, path: Path) -> Any:
    """Parse the text of a YAML file; `path` is only what errors call it."""
    with _no_garbage_collection(), _as_input_errors(path, text):
        loader, node = _compose(text, path)
        return None if node is None else loader.construct_document(node)


def parse_lazily(text: bytes, path: Path) -> Any:
    """Parse like `parse`, but return a top-level mapping as Sections and a top-level list as Items."""
    with _no_garbage_collection(), _as_input_errors(path, text):
        loader, node = _compose(text, path)
        if isinstance(node, yaml.MappingNode):
            return Sections(loader, node, path)
        if isinstance(node, yaml.SequenceNode):
            return Items(loader, node, path)
        return None if node is None else loader.construct_document(node)


def _compose(text: bytes, path: Path) -> tuple[_Loader, yaml.Node | None]:
    if (at := text.find(b"\0")) >= 0:
        # libyaml names no line for it.
        raise InputError("NUL byte", file=path, line=text.count(b"\n", 0, at) + 1, do="remove it")
    loader = _Loader(text)
    node = loader.get_single_node()
    if node is not None:
        _refuse_duplicate_keys(node, path)
    return loader, node


def _refuse_duplicate_keys(root: yaml.Node, path: Path) -> None:
    """Raise InputError for two equal keys in one mapping: YAML keeps the last, so the other setting is lost."""
    nodes: list[Any] = [root]
    # An alias leads to the same node again, and a node that holds itself would never end.
    seen: set[int] = set()
    while nodes:
        node = nodes.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        inner = node.value
        if type(node) is yaml.MappingNode:
            if len({key.value for key, _ in inner if type(key) is yaml.ScalarNode}) < len(inner):
                _raise_for_duplicate(node, path)
            nodes += [value for _, value in inner if type(value) is not yaml.ScalarNode]
        elif type(node) is yaml.SequenceNode:
            nodes += [value for value in inner if type(value) is not yaml.ScalarNode]


def _raise_for_duplicate(node: yaml.MappingNode, path: Path) -> None:
    first: dict[tuple[str, str], int] = {}
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode):
            continue
        line = key.start_mark.line + 1
        if (key.tag, key.value) in first:
            found = f"duplicate key {key.value!r} again; first on line {first[key.tag, key.value]}"
            raise InputError(found, file=path, line=line, do="keep one of the two")
        first[key.tag, key.value] = line


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Hold the collector back: it would walk the growing tree of nodes again and again, for half of the parse time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _as_input_errors(path: Path, text: bytes = b"") -> Iterator[None]:
    try:
        yield
    except yaml.MarkedYAMLError as error:
        line = _line(error.problem_mark or error.context_mark)
        lines = text.splitlines()
        if line is not None and lines:
            line = min(line, len(lines))  # something left open is noticed on the line after the last
        tabbed = line is not None and bool(lines) and b"\t" in lines[line - 1]
        hint = "the line holds a tab: indent with spaces" if tabbed else None
        raise InputError(f"not YAML: {error.problem or error.context}", file=path, line=line, do=hint) from None
    except (yaml.YAMLError, UnicodeDecodeError, ValueError, TypeError) as error:
        # ValueError and TypeError: a date that is none (2026-02-31), a mapping as a key.
        raise InputError(f"not YAML: {' '.join(str(error).split())}", file=path) from None


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
    location = at + _in_file(data, at, inner)
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


def _in_file(data: Any, at: Location, location: Location) -> Location:
    """Return a location without the names of union members, which pydantic puts between keys of the file."""
    for step in at:
        data = data[step]
    kept: list[int | str] = []
    for i, part in enumerate(location):
        try:
            data = data[part]
        except (KeyError, IndexError, TypeError):
            if i + 1 < len(location):
                continue
        kept.append(part)
    return tuple(kept)


def _fields_at(model: type[BaseModel], location: Location) -> list[str]:
    """Return the keys that a model allows at a location, by walking its JSON schema."""
    schema = model.model_json_schema(by_alias=True)
    node = schema
    for part in location:
        node = _resolve(schema, node)
        properties = node.get("properties", {})
        members = node.get("discriminator", {}).get("mapping", {})
        if part in members:
            node = {"$ref": members[part]}
        elif part in properties:
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
