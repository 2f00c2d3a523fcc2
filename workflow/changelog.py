"""perf-changelog.yaml: the append-only log whose entries say what is measured (InferenceX format)."""

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, Field

from workflow import yamlfile
from workflow.config import ChangelogSelection
from workflow.contract import InputError, Strict

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
    scenario_type: tuple[ScenarioType, ...] | None = None
    """Restricts the entry to these scenarios; absent means all."""
    evals_only: bool = False
    all_evals: bool = False
    append_only: bool = False
    eval_min_prefill_ep: int | None = Field(default=None, ge=1)


@dataclass(frozen=True)
class LoggedEntry:
    """An entry with its place in the log."""

    index: int
    """0 is the oldest."""
    line: int
    file: Path
    entry: Entry

    @property
    def title(self) -> str:
        """Return how the entry is called in messages and reports."""
        return f"{self.file}:{self.line} (entry {self.index}, {self.entry.pr_link})"


def load_changelog(path: Path) -> tuple[LoggedEntry, ...]:
    """Read the whole log, oldest entry first; raises InputError with file and line."""
    data = yamlfile.load(path)
    if not isinstance(data, yamlfile.Sequence) or not data:
        raise InputError("the file holds no list of entries", file=path, line=1, allowed="a list of changelog entries")
    return tuple(
        LoggedEntry(index, data.lines[index], path, yamlfile.validate(Entry, data, path, (index,)))
        for index in range(len(data))
    )


def select_entries(log: tuple[LoggedEntry, ...], selection: ChangelogSelection) -> tuple[LoggedEntry, ...]:
    """Return the entries that `selection.entries` names; raises InputError where it names none."""
    wanted = str(selection.entries)
    if wanted == "newest":
        return log[-1:]
    if last := re.fullmatch(r"last (\d+)", wanted):
        chosen = log[-int(last[1]) :] if int(last[1]) else ()
    elif pull := re.fullmatch(r"#(\d+)", wanted):
        chosen = tuple(item for item in log if item.entry.pr_link.endswith(f"/pull/{pull[1]}"))
    elif re.fullmatch(r"-?\d+", wanted):
        index = int(wanted)
        chosen = (log[index],) if -len(log) <= index < len(log) else ()
    else:
        chosen = tuple(item for item in log if any(fnmatch.fnmatchcase(key, wanted) for key in item.entry.config_keys))
    if not chosen:
        raise InputError(
            f"no entry of {log[0].file} is selected by {wanted!r}",
            key="changelog.entries",
            allowed=f"newest, last N, an index from {-len(log)} to {len(log) - 1}, #<pull request>, a key pattern",
        )
    return chosen
