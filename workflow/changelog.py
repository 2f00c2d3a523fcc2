"""perf-changelog.yaml: the append-only log whose entries say what is measured (InferenceX format)."""

import difflib
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import ConfigDict, Field, model_validator

from workflow import yamlfile
from workflow.contract import InputError, Strict, canonical_json
from workflow.revision import file_at

if TYPE_CHECKING:
    from workflow.config import ChangelogSelection

ScenarioType = Literal["fixed-seq-len", "agentic-coding"]


def kebab(name: str) -> str:
    """Return the InferenceX spelling of a field's name."""
    return name.replace("_", "-")


class Kebab(Strict):
    """Base of the models of InferenceX's own files, which write their keys with dashes."""

    model_config = ConfigDict(alias_generator=kebab)


class Entry(Kebab):
    """One entry of the changelog."""

    config_keys: tuple[str, ...] = Field(min_length=1)
    """Keys of the search spaces; `*` is a wildcard that is matched against the whole key."""
    description: tuple[str, ...] = Field(min_length=1)
    pr_link: str
    scenario_type: tuple[ScenarioType, ...] | None = Field(default=None, min_length=1)
    """Restricts the entry to these scenarios; absent means all."""
    evals_only: bool = False
    all_evals: bool = False
    append_only: bool = False
    eval_min_prefill_ep: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _appends_no_evals(self) -> "Entry":
        if self.append_only and (self.evals_only or self.all_evals or self.eval_min_prefill_ep is not None):
            raise ValueError("append-only cannot be combined with evals-only, all-evals or eval-min-prefill-ep")
        return self


@dataclass(frozen=True)
class LoggedEntry:
    """An entry with its place in the log."""

    index: int
    """0 is the oldest."""
    line: int
    file: Path
    entry: Entry
    link_line: int = 1
    description_lines: tuple[int, ...] = ()

    @property
    def title(self) -> str:
        """Return how the entry is called in messages and reports."""
        return f"{self.file}:{self.line} (entry {self.index}, {self.entry.pr_link})"


@dataclass(frozen=True)
class Change:
    """What happened to one entry between two versions of the log."""

    kind: Literal["added", "edited", "withdrawn", "moved"]
    old: LoggedEntry | None
    new: LoggedEntry | None

    @property
    def message(self) -> str:
        """Return what happened and what it means for the plan, in one line."""
        if self.new is None:
            assert self.old is not None
            return f"{self.old.title}: withdrawn; its results are kept and it plans nothing"
        if self.old is None:
            return f"{self.new.title}: added"
        if self.kind == "moved":
            return f"{self.new.title}: moved from entry {self.old.index}; it plans nothing"
        before, after = _plain(self.old.entry), _plain(self.new.entry)
        fields = [name for name in {**before, **after} if before.get(name) != after.get(name)]
        told = ", ".join(f"{name} was {before.get(name)!r} and is {after.get(name)!r}" for name in fields)
        how = f"entries={self.new.index}"
        return f"{self.new.title}: edited: {told}; an edit plans nothing, plan it with --config changelog.{how}"


@dataclass(frozen=True)
class Selection:
    """The entries to plan, and what else changed in the log."""

    entries: tuple[LoggedEntry, ...]
    """May be empty where a change only withdrew, moved or edited entries: `messages` then says so."""
    changes: tuple[Change, ...] = ()
    """Empty where entries were selected by hand."""
    log: tuple[LoggedEntry, ...] = ()
    """The whole log, where it had to be read for the selection."""

    @property
    def messages(self) -> tuple[str, ...]:
        """Return a line for each change that plans nothing."""
        return tuple(change.message for change in self.changes if change.kind != "added")


def load_changelog(path: Path) -> tuple[LoggedEntry, ...]:
    """Read the whole log, oldest entry first; raises InputError with file and line."""
    return parse_changelog(yamlfile.read_bytes(path), path)


def parse_changelog(text: bytes, path: Path) -> tuple[LoggedEntry, ...]:
    """Parse the text of a log; `path` is only what errors call it."""
    data = yamlfile.parse_lazily(text, path)
    if not isinstance(data, yamlfile.Items) or not data:
        raise InputError("the file holds no list of entries", file=path, line=1, allowed="a list of changelog entries")
    return _logged(data, path, 0)


def changes(base: Sequence[LoggedEntry], head: Sequence[LoggedEntry]) -> tuple[Change, ...]:
    """Compare two versions of the log as parsed data, in the order of `head`; layout and quoting are no changes.

    An entry is edited where one with two of the same link, keys and description stands between the same neighbours.
    """
    old, new = [_identity(item) for item in base], [_identity(item) for item in head]
    found: list[Change] = []
    matcher = difflib.SequenceMatcher(None, old, new, autojunk=False)
    for tag, i1, i2, j1, j2 in matcher.get_opcodes():
        if tag != "equal":
            found += _paired(base[i1:i2], head[j1:j2])
    return tuple(_moved(found))


def changes_of_texts(base: tuple[Path, bytes], head: tuple[Path, bytes]) -> tuple[Change, ...]:
    """Compare the texts of two versions of the log; raises InputError where one of them is no log."""
    (base_path, base_text), (head_path, head_text) = base, head
    if _appends(base_text, head_text):
        # The usual change. No old entry can have changed, so only the new ones are parsed.
        try:
            return tuple(Change("added", None, item) for item in _appended(base_text, head_text, head_path))
        except InputError:
            # An alias of something in the old part; a real mistake is raised again by the reading of the whole log.
            return changes(parse_changelog(base_text, base_path), parse_changelog(head_text, head_path))
    old = parse_changelog(base_text, base_path) if base_text.strip() else ()
    return changes(old, parse_changelog(head_text, head_path))


