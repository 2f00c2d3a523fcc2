"""Entries x search spaces -> matrix rows, one row for each point that is measured (InferenceX format and rules)."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from workflow import yamlfile
from workflow.changelog import Kebab, LoggedEntry
from workflow.contract import InputError

# InferenceX caps what it counts on at 3.0 TB decimal, in MiB.
DRAM_CAP_MIB = 2_861_022


class Component(Kebab):
    """A backend or router, with the version that has to serve."""

    name: str
    version: str | None = None


class Hardware(Kebab):
    """What one node of a cluster has."""

    available_cpu_dram_mib: int = Field(gt=0)
    gpus_per_node: int = Field(gt=0)


class Runners(Kebab):
    """runners.yaml."""

    labels: dict[str, tuple[str, ...]]
    hardware: dict[str, Hardware]


class SearchSpaceEntry(Kebab):
    """One line of an agentic search space, as a human writes it: defaults allowed."""

    tp: int = Field(gt=0)
    pp: int = Field(default=1, gt=0)
    dcp_size: int = Field(default=1, gt=0)
    pcp_size: int = Field(default=1, gt=0)
    ep: int = Field(default=1, gt=0)
    dp_attn: bool = False
    spec_decoding: Literal["none", "mtp", "draft_model"] = "none"
    kv_offloading: Literal["none", "dram"]
    kv_offload_backend: Component | None = None
    router: Component | None = None
    conc_list: tuple[int, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _backend_iff_offloading(self) -> "SearchSpaceEntry":
        if self.kv_offloading == "none" and self.kv_offload_backend is not None:
            raise ValueError("kv-offload-backend is not allowed with kv-offloading: none")
        if self.kv_offloading == "dram" and self.kv_offload_backend is None:
            raise ValueError("kv-offload-backend is required with kv-offloading: dram")
        return self


class AgenticScenario(Kebab):
    """The agentic-coding scenario of one config key."""

    dram_utilization: float | None = Field(default=None, gt=0, le=1)
    search_space: tuple[SearchSpaceEntry, ...] = Field(min_length=1)


class Scenarios(Kebab):
    """The scenarios of one config key."""

    agentic_coding: tuple[AgenticScenario, ...] = ()


class SearchSpace(Kebab):
    """One config key of a *-master.yaml."""

    image: str
    model: str
    model_prefix: str
    runner: str
    precision: str
    framework: str
    multinode: bool
    router: Component | None = None
    scenarios: Scenarios


class Row(Kebab):
    """One single-node agentic point as InferenceX hands it to a job: no defaults, every value stated."""

    image: str
    model: str
    model_prefix: str
    precision: str
    framework: str
    runner: str
    tp: int
    pp: int
    dcp_size: int
    pcp_size: int
    ep: int
    dp_attn: bool
    spec_decoding: str
    conc: int
    kv_offloading: Literal["none", "dram"]
    kv_offload_backend: Component | None
    router: Component | None
    total_cpu_dram_gb: int
    """Host memory for the offload tier in decimal GB; 0 without offload."""
    duration: int
    """Seconds of the profiling window in InferenceX; ours is `replay.duration_s`."""
    exp_name: str
    scenario_type: Literal["agentic-coding"]

    @property
    def gpus(self) -> int:
        """Return the GPUs that one point takes."""
        return self.tp * self.pp * self.pcp_size


@dataclass(frozen=True)
class PlannedRow:
    """A row with where it came from."""

    row: Row
    config_key: str
    file: Path
    line: int
    entry: LoggedEntry

    @property
    def origin(self) -> str:
        """Return the place in words, for messages."""
        return f"{self.file}:{self.line} ({self.config_key}, conc {self.row.conc})"


@dataclass(frozen=True)
class Master:
    """All search spaces of the *-master.yaml files, unchecked until an entry selects them."""

    places: dict[str, tuple[Path, Any]]
    """Config key -> file and its loaded data."""

    def search_space(self, key: str) -> SearchSpace:
        """Check and return one config key; raises InputError with file and line."""
        path, data = self.places[key]
        return yamlfile.validate(SearchSpace, data, path, (key,))

    def line(self, key: str, *location: int | str) -> int:
        """Return the line of a part of a config key."""
        return yamlfile.line_of(self.places[key][1], (key, *location)) or 1


def load_master(paths: list[Path]) -> Master:
    """Read *-master.yaml files; raises InputError for a key that stands in two of them."""
    places: dict[str, tuple[Path, Any]] = {}
    for path in paths:
        data = yamlfile.load(path)
        if not isinstance(data, yamlfile.Mapping):
            raise InputError("the file holds no config keys", file=path, line=1)
        for key in data:
            if key in places:
                raise InputError(f"config key {key!r} is also in {places[key][0]}", file=path, line=data.lines[key])
            places[key] = (path, data)
    return Master(places)


def load_runners(path: Path) -> Runners:
    """Read runners.yaml."""
    return yamlfile.validate(Runners, yamlfile.load(path), path)


def resolve_keys(entry: LoggedEntry, master: Master) -> list[str]:
    """Return the config keys of an entry, wildcards expanded, order kept; raises InputError for one without a match."""
    keys: dict[str, None] = {}
    for pattern in entry.entry.config_keys:
        regex = re.compile(".*".join(re.escape(part) for part in pattern.split("*")))
        found = [key for key in master.places if regex.fullmatch(key)]
        if not found:
            raise InputError(
                f"{pattern!r} matches no config key",
                file=entry.file,
                line=entry.line,
                key="config-keys",
                allowed=", ".join(sorted(master.places)) if len(master.places) <= 12 else f"{len(master.places)} keys",
            )
        keys.update(dict.fromkeys(found))
    return list(keys)


def plan_rows(entries: tuple[LoggedEntry, ...], master: Master, runners: Runners) -> list[PlannedRow]:
    """Return the rows of all entries, in their order; a key that two entries name is planned once, by the first.

    Raises InputError: no match, a search space that does not fit, a runner without hardware facts, or no row at all.
    """
    planned: list[PlannedRow] = []
    seen: set[str] = set()
    for entry in entries:
        for key in resolve_keys(entry, master):
            if key in seen:
                continue
            seen.add(key)
            planned += _rows_of(key, entry, master, runners)
    if not planned:
        titles = "; ".join(entry.title for entry in entries)
        raise InputError(f"nothing to measure: {titles} selects no agentic-coding point", key="changelog")
    return planned


def _rows_of(key: str, entry: LoggedEntry, master: Master, runners: Runners) -> list[PlannedRow]:
    space = master.search_space(key)
    path = master.places[key][0]
    planned = []
    for i, scenario in enumerate(space.scenarios.agentic_coding):
        for j, line in enumerate(scenario.search_space):
            place = master.line(key, "scenarios", "agentic-coding", i, "search-space", j)
            hardware = runners.hardware.get(space.runner)
            if hardware is None:
                raise InputError(
                    f"runner {space.runner!r} has no hardware facts",
                    file=path,
                    line=master.line(key, "runner"),
                    allowed=", ".join(sorted(runners.hardware)),
                )
            if line.kv_offloading == "dram" and scenario.dram_utilization is None:
                raise InputError("kv-offloading: dram needs a dram-utilization", file=path, line=place, key=key)
            gpus = line.tp * line.pp * line.pcp_size
            if gpus > hardware.gpus_per_node:
                raise InputError(f"{gpus} GPUs on a node of {hardware.gpus_per_node}", file=path, line=place, key=key)
            for conc in line.conc_list:
                planned.append(PlannedRow(_row(space, scenario, line, hardware, conc), key, path, place, entry))
    return planned


def _row(space: SearchSpace, scenario: AgenticScenario, line: SearchSpaceEntry, hardware: Hardware, conc: int) -> Row:
    budget = 0
    if line.kv_offloading == "dram":
        assert scenario.dram_utilization is not None
        budget = dram_budget_gb(hardware, scenario.dram_utilization, line.tp * line.pp * line.pcp_size)
    backend = line.kv_offload_backend
    arm = "kvnone" if backend is None else f"kvdram-{backend.name}"
    spec = "" if line.spec_decoding == "none" else f"_spec-{line.spec_decoding}"
    return Row.model_validate(
        {
            **{name: getattr(space, name) for name in ("image", "model", "precision", "framework", "runner")},
            "model-prefix": space.model_prefix,
            **line.model_dump(by_alias=True, exclude={"conc_list"}),
            "router": line.router or space.router,
            "kv-offload-backend": backend,
            "conc": conc,
            "total-cpu-dram-gb": budget,
            "duration": 3600,
            "exp-name": f"{space.model_prefix}_tp{line.tp}_conc{conc}_{arm}{spec}",
            "scenario-type": "agentic-coding",
        }
    )


def dram_budget_gb(hardware: Hardware, utilization: float, gpus: int) -> int:
    """Return the host memory of an offload tier in decimal GB, as InferenceX computes it.

    floor(min(available MiB, 2861022) * 1048576 * dram-utilization * gpus / gpus per node / 1e9)
    """
    available = min(hardware.available_cpu_dram_mib, DRAM_CAP_MIB) * 1_048_576
    return int(available * utilization * gpus / hardware.gpus_per_node / 1e9)
