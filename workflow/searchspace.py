"""*-master.yaml and runners.yaml as people write them: search spaces, defaults, host budgets (InferenceX's formats)."""

import difflib
import re
from collections.abc import Mapping as AnyMapping
from collections.abc import Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, field_validator, model_validator

from workflow import yamlfile
from workflow.changelog import Kebab, LoggedEntry, ScenarioType
from workflow.contract import InputError
from workflow.revision import file_at

# InferenceX caps what it counts on at 3.0 TB decimal, in MiB.
DRAM_CAP_MIB = 2_861_022

CLUSTER_LABEL = "cluster:"

SpecDecoding = Literal["none", "mtp", "draft_model"]


class Component(Kebab):
    """A backend or router, with the version that has to serve."""

    name: str = Field(min_length=1)
    version: str | None = Field(default=None, min_length=1)

    @field_validator("version")
    @classmethod
    def _not_an_image(cls, version: str | None) -> str | None:
        if version is not None and version.startswith("image:"):
            raise ValueError("a version is a release or a commit, not an image")
        return version


class Router(Component):
    """The router in front of the engines of a point; InferenceX wants its version stated."""

    version: str = Field(min_length=1)


class Hardware(Kebab):
    """What one node of a cluster has."""

    available_cpu_dram_mib: int = Field(gt=0)
    gpus_per_node: int = Field(gt=0)


class Runners(Kebab):
    """runners.yaml."""

    labels: dict[str, tuple[str, ...]]
    hardware: dict[str, Hardware] = {}


class Parallelism(Kebab):
    """How one server spreads a model over GPUs, beside its tensor parallel size."""

    pp: int = Field(default=1, gt=0)
    dcp_size: int = Field(default=1, gt=0)
    pcp_size: int = Field(default=1, gt=0)


class Worker(Parallelism):
    """One role of a multi-node deployment."""

    num_worker: int = Field(ge=0)
    """0 for the decode role of an aggregated deployment, whose prefill workers do both."""
    tp: int = Field(gt=0)
    ep: int
    dp_attn: bool
    hardware: str | None = Field(default=None, min_length=1)
    additional_settings: tuple[str, ...] | None = None

    @model_validator(mode="after")
    def _context_parallel(self) -> "Worker":
        _check_context_parallel(self.tp, self.dcp_size)
        return self


class SearchSpaceEntry(Parallelism):
    """One line of a search space: a topology and its concurrencies. `tp` for one node, or `prefill` and `decode`."""

    tp: int | None = Field(default=None, gt=0)
    ep: int = 1
    dp_attn: bool = False
    prefill: Worker | None = None
    decode: Worker | None = None
    spec_decoding: SpecDecoding = "none"
    router: Router | None = None
    kv_p2p_transfer: str | None = Field(default=None, min_length=1)
    conc_start: int | None = Field(default=None, gt=0)
    conc_end: int | None = Field(default=None, gt=0)
    conc_list: tuple[int, ...] | None = None

    @model_validator(mode="after")
    def _one_topology(self) -> "SearchSpaceEntry":
        workers = (self.prefill, self.decode)
        if (self.tp is None) == (workers == (None, None)) or (self.tp is None and None in workers):
            raise ValueError("give either tp (one node), or both prefill and decode (several)")
        if self.tp is not None:
            _check_context_parallel(self.tp, self.dcp_size)
        elif self.model_fields_set & {"pp", "dcp_size", "pcp_size"}:
            raise ValueError("pp, dcp-size and pcp-size belong into prefill and decode")
        if self.prefill and self.decode and bool(self.prefill.hardware) != bool(self.decode.hardware):
            raise ValueError("give hardware for both prefill and decode, or for neither")
        return self

    @model_validator(mode="after")
    def _range_or_list(self) -> "SearchSpaceEntry":
        ranged = (self.conc_start is not None, self.conc_end is not None)
        if any(ranged) == bool(self.conc_list) or any(ranged) != all(ranged):
            raise ValueError("give either conc-list, or both conc-start and conc-end")
        if self.conc_start is not None and self.conc_end is not None and self.conc_start > self.conc_end:
            raise ValueError(f"conc-start {self.conc_start} is above conc-end {self.conc_end}")
        if self.conc_list and min(self.conc_list) < 1:
            raise ValueError("a concurrency is at least 1")
        return self

    @property
    def concurrencies(self) -> tuple[int, ...]:
        """Return the list as it is, or the range: doubled each step, and always ending at conc-end."""
        if self.conc_list:
            return self.conc_list
        assert self.conc_start is not None
        assert self.conc_end is not None
        steps = []
        conc = self.conc_start
        while conc < self.conc_end:
            steps.append(conc)
            conc *= 2
        return (*steps, self.conc_end)