def select(root: Path, selection: "ChangelogSelection") -> Selection:
    """Return the entries to plan from `selection.file` below the checkout `root`.

    With `selection.base` those that were added since that git revision; else by hand, see `select_entries`. Raises
    InputError: no such file or revision, no log, nothing changed, nothing selected.
    """
    path = root / selection.file
    if selection.base is None:
        log = load_changelog(path)
        return Selection(select_entries(log, selection), log=log)
    old = file_at(root, selection.base, selection.file)
    base = (Path(f"{selection.file}@{selection.base}"), old)
    found = changes_of_texts(base, (path, yamlfile.read_bytes(path)))
    if not found:
        raise InputError(
            f"no entry changed since {selection.base}",
            file=path,
            key="changelog.base",
            do="append an entry, or select one with changelog.entries and without changelog.base",
        )
    return Selection(tuple(change.new for change in found if change.kind == "added" and change.new), found)


def select_entries(log: Sequence[LoggedEntry], selection: "ChangelogSelection") -> tuple[LoggedEntry, ...]:
    """Return the entries that `selection.entries` names, in the order of the log; raises InputError for none."""
    wanted = str(selection.entries).strip()
    if wanted == "newest":
        chosen = tuple(log[-1:])
    elif last := re.fullmatch(r"last\s+(\d+)", wanted):
        chosen = tuple(log[-int(last[1]) :]) if int(last[1]) else ()
    elif pull := re.fullmatch(r"#(\d+)", wanted):
        chosen = tuple(item for item in log if item.entry.pr_link.rstrip("/").endswith(f"/pull/{pull[1]}"))
    elif re.fullmatch(r"-?\d+", wanted):
        index = int(wanted)
        chosen = (log[index],) if -len(log) <= index < len(log) else ()
    else:
        chosen = tuple(item for item in log if any(_names(key, wanted) for key in item.entry.config_keys))
    if not chosen:
        raise InputError(
            f"no entry of {log[0].file} is selected by {wanted!r}",
            key="changelog.entries",
            allowed=f"newest, last N, an index from {-len(log)} to {len(log) - 1}, #<pull request>, a key pattern",
        )
    return chosen


def _names(key: str, wanted: str) -> bool:
    """Return whether an entry's key, which may be a pattern itself, is meant by the wanted key or pattern."""
    return fnmatch.fnmatchcase(key, wanted) or ("*" in key and fnmatch.fnmatchcase(wanted, key))


def _logged(data: yamlfile.Items, path: Path, offset: int) -> tuple[LoggedEntry, ...]:
    logged = []
    for index, line in enumerate(data.lines):
        entry = yamlfile.validate(Entry, data, path, (index,))
        item = data[index]
        lines = tuple(item["description"].lines)
        logged.append(LoggedEntry(offset + index, line, path, entry, item.lines["pr-link"], lines))
    return tuple(logged)


def _appends(base: bytes, head: bytes) -> bool:
    """Return whether `head` is `base` and new items after it, so that no old item can have changed."""
    if not base.endswith(b"\n") or not head.startswith(base):
        return False
    # Anything but a new item, such as an indented line, belongs to the last old entry.
    return next((line.startswith(b"- ") for line in head[len(base) :].splitlines() if line.strip()), True)


def _appended(base: bytes, head: bytes, path: Path) -> tuple[LoggedEntry, ...]:
    """Return the entries of `head` after `base`, which `_appends` has found to be whole items."""
    tail = head[len(base) :]
    if not tail.strip():
        return ()
    known = len(re.findall(rb"^- ", base, re.MULTILINE))
    # Lines, not text, in front: the new entries are read as if they stood alone and keep their line numbers.
    data = yamlfile.parse_lazily(b"\n" * base.count(b"\n") + tail, path)
    if not isinstance(data, yamlfile.Items):
        raise InputError("the file holds no list of entries", file=path, line=1, allowed="a list of changelog entries")
    return _logged(data, path, known)


def _plain(entry: Entry) -> dict[str, Any]:
    return entry.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _identity(item: LoggedEntry) -> bytes:
    return canonical_json(_plain(item.entry))


def _paired(old: Sequence[LoggedEntry], new: Sequence[LoggedEntry]) -> list[Change]:
    """Tell edits from withdrawals and additions in a stretch of the log where the two versions differ."""
    left = list(old)
    found: list[Change] = []
    for item in new:
        likeness = [(_likeness(other.entry, item.entry), other) for other in left]
        alike, before = max(likeness, key=lambda pair: pair[0], default=(0, None))
        before = before if alike >= 2 else None
        if before is not None:
            left.remove(before)
        found.append(Change("added" if before is None else "edited", before, item))
    return [*(Change("withdrawn", item, None) for item in left), *found]


def _likeness(old: Entry, new: Entry) -> int:
    """Return how many of link, keys and description two entries share.

    Two make an edit. One does not: entries of one pull request share a link, and new work on a key shares the key.
    """
    same = (old.pr_link == new.pr_link, old.config_keys == new.config_keys, old.description == new.description)
    return sum(same)


def _moved(found: list[Change]) -> list[Change]:
    """Join a withdrawal and an addition of the same entry, which only changed its place."""
    gone = {_identity(change.old): change for change in found if change.kind == "withdrawn" and change.old}
    result: list[Change] = []
    joined: list[Change] = []
    for change in found:
        partner = gone.pop(_identity(change.new), None) if change.kind == "added" and change.new else None
        if partner is None:
            result.append(change)
        else:
            joined.append(partner)
            result.append(Change("moved", partner.old, change.new))
    return [change for change in result if change not in joined]