class AgenticEntry(SearchSpaceEntry):
    """One line of an agentic search space."""

    kv_offloading: Literal["none", "dram"] | None = None
    kv_offload_backend: Component | None = None

    @model_validator(mode="after")
    def _backend_iff_offloading(self) -> "AgenticEntry":
        if self.tp is not None and self.kv_offloading is None:
            raise ValueError("kv-offloading is missing; allowed: none, dram")
        if self.kv_offloading == "dram" and self.kv_offload_backend is None:
            raise ValueError("kv-offload-backend is required with kv-offloading: dram")
        if self.kv_offloading != "dram" and self.kv_offload_backend is not None:
            raise ValueError(f"kv-offload-backend is not allowed with kv-offloading: {self.kv_offloading or 'none'}")
        return self


class AgenticScenario(Kebab):
    """The agentic-coding scenario of one config key."""

    dram_utilization: float | None = Field(default=None, gt=0, le=1)
    """Share of a node's host memory that offload tiers may take, all GPUs of the node in use."""
    search_space: tuple[AgenticEntry, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _budget_declared(self) -> "AgenticScenario":
        if self.dram_utilization is None and any(line.kv_offloading == "dram" for line in self.search_space):
            raise ValueError("kv-offloading: dram needs a dram-utilization")
        return self


class FixedScenario(Kebab):
    """One sequence length of the fixed-seq-len scenario of one config key."""

    isl: int = Field(gt=0)
    osl: int = Field(gt=0)
    search_space: tuple[SearchSpaceEntry, ...] = Field(min_length=1)


class Scenarios(Kebab):
    """The scenarios of one config key."""

    fixed_seq_len: tuple[FixedScenario, ...] = ()
    agentic_coding: tuple[AgenticScenario, ...] = ()

    @model_validator(mode="after")
    def _any(self) -> "Scenarios":
        if not self.fixed_seq_len and not self.agentic_coding:
            raise ValueError("give agentic-coding, fixed-seq-len, or both")
        return self


class SearchSpace(Kebab):
    """One config key of a *-master.yaml."""

    image: str
    model: str
    model_prefix: str
    runner: str
    precision: str
    framework: str
    multinode: bool
    disagg: bool = False
    router: Router | None = None
    """For every line; a line may not name one of its own then."""
    kv_p2p_transfer: str | None = Field(default=None, min_length=1)
    scenarios: Scenarios

    @model_validator(mode="after")
    def _consistent(self) -> "SearchSpace":
        lines = [line for _, _, line in self.lines()]
        if self.scenarios.agentic_coding and not self.runner.startswith(CLUSTER_LABEL):
            raise ValueError(f"runner {self.runner!r}: agentic-coding needs one cluster, written {CLUSTER_LABEL}<name>")
        if any((line.tp is None) != self.multinode for line in lines):
            wanted = "prefill and decode" if self.multinode else "tp"
            raise ValueError(f"multinode: {str(self.multinode).lower()} needs {wanted} in every line of search-space")
        for name in ("router", "kv_p2p_transfer"):
            if getattr(self, name) is not None and any(getattr(line, name) is not None for line in lines):
                key = name.replace("_", "-")
                raise ValueError(f"{key} stands here and in a line of search-space; keep one of the two")
        transfers = [self.kv_p2p_transfer or line.kv_p2p_transfer for line in lines]
        if not self.multinode and (self.disagg or any(transfers)):
            raise ValueError("disagg and kv-p2p-transfer need multinode: true")
        if self.disagg and not all(transfers):
            raise ValueError("disagg: true needs kv-p2p-transfer, here or in every line of search-space")
        return self

    def lines(self) -> list[tuple[ScenarioType, tuple[int, int], SearchSpaceEntry]]:
        """Return every line with its scenario and its place: (index in the scenario, index in search-space)."""
        scenarios: list[tuple[ScenarioType, tuple[FixedScenario | AgenticScenario, ...]]] = [
            ("fixed-seq-len", self.scenarios.fixed_seq_len),
            ("agentic-coding", self.scenarios.agentic_coding),
        ]
        return [
            (kind, (i, j), line)
            for kind, listed in scenarios
            for i, scenario in enumerate(listed)
            for j, line in enumerate(scenario.search_space)
        ]


@dataclass(frozen=True)
class Master:
    """All search spaces of the *-master.yaml files, unchecked until an entry selects them."""

    places: dict[str, tuple[Path, Any]]
    """Config key -> file and its loaded data."""
    _checked: dict[str, SearchSpace] = field(default_factory=dict, init=False, repr=False, compare=False)

    def search_space(self, key: str) -> SearchSpace:
        """Check and return one config key; raises InputError with file and line."""
        if key not in self._checked:
            path, data = self.places[key]
            self._checked[key] = yamlfile.validate(SearchSpace, data, path, (key,))
        return self._checked[key]

    def line(self, key: str, *location: int | str) -> int:
        """Return the line of a part of a config key."""
        return yamlfile.line_of(self.places[key][1], (key, *location)) or 1

    def plain(self, key: str) -> Any:
        """Return the data of a config key, for comparing it with another version's."""
        return self.places[key][1][key]


@dataclass(frozen=True)
class Configs:
    """The search spaces and hardware facts of one revision."""

    master: Master
    runners: Runners


def configs_at(root: Path, revision: str, masters: Sequence[str], runners: str) -> Configs:
    """Read search spaces and hardware facts as they were at a git revision; an append-only entry is held against them.

    The paths are relative to the checkout `root`. Raises InputError as `file_at` and the loaders do.
    """
    texts = [(Path(f"{path}@{revision}"), file_at(root, revision, path)) for path in masters]
    facts = parse_runners(Path(f"{runners}@{revision}"), file_at(root, revision, runners))
    return Configs(parse_master(texts), facts)


def load_master(paths: list[Path]) -> Master:
    """Read *-master.yaml files; raises InputError for a key that stands in two of them."""
    return parse_master([(path, yamlfile.read_bytes(path)) for path in paths])


def parse_master(files: list[tuple[Path, bytes]]) -> Master:
    """Parse the texts of *-master.yaml files; the paths are only what errors call them."""
    places: dict[str, tuple[Path, Any]] = {}
    for path, text in files:
        data = yamlfile.parse_lazily(text, path)
        if not isinstance(data, yamlfile.Sections):
            raise InputError("the file holds no config keys", file=path, line=1, allowed="a mapping of config keys")
        for key in data:
            if not isinstance(key, str) or "*" in key:
                raise InputError(f"{key!r} cannot be a config key", file=path, line=data.lines[key], do="rename it")
            if key in places:
                raise InputError(f"config key {key!r} is also in {places[key][0]}", file=path, line=data.lines[key])
            places[key] = (path, data)
    return Master(places)


def load_runners(path: Path) -> Runners:
    """Read runners.yaml."""
    return parse_runners(path, yamlfile.read_bytes(path))


def parse_runners(path: Path, text: bytes) -> Runners:
    """Parse the text of runners.yaml; `path` is only what errors call it."""
    data = yamlfile.parse(text, path)
    if not isinstance(data, AnyMapping):
        raise InputError("the file is not a mapping", file=path, line=1, allowed="labels, hardware")
    return yamlfile.validate(Runners, data, path)


def resolve_keys(entry: LoggedEntry, master: Master) -> list[str]:
    """Return the config keys of an entry, wildcards expanded, order kept; raises InputError for one without a match."""
    keys: dict[str, None] = {}
    for pattern in entry.entry.config_keys:
        if pattern in master.places:
            keys[pattern] = None
            continue
        regex = re.compile(".*".join(re.escape(part) for part in pattern.split("*")))
        found = [key for key in master.places if regex.fullmatch(key)]
        if not found:
            close = difflib.get_close_matches(pattern, list(master.places), n=1)
            raise InputError(
                f"{pattern!r} matches no config key",
                file=entry.file,
                line=entry.line,
                key="config-keys",
                allowed=", ".join(sorted(master.places)) if len(master.places) <= 12 else f"{len(master.places)} keys",
                do=f"did you mean {close[0]!r}?" if close else None,
            )
        keys.update(dict.fromkeys(found))
    return list(keys)


def dram_budget_gb(hardware: Hardware, utilization: float, gpus: int) -> int:
    """Return the host memory of an offload tier in decimal GB, as InferenceX computes it.

    floor(min(available MiB, 2861022) * 1048576 * dram-utilization * gpus / gpus per node / 1e9)
    """
    # Exact: in floats 0.57 * 100 is 56.99 and more, and the floor would take a whole GB away.
    share, whole = Decimal(str(utilization)).as_integer_ratio()
    available = min(hardware.available_cpu_dram_mib, DRAM_CAP_MIB) * 1_048_576
    return available * share * gpus // (whole * hardware.gpus_per_node * 1_000_000_000)


def gpus_on_one_node(worker: Worker, gpus_per_node: int) -> int:
    """Return how many GPUs of one node a worker takes; its share of the node's memory follows from that.

    Raises ValueError for a worker that fills nodes only in part: neighbours would share the rest in unknown ways.
    """
    gpus = worker.tp * worker.pp * worker.pcp_size
    if gpus % gpus_per_node and gpus_per_node % gpus:
        raise ValueError(f"a worker of {gpus} GPUs does not tile nodes of {gpus_per_node}")
    return min(gpus, gpus_per_node)


def _check_context_parallel(tp: int, dcp_size: int) -> None:
    if tp % dcp_size:
        raise ValueError(f"tp {tp} is not a multiple of dcp-size {dcp_size}")
